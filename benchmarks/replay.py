"""How many worker events a controller takes in per second: a simulated service's, told to a fresh controller again.

`Recording` notes what a simulation tells its controller. Told again, it has to come to the same counts and decisions.
"""

import cProfile
import os
import pstats
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from pydantic import PositiveInt

from benchmarks.decisions import summed
from benchmarks.measure import MeasurementError
from rollout.config import AbortConfig, EngineConfig, GroupsConfig, HostConfig, ResumeConfig, Section, WeightsConfig
from rollout.control.controller import Controller
from rollout.control.fleet import Worker
from rollout.control.messages import WorkerReport, WorkerUp
from rollout.control.paces import Pace
from rollout.control.submission import Submission
from rollout.errors import RolloutError
from rollout.sim.machine import MachineRates, rising_prefill
from rollout.sim.simulation import Driver, Simulation, forced_group
from rollout.sim.worker import WEIGHTS

TOLD = frozenset({"submit", "handle", "abort", "resume", "begin_collection", "end_collection", "take", "settle_calls"})
"""Calls that are recorded, since they change a controller; no other may be made."""
PAGE_TOKENS = 16
TOP = 15
"""Functions of the profile."""

RATES = MachineRates(
    prefill_s=rising_prefill(40e-6, 2e-9, 4096),
    step=Pace(fixed_s=0.020, unit_s=50e-6),
    export=Pace(fixed_s=0.008, unit_s=0.2e-9),
    restore=Pace(fixed_s=0.004, unit_s=0.15e-9),
    save=Pace(fixed_s=0.001, unit_s=0.1e-9),
    load=Pace(fixed_s=0.001, unit_s=0.1e-9),
    latency_s=0.0007,
    slowdown=0.05,
    token_bytes=131072,
    page_tokens=PAGE_TOKENS,
    device_pages=1,
    host_pages=2048,
    pool_bytes=16 << 30,
    max_context=4096,
)
"""About a small model on one GPU; how much the device holds follows from the batch."""


class UnrecordedCallError(RolloutError):
    """A call of a controller that a replay would leave out."""


class Mix(Section):
    """The run whose events are recorded."""

    workers: PositiveInt = 4
    """Simulated workers."""
    max_running: PositiveInt = 64
    """Sequences in each worker's batch."""
    device_tokens: PositiveInt = 24576
    """KV that each worker's device holds, in tokens."""
    groups: PositiveInt = 96
    """Groups that are submitted, all at once."""
    samples: PositiveInt = 8
    """Trajectories of a group."""
    collect: PositiveInt = 24
    """Groups of each call; a third more are under way."""
    prompt_tokens: PositiveInt = 100
    """Tokens of each prompt."""
    mean_tokens: PositiveInt = 200
    """Tokens of outputs on average; lengths are distributed exponentially."""
    slice_tokens: PositiveInt = 128
    """Tokens after which a trajectory is stopped, each time."""


def measure_updates(mix: Mix, repeats: int) -> dict[str, Any]:
    """Medians of `repeats` replays, and what was told."""
    abort = AbortConfig.model_validate({"policies": [{"kind": "slice_budget", "tokens": mix.slice_tokens}]})
    rates = replace(RATES, device_pages=-(-mix.device_tokens // PAGE_TOKENS))
    simulation = Simulation(
        rates,
        workers=mix.workers,
        engine=EngineConfig(max_running=mix.max_running),
        host=HostConfig(),
        abort=abort,
    )
    recording = Recording(simulation)
    simulation.run(_drive(simulation, mix, _submissions(mix)))

    def replayed() -> tuple[float, float]:
        """Seconds of this thread, and on the wall."""
        controller = Controller(
            workers=mix.workers,
            max_context=rates.max_context,
            weights=WEIGHTS,
            abort=abort,
            resume=ResumeConfig(),
            groups=GroupsConfig(),
            versions=WeightsConfig(),
        )
        begin, cpu = time.perf_counter(), time.thread_time()
        recording.replay(controller)
        seconds = time.thread_time() - cpu, time.perf_counter() - begin
        if not recording.agrees(controller):
            raise MeasurementError("a controller that was told the same decided otherwise")
        return seconds

    replayed()
    seconds = [replayed() for _ in range(repeats)]
    profile = cProfile.Profile()
    profile.runcall(replayed)
    updates = sum(recording.kinds.values())
    return {
        "updates_per_s": updates / median(cpu for cpu, _ in seconds),
        "wall_updates_per_s": updates / median(wall for _, wall in seconds),
        "updates": updates,
        "kinds": recording.kinds,
        "calls": recording.calls,
        "decisions": summed(simulation.controller.keeping.counts),
        "profile": _top(profile),
    }


class Recording:
    """Calls of one controller in order; made in another one, they lead to the same commands."""

    def __init__(self, simulation: Simulation) -> None:
        """To be made before the simulation runs; what it told before that, that its workers are up, is told again."""
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._controller = simulation.controller
        for worker in simulation.controller._fleet.workers:
            self._note("handle", (_up(worker), 0.0), {})
        simulation.controller = _Recorder(self._controller, self._note)  # type: ignore[assignment]

    def replay(self, controller: Controller) -> None:
        for name, args, kwargs in self._calls:
            getattr(controller, name)(*args, **kwargs)

    def agrees(self, controller: Controller) -> bool:
        """Whether it counted what the first one did, and decided alike."""
        first = self._controller
        return controller.counters == first.counters and controller.keeping.counts == first.keeping.counts

    @property
    def kinds(self) -> dict[str, int]:
        """Worker events about a trajectory, by kind: each is one update."""
        return dict(Counter(type(event).__name__ for report in self._reports() for event in report.events))

    @property
    def calls(self) -> dict[str, int]:
        """What was told, by name, events of `handle` by their kind."""
        return dict(Counter(type(args[0]).__name__ if name == "handle" else name for name, args, _ in self._calls))

    def _reports(self) -> list[WorkerReport]:
        return [args[0] for name, args, _ in self._calls if name == "handle" and isinstance(args[0], WorkerReport)]

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.append((name, args, kwargs))


class _Recorder:
    """A controller that notes what it is told; what it tells of itself are properties."""

    def __init__(self, controller: Controller, note: Callable[[str, tuple[Any, ...], dict[str, Any]], None]) -> None:
        self._controller = controller
        self._note = note

    def __getattr__(self, name: str) -> Any:
        """Raises `UnrecordedCallError` for a method that is not recorded."""
        if isinstance(getattr(Controller, name), property):
            return getattr(self._controller, name)
        if name not in TOLD:
            raise UnrecordedCallError(f"got a call of {name}, recorded are: {', '.join(sorted(TOLD))}")

        def told(*args: Any, **kwargs: Any) -> Any:
            self._note(name, args, kwargs)
            return getattr(self._controller, name)(*args, **kwargs)

        return told


def _up(worker: Worker) -> WorkerUp:
    return WorkerUp(
        worker=worker.worker_id, node=worker.node, incarnation=worker.incarnation, max_running=worker.max_running
    )


def _submissions(mix: Mix) -> list[Submission]:
    draw = random.Random(0)

    def length() -> int:
        longest = RATES.max_context - mix.prompt_tokens - 1
        return min(longest, 1 + round(draw.expovariate(1 / mix.mean_tokens)))

    return [
        forced_group(
            f"g{index}",
            [draw.randrange(1 << 20) for _ in range(mix.prompt_tokens)],
            [length() for _ in range(mix.samples)],
        )
        for index in range(mix.groups)
    ]


def _drive(simulation: Simulation, mix: Mix, submissions: list[Submission]) -> Driver:
    """Collect all of it; each call begins with what the one before it left, and the last waits for what there is."""
    simulation.submit(submissions)
    done = 0
    while done < mix.groups:
        wanted = min(mix.collect, mix.groups - done)
        done += len((yield from simulation.collect(wanted, over_sample=1 / 3)))


def _top(profile: cProfile.Profile) -> list[dict[str, Any]]:
    """Functions in which most time was spent."""
    stats: Any = pstats.Stats(profile)
    rows = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:TOP]
    return [
        {"function": f"{os.path.basename(file)}:{line} {name}", "calls": calls, "own_s": round(own, 4)}
        for (file, line, name), (_, calls, own, _, _) in rows
    ]
