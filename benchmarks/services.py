"""Services that take turns in one run, all of them started before, each with workers of its own.

They share one Ray node, which is given as many logical CPUs as they name; whoever has no turn runs nothing.
"""

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import ray

from rollout import start
from rollout.client import Rollout
from rollout.cluster.description import NAMESPACE
from rollout.cluster.placement import POOL_BYTES, STORE_SHARE, STORE_SLACK_BYTES
from rollout.config import Config, load_config
from rollout.errors import DeadlineError
from rollout.transport.disk import DiskWeights
from rollout.transport.manifest import ITEM_BYTES

SETTLE_S = 60.0
POLL_S = 0.02
ROUNDING_BYTES = 1 << 20
"""For whatever is rounded down on the way."""


@contextlib.contextmanager
def started(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Rollout]]:
    """A service for each name, which tells it apart from the others in Ray, too."""
    loaded = {name: load_config({**config, "cluster": _named(config, name)}) for name, config in configs.items()}
    with ExitStack() as stack:
        stack.enter_context(ray_for(loaded.values()))
        yield {name: stack.enter_context(start(each)) for name, each in loaded.items()}


@contextlib.contextmanager
def ray_for(configs: Iterable[Config]) -> Iterator[None]:
    """A Ray node with room for services with these configurations, all at once; none where Ray runs already."""
    if ray.is_initialized():
        yield
        return
    asked = list(configs)
    ray.init(
        address="local",
        namespace=NAMESPACE,
        num_cpus=sum(each.cluster.workers * each.cluster.cpus_per_worker for each in asked),
        object_store_memory=sum(map(store_bytes, asked)),
        include_dashboard=False,
        logging_level="warning",
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


def settle(service: Rollout) -> None:
    """Wait until nothing runs or moves there. Raises `DeadlineError`."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        stats = service.stats()
        engines = [worker.engine for worker in stats.workers]
        moving = any(stats.phases.get(phase, 0) for phase in ("queued", "suspending", "restoring"))
        if not moving and not any(each.running or each.waiting or each.parked for each in engines):
            return
        if time.monotonic() > deadline:
            raise DeadlineError(f"not at rest within {SETTLE_S:g} s: {stats.phases}")
        time.sleep(POLL_S)


def _named(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    cluster = dict(config.get("cluster", {}))
    return {**cluster, "name": f"{cluster['name']}-{name}" if "name" in cluster else f"bench-{name}"}


def store_bytes(config: Config) -> int:
    """The least object store in which `placement.check_store` lets it start on a node that it has for itself.

    That is its inverse: who changes one changes the other.
    """
    pool = config.pool
    warmed = config.cluster.workers * int(pool.warm_bytes)
    updates = 2 * _weights_bytes(config) if config.weights.transport.kind == "object_store" else 0
    budget = int(pool.budget_bytes) if pool.budget_bytes is not None else POOL_BYTES
    used = budget + int(pool.reserve_bytes) + warmed + updates + STORE_SLACK_BYTES
    return int(used / STORE_SHARE) + ROUNDING_BYTES


def _weights_bytes(config: Config) -> int:
    """What a worker has of them, or a little more."""
    with contextlib.closing(DiskWeights(config.model.path)) as weights:
        elements = sum(math.prod(entry.shape) for entry in weights.manifest.entries)
    return elements * ITEM_BYTES[config.model.dtype]
