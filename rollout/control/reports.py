"""What is told to the controller from outside: by workers, by pools, by the clock."""

from rollout.control.commands import Command, Drop
from rollout.control.membership import Membership
from rollout.control.messages import (
    Admitted,
    Event,
    Exported,
    ExportFailed,
    Failed,
    Finished,
    Freed,
    Moved,
    Parked,
    PoolRoom,
    Preempted,
    Recalled,
    RestoreFailed,
    Reweighed,
    Sampled,
    Spilled,
    Tick,
    WeightsLive,
    WorkerDown,
    WorkerEvent,
    WorkerReport,
    WorkerUp,
)
from rollout.control.records import Record
from rollout.control.roster import Roster
from rollout.control.stops import Stops
from rollout.control.suspension import Suspensions
from rollout.control.updates import Updates
from rollout.types import AbortReason, Keep, NodeId


class Reports:
    """Takes events in."""

    def __init__(
        self, roster: Roster, suspensions: Suspensions, stops: Stops, members: Membership, updates: Updates
    ) -> None:
        self._roster = roster
        self._suspensions = suspensions
        self._stops = stops
        self._members = members
        self._updates = updates
        self._spilled: set[NodeId] = set()

    def handle(self, event: Event, now: float) -> tuple[bool, list[Command]]:
        """What to do about it, and whether anything went on by it."""
        match event:
            case WorkerReport():
                return self._goes_on(event), self._report(event, now)
            case WorkerUp():
                return True, self._members.up(event, now)
            case WorkerDown():
                return True, self._members.down(event, now)
            case Exported():
                commands = self._suspensions.displaced(event.displaced, event.trajectory_id)
                return True, commands + self._suspensions.exported(event, now)
            case ExportFailed():
                commands = self._suspensions.displaced(event.displaced, event.trajectory_id)
                return True, commands + self._suspensions.export_failed(event, now)
            case Spilled():
                return False, self._spilled_to_disk(event)
            case PoolRoom():
                self._roster.keeping.pools[event.node] = event
                return False, []
            case WeightsLive():
                return True, self._updates.live(event.weights, now)
            case Tick():
                commands = self._tick(now)
                return bool(commands), commands

    def _goes_on(self, report: WorkerReport) -> bool:
        """Whether the worker did anything since its last report."""
        worker = self._roster.fleet.get(report.worker)
        before = worker.facts if worker is not None else None
        if before is None or report.facts is None:
            return bool(report.events)
        return bool(report.events) or report.facts.computed_tokens != before.computed_tokens

    def _report(self, report: WorkerReport, now: float) -> list[Command]:
        worker = self._roster.fleet.get(report.worker)
        known = worker is not None and worker.incarnation == report.incarnation
        tally = self._roster.tally
        commands: list[Command] = []
        taken = 0
        if worker is not None and known:
            worker.facts = report.facts or worker.facts
        for event in report.events:
            if isinstance(event, Freed):
                tally["releases"] += 1
                tally["exclusive_pages"] += event.exclusive_pages
                tally["freed_pages"] += event.freed_pages
                continue
            if not known:
                continue
            if isinstance(event, Moved):
                commands += self._suspensions.moved(event, report.worker, now)
                continue
            if isinstance(event, Recalled):
                commands += self._suspensions.recalled(event, report.worker, now)
                continue
            record = self._roster.groups.get(event.trajectory_id)
            if record is not None and record.on_worker and record.epoch == event.epoch:
                before = tally["tokens"]
                commands += self._progress(record, event, now)
                taken += tally["tokens"] - before
                if isinstance(event, Admitted):
                    taken += record.tokens - event.cached_tokens
        if worker is not None and known:
            worker.took(taken, now)
        return commands

    def _progress(self, record: Record, event: WorkerEvent, now: float) -> list[Command]:
        match event:
            case Sampled():
                self._roster.tally["tokens"] += record.sampled(event)
                commands: list[Command] = []
                if record.group.budget_spent:
                    commands += self._roster.end_waiting(record.group, now)
                if self._roster.policies.too_long(record):
                    commands += self._stops.fire(record, AbortReason.OVER_LONG, now)
                if self._roster.policies.late(record, event.columns.versions):
                    commands += self._stops.fire(record, AbortReason.STALE, now)
                return commands
            case Admitted():
                return self._admitted(record, event, now)
            case Preempted():
                self._roster.tally["preemptions"] += record.preempted() and not event.outdated
                return record.pooled.expect(record.turn)
            case RestoreFailed():
                return self._restore_failed(record, event)
            case Reweighed():
                record.spans.admitted(event.written)
            case Finished():
                self._roster.fleet.leave(record)
                return self._roster.end(record, event.reason, now)
            case Failed():
                self._roster.fleet.leave(record)
                return self._members.member_failed(record, event.error, now)
            case Parked():
                return self._suspensions.parked(record, event, now)
        return []

    def _admitted(self, record: Record, event: Admitted, now: float) -> list[Command]:
        counts = record.admitted(event)
        self._roster.tally.update(counts)
        worker = self._roster.fleet.get(record.workers[-1])
        home, record.came_from = record.came_from, None
        if worker is not None and home is not None and home.where is Keep.DEVICE:
            worker.came_back(min(1.0, event.cached_tokens / home.kv_tokens), now)
        if worker is not None and worker.facts is not None and "restored_tokens" in counts:
            read = counts["restored_tokens"] + counts["loaded_tokens"]
            self._roster.tally["read_bytes"] += read * worker.facts.token_bytes
        return record.pooled.expect(record.turn)

    def _restore_failed(self, record: Record, event: RestoreFailed) -> list[Command]:
        if record.pooled.image is None:
            return []  # told before
        self._roster.tally["restore_failures"] += 1
        self._roster.troubles.append(f"{record.trajectory_id}: restore: {event.error}")
        commands = record.pooled.replace(None)
        if event.node is not None and event.segment is not None:
            commands.append(Drop(node=event.node, segment=event.segment))
        return commands

    def _spilled_to_disk(self, event: Spilled) -> list[Command]:
        if event.node not in self._spilled:
            self._spilled.add(event.node)
            self._roster.troubles.append(f"node {event.node}: its object store spilled {event.nbytes} bytes to disk")
        return []

    def _tick(self, now: float) -> list[Command]:
        self._roster.keeping.experience.age(now)
        commands = self._stops.end_overdue(now) + self._updates.overdue(now)
        for record in self._roster.policies.due(self._roster.groups.get, now):
            commands += self._stops.fire(record, AbortReason.DEADLINE, now)
        return commands
