"""What stops trajectories, by the configuration: who is to be stopped now, why, and what becomes of it.

Where the facts are a worker's own (slices, absolute length, repetition, short memory) it looks itself after every step,
for what the `Watch` of an assignment says. Everything else is looked at here, after the event that may make it true.
Decides only; changes nothing but what it remembers: deadlines, and of a batch that its tail was stopped.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence

from rollout.config import (
    AbortConfig,
    Deadline,
    Memory,
    OverLong,
    Policy,
    Quota,
    Repetition,
    Section,
    SliceBudget,
    Stale,
    Tail,
)
from rollout.control.commands import RepetitionWatch, Watch
from rollout.control.intent import Intent
from rollout.control.lengths import Lengths
from rollout.control.records import Record
from rollout.control.versions import Versions
from rollout.types import AbortReason, Keep, Then, TrajectoryId, Version


def _unless_told(kind: type[Section]) -> tuple[Keep, Then]:
    """What a policy of this kind says if its entry does not."""
    return Keep(kind.model_fields["keep"].default), Then(kind.model_fields["then"].default)


DEFAULTS = {
    AbortReason.SLICE_BUDGET: _unless_told(SliceBudget),
    AbortReason.DEADLINE: _unless_told(Deadline),
    AbortReason.QUOTA: _unless_told(Quota),
    AbortReason.MEMORY: _unless_told(Memory),
    AbortReason.BUDGET: (Keep.AUTO, Then.REQUEUE),
    AbortReason.TURN: (Keep.AUTO, Then.HOLD),
    AbortReason.PRIORITY: (Keep.AUTO, Then.REQUEUE),
    AbortReason.DRAIN: (Keep.POOL, Then.REQUEUE),
    AbortReason.WEIGHTS: (Keep.AUTO, Then.REQUEUE),
    AbortReason.RELEASE: (Keep.POOL, Then.REQUEUE),
    AbortReason.GROUP_FAILED: (Keep.NONE, Then.FINISH),
}
"""Of what stops trajectories without a policy of its own."""


class Policies:
    """One of each kind at most."""

    def __init__(self, config: AbortConfig, versions: Versions, *, max_resumes: int | None) -> None:
        self._keep = Keep(config.keep)
        self._config = config
        self._versions = versions
        self._max_resumes = max_resumes
        self._deadlines: list[tuple[float, int, TrajectoryId]] = []
        self._over_long = config.policy(OverLong)
        self._stale = config.policy(Stale)
        self._tail = config.policy(Tail)

    def intent(self, reason: AbortReason) -> Intent:
        """What becomes of a trajectory that is stopped for `reason`."""
        for policy in self._config.policies:
            if policy.kind == reason:
                return Intent(keep=self.resolve(Keep(policy.keep)), then=Then(policy.then), reason=reason)
        keep, then = DEFAULTS[reason]
        return Intent(keep=self.resolve(keep), then=then, reason=reason)

    def resolve(self, keep: Keep) -> Keep:
        """What `auto` means."""
        return self._keep if keep is Keep.AUTO else keep

    def watch(self, record: Record, allowed_tokens: int | None) -> Watch:
        """What a worker is to look for; `allowed_tokens` is what the group's budget lets it sample."""
        sliced = self._config.policy(SliceBudget)
        slices = [allowed_tokens] if allowed_tokens is not None else []
        if sliced is not None and self._may_stop(record, sliced):
            slices.append(sliced.tokens)
        most_tokens = None
        if self._over_long is not None and AbortReason.OVER_LONG not in record.fired:
            most_tokens = self._over_long.tokens if self._may_stop(record, self._over_long) else None
        return Watch(
            slice_tokens=min(slices, default=None),
            most_tokens=most_tokens,
            repetition=self._repetition(record),
            turns=record.group.submission.multi_turn,
        )

    def _repetition(self, record: Record) -> RepetitionWatch | None:
        policy = self._config.policy(Repetition)
        if policy is None or AbortReason.REPETITION in record.fired or not self._may_stop(record, policy):
            return None
        return RepetitionWatch(ngram=policy.ngram, times=policy.times, min_tokens=policy.min_tokens)

    # Looked at here -----------------------------------------------------------------------------------

    def submitted(self, record: Record) -> None:
        """Remember its deadline, if it has one."""
        policy = self._config.policy(Deadline)
        seconds = record.group.submission.deadline_s
        if seconds is None and policy is not None:
            seconds = policy.seconds
        if seconds is not None:
            heapq.heappush(self._deadlines, (record.group.submitted_at + seconds, record.order, record.trajectory_id))

    def due(self, find: Callable[[TrajectoryId], Record | None], now: float) -> Iterator[Record]:
        """Those whose deadline has passed, each once; `find` knows those that were not handed out."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, order, trajectory_id = heapq.heappop(self._deadlines)
            record, policy = find(trajectory_id), self._config.policy(Deadline)
            there = record is not None and record.order == order and not record.over
            if record is not None and there and (policy is None or self._may_stop(record, policy)):
                yield record

    def too_long(self, record: Record) -> bool:
        """Whether it has become longer than finished ones allow."""
        policy = self._over_long
        if policy is None or policy.factor is None or AbortReason.OVER_LONG in record.fired:
            return False
        lengths = self._lengths(record, policy)
        if len(lengths) < policy.min_finished or not self._may_stop(record, policy):
            return False
        return record.sampled_tokens > policy.factor * lengths.median

    def after_end(self, record: Record) -> list[tuple[Record, AbortReason]]:
        """Who is to be stopped since `record` is over: those that are too long now, and the tail of its batch."""
        stopped: list[tuple[Record, AbortReason]] = []
        policy, batch = self._over_long, record.group.batch
        if policy is not None and policy.factor is not None:
            others: Iterable[Record] = batch.open.values() if policy.of == "batch" else record.group.members
            stopped += [(each, AbortReason.OVER_LONG) for each in others if not each.over and self.too_long(each)]
        if self._tail is not None and not batch.tailed and 0 < len(batch.open) <= self._tail.share * batch.size:
            batch.tailed = True
            tail = [each for each in batch.open.values() if self._may_stop(each, self._tail)]
            stopped += [(each, AbortReason.TAIL) for each in tail]
        return stopped

    def stale(self, records: Iterable[Record], live: Version) -> list[Record]:
        """Those whose tokens are too old if `live` is."""
        return [record for record in records if not record.over and self._too_old(record, live)]

    def late(self, record: Record, news: Sequence[Version | None]) -> bool:
        """Whether it is too old by tokens that were told only now, but not sampled with what is live."""
        live = self._versions.live.version
        late = self._stale is not None and any(version != live for version in news)
        return late and self._too_old(record, live)

    def _too_old(self, record: Record, live: Version) -> bool:
        policy = self._stale
        if policy is None or not self._may_stop(record, policy):
            return False
        return _is_stale(record.columns.versions, live, policy)

    def _may_stop(self, record: Record, policy: Policy) -> bool:
        """A trajectory that was resumed often enough is left alone by what would only make it wait again."""
        waits = Then(policy.then) in (Then.REQUEUE, Then.HOLD, Then.RETRY)
        return self._max_resumes is None or not waits or len(record.resumes) + len(record.attempts) < self._max_resumes

    def _lengths(self, record: Record, policy: OverLong) -> Lengths:
        return record.group.batch.lengths if policy.of == "batch" else record.group.lengths


def _is_stale(versions: Sequence[Version | None], live: Version, policy: Stale) -> bool:
    sampled = [version for version in versions if version is not None]
    if not sampled:
        return False
    if policy.behind is not None and live - min(sampled) >= policy.behind:
        return True
    old = sum(live - version >= policy.age for version in sampled)
    return policy.share is not None and old > policy.share * len(sampled)
