"""How many groups may be under way while a driver collects."""

import math
from dataclasses import dataclass, field

from rollout.types import GroupId


@dataclass(slots=True, kw_only=True)
class Collection:
    """A `collect` that is under way."""

    call: str
    """Of the driver; it is ended by the same."""
    wanted: int
    """Groups of training."""
    over_sample: float
    stop_when_met: bool
    """It ends as soon as so many are complete, and not only when it is told to."""
    ends_at: float
    """When it ends although nobody says so."""
    begun_with: int = 0
    """Groups that were complete when it began."""
    rejected: int = 0
    over: set[GroupId] = field(default_factory=set)
    """Groups that were completed since."""

    @property
    def window(self) -> int:
        """Groups that may be under way at once."""
        whole = math.ceil(self.wanted * (1.0 + self.over_sample)) + self.rejected
        return max(0, whole - self.begun_with - len(self.over))
