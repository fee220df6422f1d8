"""Puts an engine together from its configuration: device, page size, page count, fingerprint, parts."""

import hashlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rollout.config import EngineConfig, HostConfig, Memory, ModelConfig
from rollout.engine.engine import Engine
from rollout.engine.images import Images
from rollout.engine.kernels import Kernel, choose_kernel, make_decoder
from rollout.engine.live import LiveWeights
from rollout.engine.rates import Rates
from rollout.engine.runner import Runner
from rollout.engine.scheduler import Limits, Scheduler
from rollout.errors import ConfigError
from rollout.kv.cache import KVCache
from rollout.kv.copier import Copier
from rollout.kv.keys import Fingerprint, root_key
from rollout.kv.restore import ImageReader, Restorer
from rollout.kv.storage import KVStorage
from rollout.model.decoder import Decoder
from rollout.model.spec import ModelSpec
from rollout.model.weights import load_directory
from rollout.types import Weights

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CPU_KV_BYTES = 1 << 30
CUDA_KV_SHARE = 0.85
KV_LAYOUT = 1
"""Version of the page layout, part of the fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """An engine with the parts that others read from."""

    engine: Engine
    decoder: Decoder
    digest: str
    """Of its weights."""
    storage: KVStorage
    fingerprint: Fingerprint
    max_context: int


def assemble(
    model: ModelConfig,
    config: EngineConfig,
    host: HostConfig,
    spec: ModelSpec,
    *,
    reader: ImageReader,
    restore_timeout_s: float,
    wake: Callable[[], None],
    weights: Weights,
    memory: Memory | None = None,
) -> Assembled:
    """Load the model and build an engine around it, which parks sequences by itself when `memory` says so.

    Raises `ConfigError` for a device that is not there and for what does not fit together.
    """
    dtype = DTYPES[model.dtype]
    kernel = choose_kernel(config, spec, dtype)
    decoder, sampler = make_decoder(kernel, config, spec, dtype)
    digest = load_directory(decoder, model.path).hexdigest()
    # Kernels whose bits depend on nothing else keep the promise of deterministic mode whatever is planned.
    replays = config.deterministic and not decoder.batch_invariant
    page_bytes = kernel.page_tokens * spec.layers * 2 * spec.kv_heads * spec.head_dim * dtype.itemsize
    pages = _page_count(config, kernel, page_bytes)
    storage = KVStorage(
        pages=pages,
        layers=spec.layers,
        page_tokens=kernel.page_tokens,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        device=kernel.device,
        host_pages=int(host.bytes) // page_bytes,
        canary=config.canary,
    )
    limits = Limits(
        max_running=config.max_running,
        chunk_tokens=kernel.chunk_tokens,
        prefill_tokens=config.prefill_tokens,
        replays=replays,
        spare_pages=math.ceil(memory.free_share * pages) if memory is not None else 0,
    )
    fingerprint = _fingerprint(config, spec, model.dtype, decoder, kernel)
    cache = KVCache(
        pages,
        kernel.page_tokens,
        host_pages=int(host.bytes) // page_bytes,
        write=host.write,
        prefer_shared=config.eviction == "shared_first",
    )
    live = LiveWeights(weights)
    images = Images(cache, live, tail_hold_s=config.tail_hold_s)
    rates = Rates(storage.token_bytes, host.load_back_tokens)
    max_context = min(spec.max_context_tokens, config.max_context_tokens or sys.maxsize, pages * kernel.page_tokens)
    engine = Engine(
        runner=Runner(decoder, storage, sampler, limits),
        scheduler=Scheduler(cache, images, rates, live, limits),
        cache=cache,
        images=images,
        copier=Copier(storage, wake=wake),
        rates=rates,
        root=root_key(fingerprint),
        restorer=Restorer(storage, fingerprint, reader, timeout_s=restore_timeout_s, wake=wake),
        vocab_size=spec.vocab_size,
        eos_ids=spec.eos_token_ids,
        max_context=max_context,
        replays=replays,
        live=live,
    )
    return Assembled(
        engine=engine, decoder=decoder, digest=digest, storage=storage, fingerprint=fingerprint, max_context=max_context
    )


def _page_count(config: EngineConfig, kernel: Kernel, page_bytes: int) -> int:
    if config.kv_bytes is not None:
        budget = int(config.kv_bytes)
    elif kernel.device.type == "cuda":
        budget = int(torch.cuda.mem_get_info(kernel.device)[0] * CUDA_KV_SHARE)
    else:
        budget = CPU_KV_BYTES
    pages = budget // page_bytes - 1
    if pages < 1:
        raise ConfigError(f"engine.kv_bytes: got {budget}, allowed: at least two pages of {page_bytes} bytes")
    return pages


def _fingerprint(config: EngineConfig, spec: ModelSpec, dtype: str, decoder: Decoder, kernel: Kernel) -> Fingerprint:
    """Everything but weights that the bytes of a page depend on; in deterministic mode bit for bit."""
    facts: dict[str, object] = {
        "architecture": spec.architecture,
        "sizes": [spec.layers, spec.hidden, spec.intermediate, spec.heads, spec.kv_heads, spec.head_dim],
        "vocab_size": spec.vocab_size,
        "norm_eps": spec.norm_eps,
        "rope": repr(spec.rope),
        "qkv_bias": spec.qkv_bias,
        "dtype": dtype,
        "page_tokens": kernel.page_tokens,
        "layout": KV_LAYOUT,
        "byteorder": sys.byteorder,
        "kernels": decoder.name,
    }
    if config.deterministic:
        facts["build"] = decoder.build
    if config.deterministic and not decoder.batch_invariant:
        facts |= {
            "threads": torch.get_num_threads(),
            "chunk_tokens": kernel.chunk_tokens,
            "decode_rows": config.max_running,
        }
    text = json.dumps(facts, sort_keys=True)
    return Fingerprint(hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
