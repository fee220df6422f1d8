"""Weights from safetensors files into a decoder, one tensor at a time.

Names and shapes are those of Hugging Face; the decoder's fused or packed tensors are written through views, so
loading replaces weights in place and needs memory for one tensor beside them. Loading checks every name and shape, but
as it goes: after an error the decoder holds a mixture and must be loaded again.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollout.errors import UnsupportedModelError
from rollout.model.spec import ModelSpec, weight_files

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Target:
    """The part of a decoder's memory that holds one tensor: pieces of it, along the first dimension."""

    shape: tuple[int, ...]
    pieces: tuple[tuple[slice, Tensor], ...]
    """Rows, and the view that they are copied into, of as many elements in the same order."""

    def write(self, tensor: Tensor) -> None:
        for rows, view in self.pieces:
            view.copy_(tensor[rows].reshape(view.shape))


def whole(tensor: Tensor) -> Target:
    """A tensor that is kept as it comes."""
    return Target(tuple(tensor.shape), ((slice(None), tensor),))


def head_widths(spec: ModelSpec) -> dict[str, int]:
    """Output columns of the query, key and value projections."""
    return {"q": spec.heads * spec.head_dim, "k": spec.kv_heads * spec.head_dim, "v": spec.kv_heads * spec.head_dim}


class Loadable(Protocol):
    """What weights are loaded into."""

    spec: ModelSpec

    def targets(self) -> Mapping[str, Target]: ...


def load_directory(decoder: Loadable, path: Path) -> None:
    """Replace all weights of a decoder by those of a model directory."""
    try:
        load_weights(decoder, stream_safetensors(path))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from None


def stream_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model directory with its name, file by file.

    Raises `ModelNotFoundError` for a missing file, `UnsupportedModelError` for one that is not safetensors.
    """
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise UnsupportedModelError(f"{file.name}: not a safetensors file: {error}") from None


@torch.inference_mode()
def load_weights(decoder: Loadable, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Replace all weights of a decoder by tensors under their Hugging Face names.

    Raises `UnsupportedModelError` that names what is missing, unexpected, or of another shape or dtype.
    """
    targets = decoder.targets()
    missing, unexpected, unfit = set(targets), list[str](), list[str]()
    for name, tensor in named_tensors:
        target = targets.get(name)
        missing.discard(name)
        if target is None:
            if not _redundant(name, decoder.spec):
                unexpected.append(name)
        elif tuple(tensor.shape) != target.shape or tensor.dtype not in _DTYPES:
            unfit.append(f"{name} ({_describe(tensor)} instead of {target.shape})")
        else:
            target.write(tensor)
        del tensor  # before the next one is read
    problems = {"missing": sorted(missing), "unexpected": unexpected, "of another shape or dtype": unfit}
    if any(problems.values()):
        listed = "; ".join(f"{len(names)} {what}: {_shorten(names)}" for what, names in problems.items() if names)
        raise UnsupportedModelError(f"weights do not fit {decoder.spec.architecture}: {listed}")


def _redundant(name: str, spec: ModelSpec) -> bool:
    """Whether a file may hold it although the decoder has no use for it."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and spec.tied_embeddings)


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _shorten(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
