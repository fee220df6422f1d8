"""What something takes by its size, and how that is learnt from what it took: by a line through the latest."""

from dataclasses import dataclass

DECAY = 0.98
"""Of the weight of what was seen before, with each measurement."""
LEAST_SPREAD = 1e-3
"""Variance of the sizes over their squared mean. What was learnt from sizes further apart is not forgotten for ones
that are less: a batch that stays about as large for long says nothing about how a step's time depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What moving or computing something takes: `fixed_s` and `unit_s` for each token, byte or sequence of it."""

    fixed_s: float
    unit_s: float

    def seconds(self, units: float) -> float:
        return self.fixed_s + self.unit_s * units


def seconds_at(pace: Pace | None, units: float) -> float:
    """What was never measured takes no time."""
    return pace.seconds(units) if pace is not None else 0.0


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """What prefill takes by position: that of a token depends on how much is before it."""

    token_s: tuple[float | None, ...] = ()
    """Of one token, where its position is in [2^i, 2^(i+1)), for i = 0, 1, …, and 0 is as 1. Where it is None, or
    behind the last, the next shorter one that is not counts, or else the next longer one."""

    @property
    def measured(self) -> bool:
        return any(seconds is not None for seconds in self.token_s)

    def seconds(self, start: int, end: int) -> float:
        """Of positions [start, end); 0 if nothing was measured."""
        total = 0.0
        while start < end:
            at = magnitude(start)
            upto = min(end, 2 << at)
            total += (upto - start) * self._of(at)
            start = upto
        return total

    def _of(self, at: int) -> float:
        count = len(self.token_s)
        for index in (*range(min(at, count - 1), -1, -1), *range(at + 1, count)):
            seconds: float | None = self.token_s[index]
            if seconds is not None:
                return seconds
        return 0.0


def magnitude(position: int) -> int:
    """i, for a position in [2^i, 2^(i+1)); 0 for position 0."""
    return max(0, position.bit_length() - 1)


class PaceMeter:
    """Least squares, exponentially decayed; kept as means and centred moments, so that byte counts lose no digits."""

    __slots__ = ("_flat", "_seconds", "_units", "_us", "_uu", "_weight")

    def __init__(self, *, flat: bool = False) -> None:
        """Where sizes do not tell what is fixed and what grows with them, all is taken to grow; with `flat`, to be
        fixed: so that a few small moves, the first of which are slow, do not make a large one look endless."""
        self._flat = flat
        self._weight = 0.0
        self._units = 0.0
        """Mean."""
        self._seconds = 0.0
        """Mean."""
        self._uu = 0.0
        """Sum of squares of units around their mean."""
        self._us = 0.0
        """Sum of products with seconds, likewise."""

    def saw(self, units: float, seconds: float) -> None:
        before = DECAY * self._weight
        self._weight = before + 1.0
        d_units, d_seconds = units - self._units, seconds - self._seconds
        self._units += d_units / self._weight
        self._seconds += d_seconds / self._weight
        if self._uu > LEAST_SPREAD * self._weight * self._units * self._units:
            self._uu *= DECAY
            self._us *= DECAY
        share = before / self._weight
        self._uu += share * d_units * d_units
        self._us += share * d_units * d_seconds

    @property
    def pace(self) -> Pace | None:
        """None before anything was seen."""
        if not self._weight:
            return None
        if not self._uu:
            return self._unknown()
        unit_s = self._us / self._uu
        if unit_s <= 0.0:
            return Pace(fixed_s=self._seconds, unit_s=0.0)
        fixed_s = self._seconds - unit_s * self._units
        if fixed_s >= 0.0:
            return Pace(fixed_s=fixed_s, unit_s=unit_s)
        return self._unknown()

    def _unknown(self) -> Pace:
        if self._flat or not self._units:
            return Pace(fixed_s=self._seconds, unit_s=0.0)
        return Pace(fixed_s=0.0, unit_s=self._seconds / self._units)
