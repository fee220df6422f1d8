"""Weights reach the decoder complete, in place, and one tensor at a time, and come back out of it bit for bit; or an
error names what is wrong.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollout.errors import ModelNotFoundError, UnsupportedModelError
from rollout.model.decoder import Decoder, TorchDecoder
from rollout.model.spec import read_spec
from rollout.model.weights import (
    Described,
    check_weights,
    load_directory,
    load_weights,
    stream_safetensors,
    stream_weights,
    write_weights,
)
from tests.model.paged import UNEVEN, DenseAttention, PagedDecoder, native_decoder, torch_decoder
from tests.tiny_models import make_tiny_llama, make_tiny_qwen2

CPU = torch.device("cpu")
IDS = list(range(10, 40))
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


Load = Callable[[Path, torch.dtype], Decoder]
both = pytest.mark.parametrize("load", [torch_decoder, native_decoder], ids=["torch", "native"])
sizes = pytest.mark.parametrize("overrides", [{}, UNEVEN], ids=["even", "uneven"])


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "llama")


def _logits(decoder: Decoder) -> Tensor:
    return PagedDecoder(decoder).prefill([IDS])[0]


def describe(named_tensors: Iterable[tuple[str, Tensor]]) -> list[Described]:
    return [(name, tuple(tensor.shape), str(tensor.dtype)[len("torch.") :]) for name, tensor in named_tensors]


def _change(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Let `change` edit the tensors of a single-file model."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_qwen2])
@pytest.mark.parametrize("tied", [True, False])
def test_shards_load_like_a_single_file(make: Callable[..., Path], tied: bool, tmp_path: Path) -> None:
    single = make(tmp_path / "single", tie_word_embeddings=tied)
    sharded = make(tmp_path / "sharded", tie_word_embeddings=tied, max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert dict(stream_safetensors(sharded)).keys() == dict(stream_safetensors(single)).keys()
    assert torch.equal(_logits(torch_decoder(sharded)), _logits(torch_decoder(single)))


@both
@sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_qwen2])
def test_every_weight_is_where_its_name_says(
    make: Callable[..., Path], load: Load, overrides: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    path = make(tmp_path, tie_word_embeddings=False, **overrides)
    decoder = load(path, dtype)
    saved = load_file(path / "model.safetensors")
    held = dict(stream_weights(decoder))
    assert held.keys() == saved.keys()
    for name, tensor in held.items():
        assert tensor.dtype is dtype
        assert torch.equal(tensor, saved[name].to(dtype)), name
    before = _logits(decoder)
    for tensor in held.values():
        tensor.zero_()
    assert torch.equal(_logits(decoder), before)


@both
@sizes
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_qwen2])
def test_what_is_read_from_one_decoder_makes_another_equal(
    make: Callable[..., Path], tied: bool, overrides: dict[str, Any], load: Load, tmp_path: Path
) -> None:
    first, other = (make(tmp_path / str(s), seed=s, tie_word_embeddings=tied, **overrides) for s in (0, 1))
    source = load(first, torch.bfloat16)
    for load_other in (torch_decoder, native_decoder):
        decoder = load_other(other, torch.bfloat16)
        load_weights(decoder, stream_weights(source))
        assert torch.equal(_logits(decoder), _logits(load_other(first, torch.bfloat16)))


def test_tied_embeddings_are_one_tensor(llama: Path, tmp_path: Path) -> None:
    tied, untied = torch_decoder(llama), torch_decoder(make_tiny_llama(tmp_path / "untied", tie_word_embeddings=False))
    assert tied.head_VE is tied.embedding_VE
    assert not torch.equal(untied.head_VE, untied.embedding_VE)


def test_two_copies_of_a_tied_embedding_that_differ_are_found(llama: Path) -> None:
    decoder = native_decoder(llama)
    decoder._head._weight_Pscw[3, 5, 7] += 1
    with pytest.raises(AssertionError, match="other rows than their copy"):
        dict(stream_weights(decoder))


def _addresses(decoder: Decoder) -> list[int]:
    return [storage.data_ptr() for storage in decoder._memory._storages]


@both
@sizes
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_qwen2])
def test_new_weights_replace_the_old_in_place(
    make: Callable[..., Path], tied: bool, overrides: dict[str, Any], load: Load, tmp_path: Path
) -> None:
    first, other = (make(tmp_path / str(s), seed=s, tie_word_embeddings=tied, **overrides) for s in (0, 1))
    decoder = load(first, torch.float32)
    addresses = _addresses(decoder)
    before = _logits(decoder)
    load_weights(decoder, stream_safetensors(other))
    assert _addresses(decoder) == addresses
    assert torch.equal(_logits(decoder), _logits(load(other, torch.float32)))
    assert not torch.equal(_logits(decoder), before)
    theirs = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(_logits(decoder), expected, atol=1e-4, rtol=0)


@both
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_tensors_of_another_dtype_are_rounded_as_torch_rounds(
    load: Load, given: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    first, other = (make_tiny_qwen2(tmp_path / str(s), seed=s, tie_word_embeddings=tied, **UNEVEN) for s in (0, 1))
    decoder = load(first, torch.bfloat16)
    tensors = {name: tensor.to(given) for name, tensor in stream_safetensors(other)}
    load_weights(decoder, tensors.items())
    held = dict(stream_weights(decoder))
    assert all(torch.equal(held[name], tensor.to(torch.bfloat16)) for name, tensor in tensors.items())


@both
def test_a_part_of_the_weights_replaces_that_part(load: Load, tmp_path: Path) -> None:
    first, other = (make_tiny_llama(tmp_path / str(s), seed=s) for s in (0, 1))
    old, new = (dict(stream_safetensors(path)) for path in (first, other))
    names = [name for name in new if "layers.1.mlp" in name or "embed" in name]
    decoder = load(first, torch.float32)
    write_weights(decoder, [(name, new[name]) for name in names])
    mixed = load(first, torch.float32)
    load_weights(mixed, (old | {name: new[name] for name in names}).items())
    assert torch.equal(_logits(decoder), _logits(mixed))
    assert not torch.equal(_logits(decoder), _logits(load(first, torch.float32)))


@both
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_what_is_loaded_is_only_read(load: Load, given: torch.dtype, llama: Path) -> None:
    tensors = {name: tensor.to(given) for name, tensor in stream_safetensors(llama)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    decoder = load(llama, torch.bfloat16)
    load_weights(decoder, tensors.items())
    _logits(decoder)
    for tensor in dict(stream_weights(decoder)).values():
        tensor.fill_(7)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("inference", [True, False])
def test_weights_loaded_in_inference_mode_can_be_replaced_outside(llama: Path, inference: bool) -> None:
    with torch.inference_mode(inference):
        decoder = torch_decoder(llama)
    load_weights(decoder, stream_safetensors(llama))


def test_one_tensor_is_held_at_a_time(llama: Path) -> None:
    decoder, last = torch_decoder(llama), list[weakref.ref[Tensor]]()

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, target in decoder.targets().items():
            assert not last or last.pop()() is None, f"the tensor before {name} is still held"
            tensor = torch.zeros(target.shape)
            last.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    load_weights(decoder, watched())
    assert last


def test_what_a_decoder_has_no_use_for_is_skipped(llama: Path) -> None:
    expected = _logits(torch_decoder(llama))

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = torch.zeros(320, 64)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    _change(llama, add)
    assert torch.equal(_logits(torch_decoder(llama)), expected)


MISFITS: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
    (lambda tensors: tensors.pop(O_PROJ), f"1 missing: {O_PROJ}"),
    (lambda tensors: tensors.update(surplus=torch.zeros(1)), "1 unexpected: surplus"),
    (
        lambda tensors: tensors.update({O_PROJ: torch.zeros(64, 32)}),
        f"1 of another shape or dtype: {O_PROJ} ((64, 32) float32 instead of (64, 64))",
    ),
    (
        lambda tensors: tensors.update({O_PROJ: torch.zeros(64, 64, dtype=torch.int8)}),
        f"1 of another shape or dtype: {O_PROJ} ((64, 64) int8 instead of (64, 64))",
    ),
    (lambda tensors: [tensors.pop(n) for n in list(tensors) if "layers.0" in n], "9 missing: model.layers.0"),
    (lambda tensors: tensors.clear() or tensors.update(x=torch.zeros(1)), "and 16 more; 1 unexpected: x"),
]


@pytest.mark.parametrize(("change", "message"), MISFITS)
def test_weights_that_do_not_fit_are_named(
    llama: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    decoder = native_decoder(llama)
    before = _logits(decoder)
    _change(llama, change)
    with pytest.raises(UnsupportedModelError) as caught:
        torch_decoder(llama)
    assert message in str(caught.value)
    assert str(llama) in str(caught.value)
    with pytest.raises(UnsupportedModelError) as refused:
        check_weights(decoder, describe(stream_safetensors(llama)))
    assert str(caught.value) == f"{llama}: {refused.value}"
    assert torch.equal(_logits(decoder), before)


@both
def test_weights_that_fit_pass_the_check(load: Load, tmp_path: Path) -> None:
    path = make_tiny_qwen2(tmp_path)
    decoder = load(path, torch.bfloat16)
    check_weights(decoder, describe(stream_safetensors(path)))
    decoder.release()
    check_weights(decoder, describe(stream_safetensors(path)))


def test_a_part_of_the_weights_may_lack_the_rest_and_nothing_else(llama: Path) -> None:
    decoder, described = native_decoder(llama), describe(stream_safetensors(llama))
    check_weights(decoder, described[3:5], partial=True)
    check_weights(decoder, [], partial=True)
    with pytest.raises(UnsupportedModelError, match=f"{len(described) - 2} missing"):
        check_weights(decoder, described[3:5])
    for wrong, message in (
        (("surplus", (64, 64), "float32"), "1 unexpected: surplus"),
        ((O_PROJ, (64, 32), "float32"), "1 of another shape or dtype: "),
        ((O_PROJ, (64, 64), "int64"), "1 of another shape or dtype: "),
    ):
        with pytest.raises(UnsupportedModelError, match=message) as caught:
            check_weights(decoder, [described[0], wrong], partial=True)
        assert "missing" not in str(caught.value)


@pytest.mark.parametrize("partial", [True, False])
def test_a_tensor_that_is_given_twice_is_refused(llama: Path, partial: bool) -> None:
    decoder, tensors = native_decoder(llama), list(stream_safetensors(llama))
    twice = [*tensors, (O_PROJ, torch.zeros(64, 64))]
    with pytest.raises(UnsupportedModelError, match=f"1 given twice: {O_PROJ}"):
        check_weights(decoder, describe(twice), partial=partial)
    with pytest.raises(UnsupportedModelError, match=f"1 given twice: {O_PROJ}"):
        (write_weights if partial else load_weights)(decoder, twice)


def test_a_qwen2_bias_in_a_llama_is_unexpected(llama: Path) -> None:
    _change(llama, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(UnsupportedModelError, match=r"1 unexpected: model\.layers\.0\.self_attn\.q_proj\.bias"):
        torch_decoder(llama)


@pytest.mark.parametrize("keep", [0, 7, 100, 5000])
def test_a_damaged_file_is_a_typed_error(llama: Path, keep: int) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UnsupportedModelError, match=r"model\.safetensors: not a safetensors file"):
        torch_decoder(llama)


def test_a_shard_that_vanished_is_named(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path, max_shard_size="100KB")
    spec, shards = read_spec(path), sorted(path.glob("model-*.safetensors"))
    shards[-1].unlink()
    with pytest.raises(ModelNotFoundError, match=shards[-1].name):
        load_directory(TorchDecoder(spec, DenseAttention(), dtype=torch.float32, device=CPU), path)
