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
from rollout.memory import TensorMemory
from rollout.model.layers import Layer, RMSNorm
from rollout.model.rope import RopeTable
from rollout.model.spec import ModelSpec
from rollout.model.weights import Target, Whole


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

    def release(self) -> int:
        """Give the memory of all weights back to the system; how many bytes. Nothing runs until they are loaded again.

        Does nothing if that is done.
        """
        ...

    def reclaim(self) -> None:
        """Take memory for the weights, which are uninitialised again. Does nothing if it was not released."""
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
        self._targets = self._find_targets()
        layers = (tensor for layer in self.layers for tensor in layer.memory())
        self._memory = TensorMemory([self.embedding_VE, self.head_VE, self.norm.weight_E, *layers])

    def targets(self) -> Mapping[str, Target]:
        return self._targets

    def forward(self, ids_T: Tensor, positions_T: Tensor, pages: Tensor, batch: PrefillBatch | DecodeBatch) -> Tensor:
        assert not self._memory.released, "the weights were released"
        x_TE = F.embedding(ids_T, self.embedding_VE)
        rope = self._rope.at(positions_T)
        for index, layer in enumerate(self.layers):
            x_TE = layer.forward(x_TE, rope, pages[:, index, 0], pages[:, index, 1], batch)
        return self.norm(x_TE)

    def logits(self, hidden_RE: Tensor) -> Tensor:
        assert not self._memory.released, "the weights were released"
        return F.linear(hidden_RE, self.head_VE)

    def release(self) -> int:
        return self._memory.release()

    def reclaim(self) -> None:
        self._memory.reclaim()

    def close(self) -> None:
        """Nothing to do."""

    def _find_targets(self) -> Mapping[str, Target]:
        targets: dict[str, Target] = {
            "model.embed_tokens.weight": Whole(self.embedding_VE),
            "model.norm.weight": Whole(self.norm.weight_E),
        }
        if not self.spec.tied_embeddings:
            targets["lm_head.weight"] = Whole(self.head_VE)
        for index, layer in enumerate(self.layers):
            targets |= {f"model.layers.{index}.{name}": target for name, target in layer.targets().items()}
        return targets
