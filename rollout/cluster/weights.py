"""New weights on their way to the workers: put into the object store, and opened by a worker."""

from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from rollout.cluster.calls import one_line
from rollout.cluster.parcels import BroadcastWeights, Parcel, StoredWeights, WeightsDirectory
from rollout.errors import WeightsSourceError
from rollout.transport.buckets import pack
from rollout.transport.collective import ArrivingWeights, Receiver, StagedWeights
from rollout.transport.disk import DiskWeights
from rollout.transport.manifest import Entry, Manifest
from rollout.transport.source import MemoryWeights, WeightsSource

FETCH_S = 60.0
"""For all buckets to be had; on another node they are copied."""


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
