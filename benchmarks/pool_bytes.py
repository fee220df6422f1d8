"""What a group costs the pool: bytes stored when all samples of one prompt are suspended, and sent when they are again.

`samples` trajectories of one prompt are suspended together after `tokens` tokens each, resumed, and suspended again
after as many more. `ratios.stored_vs_least`: bytes in the pool against the KV of the prompt, once, and of every
output. `ratios.sent_again_vs_least`: bytes sent by the second suspensions against the KV of the new tokens and one
page for each trajectory. `ratios.stored_vs_copies`: the first against what images of their own would take.
"""

import time
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt

from benchmarks.checkout import SMOLLM2, require_model
from rollout import SamplingParams, start
from rollout.client import Rollout
from rollout.config import Section
from rollout.errors import DeadlineError

TIMEOUT_S = 600.0
PAGE_TOKENS = 16
POLL_S = 0.05


NEVER_TOKENS = 1 << 15
"""No trajectory comes so far."""


class Settings(Section):
    model: Path = SMOLLM2
    """`make model` puts SmolLM2-135M there."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the model and its KV."""
    cpus: PositiveInt = 2
    """Cores of the worker."""
    samples: PositiveInt = 16
    """Trajectories of the prompt."""
    prompt_tokens: PositiveInt = 1000
    """Of the prompt that they share."""
    tokens: PositiveInt = 200
    """Of each output, before it is suspended."""
    name: str = "bench-pool-bytes"
    """Of the service."""


def run(settings: Settings) -> tuple[dict[str, Any], dict[str, float]]:
    require_model("model", settings.model)
    config = {
        "model": {"path": str(settings.model), "dtype": settings.dtype},
        "engine": {"max_running": settings.samples, "page_tokens": PAGE_TOKENS},
        "cluster": {"name": settings.name, "cpus_per_worker": settings.cpus},
        "pool": {"budget_bytes": "256MiB"},
        "weights": {"transport": {"kind": "disk"}},
    }
    with start(config) as service:
        return _measure(service, settings)


def _measure(service: Rollout, settings: Settings) -> tuple[dict[str, Any], dict[str, float]]:
    prompt = [4 + 7 * position % 250 for position in range(settings.prompt_tokens)]
    sampling = SamplingParams(max_new_tokens=NEVER_TOKENS, ignore_eos=True)
    service.submit([prompt], n=settings.samples, sampling=sampling, key="group")
    first = _suspend(service, settings.tokens)
    stats = service.stats()
    (pool,) = stats.pools
    page_bytes = stats.workers[0].engine.page_bytes
    token_bytes = page_bytes // PAGE_TOKENS
    kv = [settings.prompt_tokens + tokens - 1 for tokens in first]
    least = (settings.prompt_tokens + sum(known - settings.prompt_tokens for known in kv)) * token_bytes
    service.resume()
    second = _suspend(service, 2 * settings.tokens)
    (again,) = service.stats().pools
    new = sum(second) - sum(first)
    least_again = (new + settings.samples * PAGE_TOKENS) * token_bytes
    results = {
        "tokens_first": sum(first),
        "tokens_second": sum(second),
        "stored_bytes": pool.stored,
        "least_bytes": least,
        "sent_again_bytes": again.sent - pool.sent,
        "least_again_bytes": least_again,
        "displaced_images": again.displaced_images,
    }
    ratios = {
        "stored_vs_least": pool.stored / least,
        "stored_vs_copies": pool.stored / (sum(kv) * token_bytes),
        "sent_again_vs_least": (again.sent - pool.sent) / least_again,
    }
    return results, ratios


def _suspend(service: Rollout, tokens: int) -> list[int]:
    """Wait until each trajectory has about `tokens` tokens, then suspend all; returns how many each has."""
    deadline = time.monotonic() + TIMEOUT_S
    while (stats := service.stats()).counters.tokens < tokens * stats.counters.trajectories:
        if time.monotonic() > deadline:
            raise DeadlineError(f"not {tokens} tokens for each trajectory within {TIMEOUT_S:g} s: {stats.counters}")
        time.sleep(POLL_S)
    report = service.abort(keep="pool", then="hold")
    return [len(partial.output_ids) for partial in report.partials]
