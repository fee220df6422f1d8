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

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt

from benchmarks.calibration import Calibration, calibrate
from benchmarks.checkout import SMOLLM2, require_model
from benchmarks.decisions import summed
from benchmarks.forced import Drawing, Group, Order
from benchmarks.measure import interleaved, percentile
from benchmarks.servegen import SERVEGEN, Lengths
from benchmarks.services import settle, started
from benchmarks.workload import Vocabulary
from rollout.client import Rollout
from rollout.config import AbortConfig, EngineConfig, HostConfig, Section
from rollout.model.spec import read_spec
from rollout.sim.machine import MachineRates
from rollout.sim.outcome import Outcome
from rollout.sim.simulation import Driver, Simulation, forced_group
from rollout.types import Keep

FIXED = (Keep.DEVICE, Keep.HOST, Keep.POOL, Keep.NONE)
TIMEOUT_S = 600.0
RESAMPLED = 10_000


class Shape(Section):
    """What a workload asks for, and what each worker has for it."""

    rounds: PositiveInt = 1
    """Rounds of a turn."""
    groups: PositiveInt
    """Groups that are finished in each round; at the end of a turn all are."""
    over: int = Field(default=0, ge=0)
    """Groups more that are under way; then a round stops and holds what it leaves."""
    samples: PositiveInt = 4
    """Trajectories of a group."""
    prompt_tokens: tuple[PositiveInt, PositiveInt]
    """Least and most tokens of a prompt."""
    output_tokens: tuple[PositiveInt, PositiveInt] | None = None
    """Least and most tokens of an output; null: as ServeGen has them."""
    longest: PositiveInt = 256
    """Tokens that ServeGen's longest output is scaled to."""
    slice_tokens: PositiveInt | None = None
    """Tokens after which a trajectory is stopped, each time; null: there are no slices."""
    free_share: float | None = None
    """Share of the device that the policy `memory` keeps free; null: there is none."""
    max_running: PositiveInt = 16
    """Sequences in each worker's batch."""
    device_tokens: PositiveInt = 16384
    """KV that each worker's device holds, in tokens."""
    host_tokens: PositiveInt = 8192
    """KV that each worker's host memory holds, in tokens."""
    pool_tokens: PositiveInt = 16384
    """KV that the pool holds, for all workers together, in tokens."""

    @property
    def submitted(self) -> int:
        """Groups of a turn."""
        return self.rounds * self.groups + self.over

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
    """ServeGen histogram to draw lengths from."""
    workers: PositiveInt = 2
    """Workers of each side."""
    cpus: PositiveInt = 1
    """Cores of each worker."""
    workloads: tuple[Name, ...] = ("short", "longtail", "starved")
    """Workloads to run."""
    short: Shape = SHORT
    """Short outputs that are stopped often."""
    longtail: Shape = LONGTAIL
    """ServeGen's lengths, in slices, collected by a quota."""
    starved: Shape = STARVED
    """A device that holds much less than what wants to run."""
    calibration: Calibration = Calibration()
    """How the rates are measured."""
    turns: PositiveInt = 3
    """Measured turns of each simulation, after one warm-up turn."""
    seeds: PositiveInt = 8
    """Simulations of each side."""
    pairs: int = Field(default=7, ge=0)
    """Pairs of real turns; 0: no workload is run for real."""

    def shape(self, name: Name) -> Shape:
        return {"short": self.short, "longtail": self.longtail, "starved": self.starved}[name]


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


def drawing(settings: Settings, name: Name) -> Drawing:
    shape = settings.shape(name)
    lengths = shape.output_tokens or Lengths.read("lengths", settings.lengths, shape.longest)
    return Drawing(
        name=name,
        ids=Vocabulary.read(settings.model, read_spec(settings.model).vocab_size).ids,
        prompt_tokens=shape.prompt_tokens,
        samples=shape.samples,
        output_tokens=lengths,
    )


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
    drawn, submitted = drawing(settings, name), settings.shape(name).submitted
    turns = range(1 + settings.turns)
    work = [[drawn.groups(f"{seed}-{turn}", submitted) for turn in turns] for seed in range(settings.seeds)]
    outcomes = {keep: [simulate(settings, name, rates, keep, each) for each in work] for keep in (Keep.AUTO, *FIXED)}
    costs = {keep: statistics.fmean(each.seconds for each in of) for keep, of in outcomes.items()}
    best = min(FIXED, key=lambda keep: costs[keep])
    pairs = zip(outcomes[Keep.AUTO], outcomes[best], strict=True)
    ours = outcomes[Keep.AUTO]
    return {
        **{f"{keep}_s": seconds for keep, seconds in costs.items()},
        "best": str(best),
        "regret": costs[Keep.AUTO] / costs[best],
        "regrets": [round(auto.seconds / fixed.seconds, 4) for auto, fixed in pairs],
        "decisions": summed(*(each.decisions for each in ours)),
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


# For real ---------------------------------------------------------------------------------------------


def _pairs(settings: Settings, name: Name, fixed: Keep) -> dict[str, Any]:
    shape, drawn = settings.shape(name), drawing(settings, name)
    keeps = {"auto": Keep.AUTO, "fixed": fixed}

    def turns(service: Rollout) -> Callable[[], float]:
        """The next one, each time."""
        numbers = itertools.count()
        return lambda: _turn(service, shape, drawn.groups(f"real-{next(numbers)}", shape.submitted))

    with started({side: _config(settings, name, keep) for side, keep in keeps.items()}) as services:
        seconds = interleaved({side: turns(service) for side, service in services.items()}, settings.pairs)
        decisions = summed(services["auto"].stats().decisions)
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
    """Seconds until all of it is done. Raises `DeadlineError` or `WrongOutputError`."""
    settle(service)
    order = Order(service, TIMEOUT_S)
    begin = time.monotonic()
    for fresh, wanted in _rounds(shape, groups):
        order.submit(fresh)
        order.collect(wanted, over_sample=shape.over / shape.groups)
    return time.monotonic() - begin
