"""The controller: events in, commands out, no clock and no Ray.

Owns every trajectory from submission to delivery. Tokens arrive by worker reports and are the truth;
what workers and pools hold is a cache of them. Invariants:

1. A trajectory is in the queue if and only if it is `queued`, in a worker's set if and only if it is on that worker.
2. Events of an epoch that is over change nothing.
3. Whatever leaves a worker parked is released exactly once, after its export was answered.
4. The pools retain exactly the segments of live images.
"""

from collections import Counter
from collections.abc import Sequence

from rollout.control.fleet import Fleet, Worker
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
from rollout.control.records import Groups, Intent, Record, Submission
from rollout.metrics import RolloutCounters
from rollout.types import (
    Delivery,
    FinishReason,
    Image,
    Keep,
    NodeId,
    Phase,
    Resume,
    SegmentId,
    Then,
    TrajectoryId,
)


class Controller:
    """Decides what runs where, and what becomes of what stopped."""

    def __init__(self, *, workers: int, slice_tokens: int | None, keep: Keep, prefer_other: bool) -> None:
        """`workers` is how many there are when all are up."""
        self._slice_tokens = slice_tokens
        self._slice_intent = Intent(keep=keep, then=Then.REQUEUE)
        self._fleet = Fleet(size=workers, prefer_other=prefer_other)
        self._groups = Groups()
        self._tally: Counter[str] = Counter()

    # What drivers ask ---------------------------------------------------------------------------------

    def submit(self, submission: Submission, now: float) -> list[Command]:
        """Take a group in.

        Raises `DuplicateKeyError` if a group of that id was not handed out yet.
        """
        group = self._groups.add(submission, now)
        self._tally["trajectories"] += len(group)
        commands: list[Command] = []
        for record in group:
            commands += self._enqueue(record, now)
        return commands + self._dispatch()

    def take(self, count: int) -> list[Delivery]:
        """Up to `count` finished groups, in the order they finished; they are forgotten here."""
        return self._groups.take(count)

    def record(self, trajectory_id: TrajectoryId) -> Record | None:
        return self._groups.get(trajectory_id)

    def resolve(self, ids: Sequence[str] | None) -> tuple[list[Record], tuple[TrajectoryId, ...]]:
        """The trajectories that `ids` name, a group's id standing for its members, and the ids that name none.

        None names all that were not handed out.
        """
        return self._groups.resolve(ids)

    @property
    def complete_groups(self) -> int:
        """Finished groups that were not taken."""
        return self._groups.complete

    @property
    def live_groups(self) -> int:
        """Groups that were not taken, finished or not."""
        return self._groups.live

    @property
    def phases(self) -> dict[Phase, int]:
        return dict(Counter(record.phase for record in self._groups.records()))

    @property
    def counters(self) -> RolloutCounters:
        return RolloutCounters(**self._tally)

    # What happens -------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take an event in; returns what to do about it. An event that arrives twice changes nothing.

        Only `Freed`, which may come when its trajectory is forgotten, and a preemption in one report with an
        admission are counted as often as they are told.
        """
        match event:
            case WorkerReport():
                commands = self._report(event, now)
            case WorkerUp():
                commands = self._worker_up(event, now)
            case WorkerDown():
                commands = self._worker_down(event, now)
            case Exported():
                commands = self._exported(event, now)
            case ExportFailed():
                commands = self._export_failed(event, now)
            case AbortRequested():
                commands = self._abort(event, now)
            case ResumeRequested():
                commands = self._resume(event, now)
        return commands + self._dispatch()

    def _report(self, report: WorkerReport, now: float) -> list[Command]:
        worker = self._fleet.get(report.worker)
        commands: list[Command] = []
        for event in report.events:
            if isinstance(event, Freed):
                self._tally["releases"] += 1
                self._tally["exclusive_pages"] += event.exclusive_pages
                self._tally["freed_pages"] += event.freed_pages
                continue
            record = self._groups.get(event.trajectory_id)
            current = worker is not None and worker.incarnation == report.incarnation
            if current and record is not None and record.on_worker and record.epoch == event.epoch:
                commands += self._progress(record, event, now)
        return commands

    def _progress(self, record: Record, event: WorkerEvent, now: float) -> list[Command]:
        match event:
            case Sampled():
                self._sampled(record, event)
            case Admitted():
                self._admitted(record, event)
            case Preempted():
                self._preempted(record)
            case RestoreFailed():
                self._tally["restore_failures"] += 1
                return self._set_image(record, None)
            case Finished():
                self._fleet.leave(record)
                return self._end(record, event.reason, now)
            case Failed():
                self._fleet.leave(record)
                return self._fail(record, event.error, now)
            case Parked():
                return self._parked(record, event, now)
        return []

    def _sampled(self, record: Record, event: Sampled) -> None:
        known = len(record.columns) - event.offset
        assert known >= 0, (
            f"{record.trajectory_id}: tokens from {event.offset} on, but only {len(record.columns)} known"
        )
        news = event.columns.since(known)
        if not news:
            return
        record.columns.extend(news)
        self._tally["tokens"] += len(news)
        if record.phase is not Phase.DECODING:
            record.enter(Phase.DECODING)

    def _preempted(self, record: Record) -> None:
        if record.phase is not Phase.PREEMPTED:
            self._tally["preemptions"] += 1
            record.enter(Phase.PREEMPTED)

    def _admitted(self, record: Record, event: Admitted) -> None:
        first = record.admitted_epoch != record.epoch
        if not first and record.phase is not Phase.PREEMPTED:
            return
        record.admitted_epoch = record.epoch
        self._tally["recomputed_tokens"] += event.recomputed_tokens
        known = len(record.prompt_ids) + len(record.columns)
        whole = event.cached_tokens + event.restored_tokens >= known - 1 > 0
        phase = Phase.DECODING if whole else Phase.PREFILLING
        if record.phase is not phase:
            record.enter(phase)
        if not first or len(record.workers) == 1:
            return
        self._tally["restored_tokens"] += event.restored_tokens
        self._tally["cached_tokens"] += event.cached_tokens
        record.resumes.append(
            Resume(
                worker=record.workers[-1],
                cached_tokens=event.cached_tokens,
                restored_tokens=event.restored_tokens,
                recomputed_tokens=event.recomputed_tokens,
            )
        )

    def _parked(self, record: Record, event: Parked, now: float) -> list[Command]:
        worker = self._fleet.leave(record)
        intent = record.intent or self._slice_intent
        record.intent = intent
        record.kv_tokens = max(record.kv_tokens, event.kv_tokens)
        record.suspensions += 1
        self._tally["suspensions"] += 1
        record.enter(Phase.SUSPENDING)
        release = self._release(record)
        covered = record.image.kv_tokens if record.image is not None else 0
        if event.kv_tokens <= covered or intent.keep is Keep.NONE or intent.then is Then.FINISH:
            return [release, *self._settle(record, now)]
        record.nodes.add(worker.node)
        return [
            Export(
                worker=worker.worker_id,
                node=worker.node,
                trajectory_id=record.trajectory_id,
                epoch=record.epoch,
                kv_tokens=event.kv_tokens,
                prompt_pages=event.prompt_pages,
                page_keys=event.page_keys,
                base=record.image,
            )
        ]

    def _exported(self, event: Exported, now: float) -> list[Command]:
        record = self._suspending(event.trajectory_id, event.epoch)
        if record is None:
            return self._exported_too_late(event)
        self._tally["exported_bytes"] += event.sent_bytes
        return [self._release(record), *self._set_image(record, event.image), *self._settle(record, now)]

    def _exported_too_late(self, event: Exported) -> list[Command]:
        """Nobody wants this image, or it was told before. A later export is told of with what that retains."""
        record = self._groups.get(event.trajectory_id)
        nodes = {run.node for run in event.image.runs}
        if record is None:
            return _retain(event.trajectory_id, nodes, None)
        if record.image == event.image:
            return []
        record.nodes |= nodes
        return self._set_image(record, record.image) if record.phase is not Phase.SUSPENDING else []

    def _export_failed(self, event: ExportFailed, now: float) -> list[Command]:
        record = self._suspending(event.trajectory_id, event.epoch)
        if record is None:
            return []
        self._tally["export_failures"] += 1
        return [self._release(record), *self._settle(record, now)]

    def _abort(self, event: AbortRequested, now: float) -> list[Command]:
        commands: list[Command] = []
        for trajectory_id in event.trajectory_ids:
            record = self._groups.get(trajectory_id)
            if record is None or record.over:
                continue
            if record.on_worker and record.intent is None:
                worker = record.workers[-1]
                commands.append(Stop(worker=worker, trajectory_id=trajectory_id, epoch=record.epoch))
            record.intent = Intent(keep=event.keep, then=event.then)
            if record.phase is Phase.QUEUED:
                self._fleet.dequeue(record)
                record.enter(Phase.SUSPENDED)
            if record.phase is Phase.SUSPENDED:
                commands += self._settle(record, now)
        return commands

    def _resume(self, event: ResumeRequested, now: float) -> list[Command]:
        commands: list[Command] = []
        for trajectory_id in event.trajectory_ids:
            record = self._groups.get(trajectory_id)
            if record is None:
                continue
            if record.phase is Phase.SUSPENDED:
                commands += self._enqueue(record, now)
            elif record.intent is not None and record.intent.then is not Then.FINISH:
                record.intent = Intent(keep=record.intent.keep, then=Then.REQUEUE)
        return commands

    def _worker_up(self, event: WorkerUp, now: float) -> list[Command]:
        worker = self._fleet.get(event.worker)
        if worker is not None and worker.incarnation == event.incarnation:
            return []
        commands = self._lose(worker, now) if worker is not None else []
        self._fleet.join(event)
        return commands

    def _worker_down(self, event: WorkerDown, now: float) -> list[Command]:
        commands: list[Command] = []
        worker = self._fleet.get(event.worker)
        if worker is not None and worker.incarnation == event.incarnation:
            commands += self._lose(worker, now)
        if event.final and self._fleet.get(event.worker) is None:
            self._fleet.give_up(event.worker, event.error)
        if self._fleet.hopeless is not None:
            for record in self._fleet.drain():
                commands += self._fail(record, self._fleet.hopeless, now)
        return commands

    def _lose(self, worker: Worker, now: float) -> list[Command]:
        """A worker is gone, with its KV; the tokens it reported stay."""
        self._tally["workers_lost"] += 1
        self._fleet.drop(worker.worker_id)
        commands: list[Command] = []
        for trajectory_id in sorted(worker.running):
            record = self._groups.get(trajectory_id)
            assert record is not None, f"{worker.worker_id} ran {trajectory_id}, which is unknown"
            record.lost = True
            if record.columns:
                record.kv_tokens = len(record.prompt_ids) + len(record.columns) - 1
            if record.intent is None:
                commands += self._enqueue(record, now)
            else:
                record.enter(Phase.SUSPENDING)
                commands += self._settle(record, now)
        return commands

    # Moves --------------------------------------------------------------------------------------------

    def _dispatch(self) -> list[Command]:
        commands: list[Command] = []
        for record, worker in self._fleet.dispatch():
            if record.lost:
                self._tally["restarts"] += 1
            elif record.workers:
                self._tally["resumes"] += 1
                self._tally["resumed_elsewhere"] += record.worker != worker.worker_id
            record.lost = False
            record.workers.append(worker.worker_id)
            record.epoch += 1
            record.enter(Phase.RESTORING if record.image is not None else Phase.PREFILLING)
            commands.append(Start(worker=worker.worker_id, assignment=record.assignment(self._slice_tokens)))
        return commands

    def _enqueue(self, record: Record, now: float) -> list[Command]:
        """The trajectory waits for a worker, if it has anything left to do and may find one."""
        if record.budget_spent:
            return self._end(record, FinishReason.LENGTH, now)
        if self._fleet.hopeless is not None:
            return self._fail(record, self._fleet.hopeless, now)
        if record.phase is not Phase.QUEUED:
            record.enter(Phase.QUEUED)
        self._fleet.enqueue(record)
        return []

    def _settle(self, record: Record, now: float) -> list[Command]:
        """A stopped trajectory keeps what its intent says, and does what that says comes then."""
        intent, record.intent = record.intent, None
        assert intent is not None, f"{record.trajectory_id}: nothing to settle"
        if record.phase is not Phase.SUSPENDED:
            record.enter(Phase.SUSPENDED)
        commands = self._set_image(record, None) if intent.keep is Keep.NONE else []
        match intent.then:
            case Then.HOLD:
                return commands
            case Then.FINISH:
                return commands + self._end(record, FinishReason.ABORT, now)
            case Then.REQUEUE:
                return commands + self._enqueue(record, now)

    def _end(self, record: Record, reason: FinishReason, now: float) -> list[Command]:
        record.enter(Phase.FAILED if reason is FinishReason.ERROR else Phase.FINISHED)
        record.finish_reason = reason
        record.finished_at = now
        record.intent = None
        self._groups.ended(record)
        return self._set_image(record, None)

    def _fail(self, record: Record, error: str, now: float) -> list[Command]:
        record.error = error
        return self._end(record, FinishReason.ERROR, now)

    def _set_image(self, record: Record, image: Image | None) -> list[Command]:
        commands = _retain(record.trajectory_id, record.nodes, image)
        record.image = image
        record.nodes = {run.node for run in image.runs} if image is not None else set()
        return commands

    def _release(self, record: Record) -> Release:
        return Release(worker=record.workers[-1], trajectory_id=record.trajectory_id, epoch=record.epoch)

    def _suspending(self, trajectory_id: TrajectoryId, epoch: int) -> Record | None:
        record = self._groups.get(trajectory_id)
        if record is None or record.phase is not Phase.SUSPENDING or record.epoch != epoch:
            return None
        return record


def _retain(trajectory_id: TrajectoryId, nodes: set[NodeId], image: Image | None) -> list[Command]:
    """Tell the pools of `nodes`, and those that hold the image, what the trajectory needs from now on."""
    needed: dict[NodeId, set[SegmentId]] = {node: set() for node in sorted(nodes)}
    for run in image.runs if image is not None else ():
        needed.setdefault(run.node, set()).add(run.segment)
    return [
        Retain(node=node, trajectory_id=trajectory_id, segments=frozenset(segments))
        for node, segments in needed.items()
    ]
