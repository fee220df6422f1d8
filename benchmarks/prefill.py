"""Prompts at full speed, end to end: this service against its peers, and against what the machine can do.

`prompts` prompts of `prompt_tokens` random ids are handed over at once, and one token is sampled for each, with its
log-probability. Sides, turns and timing are those of `decode`: vLLM is compiled, Hugging Face runs eagerly. No prompt
is used twice by a side, and peers have their prefix caches off. Tokens per second are prompt tokens over the whole
time.

`ratios.prefill_vs_<peer>` is ours over the peer's, by medians of as many turns as `results.medians_of` says.
`results.limit`: the matrix products alone, of all linear maps for every prompt token in pieces of `limit_rows` (the
fastest of these) and of the head for the last token of each prompt, measured in every turn. `ratios.prefill_vs_limit`
and `vllm_vs_limit` are shares of it.
"""

import statistics
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from benchmarks.alone import alone
from benchmarks.sides import OURS, Sides, bound, our_shares, started
from benchmarks.workload import Vocabulary, Workload, rates
from rollout.config import Section
from rollout.model.spec import read_spec


class Settings(Section):
    sides: Sides = Sides(name="bench-prefill")
    """What is compared, and how each is set up."""
    prompts: PositiveInt = 16
    """At once."""
    prompt_tokens: PositiveInt = 512
    """Of each prompt."""
    turns: PositiveInt = 5
    """Of each side."""
    hf_turns: PositiveInt = 2
    """Of Hugging Face."""
    limit_rows: tuple[PositiveInt, ...] = (256, 1024)
    """Tokens of one matrix product."""
    seed: int = 0
    """Of the prompts."""


def run(settings: Settings, peer_python: Path | None) -> tuple[dict[str, Any], dict[str, float]]:
    settings.sides.check()
    spec = read_spec(settings.sides.model)
    workload = Workload(
        name="prefill",
        batch=settings.prompts,
        prompt_tokens=settings.prompt_tokens,
        new_tokens=1,
        vocabulary=Vocabulary.read(settings.sides.model, spec.vocab_size),
        seed=settings.seed,
    )
    limits: list[dict[int, dict[str, Any]]] = []
    shape = {"prompts": settings.prompts, "prompt_tokens": settings.prompt_tokens}
    with (
        bound(settings.sides.cpus) as cores,
        alone(settings.sides.model, cores) as limit,
        started(
            settings.sides,
            peer_python,
            cores,
            running=settings.prompts,
            context_tokens=settings.prompt_tokens + 2,
        ) as (sides, described),
    ):
        described["limit"] = limit.described
        turns = {name: settings.hf_turns if name.startswith("hf") else settings.turns for name in sides}
        measured = workload.measure(
            sides,
            turns,
            warm_tokens=1,
            beside=lambda: limits.append(
                {rows: limit.ask("prefill", rows=rows, **shape) for rows in settings.limit_rows}
            ),
        )
        shares = our_shares(sides, settings.sides.cpus)
    tokens = settings.prompts * settings.prompt_tokens
    least = {rows: statistics.median(each[rows]["seconds"] for each in limits) for rows in settings.limit_rows}
    speeds = rates(measured, tokens)
    most = tokens / min(least.values())
    results = {
        "sides": described,
        "tokens_per_s": {**speeds, "limit": most},
        "limit": {
            f"rows_{rows}": {
                "call_overhead_ms": 1e3 * statistics.median(each[rows]["call_overhead_s"] for each in limits),
                **{
                    f"{name}_tokens_per_s": tokens / statistics.median(each[rows]["gemm_s"][name] for each in limits)
                    for name in limits[0][rows]["gemm_s"]
                },
            }
            for rows in settings.limit_rows
        },
        "our_share_of_peer_turns": shares,
        "medians_of": {name: len(seconds) for name, seconds in measured.items()},
        "turns_s": {name: [round(each, 3) for each in seconds] for name, seconds in measured.items()},
    }
    ratios = {f"prefill_vs_{name}": speeds[OURS] / speed for name, speed in speeds.items() if name != OURS}
    ratios["prefill_vs_limit"] = speeds[OURS] / most
    if "vllm" in speeds:
        ratios["vllm_vs_limit"] = speeds["vllm"] / most
    return results, ratios
