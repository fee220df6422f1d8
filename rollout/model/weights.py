"""Weights into a decoder and out of it, one tensor at a time; described first, if whoever has them can.

Names and shapes are those of Hugging Face; the decoder fuses, packs and converts them as it writes them, so loading
replaces weights in place and needs memory for one tensor beside them. What is loaded is only ever read.
`check_weights` refuses weights before any of them is read. Loading checks as it goes: after an error the decoder
holds a mixture and must be loaded again.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollout.errors import UnsupportedModelError
from rollout.memory import has_memory
from rollout.model.digest import WeightsDigest
from rollout.model.spec import ModelSpec, weight_files

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_NAMES_SHOWN = 4


Described = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype of a tensor."""


class Target(Protocol):
    """The part of a decoder's memory that holds one tensor, in whatever layout.

    Written and read by the thread that runs the decoder: native kernels do it on the same team.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor as Hugging Face has it."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the decoder."""
        ...

    def write(self, tensor: Tensor) -> None:
        """Replace it by a tensor of this shape, converted to this dtype."""
        ...

    def read(self) -> Tensor:
        """A copy of it on the CPU, of this shape and dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that is kept as it comes."""

    held: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.held.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    def write(self, tensor: Tensor) -> None:
        assert has_memory(self.held), "the weights were released"
        self.held.copy_(tensor)

    def read(self) -> Tensor:
        assert has_memory(self.held), "the weights were released"
        return self.held.to("cpu", copy=True)


def head_widths(spec: ModelSpec) -> dict[str, int]:
    """Output columns of the query, key and value projections."""
    return {"q": spec.heads * spec.head_dim, "k": spec.kv_heads * spec.head_dim, "v": spec.kv_heads * spec.head_dim}


class Loadable(Protocol):
    """What weights are loaded into and read from."""

    spec: ModelSpec

    def targets(self) -> Mapping[str, Target]: ...


# From files


def load_directory(decoder: Loadable, path: Path) -> WeightsDigest:
    """Replace all weights of a decoder by those of a model directory; their digest, as of `stream_weights`."""
    digest = WeightsDigest()
    try:
        load_weights(decoder, stream_safetensors(path), digest=digest)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from None
    return digest


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


# Into a decoder


def weights_bytes(decoder: Loadable) -> int:
    """Of all weights under their Hugging Face names, in the decoder's dtype."""
    return sum(math.prod(target.shape) * target.dtype.itemsize for target in decoder.targets().values())


def check_weights(decoder: Loadable, described: Iterable[Described], *, partial: bool = False) -> None:
    """Refuse what `load_weights` would refuse, with the same error, before anything is read or written.

    With `partial`, tensors may be missing. A decoder that was released can be asked, too.
    """
    comparison = _Comparison(decoder)
    for description in described:
        comparison.target(description)
    comparison.finish(partial=partial)


def write_weights(
    decoder: Loadable, named_tensors: Iterable[tuple[str, Tensor]], *, digest: WeightsDigest | None = None
) -> None:
    """Replace weights that `check_weights` found to fit, all or some; others keep what they hold.

    What the decoder then holds of them is put into `digest`. Raises `UnsupportedModelError` for what does not fit.
    """
    _write(decoder, named_tensors, digest, partial=True)


def load_weights(
    decoder: Loadable, named_tensors: Iterable[tuple[str, Tensor]], *, digest: WeightsDigest | None = None
) -> None:
    """Replace all weights of a decoder by tensors under their Hugging Face names.

    Raises `UnsupportedModelError` that names what is missing, unexpected, of another shape or dtype, or given twice.
    """
    _write(decoder, named_tensors, digest, partial=False)


@torch.inference_mode()
def _write(
    decoder: Loadable, named_tensors: Iterable[tuple[str, Tensor]], digest: WeightsDigest | None, *, partial: bool
) -> None:
    comparison = _Comparison(decoder)
    for name, tensor in named_tensors:
        target = comparison.target((name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
        if target is not None:
            if digest is not None:
                tensor = tensor.to("cpu", target.dtype)
                digest.put(name, tensor)
            target.write(tensor)
        del tensor  # before the next one is read
    comparison.finish(partial=partial)


def stream_weights(decoder: Loadable) -> Iterator[tuple[str, Tensor]]:
    """A copy of every tensor that a decoder holds with its name, on the CPU: what `load_weights` takes.

    Iterated by the thread that runs the decoder, which may run it meanwhile.
    """
    for name, target in decoder.targets().items():
        yield name, target.read()


class _Comparison:
    """Of tensors, one by one, with what a decoder has."""

    def __init__(self, decoder: Loadable) -> None:
        self._spec = decoder.spec
        self._targets = decoder.targets()
        self._seen = set[str]()
        self._unexpected, self._unfit, self._twice = list[str](), list[str](), list[str]()

    def target(self, described: Described) -> Target | None:
        """Where it goes; None if it is of no use, or wrong."""
        name, shape, dtype = described
        target = self._targets.get(name)
        if name in self._seen:
            self._twice.append(name)
        elif target is None:
            if not _redundant(name, self._spec):
                self._unexpected.append(name)
        elif shape != target.shape or dtype not in _DTYPES:
            self._unfit.append(f"{name} ({shape} {dtype} instead of {target.shape})")
        else:
            self._seen.add(name)
            return target
        self._seen.add(name)
        return None

    def finish(self, *, partial: bool) -> None:
        """Raise for everything that was wrong."""
        problems = {
            "missing": [] if partial else sorted(self._targets.keys() - self._seen),
            "unexpected": self._unexpected,
            "of another shape or dtype": self._unfit,
            "given twice": self._twice,
        }
        if any(problems.values()):
            listed = "; ".join(f"{len(names)} {what}: {_shorten(names)}" for what, names in problems.items() if names)
            raise UnsupportedModelError(f"weights do not fit {self._spec.architecture}: {listed}")


def _redundant(name: str, spec: ModelSpec) -> bool:
    """Whether a file may hold it although the decoder has no use for it."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and spec.tied_embeddings)


def _shorten(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
