"""The controller: events in, commands out, no clock and no Ray.

Owns every trajectory from submission to delivery. Tokens arrive by worker reports and are the truth;
what workers and pools hold is a cache of them. Invariants:

1. A trajectory is in the queue if and only if it is `queued`, in a worker's set if and only if it is on that worker.
2. Events of an epoch that is over change nothing.
3. Whatever leaves a worker parked is released exactly once, after its export was answered, or kept there.
4. The pools retain exactly the segments of live images.
"""

from collections import Counter
from collections.abc import Sequence

from rollout.control.aborts import AbortTicket
from rollout.control.fleet import Worker
from rollout.control.messages import (
    Admitted,
    Command,
    Drop,
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
    Spilled,
    Stop,
    WorkerDown,
    WorkerEvent,
    WorkerReport,
    WorkerUp,
)
from rollout.control.records import Intent, Record, Submission
from rollout.control.roster import Roster
from rollout.control.suspension import ON_WORKER, Suspensions
from rollout.metrics import RolloutCounters
from rollout.types import (
    Delivery,
    Keep,
    NodeId,
    Phase,
    ResumeReport,
    Then,
    TrajectoryId,
)

MOST_LOSSES = 4
"""Workers that may be lost under a trajectory without a new token in between: it may be what kills them."""


class Controller:
    """Decides what runs where, and what becomes of what stopped."""

    def __init__(
        self, *, workers: int, max_context: int, slice_tokens: int | None, keep: Keep, prefer_other: bool
    ) -> None:
        """`workers` is how many there are when all are up; `keep` is what `Keep.AUTO` means."""
        self._roster = Roster(
            workers=workers, max_context=max_context, slice_tokens=slice_tokens, prefer_other=prefer_other
        )
        self._suspensions = Suspensions(self._roster, keep=keep)
        self._fleet = self._roster.fleet
        self._groups = self._roster.groups
        self._tally = self._roster.tally
        self._troubles = self._roster.troubles
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
                commands += self._roster.enqueue(record, now)
        return commands + self._roster.dispatch()

    def take(self, count: int, call: str) -> list[Delivery]:
        """Up to `count` finished groups, in the order they finished, handed out to `call`."""
        return self._groups.take(count, call)

    def settle_calls(self, *, arrived: Sequence[str], abandoned: Sequence[str]) -> None:
        """What became of earlier calls that groups were, or may yet be, handed out to."""
        self._groups.acknowledge(arrived)
        self._groups.abandon(abandoned)

    def abort(self, ids: Sequence[str] | None, keep: Keep, then: Then, now: float) -> tuple[AbortTicket, list[Command]]:
        """Stop what `ids` name (see `resolve`); the ticket tells when that is done and what came of it."""
        intent = self._suspensions.intent(keep, then)
        ticket = AbortTicket(*self.resolve(ids), intent)
        commands: list[Command] = []
        for record in ticket.asked:
            commands += self._stop(record, intent, now)
        return ticket, commands + self._roster.dispatch()

    def resume(self, ids: Sequence[str] | None, now: float) -> tuple[ResumeReport, list[Command]]:
        """Queue what `ids` name (see `resolve`), if it is suspended or about to be."""
        known, unknown = self.resolve(ids)
        over = tuple(record.trajectory_id for record in known if record.over)
        resumable = [record for record in known if not record.over]
        report = ResumeReport(resumed=tuple(record.trajectory_id for record in resumable), unknown=unknown + over)
        commands: list[Command] = []
        for record in resumable:
            if record.phase is Phase.SUSPENDED:
                commands += self._roster.enqueue(record, now)
            elif record.phase is Phase.QUEUED and record.intent is not None:
                self._fleet.dequeue(record)  # it waited for its KV to be brought to a worker
                record.enter(Phase.SUSPENDED)
                record.intent = None
                commands += self._roster.enqueue(record, now)
            elif record.intent is not None and record.intent.then is not Then.FINISH:
                record.intent = Intent(keep=record.intent.keep, then=Then.REQUEUE)
                self._groups.unhold(record)
                commands += record.pooled.expect(record.turn)
        return report, commands + self._roster.dispatch()

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
                commands = self._suspensions.displaced(event.displaced, event.trajectory_id)
                commands += self._suspensions.exported(event, now)
            case ExportFailed():
                commands = self._suspensions.displaced(event.displaced, event.trajectory_id)
                commands += self._suspensions.export_failed(event, now)
            case Spilled():
                commands = self._spilled_to_disk(event)
        return commands + self._roster.dispatch()

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
            if worker is None or worker.incarnation != report.incarnation:
                continue
            if isinstance(event, Moved):
                commands += self._suspensions.moved(event, report.worker, now)
            elif isinstance(event, Recalled):
                commands += self._suspensions.recalled(event, report.worker, now)
            elif record is not None and record.on_worker and record.epoch == event.epoch:
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
                return self._roster.end(record, event.reason, now)
            case Failed():
                self._fleet.leave(record)
                return self._roster.fail(record, event.error, now)
            case Parked():
                return self._suspensions.parked(record, event, now)
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

    def _spilled_to_disk(self, event: Spilled) -> list[Command]:
        if event.node not in self._spilled:
            self._spilled.add(event.node)
            self._troubles.append(f"node {event.node}: its object store spilled {event.nbytes} bytes to disk")
        return []

    def _stop(self, record: Record, intent: Intent, now: float) -> list[Command]:
        """An abort of a trajectory that is not over; a second one changes only what becomes of it."""
        if intent.then is not Then.HOLD:
            self._groups.unhold(record)
        if not record.on_worker:
            return self._suspensions.change(record, intent, now)
        stopping, record.intent = record.intent is not None, intent
        if record.promoting:
            stopping = intent.keeps and intent.keep in ON_WORKER  # it parks once it has its KV
        if stopping:
            return []
        return [Stop(worker=record.workers[-1], trajectory_id=record.trajectory_id, epoch=record.epoch)]

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
                if record.intent is not None:  # it was to have its KV brought to a worker, and is held without
                    commands += self._suspensions.settle(record, now)
                else:
                    commands += self._roster.fail(record, self._fleet.hopeless, now)
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
            record.lost = not record.promoting
            record.promoting = False
            record.losses += 1
            if record.columns:
                record.kv_tokens = len(record.prompt_ids) + len(record.columns) - 1
            if record.losses >= MOST_LOSSES:
                commands += self._roster.fail(
                    record, f"{record.losses} workers were lost under it; the last: {error}", now
                )
            elif record.intent is None:
                commands += self._roster.enqueue(record, now)
            else:
                record.enter(Phase.SUSPENDING)
                commands += self._suspensions.settle(record, now)
        return commands + self._suspensions.lost(worker.worker_id, now)
