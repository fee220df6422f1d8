"""Decoding at full speed, end to end: this service against its peers, and against what the machine can do.

Each case is a batch of prompts of `prompt_tokens` random ids, all handed over at once, and `new_tokens` sampled for
each (T = 1, nothing truncated, end-of-sequence ignored), with their log-probabilities; `16_long` has `long_tokens`.
Ours is timed through the blocking client on one Ray worker with all cores, from `submit` to the last result; peers,
with --peer-python, around the call of their own offline API, in their own process. All have the same prompts, cores,
threads, bfloat16 weights and huge pages; they take turns, in an order that is reversed every time, all warmed before.
vLLM compiles the model; Hugging Face `generate` and continuous batching run eagerly, as they do by default on the CPU.
`sides.openmp` says which OpenMP runtime vLLM has, and the results repeat it.

Tokens per second are generated tokens over the whole time, that of the prompts included. `ratios.decode_vs_<peer>_b<n>`
is ours over the peer's, by medians of as many turns as `results.medians_of` says. `results.limit`: one step as the
matrix products of all linear maps and the head at that batch, by the fastest way known here, and one read of the
batch's KV, halfway through, at the machine's memory speed; both measured in every turn, in a process of their own
(`alone`). `ratios.decode_vs_limit_b<n>` and `vllm_vs_limit_b<n>` are shares of it. `results.our_share_of_peer_turns` is
how much of the cores our idle service took from each peer.

`results.memory` is the worker's at the end: its highest use, and by how much that is over the weights' files and all
pages of its KV cache; `ratios.memory_vs_allowed` allows 600 MB for that. `results.weights` is the replacement of all
weights of a decoder, packed anew in place, by tensors in memory, and a plain copy of these tensors, in turns.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from benchmarks.alone import alone
from benchmarks.measure import in_ms
from benchmarks.peer import Peer
from benchmarks.sides import OURS, Ours, Sides, bound, our_shares, started
from benchmarks.workload import Side, Vocabulary, Workload, rates
from rollout.config import Section
from rollout.model.spec import read_spec

WARM_TOKENS = 8
ALLOWED_BYTES = 600 * 10**6
"""Of a worker beside weights and pages."""
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
    replacements: PositiveInt = 5
    """Of all weights."""
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
    results: dict[str, Any] = {"tokens_per_s": {}, "medians_of": {}, "limit": {}, "turns_s": {}}
    ratios: dict[str, float] = {}
    with (
        bound(settings.sides.cpus) as cores,
        alone(settings.sides.model, cores) as limit,
        started(settings.sides, peer_python, cores, running=running, context_tokens=longest) as (sides, described),
    ):
        described["limit"] = limit.described
        results["weights"], ratios["replace_vs_memcpy"] = _replacement(limit, settings.replacements)
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
        results["our_share_of_peer_turns"] = our_shares(sides, settings.sides.cpus)
        ours = sides[OURS]
        assert isinstance(ours, Ours)
        results["memory"] = memory = ours.memory()
        allowed = memory["weights_bytes"] + memory["pages_bytes"] + ALLOWED_BYTES
        ratios["memory_vs_allowed"] = memory["peak_bytes"] / allowed
    return {"sides": described, **results}, ratios


def _replacement(limit: Peer, turns: int) -> tuple[dict[str, Any], float]:
    done = limit.ask("replace", turns=turns)
    seconds = {name: statistics.median(done[name]) for name in ("replace", "memcpy")}
    facts = {"kernels": done["kernels"], "bytes": done["bytes"], "medians_of": turns}
    return in_ms(seconds) | facts, seconds["replace"] / seconds["memcpy"]


def _measure(
    settings: Settings,
    workload: Workload,
    sides: Mapping[str, Side],
    limit: Peer,
    results: dict[str, Any],
    ratios: dict[str, float],
) -> None:
    case, batch = workload.name, workload.batch
    turns = {name: settings.turns_of(name, case) for name in sides}
    here = {name: side for name, side in sides.items() if turns[name]}
    steps: list[dict[str, Any]] = []
    context = workload.prompt_tokens + workload.new_tokens / 2
    measured = workload.measure(
        here,
        turns,
        warm_tokens=WARM_TOKENS,
        beside=lambda: steps.append(limit.ask("decode_step", batch=batch, context_tokens=context)),
    )
    most = batch / statistics.median(step["seconds"] for step in steps)
    speeds = rates(measured, batch * workload.new_tokens)
    results["tokens_per_s"][f"b{case}"] = {**speeds, "limit": most}
    results["medians_of"][f"b{case}"] = {name: len(seconds) for name, seconds in measured.items()}
    results["turns_s"][f"b{case}"] = {name: [round(each, 3) for each in seconds] for name, seconds in measured.items()}
    results["limit"][f"b{case}"] = {
        "step_ms": 1e3 * statistics.median(step["seconds"] for step in steps),
        "call_overhead_ms": 1e3 * statistics.median(step["call_overhead_s"] for step in steps),
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
