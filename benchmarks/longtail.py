"""Batches whose lengths have a long tail: waited for, or stopped when most groups are complete, in three ways.

Each trajectory is made to have its length: drawn from ServeGen's histogram of a reasoning model's outputs
(`servegen`), all of which is scaled by one factor so that its longest, 16,384 tokens, is `longest`. That makes 115
tokens on average, and half of them 89 or fewer. Prompts are random ids of a few lengths; groups have `samples`.

In each of `rounds` a side is to collect `groups` groups. `sync` submits as many and waits for all of them. The others
always have `open_groups` under way: what the last round left, and fresh ones. As soon as `groups` are complete, all
else is stopped and held for the next round: by `reprefill` with keep none, so that it is prefilled again; by `auto`
where the cost model says; and by `divided` likewise, which also stops each trajectory every `slice_tokens` tokens to go
on wherever there is most room. After the last round the rest is completed, so that all that was stopped resumes.

All sides are services of their own, started before, that take turns; a turn has the same prompts and lengths for all.
Of each: `collect_s` is the rounds together, and `all_s` also the rest (of `sync`, too, so that it is the same work for
all); the others are sums over the whole turn: `recomputed_tokens` had KV once; `written_bytes` and `read_bytes` are
KV that suspended trajectories moved; `useful_reload` is what was read of what was written; `idle_share` is workers'
time outside of steps, and `batch` how many sequences a step had that decoded. Medians of `repeats` turns; a first,
short one does not count.

`ratios.recompute_<side>` is tokens that were computed again, over those of `reprefill`; `ratios.time_<a>_vs_<b>` is of
`collect_s`.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ByteSize, Field, PositiveInt, model_validator

from benchmarks.checkout import SMOLLM2, require_model
from benchmarks.decisions import summed
from benchmarks.forced import Drawing, Group, Order
from benchmarks.measure import interleaved
from benchmarks.servegen import SERVEGEN, Lengths
from benchmarks.services import settle, started
from benchmarks.workload import Vocabulary
from rollout.client import Rollout
from rollout.config import KeepName, Section
from rollout.metrics import ServiceStats
from rollout.model.spec import read_spec

TIMEOUT_S = 1200.0
SIDES = ("sync", "reprefill", "auto", "divided")
WARM_TOKENS = 24
"""Longest output of the turn that does not count."""


class Settings(Section):
    model: Path = SMOLLM2
    """`make model` puts SmolLM2-135M there."""
    lengths: Path = SERVEGEN
    """ServeGen histogram to draw lengths from."""
    workers: PositiveInt = 2
    """Workers of each side."""
    cpus: PositiveInt = 1
    """Cores of each worker."""
    longest: PositiveInt = 1024
    """Tokens that the longest output of the histogram becomes."""
    groups: PositiveInt = 24
    """Groups to collect in each round."""
    open_groups: PositiveInt = 32
    """Groups under way when a round begins."""
    samples: PositiveInt = 4
    """Trajectories of each group."""
    prompt_tokens: tuple[PositiveInt, PositiveInt] = (16, 48)
    """Least and most tokens of a prompt."""
    rounds: PositiveInt = 2
    """Rounds of a turn."""
    slice_tokens: PositiveInt = 64
    """Tokens after which `divided` stops a trajectory, each time."""
    slice_keep: KeepName = "auto"
    """Where slices of `divided` leave their KV."""
    max_running: PositiveInt = 32
    """Sequences in a worker's batch."""
    kv_bytes: ByteSize = ByteSize(512 << 20)
    """KV that a worker's device holds."""
    host_bytes: ByteSize = ByteSize(256 << 20)
    """KV that a worker's host memory holds."""
    pool_bytes: ByteSize = ByteSize(512 << 20)
    """KV that the pool of each side holds."""
    repeats: int = Field(default=3, ge=1)
    """Turns of each side that count."""

    @model_validator(mode="after")
    def _some_are_left(self) -> "Settings":
        if self.open_groups < self.groups:
            raise ValueError(f"open_groups: got {self.open_groups}, allowed: groups ({self.groups}) or more")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one side did."""

    collect_s: float
    all_s: float
    tokens_per_s: float
    """In the rounds."""
    all_tokens_per_s: float
    recomputed_tokens: int
    written_bytes: int
    read_bytes: int
    useful_reload: float | None
    idle_share: float
    """In the rounds."""
    batch: float
    """In the rounds."""
    suspensions: int
    resumed_elsewhere: int


def run(settings: Settings) -> tuple[dict[str, Any], dict[str, float]]:
    require_model("model", settings.model)
    Lengths.read("lengths", settings.lengths, settings.longest)
    with started({side: _config(settings, side) for side in SIDES}) as services:
        sides = {side: _Side(settings, side, service) for side, service in services.items()}
        count = settings.open_groups + (settings.rounds - 1) * settings.groups
        warm = _drawing(settings, min(WARM_TOKENS, settings.longest)).groups("warm", count)
        for each in sides.values():
            each.turn(warm)
        drawing = _drawing(settings, settings.longest)
        turns: dict[str, list[Turn]] = {side: [] for side in SIDES}

        def next_turn(side: str) -> Callable[[], float]:
            def take() -> float:
                turns[side].append(sides[side].turn(drawing.groups(str(len(turns[side])), count)))
                return turns[side][-1].collect_s

            return take

        interleaved({side: next_turn(side) for side in SIDES}, settings.repeats, unmeasured=0)
        results: dict[str, Any] = {side: _summary(turns[side]) for side in SIDES}
        for side, service in services.items():
            results[side]["decisions"] = summed(service.stats().decisions)
    return results, _ratios(results)


def _summary(turns: Sequence[Turn]) -> dict[str, Any]:
    rows = [asdict(turn) for turn in turns]
    summary: dict[str, Any] = {}
    for name in rows[0]:
        values = [row[name] for row in rows if row[name] is not None]
        summary[name] = statistics.median(values) if values else None
    summary["all_collect_s"] = [round(turn.collect_s, 3) for turn in turns]
    return summary


def _ratios(results: dict[str, Any]) -> dict[str, float]:
    again = max(1, results["reprefill"]["recomputed_tokens"])
    ratios = {f"recompute_{side}": results[side]["recomputed_tokens"] / again for side in ("auto", "divided")}
    for side, other in (("auto", "sync"), ("divided", "sync"), ("auto", "reprefill")):
        ratios[f"time_{side}_vs_{other}"] = results[side]["collect_s"] / results[other]["collect_s"]
    return ratios


def _config(settings: Settings, side: str) -> dict[str, Any]:
    policies: list[dict[str, Any]] = []
    if side == "reprefill":
        policies = [{"kind": "quota", "keep": "none"}]
    elif side == "divided":
        policies = [{"kind": "slice_budget", "tokens": settings.slice_tokens, "keep": settings.slice_keep}]
    return {
        "model": {"path": str(settings.model)},
        "engine": {"max_running": settings.max_running, "kv_bytes": int(settings.kv_bytes)},
        "host": {"bytes": int(settings.host_bytes)},
        "cluster": {"name": "bench-longtail", "workers": settings.workers, "cpus_per_worker": settings.cpus},
        "pool": {"budget_bytes": int(settings.pool_bytes)},
        "abort": {"policies": policies},
        "resume": {"prefer": "most_room" if side == "divided" else "cheapest"},
    }


def _drawing(settings: Settings, longest: int) -> Drawing:
    return Drawing(
        name="longtail",
        ids=Vocabulary.read(settings.model, read_spec(settings.model).vocab_size).ids,
        prompt_tokens=settings.prompt_tokens,
        samples=settings.samples,
        output_tokens=Lengths.read("lengths", settings.lengths, longest),
    )


class _Side:
    """One service, and what it is asked to do in each turn."""

    def __init__(self, settings: Settings, side: str, service: Rollout) -> None:
        self._settings = settings
        self._sync = side == "sync"
        self._service = service

    def turn(self, groups: Sequence[Group]) -> Turn:
        settings, service = self._settings, self._service
        settle(service)
        before = service.stats()
        order = Order(service, TIMEOUT_S)
        begin, submitted = time.monotonic(), 0
        for index in range(settings.rounds):
            under_way = settings.groups if self._sync else settings.open_groups
            upto = index * settings.groups + under_way
            order.submit(groups[submitted:upto])
            submitted = upto
            self._collect(order, settings.groups)
        collect_s = time.monotonic() - begin
        collected = service.stats()
        rest_begin = time.monotonic()
        order.submit(groups[submitted:])
        if order.missing:
            self._collect(order, order.missing)
        all_s = collect_s + time.monotonic() - rest_begin
        settle(service)
        after = service.stats()
        counted = {
            field: getattr(after.counters, field) - getattr(before.counters, field)
            for field in (
                "tokens",
                "recomputed_tokens",
                "written_bytes",
                "read_bytes",
                "suspensions",
                "resumed_elsewhere",
            )
        }
        all_tokens = counted.pop("tokens")
        written = counted["written_bytes"]
        steps = _engines(collected, "steps") - _engines(before, "steps")
        return Turn(
            collect_s=collect_s,
            all_s=all_s,
            tokens_per_s=(collected.counters.tokens - before.counters.tokens) / collect_s,
            all_tokens_per_s=all_tokens / all_s,
            useful_reload=counted["read_bytes"] / written if written else None,
            idle_share=1.0
            - (_engines(collected, "busy_s") - _engines(before, "busy_s")) / collect_s / settings.workers,
            batch=(_engines(collected, "decoded_tokens") - _engines(before, "decoded_tokens")) / max(1.0, steps),
            **counted,
        )

    def _collect(self, order: Order, count: int) -> None:
        if self._sync:
            order.wait(count)
        else:
            order.collect(count, over_sample=self._settings.open_groups / self._settings.groups - 1.0)


def _engines(stats: ServiceStats, field: str) -> float:
    return float(sum(getattr(worker.engine, field) for worker in stats.workers))
