"""Services that take turns in one run, all of them started before, each with workers of its own.

They share one Ray node, which is given as many logical CPUs as they name; whoever has no turn runs nothing.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import ray

from rollout import start
from rollout.client import Rollout
from rollout.cluster.description import NAMESPACE
from rollout.cluster.placement import STORE_SHARE, STORE_SLACK_BYTES
from rollout.config import Config, load_config
from rollout.errors import DeadlineError

SETTLE_S = 60.0
POLL_S = 0.02
ROUNDING_BYTES = 1 << 20
"""For whatever is rounded down on the way."""


@contextlib.contextmanager
def started(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Rollout]]:
    """A service for each name, which tells it apart from the others in Ray, too."""
    loaded = {name: load_config({**config, "cluster": _named(config, name)}) for name, config in configs.items()}
    with ExitStack() as stack:
        if not ray.is_initialized():
            ray.init(
                address="local",
                namespace=NAMESPACE,
                num_cpus=sum(each.cluster.workers * each.cluster.cpus_per_worker for each in loaded.values()),
                object_store_memory=sum(_store_bytes(each) for each in loaded.values()),
                include_dashboard=False,
                logging_level="warning",
                log_to_driver=False,
            )
            stack.callback(ray.shutdown)
        yield {name: stack.enter_context(start(each)) for name, each in loaded.items()}


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


def _store_bytes(config: Config) -> int:
    """The least object store in which `placement.check_store` lets it start on a node that it has for itself.

    That is its inverse: who changes one changes the other.
    """
    pool = config.pool
    warmed = config.cluster.workers * int(pool.warm_bytes)
    used = int(pool.budget_bytes) + int(pool.reserve_bytes) + warmed + STORE_SLACK_BYTES
    return int(used / STORE_SHARE) + ROUNDING_BYTES
