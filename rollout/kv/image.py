"""The segment format: a manifest and a list of page buffers.

A segment holds consecutive pages of one sequence, each `[layers, 2, tokens, kv_heads, head_dim]` as raw
bytes. All pages are whole but possibly the last, which is packed to its valid tokens. The manifest
carries what a reader needs to refuse bytes that are not what it expects: fingerprint, sizes, one
xxh3-64 per page. Buffers read from the pool are shared memory: they are only ever copied from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from rollout.errors import SegmentDamagedError
from rollout.kv.keys import Fingerprint

Buffer = NDArray[np.uint8]

JOINED_BYTES = 32 << 20
"""Least size of a buffer of several pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is in a segment."""

    fingerprint: Fingerprint
    page_tokens: int
    token_bytes: int
    """KV of one token, all layers."""
    tokens: int
    """Valid tokens of all pages together; only the last page may be partly filled."""
    checksums: tuple[int, ...]
    """xxh3-64 of each page buffer."""
    canary: bytes | None = None
    """What the exporting worker's canary knew of the pages, if it had one (`kv.canary`)."""

    @property
    def nbytes(self) -> int:
        return self.tokens * self.token_bytes

    def page_nbytes(self, index: int) -> int:
        """Bytes of page buffer `index`."""
        valid = min(self.page_tokens, self.tokens - index * self.page_tokens)
        return valid * self.token_bytes


def checksum(buffer: Buffer) -> int:
    return xxhash.xxh3_64_intdigest(buffer.data)


def describe(
    buffers: Sequence[Buffer],
    *,
    fingerprint: Fingerprint,
    page_tokens: int,
    token_bytes: int,
    tokens: int,
    checksums: tuple[int, ...] | None = None,
    canary: bytes | None = None,
) -> Manifest:
    """The manifest of `buffers`, of which `checksums` are, if they are known."""
    manifest = Manifest(
        fingerprint=fingerprint,
        page_tokens=page_tokens,
        token_bytes=token_bytes,
        tokens=tokens,
        checksums=tuple(checksum(buffer) for buffer in buffers) if checksums is None else checksums,
        canary=canary,
    )
    sizes = [buffer.nbytes for buffer in buffers]
    assert sizes == [manifest.page_nbytes(i) for i in range(len(buffers))], (sizes, tokens)
    return manifest


def join(buffers: Sequence[Buffer], runs: Sequence[int]) -> list[Buffer]:
    """The same bytes in fewer buffers, where pages that follow each other in memory are many.

    `runs` are the numbers of buffers that follow each other, views of one memory. Ray copies a buffer of more than 1
    MiB with several threads, which takes longer for one of a few MiB and less long for a large one (measured: 256 MB
    in 33 ms as pages of 360 KiB, 103 as 6 MB, 23 as one): so pages stay apart, or become large.
    """
    joined: list[Buffer] = []
    start = 0
    for run in runs:
        first, nbytes = buffers[start], sum(buffer.nbytes for buffer in buffers[start : start + run])
        if nbytes >= JOINED_BYTES:
            joined.append(np.lib.stride_tricks.as_strided(first, shape=(nbytes,), strides=(1,)))
        else:
            joined += buffers[start : start + run]
        start += run
    assert start == len(buffers), (start, len(buffers))
    return joined


def split(manifest: Manifest, buffers: Sequence[Buffer]) -> list[Buffer]:
    """The page buffers of a segment, of which `join` may have joined some.

    Raises `SegmentDamagedError` if they do not add up.
    """
    pages: list[Buffer] = []
    count = len(manifest.checksums)
    for buffer in buffers:
        start = 0
        while start < buffer.nbytes and len(pages) < count:
            stop = start + manifest.page_nbytes(len(pages))
            pages.append(buffer[start:stop])
            start = stop
        if start != buffer.nbytes:
            raise SegmentDamagedError(f"a buffer of {buffer.nbytes} bytes is not whole pages of the manifest")
    return pages


def verify(manifest: Manifest, buffers: Sequence[Buffer], pages: range, tokens: int, expected: Fingerprint) -> None:
    """Check pages `pages` of a segment, holding `tokens` tokens together, before they are used.

    Raises `SegmentDamagedError` if the fingerprint, a size or a checksum is not as it must be.
    """
    verify_sizes(manifest, buffers, pages, tokens, expected)
    for index in pages:
        verify_page(manifest, buffers, index)


def verify_sizes(
    manifest: Manifest, buffers: Sequence[Buffer], pages: range, tokens: int, expected: Fingerprint
) -> None:
    """All of `verify` but the checksums."""
    if manifest.fingerprint != expected:
        raise SegmentDamagedError(f"segment of fingerprint {manifest.fingerprint}, expected {expected}")
    if len(buffers) != len(manifest.checksums) or not 0 <= pages.start < pages.stop <= len(buffers):
        raise SegmentDamagedError(
            f"segment has {len(buffers)} pages and {len(manifest.checksums)} checksums, pages {pages} were asked for"
        )
    for index in pages:
        size = manifest.token_bytes * min(manifest.page_tokens, tokens - (index - pages.start) * manifest.page_tokens)
        if buffers[index].nbytes != size:
            raise SegmentDamagedError(f"page {index} has {buffers[index].nbytes} bytes, expected {size}")


def verify_page(manifest: Manifest, buffers: Sequence[Buffer], index: int) -> None:
    """The checksum of one page. Raises `SegmentDamagedError`."""
    if (found := checksum(buffers[index])) != manifest.checksums[index]:
        raise SegmentDamagedError(f"page {index}: checksum {found:#x}, expected {manifest.checksums[index]:#x}")
