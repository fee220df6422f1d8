"""Where a worker reads new weights from, whatever brought them: `disk.DiskWeights`, `collective.StagedWeights`, or
buckets that something else holds, such as an object store.

A worker first looks at `manifest` and calls `verify`, changing nothing, and only then copies from `tensors`.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor

from rollout.errors import WeightsSourceError
from rollout.transport.buckets import Buffer, unpack, verify
from rollout.transport.manifest import Manifest

Fetch = Callable[[int], Buffer]
"""The buffer of a bucket by its number; raises `WeightsError` where there is none."""


class WeightsSource(Protocol):
    """Weights that can be read as often as one likes, and do not change."""

    @property
    def manifest(self) -> Manifest: ...

    def verify(self) -> None:
        """Read all of it. Raises `WeightsChecksumError` or `WeightsSourceError`."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under its name, one at a time; each is only copied from, and let go before the next."""

    def close(self) -> None:
        """Let go of what is held; closing twice is allowed."""


class MemoryWeights:
    """Buckets that `fetch` hands out; what it does not keep is let go of before the next."""

    def __init__(self, manifest: Manifest, fetch: Fetch) -> None:
        self._manifest = manifest
        self._fetch: Fetch | None = fetch

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def verify(self) -> None:
        for index, entries in enumerate(self._manifest.by_bucket()):
            verify(self._bucket(index), entries)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for index, entries in enumerate(self._manifest.by_bucket()):
            yield from unpack(self._bucket(index), entries)

    def close(self) -> None:
        self._fetch = None

    def _bucket(self, index: int) -> Buffer:
        if self._fetch is None:
            raise WeightsSourceError("read from weights that were closed")
        buffer = self._fetch(index)
        if buffer.nbytes != (size := self._manifest.bucket_bytes[index]):
            raise WeightsSourceError(f"bucket {index} has {buffer.nbytes} bytes, expected {size}")
        return buffer
