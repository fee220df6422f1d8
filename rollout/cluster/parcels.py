"""What an update passes on to every worker: where new weights are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.transport.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """In Ray's object store, owned by the process that put them there."""

    manifest: Manifest
    buckets: tuple[Any, ...]
    """A reference for each."""

    @property
    def delta(self) -> bool:
        """Tensors that are not named stay as they are."""
        return self.manifest.delta


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsDirectory:
    """Of safetensors, at the same path on every node."""

    path: Path
    delta: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastWeights:
    """Sent once, by the process that listens at this address, when all workers have joined it."""

    address: str
    delta: bool
    staged: bool
    """Workers receive all of it before they replace anything."""
    timeout_s: float
    """Of each step."""


Parcel = StoredWeights | WeightsDirectory | BroadcastWeights
"""What an update passes on to every worker."""
