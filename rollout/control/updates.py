"""What an update of the weights does to trajectories.

announced → begun: paused, or held and emptied by the mode → live → ended
"""

from rollout.control.commands import Command
from rollout.control.intent import Intent
from rollout.control.membership import Membership
from rollout.control.records import Record
from rollout.control.roster import Roster, waits_for_kv_only
from rollout.control.stops import Stops
from rollout.control.suspension import Suspensions
from rollout.types import AbortReason, Keep, PausedBy, Phase, Then, UpdateMode, Version, Weights


class Updates:
    """One update at a time; who carries it out sees to that."""

    def __init__(self, roster: Roster, suspensions: Suspensions, stops: Stops, members: Membership) -> None:
        self._roster = roster
        self._suspensions = suspensions
        self._stops = stops
        self._members = members

    def announce(self, version: Version, now: float) -> list[Command]:
        """Other weights are about to be loaded: what would be too old then need not be computed again."""
        commands: list[Command] = []
        for record in self._roster.policies.stale(self._roster.groups.records(), version):
            commands += self._stops.fire(record, AbortReason.STALE, now)
        return commands

    def begin(self, mode: UpdateMode, now: float) -> list[Command]:
        """Nothing starts until `end`; what runs is paused, suspended, or let end (see `clear`)."""
        if mode in (UpdateMode.RECOMPUTE, UpdateMode.IN_PLACE):
            return self._members.pause(PausedBy.UPDATE)
        self._roster.fleet.held = True
        commands: list[Command] = []
        if mode is UpdateMode.SUSPEND:
            for record in self._running():
                commands += self._stops.fire(record, AbortReason.WEIGHTS, now)
        return commands

    def clear(self, mode: UpdateMode) -> bool:
        """Whether what runs is as the mode wants it."""
        if mode in (UpdateMode.RECOMPUTE, UpdateMode.IN_PLACE):
            return True
        moving = mode is UpdateMode.SUSPEND and any(r.phase is Phase.SUSPENDING for r in self._roster.groups.records())
        return not self._running() and not moving

    def live(self, weights: Weights, now: float) -> list[Command]:
        """Every worker has these weights: KV that nothing may be gone on with any more is given up."""
        before = self._roster.versions.live.version
        if not self._roster.versions.load(weights):
            return []
        self._roster.keeping.experience.weights_changed(now)
        commands: list[Command] = []
        for record in self._roster.groups.records():
            if record.over:
                continue
            record.came_from = None  # what it finds there says nothing of evictions
            commands += self._suspensions.outdated(record)
            commands += self.constrain(record, before, now)
        return commands + self.announce(weights.version, now)

    def constrain(self, record: Record, before: Version, now: float) -> list[Command]:
        """What may not be sampled with the live weights waits for others, or is over if these will not come. What is
        being stopped for something else does what was said then, if that keeps it from being sampled."""
        submission, live = record.group.submission, self._roster.versions.live.version
        if submission.admits(live):
            return []
        if submission.admits(before):
            record.waits_since = now
        past = submission.exact_version is not None and submission.exact_version < live
        ends = record.intent is not None and record.intent.then in (Then.FINISH, Then.DROP)
        runs_on = record.on_worker and record.intent is None
        if ends or not (past or runs_on):
            return []
        then = Then.FINISH if past else Then.REQUEUE
        return self._stops.stop(record, Intent(keep=Keep.NONE, then=then, reason=AbortReason.VERSION), now)

    def overdue(self, now: float) -> list[Command]:
        """What has waited for its version for too long fails."""
        live, commands = self._roster.versions.live.version, list[Command]()
        most_s = self._roster.version_timeout_s
        for record in list(self._roster.fleet.queued):
            submission = record.group.submission
            waits = not (submission.admits(live) or waits_for_kv_only(record))
            if waits and now - record.waits_since >= most_s:
                self._roster.fleet.dequeue(record)
                error = f"{submission.wants} was not live within {most_s:g} s (weights.version_timeout_s); live: {live}"
                commands += self._roster.fail(record, error, now)
        return commands

    def end(self, now: float) -> list[Command]:
        """Things go on, with whatever weights are live."""
        self._roster.fleet.held = False
        return self._members.unpause(PausedBy.UPDATE)

    def _running(self) -> list[Record]:
        """But for those that were started to have their KV only: nothing is sampled of them."""
        records = self._roster.groups.records()
        return [record for record in records if record.on_worker and not record.promoting]
