"""Tensors of the dtypes and shapes that come up, and how they are compared."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from rollout.transport.buckets import Bucket, pack
from rollout.transport.manifest import Manifest


def weights(seed: int = 0, *, layers: int = 3) -> dict[str, Tensor]:
    """Under names of Hugging Face; of uneven sizes, so that buckets have gaps."""
    random = torch.Generator().manual_seed(seed)
    tensors = {"model.embed_tokens.weight": torch.randn(37, 24, generator=random).bfloat16()}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.self_attn.q_proj.weight": torch.randn(24, 24, generator=random).bfloat16(),
            f"{prefix}.self_attn.q_proj.bias": torch.randn(5, generator=random).half(),
            f"{prefix}.mlp.up_proj.weight": torch.randn(50, 24, generator=random),
            f"{prefix}.input_layernorm.weight": torch.randn(3, 3, generator=random).double(),
        }
    return tensors | {"scale": torch.tensor(1.5 + seed), "empty": torch.empty(0, 4)}


def packed(tensors: dict[str, Tensor], bucket_bytes: int) -> tuple[list[Bucket], Manifest]:
    buckets = list(pack(tensors.items(), bucket_bytes))
    entries = tuple(entry for bucket in buckets for entry in bucket.entries)
    return buckets, Manifest(entries=entries, bucket_bytes=tuple(bucket.buffer.nbytes for bucket in buckets))


def assert_same(found: Iterable[tuple[str, Tensor]], expected: dict[str, Tensor]) -> None:
    """The same names, shapes, dtypes and bytes; the order does not matter."""
    copies = {name: tensor.clone() for name, tensor in found}
    assert copies.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (copies[name].shape, copies[name].dtype) == (tensor.shape, tensor.dtype), name
        assert content(copies[name]) == content(tensor), name


def content(tensor: Tensor) -> bytes:
    """By way of a list of numbers, for which double has room: not the views that are tested."""
    numbers = np.array(tensor.detach().double().reshape(-1).tolist(), dtype=np.float64)
    return numbers.tobytes()
