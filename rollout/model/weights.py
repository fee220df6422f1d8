"""Weights from safetensors files into a decoder, one tensor at a time.

Names and shapes are those of Hugging Face; the decoder's fused tensors are written through views, so loading
replaces weights in place and needs memory for one tensor beside them. Loading checks every name and shape, but
as it goes: after an error the decoder holds a mixture and must be loaded again.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollout.errors import UnsupportedModelError
from rollout.model.decoder import Decoder
from rollout.model.spec import ModelSpec, weight_files

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_NAMES_SHOWN = 4


def load_decoder(path: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder with the weights of a model directory, cast to `dtype`."""
    decoder = Decoder(spec, dtype=dtype, device=device)
    try:
        load_weights(decoder, stream_safetensors(path))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from None
    return decoder


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
def load_weights(decoder: Decoder, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Replace all weights of a decoder by tensors under their Hugging Face names.

    Raises `UnsupportedModelError` that names what is missing, unexpected, or of another shape or dtype.
    """
    targets = weight_views(decoder)
    missing, unexpected, unfit = set(targets), list[str](), list[str]()
    for name, tensor in named_tensors:
        target = targets.get(name)
        missing.discard(name)
        if target is None:
            if not _redundant(name, decoder.spec):
                unexpected.append(name)
        elif tensor.shape != target.shape or tensor.dtype not in _DTYPES:
            unfit.append(f"{name} ({_describe(tensor)} instead of {tuple(target.shape)})")
        else:
            target.copy_(tensor)
        del tensor  # before the next one is read
    problems = {"missing": sorted(missing), "unexpected": unexpected, "of another shape or dtype": unfit}
    if any(problems.values()):
        listed = "; ".join(f"{len(names)} {what}: {_shorten(names)}" for what, names in problems.items() if names)
        raise UnsupportedModelError(f"weights do not fit {decoder.spec.architecture}: {listed}")


def weight_views(decoder: Decoder) -> dict[str, Tensor]:
    """Every Hugging Face parameter name, with the part of the decoder's memory that holds it."""
    spec = decoder.spec
    views = {"model.embed_tokens.weight": decoder.embedding_VE, "model.norm.weight": decoder.norm.weight_E}
    if not spec.tied_embeddings:
        views["lm_head.weight"] = decoder.head_VE
    heads = {"q": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}
    widths = [count * spec.head_dim for count in heads.values()]
    for index, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{index}"
        views[f"{prefix}.input_layernorm.weight"] = layer.attention_norm.weight_E
        views[f"{prefix}.post_attention_layernorm.weight"] = layer.mlp_norm.weight_E
        views[f"{prefix}.self_attn.o_proj.weight"] = layer.out.weight_YX
        views[f"{prefix}.mlp.down_proj.weight"] = layer.down.weight_YX
        for name, part in zip(heads, torch.split(layer.qkv.weight_YX, widths), strict=True):
            views[f"{prefix}.self_attn.{name}_proj.weight"] = part
        if layer.qkv.bias_Y is not None:
            for name, part in zip(heads, torch.split(layer.qkv.bias_Y, widths), strict=True):
                views[f"{prefix}.self_attn.{name}_proj.bias"] = part
        for name, part in zip(("gate", "up"), layer.gate_up.weight_YX.chunk(2), strict=True):
            views[f"{prefix}.mlp.{name}_proj.weight"] = part
    return views


def _redundant(name: str, spec: ModelSpec) -> bool:
    """Whether a file may hold it although the decoder has no use for it."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and spec.tied_embeddings)


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _shorten(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
