"""A controller on a stage: short names for events, and pools that do what they are told to retain and to expect."""

import itertools
from collections.abc import Sequence
from typing import Any

from rollout.config import AbortConfig, GroupsConfig, ResumeConfig, WeightsConfig
from rollout.control.aborts import AbortTicket
from rollout.control.commands import Command, Expect, Export, KeepThere, Recall, Release, Retain, Start, Stop
from rollout.control.controller import Controller
from rollout.control.messages import (
    Admitted,
    Displaced,
    Event,
    Exported,
    ExportFailed,
    Failed,
    Finished,
    Freed,
    Moved,
    Parked,
    Preempted,
    Recalled,
    RestoreFailed,
    Sampled,
    WorkerDown,
    WorkerEvent,
    WorkerReport,
    WorkerUp,
)
from rollout.control.records import Record
from rollout.control.submission import Submission
from rollout.types import (
    AbortReason,
    Columns,
    Delivery,
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
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
    WorkerId,
)
from tests.weights import WEIGHTS, written

W1, W2, W3 = WorkerId("w1"), WorkerId("w2"), WorkerId("w3")
NODES = {W1: NodeId("n1"), W2: NodeId("n2"), W3: NodeId("n2")}
T, U = TrajectoryId("g/0"), TrajectoryId("g/1")
PROMPT = (1, 2, 3, 4, 5)
CONTEXT = 64
V = Version(0)


def columns(offset: int, count: int) -> Columns:
    """Tokens `offset`… of a trajectory: token i is 100 + i."""
    return Columns(
        [100 + i for i in range(offset, offset + count)], [-i / 8 for i in range(offset, offset + count)], [V] * count
    )


def submission(
    group: str = "g", *, n: int = 1, budget: int = 8, prompt: Sequence[int] = PROMPT, **options: Any
) -> Submission:
    return Submission(
        group_id=GroupId(group),
        prompt_ids=tuple(prompt),
        sampling=(SamplingParams(max_new_tokens=budget),) * n,
        seeds=tuple(range(n)),
        metadata={"key": group},
        **options,
    )


def image(kv_tokens: int, *segments: str, node: str = "n1") -> Image:
    """An image of one page a segment."""
    runs = tuple(SegmentRun(node=NodeId(node), segment=SegmentId(name), first=0, pages=1) for name in segments)
    return Image(runs=runs, kv_tokens=kv_tokens, written=written(kv_tokens))


def admitted(t: TrajectoryId = T, epoch: int = 1, *, cached: int = 0, restored: int = 0, again: int = 0) -> Admitted:
    return Admitted(
        trajectory_id=t,
        epoch=epoch,
        cached_tokens=cached,
        restored_tokens=restored,
        recomputed_tokens=again,
        written=written(cached + restored),
    )


def sampled(t: TrajectoryId = T, epoch: int = 1, *, offset: int = 0, count: int = 1) -> Sampled:
    return Sampled(trajectory_id=t, epoch=epoch, offset=offset, columns=columns(offset, count))


def parked(t: TrajectoryId = T, epoch: int = 1, *, kv: int, reason: AbortReason | None = None) -> Parked:
    return Parked(
        trajectory_id=t,
        epoch=epoch,
        kv_tokens=kv,
        prompt_pages=1,
        page_keys=tuple(bytes([i]) for i in range(kv // 4)),
        written=written(kv),
        reason=reason,
    )


def recalled(t: TrajectoryId = T, epoch: int = 1, *, kv: int) -> Recalled:
    told = parked(t, epoch, kv=kv)
    return Recalled(
        trajectory_id=t,
        epoch=epoch,
        kv_tokens=kv,
        prompt_pages=told.prompt_pages,
        page_keys=told.page_keys,
        written=told.written,
    )


def moved(t: TrajectoryId = T, epoch: int = 1, *, where: Keep, kv: int = 7, error: str | None = None) -> Moved:
    return Moved(trajectory_id=t, epoch=epoch, where=where, kv_tokens=kv, error=error)


def preempted(t: TrajectoryId = T, epoch: int = 1) -> Preempted:
    return Preempted(trajectory_id=t, epoch=epoch)


def restore_failed(
    t: TrajectoryId = T, epoch: int = 1, *, segment: str | None = None, node: str = "n1"
) -> RestoreFailed:
    """`segment` is the one to blame, if it is known."""
    blamed = (NodeId(node), SegmentId(segment)) if segment is not None else (None, None)
    return RestoreFailed(trajectory_id=t, epoch=epoch, error="damaged", node=blamed[0], segment=blamed[1])


def finished(t: TrajectoryId = T, epoch: int = 1, *, reason: FinishReason = FinishReason.STOP) -> Finished:
    return Finished(trajectory_id=t, epoch=epoch, reason=reason)


def failed(t: TrajectoryId = T, epoch: int = 1) -> Failed:
    return Failed(trajectory_id=t, epoch=epoch, error="PromptTooLongError: 5 tokens")


def freed(t: TrajectoryId = T, epoch: int = 1, *, exclusive: int, freed: int) -> Freed:
    return Freed(trajectory_id=t, epoch=epoch, exclusive_pages=exclusive, freed_pages=freed)


def exported(
    made: Image, t: TrajectoryId = T, epoch: int = 1, *, sent: int = 0, displaced: Sequence[Displaced] = ()
) -> Exported:
    return Exported(trajectory_id=t, epoch=epoch, image=made, sent_bytes=sent, displaced=tuple(displaced))


def export_failed(t: TrajectoryId = T, epoch: int = 1, *, displaced: Sequence[Displaced] = ()) -> ExportFailed:
    return ExportFailed(trajectory_id=t, epoch=epoch, error="the pool is full", displaced=tuple(displaced))


def displaced(t: TrajectoryId, *segments: str) -> Displaced:
    return Displaced(trajectory_id=t, segments=frozenset(SegmentId(name) for name in segments))


def retain(*segments: str, t: TrajectoryId = T, node: str = "n1") -> Retain:
    return Retain(node=NodeId(node), trajectory_id=t, segments=frozenset(SegmentId(name) for name in segments))


def release(worker: WorkerId = W1, t: TrajectoryId = T, epoch: int = 1) -> Release:
    return Release(worker=worker, trajectory_id=t, epoch=epoch)


def stop(worker: WorkerId = W1, t: TrajectoryId = T, epoch: int = 1) -> Stop:
    return Stop(worker=worker, trajectory_id=t, epoch=epoch)


def keep_there(where: Keep, worker: WorkerId = W1, t: TrajectoryId = T, epoch: int = 1) -> KeepThere:
    return KeepThere(worker=worker, trajectory_id=t, epoch=epoch, where=where)


def recall(worker: WorkerId = W1, t: TrajectoryId = T, epoch: int = 1) -> Recall:
    return Recall(worker=worker, trajectory_id=t, epoch=epoch)


class Scene:
    """A controller and the time. Every call returns the commands that it led to, but those of `turns`."""

    def __init__(
        self,
        *workers: WorkerId,
        size: int | None = None,
        slice_tokens: int | None = None,
        policies: Sequence[dict[str, Any]] = (),
        keep: Keep = Keep.POOL,
        prefer_other: bool = False,
        resume: ResumeConfig | None = None,
        groups: GroupsConfig | None = None,
        room: int = 4,
    ) -> None:
        """`policies` as in a configuration; `slice_tokens` adds one that slices, and `prefer_other` is of `resume`."""
        sliced = [{"kind": "slice_budget", "tokens": slice_tokens}] if slice_tokens is not None else []
        self.controller = Controller(
            workers=size or len(workers),
            max_context=CONTEXT,
            weights=WEIGHTS,
            abort=AbortConfig.model_validate({"keep": str(keep), "policies": (*sliced, *policies)}),
            resume=resume or ResumeConfig(prefer="other" if prefer_other else "cheapest"),
            groups=groups or GroupsConfig(),
            versions=WeightsConfig(),
        )
        self.now = 0.0
        self.calls = itertools.count(1)
        self.retained: dict[tuple[NodeId, TrajectoryId], frozenset[SegmentId]] = {}
        self.turns: dict[tuple[NodeId, TrajectoryId], Turn] = {}
        """What the pools were told last, by exports and `Expect`."""
        self.expects = 0
        """How often they were told by the latter."""
        for worker in workers:
            self.up(worker, room=room)

    def handle(self, event: Event) -> list[Command]:
        self.now += 1.0
        return self._fold(self.controller.handle(event, self.now))

    def submit(self, group: str = "g", *, n: int = 1, budget: int = 8) -> list[Command]:
        return self.submit_all(submission(group, n=n, budget=budget))

    def submit_all(self, *submissions: Submission) -> list[Command]:
        self.now += 1.0
        return self._fold(self.controller.submit(submissions, self.now))

    def abort(self, *ids: str, keep: Keep = Keep.AUTO, then: Then = Then.HOLD) -> list[Command]:
        """`T`, if no ids are given."""
        return self.open_abort(*ids, keep=keep, then=then)[1]

    def open_abort(
        self, *ids: str, keep: Keep = Keep.AUTO, then: Then = Then.HOLD
    ) -> tuple[AbortTicket, list[Command]]:
        self.now += 1.0
        ticket, commands = self.controller.abort(ids or (T,), keep, then, self.now)
        return ticket, self._fold(commands)

    def resume(self, *ids: str) -> list[Command]:
        """`T`, if no ids are given."""
        self.now += 1.0
        _, commands = self.controller.resume(ids or (T,), self.now)
        return self._fold(commands)

    def take(self, count: int) -> list[Delivery]:
        """By a call of its own."""
        return self.controller.take(count, f"call {next(self.calls)}")

    def up(self, worker: WorkerId, incarnation: str = "a", *, room: int = 4) -> list[Command]:
        return self.handle(WorkerUp(worker=worker, node=NODES[worker], incarnation=incarnation, max_running=room))

    def down(self, worker: WorkerId, incarnation: str = "a", *, final: bool = False) -> list[Command]:
        return self.handle(
            WorkerDown(worker=worker, incarnation=incarnation, error=f"{worker} was killed", final=final)
        )

    def report(self, worker: WorkerId, *events: WorkerEvent, incarnation: str = "a") -> list[Command]:
        return self.handle(WorkerReport(worker=worker, incarnation=incarnation, events=events))

    def record(self, t: TrajectoryId = T) -> Record:
        (record,), _ = self.controller.resolve([t])
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
            if isinstance(command, Expect | Export):
                self.turns[command.node, command.trajectory_id] = command.turn
                self.expects += isinstance(command, Expect)
        self.retained = {key: segments for key, segments in self.retained.items() if segments}
        return [command for command in commands if not isinstance(command, Expect)]


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


def only_trajectory(scene: Scene) -> Trajectory:
    (delivery,) = scene.take(9)
    (trajectory,) = delivery.trajectories
    return trajectory


def decoding(*, worker_count: int = 2, tokens: int = 3, **options: object) -> Scene:
    """A scene in which `T` decodes on w1 and has sampled `tokens` tokens."""
    scene = Scene(W1, **options)  # type: ignore[arg-type]
    scene.submit()
    scene.report(W1, admitted(), sampled(count=tokens))
    for worker in (W2,)[: worker_count - 1]:
        scene.up(worker)
    return scene


def suspending(**options: object) -> Scene:
    """A scene in which the export of `T` from w1 is under way, after three tokens; it will be held."""
    scene = decoding(**options)  # type: ignore[arg-type]
    scene.abort()
    only_export(scene.report(W1, parked(kv=7)))
    return scene


def suspended(**options: object) -> Scene:
    """A scene in which `T` is held, with an image in segments a and b."""
    scene = suspending(**options)
    scene.handle(exported(image(7, "a", "b")))
    return scene


def resumed(**options: object) -> Scene:
    """A scene in which `T` was started again from its image, as epoch 2, on w1, the only worker."""
    scene = suspended(worker_count=1, **options)
    assert starts(scene.resume()) == [(W1, T, 2)]
    return scene


def keeping(where: Keep, *, then: Then = Then.HOLD, **options: object) -> Scene:
    """A scene in which `T` was parked on w1 after three tokens and is told to be kept there."""
    scene = decoding(**options)  # type: ignore[arg-type]
    scene.abort(keep=where, then=then)
    assert scene.report(W1, parked(kv=7)) == [keep_there(where)]
    return scene


def at_home(where: Keep, **options: object) -> Scene:
    """A scene in which `T` is held, with its KV on w1."""
    scene = keeping(where, **options)
    assert scene.report(W1, moved(where=where)) == []
    return scene
