"""What a simulation came to, so far or from one moment to another. Frozen values."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rollout.metrics import RolloutCounters
from rollout.types import AbortReason, Keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Over all workers."""

    seconds: float
    """Virtual."""
    counters: RolloutCounters
    """The controller's: tokens, and where the KV of resumed trajectories came from."""
    busy_s: tuple[float, ...]
    """Of each worker: in steps that ran something."""
    steps: int
    """Of all engines."""
    prefilled_tokens: int
    """Positions computed by prefill, for the first time or again."""
    sent_bytes: int
    """Of KV, written to the pool."""
    shared_bytes: int
    """Not written to the pool, since it had them."""
    restored_bytes: int
    """Read from the pool."""
    saved_bytes: int
    """Copied to host memory, for suspended trajectories or by the write policy."""
    loaded_bytes: int
    """Copied from host memory."""
    decisions: Mapping[AbortReason, Mapping[Keep, int]]
    """Where KV went, by what stopped the trajectory, number."""

    @property
    def tokens(self) -> int:
        """Sampled."""
        return self.counters.tokens

    @property
    def idle_share(self) -> float:
        """Of the workers' time, in which they ran nothing."""
        whole = self.seconds * len(self.busy_s)
        return max(0.0, 1.0 - sum(self.busy_s) / whole) if whole else 0.0

    @property
    def read_bytes(self) -> int:
        return self.restored_bytes + self.loaded_bytes

    def since(self, earlier: "Outcome") -> "Outcome":
        """What came after an earlier outcome of the same simulation."""
        before = asdict(earlier.counters)
        counters = {name: count - before[name] for name, count in asdict(self.counters).items()}
        decisions = {
            reason: dict(Counter(places) - Counter(earlier.decisions.get(reason, {})))
            for reason, places in self.decisions.items()
        }
        return Outcome(
            seconds=self.seconds - earlier.seconds,
            counters=RolloutCounters(**counters),
            busy_s=tuple(now - then for now, then in zip(self.busy_s, earlier.busy_s, strict=True)),
            steps=self.steps - earlier.steps,
            prefilled_tokens=self.prefilled_tokens - earlier.prefilled_tokens,
            sent_bytes=self.sent_bytes - earlier.sent_bytes,
            shared_bytes=self.shared_bytes - earlier.shared_bytes,
            restored_bytes=self.restored_bytes - earlier.restored_bytes,
            saved_bytes=self.saved_bytes - earlier.saved_bytes,
            loaded_bytes=self.loaded_bytes - earlier.loaded_bytes,
            decisions={reason: places for reason, places in decisions.items() if places},
        )
