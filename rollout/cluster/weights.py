"""New weights on their way to the workers: what the trainer hands over, and how a worker opens it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from rollout.cluster.calls import one_line
from rollout.config import Collective, Disk, ObjectStore
from rollout.errors import WeightsSourceError
from rollout.transport.buckets import pack
from rollout.transport.disk import DiskWeights
from rollout.transport.manifest import Entry, Manifest
from rollout.transport.source import MemoryWeights, WeightsSource

FETCH_S = 60.0
"""For one bucket to be read, on another node to be copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """In Ray's object store, owned by the process that put them there."""

    manifest: Manifest
    buckets: tuple[Any, ...]
    """A reference for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsDirectory:
    """Of safetensors, at the same path on every node."""

    path: Path


Parcel = StoredWeights | WeightsDirectory
"""What an update passes on to every worker."""


def make_parcel(source: Any, transport: ObjectStore | Disk | Collective, *, delta: bool) -> Parcel:
    """What a trainer gave, as it goes to the workers. Raises `WeightsError` for what cannot be read."""
    if isinstance(source, Path | str):
        return WeightsDirectory(path=Path(source).absolute())
    named_tensors = source.items() if isinstance(source, Mapping) else source
    if not isinstance(named_tensors, Iterable):
        raise WeightsSourceError(f"source: got {type(source).__name__}, allowed: a directory, or names with tensors")
    match transport:
        case ObjectStore():
            return put_weights(named_tensors, int(transport.bucket_bytes), delta=delta)
        case Disk():
            raise WeightsSourceError("source: got tensors, allowed: a directory, as weights.transport is disk")
        case Collective():
            raise NotImplementedError


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


def open_parcel(parcel: Parcel) -> WeightsSource:
    """Raises `WeightsSourceError` if it cannot be read."""
    match parcel:
        case StoredWeights():
            return MemoryWeights(parcel.manifest, lambda index: _fetch(parcel.buckets[index]))
        case WeightsDirectory():
            return DiskWeights(parcel.path)


def _fetch(reference: Any) -> Any:
    """A view of a bucket in shared memory, to be read only."""
    try:
        return ray.get(reference, timeout=FETCH_S)
    except GetTimeoutError:
        raise WeightsSourceError(f"a bucket of weights did not arrive within {FETCH_S:g} s") from None
    except RayError as error:
        raise WeightsSourceError(f"a bucket of weights is gone: {one_line(error)}") from None
