"""The decoder of the Llama and Qwen2 families: token ids in, hidden states and logits out.

It owns the weights and the rope table, and nothing about sequences: the batch says where keys and values go.
Call it under `torch.inference_mode()`.

Shape letters: T tokens, R rows to predict from, E hidden, V vocabulary.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.attention.interface import Attention, DecodeBatch, PrefillBatch
from rollout.model.layers import Layer, RMSNorm
from rollout.model.rope import RopeTable
from rollout.model.spec import ModelSpec
from rollout.model.weights import Target, whole


class Decoder(Protocol):
    """Holds uninitialised weights until `weights.load_weights` has filled them."""

    spec: ModelSpec
    dtype: torch.dtype
    name: str
    """Of its kernels; goes into the KV fingerprint."""
    build: str
    """What else the bits of a row depend on: the machine, and what was compiled for it."""
    batch_invariant: bool
    """Whether the bits of a row depend on its own sequence only, whatever the batch and the chunks."""

    def targets(self) -> Mapping[str, Target]:
        """Where each tensor goes, under its Hugging Face name."""
        ...

    def forward(self, ids_T: Tensor, positions_T: Tensor, pages: Tensor, batch: PrefillBatch | DecodeBatch) -> Tensor:
        """Hidden states after the final norm, [T, E].

        `ids_T` and `positions_T` are int64; padding rows hold any valid id and position. `pages` is
        `[pages, layers, 2, page_tokens, kv_heads, head_dim]` in the decoder's dtype.
        """
        ...

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Next-token logits, [R, V], rounded to the decoder's dtype; the caller may write to them."""
        ...

    def close(self) -> None: ...


class TorchDecoder:
    """In plain torch, on any device, with any attention; on the CPU the oracle of the fast one."""

    batch_invariant = False

    def __init__(self, spec: ModelSpec, attention: Attention, *, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.name = attention.name
        on_cuda = device.type == "cuda"
        machine = torch.cuda.get_device_name() if on_cuda else torch.backends.cpu.get_cpu_capability()
        self.build = f"torch {torch.__version__}, {machine}"
        self.embedding_VE = torch.empty((spec.vocab_size, spec.hidden), dtype=dtype, device=device)
        self.layers = [Layer(spec, attention, dtype=dtype, device=device) for _ in range(spec.layers)]
        self.norm = RMSNorm(spec, dtype=dtype, device=device)
        self.head_VE = self.embedding_VE if spec.tied_embeddings else torch.empty_like(self.embedding_VE)
        self._rope = RopeTable(
            spec.rope, head_dim=spec.head_dim, positions=spec.max_context_tokens, dtype=dtype, device=device
        )

    def targets(self) -> Mapping[str, Target]:
        targets = {
            "model.embed_tokens.weight": whole(self.embedding_VE),
            "model.norm.weight": whole(self.norm.weight_E),
        }
        if not self.spec.tied_embeddings:
            targets["lm_head.weight"] = whole(self.head_VE)
        for index, layer in enumerate(self.layers):
            targets |= {f"model.layers.{index}.{name}": target for name, target in layer.targets().items()}
        return targets

    def forward(self, ids_T: Tensor, positions_T: Tensor, pages: Tensor, batch: PrefillBatch | DecodeBatch) -> Tensor:
        x_TE = F.embedding(ids_T, self.embedding_VE)
        rope = self._rope.at(positions_T)
        for index, layer in enumerate(self.layers):
            x_TE = layer.forward(x_TE, rope, pages[:, index, 0], pages[:, index, 1], batch)
        return self.norm(x_TE)

    def logits(self, hidden_RE: Tensor) -> Tensor:
        return F.linear(hidden_RE, self.head_VE)

    def close(self) -> None:
        """Nothing to do."""
