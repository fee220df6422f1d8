"""GGUF files become model directories that are right, complete or absent."""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

import rollout.model.gguf
from rollout.cli.model import add_parser
from rollout.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from rollout.model.gguf import import_gguf
from rollout.model.spec import read_spec
from tests.tiny_models import CHAT_TEMPLATE, SPECIAL_TOKENS, make_tiny_llama, make_tiny_tokenizer

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
}


def make_tiny_gguf(
    path: Path,
    weights: Mapping[str, Tensor],
    *,
    fields: Mapping[str, Any] = {},
    extra: Iterable[str] = (),
    drop: str | None = None,
) -> Path:
    """The tiny Llama as llama.cpp's converter writes it; `fields` replace or add metadata, None removes it."""
    tokenizer = json.loads(make_tiny_tokenizer().to_str())
    vocab = tokenizer["model"]["vocab"]
    metadata: dict[str, Any] = {
        "llama.block_count": 2,
        "llama.context_length": 2048,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 128,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.freq_base": 10_000.0,
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": len(vocab),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.__getitem__),
        "tokenizer.ggml.token_type": [3 if token in SPECIAL_TOKENS else 1 for token in vocab],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 3,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    metadata |= fields
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture", "llama"))
    for name, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case str():
                writer.add_string(name, value)
            case list():
                writer.add_array(name, value)
    for name, tensor in weights.items():
        renamed = name
        for theirs, ours in NAMES.items():
            renamed = renamed.replace(theirs, ours)
        if renamed != drop:
            writer.add_tensor(renamed, _interleaved(name, tensor).numpy())
    for name in extra:
        writer.add_tensor(name, np.zeros(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleaved(name: str, tensor: Tensor) -> Tensor:
    """llama.cpp turns neighbouring channels of q and k, not the halves of a head."""
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape).contiguous()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    path = make_tiny_llama(tmp_path_factory.mktemp("llama"), tie_word_embeddings=False)
    return load_file(path / "model.safetensors")


@pytest.fixture
def source(tmp_path: Path, weights: dict[str, Tensor]) -> Path:
    return make_tiny_gguf(tmp_path / "tiny.gguf", weights)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_tokenizer_survive_the_way_through_gguf(
    tmp_path: Path, weights: dict[str, Tensor], tied: bool
) -> None:
    kept = {name: tensor for name, tensor in weights.items() if not (tied and name == "lm_head.weight")}
    spec = import_gguf(make_tiny_gguf(tmp_path / "tiny.gguf", kept), tmp_path / "out")
    assert spec == read_spec(tmp_path / "out")
    assert (spec.tied_embeddings, spec.heads, spec.kv_heads, spec.head_dim) == (tied, 4, 2, 16)
    imported = load_file(tmp_path / "out" / "model.safetensors")
    assert imported.keys() == kept.keys()
    for name, tensor in kept.items():
        assert torch.equal(imported[name], tensor.to(torch.bfloat16)), name
    text = "the<|im_end|> Ünï 12\n\n345   6 and <|im_start|>"
    ours, theirs = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")), make_tiny_tokenizer()
    assert ours.encode(text).ids == theirs.encode(text).ids
    assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def test_smollm2_becomes_a_complete_directory(smollm2_path: Path) -> None:
    assert {file.name for file in smollm2_path.iterdir()} == FILES
    assert {file.stat().st_mode for file in smollm2_path.iterdir()} == {(smollm2_path / "config.json").stat().st_mode}
    assert "quantization_config" not in json.loads((smollm2_path / "config.json").read_text())
    assert {tensor.dtype for tensor in load_file(smollm2_path / "model.safetensors").values()} == {torch.bfloat16}
    spec = read_spec(smollm2_path)
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim, spec.tied_embeddings) == (30, 9, 3, 64, True)
    assert [path.name for path in smollm2_path.parent.iterdir()] == [smollm2_path.name]


def test_smollm2_stops_at_the_end_of_a_chat_turn(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_path / "tokenizer.json"))
    assert read_spec(smollm2_path).eos_token_ids == (tokenizer.token_to_id("<|im_end|>"),) == (2,)
    config = json.loads((smollm2_path / "tokenizer_config.json").read_text())
    assert "<|im_start|>assistant" in config["chat_template"]
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def test_smollm2_tokenizer_keeps_special_tokens_and_splits_digits_first(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_path / "tokenizer.json"))
    encoded = tokenizer.encode("<|im_start|>user\n\n12 +   3<|im_end|>")
    assert encoded.tokens == ["<|im_start|>", "user", "ĊĊ", "1", "2", "Ġ+", "ĠĠĠ", "3", "<|im_end|>"]
    assert tokenizer.decode(encoded.ids) == "user\n\n12 +   3"


def test_the_end_of_a_turn_ends_a_sequence_too(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    fields = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 2}
    spec = import_gguf(make_tiny_gguf(tmp_path / "tiny.gguf", weights, fields=fields), tmp_path / "out")
    assert spec.eos_token_ids == (0, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fields": {"general.architecture": "qwen2"}}, "general.architecture: got 'qwen2', allowed: llama"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type: got 'yarn'"),
        ({"fields": {"llama.rope.scaling.factor": 4.0}}, "llama.rope.scaling.factor: got 4.0"),
        ({"fields": {"tokenizer.ggml.pre": "tekken"}}, "tokenizer.ggml.pre: got 'tekken', allowed: one of gpt-2"),
        ({"fields": {"tokenizer.ggml.pre": None}}, "tokenizer.ggml.pre: got None"),
        ({"fields": {"tokenizer.ggml.model": "bert"}}, "tokenizer.ggml.model: got 'bert', allowed: gpt2 or llama"),
        ({"extra": ["rope_freqs.weight"]}, "tensors: got 'rope_freqs.weight'"),
        ({"extra": ["blk.0.attn_q.bias"]}, "tensors: got 'blk.0.attn_q.bias'"),
        ({"drop": "blk.1.ffn_up.weight"}, "1 tensors are missing, such as blk.1.ffn_up.weight"),
    ],
)
def test_what_would_come_out_wrong_is_refused_by_name(
    tmp_path: Path, weights: dict[str, Tensor], changes: dict[str, Any], message: str
) -> None:
    source = make_tiny_gguf(tmp_path / "tiny.gguf", weights, **changes)
    with pytest.raises(UnsupportedModelError) as caught:
        import_gguf(source, tmp_path / "out")
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"absent\.gguf: no such file"):
        import_gguf(tmp_path / "absent.gguf", tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04", b"{}"])
def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(UnsupportedModelError, match="got a file that begins with"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "out")


@pytest.mark.parametrize("keep", [4, 7, 20, 100, 3000, -1000])
def test_a_truncated_file_is_refused(tmp_path: Path, source: Path, keep: int) -> None:
    source.write_bytes(source.read_bytes()[:keep])
    with pytest.raises(UnsupportedModelError, match=r"tiny\.gguf: a damaged GGUF file"):
        import_gguf(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("package", ["gguf", "transformers", "accelerate"])
def test_a_missing_package_is_named(
    tmp_path: Path, source: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs {package}: pip install 'rollout\[gguf\]'"):
        import_gguf(source, tmp_path / "out")


def test_an_interrupted_import_leaves_nothing(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rollout.model.gguf, "_write_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        import_gguf(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


def test_an_empty_directory_is_filled(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out").mkdir()
    import_gguf(source, tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == FILES


def test_missing_parents_are_made(tmp_path: Path, source: Path) -> None:
    import_gguf(source, tmp_path / "a" / "b" / "out")
    assert read_spec(tmp_path / "a" / "b" / "out").layers == 2


def test_a_directory_that_cannot_be_written_is_a_typed_error(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="out: cannot be written"):
        import_gguf(source, tmp_path / "file" / "out")


def test_an_existing_model_is_kept_only_if_asked(tmp_path: Path) -> None:
    out = make_tiny_llama(tmp_path / "out")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    with pytest.raises(ConfigError, match="out: already holds a model"):
        import_gguf(tmp_path / "absent.gguf", out)
    assert import_gguf(tmp_path / "absent.gguf", out, exist_ok=True) == read_spec(out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


@pytest.mark.parametrize("exist_ok", [True, False])
def test_a_directory_of_something_else_is_never_touched(tmp_path: Path, source: Path, exist_ok: bool) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="out: exists, but holds no readable model"):
        import_gguf(source, tmp_path / "out", exist_ok=exist_ok)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_the_command_imports_and_says_what(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["model", "import", "--gguf", str(source), "--out", str(tmp_path / "out")])
    assert args.func(args) == 0
    assert f"{tmp_path / 'out'}: LlamaForCausalLM, 2 layers, 320 tokens" in capsys.readouterr().out
    with pytest.raises(ConfigError):
        args.func(args)
    args = parser.parse_args(["model", "import", "--gguf", str(source), "--out", str(tmp_path / "out"), "--exist-ok"])
    assert args.func(args) == 0
