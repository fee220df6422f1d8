"""A controller on a stage: short names for events, and pools that do what they are told to retain."""

from collections.abc import Sequence

from rollout.control.controller import Controller
from rollout.control.messages import (
    AbortRequested,
    Admitted,
    Command,
    Event,
    Export,
    Exported,
    ExportFailed,
    Failed,
    Finished,
    Freed,
    Parked,
    ParkReason,
    Preempted,
    Release,
    RestoreFailed,
    ResumeRequested,
    Retain,
    Sampled,
    Start,
    Stop,
    WorkerDown,
    WorkerEvent,
    WorkerReport,
    WorkerUp,
)
from rollout.control.records import Record, Submission
from rollout.types import (
    Columns,
    FinishReason,
    GroupId,
    Image,
    Keep,
    NodeId,
    Phase,
    SamplingParams,
    SegmentId,
    SegmentRun,
    Then,
    TrajectoryId,
    Version,
    WorkerId,
)

W1, W2, W3 = WorkerId("w1"), WorkerId("w2"), WorkerId("w3")
NODES = {W1: NodeId("n1"), W2: NodeId("n2"), W3: NodeId("n2")}
T = TrajectoryId("g/0")
PROMPT = (1, 2, 3, 4, 5)
V = Version(0)


def columns(offset: int, count: int) -> Columns:
    """Tokens `offset`… of a trajectory: token i is 100 + i."""
    return Columns(
        [100 + i for i in range(offset, offset + count)], [-i / 8 for i in range(offset, offset + count)], [V] * count
    )


def submission(group: str = "g", *, n: int = 1, budget: int = 8, prompt: Sequence[int] = PROMPT) -> Submission:
    return Submission(
        group_id=GroupId(group),
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_new_tokens=budget),
        seeds=tuple(range(n)),
        metadata={"key": group},
    )


def image(kv_tokens: int, *segments: str, node: str = "n1") -> Image:
    """An image of one page a segment."""
    runs = tuple(SegmentRun(node=NodeId(node), segment=SegmentId(name), first=0, pages=1) for name in segments)
    return Image(runs=runs, kv_tokens=kv_tokens)


def admitted(t: TrajectoryId = T, epoch: int = 1, *, cached: int = 0, restored: int = 0, again: int = 0) -> Admitted:
    return Admitted(
        trajectory_id=t, epoch=epoch, cached_tokens=cached, restored_tokens=restored, recomputed_tokens=again
    )


def sampled(t: TrajectoryId = T, epoch: int = 1, *, offset: int = 0, count: int = 1) -> Sampled:
    return Sampled(trajectory_id=t, epoch=epoch, offset=offset, columns=columns(offset, count))


def parked(t: TrajectoryId = T, epoch: int = 1, *, kv: int, reason: ParkReason = ParkReason.ABORT) -> Parked:
    return Parked(
        trajectory_id=t,
        epoch=epoch,
        reason=reason,
        kv_tokens=kv,
        prompt_pages=1,
        page_keys=tuple(bytes([i]) for i in range(kv // 4)),
    )


def preempted(t: TrajectoryId = T, epoch: int = 1) -> Preempted:
    return Preempted(trajectory_id=t, epoch=epoch)


def restore_failed(t: TrajectoryId = T, epoch: int = 1) -> RestoreFailed:
    return RestoreFailed(trajectory_id=t, epoch=epoch, error="damaged")


def finished(t: TrajectoryId = T, epoch: int = 1, *, reason: FinishReason = FinishReason.STOP) -> Finished:
    return Finished(trajectory_id=t, epoch=epoch, reason=reason)


def failed(t: TrajectoryId = T, epoch: int = 1) -> Failed:
    return Failed(trajectory_id=t, epoch=epoch, error="PromptTooLongError: 5 tokens")


def freed(t: TrajectoryId = T, epoch: int = 1, *, exclusive: int, freed: int) -> Freed:
    return Freed(trajectory_id=t, epoch=epoch, exclusive_pages=exclusive, freed_pages=freed)


def exported(made: Image, t: TrajectoryId = T, epoch: int = 1, *, sent: int = 0) -> Exported:
    return Exported(trajectory_id=t, epoch=epoch, image=made, sent_bytes=sent)


def export_failed(t: TrajectoryId = T, epoch: int = 1) -> ExportFailed:
    return ExportFailed(trajectory_id=t, epoch=epoch, error="the pool is full")


def abort(*ids: TrajectoryId, keep: Keep = Keep.AUTO, then: Then = Then.HOLD) -> AbortRequested:
    return AbortRequested(trajectory_ids=ids or (T,), keep=keep, then=then)


def resume(*ids: TrajectoryId) -> ResumeRequested:
    return ResumeRequested(trajectory_ids=ids or (T,))


def retain(*segments: str, t: TrajectoryId = T, node: str = "n1") -> Retain:
    return Retain(node=NodeId(node), trajectory_id=t, segments=frozenset(SegmentId(name) for name in segments))


def release(worker: WorkerId = W1, t: TrajectoryId = T, epoch: int = 1) -> Release:
    return Release(worker=worker, trajectory_id=t, epoch=epoch)


def stop(worker: WorkerId = W1, t: TrajectoryId = T, epoch: int = 1) -> Stop:
    return Stop(worker=worker, trajectory_id=t, epoch=epoch)


class Scene:
    """A controller and the time. Every call returns the commands that it led to."""

    def __init__(
        self,
        *workers: WorkerId,
        size: int | None = None,
        slice_tokens: int | None = None,
        keep: Keep = Keep.AUTO,
        prefer_other: bool = False,
        room: int = 4,
    ) -> None:
        self.controller = Controller(
            workers=size or len(workers), slice_tokens=slice_tokens, keep=keep, prefer_other=prefer_other
        )
        self.now = 0.0
        self.retained: dict[tuple[NodeId, TrajectoryId], frozenset[SegmentId]] = {}
        for worker in workers:
            self.up(worker, room=room)

    def handle(self, event: Event) -> list[Command]:
        self.now += 1.0
        return self._fold(self.controller.handle(event, self.now))

    def submit(self, group: str = "g", *, n: int = 1, budget: int = 8) -> list[Command]:
        self.now += 1.0
        return self._fold(self.controller.submit(submission(group, n=n, budget=budget), self.now))

    def up(self, worker: WorkerId, incarnation: str = "a", *, room: int = 4) -> list[Command]:
        return self.handle(WorkerUp(worker=worker, node=NODES[worker], incarnation=incarnation, max_running=room))

    def down(self, worker: WorkerId, incarnation: str = "a", *, final: bool = False) -> list[Command]:
        return self.handle(
            WorkerDown(worker=worker, incarnation=incarnation, error=f"{worker} was killed", final=final)
        )

    def report(self, worker: WorkerId, *events: WorkerEvent, incarnation: str = "a") -> list[Command]:
        return self.handle(WorkerReport(worker=worker, incarnation=incarnation, events=events))

    def record(self, t: TrajectoryId = T) -> Record:
        record = self.controller.record(t)
        assert record is not None, t
        return record

    @property
    def trajectories(self) -> list[TrajectoryId]:
        """All that were not handed out."""
        return [record.trajectory_id for record in self.controller.resolve(None)[0]]

    def phase(self, t: TrajectoryId = T) -> Phase:
        return self.record(t).phase

    def _fold(self, commands: list[Command]) -> list[Command]:
        for command in commands:
            if isinstance(command, Retain):
                self.retained[command.node, command.trajectory_id] = command.segments
        self.retained = {key: segments for key, segments in self.retained.items() if segments}
        return commands


def starts(commands: Sequence[Command]) -> list[tuple[WorkerId, TrajectoryId, int]]:
    """Worker, trajectory and epoch of every start."""
    return [
        (command.worker, command.assignment.trajectory_id, command.assignment.epoch)
        for command in commands
        if isinstance(command, Start)
    ]


def only_start(commands: Sequence[Command]) -> Start:
    (start,) = (command for command in commands if isinstance(command, Start))
    return start


def only_export(commands: Sequence[Command]) -> Export:
    (export,) = commands
    assert isinstance(export, Export)
    return export
