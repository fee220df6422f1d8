"""What something takes by its size, seen so far: a line through measurements of which older ones count less."""

from rollout.control.messages import Pace

DECAY = 0.9
"""Of all earlier measurements, when another one comes."""
SPREAD = 0.1
"""Of the mean size: if sizes vary less, they do not tell what is fixed and what grows with size."""


class PaceMeter:
    """Least squares of seconds over units, decayed; both parts of the pace are at least 0."""

    __slots__ = ("_s", "_su", "_u", "_uu", "_weight")

    def __init__(self) -> None:
        self._weight = self._u = self._uu = self._s = self._su = 0.0

    def saw(self, units: float, seconds: float) -> None:
        """Something of `units` (tokens, bytes, sequences) took `seconds`."""
        self._weight = DECAY * self._weight + 1.0
        self._u = DECAY * self._u + units
        self._uu = DECAY * self._uu + units * units
        self._s = DECAY * self._s + seconds
        self._su = DECAY * self._su + units * seconds

    @property
    def pace(self) -> Pace | None:
        """None before anything was seen. All of it grows with size where sizes do not vary."""
        if not self._weight:
            return None
        units, seconds = self._u / self._weight, self._s / self._weight
        variance = max(0.0, self._uu / self._weight - units * units)
        if variance <= (SPREAD * units) ** 2:
            return Pace(fixed_s=0.0, unit_s=seconds / units) if units else Pace(fixed_s=seconds, unit_s=0.0)
        slope = (self._su / self._weight - units * seconds) / variance
        slope = min(max(slope, 0.0), seconds / units)
        return Pace(fixed_s=seconds - slope * units, unit_s=slope)
