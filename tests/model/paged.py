"""Runs a decoder over paged KV with the plainest attention there is, for comparison with Hugging Face.

Shape letters: those of `rollout.attention.interface`; C context positions.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rollout.attention.interface import DecodeBatch, PrefillBatch, write_kv
from rollout.model.decoder import Decoder, TorchDecoder
from rollout.model.native import NativeDecoder
from rollout.model.spec import read_spec
from rollout.model.weights import load_directory
from rollout.native.library import Kernels

PAGE_TOKENS = 4
UNEVEN = {
    "hidden_size": 66,
    "intermediate_size": 150,
    "vocab_size": 323,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 22,
}
"""A tiny model every linear map of which, keys and values included, has outputs that are no multiple of 16."""


class DenseAttention:
    """Gathers the whole context of each sequence and attends densely, in the dtype of the queries."""

    name = "dense"

    def prefill(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PrefillBatch
    ) -> Tensor:
        write_kv(k_TKH, v_TKH, k_pages, v_pages, batch.write_pages_T, batch.write_slots_T)
        out_TNH = torch.zeros_like(q_TNH)
        for s, (start, end) in enumerate(zip(batch.cu_queries[:-1], batch.cu_queries[1:], strict=True)):
            out_TNH[start:end] = _attend(q_TNH[start:end], k_pages, v_pages, batch.tables_SP[s], batch.key_lengths[s])
        return out_TNH

    def decode(
        self, q_BNH: Tensor, k_BKH: Tensor, v_BKH: Tensor, k_pages: Tensor, v_pages: Tensor, batch: DecodeBatch
    ) -> Tensor:
        write_kv(k_BKH, v_BKH, k_pages, v_pages, batch.write_pages_B, batch.write_slots_B)
        rows = zip(torch.split(q_BNH, 1), batch.tables_BP, batch.lengths_B.tolist(), strict=True)
        return torch.cat([_attend(q_1NH, k_pages, v_pages, table_P, length + 1) for q_1NH, table_P, length in rows])


def _attend(q_TNH: Tensor, k_pages: Tensor, v_pages: Tensor, table_P: Tensor, context: int) -> Tensor:
    """Causal attention of the last T positions of a context."""
    T, N, H = q_TNH.shape
    k_NCH, v_NCH = (
        pages[table_P.long()].flatten(0, 1)[:context].repeat_interleave(N // pages.shape[2], dim=1).transpose(0, 1)
        for pages in (k_pages, v_pages)
    )
    scores_NTC = q_TNH.transpose(0, 1) @ k_NCH.transpose(1, 2) * H**-0.5
    future_TC = torch.ones(T, context, dtype=torch.bool).triu(context - T + 1)
    weights_NTC = scores_NTC.masked_fill(future_TC, -torch.inf).softmax(dim=-1, dtype=torch.float32).to(q_TNH.dtype)
    out_NTH: Tensor = weights_NTC @ v_NCH
    return out_NTH.transpose(0, 1)


def torch_decoder(path: Path, dtype: torch.dtype = torch.float32) -> TorchDecoder:
    decoder = TorchDecoder(read_spec(path), DenseAttention(), dtype=dtype, device=torch.device("cpu"))
    load_directory(decoder, path)
    return decoder


def native_decoder(path: Path, dtype: torch.dtype = torch.float32, *, threads: int = 2) -> NativeDecoder:
    decoder = NativeDecoder(read_spec(path), Kernels(threads), dtype=dtype)
    load_directory(decoder, path)
    return decoder


class PagedDecoder:
    """A decoder with pages for a few sequences; page numbers are handed out interleaved, page 0 is scratch."""

    def __init__(
        self, decoder: Decoder, *, sequences: int = 1, max_tokens: int = 128, page_tokens: int = PAGE_TOKENS
    ) -> None:
        spec = decoder.spec
        each = -(-max_tokens // page_tokens)
        shape = (1 + sequences * each, spec.layers, 2, page_tokens, spec.kv_heads, spec.head_dim)
        self.decoder = decoder
        self.page_tokens = page_tokens
        # What stale pages hold must not matter.
        self.pages = torch.full(shape, 7.0, dtype=decoder.dtype)
        self.tables_SP = 1 + torch.arange(sequences * each, dtype=torch.int32).view(each, sequences).T.contiguous()
        self.lengths = [0] * sequences

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Sequence[int]], *, padding: int = 0) -> list[Tensor]:
        """Logits of every token of the next chunk of each sequence; padding only for decoders that may need it."""
        padding *= not self.decoder.batch_invariant
        ids = [i for chunk in chunks for i in chunk] + [0] * padding
        positions_T, pages_T, slots_T = self._places([len(chunk) for chunk in chunks], padding)
        ends = [length + len(chunk) for length, chunk in zip(self.lengths, chunks, strict=True)]
        batch = PrefillBatch(
            tables_SP=self.tables_SP,
            cu_queries=_offsets([len(chunk) for chunk in chunks]),
            cu_keys=_offsets(ends),
            query_lengths=tuple(len(chunk) for chunk in chunks),
            key_lengths=tuple(ends),
            write_pages_T=pages_T,
            write_slots_T=slots_T,
        )
        hidden_TE = self.decoder.forward(torch.tensor(ids), positions_T, self.pages, batch)
        self.lengths = ends
        logits_TV = self.decoder.logits(hidden_TE).float()
        return list(torch.split(logits_TV[: len(ids) - padding], [len(chunk) for chunk in chunks]))

    @torch.inference_mode()
    def decode(self, ids: Sequence[int], *, padding: int = 0) -> Tensor:
        """Logits after one more token of each sequence, [S, V]; padded likewise."""
        padding *= not self.decoder.batch_invariant
        positions_B, pages_B, slots_B = self._places([1] * len(ids), padding)
        lengths_B = torch.tensor([*self.lengths, *[0] * padding], dtype=torch.int32)
        padded_tables_BP = torch.cat((self.tables_SP, self.tables_SP.new_zeros(padding, self.tables_SP.shape[1])))
        batch = DecodeBatch(
            tables_BP=padded_tables_BP,
            lengths_B=lengths_B,
            max_length=max(self.lengths),
            write_pages_B=pages_B,
            write_slots_B=slots_B,
        )
        ids_B = torch.tensor([*ids, *[0] * padding])
        hidden_BE = self.decoder.forward(ids_B, positions_B, self.pages, batch)
        self.lengths = [length + 1 for length in self.lengths]
        return self.decoder.logits(hidden_BE).float()[: len(ids)]

    def _places(self, counts: Sequence[int], padding: int) -> tuple[Tensor, Tensor, Tensor]:
        """Positions, pages and slots of the next tokens of each sequence, then of padding rows."""
        position_ranges = [
            torch.arange(length, length + count) for length, count in zip(self.lengths, counts, strict=True)
        ]
        pages = [self.tables_SP[s].long()[p // self.page_tokens] for s, p in enumerate(position_ranges)]
        blank = torch.zeros(padding, dtype=torch.int64)
        positions_T = torch.cat((*position_ranges, blank))
        return positions_T, torch.cat((*pages, blank)), positions_T % self.page_tokens


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
