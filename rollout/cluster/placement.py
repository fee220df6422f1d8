"""Where workers go, and whether the pools fit: by arithmetic on what Ray says it has, before anything is started."""

import contextlib
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Sequence

import ray
from pydantic import ByteSize
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from rollout.cluster.description import WorkerDescription
from rollout.config import ClusterConfig, PoolConfig, WeightsConfig
from rollout.errors import ClusterTooSmallError, ConfigError
from rollout.kv.keys import Fingerprint
from rollout.types import WorkerId

PLACEMENT_S = 20.0
"""Seconds for CPUs or GPUs that the cluster has, but others use, to become free."""
POOL_BYTES = 2 << 30
"""Budget of a pool that is given none, if the store has room for it."""
STORE_SLACK_BYTES = 64 << 20
STORE_SHARE = 0.75
"""Of the object store, what may be used: Ray spills above 0.8."""

logger = logging.getLogger(__name__)


def place(cluster: ClusterConfig, workers: int, service_id: str) -> list[PlacementGroup]:
    """Room for each of `workers` workers, or an error that names what was asked for and what there is."""
    per_worker = {"CPU": float(cluster.cpus_per_worker)}
    if cluster.gpus_per_worker:
        per_worker["GPU"] = float(cluster.gpus_per_worker)
    total = ray.cluster_resources()
    for kind, each in per_worker.items():
        asked, there = each * workers, total.get(kind, 0.0)
        if asked > there:
            raise ClusterTooSmallError(
                f"cluster.workers: {workers} workers of {each:g} {kind} need {asked:g} {kind}, "
                f"the Ray cluster has {there:g}"
            )
    names = [f"{_place_prefix(service_id)}{uuid.uuid4().hex}" for _ in range(workers)]
    places = [placement_group([dict(per_worker)], name=name) for name in names]
    deadline = time.monotonic() + PLACEMENT_S
    if all(each.wait(max(0.0, deadline - time.monotonic())) for each in places):
        return places
    for each in places:
        remove_placement_group(each)
    free = ray.available_resources()
    wanted = ", ".join(f"{each * workers:g} {kind}" for kind, each in per_worker.items())
    there = ", ".join(f"{free.get(kind, 0.0):g} of {total.get(kind, 0.0):g} {kind}" for kind in per_worker)
    raise ClusterTooSmallError(
        f"cluster.workers: {workers} workers need {wanted}; {there} are free, "
        f"and no nodes could hold them within {PLACEMENT_S:g} s"
    )


def remove_places(service_id: str) -> None:
    """Give back what the workers of a service hold, also those that were added while it ran: what an actor asked for,
    Ray would keep until the driver's job ends."""
    for found in placement_group_table().values():
        if found["name"].startswith(_place_prefix(service_id)) and found["state"] != "REMOVED":
            with contextlib.suppress(ValueError):  # it was removed just now
                remove_placement_group(get_placement_group(found["name"]))


def _place_prefix(service_id: str) -> str:
    return f"rollout:{service_id}:"


def check_alike(workers: Sequence[WorkerDescription], *, deterministic: bool) -> None:
    """Raises `ConfigError` in deterministic mode if KV of one worker is not what another would compute.

    Elsewhere such KV is computed again where it cannot be read, which a warning says.
    """
    by_fingerprint: dict[Fingerprint, list[WorkerId]] = {}
    for worker in workers:
        by_fingerprint.setdefault(worker.fingerprint, []).append(worker.worker)
    if len(by_fingerprint) == 1:
        return
    message = (
        f"workers run unlike kernels (CPUs, compilers or engine.kernels=auto), so that KV cannot move between "
        f"{' and '.join(', '.join(alike) for alike in by_fingerprint.values())}"
    )
    if deterministic:
        raise ConfigError(f"{message}; deterministic mode needs like ones")
    logger.warning("%s; it is computed again there", message)


def check_room(workers: Sequence[WorkerDescription], *, max_context: int) -> None:
    """Raises `ConfigError` if one has less room for a sequence than the service lets one have."""
    least = min(workers, key=lambda worker: worker.max_context)
    if least.max_context < max_context:
        raise ConfigError(
            f"{least.worker} has room for {least.max_context} tokens of a sequence, the service allows {max_context}; "
            f"engine.max_context_tokens or engine.kv_bytes would make them alike"
        )


def check_store(pool: PoolConfig, weights: WeightsConfig, described: Sequence[WorkerDescription]) -> PoolConfig:
    """Ray never says that its store is full, it spills: so what may be in it must fit, by arithmetic. Returns `pool`,
    with a budget if it has none. Raises `ConfigError`.

    Beside the pool that is what the driver reserves, what each worker of a node touches to warm up, and, where
    images come from other nodes, one copy of the longest, whatever the number of readers: the pool of the readers'
    node charges what they have open to its budget, but for that one, without which a full pool could read nothing
    from elsewhere. Copies that nobody reads any more need no room: Ray evicts them before it spills. Weights that come
    through the store are there twice during an update: those that are live stay, for workers that come up.
    """
    workers = Counter(worker.node for worker in described)
    copy_room = described[0].max_context * described[0].token_bytes if len(workers) > 1 else 0
    updates = 2 * described[0].weights_bytes if weights.transport.kind == "object_store" else 0
    fits = POOL_BYTES
    for node in ray.nodes():
        if node["NodeID"] not in workers:
            continue
        store = int(node["Resources"].get("object_store_memory", 0.0))
        warmed = workers[node["NodeID"]] * int(pool.warm_bytes)
        rest = int(pool.reserve_bytes) + warmed + copy_room + updates + STORE_SLACK_BYTES
        most = max(0, int(STORE_SHARE * store) - rest)
        budget = int(pool.budget_bytes) if pool.budget_bytes is not None else 1
        if budget > most:
            raise ConfigError(
                f"pool.budget_bytes: got {pool.budget_bytes}, allowed: at most {most} "
                f"with the object store of {store} bytes on node {node['NodeID'][:8]}; this configuration needs one of "
                f"{math.ceil((rest + budget) / STORE_SHARE)} (ray start --object-store-memory)"
            )
        fits = min(fits, most)
    return pool if pool.budget_bytes is not None else pool.model_copy(update={"budget_bytes": ByteSize(fits)})
