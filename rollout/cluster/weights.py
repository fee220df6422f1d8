"""New weights on their way to the workers: what the trainer hands over, and how a worker opens it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from rollout.cluster.calls import one_line
from rollout.errors import WeightsSourceError
from rollout.transport.buckets import pack
from rollout.transport.collective import ArrivingWeights, Receiver, StagedWeights
from rollout.transport.disk import DiskWeights
from rollout.transport.manifest import Entry, Manifest
from rollout.transport.source import MemoryWeights, WeightsSource

FETCH_S = 60.0
"""For all buckets to be had; on another node they are copied."""


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


def put_weights(named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, *, delta: bool) -> StoredWeights:
    """Put tensors into the object store, once for all workers."""
    entries: list[Entry] = []
    sizes: list[int] = []
    references: list[Any] = []
    for bucket in pack(named_tensors, bucket_bytes):
        entries += bucket.entries
        sizes.append(bucket.buffer.nbytes)
        references.append(ray.put(bucket.buffer))
    manifest = Manifest(entries=tuple(entries), bucket_bytes=tuple(sizes), delta=delta)
    return StoredWeights(manifest=manifest, buckets=tuple(references))


def open_parcel(parcel: Parcel, rank: int, size: int) -> WeightsSource:
    """`rank` is that of this worker among `size` ends of the transfer, the sender being 0.

    Raises `WeightsError` if it cannot be read.
    """
    match parcel:
        case StoredWeights():
            return MemoryWeights(parcel.manifest, _fetch(parcel.buckets).__getitem__)
        case WeightsDirectory():
            return DiskWeights(parcel.path)
        case BroadcastWeights():
            receiver = Receiver(parcel.address, rank, size, timeout_s=parcel.timeout_s)
            return StagedWeights(receiver) if parcel.staged else ArrivingWeights(receiver)


def _fetch(buckets: Sequence[Any]) -> list[Any]:
    """Views of them in shared memory, to be read only; no memory of this process."""
    try:
        views: list[Any] = ray.get(list(buckets), timeout=FETCH_S)
    except GetTimeoutError:
        raise WeightsSourceError(f"the weights did not arrive within {FETCH_S:g} s") from None
    except RayError as error:
        raise WeightsSourceError(f"the weights are gone: {one_line(error)}") from None
    return views
