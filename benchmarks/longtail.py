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

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ByteSize, Field, PositiveInt, model_validator

from benchmarks.checkout import SMOLLM2, require_model
from benchmarks.measure import interleaved
from benchmarks.servegen import SERVEGEN, Lengths
from benchmarks.services import settle, started
from benchmarks.workload import Vocabulary, WrongOutputError
from rollout.client import Rollout
from rollout.config import KeepName, Section
from rollout.errors import DeadlineError
from rollout.metrics import ServiceStats
from rollout.model.spec import read_spec
from rollout.types import Delivery, SamplingParams

TIMEOUT_S = 1200.0
SIDES = ("sync", "reprefill", "auto", "divided")
WARM_TOKENS = 24
"""Longest output of the turn that does not count."""


class Settings(Section):
    model: Path = SMOLLM2
    """`make model` puts SmolLM2-135M there."""
    lengths: Path = SERVEGEN
    """Of ServeGen."""
    workers: PositiveInt = 2
    """Of each side."""
    cpus: PositiveInt = 1
    """Of each worker."""
    longest: PositiveInt = 1024
    """Tokens that the longest output of the histogram becomes."""
    groups: PositiveInt = 24
    """To collect in each round."""
    open_groups: PositiveInt = 32
    """Under way when a round begins."""
    samples: PositiveInt = 4
    """Of each group."""
    prompt_tokens: tuple[PositiveInt, PositiveInt] = (16, 48)
    """Least and most."""
    rounds: PositiveInt = 2
    """Of a turn."""
    slice_tokens: PositiveInt = 64
    """Of `divided`."""
    slice_keep: KeepName = "auto"
    """Of `divided`: where slices leave their KV."""
    max_running: PositiveInt = 32
    """Sequences in a worker's batch."""
    kv_bytes: ByteSize = ByteSize(512 << 20)
    """Of a worker's device."""
    host_bytes: ByteSize = ByteSize(256 << 20)
    """Of a worker's host tier."""
    pool_bytes: ByteSize = ByteSize(512 << 20)
    """Of each side."""
    repeats: int = Field(default=3, ge=1)
    """Turns of each side that count."""

    @model_validator(mode="after")
    def _some_are_left(self) -> "Settings":
        if self.open_groups < self.groups:
            raise ValueError(f"open_groups: got {self.open_groups}, allowed: groups ({self.groups}) or more")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A prompt and the length of each of its outputs."""

    prompt: list[int]
    lengths: list[int]


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
        warm = _draw(settings, "warm", longest=min(WARM_TOKENS, settings.longest))
        for side in sides.values():
            side.turn("warm", warm)
        turns: dict[str, list[Turn]] = {side: [] for side in SIDES}

        def take(side: str) -> float:
            turn = len(turns[side])
            turns[side].append(sides[side].turn(str(turn), _draw(settings, str(turn), longest=settings.longest)))
            return turns[side][-1].collect_s

        interleaved({side: lambda side=side: take(side) for side in SIDES}, settings.repeats, unmeasured=0)
        results: dict[str, Any] = {side: _summary(turns[side]) for side in SIDES}
        for side, service in services.items():
            decided = service.stats().decisions
            results[side]["decisions"] = {str(reason): dict(places) for reason, places in decided.items()}
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


def _draw(settings: Settings, turn: str, *, longest: int) -> list[Group]:
    """All groups of a turn, in the order in which they are submitted."""
    draw = random.Random(f"longtail {turn}")
    lengths = Lengths.read("lengths", settings.lengths, longest)
    vocabulary = Vocabulary.read(settings.model, read_spec(settings.model).vocab_size)
    count = settings.open_groups + (settings.rounds - 1) * settings.groups
    return [
        Group(
            prompt=draw.choices(vocabulary.ids, k=draw.randint(*settings.prompt_tokens)),
            lengths=lengths.draw(draw, settings.samples),
        )
        for _ in range(count)
    ]


class _Side:
    """One service, and what it is asked to do in each turn."""

    def __init__(self, settings: Settings, side: str, service: Rollout) -> None:
        self._settings = settings
        self._sync = side == "sync"
        self._service = service

    def turn(self, name: str, groups: Sequence[Group]) -> Turn:
        settings, service = self._settings, self._service
        settle(service)
        before = service.stats()
        wanted = {f"{name}-{index}": group.lengths for index, group in enumerate(groups)}
        begin, submitted, done = time.monotonic(), 0, 0
        for index in range(settings.rounds):
            under_way = settings.groups if self._sync else settings.open_groups
            upto = index * settings.groups + under_way
            self._submit(name, groups, submitted, upto)
            submitted = upto
            done += self._check(wanted, self._collect(settings.groups))
        collect_s = time.monotonic() - begin
        collected = service.stats()
        rest_begin = time.monotonic()
        self._submit(name, groups, submitted, len(groups))
        if done < len(groups):
            done += self._check(wanted, self._collect(len(groups) - done))
        all_s = collect_s + time.monotonic() - rest_begin
        settle(service)
        after = service.stats()
        assert done == len(groups), f"{done} of {len(groups)} groups"
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

    def _submit(self, name: str, groups: Sequence[Group], first: int, stop: int) -> None:
        for index, group in enumerate(groups[first:stop], first):
            sampling = [SamplingParams(max_new_tokens=length, ignore_eos=True) for length in group.lengths]
            self._service.submit([group.prompt], n=len(sampling), sampling=sampling, key=[f"{name}-{index}"])

    def _collect(self, count: int) -> Sequence[Delivery]:
        if self._sync:
            deliveries = self._service.next_groups(count, TIMEOUT_S)
        else:
            over_sample = self._settings.open_groups / self._settings.groups - 1.0
            deliveries = list(self._service.collect(count, over_sample=over_sample, timeout_s=TIMEOUT_S).groups)
        if len(deliveries) < count:
            raise DeadlineError(f"{len(deliveries)} of {count} groups within {TIMEOUT_S:g} s")
        return deliveries

    def _check(self, wanted: dict[str, list[int]], deliveries: Sequence[Delivery]) -> int:
        """How many there are. Raises `WrongOutputError` if a length is not what was asked for."""
        for delivery in deliveries:
            lengths = [len(trajectory.output_ids) for trajectory in delivery.trajectories]
            asked = wanted[str(delivery.group_id)]
            if lengths != asked:
                raise WrongOutputError(f"{delivery.group_id}: asked for {asked} tokens, and got {lengths}")
        return len(deliveries)


def _engines(stats: ServiceStats, field: str) -> float:
    return float(sum(getattr(worker.engine, field) for worker in stats.workers))
