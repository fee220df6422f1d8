"""Sequences laid out in pages, the way an engine would, and the dense answer to compare with.

A `Chunk` is one sequence of which the last rows are new. `Layout` puts chunks into pages in a random order and
fills all that no sequence owns with NaN, so that reading it shows. The oracle knows nothing of pages.

Shape letters: those of `rollout.attention.interface`, and t new tokens and l tokens of one sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.attention import Attention, DecodeBatch, PrefillBatch

LAYERS, LAYER = 3, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Query heads, KV heads, head_dim."""

    N: int = 6
    K: int = 2
    H: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    q_tNH: Tensor
    k_lKH: Tensor
    v_lKH: Tensor

    @property
    def new(self) -> int:
        return self.q_tNH.shape[0]

    @property
    def length(self) -> int:
        return self.k_lKH.shape[0]

    @property
    def context(self) -> int:
        return self.length - self.new


def make_chunk(seed: int, *, context: int, new: int, dtype: torch.dtype, heads: Heads | None = None) -> Chunk:
    heads = heads or Heads()
    random = torch.Generator().manual_seed(seed)
    return Chunk(
        q_tNH=(torch.randn(new, heads.N, heads.H, generator=random) * 2).to(dtype),
        k_lKH=torch.randn(context + new, heads.K, heads.H, generator=random).to(dtype),
        v_lKH=torch.randn(context + new, heads.K, heads.H, generator=random).to(dtype),
    )


def dense_attention(chunk: Chunk) -> Tensor:
    """Softmax attention of the new tokens in fp64, one query head at a time: [t, N, H]."""
    q, k, v = chunk.q_tNH.double(), chunk.k_lKH.double(), chunk.v_lKH.double()
    group = q.shape[1] // k.shape[1]
    position_t = torch.arange(chunk.context, chunk.length)
    future_tl = torch.arange(chunk.length) > position_t[:, None]
    outs = []
    for n in range(q.shape[1]):
        scores_tl = q[:, n] @ k[:, n // group].T / q.shape[2] ** 0.5
        outs.append(scores_tl.masked_fill(future_tl, -torch.inf).softmax(1) @ v[:, n // group])
    return torch.stack(outs, dim=1)


class Layout:
    """Chunks in pages `[pages, LAYERS, 2, page_tokens, K, H]`; `run` gives the output of each chunk."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        page_tokens: int,
        seed: int = 0,
        padding: int = 0,
        spare_columns: int = 0,
        device: str = "cpu",
    ) -> None:
        self.chunks = chunks
        self._device = device
        self.page_tokens = page_tokens
        self._padding = padding
        self._random = torch.Generator().manual_seed(seed)
        counts = [-(-chunk.length // page_tokens) for chunk in chunks]
        numbers = 1 + torch.randperm(sum(counts) + 2, generator=self._random)
        first = chunks[0]
        self._dtype = first.q_tNH.dtype
        shape = (len(numbers) + 1, LAYERS, 2, page_tokens, *first.k_lKH.shape[1:])
        self.pages = torch.full(shape, torch.nan, dtype=self._dtype)
        self.tables_SP = torch.zeros(len(chunks), max(counts) + spare_columns, dtype=torch.int32)
        for s, (chunk, owned) in enumerate(zip(chunks, numbers.split([*counts, 2]), strict=False)):
            self.tables_SP[s, : len(owned)] = owned
            pages, slots = self._places(s, torch.arange(chunk.context))
            self.pages[pages, LAYER, 0, slots] = chunk.k_lKH[: chunk.context]
            self.pages[pages, LAYER, 1, slots] = chunk.v_lKH[: chunk.context]
        self.pages = self.pages.to(device)

    @property
    def k_pages(self) -> Tensor:
        return self.pages[:, LAYER, 0]

    @property
    def v_pages(self) -> Tensor:
        return self.pages[:, LAYER, 1]

    def stored(self, s: int) -> tuple[Tensor, Tensor]:
        """All keys and values of sequence s, read back from its pages."""
        pages, slots = self._places(s, torch.arange(self.chunks[s].length))
        return self.k_pages[pages, slots], self.v_pages[pages, slots]

    def prefill(self, attention: Attention) -> list[Tensor]:
        new, lengths = [c.new for c in self.chunks], [c.length for c in self.chunks]
        places = [self._places(s, torch.arange(c.context, c.length)) for s, c in enumerate(self.chunks)]
        nowhere = torch.zeros(self._padding, dtype=torch.int64)
        batch = PrefillBatch(
            tables_SP=self.tables_SP.to(self._device),
            cu_queries=_offsets(new).to(self._device),
            cu_keys=_offsets(lengths).to(self._device),
            query_lengths=tuple(new),
            key_lengths=tuple(lengths),
            write_pages_T=torch.cat([pages for pages, _ in places] + [nowhere]).to(self._device),
            write_slots_T=torch.cat([slots for _, slots in places] + [nowhere]).to(self._device),
        )
        out = attention.prefill(*self._new_rows(), self.k_pages, self.v_pages, batch)
        assert out.shape == (sum(new) + self._padding, *self.chunks[0].q_tNH.shape[1:])
        assert out.dtype == self._dtype
        assert out.isfinite().all()
        return list(out[: sum(new)].cpu().split(new))

    def decode(self, attention: Attention) -> list[Tensor]:
        assert all(chunk.new == 1 for chunk in self.chunks)
        contexts = [chunk.context for chunk in self.chunks]
        places = [self._places(s, torch.tensor([context])) for s, context in enumerate(contexts)]
        nowhere = torch.zeros(self._padding, dtype=torch.int64)
        batch = DecodeBatch(
            tables_BP=torch.nn.functional.pad(self.tables_SP, (0, 0, 0, self._padding)).to(self._device),
            lengths_B=torch.tensor([*contexts, *nowhere], dtype=torch.int32, device=self._device),
            max_length=max(contexts),
            write_pages_B=torch.cat([pages for pages, _ in places] + [nowhere]).to(self._device),
            write_slots_B=torch.cat([slots for _, slots in places] + [nowhere]).to(self._device),
        )
        out = attention.decode(*self._new_rows(), self.k_pages, self.v_pages, batch)
        assert out.shape == (len(contexts) + self._padding, *self.chunks[0].q_tNH.shape[1:])
        assert out.dtype == self._dtype
        return list(out[: len(contexts)].cpu().split(1))

    def _places(self, s: int, position: Tensor) -> tuple[Tensor, Tensor]:
        return self.tables_SP[s, position // self.page_tokens].long(), position % self.page_tokens

    def _new_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of all new tokens and random padding, as the slices of one tensor that a fused linear gives."""
        rows = [torch.cat([c.q_tNH, c.k_lKH[c.context :], c.v_lKH[c.context :]], dim=1) for c in self.chunks]
        garbage = torch.randn(self._padding, *rows[0].shape[1:], generator=self._random).to(self._dtype)
        qkv = torch.cat([*rows, garbage]).to(self._device)
        N, K = self.chunks[0].q_tNH.shape[1], self.chunks[0].k_lKH.shape[1]
        return qkv[:, :N], qkv[:, N : N + K], qkv[:, N + K :]


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
