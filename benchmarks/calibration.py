"""What this machine takes, measured on a real service of one worker, for a simulator of it (`sim.machine`).

Exports and restores are timed on the processes' common clock (`moves`), of several sizes, while nothing else runs: from
the pool's call until it has the object, and from the request to read it until all bytes are in place. Prefill, decode
steps, copies between device and host and what moving costs decoding are what the worker measured of itself meanwhile
(`WorkerFacts`), as on any service; what KV that is read adds to a step is a batch of long contexts against a short one.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, PositiveInt

from benchmarks.measure import MeasurementError
from benchmarks.moves import POLL_S, TIMEOUT_S, Scene
from rollout.config import Section
from rollout.control.paces import Pace
from rollout.errors import DeadlineError
from rollout.model.spec import read_spec
from rollout.sim.machine import MachineRates

EXPORT = ("gather", "checksum", "rest_of_export", "store")
RESTORE = ("open", "verify_and_scatter")
"""Phases of a move (`moves`) that a machine's rates are of; the others are calls and the engine's steps."""

GROWS = 4096
"""Tokens that a trajectory, none of which ends, may have sampled by the time it was measured."""


class Calibration(Section):
    sizes: tuple[PositiveInt, ...] = Field(default=(96, 384, 1024), min_length=2)
    """Tokens of the trajectories that are moved."""
    moves: PositiveInt = 4
    """Moves of each size and kind; the first does not count."""
    batches: tuple[PositiveInt, ...] = Field(default=(2, 4, 8, 16), min_length=1)
    """Sequences that decode at the same time."""
    steps: PositiveInt = 24
    """Decode steps of each batch."""


def calibrate(settings: Calibration, model: Path, cpus: int) -> tuple[MachineRates, dict[str, Any]]:
    """Rates, without the sizes of anything, and what they were made of."""
    spec = read_spec(model)
    token_bytes = 2 * spec.layers * spec.kv_heads * spec.head_dim * 2
    most = 2 * max(settings.sizes) + GROWS + (max(settings.batches) + 2) * (min(settings.sizes) + GROWS // 4)
    config = {
        "model": {"path": str(model)},
        "engine": {"max_running": max(settings.batches) + 2, "kv_bytes": most * token_bytes},
        "host": {"bytes": most * token_bytes},
        "cluster": {"name": "bench-calibration", "cpus_per_worker": cpus},
        "pool": {"budget_bytes": (2 * max(settings.sizes) + GROWS) * token_bytes},
    }
    moved: dict[str, list[tuple[int, float]]] = {"export": [], "restore": []}
    commands: list[float] = []
    with Scene(config) as scene:
        for seed, tokens in enumerate(settings.sizes):
            trajectory = scene.begin(tokens, seed=seed)
            for turn in range(settings.moves):
                scene.forget(trajectory)
                out, back = scene.export(trajectory), scene.restore(trajectory)
                if turn:
                    moved["export"].append((out.nbytes, sum(out.phases[phase] for phase in EXPORT)))
                    moved["restore"].append((back.nbytes, sum(back.phases[phase] for phase in RESTORE)))
                    commands.append(out.phases["command"])
                scene.client.abort([trajectory], keep="host", then="hold", timeout_s=TIMEOUT_S)
                scene.resume(trajectory, 1)
            scene.client.abort([trajectory], keep="none", then="finish", timeout_s=TIMEOUT_S)
        steps = _steps(scene, settings)
        facts = scene.facts()
    paces = {name: fit(each) for name, each in moved.items()}
    step, kv_token_s = steps
    longest = (max(settings.sizes) - 1).bit_length()
    prefill = tuple(facts.prefill.seconds(1 << i, (1 << i) + 1) for i in range(longest))
    if not all(prefill):
        raise MeasurementError(f"the worker did not measure prefill of all sizes: {facts.prefill}")
    page_tokens = scene.client.config.engine.page_tokens or 16
    rates = MachineRates(
        prefill_s=prefill,
        step=step,
        kv_token_s=kv_token_s,
        export=paces["export"],
        restore=paces["restore"],
        save=_known(facts.save, "save"),
        load=_known(facts.load, "load"),
        latency_s=statistics.median(commands) / 2,  # from the driver to the controller, and from there to the worker
        slowdown=min(0.95, max(0.0, facts.moving_share or 0.0)),
        token_bytes=token_bytes,
        page_tokens=page_tokens,
        device_pages=1,
        pool_bytes=1,
        max_context=spec.max_context_tokens,
    )
    return rates, _described(rates)


def fit(measured: Sequence[tuple[float, float]]) -> Pace:
    """A line through (size, seconds), of medians by about the same size; no part of it is below 0."""
    sizes: dict[int, list[tuple[float, float]]] = {}
    for size, seconds in measured:
        sizes.setdefault(round(4 * np.log2(max(1.0, size))), []).append((size, seconds))
    medians = [tuple(statistics.median(each) for each in zip(*group, strict=True)) for group in sizes.values()]
    x, y = np.array(medians, dtype=float).T
    unit_s, fixed_s = np.polyfit(x, y, 1) if len(medians) > 1 else (0.0, float(y[0]))
    if unit_s < 0.0:
        return Pace(fixed_s=float(np.mean(y)), unit_s=0.0)
    if fixed_s < 0.0:
        return Pace(fixed_s=0.0, unit_s=float((x * y).sum() / (x * x).sum()))
    return Pace(fixed_s=float(fixed_s), unit_s=float(unit_s))


def _steps(scene: Scene, settings: Calibration) -> tuple[Pace, float]:
    """A decode step by sequences of short contexts, and what a position of KV adds to it."""
    short = min(settings.sizes)
    running: list[str] = []
    measured: list[tuple[float, float]] = []
    seed = 1000
    for batch in settings.batches:
        while len(running) < batch:
            running.append(scene.begin(short, seed=seed))
            seed += 1
        measured.append((batch, _step_s(scene, settings.steps)))
    mover = scene.begin(max(settings.sizes), seed=seed)
    for _ in range(settings.moves):  # beside a full batch, so that the worker sees what that costs
        scene.forget(mover)
        scene.client.abort([mover], keep="pool", then="hold", timeout_s=TIMEOUT_S)
        scene.client.resume([mover])
        _step_s(scene, settings.steps)
    scene.client.abort([*running, mover], keep="none", then="finish", timeout_s=TIMEOUT_S)
    few = settings.batches[0]
    lengthy = [scene.begin(max(settings.sizes), seed=seed + 1 + index) for index in range(few)]
    added = _step_s(scene, settings.steps) - measured[0][1]
    scene.client.abort(lengthy, keep="none", then="finish", timeout_s=TIMEOUT_S)
    kv_token_s = max(0.0, added / (few * (max(settings.sizes) - short)))
    return fit([(batch, max(0.0, s - kv_token_s * batch * short)) for batch, s in measured]), kv_token_s


def _step_s(scene: Scene, steps: int) -> float:
    """Of a decode step now."""
    scene.marks()
    seconds: list[float] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(seconds) < steps:
        if time.monotonic() > deadline:
            raise DeadlineError(f"{len(seconds)} of {steps} steps within {TIMEOUT_S:g} s")
        time.sleep(POLL_S)
        seconds += [mark.seconds for mark in scene.marks() if mark.name == "step"]
    return statistics.median(seconds[1:] or seconds)


def _known(pace: Pace | None, what: str) -> Pace:
    if pace is None:
        raise MeasurementError(f"the worker did not measure {what}")
    return pace


def _described(rates: MachineRates) -> dict[str, Any]:
    def pace(of: Pace) -> dict[str, float]:
        return {"fixed_ms": 1e3 * of.fixed_s, "gb_per_s": 1e-9 / of.unit_s if of.unit_s else 0.0}

    return {
        "prefill_tokens_per_s": 1.0 / rates.prefill_s[-1],
        "prefill_us": [round(1e6 * seconds, 1) for seconds in rates.prefill_s],
        "step_fixed_ms": 1e3 * rates.step.fixed_s,
        "step_sequence_ms": 1e3 * rates.step.unit_s,
        "step_1000_kv_tokens_ms": 1e6 * rates.kv_token_s,
        "export": pace(rates.export),
        "restore": pace(rates.restore),
        "save": pace(rates.save),
        "load": pace(rates.load),
        "latency_ms": 1e3 * rates.latency_s,
        "slowdown": rates.slowdown,
    }
