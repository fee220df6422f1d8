"""The one interface between the decoder and an attention implementation, and the batches it works on.

An implementation appends the new keys and values to the pages and attends over everything before.
Device pages are page-major, `[pages, layers, 2, page_tokens, kv_heads, head_dim]`; a layer is handed
over as the strided views `k_pages`, `v_pages` of shape `[pages, page_tokens, kv_heads, head_dim]`.
Page 0 is scratch: padding rows write there and nobody reads it.

Shape letters: T tokens of all chunks together, B decode rows, S sequences, P pages of the longest
sequence, N query heads, K KV heads, H head_dim.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBatch:
    """Chunks of S sequences, concatenated along T; rows past `cu_queries[-1]` are padding."""

    tables_SP: Tensor
    """int32 page numbers of each sequence, all its context; padded with 0."""
    cu_queries: Tensor
    """int32 [S + 1], offsets of each chunk along T."""
    cu_keys: Tensor
    """int32 [S + 1], offsets of each sequence's context, this chunk included."""
    query_lengths: tuple[int, ...]
    """Tokens of each chunk."""
    key_lengths: tuple[int, ...]
    """Tokens of context of each sequence, this chunk included."""
    write_pages_T: Tensor
    """int64 page that each row's key and value go to; 0 for padding rows."""
    write_slots_T: Tensor
    """int64 slot in that page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatch:
    """One new token for each of B sequences; padding rows have length 0 and table 0."""

    tables_BP: Tensor
    """int32 page numbers, padded with 0."""
    lengths_B: Tensor
    """int32 tokens of context *before* this step's token is appended."""
    max_length: int
    """Largest entry of `lengths_B`, known on the host."""
    write_pages_B: Tensor
    """int64 page that each row's key and value go to; 0 for padding rows."""
    write_slots_B: Tensor
    """int64 slot in that page."""


class Attention(Protocol):
    """Causal attention over paged KV. Both methods write k and v to the pages before they attend."""

    name: str
    """Goes into the KV fingerprint."""

    def prefill(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PrefillBatch
    ) -> Tensor:
        """Attention output, [T, N, H]; padding rows hold anything finite."""
        ...

    def decode(
        self, q_BNH: Tensor, k_BKH: Tensor, v_BKH: Tensor, k_pages: Tensor, v_pages: Tensor, batch: DecodeBatch
    ) -> Tensor:
        """Attention output, [B, N, H]; padding rows hold anything finite."""
        ...


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Store rows k, v `[rows, K, H]` at (page, slot); a later row wins over an earlier one only on page 0."""
    k_pages.index_put_((pages, slots), k)
    v_pages.index_put_((pages, slots), v)
