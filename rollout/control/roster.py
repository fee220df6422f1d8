"""Every trajectory with the workers, and the moves that both halves of the controller make: queue, start, end.

A trajectory is in the queue if and only if it is `queued`, in a worker's set if and only if it is on that worker.
"""

from collections import Counter, deque

from rollout.control.fleet import Fleet
from rollout.control.groups import Groups
from rollout.control.messages import Command, Release, Start
from rollout.control.records import Record
from rollout.types import FinishReason, Phase, Then

TROUBLES = 20
"""How many are remembered."""


class Roster:
    """Mutable, shared by `Controller` and `Suspensions`."""

    def __init__(self, *, workers: int, max_context: int, slice_tokens: int | None, prefer_other: bool) -> None:
        self.fleet = Fleet(size=workers, prefer_other=prefer_other)
        self.groups = Groups()
        self.tally: Counter[str] = Counter()
        self.troubles: deque[str] = deque(maxlen=TROUBLES)
        self._max_context = max_context
        self._slice_tokens = slice_tokens

    def enqueue(self, record: Record, now: float) -> list[Command]:
        """The trajectory waits for a worker, if it has anything left to do and may find one."""
        self.groups.unhold(record)
        if record.budget_spent:
            return self.end(record, FinishReason.LENGTH, now)
        return self.wait(record, now)

    def wait(self, record: Record, now: float) -> list[Command]:
        """The trajectory waits for a worker, whatever it is to do there."""
        if self.fleet.hopeless is not None:
            return self.fail(record, self.fleet.hopeless, now)
        if record.phase is not Phase.QUEUED:
            record.enter(Phase.QUEUED)
        self.fleet.enqueue(record)
        return record.pooled.expect(record.turn)

    def dispatch(self) -> list[Command]:
        """Start what can be."""
        commands: list[Command] = []
        for record, worker in self.fleet.dispatch():
            record.promoting = record.intent is not None and record.intent.then is not Then.REQUEUE
            if not record.promoting:
                record.intent = None
                if record.lost:
                    self.tally["restarts"] += 1
                elif record.workers:
                    self.tally["resumes"] += 1
                    self.tally["resumed_elsewhere"] += record.worker != worker.worker_id
            record.lost = False
            if record.home is not None and record.home.worker != worker.worker_id:
                commands += self.leave_home(record)
            loads = record.pooled.image is not None or record.home is not None
            record.home = None  # what is there is the worker's affair now
            record.workers.append(worker.worker_id)
            record.epoch += 1
            record.enter(Phase.RESTORING if loads else Phase.PREFILLING)
            commands += record.pooled.expect(record.turn)
            slice_tokens = 0 if record.promoting else self._slice_tokens
            assignment = record.assignment(slice_tokens=slice_tokens, max_context=self._max_context)
            commands.append(Start(worker=worker.worker_id, assignment=assignment))
        return commands

    def leave_home(self, record: Record) -> list[Command]:
        """What the trajectory has on a worker is not needed any more."""
        home, record.home = record.home, None
        if home is None:
            return []
        return [Release(worker=home.worker, trajectory_id=record.trajectory_id, epoch=home.epoch)]

    def end(self, record: Record, reason: FinishReason, now: float) -> list[Command]:
        record.enter(Phase.FAILED if reason is FinishReason.ERROR else Phase.FINISHED)
        record.finish_reason = reason
        record.finished_at = now
        record.intent = None
        self.groups.unhold(record)
        self.groups.ended(record)
        return [*self.leave_home(record), *record.pooled.replace(None)]

    def fail(self, record: Record, error: str, now: float) -> list[Command]:
        record.error = error
        return self.end(record, FinishReason.ERROR, now)
