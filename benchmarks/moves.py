"""A traced service, and trajectories whose KV is moved out of and into its workers, with the time of each move.

Export: from the driver's call of `abort(keep="pool", then="hold")` until the worker has freed the pages. A step
that is under way when the stop reaches the engine is not part of that: its rest is told apart (`step_wait`),
since how long a step takes is not a matter of moving KV. Restore: from the driver's call of `resume` until
the sequence is in the decode batch. Both ends are read from the monotonic clock, which all processes of a
machine share.
"""

import itertools
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from unittest import mock

import ray

from benchmarks.checkout import CHECKOUT
from benchmarks.tracing import Mark, Trace, TracedPool, TracedWorker
from rollout.client import AsyncRollout, Rollout
from rollout.cluster import launch, pool, workforce
from rollout.config import load_config
from rollout.control.messages import WorkerFacts
from rollout.errors import DeadlineError
from rollout.types import SamplingParams

TIMEOUT_S = 300.0
POLL_S = 0.05
SETTLE_S = 0.05
"""For what a move left behind, such as objects that Ray frees when it gets to it."""
STEPS_BETWEEN = 2
"""Tokens to sample after a restore, so that there is more KV than the pool knew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One export or restore."""

    nbytes: int
    seconds: float
    phases: Mapping[str, float]
    """What `seconds` is made of, in order."""
    aside: Mapping[str, float]
    """Other durations, which are not part of `seconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A trajectory that went on."""

    seconds: float
    """From the driver's call until its next token, less one decode step."""
    step_s: float
    """Of a decode step, by the tokens that followed."""
    phases: Mapping[str, float]
    """What `seconds` is made of where it was read from the pool; otherwise empty."""


class Scene:
    """A service of traced workers. Ends with its context."""

    def __init__(self, config: Mapping[str, Any], worker: type[TracedWorker] = TracedWorker) -> None:
        """`worker` is what its workers are."""
        path = os.environ.get("PYTHONPATH")
        # What is started below finds this package wherever the driver runs.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), *([path] if path else [])])
        try:
            with mock.patch.object(workforce, "Worker", worker), mock.patch.object(pool, "Pool", TracedPool):
                service = launch.launch(load_config(config))
        finally:
            os.environ.pop("PYTHONPATH")
            if path is not None:
                os.environ["PYTHONPATH"] = path
        client = AsyncRollout(service.controller, service.description, key_prefix="", on_close=service.close)
        self.client = Rollout(client)
        self.service = service
        count = service.description.config.cluster.workers
        self.workers = service.actors[1 : 1 + count]
        self._pools = service.actors[1 + count :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()

    def begin(self, tokens: int, *, seed: int) -> str:
        """A trajectory with a random prompt of so many tokens, prefilled, that never ends; returns its id."""
        draw = random.Random(seed)
        vocabulary = range(self.client.tokenizer.vocab_size)
        sampling = SamplingParams(max_new_tokens=1 << 15, ignore_eos=True)
        (group,) = self.client.submit([draw.choices(vocabulary, k=tokens)], sampling=sampling)
        self._until(lambda: any(mark.name == "sampled" for mark in self.marks()), "a first token")
        return f"{group}/0"

    def marks(self) -> list[Mark]:
        """What the workers and pools did since this was called last."""
        refs = [actor.marks.remote() for actor in (*self.workers, *self._pools)]
        return [mark for marks in ray.get(refs, timeout=TIMEOUT_S) for mark in marks]

    def facts(self) -> WorkerFacts:
        """What the first worker measured of itself."""
        facts: WorkerFacts = ray.get(self.workers[0].facts.remote(), timeout=TIMEOUT_S)
        return facts

    def forget(self, trajectory: str) -> None:
        """Make the pool forget what it holds of a running trajectory, so that an export sends all of it again."""
        ray.get([each.retain.remote(trajectory, frozenset()) for each in self._pools], timeout=TIMEOUT_S)
        time.sleep(SETTLE_S)

    def export(self, trajectory: str) -> Move:
        """Suspend a running trajectory."""
        self.marks()
        before = self.client.stats().counters.exported_bytes
        start = time.monotonic()
        report = self.client.abort([trajectory], keep="pool", then="hold", timeout_s=TIMEOUT_S)
        answered = time.monotonic()
        assert not report.unreached, report
        trace = self._trace("free")
        stop, parked, freed = trace.first("stop"), trace.first("abort"), trace.first("free")
        stored, released = trace.first("pool"), trace.first("release")
        held = min(stored.end, released.begin)  # the pool has the pages released, and then answers
        wait = trace.within("step", stop.begin, parked.begin)
        exporting = trace.seconds("export")
        phases = {
            "command": stop.begin - start,
            "park": parked.end - stop.begin - wait,
            "to_pool": stored.begin - parked.end,
            "gather": trace.seconds("gather"),
            "checksum": trace.seconds("describe"),
            "rest_of_export": exporting - trace.seconds("gather") - trace.seconds("describe"),
            "store": held - stored.begin - exporting,
            "to_release": released.begin - held,
            "free": freed.end - released.begin,
        }
        return Move(
            nbytes=self.client.stats().counters.exported_bytes - before,
            seconds=freed.end - start - wait,
            phases=phases,
            aside={"abort_call": answered - start, "step_wait": wait},
        )

    def restore(self, trajectory: str) -> Move:
        """Resume a suspended trajectory, and let it sample a little."""
        before = self._restored_bytes()
        start, trace = self._resume(trajectory, "restored", STEPS_BETWEEN)
        restored = trace.first("restored")
        phases = _restore_phases(trace, start)
        phases["to_batch"] = restored.end - start - sum(phases.values())
        return Move(
            nbytes=self._restored_bytes() - before,
            seconds=restored.end - start,
            phases=phases,
            aside={"verify": trace.seconds("verify")},
        )

    def resume(self, trajectory: str, steps: int) -> Resumed:
        """Resume a suspended trajectory, wherever its KV is, and let it sample for so many steps after its first."""
        start, trace = self._resume(trajectory, "start", steps + 1)
        sampled = [mark.end for mark in trace.all("sampled")]
        step = statistics.median(after - before for before, after in itertools.pairwise(sampled))
        seconds = sampled[0] - start - step
        phases: dict[str, float] = {}
        if trace.all("submit_restore"):
            phases = _restore_phases(trace, start)
            phases["to_batch"] = seconds - sum(phases.values())
        return Resumed(seconds=seconds, step_s=step, phases=phases)

    def _resume(self, trajectory: str, name: str, tokens: int) -> tuple[float, Trace]:
        """When it was resumed, and what was done until it had sampled `tokens` tokens after a mark called `name`."""
        self.marks()
        start = time.monotonic()
        report = self.client.resume([trajectory])
        assert trajectory in report.resumed, report
        return start, self._trace(name, then=("sampled",) * tokens)

    def restart(self, trajectory: str) -> None:
        """Kill the worker on which a suspended `trajectory` would resume, and wait until it is up again."""
        workers = self.client.stats().workers
        (suspended,) = self.client.abort([trajectory], keep="pool").partials
        victims = [worker for worker in workers if worker.worker != suspended.workers[-1]] or list(workers)
        os.kill(victims[0].pid, signal.SIGKILL)
        known = {worker.incarnation for worker in workers}
        self._until(lambda: any(w.incarnation not in known for w in self.client.stats().workers), "the worker")
        time.sleep(1.0)  # it warms up

    def _restored_bytes(self) -> int:
        return sum(worker.engine.restored_bytes for worker in self.client.stats().workers)

    def _trace(self, name: str, then: tuple[str, ...] = ()) -> Trace:
        """What was done up to the first mark called `name`, and until those that shall follow it were made."""
        marks: list[Mark] = []

        def done() -> bool:
            marks.extend(self.marks())
            names = [mark.name for mark in sorted(marks, key=lambda mark: mark.begin)]
            if name not in names:
                return False
            rest = names[names.index(name) :]
            return all(rest.count(each) >= then.count(each) for each in then)

        self._until(done, name)
        return Trace(marks)

    def _until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        time.sleep(POLL_S)  # looking takes time from what is measured
        while not done():
            if time.monotonic() > deadline:
                raise DeadlineError(f"waited {TIMEOUT_S:g} s for {what}")
            time.sleep(POLL_S)


def _restore_phases(trace: Trace, start: float) -> dict[str, float]:
    """From the driver's call until all bytes are in place."""
    begun, submitted, opened = trace.first("start"), trace.first("submit_restore"), trace.first("open")
    return {
        "command": begun.begin - start,
        "admit": submitted.begin - begun.begin,
        "open": opened.end - submitted.begin,
        "verify_and_scatter": max(mark.end for mark in trace.all("scatter")) - trace.first("scatter").begin,
    }
