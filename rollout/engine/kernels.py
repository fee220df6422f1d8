"""Which kernels run the decoder and the sampler on a worker, and the sizes that follow from the choice."""

import logging
from dataclasses import dataclass
from typing import Literal, assert_never

import torch

from rollout.attention import make_attention
from rollout.config import EngineConfig
from rollout.engine.native_sampling import NativeSampler
from rollout.engine.sampling import Sampler, TorchSampler
from rollout.engine.scheduler import CHUNK_TOKENS
from rollout.errors import ConfigError, NativeKernelsError
from rollout.model.decoder import Decoder, TorchDecoder
from rollout.model.native import NativeDecoder, refusal
from rollout.model.spec import ModelSpec
from rollout.native.library import Kernels, load

PAGE_TOKENS = 16
FLASH_PAGE_TOKENS = 256
FLASH_HEAD_DIM = 256
"""Largest that flash-attn 2 has kernels for."""

KernelName = Literal["native", "torch", "flash"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Where and how the decoder runs, and the sizes that follow from it."""

    device: torch.device
    name: KernelName
    page_tokens: int
    chunk_tokens: int


def choose_kernel(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> Kernel:
    """Resolve what the configuration leaves open, and refuse what cannot work together."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device: got cuda, but this worker sees no GPU (cluster.gpus_per_worker: 1)")
    on_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    name = _choose(config, spec, dtype, on_cuda=on_cuda)
    page_tokens = config.page_tokens or (FLASH_PAGE_TOKENS if name == "flash" else PAGE_TOKENS)
    chunk_tokens = config.chunk_tokens or max(CHUNK_TOKENS, page_tokens)
    if name == "flash" and page_tokens % FLASH_PAGE_TOKENS:
        raise ConfigError(f"engine.page_tokens: got {page_tokens}, flash needs a multiple of {FLASH_PAGE_TOKENS}")
    if config.deterministic and name != "native" and chunk_tokens % page_tokens:
        raise ConfigError(
            f"engine.chunk_tokens: got {chunk_tokens}, deterministic mode with {name} kernels needs a "
            f"multiple of engine.page_tokens ({page_tokens})"
        )
    return Kernel(
        device=torch.device("cuda" if on_cuda else "cpu"),
        name=name,
        page_tokens=page_tokens,
        chunk_tokens=chunk_tokens,
    )


def make_decoder(kernel: Kernel, config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> tuple[Decoder, Sampler]:
    """A decoder without weights yet, and the sampler that goes with it."""
    if kernel.name == "native":
        kernels = Kernels(torch.get_num_threads())
        return NativeDecoder(spec, kernels, dtype=dtype), NativeSampler(spec.vocab_size, kernels)
    attention = make_attention(kernel.name, deterministic=config.deterministic)
    decoder = TorchDecoder(spec, attention, dtype=dtype, device=kernel.device)
    return decoder, TorchSampler(spec.vocab_size, kernel.device)


def _choose(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, *, on_cuda: bool) -> KernelName:
    """The kernels that were asked for, or the best there are."""
    match config.kernels:
        case "torch":
            return "torch"
        case "flash":
            if reasons := _against_flash(spec, dtype, on_cuda=on_cuda):
                raise ConfigError(
                    f"engine.kernels: got flash with {' and '.join(reasons)}, allowed: cuda, bfloat16, "
                    f"head_dim a multiple of 8 up to {FLASH_HEAD_DIM}"
                )
            return "flash"
        case "native":
            if on_cuda:
                raise ConfigError("engine.kernels: got native with device cuda, allowed: flash, torch")
            _require_native(spec)
            return "native"
        case "auto" if on_cuda:
            return "torch" if _against_flash(spec, dtype, on_cuda=on_cuda) else "flash"
        case "auto":
            try:
                _require_native(spec)
            except NativeKernelsError as error:
                if config.deterministic:  # workers with other kernels would compute other bits
                    raise NativeKernelsError(
                        f"{error}; deterministic mode needs the same kernels on all workers: engine.kernels=torch"
                    ) from None
                logger.warning("engine.kernels: torch, several times slower than native, which cannot be: %s", error)
                return "torch"
            return "native"
        case _:
            assert_never(config.kernels)


def _against_flash(spec: ModelSpec, dtype: torch.dtype, *, on_cuda: bool) -> list[str]:
    facts = {
        "device cpu": not on_cuda,
        "model.dtype float32": dtype is torch.float32,
        f"head_dim {spec.head_dim}": spec.head_dim > FLASH_HEAD_DIM or spec.head_dim % 8 != 0,
    }
    return [fact for fact, holds in facts.items() if holds]


def _require_native(spec: ModelSpec) -> None:
    """Raises `NativeKernelsError` if there are no native kernels for this model on this machine; else loads them."""
    if why := refusal(spec):
        raise NativeKernelsError(f"native kernels: {why}")
    load()
