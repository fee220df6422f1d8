"""Small machines for the simulator, in round numbers, and drivers for them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rollout.config import AbortConfig
from rollout.control.paces import Pace
from rollout.control.submission import Submission
from rollout.sim.machine import MachineRates
from rollout.sim.simulation import Driver, Simulation, forced_group
from rollout.types import Trajectory

RATES = MachineRates(
    prefill_s=(0.001,),
    step=Pace(fixed_s=0.020, unit_s=0.001),
    export=Pace(fixed_s=0.005, unit_s=1e-6),
    restore=Pace(fixed_s=0.003, unit_s=1e-6),
    save=Pace(fixed_s=0.002, unit_s=1e-6),
    load=Pace(fixed_s=0.002, unit_s=1e-6),
    latency_s=0.0005,
    token_bytes=100,
    page_tokens=4,
    device_pages=400,
    host_pages=400,
    pool_bytes=1 << 20,
    max_context=400,
)


def rates(**changes: Any) -> MachineRates:
    return replace(RATES, **changes)


def keeping(keep: str, *, slice_tokens: int | None = None) -> AbortConfig:
    """Whatever stops keeps its KV there."""
    policies = [{"kind": "slice_budget", "tokens": slice_tokens}] if slice_tokens else []
    return AbortConfig.model_validate({"keep": keep, "policies": policies})


def workload(groups: int, n: int, *, prompt: int, lengths: tuple[int, int], seed: int = 0) -> list[Submission]:
    """Groups of `n` random prompts, and lengths drawn from `lengths` (both included)."""
    draw = random.Random(seed)
    return [
        forced_group(
            f"g{index}", [draw.randrange(1 << 20) for _ in range(prompt)], [draw.randint(*lengths) for _ in range(n)]
        )
        for index in range(groups)
    ]


def collect_all(simulation: Simulation, submissions: Sequence[Submission], into: list[Trajectory]) -> Driver:
    """Submit, and wait for all of it."""
    simulation.submit(submissions)
    yield lambda: simulation.controller.complete_groups >= len(submissions)
    into += [each for delivery in simulation.take(len(submissions)) for each in delivery.trajectories]


def phases(simulation: Simulation, *names: str) -> Callable[[], bool]:
    """Whether all trajectories are in one of these phases."""
    return lambda: {str(phase) for phase, count in simulation.controller.phases.items() if count} <= set(names)
