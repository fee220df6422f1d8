"""What a model directory says about its model, checked against what the decoder implements.

Fast, and free of torch: the command line validates with it before anything heavy starts. Whatever would be
computed differently from Hugging Face is refused by name; nothing is ignored silently. Both layouts of the rope
settings are read, `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (transformers 4).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from rollout.errors import ModelNotFoundError, UnsupportedModelError

WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM")
_ROPE_TYPES = ("default", "llama3")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultRope:
    """Su et al., 2021: frequency i is theta ** (-2i / head_dim)."""

    theta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, those between interpolated."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int
    """Context length before the scaling."""


Rope = DefaultRope | Llama3Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shapes and settings of one model."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope: Rope
    qkv_bias: bool
    tied_embeddings: bool
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    """Any of them ends a sequence; empty if the model names none."""
    generation_defaults: Mapping[str, Any] = field(hash=False)
    """generation_config.json as it is; empty if there is none."""


def read_spec(path: Path) -> ModelSpec:
    """Read and check a Hugging Face directory; the weights are only looked for, not opened.

    Raises `ModelNotFoundError` for a missing directory or file, `UnsupportedModelError` for contents that are
    malformed or not implemented.
    """
    if not path.is_dir():
        raise ModelNotFoundError(f"{path}: no such directory; expected a Hugging Face model directory")
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ModelNotFoundError(f"{path / name}: no such file; a model directory must have it")
    weight_files(path)
    config = _Fields.read(path / "config.json")
    generation_file = path / "generation_config.json"
    generation = _Fields.read(generation_file) if generation_file.is_file() else None
    return _spec(config, generation)


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of a model directory, each of them present."""
    if (path / WEIGHTS_FILE).is_file():
        return (path / WEIGHTS_FILE,)
    if (path / INDEX_FILE).is_file():
        index = _Fields.read(path / INDEX_FILE)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            index.refuse("weight_map", weight_map, "an object from parameter names to file names")
        shards = tuple(path / name for name in sorted(set(weight_map.values())))
        for shard in shards:
            if not shard.is_file():
                raise ModelNotFoundError(f"{shard}: no such file; {INDEX_FILE} names this shard")
        return shards
    for file in sorted(path.iterdir()):
        if file.suffix in _PICKLED:
            raise UnsupportedModelError(f"{file}: pickled weights are refused; convert to safetensors")
    raise ModelNotFoundError(f"{path}: no weights; expected {WEIGHTS_FILE}, or {INDEX_FILE} with its shards")


@dataclass(frozen=True, slots=True)
class _Fields:
    """A JSON object of a file, whose complaints name the file, the field, what it holds and what is allowed."""

    file: Path
    values: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path) -> "_Fields":
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UnsupportedModelError(f"{file}: not valid JSON: {error}") from None
        except OSError as error:
            raise ModelNotFoundError(f"{file}: cannot be read: {error.strerror}") from None
        if not isinstance(values, dict):
            raise UnsupportedModelError(f"{file}: expected a JSON object, got {type(values).__name__}")
        return cls(file, values)

    def refuse(self, name: str, got: object, allowed: str) -> NoReturn:
        raise UnsupportedModelError(f"{self.file}: {name}: got {got!r:.200}, allowed: {allowed}")

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or the default where the field is absent or null."""
        value = self.values.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(name, value, "an integer >= 1")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            self.refuse(name, value, "a number > 0")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            self.refuse(name, value, "true or false")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        value = self.get(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids):
            self.refuse(name, value, f"token ids below the vocab_size of {vocab_size}")
        return tuple(ids)


def _spec(config: _Fields, generation: _Fields | None) -> ModelSpec:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in _ARCHITECTURES:
        config.refuse("architectures", architectures, f"one of {', '.join(_ARCHITECTURES)}")
    architecture = architectures[0]
    _refuse_unimplemented(config, architecture)
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads, head_dim = config.size("num_key_value_heads", heads), config.size("head_dim", hidden // heads)
    if heads % kv_heads:
        config.refuse("num_key_value_heads", kv_heads, f"a divisor of the {heads} num_attention_heads")
    if head_dim % 2:
        config.refuse("head_dim", head_dim, "an even number")
    vocab_size = config.size("vocab_size")
    sources = (config,) if generation is None else (generation, config)
    eos_ids = next((ids for source in sources if (ids := source.token_ids("eos_token_id", vocab_size))), ())
    return ModelSpec(
        architecture=architecture,
        layers=config.size("num_hidden_layers"),
        hidden=hidden,
        intermediate=config.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        norm_eps=config.positive("rms_norm_eps", 1e-6),
        rope=_rope(config),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        tied_embeddings=config.flag("tie_word_embeddings"),
        max_context_tokens=config.size("max_position_embeddings"),
        eos_token_ids=eos_ids,
        generation_defaults={} if generation is None else generation.values,
    )


def _refuse_unimplemented(config: _Fields, architecture: str) -> None:
    if (quantization := config.get("quantization_config")) is not None:
        config.refuse("quantization_config", quantization, "none (bfloat16, float16 or float32 weights)")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        config.refuse("hidden_act", activation, "silu")
    if architecture == "LlamaForCausalLM":
        for name in ("attention_bias", "mlp_bias"):
            if config.flag(name):
                config.refuse(name, True, "false")
        if (window := config.get("sliding_window")) is not None:
            config.refuse("sliding_window", window, "null")
    if config.flag("use_sliding_window"):
        config.refuse("use_sliding_window", True, "false")
    kinds = config.get("layer_types", [])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        config.refuse("layer_types", kinds, "full_attention for every layer")


def _rope(config: _Fields) -> Rope:
    source = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    values = config.get(source, {})
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        config.refuse(source, values, "one object for all layers")
    settings = _Fields(config.file, values)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in _ROPE_TYPES:
        config.refuse("rope_type", kind, " or ".join(_ROPE_TYPES))
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1))
    if partial != 1:
        config.refuse("partial_rotary_factor", partial, "1")
    theta = settings.positive("rope_theta", config.positive("rope_theta", 10_000.0))
    if kind == "default":
        return DefaultRope(theta=theta)
    low, high = settings.positive("low_freq_factor"), settings.positive("high_freq_factor")
    if low >= high:
        config.refuse("low_freq_factor", low, f"less than the high_freq_factor of {high}")
    return Llama3Rope(
        theta=theta,
        factor=settings.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context_tokens=settings.size(
            "original_max_position_embeddings", config.size("max_position_embeddings")
        ),
    )
