"""What this worker was seen to take for prefill and for copies from the host, as moving averages."""

PROBE_EVERY = 16
"""Of so many loads that are not worth it, one is made."""
WEIGHT = 0.2
"""Of a new measurement."""


class Rates:
    """Compares recomputing a prefix with loading it from the host. Seconds, tokens and bytes."""

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

    def prefilled(self, tokens: int, seconds: float) -> None:
        self._prefill_s = _average(self._prefill_s, seconds / tokens)

    def copied(self, nbytes: int, seconds: float) -> None:
        self._copy_s = _average(self._copy_s, seconds / nbytes * self._token_bytes)

    def loaded(self, tokens: int, seconds: float) -> None:
        """A sequence that only waited for `tokens` to be loaded did so for `seconds`."""
        copying_s = tokens * (self._copy_s or 0.0)
        self._wait_s = _average(self._wait_s, max(0.0, seconds - copying_s))


def _average(before: float | None, seen: float) -> float:
    return seen if before is None else (1.0 - WEIGHT) * before + WEIGHT * seen
