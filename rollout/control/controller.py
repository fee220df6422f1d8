"""The controller: events in, commands out, no clock and no Ray.

Owns every trajectory from submission to delivery. Tokens arrive by worker reports and are the truth;
what workers and pools hold is a cache of them. Invariants:

1. A trajectory is in the queue if and only if it is `queued`, in a worker's set if and only if it is on that worker.
2. Events of an epoch that is over change nothing.
3. Whatever leaves a worker parked is released exactly once, after its export was answered.
4. The pools retain exactly the segments of live images.
"""

from collections import Counter, deque
from collections.abc import Sequence

from rollout.control.aborts import AbortTicket
from rollout.control.fleet import Fleet, Worker
from rollout.control.groups import Groups
from rollout.control.messages import (
    Admitted,
    Command,
    Displaced,
    Drop,
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
    Sampled,
    Spilled,
    Start,
    Stop,
    WorkerDown,
    WorkerEvent,
    WorkerReport,
    WorkerUp,
)
from rollout.control.pooled import Pooled
from rollout.control.records import Intent, Record, Submission
from rollout.metrics import RolloutCounters
from rollout.types import (
    Delivery,
    FinishReason,
    Keep,
    NodeId,
    Phase,
    ResumeReport,
    Then,
    TrajectoryId,
)

MOST_LOSSES = 4
"""Workers that may be lost under a trajectory without a new token in between: it may be what kills them."""
TROUBLES = 20
"""How many are remembered."""


class Controller:
    """Decides what runs where, and what becomes of what stopped."""

    def __init__(
        self, *, workers: int, max_context: int, slice_tokens: int | None, keep: Keep, prefer_other: bool
    ) -> None:
        """`workers` is how many there are when all are up; `keep` is what `Keep.AUTO` means."""
        self._max_context = max_context
        self._slice_tokens = slice_tokens
        self._keep = keep
        self._fleet = Fleet(size=workers, prefer_other=prefer_other)
        self._groups = Groups()
        self._tally: Counter[str] = Counter()
        self._troubles: deque[str] = deque(maxlen=TROUBLES)
        self._spilled: set[NodeId] = set()

    # What drivers ask ---------------------------------------------------------------------------------

    def submit(self, submissions: Sequence[Submission], now: float) -> list[Command]:
        """Take groups in, all or none; one that is here already, all of it equal, was told twice.

        Raises `DuplicateKeyError` if one has the id of another group that was not handed out yet.
        """
        commands: list[Command] = []
        for submission in self._groups.check(submissions):
            group = self._groups.add(submission, now)
            self._tally["trajectories"] += len(group)
            for record in group:
                commands += self._enqueue(record, now)
        return commands + self._dispatch()

    def take(self, count: int, call: str) -> list[Delivery]:
        """Up to `count` finished groups, in the order they finished, handed out to `call`."""
        return self._groups.take(count, call)

    def settle_calls(self, *, arrived: Sequence[str], abandoned: Sequence[str]) -> None:
        """What became of earlier calls that groups were, or may yet be, handed out to."""
        self._groups.acknowledge(arrived)
        self._groups.abandon(abandoned)

    def abort(self, ids: Sequence[str] | None, keep: Keep, then: Then, now: float) -> tuple[AbortTicket, list[Command]]:
        """Stop what `ids` name (see `resolve`); the ticket tells when that is done and what came of it."""
        ticket = AbortTicket(*self.resolve(ids))
        intent = Intent(keep=self._keep if keep is Keep.AUTO else keep, then=then)
        commands: list[Command] = []
        for record in ticket.asked:
            commands += self._stop(record, intent, now)
        return ticket, commands + self._dispatch()

    def resume(self, ids: Sequence[str] | None, now: float) -> tuple[ResumeReport, list[Command]]:
        """Queue what `ids` name (see `resolve`), if it is suspended or about to be."""
        known, unknown = self.resolve(ids)
        over = tuple(record.trajectory_id for record in known if record.over)
        resumable = [record for record in known if not record.over]
        report = ResumeReport(resumed=tuple(record.trajectory_id for record in resumable), unknown=unknown + over)
        commands: list[Command] = []
        for record in resumable:
            if record.phase is Phase.SUSPENDED:
                commands += self._enqueue(record, now)
            elif record.intent is not None and record.intent.then is not Then.FINISH:
                record.intent = Intent(keep=record.intent.keep, then=Then.REQUEUE)
                commands += record.pooled.expect(record.turn)
        return report, commands + self._dispatch()

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
    def coming_groups(self) -> int:
        """Groups that were not taken and are finished, or will be without another command."""
        return self._groups.coming

    @property
    def phases(self) -> dict[Phase, int]:
        return dict(Counter(record.phase for record in self._groups.records()))

    @property
    def troubles(self) -> tuple[str, ...]:
        """The last workers lost, exports and restores failed, images displaced and nodes that spilled."""
        return tuple(self._troubles)

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
                commands = self._displaced(event.displaced, event.trajectory_id) + self._exported(event, now)
            case ExportFailed():
                commands = self._displaced(event.displaced, event.trajectory_id) + self._export_failed(event, now)
            case Spilled():
                commands = self._spilled_to_disk(event)
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
                self._tally["tokens"] += record.sampled(event)
            case Admitted():
                self._tally.update(record.admitted(event))
                return record.pooled.expect(record.turn)
            case Preempted():
                self._tally["preemptions"] += record.preempted()
                return record.pooled.expect(record.turn)
            case RestoreFailed():
                return self._restore_failed(record, event)
            case Finished():
                self._fleet.leave(record)
                return self._end(record, event.reason, now)
            case Failed():
                self._fleet.leave(record)
                return self._fail(record, event.error, now)
            case Parked():
                return self._parked(record, event, now)
        return []

    def _restore_failed(self, record: Record, event: RestoreFailed) -> list[Command]:
        if record.pooled.image is None:
            return []  # told before
        self._tally["restore_failures"] += 1
        self._troubles.append(f"{record.trajectory_id}: restore: {event.error}")
        commands = record.pooled.replace(None)
        if event.node is not None and event.segment is not None:
            commands.append(Drop(node=event.node, segment=event.segment))
        return commands

    def _parked(self, record: Record, event: Parked, now: float) -> list[Command]:
        worker = self._fleet.leave(record)
        intent = record.intent = record.intent or Intent(keep=self._keep, then=Then.REQUEUE)
        record.kv_tokens = max(record.kv_tokens, event.kv_tokens)
        record.suspensions += 1
        self._tally["suspensions"] += 1
        record.enter(Phase.SUSPENDING)
        release = self._release(record)
        if event.kv_tokens <= record.pooled.kv_tokens or intent.keep is Keep.NONE or intent.then is Then.FINISH:
            return [release, *self._settle(record, now)]
        record.pooled.export_to(worker.node, record.turn)
        return [
            Export(
                worker=worker.worker_id,
                node=worker.node,
                trajectory_id=record.trajectory_id,
                epoch=record.epoch,
                kv_tokens=event.kv_tokens,
                prompt_pages=event.prompt_pages,
                page_keys=event.page_keys,
                base=record.pooled.image,
                turn=record.turn,
            ),
            *record.pooled.expect(record.turn),
        ]

    def _exported(self, event: Exported, now: float) -> list[Command]:
        record = self._suspending(event.trajectory_id, event.epoch)
        if record is None:
            return self._exported_too_late(event)
        self._tally["exported_bytes"] += event.sent_bytes
        return [self._release(record), *record.pooled.stored(event.image), *self._settle(record, now)]

    def _exported_too_late(self, event: Exported) -> list[Command]:
        """Nobody wants this image, or it was told before. A later export is told of with what that retains."""
        record = self._groups.get(event.trajectory_id)
        if record is None:
            return Pooled(event.trajectory_id).let_go_of(event.image)
        if record.pooled.image == event.image or record.phase is Phase.SUSPENDING:
            record.pooled.may_be_at(event.image)
            return []
        return record.pooled.let_go_of(event.image)

    def _export_failed(self, event: ExportFailed, now: float) -> list[Command]:
        record = self._suspending(event.trajectory_id, event.epoch)
        if record is None:
            return []
        self._tally["export_failures"] += 1
        self._troubles.append(f"{record.trajectory_id}: export: {event.error}")
        return [self._release(record), *self._settle(record, now)]

    def _displaced(self, displaced: Sequence[Displaced], by: TrajectoryId) -> list[Command]:
        """Images that made room for one that is needed sooner are gone: their trajectories recompute."""
        commands: list[Command] = []
        lost: list[TrajectoryId] = []
        for displacement in displaced:
            record = self._groups.get(displacement.trajectory_id)
            if record is not None and record.pooled.displaced(displacement.segments):
                commands += record.pooled.replace(None)
                lost.append(record.trajectory_id)
        if lost:
            self._tally["displaced_images"] += len(lost)
            self._troubles.append(f"{by}: its image displaced {len(lost)} needed later: {', '.join(lost)}")
        return commands

    def _spilled_to_disk(self, event: Spilled) -> list[Command]:
        if event.node not in self._spilled:
            self._spilled.add(event.node)
            self._troubles.append(f"node {event.node}: its object store spilled {event.nbytes} bytes to disk")
        return []

    def _stop(self, record: Record, intent: Intent, now: float) -> list[Command]:
        """An abort of a trajectory that is not over; a second one changes only what becomes of it."""
        commands: list[Command] = []
        if record.on_worker and record.intent is None:
            worker = record.workers[-1]
            commands.append(Stop(worker=worker, trajectory_id=record.trajectory_id, epoch=record.epoch))
        record.intent = intent
        if record.phase is Phase.SUSPENDING:
            commands += record.pooled.expect(record.turn)
        if record.phase is Phase.QUEUED:
            self._fleet.dequeue(record)
            record.enter(Phase.SUSPENDED)
        if record.phase is Phase.SUSPENDED:
            commands += self._settle(record, now)
        return commands

    def _worker_up(self, event: WorkerUp, now: float) -> list[Command]:
        worker = self._fleet.get(event.worker)
        if worker is not None and worker.incarnation == event.incarnation:
            return []
        commands = self._lose(worker, "its process was restarted", now) if worker is not None else []
        self._fleet.join(event)
        return commands

    def _worker_down(self, event: WorkerDown, now: float) -> list[Command]:
        commands: list[Command] = []
        worker = self._fleet.get(event.worker)
        if worker is not None and worker.incarnation == event.incarnation:
            commands += self._lose(worker, event.error, now)
        if event.final and self._fleet.get(event.worker) is None:
            self._fleet.give_up(event.worker, event.error)
        if self._fleet.hopeless is not None:
            for record in self._fleet.drain():
                commands += self._fail(record, self._fleet.hopeless, now)
        return commands

    def _lose(self, worker: Worker, error: str, now: float) -> list[Command]:
        """A worker is gone, with its KV; the tokens it reported stay."""
        self._tally["workers_lost"] += 1
        self._troubles.append(f"{worker.worker_id}: lost: {error}")
        self._fleet.drop(worker.worker_id)
        commands: list[Command] = []
        for trajectory_id in sorted(worker.running):
            record = self._groups.get(trajectory_id)
            assert record is not None, f"{worker.worker_id} ran {trajectory_id}, which is unknown"
            record.lost = True
            record.losses += 1
            if record.columns:
                record.kv_tokens = len(record.prompt_ids) + len(record.columns) - 1
            if record.losses >= MOST_LOSSES:
                commands += self._fail(record, f"{record.losses} workers were lost under it; the last: {error}", now)
            elif record.intent is None:
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
            record.enter(Phase.RESTORING if record.pooled.image is not None else Phase.PREFILLING)
            commands += record.pooled.expect(record.turn)
            commands.append(
                Start(
                    worker=worker.worker_id,
                    assignment=record.assignment(slice_tokens=self._slice_tokens, max_context=self._max_context),
                )
            )
        return commands

    def _enqueue(self, record: Record, now: float) -> list[Command]:
        """The trajectory waits for a worker, if it has anything left to do and may find one."""
        self._groups.unhold(record)
        if record.budget_spent:
            return self._end(record, FinishReason.LENGTH, now)
        if self._fleet.hopeless is not None:
            return self._fail(record, self._fleet.hopeless, now)
        if record.phase is not Phase.QUEUED:
            record.enter(Phase.QUEUED)
        self._fleet.enqueue(record)
        return record.pooled.expect(record.turn)

    def _settle(self, record: Record, now: float) -> list[Command]:
        """A stopped trajectory keeps what its intent says, and does what that says comes then."""
        intent, record.intent = record.intent, None
        assert intent is not None, f"{record.trajectory_id}: nothing to settle"
        if record.phase is not Phase.SUSPENDED:
            record.enter(Phase.SUSPENDED)
        commands = record.pooled.replace(None) if intent.keep is Keep.NONE else []
        match intent.then:
            case Then.HOLD:
                self._groups.hold(record)
                return commands + record.pooled.expect(record.turn)
            case Then.FINISH:
                return commands + self._end(record, FinishReason.ABORT, now)
            case Then.REQUEUE:
                return commands + self._enqueue(record, now)

    def _end(self, record: Record, reason: FinishReason, now: float) -> list[Command]:
        record.enter(Phase.FAILED if reason is FinishReason.ERROR else Phase.FINISHED)
        record.finish_reason = reason
        record.finished_at = now
        record.intent = None
        self._groups.unhold(record)
        self._groups.ended(record)
        return record.pooled.replace(None)

    def _fail(self, record: Record, error: str, now: float) -> list[Command]:
        record.error = error
        return self._end(record, FinishReason.ERROR, now)

    def _release(self, record: Record) -> Release:
        return Release(worker=record.workers[-1], trajectory_id=record.trajectory_id, epoch=record.epoch)

    def _suspending(self, trajectory_id: TrajectoryId, epoch: int) -> Record | None:
        record = self._groups.get(trajectory_id)
        if record is None or record.phase is not Phase.SUSPENDING or record.epoch != epoch:
            return None
        return record
