"""Attention in plain torch, on any device: the oracle that the other implementations are compared with.

Keys are reduced in blocks of `BLOCK_TOKENS` absolute positions, whatever the page size, by an online softmax
in fp32 (Milakov and Gimelshein, arXiv 1805.02867). The bits of a row depend on that row, its own context and
the shape of the call (decode: B; prefill of one sequence: T), never on other rows, on the row's place in the
batch or on the longest context: a block masked for a row leaves the row's accumulators exactly as they were.
A masked position reads its sequence's first key, so what stale pages hold, NaN included, reaches nobody.

Shape letters: those of `interface`, and C context positions, rounded up to whole blocks; b positions of one
block; G query heads per KV head; M query rows that share a KV head (decode: G; prefill: G * T);
R = B * K independent products; X tokens in the pages of one layer; D = K * H.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.attention.interface import DecodeBatch, PrefillBatch, write_kv

BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """One block of keys of B sequences."""

    rows_Bb: Tensor
    """int64 index along X, flat."""
    bias_RMb: Tensor
    """fp32, -inf where a query may not look and 0 elsewhere; R and M may be 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scratch:
    """Buffers that all blocks reuse: fresh memory for each would cost more than the arithmetic."""

    stored_XD: Tensor
    k_BKbH: Tensor
    v_BKbH: Tensor
    scores_RMb: Tensor
    part_RMH: Tensor

    @classmethod
    def allocate(cls, *, B: int, M: int, pages: Tensor) -> "_Scratch":
        K, H = pages.shape[2:]
        fp32 = torch.float32
        return cls(
            stored_XD=pages.new_empty(B * BLOCK_TOKENS, K * H),
            k_BKbH=pages.new_empty((B, K, BLOCK_TOKENS, H), dtype=fp32),
            v_BKbH=pages.new_empty((B, K, BLOCK_TOKENS, H), dtype=fp32),
            scores_RMb=pages.new_empty((B * K, M, BLOCK_TOKENS), dtype=fp32),
            part_RMH=pages.new_empty((B * K, M, H), dtype=fp32),
        )

    def gather(self, into_BKbH: Tensor, pages_XD: Tensor, rows_Bb: Tensor) -> Tensor:
        """The block's keys or values in fp32, one head after the other: [R, b, H]."""
        B, K, b, H = into_BKbH.shape
        torch.index_select(pages_XD, 0, rows_Bb, out=self.stored_XD)
        into_BKbH.copy_(self.stored_XD.view(B, b, K, H).transpose(1, 2))
        return into_BKbH.view(B * K, b, H)


class TorchAttention:
    """Reference attention; the layers of one decode step share what is derived from its batch."""

    name = "torch"

    def __init__(self) -> None:
        self._batch: DecodeBatch | None = None
        self._blocks: tuple[_Block, ...] = ()
        self._scratch: _Scratch | None = None

    @torch.no_grad()
    def prefill(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PrefillBatch
    ) -> Tensor:
        write_kv(k_TKH, v_TKH, k_pages, v_pages, batch.write_pages_T, batch.write_slots_T)
        T, N, H = q_TNH.shape
        K = k_TKH.shape[1]
        out_TNH = torch.zeros_like(q_TNH)
        start = 0
        for s, (queries, keys) in enumerate(zip(batch.query_lengths, batch.key_lengths, strict=True)):
            # A sequence alone takes the padding rows along, so that its shapes depend on T only.
            t = T if len(batch.query_lengths) == 1 else queries
            rows = slice(start, start + t)
            q_KMH = q_TNH[rows].reshape(t, K, N // K, H).permute(1, 2, 0, 3).reshape(K, N // K * t, H)
            positions_t = torch.arange(keys - queries, keys - queries + t, device=q_TNH.device)
            blocks = _prefill_blocks(batch.tables_SP[s], positions_t, keys, k_pages, groups=N // K)
            scratch = _Scratch.allocate(B=1, M=q_KMH.shape[1], pages=k_pages)
            out_KMH = _attend(q_KMH, _token_rows(k_pages), _token_rows(v_pages), blocks, scratch)
            out_TNH[rows] = out_KMH.view(K, N // K, t, H).permute(2, 0, 1, 3).reshape(t, N, H)
            start += queries
        return out_TNH

    @torch.no_grad()
    def decode(
        self, q_BNH: Tensor, k_BKH: Tensor, v_BKH: Tensor, k_pages: Tensor, v_pages: Tensor, batch: DecodeBatch
    ) -> Tensor:
        write_kv(k_BKH, v_BKH, k_pages, v_pages, batch.write_pages_B, batch.write_slots_B)
        B, N, H = q_BNH.shape
        K = k_BKH.shape[1]
        if self._batch is not batch or self._scratch is None:
            self._blocks = tuple(_decode_blocks(batch, k_pages))
            self._scratch = _Scratch.allocate(B=B, M=N // K, pages=k_pages)
            self._batch = batch
        q_RMH = q_BNH.reshape(B * K, N // K, H)
        out_RMH = _attend(q_RMH, _token_rows(k_pages), _token_rows(v_pages), self._blocks, self._scratch)
        return out_RMH.view(B, N, H)


def _attend(q_RMH: Tensor, keys_XD: Tensor, values_XD: Tensor, blocks: Iterable[_Block], scratch: _Scratch) -> Tensor:
    """Softmax attention of every query over the keys its bias allows; all of them see the first key."""
    scaled_RMH = q_RMH.float() * q_RMH.shape[2] ** -0.5
    out_RMH = torch.zeros_like(scaled_RMH)
    mass_RM1 = out_RMH.new_zeros((*out_RMH.shape[:2], 1))
    top_RM1 = torch.full_like(mass_RM1, -torch.inf)
    for block in blocks:
        k_RbH = scratch.gather(scratch.k_BKbH, keys_XD, block.rows_Bb)
        v_RbH = scratch.gather(scratch.v_BKbH, values_XD, block.rows_Bb)
        scores_RMb = torch.bmm(scaled_RMH, k_RbH.transpose(1, 2), out=scratch.scores_RMb).add_(block.bias_RMb)
        new_top_RM1 = torch.maximum(top_RM1, scores_RMb.amax(dim=2, keepdim=True))
        # Where the block is masked the top stays: weights are exp(-inf) = 0, the decay is exp(0) = 1, both exact.
        weights_RMb = scores_RMb.sub_(new_top_RM1).exp_()
        decay_RM1 = top_RM1.sub_(new_top_RM1).exp_()
        mass_RM1.mul_(decay_RM1).add_(weights_RMb.sum(dim=2, keepdim=True))
        out_RMH.mul_(decay_RM1).add_(torch.bmm(weights_RMb, v_RbH, out=scratch.part_RMH))
        top_RM1 = new_top_RM1
    return out_RMH.div_(mass_RM1).to(q_RMH.dtype)


def _decode_blocks(batch: DecodeBatch, k_pages: Tensor) -> Iterator[_Block]:
    K = k_pages.shape[2]
    position_C = torch.arange(_round_up(batch.max_length + 1), device=k_pages.device)
    hidden_BC = position_C > batch.lengths_B[:, None]
    rows_BC = _token_index(batch.tables_BP, position_C.masked_fill(hidden_BC, 0), k_pages)
    bias_RMC = _bias(hidden_BC).repeat_interleave(K, dim=0)[:, None]
    for block in _block_slices(position_C):
        yield _Block(rows_Bb=rows_BC[:, block].flatten(), bias_RMb=bias_RMC[:, :, block].contiguous())


def _prefill_blocks(
    table_P: Tensor, positions_t: Tensor, key_length: int, k_pages: Tensor, *, groups: int
) -> Iterator[_Block]:
    """Blocks of one sequence, for queries at `positions_t`; from `key_length` on they are padding."""
    position_C = torch.arange(_round_up(key_length), device=k_pages.device)
    position_1C = position_C.masked_fill(position_C >= key_length, 0)[None]
    rows_C = _token_index(table_P[None], position_1C, k_pages)[0]
    for block in _block_slices(position_C):
        bias_tb = _bias(position_C[block] > positions_t[:, None])
        yield _Block(rows_Bb=rows_C[block], bias_RMb=bias_tb.repeat(1, groups, 1))


def _token_index(tables_BP: Tensor, position_BC: Tensor, pages: Tensor) -> Tensor:
    """Index along X of these positions of each sequence, int64 [B, C]."""
    _, page_tokens, K, H = pages.shape
    page_BC = tables_BP.long().gather(1, position_BC // page_tokens)
    return page_BC * (pages.stride(0) // (K * H)) + position_BC % page_tokens


def _token_rows(pages: Tensor) -> Tensor:
    """One layer's pages as the rows of one matrix [X, D], without a copy.

    The rows between two pages are the other layers' KV; no index names them.
    """
    count, page_tokens, K, H = pages.shape
    D = K * H
    assert pages.stride()[1:] == (D, H, 1), f"a layer's page must be contiguous, its strides are {pages.stride()[1:]}"
    assert pages.stride(0) % D == 0, f"pages {pages.stride(0)} elements apart are not whole rows of {D}"
    return pages.as_strided(((count - 1) * (pages.stride(0) // D) + page_tokens, D), (D, 1))


def _bias(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)


def _block_slices(position_C: Tensor) -> list[slice]:
    return [slice(start, start + BLOCK_TOKENS) for start in range(0, position_C.shape[0], BLOCK_TOKENS)]


def _round_up(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
