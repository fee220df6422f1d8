"""What deciding costs: in a worker's step beside model, sampling and scheduling, and in the controller.

`results.step_overhead_256_ms` is of a worker with `running` sequences: the real `cluster.host` on its thread around a
real engine, whose model is a stand-in of one small layer (`standin`), in a process of its own, set up as a worker's is.
It is the sum of `loop_ms`, all that the thread does between two steps (messages, exports that are over, what expires,
telling what happened, snapshots and facts); `memory_ms`, the policy `memory` in the step; `watches_ms`, by how much the
engine's commit is longer where each sequence is watched for slices, length, loops and turns; and `answer_ms`, what the
controller's poll then costs of one step's events, merged and pickled, as if each step had a poll of its own (there is
one every 0.1 s). Medians of `steps` steps, watched ones and others in turns of `block`. `commit_ms` is the rest of the
engine's commit, which is not part of it.

`results.updates_per_s` is how many worker events about trajectories a controller takes in, in a second of one core's
time: what the controller of a simulated service was told (`rollout.sim`: `workers` workers, slices, collections that
stop the rest, resumes; cost model and all) is told to a fresh controller again, which has to come to the same counts
and decisions. Everything else that it is told in the course of it (pools' answers, submissions, ticks) takes part of
that time and does not count. Median of `repeats`; `wall_updates_per_s` is by the clock on the wall. `profile` lists
where the time goes, by a run of its own.
"""

import cProfile
import gc
import os
import pickle
import pstats
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from pydantic import Field, PositiveInt

from benchmarks.measure import in_ms
from benchmarks.peer import Peer
from benchmarks.peers.protocol import Prepared, serve
from benchmarks.recording import Recording
from benchmarks.standin import StandIn
from rollout.cluster.description import Batch
from rollout.cluster.exports import Exports
from rollout.cluster.host import Host
from rollout.config import AbortConfig, EngineConfig, GroupsConfig, HostConfig, ResumeConfig, Section, load_config
from rollout.control.commands import Assignment, LoopWatch, Watch
from rollout.control.controller import Controller
from rollout.control.messages import Pace, WorkerEvent, merge_sampled
from rollout.control.submission import Submission
from rollout.engine.engine import Engine
from rollout.engine.scheduler import Scheduler
from rollout.errors import DeadlineError
from rollout.sim.machine import MachineRates, rising_prefill
from rollout.sim.simulation import Driver, Simulation, forced_group
from rollout.types import Columns, NodeId, SamplingParams, TrajectoryId, WorkerId

TIMEOUT_S = 1800.0
PAGE_TOKENS = 16
LOOP: dict[str, tuple[Any, str]] = {
    "messages": (Host, "_take_messages"),
    "exports": (Exports, "collect"),
    "expire": (Engine, "expire"),
    "tell": (Host, "_tell"),
    "snapshot": (Host, "_snapshot"),
    "facts": (Host, "_take_facts"),
}
"""What the engine's thread calls between two steps; whoever renames one of them renames it here."""
STEP: dict[str, tuple[Any, str]] = {"memory": (Scheduler, "giving_way"), "commit": (Engine, "_commit")}
"""Parts of a step that are told apart."""
WATCH = Watch(slice_tokens=1 << 14, most_tokens=1 << 14, turns=True, loop=LoopWatch(ngram=64, times=8, min_tokens=64))
"""What a worker can be told to look for, and never sees here."""
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


class Mix(Section):
    """The run whose events are recorded."""

    workers: PositiveInt = 4
    max_running: PositiveInt = 64
    """Of each worker."""
    device_tokens: PositiveInt = 24576
    """KV that fits on each worker."""
    groups: PositiveInt = 96
    samples: PositiveInt = 8
    collect: PositiveInt = 24
    """Groups of each call; a third more are under way."""
    prompt_tokens: PositiveInt = 100
    mean_tokens: PositiveInt = 200
    """Of outputs, which are distributed exponentially."""
    slice_tokens: PositiveInt = 128


class Settings(Section):
    running: PositiveInt = 256
    """Sequences of the worker."""
    context_tokens: PositiveInt = 300
    """About that of each when decoding begins."""
    samples: PositiveInt = 16
    """Sequences that share their prompt."""
    steps: PositiveInt = 192
    """Decode steps that count, watched, and as many others."""
    block: PositiveInt = 32
    """Steps of a turn."""
    warm_steps: PositiveInt = 4
    """At the beginning of each turn, that do not count."""
    stand_in: StandIn = StandIn(layers=1, kv_heads=1, head_dim=64, page_tokens=PAGE_TOKENS)
    """The worker's model."""
    mix: Mix = Mix()
    """What the controller is told."""
    repeats: int = Field(default=5, ge=1)
    """Replays that count."""


def run(settings: Settings) -> tuple[dict[str, Any], dict[str, float]]:
    options = {"cores": sorted(os.sched_getaffinity(0))[:1]}
    with Peer("host", [sys.executable, "-m", "benchmarks.control"], options) as worker:
        step = worker.ask("measure", settings=settings.model_dump(mode="json"), timeout_s=TIMEOUT_S)
    return {f"step_overhead_{settings.running}_ms": step["overhead_ms"], "step": step, **_updates(settings)}, {}


def prepare(options: dict[str, Any]) -> Prepared:
    """The process with the worker's host."""
    torch.set_num_threads(1)
    return {}, {"measure": lambda request: _measure(Settings.model_validate(request["settings"]))}


# The worker's step ------------------------------------------------------------------------------------


class _Rounds:
    """What each round of an engine's thread took, from the end of one step to the end of the next, in seconds."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []
        self.events: list[WorkerEvent] = []
        """Of the last step."""
        self._parts: dict[str, float] = defaultdict(float)
        self._step_s = 0.0
        self._ended = 0.0

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Of all hosts; one of them should run."""
        with ExitStack() as stack:
            for part, (owner, name) in {**LOOP, **STEP}.items():
                stack.enter_context(mock.patch.object(owner, name, self._timed(part, getattr(owner, name))))
            stack.enter_context(mock.patch.object(Engine, "step", self._step(Engine.step)))
            yield

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._parts[part] += time.perf_counter() - begin

        return wrapper

    def _step(self, function: Callable[[Engine], list[WorkerEvent]]) -> Callable[[Engine], list[WorkerEvent]]:
        def wrapper(engine: Engine) -> list[WorkerEvent]:
            begin = time.perf_counter()
            if self._ended:
                self.rounds.append({"loop": begin - self._ended, "step": self._step_s, **self._parts})
            self._parts.clear()
            self.events = events = function(engine)
            self._ended = time.perf_counter()
            self._step_s = self._ended - begin
            return events

        return wrapper

    def forget(self) -> None:
        self.rounds, self._ended = [], 0.0


def _measure(settings: Settings) -> dict[str, Any]:
    """Interleaved: two hosts, of which one is paused."""
    with tempfile.TemporaryDirectory() as directory:
        model = settings.stand_in.write(Path(directory) / "model")
        sides = {"watched": _Side(settings, model, WATCH), "unwatched": _Side(settings, model, Watch())}
        gc.freeze()  # as workers do
        rounds = _Rounds()
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        with rounds.attached():
            for turn in range(-(-settings.steps // settings.block)):
                for name in list(sides) if turn % 2 == 0 else reversed(sides):
                    measured[name] += sides[name].block(rounds)
    parts = {name: _medians(each) for name, each in measured.items()}
    of, without = parts["watched"], parts["unwatched"]
    overhead = {
        "loop": of["loop"],
        "memory": of["memory"],
        "watches": max(0.0, of["commit"] - without["commit"]),
        "answer": _answer_s(sides["watched"].host, rounds.events),
    }
    return {
        "overhead_ms": round(1e3 * sum(overhead.values()), 4),
        **in_ms(overhead),
        "of_loop": in_ms({name: of[name] for name in LOOP}),
        **in_ms({"commit": without["commit"], "step": of["step"]}),
        "rounds": len(measured["watched"]),
    }


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Of each part; one that a round has not took no time."""
    names = ("loop", "step", *LOOP, *STEP)
    return {name: median(round_.get(name, 0.0) for round_ in rounds) for name in names}


def _answer_s(host: Host, events: list[WorkerEvent]) -> float:
    """What a poll for the events of one step costs, and Ray's copy of it."""

    def answer() -> None:
        batch = Batch(incarnation="i", number=1, silent_s=0.0, events=merge_sampled(events), facts=host.facts)
        pickle.dumps(batch, protocol=5)

    seconds = []
    for _ in range(50):
        begin = time.perf_counter()
        answer()
        seconds.append(time.perf_counter() - begin)
    return median(seconds)


class _Side:
    """A host whose sequences are all decoding, and that is paused but for its turns."""

    def __init__(self, settings: Settings, model: Path, watch: Watch) -> None:
        self._settings = settings
        turns = -(-settings.steps // settings.block)
        most = settings.context_tokens + 4 * turns * (settings.block + settings.warm_steps) + 1024
        token_bytes = settings.stand_in.token_bytes
        config = {
            "model": {"path": str(model)},
            "engine": {
                "device": "cpu",
                "kv_bytes": 2 * settings.running * most * token_bytes,
                "max_running": settings.running,
                "page_tokens": PAGE_TOKENS,
                "prefill_tokens": 4096,
            },
            "abort": {"policies": [{"kind": "memory"}]},
        }
        self.host = Host(WorkerId("w"), NodeId("node"), "i", load_config(config), "weights", _NoImages())
        self._acknowledged = 0
        threading.Thread(target=self._poll, daemon=True).start()
        draw = random.Random(0)
        for index in range(settings.running):
            if index % settings.samples == 0:
                prompt = tuple(draw.choices(range(256), k=settings.context_tokens + index % 16))
            self.host.start(_assignment(index, prompt, watch))
        self._until(lambda: self.host.stats.engine.sampled_tokens >= settings.running, "first tokens")
        self.host.pause()

    def block(self, rounds: _Rounds) -> list[dict[str, float]]:
        """The rounds of one turn."""
        rounds.forget()
        self.host.unpause()
        wanted = self._settings.warm_steps + self._settings.block
        self._until(lambda: len(rounds.rounds) >= wanted, "steps")
        taken = rounds.rounds[self._settings.warm_steps : wanted]
        running = self.host.stats.engine.running
        self.host.pause()
        self._until(lambda: self.host._engine.idle, "the pause")
        assert running == self._settings.running, running
        return taken

    def _poll(self) -> None:
        """As the controller does."""
        while True:
            batch = self.host.poll(self._acknowledged, 1.0)
            pickle.dumps(batch, protocol=5)
            self._acknowledged = batch.number

    def _until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S / 10
        while not done():
            if time.monotonic() > deadline:
                raise DeadlineError(f"waited {TIMEOUT_S / 10:g} s for {what}")
            time.sleep(0.01)


def _assignment(index: int, prompt: tuple[int, ...], watch: Watch) -> Assignment:
    """One that does not end."""
    return Assignment(
        trajectory_id=TrajectoryId(f"{index}/0"),
        epoch=1,
        prompt_ids=prompt,
        output=Columns(),
        sampling=SamplingParams(max_new_tokens=1 << 14, ignore_eos=True),
        seed=index,
        watch=watch,
        max_context=1 << 15,
        image=None,
        kv_tokens=0,
    )


class _NoImages:
    """Of a worker that restores nothing."""

    def open(self, runs: Any, deadline: float) -> Any:
        raise AssertionError("nothing is restored here")


# The controller ---------------------------------------------------------------------------------------


def _updates(settings: Settings) -> dict[str, Any]:
    mix = settings.mix
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
        controller = Controller(
            workers=mix.workers,
            max_context=rates.max_context,
            abort=abort,
            resume=ResumeConfig(),
            groups=GroupsConfig(),
        )
        begin, cpu = time.perf_counter(), time.thread_time()
        recording.replay(controller)
        seconds = time.thread_time() - cpu, time.perf_counter() - begin
        assert recording.agrees(controller), "the replay decided otherwise"
        return seconds

    replayed()
    seconds = [replayed() for _ in range(settings.repeats)]
    profile = cProfile.Profile()
    profile.runcall(replayed)
    updates = sum(recording.kinds.values())
    return {
        "updates_per_s": updates / median(cpu for cpu, _ in seconds),
        "wall_updates_per_s": updates / median(wall for _, wall in seconds),
        "updates": updates,
        "kinds": recording.kinds,
        "calls": recording.calls,
        "decisions": {str(reason): dict(places) for reason, places in simulation.controller.keeping.counts.items()},
        "profile": _top(profile),
    }


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


if __name__ == "__main__":
    serve(prepare)
