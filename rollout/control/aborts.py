"""One abort, from the request until every trajectory it named has stopped, ended by itself, or is given up on."""

from collections.abc import Sequence

from rollout.control.intent import Intent
from rollout.control.records import Record
from rollout.reports import AbortReport
from rollout.types import FinishReason, TrajectoryId


class AbortTicket:
    """Asked after every event whether the abort is done."""

    def __init__(self, known: Sequence[Record], unknown: tuple[TrajectoryId, ...], intent: Intent) -> None:
        """To be made before the abort is carried out, which will give its records this `intent`."""
        self._intent = intent
        self._known = known
        self._unknown = unknown
        self._finished = {record.trajectory_id for record in known if record.over}
        self._epochs = {record.trajectory_id: record.epoch for record in known}
        self._waiting = self.asked

    @property
    def asked(self) -> list[Record]:
        """Those that were not over."""
        return [record for record in self._known if record.trajectory_id not in self._finished]

    @property
    def done(self) -> bool:
        self._waiting = [record for record in self._waiting if not self._stopped(record)]
        return not self._waiting

    def report(self) -> AbortReport:
        """How each trajectory stands now."""
        found: list[TrajectoryId] = []
        finished: list[TrajectoryId] = []
        unreached: list[TrajectoryId] = []
        for record in self._known:
            ended_by_itself = record.over and record.finish_reason is not FinishReason.ABORT
            if ended_by_itself or record.trajectory_id in self._finished:
                finished.append(record.trajectory_id)
            elif self._stopped(record):
                found.append(record.trajectory_id)
            else:
                unreached.append(record.trajectory_id)
        return AbortReport(
            found=tuple(found),
            unknown=self._unknown,
            finished=tuple(finished),
            unreached=tuple(unreached),
            partials=tuple(record.snapshot() for record in self._known),
        )

    def _stopped(self, record: Record) -> bool:
        """One that was queued again may be in its next suspension already; one that is on a worker to have its KV
        kept there still is in this one."""
        again = record.epoch != self._epochs[record.trajectory_id] and record.intent is not self._intent
        return record.over or record.intent is None or again
