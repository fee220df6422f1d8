"""Stops trajectories: for drivers, for policies, for one that goes first, and for a quota that is met."""

from collections.abc import Sequence
from dataclasses import replace

from rollout.control.collection import Collection
from rollout.control.commands import Command, Stop
from rollout.control.intent import WORKER_TIERS, Intent
from rollout.control.records import Record
from rollout.control.roster import Roster
from rollout.control.suspension import Suspensions
from rollout.types import AbortReason, Phase, Priority, Then


class Stops:
    """What takes trajectories out of the batch."""

    def __init__(self, roster: Roster, suspensions: Suspensions) -> None:
        self._roster = roster
        self._suspensions = suspensions

    def stop(self, record: Record, intent: Intent, now: float) -> list[Command]:
        """An abort of a trajectory that is not over; a second one changes only what becomes of it.

        What was given up stays so, and what waits for `extend` waits on, whatever is said of it later.
        """
        if record.intent is not None and record.intent.reason is AbortReason.DISCARD:
            return []
        if record.ended_turn and intent.then is Then.REQUEUE:
            intent = replace(intent, then=Then.HOLD)
        if intent.then is not Then.HOLD:
            self._roster.groups.unhold(record)
        if not record.on_worker:
            return self._suspensions.change(record, intent, now)
        stopping, record.intent = record.intent is not None, intent
        if record.promoting:
            stopping = intent.keeps and intent.keep in WORKER_TIERS  # it parks once it has its KV
        if stopping:
            return []
        return [Stop(worker=record.workers[-1], trajectory_id=record.trajectory_id, epoch=record.epoch)]

    def fire(self, record: Record, reason: AbortReason, now: float) -> list[Command]:
        """A policy stops a trajectory, unless what it does, or is about to, goes as far already."""
        intent = self._roster.policies.intent(reason)
        if record.over or _reach(intent.then) <= _reached(record):
            return []
        record.fired.add(reason)
        if intent.then is Then.RETRY and record.held and not record.ended_turn:
            return self._suspensions.begin_again(record, reason)  # and stays held
        return self.stop(record, intent, now)

    def after_ends(self, now: float) -> list[Command]:
        """What follows from trajectories that are over since this was called last."""
        commands: list[Command] = []
        while self._roster.ended:
            ended = self._roster.ended.pop()
            if ended.phase is Phase.FAILED:
                commands += self._group_failed(ended, now)
            discarded = self._roster.groups.get(ended.trajectory_id) is None
            counts = ended.group.over and not discarded and ended.priority is Priority.TRAIN
            if self._roster.collection is not None and counts:
                self._roster.collection.over.add(ended.group_id)
            for record, reason in self._roster.policies.after_end(ended):
                commands += self.fire(record, reason, now)
        collection = self._roster.collection
        if collection is not None and collection.stop_when_met and self._roster.groups.collected >= collection.wanted:
            commands += self.end_collection(collection.call, now)
        return commands

    def _group_failed(self, failed: Record, now: float) -> list[Command]:
        """Unless a group does without members that fail, the others are stopped and it carries the error."""
        group = failed.group
        if self._roster.rules.failed_member == "keep" or group.error is not None:
            return []
        group.error = f"{failed.trajectory_id}: {failed.error}"
        intent = self._roster.policies.intent(AbortReason.GROUP_FAILED)
        commands: list[Command] = []
        for other in group.members:
            if not other.over:
                commands += self.stop(other, intent, now)
        return commands

    def make_way(self, now: float) -> list[Command]:
        """Evaluation that waits takes the place of the youngest training trajectories; of those on the worker that has
        its KV, if one has."""
        evaluation = self._roster.fleet.evaluation
        if self._roster.fleet.paused or self._roster.fleet.held or not evaluation:
            return []
        running = [
            record
            for worker in self._roster.fleet.workers
            if not worker.leaving
            for trajectory_id in worker.running
            if (record := self._roster.groups.get(trajectory_id)) is not None
        ]
        leaving = [record for record in running if record.intent is not None]
        able = [record for record in running if record.intent is None and record.priority is Priority.TRAIN]
        able.sort(key=lambda record: -record.order)
        waiting = [record for record in evaluation if self._lacks_only_a_place(record)]
        commands: list[Command] = []
        for record in sorted(waiting, key=lambda record: record.home is None):
            made = _in_reach(record, leaving)
            if made is not None:
                leaving.remove(made)
            elif (youngest := _in_reach(record, able)) is not None:
                able.remove(youngest)
                commands += self.fire(youngest, AbortReason.PRIORITY, now)
        return commands

    def _lacks_only_a_place(self, record: Record) -> bool:
        return record.intent is None and self._roster.may_start(record, full=False)

    # Collecting ---------------------------------------------------------------------------------------

    def begin_collection(self, collection: Collection, now: float) -> list[Command]:
        """Have groups run until as many as wanted are complete, and no more than these and some more at once.

        What an earlier collection left goes on, unless enough are complete already. One that is under way ends.
        """
        collection = replace(collection, begun_with=self._roster.groups.collected, over=set())
        self._roster.collection = collection
        commands: list[Command] = []
        if collection.stop_when_met and collection.begun_with >= collection.wanted:
            return self.after_ends(now)
        for record in self._roster.groups.records():
            reason = record.intent.reason if record.intent is not None else record.abort_reason
            if reason is AbortReason.QUOTA and not record.ended_turn:
                commands += self._suspensions.resume(record, now)
        return commands + self.after_ends(now)

    def reject(self, call: str) -> None:
        """A group that was complete does not count: another may be begun for it."""
        if self.collects(call) and self._roster.collection is not None:
            self._roster.collection.rejected += 1

    def collects(self, call: str) -> bool:
        """Whether this collection is under way: it has not ended, and no other took its place."""
        return self._roster.collection is not None and self._roster.collection.call == call

    def end_overdue(self, now: float) -> list[Command]:
        """End a collection whose driver does not."""
        collection = self._roster.collection
        return self.end_collection(collection.call, now) if collection is not None and now >= collection.ends_at else []

    def end_collection(self, call: str, now: float) -> list[Command]:
        """Enough: what is not over is stopped and held for the next collection, unless it is to run on. Evaluation does
        in any case."""
        if not self.collects(call):
            return []
        self._roster.collection = None
        if self._roster.rules.rest == "withhold":
            return []
        commands: list[Command] = []
        intent = self._roster.policies.intent(AbortReason.QUOTA)
        for record in self._roster.groups.records():
            idle = record.over or record.phase is Phase.SUSPENDED or record.priority is Priority.EVAL
            if not idle and (record.intent is None or record.intent.then is Then.REQUEUE):
                commands += self.stop(record, intent, now)
        return commands


def _in_reach(record: Record, running: Sequence[Record]) -> Record | None:
    """The first of these whose place `record` would take."""
    home = record.home.worker if record.home is not None else None
    return next((each for each in running if home in (None, each.worker)), None)


def _reach(then: Then) -> int:
    """How much an abort changes: it waits, it waits for a command, it does not go on with what it has."""
    return {Then.REQUEUE: 1, Then.HOLD: 2}.get(then, 3)


def _reached(record: Record) -> int:
    if record.intent is not None:
        return _reach(record.intent.then)
    return {Phase.QUEUED: 1, Phase.SUSPENDED: 2}.get(record.phase, 0)
