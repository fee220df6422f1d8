"""Puts an engine together from its configuration: device, page size, page count, fingerprint, parts."""

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from rollout.attention import make_attention
from rollout.config import EngineConfig, ModelConfig
from rollout.engine.engine import Engine
from rollout.engine.runner import Runner
from rollout.engine.sampling import Sampler
from rollout.engine.scheduler import Limits, Scheduler
from rollout.errors import ConfigError
from rollout.kv.cache import KVCache
from rollout.kv.keys import Fingerprint
from rollout.kv.restore import ImageReader, Restorer
from rollout.kv.storage import KVStorage
from rollout.model.spec import ModelSpec
from rollout.model.weights import load_decoder
from rollout.types import Version

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CPU_KV_BYTES = 1 << 30
CUDA_KV_SHARE = 0.85
KV_LAYOUT = 1
"""Version of the page layout, part of the fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """An engine with the parts that others read from."""

    engine: Engine
    storage: KVStorage
    fingerprint: Fingerprint
    max_context: int


def assemble(
    model: ModelConfig,
    config: EngineConfig,
    spec: ModelSpec,
    *,
    reader: ImageReader,
    wake: Callable[[], None],
    weights_id: str,
    version: Version,
) -> Assembled:
    """Load the model and build an engine around it.

    Raises `ConfigError` for a device that is not there and sizes that do not fit together.
    """
    device = _device(config.device)
    kernel: Literal["torch", "flash"]
    kernel = config.attention if config.attention != "auto" else "flash" if device.type == "cuda" else "torch"
    attention = make_attention(kernel, deterministic=config.deterministic)
    page_tokens = config.page_tokens or (256 if kernel == "flash" else 16)
    check_sizes(config, page_tokens, kernel)
    decoder = load_decoder(model.path, spec, DTYPES[model.dtype], device)
    pages = _page_count(config, spec, DTYPES[model.dtype], page_tokens, device)
    storage = KVStorage(
        pages=pages,
        layers=spec.layers,
        page_tokens=page_tokens,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        dtype=DTYPES[model.dtype],
        device=device,
    )
    limits = Limits(
        max_running=config.max_running,
        chunk_tokens=config.chunk_tokens,
        prefill_tokens=config.prefill_tokens,
        deterministic=config.deterministic,
    )
    fingerprint = _fingerprint(model, config, spec, attention.name, page_tokens, device)
    cache = KVCache(pages, page_tokens)
    max_context = min(spec.max_context_tokens, config.max_context_tokens or sys.maxsize, pages * page_tokens)
    engine = Engine(
        runner=Runner(decoder, attention, storage, Sampler(spec.vocab_size, device), limits),
        scheduler=Scheduler(cache, limits, weights_id),
        cache=cache,
        restorer=Restorer(storage, fingerprint, reader, wake),
        fingerprint=fingerprint,
        vocab_size=spec.vocab_size,
        eos_ids=spec.eos_token_ids,
        max_context=max_context,
        deterministic=config.deterministic,
        weights_id=weights_id,
        version=version,
    )
    return Assembled(engine=engine, storage=storage, fingerprint=fingerprint, max_context=max_context)


def check_sizes(config: EngineConfig, page_tokens: int, kernel: str) -> None:
    """Refuse page and chunk sizes that cannot work together."""
    if kernel == "flash" and page_tokens % 256:
        raise ConfigError(f"engine.page_tokens: got {page_tokens}, flash attention needs a multiple of 256")
    if config.deterministic and config.chunk_tokens % page_tokens:
        raise ConfigError(
            f"engine.chunk_tokens: got {config.chunk_tokens}, deterministic mode needs a multiple of "
            f"engine.page_tokens ({page_tokens})"
        )


def _device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device: got cuda, but this worker sees no GPU (cluster.gpus_per_worker: 1)")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _page_count(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, page_tokens: int, device: torch.device
) -> int:
    if config.kv_bytes is not None:
        budget = int(config.kv_bytes)
    elif device.type == "cuda":
        budget = int(torch.cuda.mem_get_info(device)[0] * CUDA_KV_SHARE)
    else:
        budget = CPU_KV_BYTES
    page_bytes = page_tokens * spec.layers * 2 * spec.kv_heads * spec.head_dim * dtype.itemsize
    pages = budget // page_bytes - 1
    if pages < 1:
        raise ConfigError(f"engine.kv_bytes: got {budget}, allowed: at least two pages of {page_bytes} bytes")
    return pages


def _fingerprint(
    model: ModelConfig, config: EngineConfig, spec: ModelSpec, attention: str, page_tokens: int, device: torch.device
) -> Fingerprint:
    """Everything but weights that the bytes of a page depend on; in deterministic mode bit for bit."""
    facts: dict[str, object] = {
        "architecture": repr(spec),
        "dtype": model.dtype,
        "page_tokens": page_tokens,
        "layout": KV_LAYOUT,
        "byteorder": sys.byteorder,
        "attention": attention,
    }
    if config.deterministic:
        facts |= {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "chunk_tokens": config.chunk_tokens,
            "decode_rows": config.max_running,
        }
    text = json.dumps(facts, sort_keys=True)
    return Fingerprint(hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
