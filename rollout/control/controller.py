"""The controller: events in, commands out, no clock and no Ray.

Owns every trajectory from submission to delivery. Tokens arrive by worker reports and are the truth;
what workers and pools hold is a cache of them. Invariants:

1. A trajectory is in the queue if and only if it is `queued`, in a worker's set if and only if it is on that worker.
2. Events of an epoch that is over change nothing.
3. Whatever leaves a worker parked is released exactly once, after its export was answered, or kept there.
4. The pools retain exactly the segments of live images.
5. Everything submitted is queued, active, suspended, buffered, delivered, acknowledged or dropped (`accounts`).
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rollout.config import AbortConfig, GroupsConfig, ResumeConfig, WeightsConfig
from rollout.control.aborts import AbortTicket
from rollout.control.collection import Collection
from rollout.control.commands import Command
from rollout.control.extension import check_extendable
from rollout.control.intent import Intent
from rollout.control.keeping import Keeping
from rollout.control.membership import Membership
from rollout.control.messages import Event
from rollout.control.records import Batch, Record
from rollout.control.reports import Reports
from rollout.control.roster import Roster
from rollout.control.saved import Saved
from rollout.control.stops import Stops
from rollout.control.submission import Submission
from rollout.control.succession import check_restorable, restore_groups, save_groups
from rollout.control.suspension import Suspensions
from rollout.control.updates import Updates
from rollout.errors import UnknownWorkerError
from rollout.metrics import Accounts, RolloutCounters, Staleness
from rollout.reports import DiscardReport, ResumeReport
from rollout.types import (
    AbortReason,
    Columns,
    Delivery,
    Keep,
    PausedBy,
    Phase,
    Then,
    Trajectory,
    TrajectoryId,
    TurnMark,
    UpdateMode,
    Version,
    Weights,
    WeightsId,
    WorkerId,
)


class Controller:
    """Decides what runs where, and what becomes of what stopped."""

    def __init__(
        self,
        *,
        workers: int,
        max_context: int,
        weights: Weights,
        abort: AbortConfig,
        resume: ResumeConfig,
        groups: GroupsConfig,
        versions: WeightsConfig,
    ) -> None:
        """`workers` is how many there are when all are up, and `weights` what they load."""
        self._roster = Roster(
            workers=workers,
            max_context=max_context,
            weights=weights,
            abort=abort,
            resume=resume,
            groups=groups,
            versions=versions,
        )
        self._suspensions = Suspensions(self._roster)
        self._stops = Stops(self._roster, self._suspensions)
        self._members = Membership(self._roster, self._suspensions, self._stops)
        self._updates = Updates(self._roster, self._suspensions, self._stops, self._members)
        self._reports = Reports(self._roster, self._suspensions, self._stops, self._members, self._updates)
        self._fleet = self._roster.fleet
        self._groups = self._roster.groups
        self._moved_at = 0.0
        """When anything went on last, or something new was asked for."""

    # What drivers ask ---------------------------------------------------------------------------------

    def submit(self, submissions: Sequence[Submission], now: float) -> list[Command]:
        """Take groups in, all or none; one that is here already, all of it equal, was told twice.

        Raises `DuplicateKeyError` if one has the id of another group that was not handed out yet, and
        `UnsatisfiableVersionError` if one asks for a version that is past.
        """
        commands: list[Command] = []
        batch = Batch()
        added = [self._groups.add(submission, batch, now) for submission in self._groups.check(submissions)]
        for group in added:
            self._roster.tally["trajectories"] += len(group.members)
            for record in group.members:
                self._roster.policies.submitted(record)
                commands += self._roster.enqueue(record, now)
        return commands + self._settled(now, moved=bool(added))

    def new_trajectories(self, submissions: Sequence[Submission]) -> int:
        """How many `submit` would add. Raises `DuplicateKeyError`."""
        return sum(len(submission.seeds) for submission in self._groups.check(submissions))

    def saved(self, now: float) -> Saved:
        """Everything that is not known to have arrived at a driver, with its tokens so far."""
        return save_groups(self._groups, self.weights.version, now)

    def restore(self, saved: Saved, now: float) -> list[Command]:
        """Go on with what another controller knew: what was held is held, all else waits for a worker.

        Raises `DuplicateKeyError` if a group of that name is here, and nothing changes.
        """
        check_restorable(self._groups, saved)
        commands: list[Command] = []
        before, live = self.accounts().submitted, self.weights.version
        groups = restore_groups(self._groups, saved, now)
        self._roster.tally["trajectories"] += self.accounts().submitted - before
        restored = [record for group in groups for record in group.members]
        for record, was in zip(restored, (each for group in saved.groups for each in group.members), strict=True):
            if was.then is not None:
                if AbortReason.DEADLINE not in record.fired:
                    self._roster.policies.submitted(record)
                commands += self._suspensions.take_up(record, was.then, now)
            if not record.over:
                commands += self._updates.constrain(record, live, now)
        if live != saved.version:  # otherwise what is too old was stopped, and resumed perhaps
            for record in self._roster.policies.stale(restored, live):
                commands += self._stops.fire(record, AbortReason.STALE, now)
        return commands + self._settled(now)

    def take(self, count: int, call: str) -> list[Delivery]:
        """Up to `count` finished groups, in the order they finished, handed out to `call`."""
        return self._groups.take(count, call)

    def settle_calls(self, *, arrived: Sequence[str], abandoned: Sequence[str]) -> None:
        """What became of earlier calls that groups were, or may yet be, handed out to."""
        self._groups.acknowledge(arrived)
        self._groups.abandon(abandoned)

    def abort(self, ids: Sequence[str] | None, keep: Keep, then: Then, now: float) -> tuple[AbortTicket, list[Command]]:
        """Stop what `ids` name (see `resolve`); the ticket tells when that is done and what came of it."""
        intent = Intent(keep=self._roster.policies.resolve(keep), then=then)
        ticket = AbortTicket(*self.resolve(ids), intent)
        commands: list[Command] = []
        for record in ticket.asked:
            commands += self._stops.stop(record, intent, now)
        return ticket, commands + self._settled(now)

    def discard(self, ids: Sequence[str], now: float) -> tuple[DiscardReport, list[Command]]:
        """Give up what `ids` name, tokens and all; the only way in which tokens are lost."""
        known, unknown = self.resolve(ids)
        over = tuple(record.trajectory_id for record in known if record.over)
        given_up = [record for record in known if not record.over]
        intent = Intent(keep=Keep.NONE, then=Then.DROP, reason=AbortReason.DISCARD)
        commands: list[Command] = []
        for record in given_up:
            commands += self._stops.stop(record, intent, now)
        report = DiscardReport(discarded=tuple(record.trajectory_id for record in given_up), unknown=unknown + over)
        return report, commands + self._settled(now)

    def resume(self, ids: Sequence[str] | None, now: float) -> tuple[ResumeReport, list[Command]]:
        """Queue what `ids` name (see `resolve`), if it is suspended or about to be; what waits for `extend` is not."""
        known, unknown = self.resolve(ids)
        resumable = [record for record in known if record.resumable]
        others = tuple(record.trajectory_id for record in known if not record.resumable)
        report = ResumeReport(resumed=tuple(record.trajectory_id for record in resumable), unknown=unknown + others)
        commands: list[Command] = []
        for record in resumable:
            commands += self._suspensions.resume(record, now)
        return report, commands + self._settled(now)

    def extend(self, trajectory_id: TrajectoryId, ids: Sequence[int], call: str, now: float) -> list[Command]:
        """Append tokens that were not sampled to a suspended trajectory, and queue it. A `call` counts once.

        Raises `NotExtendableError` or `PromptTooLongError`, and nothing changes.
        """
        record = self._groups.get(trajectory_id)
        if record is not None and call in record.extended_by:
            return []
        record = check_extendable(trajectory_id, record, len(ids), self._roster.max_context)
        record.extended_by.add(call)
        record.columns.extend(Columns.given(ids))
        record.ended_turn = False
        return self._suspensions.resume(record, now) + self._settled(now)

    def resolve(self, ids: Sequence[str] | None) -> tuple[list[Record], tuple[TrajectoryId, ...]]:
        """The trajectories that `ids` name, a group's id standing for its members, and the ids that name none.

        None names all that were not handed out.
        """
        return self._groups.resolve(ids)

    def turns(self, known: Mapping[TrajectoryId, TurnMark], count: int) -> list[Trajectory]:
        """Up to `count` of those that ended a turn and wait for `extend`, oldest first, but the ones that are known."""
        return [record.snapshot() for record in itertools.islice(self._ended_turns(known), count)]

    def ended_turns(self, known: Mapping[TrajectoryId, TurnMark]) -> int:
        """How many `turns` could return."""
        return sum(1 for _ in self._ended_turns(known))

    def _ended_turns(self, known: Mapping[TrajectoryId, TurnMark]) -> Iterator[Record]:
        for record in self._groups.records():
            waits = record.ended_turn and record.phase is Phase.SUSPENDED
            if waits and known.get(record.trajectory_id) != record.turn_mark:
                yield record

    # Collecting, pausing, draining --------------------------------------------------------------------

    def begin_collection(self, collection: Collection, now: float) -> list[Command]:
        """Run no more groups of training than it wants, and a share more, at once; what was left before goes first.

        If it is to stop when it is met, everything else is stopped and held as soon as so many are complete
        (`groups.rest`).
        """
        return self._stops.begin_collection(collection, now) + self._settled(now)

    def reject(self, call: str, now: float) -> list[Command]:
        """A complete group does not count: another may run for it."""
        self._stops.reject(call)
        return self._settled(now)

    def end_collection(self, call: str, now: float) -> list[Command]:
        """Enough was collected by `call`; nothing happens if that has ended, or another took its place."""
        return self._stops.end_collection(call, now) + self._settled(now)

    @property
    def collectable(self) -> int:
        """Groups of training that were not taken and are finished, or will be without another command."""
        return self._groups.collectable

    def collected(self, call: str) -> float:
        """Finished groups of training that were not taken; infinite if another collection took the place of `call`."""
        other = self._roster.collection is not None and not self._stops.collects(call)
        return math.inf if other else self._groups.collected

    def take_collected(self, count: int, call: str) -> list[Delivery]:
        """As `take`, of finished groups of training."""
        return self._groups.take_collected(count, call)

    def pause(self, now: float) -> list[Command]:
        """Have no worker run a step until `unpause`."""
        return self._members.pause(PausedBy.DRIVER) + self._settled(now)

    def unpause(self, now: float) -> list[Command]:
        """Have them run again, once an update that is under way is over."""
        return self._members.unpause(PausedBy.DRIVER) + self._settled(now)

    def expect_workers(self, count: int) -> None:
        """So many more will come up; fewer than was said, if negative."""
        self._fleet.grow(count)

    def drain(self, worker: WorkerId, now: float) -> tuple[tuple[TrajectoryId, ...], list[Command]]:
        """Take a worker out of service: what is on it moves elsewhere, then `Retire` says that nothing is left.

        Raises `UnknownWorkerError` if it is not up, or if no other would be left.
        """
        known = {each.worker_id: each for each in self._fleet.workers}
        if worker not in known:
            raise UnknownWorkerError(f"worker: got {worker!r}, allowed: one of {', '.join(sorted(known)) or 'none'}")
        if all(each.leaving for name, each in known.items() if name != worker):
            raise UnknownWorkerError(f"worker: got {worker!r}, the only one in service; add another first")
        moved, commands = self._members.drain(worker, now)
        return moved, commands + self._settled(now)

    def release(self, workers: Iterable[WorkerId], now: float) -> tuple[tuple[TrajectoryId, ...], list[Command]]:
        """Workers give memory back: what is on them moves to the pool, and nothing starts there until `reclaim`."""
        moved: list[TrajectoryId] = []
        commands: list[Command] = []
        for worker in workers:
            there, more = self._members.release(worker, now)
            moved += there
            commands += more
        return tuple(moved), commands + self._settled(now)

    def reclaim(self, workers: Iterable[WorkerId], now: float) -> list[Command]:
        """They have their memory again."""
        for worker in workers:
            self._members.reclaim(worker)
        return self._settled(now)

    def is_empty(self, worker: WorkerId) -> bool:
        """Whether nothing runs on a worker, or has KV there."""
        return self._members.is_empty(worker)

    def flush(self, now: float) -> list[Command]:
        """Give up all KV of trajectories that do not run: they compute it again."""
        commands: list[Command] = []
        for record in self._groups.records():
            if not record.over:
                commands += self._suspensions.forget_kv(record)
        return commands + self._settled(now)

    def is_retired(self, worker: WorkerId) -> bool:
        """Whether it was drained and nothing was left on it."""
        return self._members.is_retired(worker)

    # Weights ------------------------------------------------------------------------------------------

    @property
    def weights(self) -> Weights:
        """Those that are live."""
        return self._roster.versions.live

    def reusable_with(self, weights: Weights) -> frozenset[WeightsId]:
        """Whose KV may be gone on with once these are live."""
        return self._roster.versions.reusable_with(weights)

    def announce_update(self, version: Version, now: float) -> list[Command]:
        """Other weights are about to be loaded: what would be too old then is stopped first."""
        return self._updates.announce(version, now) + self._settled(now)

    def begin_update(self, mode: UpdateMode, now: float) -> list[Command]:
        """Nothing starts until `end_update`; what runs is paused, suspended, or let end."""
        return self._updates.begin(mode, now) + self._settled(now)

    def clear_for_update(self, mode: UpdateMode) -> bool:
        """Whether what runs is as the mode wants it: the weights may be replaced."""
        return self._updates.clear(mode)

    def end_update(self, now: float) -> list[Command]:
        """Things go on, with whatever weights are live."""
        return self._updates.end(now) + self._settled(now)

    @property
    def staleness(self) -> Staleness:
        """How far what was handed out was behind, when it was."""
        return self._groups.staleness

    # How things stand ---------------------------------------------------------------------------------

    @property
    def complete_groups(self) -> int:
        """Finished groups that were not taken."""
        return self._groups.complete

    @property
    def coming_groups(self) -> int:
        """Groups that were not taken and are finished, or will be without another command."""
        return self._groups.coming

    @property
    def unfinished_groups(self) -> int:
        """Groups that are not over."""
        return self._groups.unfinished

    @property
    def busy(self) -> bool:
        """Whether anything can go on without another command."""
        live = self.weights.version
        going = (each for each in self._groups.records() if not each.over and each.phase is not Phase.SUSPENDED)
        return any(each.phase is not Phase.QUEUED or each.group.submission.admits(live) for each in going)

    @property
    def outstanding(self) -> int:
        """Trajectories that were not taken."""
        return self._groups.outstanding

    @property
    def phases(self) -> dict[Phase, int]:
        return dict(Counter(record.phase for record in self._groups.records()))

    @property
    def suspended(self) -> dict[str, int]:
        """Suspended trajectories by where their KV is, or `waiting`."""
        suspended = (record for record in self._groups.records() if record.phase is Phase.SUSPENDED)
        return dict(Counter(record.whereabouts for record in suspended))

    @property
    def troubles(self) -> tuple[str, ...]:
        """The last workers lost, exports and restores failed, images displaced and nodes that spilled."""
        return tuple(self._roster.troubles)

    @property
    def counters(self) -> RolloutCounters:
        return RolloutCounters(**self._roster.tally)

    @property
    def keeping(self) -> Keeping:
        """Where KV went, and why."""
        return self._roster.keeping

    def accounts(self) -> Accounts:
        """Where everything is that was ever submitted."""
        return self._groups.accounts()

    def stalled_s(self, now: float) -> float:
        """For how long nothing went on although something could; 0 if nothing can."""
        serving = any(not worker.released for worker in self._fleet.workers)
        may = self.busy and serving and not (self._fleet.paused or self._fleet.held)
        return now - self._moved_at if may else 0.0

    def state(self, now: float) -> dict[str, Any]:
        """What everything is doing, as plain values: for whoever asks why nothing goes on."""
        return {
            "stalled_s": round(self.stalled_s(now), 3),
            "phases": {str(phase): count for phase, count in self.phases.items()},
            "suspended": self.suspended,
            "workers": {
                str(worker.worker_id): {
                    "running": sorted(worker.running),
                    "max_running": worker.max_running,
                    "draining": worker.draining,
                    "released": worker.released,
                }
                for worker in self._fleet.workers
            },
            "queued": [_state(record) for record in self._fleet.queued[:8]],
            "moving": [_state(r) for r in self._groups.records() if r.phase is Phase.SUSPENDING][:8],
            "window": self._roster.window,
            "troubles": list(self.troubles),
        }

    # What happens -------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take an event in; returns what to do about it. An event that arrives twice changes nothing.

        Only `Freed`, which may come when its trajectory is forgotten, and a preemption in one report with an
        admission are counted as often as they are told.
        """
        moved, commands = self._reports.handle(event, now)
        return commands + self._settled(now, moved=moved)

    def _settled(self, now: float, *, moved: bool = True) -> list[Command]:
        """What else follows: policies, quotas, drains, and whatever may start now."""
        if moved:
            self._moved_at = now
        commands = self._stops.after_ends(now)
        commands += self._roster.dispatch(now)
        commands += self._follow_up(now)
        commands += self._stops.make_way(now)
        commands += self._members.retire(now)
        return commands + self._follow_up(now)

    def _follow_up(self, now: float) -> list[Command]:
        """What is to move before it starts, and what ended meanwhile."""
        commands: list[Command] = []
        while (stranded := self._fleet.take_stranded()) or self._roster.ended:
            for record in stranded:
                commands += self._suspensions.leave_home_for_pool(record, now)
            commands += self._stops.after_ends(now)
            commands += self._roster.dispatch(now)
        return commands


def _state(record: Record) -> dict[str, Any]:
    return {
        "trajectory": record.trajectory_id,
        "phase": str(record.phase),
        "tokens": len(record.columns),
        "workers": list(record.workers),
        "intent": str(record.intent),
        "transfer": str(record.transfer),
    }
