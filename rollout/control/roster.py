"""Every trajectory with the workers, and the moves that all parts of the controller make: queue, start, end.

A trajectory is in the queue if and only if it is `queued`, in a worker's set if and only if it is on that worker.
"""

from collections import Counter, deque

from rollout.config import AbortConfig, GroupsConfig, ResumeConfig, SliceBudget, WeightsConfig
from rollout.control.collection import Collection
from rollout.control.commands import Command, Release, Start, Watch
from rollout.control.fleet import Fleet, Worker
from rollout.control.groups import Groups
from rollout.control.intent import Home, Intent
from rollout.control.keeping import Keeping
from rollout.control.policies import Policies
from rollout.control.records import Group, Record
from rollout.control.routing import Router, away_s, most_room, to_go
from rollout.control.versions import Versions
from rollout.types import AbortReason, FinishReason, Keep, Phase, Priority, Then, Weights

TROUBLES = 20
"""How many are remembered."""


class Roster:
    """Mutable, shared by the parts of the controller."""

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
        sliced = abort.policy(SliceBudget)
        slice_tokens = sliced.tokens if sliced is not None else None
        self.versions = Versions(weights, versions.kv_reuse)
        self.keeping = Keeping(self.versions)
        self.fleet = Fleet(
            size=workers,
            prefer_other=resume.prefer == "other",
            choose=Router(slice_tokens, self.keeping.experience).choose if resume.prefer == "cheapest" else most_room,
            patience=lambda record: away_s(record, self.fleet.workers, self.keeping.experience),
            to_go=to_go if resume.order == "longest" else None,
        )
        self.groups = Groups(self.versions)
        self.rules = groups
        self.policies = Policies(abort, self.versions, max_resumes=resume.max_resumes)
        self.tally: Counter[str] = Counter()
        self.troubles: deque[str] = deque(maxlen=TROUBLES)
        self.ended: list[Record] = []
        """Since the controller last looked."""
        self.collection: Collection | None = None
        """The one that is under way."""
        self.max_context = max_context
        self.version_timeout_s = versions.version_timeout_s

    @property
    def window(self) -> int | None:
        """So many groups may be under way at once; None: any number."""
        return self.collection.window if self.collection is not None else None

    # Waiting and starting -----------------------------------------------------------------------------

    def enqueue(self, record: Record, now: float) -> list[Command]:
        """The trajectory waits for a worker, if it has anything left to do and may find one."""
        self.groups.unhold(record)
        if record.budget_spent or record.tokens >= self.max_context:
            return self.end(record, FinishReason.LENGTH, now)
        return self.wait(record, now)

    def wait(self, record: Record, now: float) -> list[Command]:
        """The trajectory waits for a worker, whatever it is to do there."""
        if self.fleet.hopeless is not None:
            return self.fail(record, self.fleet.hopeless, now)
        if record.phase is not Phase.QUEUED:
            record.enter(Phase.QUEUED)
        record.waits_since = now
        self.fleet.enqueue(record)
        return record.pooled.expect(record.turn)

    def end_waiting(self, group: Group, now: float) -> list[Command]:
        """A group has no tokens left: its members that wait to go on are over."""
        commands: list[Command] = []
        for record in group.members:
            if record.phase is Phase.QUEUED and not waits_for_kv_only(record):
                self.fleet.dequeue(record)
                commands += self.end(record, FinishReason.LENGTH, now)
        return commands

    def dispatch(self, now: float) -> list[Command]:
        """Start what can be."""
        commands: list[Command] = []
        full = self._full

        def may_start(record: Record) -> bool:
            return self.may_start(record, full=full)

        among = self.groups.begun_and_queued() if full else None
        for record, worker in self.fleet.starts(may_start, now, among=among):
            commands += self._start(record, worker, now)
            full = self._full
        return commands

    @property
    def _full(self) -> bool:
        """No other training group may begin."""
        window = self.window
        return window is not None and self.groups.under_way >= window

    def may_start(self, record: Record, *, full: bool) -> bool:
        """Whether a queued trajectory lacks nothing but a place; with a `full` window no training group begins."""
        if not (record.group.submission.admits(self.versions.live.version) or waits_for_kv_only(record)):
            return False
        if full and record.priority is Priority.TRAIN and not self.groups.has_begun(record.group):
            return False
        left = record.group.budget_left
        return left is None or left > 0 or waits_for_kv_only(record)

    def _start(self, record: Record, worker: Worker, now: float) -> list[Command]:
        commands: list[Command] = []
        record.promoting = waits_for_kv_only(record)
        if not record.promoting:
            if record.stopped_for is not None:
                self.keeping.experience.resumed(record, record.stopped_for, now - record.stopped_at)
            record.intent = record.stopped_for = None
            record.abort_reason = None
            record.ended_turn = False
            if record.lost:
                self.tally["restarts"] += 1
            elif record.starts:
                self.tally["resumes"] += 1
                self.tally["resumed_elsewhere"] += record.worker != worker.worker_id
        record.lost = False
        assert record.home is None or record.home.worker == worker.worker_id, f"{record.trajectory_id} has a home"
        record.refused_at = record.moved_from = None
        loads = record.pooled.image is not None or record.home is not None
        record.came_from = self.settle_at(record, None)  # what is there is the worker's affair now
        record.workers.append(worker.worker_id)
        record.starts += 1
        record.epoch += 1
        record.enter(Phase.RESTORING if loads else Phase.PREFILLING)
        self.groups.begin(record.group)
        worker.ran(record.group_id)
        commands += record.pooled.expect(record.turn)
        watch = Watch(only_loads=True) if record.promoting else self._watch(record)
        commands.append(
            Start(worker=worker.worker_id, assignment=record.assignment(watch=watch, max_context=self.max_context))
        )
        return commands

    def _watch(self, record: Record) -> Watch:
        """With a fair part of what is left of its group's budget, if that has one."""
        # It is on its worker by now, with nothing allowed yet.
        record.allowed_tokens = record.sampled_tokens
        left, allowed = record.group.budget_left, None
        if left is not None:
            others = sum(not member.over and not member.on_worker for member in record.group.members)
            allowed = max(1, left // (others + 1))
            record.allowed_tokens += allowed
        return self.policies.watch(record, allowed)

    # Stopping and ending ------------------------------------------------------------------------------

    def stopped(self, record: Record, intent: Intent, now: float) -> None:
        """It is out of the batch, for this."""
        record.abort_reason = intent.reason
        record.stopped_at = now
        record.stopped_for = intent if intent.continues else None

    def settle_at(self, record: Record, home: Home | None) -> Home | None:
        """From now on its KV is kept there; returns where it was before."""
        before, record.home = record.home, home
        for place in (before, home):
            worker = self.fleet.get(place.worker) if place is not None else None
            if worker is not None and place is not None and place.where is Keep.DEVICE:
                if place is home:
                    worker.kept[record.trajectory_id] = place.kv_tokens
                else:
                    worker.kept.pop(record.trajectory_id, None)
        return before

    def leave_home(self, record: Record) -> list[Command]:
        """What the trajectory has on a worker is not needed any more."""
        home = self.settle_at(record, None)
        if home is None:
            return []
        return [Release(worker=home.worker, trajectory_id=record.trajectory_id, epoch=home.epoch)]

    def end(self, record: Record, reason: FinishReason, now: float) -> list[Command]:
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            record.abort_reason = None
        return self._over(record, Phase.FAILED if reason is FinishReason.ERROR else Phase.FINISHED, reason, now)

    def drop(self, record: Record, reason: AbortReason, now: float) -> list[Command]:
        """It leaves its group."""
        record.abort_reason = reason
        return self._over(record, Phase.DROPPED, FinishReason.ABORT, now)

    def fail(self, record: Record, error: str, now: float) -> list[Command]:
        record.error = error
        return self.end(record, FinishReason.ERROR, now)

    def _over(self, record: Record, phase: Phase, reason: FinishReason, now: float) -> list[Command]:
        record.enter(phase)
        record.finish_reason = reason
        record.finished_at = now
        record.intent = None
        if record.stopped_for is not None:
            self.keeping.experience.ended(record, record.stopped_for)
        self.groups.unhold(record)
        self.groups.ended(record)
        self.ended.append(record)
        return [*self.leave_home(record), *record.pooled.replace(None)]


def waits_for_kv_only(record: Record) -> bool:
    """A queued trajectory is to be held, on a worker that has its KV."""
    return record.intent is not None and record.intent.then is not Then.REQUEUE
