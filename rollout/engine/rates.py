"""What this worker was seen to take: for prefill, decode steps, and copies between device, host and pool."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.control.paces import Pace, PaceMeter, PrefillTimes, magnitude
from rollout.kv.tiers import Tier

PROBE_EVERY = 16
"""Of so many loads that are not worth it, one is made."""
WEIGHT = 0.2
"""Of a new measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paces:
    """What the rest of the service is told; see `WorkerFacts`."""

    prefill: PrefillTimes
    step: Pace | None
    restore: Pace | None
    load: Pace | None
    save: Pace | None
    moving_share: float | None


class Rates:
    """Measures, and compares recomputing a prefix with loading it from the host. Seconds, tokens and bytes."""

    def __init__(self, token_bytes: int, load_back_tokens: int | None) -> None:
        """`load_back_tokens` given: nothing is compared."""
        self._token_bytes = token_bytes
        self._fixed = load_back_tokens
        self._prefill_s: float | None = None
        """Of one token."""
        self._copy_s: float | None = None
        """Of one token, between host and device."""
        self._wait_s: float | None = None
        """From a load's admission until the sequence runs, without the copying itself."""
        self._prefill_at: list[float | None] = []
        """Of one token, by the binary logarithm of its position."""
        self._step = PaceMeter()
        self._calm_step = PaceMeter()
        """While no KV was moved."""
        self._moving_share: float | None = None
        self._restore = PaceMeter(flat=True)
        self._load = PaceMeter(flat=True)
        self._save = PaceMeter(flat=True)
        self._refused = 0
        """Loads that were not made, since the last that was made all the same."""

    def worth_loading(self, tokens: int) -> bool:
        """Whether a prefix of `tokens` tokens on the host is loaded; now and then one is that need not be, which
        measures again what is compared."""
        if tokens >= self.load_back_tokens:
            return True
        if self._fixed is not None:
            return False
        self._refused = (self._refused + 1) % PROBE_EVERY
        return self._refused == 0

    @property
    def load_back_tokens(self) -> float:
        """Least length of a prefix on the host that is loaded rather than computed again.

        Until everything was measured, all are loaded: that is how it gets measured.
        """
        if self._fixed is not None:
            return self._fixed
        if self._prefill_s is None or self._copy_s is None or self._wait_s is None:
            return 0
        gain_s = self._prefill_s - self._copy_s
        return self._wait_s / gain_s if gain_s > 0 else float("inf")

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        return self._token_bytes

    @property
    def paces(self) -> Paces:
        return Paces(
            prefill=PrefillTimes(tuple(self._prefill_at)),
            step=self._step.pace,
            restore=self._restore.pace,
            load=self._load.pace,
            save=self._save.pace,
            moving_share=self._moving_share,
        )

    def prefilled(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """Positions [start, end) of each sequence were computed in one step, all together in `seconds`."""
        token_s = seconds / sum(end - start for start, end in chunks)
        self._prefill_s = _average(self._prefill_s, token_s)
        last = magnitude(max(end for _, end in chunks) - 1)
        self._prefill_at += [None] * (last + 1 - len(self._prefill_at))
        for at in {i for start, end in chunks for i in range(magnitude(start), magnitude(end - 1) + 1)}:
            self._prefill_at[at] = _average(self._prefill_at[at], token_s)

    def stepped(self, sequences: int, seconds: float, *, moving: bool) -> None:
        """A decode step of so many sequences, without the prefill beside it; `moving` if KV was moved meanwhile."""
        self._step.saw(sequences, seconds)
        if not moving:
            self._calm_step.saw(sequences, seconds)
        elif seconds and (calm := self._calm_step.pace) is not None:
            lost = max(0.0, 1.0 - calm.seconds(sequences) / seconds)
            self._moving_share = _average(self._moving_share, lost)

    def copied(self, to: Tier, nbytes: int, seconds: float) -> None:
        self._copy_s = _average(self._copy_s, seconds / nbytes * self._token_bytes)
        if to is Tier.HOST:
            self._save.saw(nbytes, seconds)

    def loaded(self, tokens: int, seconds: float) -> None:
        """A sequence that only waited for `tokens` to be loaded did so for `seconds`."""
        copying_s = tokens * (self._copy_s or 0.0)
        self._wait_s = _average(self._wait_s, max(0.0, seconds - copying_s))
        self._load.saw(tokens * self._token_bytes, seconds)

    def restored(self, tokens: int, seconds: float) -> None:
        """A sequence that only waited for `tokens` to be read from the pool did so for `seconds`."""
        self._restore.saw(tokens * self._token_bytes, seconds)


def _average(before: float | None, seen: float) -> float:
    return seen if before is None else (1.0 - WEIGHT) * before + WEIGHT * seen
