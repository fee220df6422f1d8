"""The memory of released weights is the system's again, and what is reclaimed and loaded runs as before."""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollout.model.decoder import Decoder, TorchDecoder
from rollout.model.native import NativeDecoder
from rollout.model.spec import DefaultRope, ModelSpec
from rollout.model.weights import load_directory, load_weights, stream_weights
from rollout.native.library import Kernels
from tests.model.paged import UNEVEN, DenseAttention, PagedDecoder, native_decoder, torch_decoder
from tests.tiny_models import make_tiny_llama, make_tiny_qwen2

IDS = list(range(10, 40))
LARGE = ModelSpec(
    architecture="LlamaForCausalLM",
    layers=48,
    hidden=384,
    intermediate=640,
    heads=6,
    kv_heads=2,
    head_dim=64,
    vocab_size=32000,
    norm_eps=1e-5,
    rope=DefaultRope(theta=1e4),
    qkv_bias=True,
    tied_embeddings=False,
    max_context_tokens=256,
    eos_token_ids=(),
    generation_defaults={},
)
"""Two large tensors, and hundreds that the C library would keep when they are freed."""

Load = Callable[[Path, torch.dtype], Decoder]
both = pytest.mark.parametrize("load", [torch_decoder, native_decoder], ids=["torch", "native"])


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _random_weights(decoder: Decoder, seed: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for name, target in decoder.targets().items():
        yield name, torch.randn(target.shape, generator=generator) * 0.05


def _logits(decoder: Decoder) -> Tensor:
    return PagedDecoder(decoder).prefill([IDS])[0]


def _make(kind: str) -> Decoder:
    if kind == "native":
        return NativeDecoder(LARGE, Kernels(1), dtype=torch.float32)
    return TorchDecoder(LARGE, DenseAttention(), dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_released_weights_leave_the_resident_memory(kind: str) -> None:
    decoder = _make(kind)
    load_weights(decoder, _random_weights(decoder, seed=0))
    before = _logits(decoder)
    loaded = _resident_bytes()
    given_back = decoder.release()
    assert given_back >= 200 << 20
    assert given_back >= sum(4 * math.prod(target.shape) for target in decoder.targets().values())
    assert loaded - _resident_bytes() >= 0.98 * given_back
    assert decoder.release() == 0
    decoder.reclaim()
    load_weights(decoder, _random_weights(decoder, seed=0))
    assert torch.equal(_logits(decoder), before)
    decoder.close()


class Occupied:
    """Takes the memory that was released, and fills it with what must not be read as weights."""

    def __init__(self, sizes: list[int]) -> None:
        self.blocks = [torch.full((size // 4,), torch.nan) for size in sizes]


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_qwen2])
def test_what_is_reclaimed_and_loaded_runs_as_before(
    make: Callable[..., Path], tied: bool, dtype: torch.dtype, load: Load, tmp_path: Path
) -> None:
    """At other addresses, with padding as it was."""
    first, other = (make(tmp_path / str(s), seed=s, tie_word_embeddings=tied, **UNEVEN) for s in (0, 1))
    decoder = load(first, dtype)
    sizes = [storage.nbytes() for storage in decoder._memory._storages]
    addresses = [storage.data_ptr() for storage in decoder._memory._storages]
    decoder.release()
    occupied = Occupied(sizes)
    decoder.reclaim()
    assert addresses != [storage.data_ptr() for storage in decoder._memory._storages]
    assert sizes == [storage.nbytes() for storage in decoder._memory._storages]
    load_directory(decoder, other)
    fresh = load(other, dtype)
    assert torch.equal(_logits(decoder), _logits(fresh))
    held, expected = dict(stream_weights(decoder)), dict(stream_weights(fresh))
    assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
    assert all(block.isnan().all() for block in occupied.blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_is_zero_in_reclaimed_memory(dtype: torch.dtype, tmp_path: Path) -> None:
    path = make_tiny_qwen2(tmp_path, **UNEVEN)
    decoder, fresh = native_decoder(path, dtype), native_decoder(path, dtype)
    decoder.release()
    decoder._memory.reclaim()
    for linear in (decoder._head, *decoder._layers[0].linears()):
        for memory in linear.memory():
            memory.fill_(torch.nan)
    decoder.reclaim()
    load_directory(decoder, path)
    for linear, expected in (
        (decoder._head, fresh._head),
        *zip(decoder._layers[0].linears(), fresh._layers[0].linears(), strict=True),
    ):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(linear.memory(), expected.memory(), strict=True))


@both
@pytest.mark.parametrize("inference", [True, False])
def test_released_weights_cannot_be_used(load: Load, inference: bool, tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path)
    with torch.inference_mode(inference):
        decoder = load(path, torch.float32)
    expected, weights = _logits(decoder), list(stream_weights(decoder))
    targets = decoder.targets()
    assert decoder.release() > 0
    with pytest.raises(AssertionError, match="released"):
        _logits(decoder)
    with pytest.raises(AssertionError, match="released"):
        decoder.logits(torch.zeros(1, decoder.spec.hidden))
    with pytest.raises(AssertionError, match="released"):
        load_weights(decoder, weights)
    for name, target in targets.items():
        with pytest.raises(AssertionError, match="released"):
            target.write(dict(weights)[name])
        with pytest.raises(AssertionError, match="released"):
            target.read()
    decoder.reclaim()
    with torch.inference_mode():
        for name, target in targets.items():  # those of before
            target.write(dict(weights)[name])
    assert torch.equal(_logits(decoder), expected)


@both
def test_reclaiming_what_was_not_released_changes_nothing(load: Load, tmp_path: Path) -> None:
    decoder = load(make_tiny_qwen2(tmp_path, **UNEVEN), torch.float32)
    before = _logits(decoder)
    decoder.reclaim()
    assert torch.equal(_logits(decoder), before)
