"""The KV tensor of one worker and the bytes of its pages.

Device pages are one tensor `[pages, layers, 2, page_tokens, kv_heads, head_dim]` (page 0 is scratch), so
a page is contiguous over all layers. `gather` and `scatter` move whole pages and packed tails between
it and host buffers; they may run on another thread than the engine's, on pages that nobody else
writes. Fences: gather only what a finished step wrote; scatter only into reserved pages.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rollout.kv.image import Buffer


class KVStorage:
    """Allocates the pages and copies them out and in."""

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
    ) -> None:
        shape = (pages + 1, layers, 2, page_tokens, kv_heads, head_dim)
        self.pages: Tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.page_tokens = page_tokens
        self.token_bytes = layers * 2 * kv_heads * head_dim * self.pages.element_size()
        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_tokens

    def gather(self, pages: Sequence[int], tokens: int) -> list[Buffer]:
        """The bytes of `pages`, holding `tokens` tokens, one buffer a page, the last packed to its tokens.

        On CPU whole pages are views: the caller keeps the pages from being reused while it reads them.
        """
        self._check(pages, tokens)
        if self._copies is None:
            parts = [self._valid(page, i, tokens).view(torch.uint8).numpy() for i, page in enumerate(pages)]
            return [np.ascontiguousarray(part).reshape(-1) for part in parts]
        self._copies.wait_stream(torch.cuda.default_stream(self.pages.device))
        with torch.cuda.stream(self._copies):
            staged = []
            for i, page in enumerate(pages):
                valid = self._valid(page, i, tokens).contiguous()
                host = torch.empty(valid.shape, dtype=valid.dtype, pin_memory=True)
                host.copy_(valid, non_blocking=True)
                staged.append(host)
        self._copies.synchronize()
        return [host.view(torch.uint8).numpy().reshape(-1) for host in staged]

    def scatter(self, pages: Sequence[int], tokens: int, buffers: Sequence[Buffer]) -> None:
        """Write buffers as `gather` makes them into `pages`; returns when the bytes are in place."""
        self._check(pages, tokens)
        if self._copies is None:
            for i, (page, buffer) in enumerate(zip(pages, buffers, strict=True)):
                valid = self._valid(page, i, tokens)
                target = valid.view(torch.uint8).numpy()
                np.copyto(target, buffer.reshape(target.shape))
            return
        self._copies.wait_stream(torch.cuda.default_stream(self.pages.device))
        staging = torch.empty((2, self.page_bytes), dtype=torch.uint8, pin_memory=True)
        copied: list[torch.cuda.Event] = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            for i, (page, buffer) in enumerate(zip(pages, buffers, strict=True)):
                valid = self._valid(page, i, tokens)
                copied[i % 2].synchronize()
                stage = staging[i % 2, : buffer.nbytes]
                np.copyto(stage.numpy(), buffer)
                valid.copy_(stage.view(valid.dtype).view(valid.shape), non_blocking=True)
                copied[i % 2].record(self._copies)
        self._copies.synchronize()

    def _valid(self, page: int, index: int, tokens: int) -> Tensor:
        """The filled part of the page that stands at `index` among pages holding `tokens` tokens."""
        return self.pages[page][:, :, : min(self.page_tokens, tokens - index * self.page_tokens)]

    def _check(self, pages: Sequence[int], tokens: int) -> None:
        assert (len(pages) - 1) * self.page_tokens < tokens <= len(pages) * self.page_tokens, (len(pages), tokens)
