"""A model of random weights: by default with a lot of KV and next to no computation, for where only KV is moved.

A token then has 92,160 bytes of KV, so that a page of 4 tokens is as large as one of 16 tokens of SmolLM2-135M
(360 KiB): the same pages are moved, and a quarter of the tokens is prefilled.
"""

import json
from pathlib import Path

import torch
from pydantic import PositiveInt
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from rollout.config import Section

VOCAB_SIZE = 256
CONTEXT_TOKENS = 1 << 16


class StandIn(Section):
    layers: PositiveInt = 30
    """Decoder layers."""
    kv_heads: PositiveInt = 12
    """Heads of keys and values, and of queries."""
    head_dim: PositiveInt = 64
    """Elements of a head."""
    page_tokens: PositiveInt = 4
    """Tokens in a page."""
    hidden: PositiveInt = 64
    """Elements of a hidden state."""
    intermediate: PositiveInt = 16
    """Elements within an MLP."""

    @property
    def token_bytes(self) -> int:
        """KV of one token in bfloat16."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2

    def write(self, path: Path) -> Path:
        """Make the Hugging Face directory `path`."""
        path.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.kv_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": CONTEXT_TOKENS,
            "tie_word_embeddings": True,
        }
        (path / "config.json").write_text(json.dumps(config))
        save_file(self._weights(), path / "model.safetensors")
        words = {f"w{index}": index for index in range(VOCAB_SIZE)}
        Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(path / "tokenizer.json"))
        return path

    def _weights(self) -> dict[str, torch.Tensor]:
        width = self.kv_heads * self.head_dim
        shapes = {"model.embed_tokens": (VOCAB_SIZE, self.hidden), "model.norm": (self.hidden,)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            shapes |= {f"{prefix}.self_attn.{name}_proj": (width, self.hidden) for name in "qkv"}
            shapes |= {f"{prefix}.mlp.{name}_proj": (self.intermediate, self.hidden) for name in ("gate", "up")}
            shapes |= {f"{prefix}.{name}_layernorm": (self.hidden,) for name in ("input", "post_attention")}
            shapes |= {
                f"{prefix}.self_attn.o_proj": (self.hidden, width),
                f"{prefix}.mlp.down_proj": (self.hidden, self.intermediate),
            }
        generator = torch.Generator().manual_seed(0)
        return {
            f"{name}.weight": torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) == 1
            else (0.1 * torch.randn(shape, generator=generator)).to(torch.bfloat16)
            for name, shape in shapes.items()
        }
