"""Attention by the flash-attn 2 package, on CUDA, in bf16 or fp16; the only module that imports it.

The kernels read one layer's pages in place, through any page stride, and want page sizes that are multiples
of 256 tokens. Padding rows of a prefill are never shown to them. A row reduces over its own keys only, in
blocks whose size the head dimension sets; what depends on the batch is into how many parts its keys are
split, so deterministic decoding asks for one part.

Shape letters: those of `interface`.
"""

from typing import Any

import torch
from torch import Tensor

from rollout.attention.interface import DecodeBatch, PrefillBatch, write_kv
from rollout.errors import ConfigError


class FlashAttention:
    """flash-attn 2. Raises `ConfigError` where the package is not installed."""

    name = "flash"

    def __init__(self, *, deterministic: bool) -> None:
        try:
            import flash_attn
        except ImportError as error:
            raise ConfigError(
                f"attention `flash` needs the package flash-attn, which cannot be imported ({error}): "
                "`pip install rollout[cuda]`, or choose attention `torch`"
            ) from error
        self._varlen: Any = flash_attn.flash_attn_varlen_func
        self._with_kvcache: Any = flash_attn.flash_attn_with_kvcache
        # 0 lets the package choose, from the number of rows and the width of the table.
        self._num_splits = 1 if deterministic else 0

    @torch.no_grad()
    def prefill(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PrefillBatch
    ) -> Tensor:
        write_kv(k_TKH, v_TKH, k_pages, v_pages, batch.write_pages_T, batch.write_slots_T)
        real = sum(batch.query_lengths)
        out: Tensor = self._varlen(
            q_TNH[:real],
            k_pages,
            v_pages,
            cu_seqlens_q=batch.cu_queries,
            cu_seqlens_k=batch.cu_keys,
            max_seqlen_q=max(batch.query_lengths),
            max_seqlen_k=max(batch.key_lengths),
            causal=True,
            block_table=batch.tables_SP,
        )
        if real == q_TNH.shape[0]:
            return out
        padded_TNH = torch.zeros_like(q_TNH)
        padded_TNH[:real] = out
        return padded_TNH

    @torch.no_grad()
    def decode(
        self, q_BNH: Tensor, k_BKH: Tensor, v_BKH: Tensor, k_pages: Tensor, v_pages: Tensor, batch: DecodeBatch
    ) -> Tensor:
        """The kernel itself appends k and v, at `lengths_B`; the batch's write positions say the same."""
        out_B1NH: Tensor = self._with_kvcache(
            q_BNH[:, None],
            k_pages,
            v_pages,
            k=k_BKH[:, None],
            v=v_BKH[:, None],
            cache_seqlens=batch.lengths_B,
            block_table=batch.tables_BP,
            causal=True,
            num_splits=self._num_splits,
        )
        return out_B1NH[:, 0]
