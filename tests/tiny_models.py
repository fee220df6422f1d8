"""Tiny random models as Hugging Face directories, for tests that need real files but no quality.

The weights are larger than an initialiser would make them, biases and norms included, so that logits
are far apart and every parameter matters. The tokenizer is byte-level BPE of exactly 320 tokens: 4
special ones (`<|im_end|>`, id 2, ends a sequence), 256 bytes and 60 merges.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

VOCAB_SIZE = 320
EOS_ID = 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGES = (
    "Ġ t|h e|Ġ a|i n|r e|o n|Ġt he|e r|Ġ s|a t|Ġ w|Ġ o|e n|Ġ c|i t|i s|a n|o r|e s|Ġ b|e d|Ġ f|in g|Ġ p|o u|Ġa n|a l|"
    "a r|Ġt o|Ġ m|Ġo f|Ġ in|Ġ d|Ġ h|Ġan d|i c|a s|l e|Ġt h|i on|o m|l l|en t|Ġ n|Ġ l|s t|Ġ re|v e|Ġ e|r o|l y|Ġb e|"
    "Ġ g|Ġ T|c t|Ġ S|i d|o t|Ġ I|u t"
)


def make_tiny_llama(
    path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB", **overrides: Any
) -> Path:
    """A Llama of two layers in `path`; `overrides` are fields of its config.json."""
    config = LlamaConfig(**_config(overrides))
    return _save(LlamaForCausalLM(config), path, seed=seed, dtype=dtype, max_shard_size=max_shard_size)


def make_tiny_qwen2(
    path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB", **overrides: Any
) -> Path:
    """A Qwen2 (biased q, k and v) of two layers in `path`; `overrides` are fields of its config.json."""
    config = Qwen2Config(**_config(overrides))
    return _save(Qwen2ForCausalLM(config), path, seed=seed, dtype=dtype, max_shard_size=max_shard_size)


def edit_json(file: Path, **changes: Any) -> None:
    """Overwrite fields of a JSON object in a file; None removes a field."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def make_tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE with the 320 tokens described above."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [(left, right) for left, _, right in (pair.partition(" ") for pair in MERGES.split("|"))]
    tokens += [left + right for left, right in merges]
    assert len(set(tokens)) == VOCAB_SIZE, f"{len(set(tokens))} distinct tokens"
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _config(overrides: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "pad_token_id": 3,
    } | overrides


def _save(model: PreTrainedModel, path: Path, *, seed: int, dtype: torch.dtype, max_shard_size: str) -> Path:
    logging.disable_progress_bar()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise + 1 if "norm" in name else noise)
    path.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    make_tiny_tokenizer().save(str(path / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    return path
