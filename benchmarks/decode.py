"""Decoding at full speed, end to end: this service against its peers, and against what the machine can do.

Each case is a batch of prompts of `prompt_tokens` random ids, all handed over at once, and `new_tokens` sampled for
each (T = 1, nothing truncated, end-of-sequence ignored), with their log-probabilities; `16_long` has `long_tokens`.
Ours is timed through the blocking client on one Ray worker with all cores, from `submit` to the last result; peers,
with --peer-python, around the call of their own offline API, in their own process. All have the same prompts, cores,
threads and bfloat16 weights; they take turns, in an order that is reversed every time, compiled and warmed before.

Tokens per second are generated tokens over the whole time, that of the prompts included. `ratios.decode_vs_<peer>_b<n>`
is ours over the peer's, by medians. `results.limit`: one step as the matrix products of all linear maps and the head at
that batch, by the fastest way known here, and one read of the batch's KV, halfway through, at the machine's memory
speed; both measured in every turn. `ratios.decode_vs_limit_b<n>` and `vllm_vs_limit_b<n>` are shares of it.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from benchmarks.limit import Limit
from benchmarks.sides import OURS, Sides, bound, started
from benchmarks.workload import Side, Vocabulary, Workload, rates
from rollout.config import Section
from rollout.model.spec import read_spec

WARM_TOKENS = 8
KV_ROOM_TOKENS = 64
"""Beyond the longest sequence."""


class Settings(Section):
    sides: Sides = Sides()
    """What is compared, and how each is set up."""
    batches: tuple[PositiveInt, ...] = (1, 16, 32, 64)
    """Sequences at once."""
    long_batches: tuple[PositiveInt, ...] = (16,)
    """Those that are also measured with `long_tokens`."""
    prompt_tokens: PositiveInt = 33
    """Of each prompt."""
    new_tokens: PositiveInt = 128
    """Sampled for each prompt."""
    long_tokens: PositiveInt = 512
    """Sampled for each prompt of the long cases."""
    turns: PositiveInt = 5
    """Of each side in each case."""
    long_turns: PositiveInt = 3
    """Of each side in each long case."""
    hf_batches: tuple[PositiveInt, ...] = (16,)
    """Those at which Hugging Face is measured too."""
    hf_turns: PositiveInt = 1
    """Of Hugging Face in each of its cases: it is slow."""
    seed: int = 0
    """Of the prompts."""

    def cases(self) -> dict[str, tuple[int, int]]:
        """Batch and new tokens of each."""
        short = {str(batch): (batch, self.new_tokens) for batch in self.batches}
        return short | {f"{batch}_long": (batch, self.long_tokens) for batch in self.long_batches}

    def turns_of(self, side: str, case: str) -> int:
        """0: it has no part in that case."""
        if side.startswith("hf"):
            return self.hf_turns if case in map(str, self.hf_batches) else 0
        return self.long_turns if case.endswith("_long") else self.turns


def run(settings: Settings, peer_python: Path | None) -> tuple[dict[str, Any], dict[str, float]]:
    settings.sides.check()
    spec = read_spec(settings.sides.model)
    vocabulary = Vocabulary.read(settings.sides.model, spec.vocab_size)
    cases = settings.cases()
    longest = settings.prompt_tokens + max(new for _, new in cases.values()) + KV_ROOM_TOKENS
    running = max(batch for batch, _ in cases.values())
    results: dict[str, Any] = {"tokens_per_s": {}, "limit": {}, "turns_s": {}}
    ratios: dict[str, float] = {}
    with (
        bound(settings.sides.cpus) as cores,
        started(settings.sides, peer_python, cores, running=running, context_tokens=longest) as (sides, described),
    ):
        limit = Limit(spec, settings.sides.cpus)
        for case, (batch, new_tokens) in cases.items():
            workload = Workload(
                name=case,
                batch=batch,
                prompt_tokens=settings.prompt_tokens,
                new_tokens=new_tokens,
                vocabulary=vocabulary,
                seed=settings.seed,
            )
            _measure(settings, workload, sides, limit, results, ratios)
    return {"sides": described, **results}, ratios


def _measure(
    settings: Settings,
    workload: Workload,
    sides: Mapping[str, Side],
    limit: Limit,
    results: dict[str, Any],
    ratios: dict[str, float],
) -> None:
    case, batch = workload.name, workload.batch
    turns = {name: settings.turns_of(name, case) for name in sides}
    here = {name: side for name, side in sides.items() if turns[name]}
    steps: list[dict[str, Any]] = []
    context = workload.prompt_tokens + workload.new_tokens / 2
    measured = workload.measure(
        here, turns, warm_tokens=WARM_TOKENS, beside=lambda: steps.append(limit.decode_step(batch, context))
    )
    most = batch / statistics.median(step["seconds"] for step in steps)
    speeds = rates(measured, batch * workload.new_tokens)
    results["tokens_per_s"][f"b{case}"] = {**speeds, "limit": most}
    results["turns_s"][f"b{case}"] = {name: [round(each, 3) for each in seconds] for name, seconds in measured.items()}
    results["limit"][f"b{case}"] = {
        "step_ms": 1e3 * statistics.median(step["seconds"] for step in steps),
        "kv_ms": 1e3 * statistics.median(step["kv_s"] for step in steps),
        **{
            f"gemm_{name}_ms": 1e3 * statistics.median(step["gemm_s"][name] for step in steps)
            for name in steps[0]["gemm_s"]
        },
        **{
            f"read_{name}_gb_per_s": statistics.median(step["read_bytes_per_s"][name] for step in steps) / 1e9
            for name in steps[0]["read_bytes_per_s"]
        },
    }
    for name, speed in speeds.items():
        if name != OURS:
            ratios[f"decode_vs_{name}_b{case}"] = speeds[OURS] / speed
    ratios[f"decode_vs_limit_b{case}"] = speeds[OURS] / most
    if "vllm" in speeds:
        ratios[f"vllm_vs_limit_b{case}"] = speeds["vllm"] / most
