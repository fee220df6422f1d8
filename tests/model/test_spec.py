"""What `read_spec` makes of a model directory, and what it refuses."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.errors import ModelNotFoundError, UnsupportedModelError
from rollout.model.spec import DefaultRope, Llama3Rope, read_spec
from tests.tiny_models import edit_json, make_tiny_llama, make_tiny_qwen2

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LLAMA3_ROPE = Llama3Rope(theta=1e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=256)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen2(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama whose files a test may change."""
    return _copy(llama, tmp_path / "model")


def _copy(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_shapes_and_settings_are_read(llama: Path, qwen2: Path) -> None:
    spec = read_spec(llama)
    assert (spec.architecture, spec.layers, spec.hidden, spec.intermediate) == ("LlamaForCausalLM", 2, 64, 128)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab_size) == (4, 2, 16, 320)
    assert (spec.rope, spec.norm_eps) == (DefaultRope(theta=10_000.0), 1e-6)
    assert (spec.tied_embeddings, spec.qkv_bias, spec.max_context_tokens) == (True, False, 2048)
    assert spec.eos_token_ids == (2,)
    assert spec.generation_defaults["pad_token_id"] == 3
    assert read_spec(qwen2).qkv_bias


def test_absent_fields_have_the_defaults_of_hugging_face(model: Path) -> None:
    edit_json(model / "config.json", num_key_value_heads=None, head_dim=None, tie_word_embeddings=None)
    edit_json(model / "config.json", rope_parameters=None, hidden_size=128)
    spec = read_spec(model)
    assert (spec.kv_heads, spec.head_dim, spec.tied_embeddings) == (4, 32, False)
    assert spec.rope == DefaultRope(theta=10_000.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e5, **LLAMA3}},
        {"rope_parameters": None, "rope_theta": 1e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": None, "rope_theta": 1e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
    ],
)
def test_both_layouts_of_llama3_rope_are_read(model: Path, fields: dict[str, Any]) -> None:
    edit_json(model / "config.json", **fields)
    assert read_spec(model).rope == LLAMA3_ROPE


@pytest.mark.parametrize(
    "fields", [{"rope_parameters": {"rope_theta": 1e5}}, {"rope_parameters": None, "rope_theta": 100_000}]
)
def test_both_layouts_of_default_rope_are_read(model: Path, fields: dict[str, Any]) -> None:
    edit_json(model / "config.json", **fields)
    assert read_spec(model).rope == DefaultRope(theta=1e5)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(5, 6, (5,)), ([5, 7], 6, (5, 7)), (None, 6, (6,)), (None, [6, 8], (6, 8)), ([], 6, (6,)), (None, None, ())],
)
def test_eos_ids_come_from_the_generation_config_first(
    model: Path, generation: object, config: object, expected: tuple[int, ...]
) -> None:
    edit_json(model / "generation_config.json", eos_token_id=generation)
    edit_json(model / "config.json", eos_token_id=config)
    assert read_spec(model).eos_token_ids == expected


def test_a_generation_config_is_optional(model: Path) -> None:
    (model / "generation_config.json").unlink()
    spec = read_spec(model)
    assert (spec.eos_token_ids, spec.generation_defaults) == ((2,), {})


def test_specs_compare_and_hash_by_value(llama: Path, qwen2: Path) -> None:
    assert {read_spec(llama), read_spec(llama), read_spec(qwen2)} == {read_spec(llama), read_spec(qwen2)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures: got ['MistralForCausalLM'], allowed: one of Llama"),
        ({"architectures": None}, "architectures: got None"),
        ({"architectures": "LlamaForCausalLM"}, "architectures: got 'LlamaForCausalLM'"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type: got 'yarn', allowed: default or l",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type: got 'linear'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: got 'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters: got"),
        ({"rope_parameters": [1]}, "rope_parameters: got [1]"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "low_freq_factor: got None"),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor: got 4.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: got 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor: got 0.25"),
        ({"rope_parameters": {"rope_theta": "large"}}, "rope_theta: got 'large', allowed: a number > 0"),
        ({"attention_bias": True}, "attention_bias: got True, allowed: false"),
        ({"mlp_bias": True}, "mlp_bias: got True, allowed: false"),
        ({"attention_bias": "yes"}, "attention_bias: got 'yes', allowed: true or false"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', allowed: silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: got {'quant_method': 'gptq'}"),
        ({"sliding_window": 4096}, "sliding_window: got 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: got ['full_attention', 'sliding"),
        ({"hidden_size": None}, "hidden_size: got None, allowed: an integer >= 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: got 0"),
        ({"vocab_size": 320.5}, "vocab_size: got 320.5"),
        ({"num_attention_heads": True}, "num_attention_heads: got True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: got 3, allowed: a divisor of the 4"),
        ({"head_dim": 15}, "head_dim: got 15, allowed: an even number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: got -1"),
        ({"eos_token_id": "<s>"}, "eos_token_id: got '<s>'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(model: Path, fields: dict[str, Any], message: str) -> None:
    (model / "generation_config.json").unlink()
    edit_json(model / "config.json", **fields)
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(model)
    assert message in str(caught.value)
    assert str(model / "config.json") in str(caught.value)


def test_eos_ids_outside_the_vocabulary_are_refused(model: Path) -> None:
    edit_json(model / "generation_config.json", eos_token_id=[2, 320])
    with pytest.raises(UnsupportedModelError, match=r"generation_config.json: eos_token_id: got \[2, 320\]"):
        read_spec(model)


def test_a_sliding_window_is_refused_only_where_it_is_used(qwen2: Path, tmp_path: Path) -> None:
    model = _copy(qwen2, tmp_path / "model")
    edit_json(model / "config.json", sliding_window=4096, use_sliding_window=False)
    read_spec(model)
    edit_json(model / "config.json", use_sliding_window=True)
    with pytest.raises(UnsupportedModelError, match="use_sliding_window: got True"):
        read_spec(model)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe{}", b"[]", b"null", b""])
def test_malformed_json_is_a_typed_error(model: Path, name: str, content: bytes) -> None:
    (model / name).write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=name):
        read_spec(model)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="absent: no such directory"):
        read_spec(tmp_path / "absent")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(model: Path, name: str) -> None:
    (model / name).unlink()
    with pytest.raises(ModelNotFoundError, match=f"{name}: no such file"):
        read_spec(model)


def test_missing_weights_are_named(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no weights; expected model\.safetensors"):
        read_spec(model)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_by_name(model: Path, name: str) -> None:
    (model / "model.safetensors").rename(model / name)
    with pytest.raises(UnsupportedModelError, match=f"{name}: pickled weights are refused; convert to safetensors"):
        read_spec(model)


def test_pickled_weights_beside_safetensors_are_left_alone(model: Path) -> None:
    (model / "training_args.bin").write_bytes(b"")
    read_spec(model)


@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_qwen2])
def test_a_missing_shard_is_named(make: Callable[..., Path], tmp_path: Path) -> None:
    model = make(tmp_path, max_shard_size="100KB")
    shards = sorted(model.glob("model-*.safetensors"))
    assert len(shards) > 1
    read_spec(model)
    shards[1].unlink()
    with pytest.raises(ModelNotFoundError, match=f"{shards[1].name}: no such file; model.safetensors.index.json names"):
        read_spec(model)


@pytest.mark.parametrize("weight_map", [None, [], {"model.norm.weight": 1}])
def test_a_malformed_index_is_a_typed_error(model: Path, weight_map: object) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UnsupportedModelError, match=r"index\.json: weight_map: got"):
        read_spec(model)


def test_reading_a_spec_imports_no_torch() -> None:
    code = "import sys, rollout.model.spec, rollout.cli.model; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
