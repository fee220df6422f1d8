"""Chooses where the KV of a stopped trajectory goes, remembers why, and learns from what became of it."""

import math
from collections import Counter, deque
from collections.abc import Mapping

from rollout.control.costs import Case, costs_s
from rollout.control.experience import Experience
from rollout.control.fleet import Worker
from rollout.control.intent import Intent
from rollout.control.messages import PoolRoom, WorkerFacts
from rollout.control.records import Record
from rollout.control.versions import Versions
from rollout.metrics import Choice, Decision
from rollout.types import AbortReason, Keep, NodeId

REMEMBERED = 256
"""Decisions."""
PROBE_EVERY = 16
"""Decisions against a place, after which one goes there all the same, so that what it costs is measured again."""
PROBE_FACTOR = 2.0
"""A place that costs more than so many times the best is not tried."""
UNKNOWN = WorkerFacts(free_tokens=0, host_free_tokens=0, token_bytes=0)


class Keeping:
    """Decides where KV goes, by what is told or by the cost model, and counts what it decided."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self.experience = Experience()
        self.pools: dict[NodeId, PoolRoom] = {}
        self._last: deque[Decision] = deque(maxlen=REMEMBERED)
        self._counts: Counter[tuple[AbortReason, Keep]] = Counter()
        self._refused: Counter[Keep] = Counter()
        """Decisions since a place was last chosen."""

    def decide(self, record: Record, intent: Intent, kv_tokens: int, worker: Worker, now: float) -> Keep:
        """Where the KV of `record`, which `worker` has `kv_tokens` of, goes; `intent` may have said so already."""
        likely, wait_s = self.experience.likely(record, intent), self.experience.wait_s(record, intent)
        same_weights = self.experience.same_weights(wait_s, now, updates=self._versions.most_behind)
        costs: Mapping[Keep, float] = {}
        keep, by = intent.keep, Choice.TOLD
        if not intent.continues or (keep is Keep.AUTO and not (kv_tokens or record.pooled.kv_tokens)):
            keep = Keep.NONE
        elif keep is Keep.AUTO and kv_tokens < record.pooled.kv_tokens:
            keep = Keep.POOL  # it stopped before it had as much again
        elif keep is Keep.AUTO:
            costs = costs_s(self._case(record, kv_tokens, worker, likely, same_weights, wait_s, now))
            keep, by = self._choose(costs)
        decision = Decision(
            trajectory_id=record.trajectory_id,
            reason=intent.reason,
            then=intent.then,
            keep=keep,
            by=by,
            costs_s=costs,
            kv_tokens=kv_tokens,
            likely=likely * same_weights,
            wait_s=wait_s,
        )
        self._last.append(decision)
        self._counts[intent.reason, keep] += 1
        return keep

    @property
    def made(self) -> int:
        """Decisions so far."""
        return self._counts.total()

    @property
    def last(self) -> tuple[Decision, ...]:
        """The latest ones, oldest first."""
        return tuple(self._last)

    @property
    def counts(self) -> dict[AbortReason, dict[Keep, int]]:
        """Decisions by reason."""
        by_reason: dict[AbortReason, dict[Keep, int]] = {}
        for (reason, keep), count in sorted(self._counts.items()):
            by_reason.setdefault(reason, {})[keep] = count
        return by_reason

    def _choose(self, costs: Mapping[Keep, float]) -> tuple[Keep, Choice]:
        best = min(costs, key=lambda keep: costs[keep])
        by = Choice.MODEL
        for keep in (Keep.HOST, Keep.POOL):
            near = costs[keep] <= PROBE_FACTOR * costs[best] and costs[keep] < math.inf
            if keep is best or not near:
                continue
            self._refused[keep] += 1
            if self._refused[keep] >= PROBE_EVERY:
                best, by = keep, Choice.PROBE
        self._refused[best] = 0
        return best, by

    def _case(
        self,
        record: Record,
        kv_tokens: int,
        worker: Worker,
        likely: float,
        same_weights: float,
        wait_s: float,
        now: float,
    ) -> Case:
        room = self.pools.get(worker.node)
        siblings = any(not other.over for other in record.group.members if other is not record)
        return Case(
            kv_tokens=kv_tokens,
            pooled_tokens=min(kv_tokens, record.pooled.kv_tokens),
            shared_tokens=min(kv_tokens, len(record.prompt_ids)) if siblings else 0,
            likely=likely,
            same_weights=same_weights,
            wait_s=wait_s,
            turnover_tokens_s=worker.turnover_tokens_s,
            kept_tokens=sum(worker.kept.values()),
            lost_share=worker.lost_share(now),
            worker=worker.facts or UNKNOWN,
            pool_free_bytes=room.free_bytes if room is not None else math.inf,
            pool_budget_bytes=room.budget_bytes if room is not None else math.inf,
            export=self.experience.export_pace,
            place_share=1.0 / worker.max_running,
        )
