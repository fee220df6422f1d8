"""What something takes by its size, learnt from what it took: a line through the latest measurements."""

from rollout.control.messages import Pace

DECAY = 0.98
"""Of the weight of what was seen before, with each measurement."""
LEAST_SPREAD = 1e-3
"""Variance of the sizes over their squared mean. What was learnt from sizes further apart is not forgotten for ones
that are less: a batch that stays about as large for long says nothing about how a step's time depends on it."""


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
