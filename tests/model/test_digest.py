"""Who holds the same weights has the same digest, and nobody else."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollout.model.decoder import TorchDecoder
from rollout.model.digest import WeightsDigest, weights_digest
from rollout.model.spec import read_spec
from rollout.model.weights import load_directory, load_weights, stream_safetensors, stream_weights, write_weights
from tests.model.paged import UNEVEN, DenseAttention, native_decoder, torch_decoder
from tests.tiny_models import make_tiny_llama, make_tiny_qwen2

NAME = "model.layers.1.mlp.up_proj.weight"


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"w{i}": torch.randn((4, 6), generator=generator) for i in range(5)}


def test_the_order_does_not_matter() -> None:
    assert weights_digest(reversed(tensors().items())) == weights_digest(tensors().items())


def _flip_a_bit(found: dict[str, Tensor]) -> None:
    found["w3"].view(torch.int32)[1, 2] ^= 1


def _swap(found: dict[str, Tensor]) -> None:
    found["w1"], found["w2"] = found["w2"], found["w1"]


@pytest.mark.parametrize(
    "change",
    [
        _flip_a_bit,
        _swap,
        lambda found: found.update(w0=found["w0"].view(6, 4)),
        lambda found: found.update(w0=found["w0"].view(torch.int32)),
        lambda found: found.update(w9=found.pop("w0")),
        lambda found: found.pop("w0"),
        lambda found: found.update(w9=torch.empty(0)),
        lambda found: found.update(w9=torch.tensor(1.0)),
    ],
)
def test_any_change_changes_it(change: Callable[[dict[str, Tensor]], object]) -> None:
    changed = tensors()
    change(changed)
    assert weights_digest(changed.items()) != weights_digest(tensors().items())


def test_it_is_of_what_a_tensor_holds_not_of_its_layout() -> None:
    turned = {name: tensor.T.contiguous().T for name, tensor in tensors().items()}
    assert weights_digest(turned.items()) == weights_digest(tensors().items())


def test_a_tensor_that_is_put_again_counts_once() -> None:
    digest, changed = WeightsDigest(), tensors() | {"w2": torch.ones(4, 6)}
    for name, tensor in tensors().items():
        digest.put(name, tensor)
    digest.put("w2", changed["w2"])
    assert digest.hexdigest() == weights_digest(changed.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_loading_gives_the_digest_of_what_a_decoder_holds(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    """Whatever the dtype of the files, their shards, and what they hold beside it."""
    paths = [
        make_tiny_qwen2(tmp_path / f"{size}", tie_word_embeddings=tied, max_shard_size=size, **UNEVEN)
        for size in ("1GB", "50KB")
    ]
    paths.append(make_tiny_qwen2(tmp_path / "bf16", tie_word_embeddings=tied, dtype=torch.bfloat16, **UNEVEN))
    decoders = [load(path, dtype) for load in (torch_decoder, native_decoder) for path in paths[:2]]
    digests = [load_directory(decoder, paths[0]).hexdigest() for decoder in decoders]
    digests += [weights_digest(stream_weights(decoder)) for decoder in decoders]
    assert len(set(digests)) == 1
    rounded = load_directory(decoders[0], paths[2]).hexdigest()
    assert (rounded == digests[0]) == (dtype is torch.bfloat16)


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    first, other = (make_tiny_llama(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    decoder = TorchDecoder(read_spec(first), DenseAttention(), dtype=torch.float32, device=torch.device("cpu"))
    digest = load_directory(decoder, first)
    assert load_directory(decoder, other).hexdigest() != digest.hexdigest()
    new = dict(stream_safetensors(other))[NAME]
    load_weights(decoder, stream_safetensors(first))
    write_weights(decoder, [(NAME, new)], digest=digest)
    assert weights_digest(stream_weights(decoder)) == digest.hexdigest()
