"""A service under test: one batch of groups whose uninterrupted outputs are known, and ways into its actors.

`inside` runs a function in an actor, by a facility of Ray: the product has no hooks for tests. Functions
that go there are lambdas and closures, which travel by value, and import what they need.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray

from rollout.client import Rollout
from rollout.metrics import EngineStats, PoolStats
from rollout.types import Image, SamplingParams, Trajectory, TrajectoryId
from tests.tiny_models import make_tiny_llama

T = TypeVar("T")

PAGE_TOKENS = 16
TOKEN_BYTES = 4 * 2 * 8 * 32 * 4
"""Of `make_kv_model`: layers, key and value, heads, head size, fp32. 13 tokens are more than Ray would inline."""
PROMPT_TOKENS = 40
KEYS = ("ann", "bob")
SAMPLES = 2
SAMPLING = SamplingParams(max_new_tokens=160, ignore_eos=True, seed=11)
"""Seeded, so that a prompt's outputs do not depend on its key."""
PROMPTS = [
    [4 + (position * (7 + 4 * number)) % 300 for position in range(PROMPT_TOKENS)] for number in range(len(KEYS))
]
MIDDLE = 101
"""Output tokens where a batch is stopped. Its KV ends inside a page, which no prefix tree has: trajectories like these
may have left all whole pages in the other worker's."""
IDS = [TrajectoryId(f"{key}/{sample}") for key in KEYS for sample in range(SAMPLES)]

Outputs = dict[TrajectoryId, tuple[tuple[int, ...], tuple[float, ...]]]


def make_kv_model(path: Path) -> Path:
    return make_tiny_llama(
        path,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
    )


def settings(model: Path, name: str, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of two deterministic workers; `sections` add to it field by field.

    Its deadlines are for machines that are slow or busy; a test that waits for one sets a shorter one.
    """
    base: dict[str, dict[str, Any]] = {
        "model": {"path": model, "dtype": "float32"},
        "engine": {
            "kernels": "torch",  # which replays history, the harder case; native kernels have their own tests
            "max_running": 4,
            "deterministic": True,
            "chunk_tokens": 32,
            "kv_bytes": "32MiB",
            "max_context_tokens": 512,
        },
        "cluster": {
            "name": name,
            "workers": 2,
            "max_restarts": 100,
            "start_timeout_s": 600,
            "health_interval_s": 0.2,
            "unresponsive_s": 60,
        },
        "pool": {"budget_bytes": "64MiB", "warm_bytes": "8MiB", "restore_timeout_s": 60, "export_timeout_s": 60},
        "abort": {"keep": "pool"},
        "resume": {"prefer": "other"},
    }
    return {name: base.get(name, {}) | dict(sections.get(name, {})) for name in base | sections}


def eventually(look: Callable[[], T], *, within_s: float = 300.0) -> T:
    """The first truthy answer of `look`; fails, with the last one, if there is none in time.

    Looks ever less often: a busy machine has better things to do.
    """
    deadline = time.monotonic() + within_s
    pause, pause_s = threading.Event(), 0.02
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s, last seen: {seen!r}"
        pause.wait(pause_s)
        pause_s = min(1.2 * pause_s, 0.2)
    return seen


def submit(service: Rollout, keys: Sequence[str] = KEYS) -> None:
    """The batch: two groups of two."""
    service.submit(PROMPTS, n=SAMPLES, sampling=SAMPLING, key=keys)


def collect(service: Rollout, groups: int = len(KEYS), *, within_s: float = 600.0) -> dict[TrajectoryId, Trajectory]:
    """Take finished groups until there are as many."""
    deliveries = []
    deadline = time.monotonic() + within_s
    while len(deliveries) < groups:
        left = deadline - time.monotonic()
        assert left > 0, f"{len(deliveries)} of {groups} groups after {within_s:g} s: {service.stats()}"
        deliveries += service.next_groups(groups - len(deliveries), timeout_s=left)
    return {t.trajectory_id: t for delivery in deliveries for t in delivery.trajectories}


def outputs(trajectories: Mapping[TrajectoryId, Trajectory]) -> Outputs:
    """Ids and log-probabilities, to be compared bit for bit."""
    return {name: (t.output_ids, t.logprobs) for name, t in trajectories.items()}


def sampled(service: Rollout, more: int) -> None:
    """Wait until the service has sampled so many tokens more than now."""
    start = service.stats().counters.tokens
    eventually(lambda: service.stats().counters.tokens >= start + more)


def reached(service: Rollout, tokens: int) -> None:
    """Wait until every trajectory that was not handed out has so many tokens."""

    def fewest() -> int:
        return inside(
            controller(service), lambda self: min(len(record.columns) for record in self._core._groups.records())
        )

    eventually(lambda: fewest() >= tokens)


@contextlib.contextmanager
def limited(service: Rollout, tokens: int = SAMPLING.max_new_tokens - 1) -> Iterator[Callable[[int], None]]:
    """No trajectory gets more than `tokens` tokens inside this, so that none of the batch ends, however fast the
    machine is and however late the test acts.

    Yields a function that sets another limit. Worker processes that are started inside this know no limit.
    """

    def install(self: Any, tokens: int) -> None:
        import dataclasses

        scheduler = self._host._engine._scheduler

        def plan() -> Any:
            found = type(scheduler).plan(scheduler)
            going_on = [
                sequence
                for sequence in found.decode
                if sequence.output_tokens < tokens or sequence.computed + 1 < len(sequence.tokens)  # a replay goes on
            ]
            return dataclasses.replace(found, decode=tuple(going_on))

        scheduler.plan = plan
        self._host._wake()

    def lift(self: Any) -> None:
        if self._host is not None:  # it was restarted inside this
            vars(self._host._engine._scheduler).pop("plan", None)
            self._host._wake()

    def limit(tokens: int) -> None:
        for worker in workers(service).values():
            inside(worker, install, tokens)

    try:
        limit(tokens)
        yield limit
    finally:
        for worker in workers(service).values():
            worker.__ray_call__.remote(lift)  # not waited for: it may be dead or stopped


def is_prefix(partial: Trajectory, of: Outputs) -> bool:
    """Whether its tokens and log-probabilities so far are the first ones of its undisturbed run."""
    ids, logprobs = of[partial.trajectory_id]
    count = len(partial.output_ids)
    return partial.output_ids == ids[:count] and partial.logprobs == logprobs[:count]


def busy(service: Rollout) -> str:
    """A worker that runs something; if nothing may end there (see `limited`), it still does when this returns."""
    return eventually(lambda: next((one.worker for one in service.stats().workers if one.engine.running), ""))


def hold(service: Rollout, worker: str, copy: str, flags: Path) -> tuple[Path, Path]:
    """Make every `gather` or `scatter` of a worker wait for a file, the second one returned.

    The first one is there once a copy has begun to wait.
    """
    begun, go_on = flags / f"{worker}-{copy}-begun", flags / f"{worker}-{copy}-go-on"

    def install(self: Any) -> None:
        import threading

        original, pause = getattr(self._host._storage, copy), threading.Event()

        def waiting(*args: Any) -> Any:
            begun.touch()
            while not go_on.exists():
                pause.wait(0.01)
            return original(*args)

        setattr(self._host._storage, copy, waiting)

    inside(workers(service)[worker], install)
    return begun, go_on


@contextlib.contextmanager
def held_exports(service: Rollout, flags: Path) -> Iterator[Callable[[], bool]]:
    """No export of any worker ends inside this; yields whether one has begun."""
    held = [hold(service, worker, "gather", flags) for worker in pids(service)]
    try:
        yield lambda: any(begun.exists() for begun, _ in held)
    finally:
        for _, go_on in held:
            go_on.touch()


def inside(actor: Any, run: Callable[..., T], *args: Any, timeout_s: float = 120.0) -> T:
    """What `run(the actor's object, *args)` returns in the actor."""
    result: T = ray.get(actor.__ray_call__.remote(run, *args), timeout=timeout_s)
    return result


def controller(service: Rollout) -> Any:
    return service.aio._controller


def workers(service: Rollout) -> dict[str, Any]:
    found: dict[str, Any] = inside(controller(service), lambda self: self._workers.actors)
    return found


def pools(service: Rollout) -> list[Any]:
    found: list[Any] = inside(controller(service), lambda self: list(self._workers.pools.values()))
    return found


def pids(service: Rollout) -> dict[str, int]:
    """Of the workers that answer."""
    return {worker.worker: worker.pid for worker in service.stats().workers}


def engines(service: Rollout) -> list[EngineStats]:
    return [worker.engine for worker in service.stats().workers]


def pool(service: Rollout) -> PoolStats:
    """Of the one node, once it answers."""
    (stats,) = eventually(lambda: service.stats().pools)
    return stats


def at_rest(service: Rollout, workers: int = 2) -> bool:
    """Nothing runs, is parked or stored, every page is free or in a prefix tree, and the controller knows all that
    happened: its counters stay as they are."""
    stats = service.stats()
    found = [worker.engine for worker in stats.workers]
    kept = [(one.stored, one.reserved, one.still_read, one.segments) for one in stats.pools]
    return (
        len(found) == workers
        and all(engine.waiting == engine.running == engine.parked == 0 for engine in found)
        and all(engine.device.private == engine.device.reserved == 0 for engine in found)
        and all(engine.device.free + engine.device.tree == engine.device.total for engine in found)
        and all(worker.exporting == 0 for worker in stats.workers)
        and set(kept) == {(0, 0, 0, 0)}
        and all_told(service)
    )


def all_told(service: Rollout) -> bool:
    """Whether the controller has taken in every event that the workers had when this was called."""

    def told(self: Any) -> bool:
        with self._host._changed:
            batch = self._host._unacknowledged
            return not self._host._outbox and batch is not None and not batch.events

    try:
        return all(inside(worker, told) for worker in workers(service).values())
    except ray.exceptions.RayActorError:
        return False  # one has died just now


def images(service: Rollout) -> dict[TrajectoryId, Image]:
    """Of the trajectories that have one."""
    found: dict[TrajectoryId, Image] = inside(
        controller(service),
        lambda self: {
            record.trajectory_id: record.pooled.image for record in self._core._groups.records() if record.pooled.image
        },
    )
    return found


def locations(service: Rollout) -> list[tuple[list[str], bool]]:
    """Of every segment: the nodes whose shared memory has it, and whether Ray spilled it."""
    refs = [
        ref
        for actor in pools(service)
        for ref in inside(actor, lambda self: [ref for _, ref in self._segments.values()])
    ]
    found = ray.experimental.get_object_locations(refs) if refs else {}
    return [(place["node_ids"], place["did_spill"]) for place in found.values()]


def all_in_shared_memory(service: Rollout) -> bool:
    found = locations(service)
    return bool(found) and all(nodes and not spilled for nodes, spilled in found)


def audit(service: Rollout) -> None:
    """Recompute the ledgers of all pools inside them, and compare with what they hold; so with idle engines."""
    for worker in workers(service).values():
        inside(worker, lambda self: self._host._engine.audit())
    for actor in pools(service):
        assert ray.get(actor.audit.remote(), timeout=120.0) is None
