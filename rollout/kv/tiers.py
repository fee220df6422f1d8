"""Where pages are on a worker, and copies between there. Words shared by the modules of this package; integers only."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

CopyId = NewType("CopyId", int)


class Tier(StrEnum):
    """Memory of one worker."""

    DEVICE = "device"
    HOST = "host"

    @property
    def other(self) -> "Tier":
        return Tier.HOST if self is Tier.DEVICE else Tier.DEVICE


class Residency(StrEnum):
    """Where the pages of a node of the prefix tree are."""

    DEVICE = "device"
    HOST = "host"
    BOTH = "both"


PageRef = tuple[Tier, int]
"""A page of one of the tiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A plan: whole pages `sources` of the other tier into `targets` of tier `to`, pair by pair."""

    copy_id: CopyId
    to: Tier
    sources: tuple[int, ...]
    targets: tuple[int, ...]
