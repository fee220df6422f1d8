"""The KV tensors of one worker, device and host pages, and every movement of their bytes.

Pages are `[pages, layers, 2, page_tokens, kv_heads, head_dim]` in each tier (page 0 is scratch), so that a
page is contiguous over all layers and moving it is one copy. Movements may run on other threads than the
engine's, on pages that nobody else writes. They read what was computed before their fence, and write
only into reserved pages, after what was queued before it: so of the four fences this file keeps two,
*read after the compute that wrote* and *write after the last reader of the target*.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from rollout.kv.canary import Canary
from rollout.kv.fence import Fence, fence_for
from rollout.kv.image import Buffer, checksum
from rollout.kv.sums import PageSums
from rollout.kv.tiers import PageRef, Tier
from rollout.memory import TensorMemory


class KVStorage:
    """Allocates the pages of both tiers and copies them out, in and between."""

    def __init__(
        self,
        *,
        pages: int,
        layers: int,
        page_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        host_pages: int = 0,
        canary: bool = False,
    ) -> None:
        shape = (layers, 2, page_tokens, kv_heads, head_dim)
        on_cuda = device.type == "cuda"
        self.pages: Tensor = torch.zeros((pages + 1, *shape), dtype=dtype, device=device)
        """Of the device."""
        self.host_pages: Tensor = torch.zeros((host_pages + 1, *shape), dtype=dtype, pin_memory=on_cuda)
        self.canaries: dict[Tier, Canary] | None = None
        """Of each tier, if they are wanted."""
        if canary:
            self.canaries = {Tier.DEVICE: Canary(self.pages), Tier.HOST: Canary(self.host_pages)}
        self.sums = PageSums(device_pages=pages, host_pages=host_pages)
        # Memory that is pinned stays: the system cannot have it back page by page.
        self._memory = TensorMemory([self.pages] if on_cuda else [self.pages, self.host_pages])
        self.page_tokens = page_tokens
        self.token_bytes = layers * 2 * kv_heads * head_dim * self.pages.element_size()
        self._stream: torch.cuda.Stream | None = None
        if on_cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_tokens

    def release(self) -> int:
        """Give the memory of all pages back, which nobody uses, unless that is done; the bytes given back."""
        self.sums.forget_all()
        return self._memory.release()

    def reclaim(self) -> None:
        """Take it again, with zeros. Does nothing if it was not released."""
        if self._memory.released:
            self._memory.reclaim()
            self.pages.zero_()
            self.host_pages.zero_()

    def completed(self, pages: Sequence[int]) -> None:
        """The last slots of these device pages were just written: their bytes may still be in the processor's cache.

        On CUDA nothing is done: the checksum is made of what arrives in host memory.
        """
        if pages and self._stream is None:
            rows = _rows(self.pages)
            for page in pages:
                self.sums.put((Tier.DEVICE, page), checksum(rows[page]))

    def checksums(self, pages: Sequence[PageRef], tokens: int, buffers: Sequence[Buffer]) -> tuple[int, ...]:
        """Of each of the buffers that `gather` made of `pages`."""
        whole = tokens // self.page_tokens
        known = [self.sums.get(ref) if i < whole else None for i, ref in enumerate(pages)]
        return tuple(checksum(buffer) if value is None else value for value, buffer in zip(known, buffers, strict=True))

    def fence(self) -> Fence:
        """All computation on the pages that the calling thread has started."""
        return fence_for(self.pages.device)

    def copy(self, to: Tier, sources: Sequence[int], targets: Sequence[int], after: Fence) -> None:
        """Copy whole pages of the other tier into `targets` of tier `to`; returns when the bytes are in place."""
        after.wait()
        source, target = self._tier(to.other), self._tier(to)
        if self._stream is None:
            read, write = _rows(source), _rows(target)
            for first, into, count in _runs(sources, targets):
                np.copyto(write[into : into + count], read[first : first + count])
            self._copy_shadows(to, sources, targets)
            self.sums.copied(to, sources, targets)
            return
        with torch.cuda.stream(self._stream):
            for first, into, count in _runs(sources, targets):
                target[into : into + count].copy_(source[first : first + count], non_blocking=True)
            self._copy_shadows(to, sources, targets)
        self._stream.synchronize()
        self.sums.copied(to, sources, targets)

    def gather(self, pages: Sequence[PageRef], tokens: int, after: Fence) -> list[Buffer]:
        """The bytes of `pages`, holding `tokens` tokens, one buffer a page, the last packed to its tokens.

        What is in plain memory comes as views, where pages are whole: the caller keeps them from being reused.
        """
        after.wait()
        self._check(len(pages), tokens)
        if self._stream is None:
            rows = {tier: _rows(self._tier(tier)) for tier in Tier}
            buffers = [rows[tier][page] for tier, page in pages]
            if tokens % self.page_tokens:
                buffers[-1] = _packed(self._valid(pages[-1], len(pages) - 1, tokens))
            return buffers
        parts = [self._valid(page, i, tokens) for i, page in enumerate(pages)]
        with torch.cuda.stream(self._stream):
            parts = [_to_host(part) if part.is_cuda else part for part in parts]
        self._stream.synchronize()
        return [_packed(part) for part in parts]

    def runs(self, pages: Sequence[PageRef], tokens: int) -> list[int]:
        """Of the buffers that `gather` makes of `pages`, how many follow each other in memory each time."""
        whole = tokens // self.page_tokens if self._stream is None else 0
        runs: list[int] = []
        for i, (tier, page) in enumerate(pages):
            if 0 < i < whole and pages[i - 1] == (tier, page - 1):
                runs[-1] += 1
            else:
                runs.append(1)
        return runs

    def shadow(self, pages: Sequence[PageRef], tokens: int) -> bytes | None:
        """What the canaries know of pages that `gather` reads, to travel with them."""
        if self.canaries is None:
            return None
        parts = [min(self.page_tokens, tokens - i * self.page_tokens) for i in range(len(pages))]
        return b"".join(self.canaries[tier].take([page], part) for (tier, page), part in zip(pages, parts, strict=True))

    def scatter(
        self,
        pages: Sequence[int],
        tokens: int,
        buffers: Sequence[Buffer],
        after: Fence,
        check: Callable[[int], None] = lambda index: None,
    ) -> None:
        """Write buffers as `gather` makes them into device `pages`; returns when the bytes are in place.

        `check` is called for each buffer just before it is copied, which makes the copy one out of the processor's
        cache; what it raises ends the whole.
        """
        after.wait()
        self._check(len(pages), tokens)
        self.sums.forget(pages)
        if self._stream is None:
            rows = _rows(self.pages)
            whole = tokens // self.page_tokens
            for i, (page, buffer) in enumerate(zip(pages, buffers, strict=True)):
                check(i)
                if i < whole:
                    np.copyto(rows[page], buffer)
                else:
                    tail = self._valid((Tier.DEVICE, page), i, tokens).view(torch.uint8).numpy()
                    np.copyto(tail, buffer.reshape(tail.shape))
            return
        valid = [self._valid((Tier.DEVICE, page), i, tokens) for i, page in enumerate(pages)]
        staging = torch.empty((2, self.page_bytes), dtype=torch.uint8, pin_memory=True)
        copied: list[torch.cuda.Event] = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            for i, (part, buffer) in enumerate(zip(valid, buffers, strict=True)):
                check(i)
                copied[i % 2].synchronize()
                stage = staging[i % 2, : buffer.nbytes]
                np.copyto(stage.numpy(), buffer)
                part.copy_(stage.view(part.dtype).view(part.shape), non_blocking=True)
                copied[i % 2].record(self._stream)
        self._stream.synchronize()

    def _copy_shadows(self, to: Tier, sources: Sequence[int], targets: Sequence[int]) -> None:
        if self.canaries is not None:
            self.canaries[to.other].copy(sources, self.canaries[to], targets)

    def _tier(self, tier: Tier) -> Tensor:
        return self.pages if tier is Tier.DEVICE else self.host_pages

    def _valid(self, ref: PageRef, index: int, tokens: int) -> Tensor:
        """The filled part of the page that stands at `index` among pages holding `tokens` tokens."""
        tier, page = ref
        return self._tier(tier)[page][:, :, : min(self.page_tokens, tokens - index * self.page_tokens)]

    def _check(self, pages: int, tokens: int) -> None:
        assert (pages - 1) * self.page_tokens < tokens <= pages * self.page_tokens, (pages, tokens)


def _rows(pages: Tensor) -> Buffer:
    """Page-major bytes `[pages, page_bytes]`."""
    return pages.view(torch.uint8).numpy().reshape(pages.shape[0], -1)


def _packed(part: Tensor) -> Buffer:
    """The bytes of a part of a page, without what lies between."""
    return np.ascontiguousarray(part.view(torch.uint8).numpy()).reshape(-1)


def _to_host(part: Tensor) -> Tensor:
    """Pinned bytes that are there once the stream is synchronised."""
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return host.copy_(part.contiguous(), non_blocking=True)


def _runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first source, first target, count) of pages that follow each other on both sides."""
    start = 0
    for i in range(1, len(sources) + 1):
        if i == len(sources) or (sources[i], targets[i]) != (sources[i - 1] + 1, targets[i - 1] + 1):
            yield sources[start], targets[start], i - start
            start = i
