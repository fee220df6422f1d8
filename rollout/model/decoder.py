"""The decoder of the Llama and Qwen2 families: token ids in, hidden states and logits out.

It owns the weights and the rope table, and nothing about sequences: the batch says where keys and values go,
the attention implementation puts them there. Call it under `torch.inference_mode()`.

Shape letters: T tokens, R rows to predict from, E hidden, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.attention.interface import Attention, DecodeBatch, PrefillBatch
from rollout.model.layers import Layer, RMSNorm
from rollout.model.rope import RopeTable
from rollout.model.spec import ModelSpec


class Decoder:
    """Holds uninitialised weights until `weights.load_weights` has filled them."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.embedding_VE = torch.empty((spec.vocab_size, spec.hidden), dtype=dtype, device=device)
        self.layers = [Layer(spec, dtype=dtype, device=device) for _ in range(spec.layers)]
        self.norm = RMSNorm(spec, dtype=dtype, device=device)
        self.head_VE = self.embedding_VE if spec.tied_embeddings else torch.empty_like(self.embedding_VE)
        self._rope = RopeTable(
            spec.rope, head_dim=spec.head_dim, positions=spec.max_context_tokens, dtype=dtype, device=device
        )

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        pages: Tensor,
        attention: Attention,
        batch: PrefillBatch | DecodeBatch,
    ) -> Tensor:
        """Hidden states after the final norm, [T, E].

        `ids_T` and `positions_T` are int64; padding rows hold any valid id and position. `pages` is
        `[pages, layers, 2, page_tokens, kv_heads, head_dim]` in the decoder's dtype.
        """
        x_TE = F.embedding(ids_T, self.embedding_VE)
        rope = self._rope.at(positions_T)
        for index, layer in enumerate(self.layers):
            x_TE = layer.forward(x_TE, rope, pages[:, index, 0], pages[:, index, 1], attention, batch)
        return self.norm(x_TE)

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Next-token logits, fp32 [R, V]; multiplied in the model's dtype and then cast."""
        return F.linear(hidden_RE, self.head_VE).float()
