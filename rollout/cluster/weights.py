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
from rollout.transport.buckets import describe, pack
from rollout.transport.collective import ArrivingWeights, Broadcast, Receiver, StagedWeights
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastWeights:
    """Sent once, by the process that listens at this address, when all workers have joined it."""

    address: str
    staged: bool
    """Workers receive all of it before they replace anything."""
    timeout_s: float
    """Of each step."""


Parcel = StoredWeights | WeightsDirectory | BroadcastWeights
"""What an update passes on to every worker."""


class Shipment:
    """What a trainer gave, on its way: `parcel` goes to the workers, and what they then need from here is sent."""

    def __init__(
        self, source: Any, transport: ObjectStore | Disk | Collective, *, delta: bool, timeout_s: float
    ) -> None:
        """Raises `WeightsError` for what cannot be read or sent. Blocks while tensors are put into the store."""
        self._transport = transport
        self._delta = delta
        self._broadcast: Broadcast | None = None
        if isinstance(source, Path | str):
            self.parcel: Parcel = WeightsDirectory(path=Path(source).absolute())
            return
        self._named_tensors = source.items() if isinstance(source, Mapping) else source
        if not isinstance(self._named_tensors, Iterable):
            got = type(source).__name__
            raise WeightsSourceError(f"source: got {got}, allowed: a directory, or names with tensors")
        match transport:
            case ObjectStore():
                self.parcel = put_weights(self._named_tensors, int(transport.bucket_bytes), delta=delta)
            case Disk():
                raise WeightsSourceError("source: got tensors, allowed: a directory, as weights.transport is disk")
            case Collective():
                if not (transport.staged or isinstance(source, Mapping)):
                    raise WeightsSourceError("source: got pairs, allowed: a mapping, as weights.transport.staged is no")
                host = ray.util.get_node_ip_address()
                self._broadcast = Broadcast(host, timeout_s=timeout_s)
                self.parcel = BroadcastWeights(
                    address=self._broadcast.address, staged=transport.staged, timeout_s=timeout_s
                )

    def send(self) -> None:
        """Send what workers are waiting for, if it is sent by this process. Blocks. Raises `WeightsError`."""
        if self._broadcast is None:
            return
        assert isinstance(self._transport, Collective), self._transport
        described = None if self._transport.staged else describe(self._named_tensors)
        self._broadcast.send(
            self._named_tensors,
            bucket_bytes=int(self._transport.bucket_bytes),
            delta=self._delta,
            described=described,
        )

    def close(self) -> None:
        """Nobody waits for it any more."""
        if self._broadcast is not None:
            self._broadcast.close()


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
            return MemoryWeights(parcel.manifest, lambda index: _fetch(parcel.buckets[index]))
        case WeightsDirectory():
            return DiskWeights(parcel.path)
        case BroadcastWeights():
            receiver = Receiver(parcel.address, rank, size, timeout_s=parcel.timeout_s)
            return StagedWeights(receiver) if parcel.staged else ArrivingWeights(receiver)


def _fetch(reference: Any) -> Any:
    """A view of a bucket in shared memory, to be read only."""
    try:
        return ray.get(reference, timeout=FETCH_S)
    except GetTimeoutError:
        raise WeightsSourceError(f"a bucket of weights did not arrive within {FETCH_S:g} s") from None
    except RayError as error:
        raise WeightsSourceError(f"a bucket of weights is gone: {one_line(error)}") from None
