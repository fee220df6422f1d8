"""Rotary position embedding (Su et al., 2021), in the half-split layout of Hugging Face.

The cosines of every position are computed once, on the CPU and in float64: computed per step they would depend
on how a batch falls into SIMD lanes and threads. So the bits of a position are the same in every batch, for
every thread count and on every device.

Shape letters: T tokens, A heads (any number), H head_dim, h half of it, C positions.
"""

import math
from typing import assert_never

import torch
from torch import Tensor

from rollout.model.spec import DefaultRope, Llama3Rope, Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each pair of channels, fp32 [h] on the CPU."""
    exponents_h = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies_h = 1.0 / rope.theta**exponents_h
    match rope:
        case DefaultRope():
            return frequencies_h
        case Llama3Rope():
            return _llama3(rope, frequencies_h)
        case _:
            assert_never(rope)


def _llama3(rope: Llama3Rope, frequencies_h: Tensor) -> Tensor:
    turns_h = rope.original_context_tokens * frequencies_h / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept_h = ((turns_h - rope.low_freq_factor) / span).clamp(0, 1)
    return (1 - kept_h) * frequencies_h / rope.factor + kept_h * frequencies_h


class RopeTable:
    """Cosine and sine of every position, in the model's dtype as Hugging Face rounds them."""

    def __init__(self, rope: Rope, *, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        position_C = torch.arange(positions, dtype=torch.float32)
        angles_Ch = (position_C[:, None] * inverse_frequencies(rope, head_dim)).double()
        # Through fp32, so that bf16 rounds what Hugging Face rounds.
        self.cos_Ch = angles_Ch.cos().float().to(device=device, dtype=dtype)
        self.sin_Ch = angles_Ch.sin().float().to(device=device, dtype=dtype)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines to broadcast over heads, [T, 1, h] each."""
        return self.cos_Ch[positions_T, None], self.sin_Ch[positions_T, None]


def rotate(x_TAH: Tensor, cos_T1h: Tensor, sin_T1h: Tensor) -> Tensor:
    """Turn channel i and channel i + h of every head as one plane."""
    x_TAh, y_TAh = x_TAH.chunk(2, dim=-1)
    return torch.cat((x_TAh * cos_T1h - y_TAh * sin_T1h, y_TAh * cos_T1h + x_TAh * sin_T1h), dim=-1)
