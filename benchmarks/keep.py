"""Whether the cost model keeps KV where it costs least: against every fixed `keep`, in virtual time and then for real.

This machine's rates are measured first (`calibration`). With them the simulator runs three workloads with the product's
own controller, scheduler and cache: `short` outputs that are stopped often; `longtail`, lengths as `longtail` has them,
in slices, collected by a quota; and `starved`, a device that holds much less than what wants to run, with the policy
`memory`. What a side costs is the virtual time that it takes for the same work: `turns` turns, each to the end of all
its trajectories, after one that does not count, in which `auto` meets places it never measured, as always.
`results.simulated.<workload>` has the seconds of `auto` and of each place with `keep` fixed, means over `seeds`, each
the same work for all, and where `auto` put what; `ratios.regret_<workload>` is the time of `auto` over that of the best
fixed `keep`.

Then the fixed `keep` that was best there is compared with `auto` on two real services that are there for all of it
(`services`): `pairs` pairs of one turn each, whose order alternates. `ratios.real_<workload>` is the median of `auto`'s
seconds over the other's; `results.real.<workload>` has that of all pairs, and the interval in which the median is with
95 % (bootstrapped).
"""

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt

from benchmarks.calibration import Calibration, calibrate
from benchmarks.checkout import SMOLLM2, require_model
from benchmarks.measure import percentile
from benchmarks.servegen import SERVEGEN, Lengths
from benchmarks.services import settle, started
from benchmarks.workload import Vocabulary, WrongOutputError
from rollout.client import Rollout
from rollout.config import AbortConfig, EngineConfig, HostConfig, Section
from rollout.errors import DeadlineError
from rollout.model.spec import read_spec
from rollout.sim.machine import MachineRates
from rollout.sim.outcome import Outcome
from rollout.sim.simulation import Driver, Simulation, forced_group
from rollout.types import Delivery, Keep, SamplingParams

FIXED = (Keep.DEVICE, Keep.HOST, Keep.POOL, Keep.NONE)
TIMEOUT_S = 600.0
RESAMPLED = 10_000


class Shape(Section):
    """Of a workload."""

    rounds: PositiveInt = 1
    """Of a turn."""
    groups: PositiveInt
    """That are finished in each round; at the end of a turn all are."""
    over: int = Field(default=0, ge=0)
    """Groups more that are under way; then a round stops and holds what it leaves."""
    samples: PositiveInt = 4
    prompt_tokens: tuple[PositiveInt, PositiveInt]
    """Least and most."""
    output_tokens: tuple[PositiveInt, PositiveInt] | None = None
    """Least and most; null: as ServeGen has them."""
    longest: PositiveInt = 256
    """Of ServeGen's."""
    slice_tokens: PositiveInt | None = None
    free_share: float | None = None
    """Of the policy `memory`; null: there is none."""
    max_running: PositiveInt = 16
    """Of each worker."""
    device_tokens: PositiveInt = 16384
    """KV that each worker's device holds."""
    host_tokens: PositiveInt = 8192
    """And its host memory."""
    pool_tokens: PositiveInt = 16384

    @property
    def policies(self) -> list[dict[str, Any]]:
        policies: list[dict[str, Any]] = []
        if self.slice_tokens is not None:
            policies.append({"kind": "slice_budget", "tokens": self.slice_tokens})
        if self.free_share is not None:
            policies.append({"kind": "memory", "free_share": self.free_share})
        return policies


SHORT = Shape(groups=24, prompt_tokens=(24, 48), output_tokens=(24, 40), slice_tokens=8)
LONGTAIL = Shape(rounds=3, groups=9, over=3, prompt_tokens=(16, 48), slice_tokens=32)
STARVED = Shape(
    groups=12,
    samples=2,
    prompt_tokens=(160, 256),
    output_tokens=(48, 96),
    slice_tokens=32,
    free_share=0.1,
    max_running=8,
    device_tokens=1280,
    host_tokens=4096,
)
Name = Literal["short", "longtail", "starved"]


class Settings(Section):
    model: Path = SMOLLM2
    """`make model` puts SmolLM2-135M there."""
    lengths: Path = SERVEGEN
    """Of ServeGen."""
    workers: PositiveInt = 2
    """Of each side."""
    cpus: PositiveInt = 1
    """Of each worker."""
    workloads: tuple[Name, ...] = ("short", "longtail", "starved")
    """Which."""
    short: Shape = SHORT
    """Short outputs that are stopped often."""
    longtail: Shape = LONGTAIL
    """ServeGen's lengths, in slices, collected by a quota."""
    starved: Shape = STARVED
    """A device that holds much less than what wants to run."""
    calibration: Calibration = Calibration()
    """How the rates are measured."""
    turns: PositiveInt = 3
    """That count, of each simulation."""
    seeds: PositiveInt = 8
    """Simulations of each side."""
    pairs: int = Field(default=7, ge=0)
    """Of real turns; 0: no workload is run for real."""

    def shape(self, name: Name) -> Shape:
        return {"short": self.short, "longtail": self.longtail, "starved": self.starved}[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A prompt and the length of each of its outputs."""

    key: str
    prompt: list[int]
    lengths: list[int]


def run(settings: Settings) -> tuple[dict[str, Any], dict[str, float]]:
    require_model("model", settings.model)
    Lengths.read("lengths", settings.lengths, 1)
    rates, described = calibrate(settings.calibration, settings.model, settings.cpus)
    results: dict[str, Any] = {"rates": described, "simulated": {}, "real": {}}
    ratios: dict[str, float] = {}
    best: dict[Name, Keep] = {}
    for name in settings.workloads:
        simulated, best[name] = simulate_all(settings, name, rates)
        results["simulated"][name] = simulated
        ratios[f"regret_{name}"] = simulated["regret"]
    for name in settings.workloads if settings.pairs else ():
        results["real"][name] = _pairs(settings, name, best[name])
        ratios[f"real_{name}"] = results["real"][name]["median_ratio"]
    return results, ratios


# Workloads --------------------------------------------------------------------------------------------


class Draw:
    """Groups of one workload."""

    def __init__(self, settings: Settings, name: Name) -> None:
        self._name = name
        self._shape = shape = settings.shape(name)
        self._ids = Vocabulary.read(settings.model, read_spec(settings.model).vocab_size).ids
        drawn = shape.output_tokens is None
        self._lengths = Lengths.read("lengths", settings.lengths, shape.longest) if drawn else None

    def turn(self, turn: str) -> list[Group]:
        """All groups of a turn, in the order in which they are submitted."""
        shape, draw = self._shape, random.Random(f"{self._name} {turn}")
        return [
            Group(
                key=f"{turn}-{index}",
                prompt=draw.choices(self._ids, k=draw.randint(*shape.prompt_tokens)),
                lengths=self._draw_lengths(draw),
            )
            for index in range(shape.rounds * shape.groups + shape.over)
        ]

    def _draw_lengths(self, draw: random.Random) -> list[int]:
        shape = self._shape
        if self._lengths is not None:
            return self._lengths.draw(draw, shape.samples)
        assert shape.output_tokens is not None
        return [draw.randint(*shape.output_tokens) for _ in range(shape.samples)]


def _rounds(shape: Shape, groups: Sequence[Group]) -> Iterator[tuple[Sequence[Group], int]]:
    """What to submit, and how many groups to wait for then."""
    submitted = 0
    for index in range(shape.rounds):
        upto = (index + 1) * shape.groups + shape.over
        yield groups[submitted:upto], shape.groups
        submitted = upto
    if shape.over:
        yield (), shape.over


# In virtual time --------------------------------------------------------------------------------------


def simulate_all(settings: Settings, name: Name, rates: MachineRates) -> tuple[dict[str, Any], Keep]:
    """What each side costs, and the best fixed one."""
    draw, count = Draw(settings, name), 1 + settings.turns
    work = [[draw.turn(f"{seed}-{turn}") for turn in range(count)] for seed in range(settings.seeds)]
    outcomes = {keep: [simulate(settings, name, rates, keep, turns) for turns in work] for keep in (Keep.AUTO, *FIXED)}
    costs = {keep: statistics.fmean(each.seconds for each in of) for keep, of in outcomes.items()}
    best = min(FIXED, key=lambda keep: costs[keep])
    pairs = zip(outcomes[Keep.AUTO], outcomes[best], strict=True)
    ours = outcomes[Keep.AUTO]
    return {
        **{f"{keep}_s": seconds for keep, seconds in costs.items()},
        "best": str(best),
        "regret": costs[Keep.AUTO] / costs[best],
        "regrets": [round(auto.seconds / fixed.seconds, 4) for auto, fixed in pairs],
        "decisions": _places(ours),
        "recomputed_tokens": {
            str(keep): sum(each.counters.recomputed_tokens for each in of) for keep, of in outcomes.items()
        },
        "preemptions": {str(keep): sum(each.counters.preemptions for each in of) for keep, of in outcomes.items()},
        "suspensions": sum(each.counters.suspensions for each in ours),
        "tokens": sum(each.tokens for each in ours),
    }, best


def simulate(
    settings: Settings, name: Name, rates: MachineRates, keep: Keep, turns: Sequence[Sequence[Group]]
) -> Outcome:
    """All turns but the first."""
    shape = settings.shape(name)
    sized = replace(
        rates,
        device_pages=-(-shape.device_tokens // rates.page_tokens),
        host_pages=-(-shape.host_tokens // rates.page_tokens),
        pool_bytes=shape.pool_tokens * rates.token_bytes,
    )
    simulation = Simulation(
        sized,
        workers=settings.workers,
        engine=EngineConfig(max_running=shape.max_running),
        host=HostConfig(),
        abort=AbortConfig.model_validate({"keep": keep, "policies": shape.policies}),
    )
    warm: list[Outcome] = []

    def drive() -> Driver:
        for index, turn in enumerate(turns):
            if index == 1:
                warm.append(simulation.outcome())
            for fresh, wanted in _rounds(shape, turn):
                if fresh:
                    simulation.submit([forced_group(each.key, each.prompt, each.lengths) for each in fresh])
                yield from simulation.collect(wanted, over_sample=shape.over / shape.groups)

    return simulation.run(drive()).since(warm[0])


def _places(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """Decisions of all of them."""
    places: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        for reason, counts in outcome.decisions.items():
            of = places.setdefault(str(reason), {})
            for keep, count in counts.items():
                of[str(keep)] = of.get(str(keep), 0) + count
    return places


# For real ---------------------------------------------------------------------------------------------


def _pairs(settings: Settings, name: Name, fixed: Keep) -> dict[str, Any]:
    shape, draw = settings.shape(name), Draw(settings, name)
    sides = {"auto": Keep.AUTO, "fixed": fixed}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    with started({side: _config(settings, name, keep) for side, keep in sides.items()}) as services:
        for turn in range(1 + settings.pairs):
            groups = draw.turn(f"real-{turn}")
            for side in list(sides) if turn % 2 else reversed(sides):
                took = _turn(services[side], shape, groups)
                if turn:
                    seconds[side].append(took)
        decisions = {
            str(reason): {str(keep): count for keep, count in places.items()}
            for reason, places in services["auto"].stats().decisions.items()
        }
    pairs = [ours / theirs for ours, theirs in zip(seconds["auto"], seconds["fixed"], strict=True)]
    low, high = median_interval(pairs)
    return {
        "fixed": str(fixed),
        "median_ratio": statistics.median(pairs),
        "low_95": low,
        "high_95": high,
        "pairs": [round(pair, 4) for pair in pairs],
        **{f"{side}_s": statistics.median(each) for side, each in seconds.items()},
        "longest_s": max(max(each) for each in seconds.values()),
        "decisions": decisions,
    }


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """In which 95 % of the medians of samples from `values` are."""
    draw = random.Random(0)
    medians = [statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLED)]
    return percentile(medians, 2.5), percentile(medians, 97.5)


def _config(settings: Settings, name: Name, keep: Keep) -> dict[str, Any]:
    shape, spec = settings.shape(name), read_spec(settings.model)
    token_bytes = 2 * spec.layers * spec.kv_heads * spec.head_dim * 2
    return {
        "model": {"path": str(settings.model)},
        "engine": {"max_running": shape.max_running, "kv_bytes": shape.device_tokens * token_bytes},
        "host": {"bytes": shape.host_tokens * token_bytes},
        "cluster": {
            "name": f"bench-keep-{name}",
            "workers": settings.workers,
            "cpus_per_worker": settings.cpus,
        },
        "pool": {"budget_bytes": shape.pool_tokens * token_bytes},
        "abort": {"keep": str(keep), "policies": shape.policies},
    }


def _turn(service: Rollout, shape: Shape, groups: Sequence[Group]) -> float:
    """Seconds until all of it is done. Raises `WrongOutputError`."""
    settle(service)
    asked = {group.key: group.lengths for group in groups}
    done: list[Delivery] = []
    begin = time.monotonic()
    for fresh, wanted in _rounds(shape, groups):
        for group in fresh:
            sampling = [SamplingParams(max_new_tokens=length, ignore_eos=True) for length in group.lengths]
            service.submit([group.prompt], n=len(sampling), sampling=sampling, key=[group.key])
        collected = service.collect(wanted, over_sample=shape.over / shape.groups, timeout_s=TIMEOUT_S)
        if len(collected.groups) < wanted:
            raise DeadlineError(f"{len(collected.groups)} of {wanted} groups within {TIMEOUT_S:g} s")
        done += collected.groups
    seconds = time.monotonic() - begin
    got = {str(delivery.group_id): [len(each.output_ids) for each in delivery.trajectories] for delivery in done}
    if got != asked:
        raise WrongOutputError(f"asked for outputs of {asked} tokens, and got {got}")
    return seconds
