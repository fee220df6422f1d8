"""Storages with random bytes, and an `ImageReader` over a dictionary of segments, whose views cannot be written."""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from rollout.errors import SegmentMissingError
from rollout.kv.fence import Passed
from rollout.kv.image import Buffer, describe
from rollout.kv.keys import Fingerprint
from rollout.kv.restore import Segment
from rollout.kv.storage import KVStorage
from rollout.kv.tiers import PageRef, Tier
from rollout.types import Image, NodeId, SegmentId, SegmentRun
from tests.weights import written

PAGE = 4
LAYERS, HEADS, HEAD_DIM = 3, 2, 8
FINGERPRINT = Fingerprint("tiny")
DTYPES = [torch.float32, torch.bfloat16]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def make_storage(
    pages: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    host_pages: int = 0,
    kind: type[KVStorage] = KVStorage,
) -> KVStorage:
    """A storage whose every byte is random."""
    storage = kind(
        pages=pages,
        host_pages=host_pages,
        layers=LAYERS,
        page_tokens=PAGE,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        device=torch.device(device),
    )
    random = torch.Generator().manual_seed(seed)
    for tensor in (storage.pages, storage.host_pages):
        tensor.copy_(torch.randn(tensor.shape, generator=random))
    return storage


def on_device(pages: Sequence[int]) -> list[PageRef]:
    return [(Tier.DEVICE, page) for page in pages]


def page_bytes(storage: KVStorage, page: int, tokens: int = PAGE, tier: Tier = Tier.DEVICE) -> bytes:
    """The bytes of the first `tokens` tokens of a page, layer by layer, keys before values."""
    pages = storage.pages if tier is Tier.DEVICE else storage.host_pages
    parts = [pages[page, layer, kv, :tokens] for layer in range(LAYERS) for kv in range(2)]
    return b"".join(part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in parts)


def tokens_in(index: int, tokens: int) -> int:
    """How many of `tokens` tokens are in page `index`."""
    return max(0, min(PAGE, tokens - index * PAGE))


def make_segment(storage: KVStorage, pages: Sequence[int], tokens: int) -> Segment:
    """The segment that an export of `pages` makes, in memory of its own that cannot be written."""
    buffers: list[Buffer] = [np.array(buffer) for buffer in storage.gather(on_device(pages), tokens, Passed())]
    for buffer in buffers:
        buffer.flags.writeable = False
    manifest = describe(
        buffers, fingerprint=FINGERPRINT, page_tokens=PAGE, token_bytes=storage.token_bytes, tokens=tokens
    )
    return Segment(manifest=manifest, buffers=buffers)


class DictReader:
    """Hands out what is in `segments`; `error` is raised instead if there is one."""

    def __init__(self) -> None:
        self.segments: dict[SegmentId, Segment] = {}
        self.error: Exception | None = None
        self.opened: list[tuple[SegmentRun, ...]] = []
        self.deadlines: list[float] = []
        self.closed = 0

    @contextlib.contextmanager
    def open(self, runs: Sequence[SegmentRun], deadline: float) -> Iterator[Sequence[Segment]]:
        self.opened.append(tuple(runs))
        self.deadlines.append(deadline)
        if self.error is not None:
            raise self.error
        try:
            if missing := [run.segment for run in runs if run.segment not in self.segments]:
                raise SegmentMissingError(f"segments {missing} are not in the pool")
            yield [self.segments[run.segment] for run in runs]
        finally:
            self.closed += 1

    def put(self, name: str, segment: Segment) -> None:
        self.segments[SegmentId(name)] = segment


def run(name: str, first: int, pages: int) -> SegmentRun:
    return SegmentRun(node=NodeId("node"), segment=SegmentId(name), first=first, pages=pages)


def make_image(kv_tokens: int, *runs: SegmentRun) -> Image:
    return Image(runs=runs, kv_tokens=kv_tokens, written=written(kv_tokens))
