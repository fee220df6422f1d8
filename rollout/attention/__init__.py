"""Attention over paged KV: one interface, a torch reference and flash-attn on CUDA.

An implementation appends the new keys and values to the pages and attends. It knows neither the model
nor who owns a page.
"""

from typing import Literal, assert_never

from rollout.attention.interface import Attention, DecodeBatch, PrefillBatch
from rollout.attention.reference import TorchAttention

__all__ = ["Attention", "DecodeBatch", "PrefillBatch", "make_attention"]


def make_attention(name: Literal["torch", "flash"], *, deterministic: bool) -> Attention:
    """The implementation of that name; `ConfigError` where what it needs is not installed.

    `torch` reduces in fixed blocks in any case, so `deterministic` changes nothing there.
    """
    match name:
        case "torch":
            return TorchAttention()
        case "flash":
            from rollout.attention.flash import FlashAttention

            return FlashAttention(deterministic=deterministic)
        case _:
            assert_never(name)
