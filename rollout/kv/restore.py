"""Restores: images from the pool into reserved pages, on copy threads, while decoding goes on.

The engine submits a restore with pages it has reserved and polls for completed ones at every step. A
restore either puts every byte in place, verified, or fails as a whole; its pages are the caller's again
only when it is completed. The thread makes plain copies and runs no torch operator on CPU.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rollout.errors import CanaryError, DeadlineError, KVError, SegmentDamagedError
from rollout.kv.chain import ChainValues
from rollout.kv.fence import Fence
from rollout.kv.image import Buffer, Manifest, split, verify_page, verify_sizes
from rollout.kv.keys import Fingerprint
from rollout.kv.storage import KVStorage
from rollout.kv.tiers import Tier
from rollout.types import Image, SegmentRun, SequenceKey

HALVED_PAGES = 64
"""Least pages of which two threads take half each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What a reader hands out: a manifest and views of shared memory."""

    manifest: Manifest
    buffers: Sequence[Buffer]


class ImageReader(Protocol):
    """Where segments come from."""

    def open(self, runs: Sequence[SegmentRun], deadline: float) -> contextlib.AbstractContextManager[Sequence[Segment]]:
        """The segment of each run, valid inside the context; waits until `deadline` (monotonic clock) at most.

        Raises `KVError` or `DeadlineError`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A completed restore; `error` says why it failed."""

    key: SequenceKey
    tokens: int
    error: KVError | DeadlineError | None


class Restorer:
    """Runs restores one after the other and reports their completion."""

    def __init__(
        self,
        storage: KVStorage,
        fingerprint: Fingerprint,
        reader: ImageReader,
        *,
        timeout_s: float,
        wake: Callable[[], None],
    ) -> None:
        """A restore fails `timeout_s` seconds after it was submitted. `wake` is called from the copy thread when
        one is completed."""
        self._storage = storage
        self._fingerprint = fingerprint
        self._reader = reader
        self._timeout_s = timeout_s
        self._wake = wake
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="restore")
        self._second = ThreadPoolExecutor(max_workers=1, thread_name_prefix="restore-half")
        self._pending: dict[SequenceKey, tuple[int, Future[None]]] = {}
        self.restored_bytes = 0

    def submit(
        self,
        key: SequenceKey,
        image: Image,
        first_page: int,
        pages: Sequence[int],
        after: Fence,
        chain: ChainValues | None = None,
    ) -> None:
        """Read pages `first_page`… of `image` into `pages`, which what is before the fence may still read.

        `chain` is what a canary must find there.
        """
        deadline = time.monotonic() + self._timeout_s
        future = self._thread.submit(self._restore, key, image, first_page, pages, after, chain, deadline)
        self._pending[key] = (image.kv_tokens, future)
        future.add_done_callback(lambda _: self._wake())

    def cancel(self, key: SequenceKey) -> bool:
        """Whether the restore had not begun, and never will; otherwise it goes on to its completion."""
        _, future = self._pending[key]
        if future.cancel():
            del self._pending[key]
            return True
        return False

    def poll(self) -> list[Restored]:
        """Restores completed since the last call."""
        completed = []
        for key, (tokens, future) in list(self._pending.items()):
            if not future.done():
                continue
            del self._pending[key]
            error = future.exception()
            if error is not None and not isinstance(error, (KVError, DeadlineError)):
                raise error
            completed.append(Restored(key=key, tokens=tokens, error=error))
        return completed

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._second.shutdown(wait=True)

    def _restore(
        self,
        key: SequenceKey,
        image: Image,
        first_page: int,
        pages: Sequence[int],
        after: Fence,
        chain: ChainValues | None,
        deadline: float,
    ) -> None:
        page_tokens = self._storage.page_tokens
        if image.pages != -(-image.kv_tokens // page_tokens) or len(pages) != image.pages - first_page:
            raise SegmentDamagedError(f"image of {image.pages} pages for {image.kv_tokens} tokens")
        runs = _from_page(image.runs, first_page)
        with self._reader.open(runs, deadline) as segments:
            done = 0
            for run, segment in zip(runs, segments, strict=True):
                part = range(run.first, run.first + run.pages)
                tokens = min(run.pages * page_tokens, image.kv_tokens - (first_page + done) * page_tokens)
                try:
                    buffers = split(segment.manifest, segment.buffers)
                    verify_sizes(segment.manifest, buffers, part, tokens, self._fingerprint)
                    targets = pages[done : done + run.pages]
                    self._scatter(targets, tokens, segment.manifest, buffers, part, after)
                    for target, index in zip(targets, part, strict=True):
                        whole = buffers[index].nbytes == self._storage.page_bytes
                        verified = segment.manifest.checksums[index] if whole else None
                        self._storage.sums.put((Tier.DEVICE, target), verified)
                    if self._storage.canaries is not None and chain is not None:
                        position = (first_page + done) * page_tokens
                        canary = self._storage.canaries[Tier.DEVICE]
                        canary.put(targets, tokens, segment.manifest.canary or b"", first=run.first)
                        expected = chain[position : position + tokens]
                        canary.verify_restored(key, targets, expected, start=position)
                except (SegmentDamagedError, CanaryError) as error:
                    raise SegmentDamagedError(str(error), node=run.node, segment=run.segment) from None
                self.restored_bytes += tokens * self._storage.token_bytes
                done += run.pages

    def _scatter(
        self,
        targets: Sequence[int],
        tokens: int,
        manifest: Manifest,
        buffers: Sequence[Buffer],
        part: range,
        after: Fence,
    ) -> None:
        """Verify and copy pages `part` of a segment; of many, half on a second thread, since one does not fill the
        memory bus with both. Returns, or raises, when neither writes any more."""
        half = len(part) // 2 if len(part) >= HALVED_PAGES else 0
        done = half * self._storage.page_tokens

        def scatter(pages: Sequence[int], valid: int, indices: range) -> None:
            check = partial(_check, manifest, buffers, indices.start)
            self._storage.scatter(pages, valid, [buffers[index] for index in indices], after, check)

        other = self._second.submit(scatter, targets[:half], done, part[:half]) if half else None
        try:
            scatter(targets[half:], tokens - done, part[half:])
        finally:
            if other is not None:
                wait([other])
        if other is not None:
            other.result()


def _check(manifest: Manifest, buffers: Sequence[Buffer], first: int, index: int) -> None:
    """The checksum of a page, counted from page `first` of the segment."""
    verify_page(manifest, buffers, first + index)


def _from_page(runs: Sequence[SegmentRun], first_page: int) -> list[SegmentRun]:
    """The runs of an image without its first `first_page` pages."""
    rest = []
    for run in runs:
        skip = min(first_page, run.pages)
        first_page -= skip
        if skip < run.pages:
            rest.append(SegmentRun(node=run.node, segment=run.segment, first=run.first + skip, pages=run.pages - skip))
    return rest
