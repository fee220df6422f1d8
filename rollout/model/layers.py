"""The pieces of a decoder: root-mean-square norm, linear maps, SwiGLU, and one layer made of them.

Weights are plain tensors, preallocated in fused form and only ever written in place, so that whoever holds a
layer sees new weights. Arithmetic follows Hugging Face operation by operation. On one device and for one shape
and thread count the bits of a row do not depend on its place among the rows or on the other rows.

Shape letters: T tokens, E hidden, I intermediate, N query heads, K KV heads, H head_dim, h half of it,
A = N + 2K heads of the fused projection; X and Y the inputs and outputs of a linear map, G = 2I.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.attention.interface import Attention, DecodeBatch, PrefillBatch
from rollout.model.rope import rotate
from rollout.model.spec import ModelSpec
from rollout.model.weights import Target, Whole, head_widths

_SERIAL_ELEMENTS = 32768
"""Elementwise CPU kernels split more elements than this among threads, in the middle of rows."""


class Linear:
    """y = x W^T + b."""

    def __init__(self, x: int, y: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.weight_YX = torch.empty((y, x), dtype=dtype, device=device)
        self.bias_Y = torch.empty((y,), dtype=dtype, device=device) if bias else None

    def memory(self) -> tuple[Tensor, ...]:
        return (self.weight_YX,) if self.bias_Y is None else (self.weight_YX, self.bias_Y)

    def __call__(self, x_TX: Tensor) -> Tensor:
        return F.linear(x_TX, self.weight_YX, self.bias_Y)


class RMSNorm:
    """Zhang and Sennrich, 2019; normalised in fp32, scaled in the model's dtype."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight_E = torch.empty((spec.hidden,), dtype=dtype, device=device)
        self._eps = spec.norm_eps

    def __call__(self, x_TE: Tensor) -> Tensor:
        wide_TE = x_TE.float()
        scale_T1 = torch.rsqrt(wide_TE.pow(2).mean(dim=-1, keepdim=True) + self._eps)
        return self.weight_E * (wide_TE * scale_T1).to(x_TE.dtype)


class Layer:
    """Attention and SwiGLU, each behind a norm and beside a residual."""

    def __init__(self, spec: ModelSpec, attention: Attention, *, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._attention = attention
        self._heads, self._kv_heads, self._head_dim = spec.heads, spec.kv_heads, spec.head_dim
        fused = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self.attention_norm = RMSNorm(spec, dtype=dtype, device=device)
        self.qkv = Linear(spec.hidden, fused, bias=spec.qkv_bias, dtype=dtype, device=device)
        self.out = Linear(spec.heads * spec.head_dim, spec.hidden, bias=False, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(spec, dtype=dtype, device=device)
        self.gate_up = Linear(spec.hidden, 2 * spec.intermediate, bias=False, dtype=dtype, device=device)
        self.down = Linear(spec.intermediate, spec.hidden, bias=False, dtype=dtype, device=device)

    def targets(self) -> Mapping[str, Target]:
        """Where each tensor goes, under its Hugging Face name within the layer."""
        targets: dict[str, Target] = {
            "input_layernorm.weight": Whole(self.attention_norm.weight_E),
            "post_attention_layernorm.weight": Whole(self.mlp_norm.weight_E),
            "self_attn.o_proj.weight": Whole(self.out.weight_YX),
            "mlp.down_proj.weight": Whole(self.down.weight_YX),
        }
        widths = head_widths(self._spec)
        for name, part in zip(widths, torch.split(self.qkv.weight_YX, list(widths.values())), strict=True):
            targets[f"self_attn.{name}_proj.weight"] = Whole(part)
        if self.qkv.bias_Y is not None:
            for name, part in zip(widths, torch.split(self.qkv.bias_Y, list(widths.values())), strict=True):
                targets[f"self_attn.{name}_proj.bias"] = Whole(part)
        for name, part in zip(("gate", "up"), self.gate_up.weight_YX.chunk(2), strict=True):
            targets[f"mlp.{name}_proj.weight"] = Whole(part)
        return targets

    def memory(self) -> Iterator[Tensor]:
        """Everything that it holds."""
        yield from (self.attention_norm.weight_E, self.mlp_norm.weight_E)
        for linear in (self.qkv, self.out, self.gate_up, self.down):
            yield from linear.memory()

    def forward(
        self,
        x_TE: Tensor,
        rope: tuple[Tensor, Tensor],
        k_pages: Tensor,
        v_pages: Tensor,
        batch: PrefillBatch | DecodeBatch,
    ) -> Tensor:
        """The layer's output, [T, E]; `rope` holds cosines and sines, [T, 1, h] each."""
        qkv_TAH = self.qkv(self.attention_norm(x_TE)).view(x_TE.shape[0], -1, self._head_dim)
        turned_TAH = rotate(qkv_TAH[:, : -self._kv_heads], *rope)
        q_TNH, k_TKH = turned_TAH[:, : self._heads], turned_TAH[:, self._heads :]
        v_TKH = qkv_TAH[:, -self._kv_heads :]
        if isinstance(batch, PrefillBatch):
            mixed_TNH = self._attention.prefill(q_TNH, k_TKH, v_TKH, k_pages, v_pages, batch)
        else:
            mixed_TNH = self._attention.decode(q_TNH, k_TKH, v_TKH, k_pages, v_pages, batch)
        x_TE = x_TE + self.out(mixed_TNH.flatten(1))
        return x_TE + self.down(swiglu(self.gate_up(self.mlp_norm(x_TE))))


def swiglu(gate_up_TG: Tensor) -> Tensor:
    """Shazeer, 2020: silu(gate) * up, [T, I].

    Vector and scalar code round exp differently. Rows that are strided are walked one by one, so the scalar
    remainder always falls on the same columns, as long as no two threads share a row.
    """
    gate_TI, up_TI = gate_up_TG.chunk(2, dim=-1)
    if gate_TI.device.type != "cpu" or gate_TI.numel() <= _SERIAL_ELEMENTS:
        return F.silu(gate_TI) * up_TI
    rows = max(1, _SERIAL_ELEMENTS // gate_TI.shape[1])
    return torch.cat([F.silu(gate_bI) for gate_bI in torch.split(gate_TI, rows)]) * up_TI
