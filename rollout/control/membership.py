"""Workers that come, go, are paused and are taken out of service."""

from dataclasses import replace

from rollout.control.commands import Command, Pause, Retire, Unpause
from rollout.control.fleet import Worker
from rollout.control.intent import Intent
from rollout.control.messages import WorkerDown, WorkerUp
from rollout.control.records import Record
from rollout.control.roster import Roster
from rollout.control.stops import Stops
from rollout.control.suspension import Suspensions
from rollout.types import AbortReason, Keep, PausedBy, Phase, Then, TrajectoryId, WorkerId

MOST_LOSSES = 4
"""Workers that may be lost under a trajectory without a new token in between: it may be what kills them."""


class Membership:
    """Which workers there are, and what happens to trajectories when that changes."""

    def __init__(self, roster: Roster, suspensions: Suspensions, stops: Stops) -> None:
        self._roster = roster
        self._fleet = roster.fleet
        self._suspensions = suspensions
        self._stops = stops
        self._retired: set[WorkerId] = set()
        self._paused_by: set[PausedBy] = set()
        self._released: set[WorkerId] = set()

    # Coming and going ---------------------------------------------------------------------------------

    def up(self, event: WorkerUp, now: float) -> list[Command]:
        worker = self._fleet.get(event.worker)
        if event.worker in self._retired or (worker is not None and worker.incarnation == event.incarnation):
            return []
        commands = self._lose(worker, "its process was restarted", now) if worker is not None else []
        if event.worker in self._retired:
            return commands  # it was being drained
        self._fleet.join(event).released = event.worker in self._released
        if self._fleet.paused:
            commands.append(Pause(worker=event.worker))
        return commands

    def down(self, event: WorkerDown, now: float) -> list[Command]:
        commands: list[Command] = []
        worker = self._fleet.get(event.worker)
        if worker is not None and worker.incarnation == event.incarnation:
            commands += self._lose(worker, event.error, now)
        if event.worker in self._retired:
            return commands
        if event.final and self._fleet.get(event.worker) is None:
            self._fleet.give_up(event.worker, event.error)
            self._recall_drained()
        return commands + self._fail_if_hopeless(now)

    def _recall_drained(self) -> None:
        """If no other worker is left, or will come, those that were to be taken out of service stay in it."""
        workers = self._fleet.workers
        if workers and self._fleet.all_known and all(worker.draining for worker in workers):
            for worker in workers:
                worker.draining = False
                self._roster.troubles.append(f"{worker.worker_id}: its drain is off, since no other worker is left")

    def _fail_if_hopeless(self, now: float) -> list[Command]:
        commands: list[Command] = []
        if self._fleet.hopeless is not None:
            for record in self._fleet.drain():
                if record.intent is not None:  # it was to have its KV brought to a worker, and is held without
                    commands += self._suspensions.settle(record, now)
                else:
                    commands += self._roster.fail(record, self._fleet.hopeless, now)
        return commands

    def _lose(self, worker: Worker, error: str, now: float) -> list[Command]:
        """A worker is gone, with its KV; the tokens it reported stay."""
        self._roster.tally["workers_lost"] += 1
        self._roster.troubles.append(f"{worker.worker_id}: lost: {error}")
        self._fleet.drop(worker.worker_id)
        commands: list[Command] = []
        for trajectory_id in sorted(worker.running):
            record = self._roster.groups.get(trajectory_id)
            assert record is not None, f"{worker.worker_id} ran {trajectory_id}, which is unknown"
            record.lost = not record.promoting
            record.promoting = False
            record.losses += 1
            if record.columns:
                record.kv_tokens = record.tokens - 1
            if record.losses >= MOST_LOSSES:
                why = f"{record.losses} workers were lost under it; the last: {error}"
                commands += self.member_failed(record, why, now)
            elif record.intent is None:
                commands += self._roster.enqueue(record, now)
            else:
                record.enter(Phase.SUSPENDING)
                commands += self._suspensions.settle(record, now)
        commands += self._suspensions.lost(worker.worker_id, now)
        return commands + (self._let_go(worker, now) if worker.draining else [])

    def member_failed(self, record: Record, error: str, now: float) -> list[Command]:
        """A trajectory, off its worker, cannot go on: it tries again or its group has to do without."""
        rules = self._roster.rules
        if rules.failed_member not in ("retry", "replace") or record.failures >= rules.max_retries:
            return self._roster.fail(record, error, now)
        record.failures += 1
        record.losses = 0
        record.promoting = False
        self._roster.tally["retries"] += 1
        commands: list[Command] = []
        if rules.failed_member == "replace":
            commands += record.pooled.replace(None)
            record.begin_again(error=error)
        if record.intent is None:
            return commands + self._roster.enqueue(record, now)
        record.enter(Phase.SUSPENDING)
        return commands + self._suspensions.settle(record, now)

    # Pausing ------------------------------------------------------------------------------------------

    def pause(self, by: PausedBy) -> list[Command]:
        """No worker runs a step, and nothing starts, until `unpause`; aborts take effect all the same."""
        self._paused_by.add(by)
        if self._fleet.paused:
            return []
        self._fleet.paused = True
        for record in self._on_workers():
            record.pause()
        return [Pause(worker=worker.worker_id) for worker in self._fleet.workers]

    def unpause(self, by: PausedBy) -> list[Command]:
        """Unless somebody else has it paused."""
        self._paused_by.discard(by)
        if self._paused_by or not self._fleet.paused:
            return []
        self._fleet.paused = False
        for record in self._on_workers():
            record.unpause()
        return [Unpause(worker=worker.worker_id) for worker in self._fleet.workers]

    # Draining -----------------------------------------------------------------------------------------

    def drain(self, worker_id: WorkerId, now: float) -> tuple[tuple[TrajectoryId, ...], list[Command]]:
        """Take a worker out of service: what is on it, or has KV there, moves elsewhere."""
        worker = self._fleet.get(worker_id)
        assert worker is not None, f"{worker_id} is not up"
        worker.draining = True
        return self._empty(worker, AbortReason.DRAIN, now)

    def _empty(self, worker: Worker, reason: AbortReason, now: float) -> tuple[tuple[TrajectoryId, ...], list[Command]]:
        commands: list[Command] = []
        moved: list[TrajectoryId] = []
        for record in self._roster.groups.records():
            here = record.home is not None and record.home.worker == worker.worker_id
            if record.trajectory_id in worker.running or here:
                moved.append(record.trajectory_id)
                commands += self._move_away(record, reason, now)
        return tuple(moved), commands

    def retire(self, now: float) -> list[Command]:
        """Let go of drained workers on which nothing is left."""
        commands: list[Command] = []
        for worker in self._fleet.workers:
            if worker.draining and self._is_empty(worker):
                self._fleet.drop(worker.worker_id)
                commands += self._let_go(worker, now)
            elif worker.leaving:
                commands += self._move_remnants(worker, now)
        return commands

    def _let_go(self, worker: Worker, now: float) -> list[Command]:
        """A drained worker is empty, or lost."""
        self._fleet.grow(-1)
        self._retired.add(worker.worker_id)
        return [Retire(worker=worker.worker_id), *self._fail_if_hopeless(now)]

    def is_retired(self, worker_id: WorkerId) -> bool:
        return worker_id in self._retired

    def release(self, worker_id: WorkerId, now: float) -> tuple[tuple[TrajectoryId, ...], list[Command]]:
        """A worker gives memory back: nothing starts there until `reclaim`, what is there moves elsewhere."""
        self._released.add(worker_id)
        worker = self._fleet.get(worker_id)
        if worker is None:
            return (), []
        worker.released = True
        return self._empty(worker, AbortReason.RELEASE, now)

    def reclaim(self, worker_id: WorkerId) -> None:
        self._released.discard(worker_id)
        worker = self._fleet.get(worker_id)
        if worker is not None:
            worker.released = False

    def is_empty(self, worker_id: WorkerId) -> bool:
        """Whether nothing runs on it, or has KV there."""
        worker = self._fleet.get(worker_id)
        return worker is None or self._is_empty(worker)

    def _is_empty(self, worker: Worker) -> bool:
        """Nothing runs on it, has KV there, or is about to have KV sent from there."""
        places = (place for record in self._roster.groups.records() for place in (record.home, record.transfer))
        return not worker.running and all(place is None or place.worker != worker.worker_id for place in places)

    def _move_remnants(self, worker: Worker, now: float) -> list[Command]:
        """What came to be kept there since it is to be empty."""
        reason = AbortReason.DRAIN if worker.draining else AbortReason.RELEASE
        commands: list[Command] = []
        for record in self._roster.groups.records():
            if record.home is not None and record.home.worker == worker.worker_id:
                commands += self._move_away(record, reason, now)
        return commands

    def _move_away(self, record: Record, reason: AbortReason, now: float) -> list[Command]:
        """To the pool, and then what was to come; what cannot be moved is computed again elsewhere."""
        if record.on_worker:
            if record.intent is None:
                return self._stops.fire(record, reason, now)
            if record.intent.keep is not Keep.NONE:
                record.intent = replace(record.intent, keep=Keep.POOL)
            return []
        home = record.home
        if home is None or record.transfer is not None:
            return []
        if record.moved_from == home.worker:  # the pool refused it
            return self._roster.leave_home(record)
        record.moved_from = home.worker
        waits = record.phase is Phase.QUEUED
        then = Then.REQUEUE if waits else Then.HOLD
        intent = Intent(keep=Keep.POOL, then=then, reason=record.abort_reason or reason)
        if waits:
            self._fleet.dequeue(record)
            record.enter(Phase.SUSPENDED)
        return self._suspensions.relocate(record, intent, now)

    def _on_workers(self) -> list[Record]:
        names = [name for worker in self._fleet.workers for name in sorted(worker.running)]
        return [record for name in names if (record := self._roster.groups.get(name)) is not None]
