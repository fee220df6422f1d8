"""What is to become of a stopped trajectory, and where its KV is and goes. Frozen values."""

from dataclasses import dataclass
from enum import StrEnum

from rollout.types import AbortReason, Keep, KVRun, Then, WorkerId

WORKER_TIERS = (Keep.DEVICE, Keep.HOST)
"""Places of a worker in which KV may be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What is to become of a trajectory once it is out of the batch."""

    keep: Keep
    """AUTO: to be decided when the trajectory has stopped."""
    then: Then
    reason: AbortReason = AbortReason.DRIVER

    @property
    def continues(self) -> bool:
        """Whether the trajectory goes on later with what it has."""
        return self.then in (Then.HOLD, Then.REQUEUE)

    @property
    def keeps(self) -> bool:
        """Whether the KV is of any use then."""
        return self.keep is not Keep.NONE and self.continues


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """KV that a suspended trajectory has on a worker."""

    worker: WorkerId
    epoch: int
    """In which it was left there."""
    where: Keep
    """DEVICE or HOST."""
    kv_tokens: int
    written: tuple[KVRun, ...]
    """By which weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What was commanded for the KV of a trajectory that is being suspended, and is to be answered."""

    class Kind(StrEnum):
        EXPORT = "export"
        KEEP = "keep"
        RECALL = "recall"

    kind: Kind
    worker: WorkerId
    epoch: int
    written: tuple[KVRun, ...]
    """By which weights the KV was written."""
    back: Keep | None = None
    """Of an export: where on the worker it was kept before, and is kept again if that fails. It is then this, again."""
    displaced: bool = False
    """Of an export: the image that was there before is gone; what is left of it is let go of when this is answered."""
