"""A GGUF file made into a Hugging Face directory in bf16, through transformers' GGUF loader.

Only Llama files, and only those that the loader gets right: it drops tensors it does not know, invents those it
misses, and does not know every tokenizer. So metadata and tensor names are checked first and what would come
out wrong is refused by name. The directory appears complete or not at all.
"""

import importlib
import json
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rollout.errors import ConfigError, ModelNotFoundError, RolloutError, UnsupportedModelError
from rollout.model.spec import WEIGHTS_FILE, ModelSpec, read_spec

_MAGIC: Final = b"GGUF"
_SPLITS_DIGITS: Final = "smollm"
"""llama.cpp's name for byte-level BPE behind a split into single digits, which transformers takes for GPT-2's."""
_PRE_TOKENIZERS: Final = ("gpt-2", "llama-bpe", _SPLITS_DIGITS)
_TOP_TENSORS: Final = ("token_embd", "output_norm")
_BLOCK_TENSORS: Final = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """What a GGUF file says about itself."""

    fields: Mapping[str, Any]
    tensors: frozenset[str]


def import_gguf(source: Path, out: Path, *, exist_ok: bool = False) -> ModelSpec:
    """Write `source` to the directory `out` as bf16 safetensors with configuration and tokenizer.

    `out` must not exist, or be empty; with `exist_ok` a readable model already there is left as it is. Raises
    `ModelNotFoundError` for a missing file, `UnsupportedModelError` for one that is not a Llama GGUF, and
    `ConfigError` for an occupied `out` or a missing package.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        return _existing(out, exist_ok=exist_ok)
    if not source.is_file():
        raise ModelNotFoundError(f"{source}: no such file; expected a GGUF file")
    with source.open("rb") as file:
        magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        raise UnsupportedModelError(f"{source}: got a file that begins with {magic!r}, allowed: GGUF ({_MAGIC!r})")
    for package in ("gguf", "transformers", "accelerate"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(f"importing a GGUF file needs {package}: pip install 'rollout[gguf]' ({error})") from None
    header = _read_header(source)
    _refuse_unimplemented(source, header)
    partial = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}"
    try:
        partial.mkdir(parents=True)
        _write_model(source, header, partial)
        _write_tokenizer(source, header, partial)
        spec = read_spec(partial)
        partial.replace(out)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return spec


def _existing(out: Path, *, exist_ok: bool) -> ModelSpec:
    try:
        spec = read_spec(out)
    except RolloutError as error:
        raise ConfigError(f"{out}: exists, but holds no readable model ({error}); remove it or name another") from None
    if not exist_ok:
        raise ConfigError(f"{out}: already holds a model; remove it, name another, or pass --exist-ok to keep it")
    return spec


def _read_header(source: Path) -> _Header:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UnsupportedModelError(f"{source}: a damaged GGUF file, or of an unknown version: {error}") from None
    return _Header(fields=fields, tensors=frozenset(tensor.name for tensor in reader.tensors))


def _refuse_unimplemented(source: Path, header: _Header) -> None:
    def refuse(what: str, got: object, allowed: str) -> None:
        raise UnsupportedModelError(f"{source}: {what}: got {got!r:.200}, allowed: {allowed}")

    fields = header.fields
    if (architecture := fields.get("general.architecture")) != "llama":
        refuse("general.architecture", architecture, "llama")
    for name in fields:
        if name.startswith("llama.rope.scaling.") and fields[name] not in ("none", 1.0):
            refuse(name, fields[name], "no rope scaling")
    match fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"):
        case "gpt2", pre:
            if pre not in _PRE_TOKENIZERS:
                refuse("tokenizer.ggml.pre", pre, f"one of {', '.join(_PRE_TOKENIZERS)}")
        case "llama", _:
            pass
        case kind, _:
            refuse("tokenizer.ggml.model", kind, "gpt2 or llama")
    blocks = range(int(fields.get("llama.block_count", 0)))
    needed = {f"{name}.weight" for name in _TOP_TENSORS}
    needed |= {f"blk.{block}.{name}.weight" for block in blocks for name in _BLOCK_TENSORS}
    if missing := sorted(needed - header.tensors):
        raise UnsupportedModelError(f"{source}: {len(missing)} tensors are missing, such as {missing[0]}")
    if extra := sorted(header.tensors - needed - {"output.weight"}):
        refuse("tensors", extra[0], f"{', '.join((*_TOP_TENSORS, 'output', *_BLOCK_TENSORS))}, their weights only")


def _write_model(source: Path, header: _Header, out: Path) -> None:
    import torch
    import transformers
    from safetensors.torch import save_file

    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):  # Where it exists, weights stay quantised unless it says otherwise.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.LlamaForCausalLM.from_pretrained(source.parent, gguf_file=source.name, **options)
    tied = "output.weight" not in header.tensors
    config = {name: value for name, value in model.config.to_diff_dict().items() if not name.startswith("_")}
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "tie_word_embeddings": tied}
    state = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", _token_ids(header.fields))
    save_file(state, out / WEIGHTS_FILE, metadata={"format": "pt"})
    # safetensors makes its file readable by the owner only.
    (out / WEIGHTS_FILE).chmod((out / "config.json").stat().st_mode)


def _token_ids(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The end of a chat turn ends a sequence like the end of a text does."""
    ends = {fields.get(f"tokenizer.ggml.{name}_token_id"): None for name in ("eos", "eot")}
    names = {"bos_token_id": "bos", "pad_token_id": "padding"}
    ids = {name: fields.get(f"tokenizer.ggml.{field}_token_id") for name, field in names.items()}
    ids["eos_token_id"] = [end for end in ends if end is not None]
    return {name: value for name, value in ids.items() if value is not None}


def _write_tokenizer(source: Path, header: _Header, out: Path) -> None:
    import tokenizers.pre_tokenizers
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    backend = tokenizer.backend_tokenizer
    if header.fields.get("tokenizer.ggml.pre") == _SPLITS_DIGITS:
        digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
        byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, byte_level])
    backend.save(str(out / "tokenizer.json"))
    special = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template, **special}
    _write_json(out / "tokenizer_config.json", {name: value for name, value in config.items() if value is not None})


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
