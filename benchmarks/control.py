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
time (`replay`): what the controller of a simulated service was told (`workers` workers, slices, collections that stop
the rest, resumes; cost model and all) is told to a fresh controller again. Everything else that it is told in the
course of it (pools' answers, submissions, ticks) takes part of that time and does not count. Median of `repeats`;
`wall_updates_per_s` is by the clock on the wall. `profile` lists where the time goes, by a run of its own.
"""

import gc
import os
import pickle
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from pydantic import Field, PositiveInt

from benchmarks.endless import EVERYTHING, NoImages, endless
from benchmarks.measure import MeasurementError, in_ms, medians
from benchmarks.peer import Peer
from benchmarks.peers.protocol import Prepared, serve
from benchmarks.replay import Mix, measure_updates
from benchmarks.standin import StandIn
from rollout.cluster.description import Batch
from rollout.cluster.exports import Exports
from rollout.cluster.host import Host
from rollout.config import Section, load_config
from rollout.control.commands import Watch
from rollout.control.messages import WorkerEvent, merge_sampled
from rollout.engine.engine import Engine
from rollout.engine.scheduler import Scheduler
from rollout.errors import DeadlineError
from rollout.types import NodeId, Version, Weights, WeightsId, WorkerId

TIMEOUT_S = 1800.0
PAGE_TOKENS = 16
WEIGHTS = Weights(WeightsId("weights"), Version(0))
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
    updates = measure_updates(settings.mix, settings.repeats)
    return {f"step_overhead_{settings.running}_ms": step["overhead_ms"], "step": step, **updates}, {}


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
                parts = {name: self._parts[name] for name in (*LOOP, *STEP)}
                self.rounds.append({"loop": begin - self._ended, "step": self._step_s, **parts})
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
        sides = {"watched": _Side(settings, model, EVERYTHING), "unwatched": _Side(settings, model, Watch())}
        gc.freeze()  # as workers do
        rounds = _Rounds()
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        with rounds.attached():
            for turn in range(-(-settings.steps // settings.block)):
                for name in list(sides) if turn % 2 == 0 else reversed(sides):
                    measured[name] += sides[name].block(rounds)
    parts = {name: medians(each) for name, each in measured.items()}
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
        self.host = Host(WorkerId("w"), NodeId("node"), "i", load_config(config), WEIGHTS, NoImages())
        self._acknowledged = 0
        threading.Thread(target=self._poll, daemon=True).start()
        draw = random.Random(0)
        for index in range(settings.running):
            if index % settings.samples == 0:
                prompt = tuple(draw.choices(range(256), k=settings.context_tokens + index % 16))
            self.host.start(endless(index, prompt, watch))
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
        if running != self._settings.running:
            raise MeasurementError(f"{running} of {self._settings.running} sequences were running")
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


if __name__ == "__main__":
    serve(prepare)
