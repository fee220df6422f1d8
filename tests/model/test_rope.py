"""Rotary embedding against Hugging Face, at every position a model allows."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from rollout.model.rope import RopeTable, inverse_frequencies, rotate
from rollout.model.spec import DefaultRope, Llama3Rope, Rope

CPU = torch.device("cpu")
POSITIONS = 16384
DEFAULT = DefaultRope(theta=500_000.0)
LLAMA3 = Llama3Rope(
    theta=500_000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=8192
)
CASES: list[tuple[Rope, dict[str, Any]]] = [
    (DEFAULT, {"rope_type": "default", "rope_theta": 500_000.0}),
    (
        LLAMA3,
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
]


@pytest.mark.parametrize(("rope", "parameters"), CASES)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_frequencies_equal_those_of_hugging_face(rope: Rope, parameters: dict[str, Any], head_dim: int) -> None:
    theirs = _hugging_face(parameters, head_dim)
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), theirs.inv_freq, atol=0, rtol=1e-6)


def test_llama3_keeps_high_frequencies_and_divides_low_ones() -> None:
    plain_h, scaled_h = inverse_frequencies(DEFAULT, 128), inverse_frequencies(LLAMA3, 128)
    wavelength_h = 2 * math.pi / plain_h
    high, low = wavelength_h < 8192 / 4, wavelength_h > 8192 / 1
    assert high.any()
    assert low.any()
    assert torch.equal(scaled_h[high], plain_h[high])
    torch.testing.assert_close(scaled_h[low], plain_h[low] / 32)
    between = ~high & ~low
    assert ((plain_h[between] / 32 < scaled_h[between]) & (scaled_h[between] < plain_h[between])).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rope", "parameters"), CASES)
def test_heads_are_turned_as_by_hugging_face(rope: Rope, parameters: dict[str, Any], dtype: torch.dtype) -> None:
    positions_T = torch.tensor([0, 1, 2, 17, 4096, POSITIONS - 1])
    x_TAH = torch.randn(len(positions_T), 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    table = RopeTable(rope, head_dim=64, positions=POSITIONS, dtype=dtype, device=CPU)
    cos, sin = _hugging_face(parameters, 64)(x_TAH, positions_T[None])
    expected, _ = apply_rotary_pos_emb(x_TAH.transpose(0, 1)[None], x_TAH.transpose(0, 1)[None], cos, sin)
    turned_TAH = rotate(x_TAH, *table.at(positions_T))
    assert turned_TAH.dtype == dtype
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(turned_TAH, expected[0].transpose(0, 1), atol=tolerance, rtol=tolerance)


def _hugging_face(parameters: dict[str, Any], head_dim: int) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        rope_parameters=dict(parameters),
    )
    return LlamaRotaryEmbedding(config)
