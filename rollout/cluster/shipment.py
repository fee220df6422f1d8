"""New weights as a trainer hands them over: tensors on their way to the workers, or a directory that they read."""

import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ray

from rollout.cluster.parcels import BroadcastWeights, Parcel, WeightsDirectory
from rollout.cluster.weights import put_weights
from rollout.config import Collective, Disk, ObjectStore
from rollout.errors import WeightsSourceError
from rollout.transport.buckets import describe
from rollout.transport.collective import Broadcast
from rollout.transport.disk import publish, unpublish
from rollout.transport.manifest import Described

FILE_BYTES = 1 << 30
"""Of one file of weights, if no tensor is bigger."""


class Shipment:
    """What a trainer gave, on its way: `parcel` goes to the workers, and what they then need from here is sent."""

    def __init__(
        self, source: Any, transport: ObjectStore | Disk | Collective, *, delta: bool, timeout_s: float
    ) -> None:
        """Raises `WeightsError` for what cannot be read or sent. Blocks while tensors are put into the store, or
        written to disk."""
        self._transport = transport
        self._delta = delta
        self._broadcast: Broadcast | None = None
        self._described: tuple[Described, ...] | None = None
        self.written: Path | None = None
        """A directory that was made for this, which is the caller's now."""
        if isinstance(source, Path | str):
            if not str(source):
                raise WeightsSourceError("source: got '', allowed: a directory")
            self.parcel: Parcel = WeightsDirectory(path=Path(source).absolute(), delta=delta)
            return
        self._named_tensors = source.items() if isinstance(source, Mapping) else source
        if not isinstance(self._named_tensors, Iterable):
            got = type(source).__name__
            raise WeightsSourceError(f"source: got {got}, allowed: a directory, or names with tensors")
        match transport:
            case ObjectStore():
                self.parcel = put_weights(self._named_tensors, int(transport.bucket_bytes), delta=delta)
            case Disk(path=None):
                raise WeightsSourceError("source: got tensors, allowed: a directory, or set weights.transport.path")
            case Disk(path=path):
                assert path is not None
                self.written = path.absolute() / uuid.uuid4().hex
                publish(self.written, self._named_tensors, bucket_bytes=FILE_BYTES)
                self.parcel = WeightsDirectory(path=self.written, delta=delta)
            case Collective():
                if not (transport.staged or isinstance(source, Mapping)):
                    raise WeightsSourceError("source: got pairs, allowed: a mapping, as weights.transport.staged is no")
                self._described = None if transport.staged else describe(self._named_tensors)
                host = ray.util.get_node_ip_address()
                self._broadcast = Broadcast(host, timeout_s=timeout_s)
                self.parcel = BroadcastWeights(
                    address=self._broadcast.address, delta=delta, staged=transport.staged, timeout_s=timeout_s
                )

    def send(self) -> None:
        """Send what workers are waiting for, if it is sent by this process. Blocks. Raises `WeightsError`."""
        if self._broadcast is None:
            return
        assert isinstance(self._transport, Collective), self._transport
        self._broadcast.send(
            self._named_tensors,
            bucket_bytes=int(self._transport.bucket_bytes),
            delta=self._delta,
            described=self._described,
        )

    def close(self) -> None:
        """Nobody waits for it any more."""
        if self._broadcast is not None:
            self._broadcast.close()


class Publications:
    """Directories that updates of one client made: those that the live weights consist of stay."""

    def __init__(self) -> None:
        self._live: list[Path] = []

    def live(self, written: Path | None, *, delta: bool) -> None:
        """An update that made this directory, or none, is live."""
        if not delta:
            for path in self._live:
                unpublish(path)
            self._live = []
        if written is not None:
            self._live.append(written)

    def refused(self, written: Path | None) -> None:
        """The update that made this directory did not happen."""
        if written is not None:
            unpublish(written)
