"""Starts a service in a Ray cluster: placement, workers, pools, controller; and finds a running one.

Everything that can be known to be wrong is refused before anything is started. The actors belong to the
driver that started them and end with it.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rollout.cluster.controller import ControllerActor
from rollout.cluster.description import (
    NAMESPACE,
    ServiceDescription,
    WorkerDescription,
    controller_name,
    pool_name,
)
from rollout.cluster.pool import Pool
from rollout.cluster.worker import GROUPS, Worker
from rollout.config import Config
from rollout.errors import (
    ClusterTooSmallError,
    ConfigError,
    DeadlineError,
    RolloutError,
    ServiceClosedError,
    ServiceNotFoundError,
)
from rollout.model.spec import read_spec
from rollout.text import read_tokenizer_files
from rollout.types import NodeId, WorkerId

PLACEMENT_S = 20.0
"""Seconds for CPUs or GPUs that the cluster has, but others use, to become free."""
STORE_SLACK_BYTES = 64 << 20
STORE_SHARE = 0.75
"""Of the object store, what may be used: Ray spills above 0.8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A started service, as its driver holds it."""

    controller: Any
    placement: PlacementGroup
    started_ray: bool
    """This process joined Ray for the service, and leaves it again."""

    def close(self) -> None:
        """End every actor, and leave Ray if it was joined for this."""
        try:
            ray.get(self.controller.close.remote(), timeout=10.0)
        except RayError:
            logging.getLogger(__name__).warning("the controller did not answer; its actors end with the driver")
        ray.kill(self.controller)
        remove_placement_group(self.placement)
        if self.started_ray:
            ray.shutdown()


def connect_ray(address: str | None) -> bool:
    """Join the cluster at `address`, or the one the environment names, or start a local one; True if started."""
    if ray.is_initialized():
        return False
    ray.init(
        address=address,
        namespace=NAMESPACE,
        include_dashboard=False,
        logging_level=logging.WARNING,
        log_to_driver=False,
    )
    return True


def find(service: str) -> Any:
    """The controller of a running service.

    Raises `ServiceNotFoundError`.
    """
    try:
        return ray.get_actor(controller_name(service), namespace=NAMESPACE)
    except ValueError:
        raise ServiceNotFoundError(f"no service named {service!r} runs in this Ray cluster") from None


def launch(config: Config) -> Service:
    """Start the service that `config` describes and wait until every worker has loaded the model.

    Raises `ConfigError` (and its kinds) for what cannot work, `DeadlineError` if it is not up in time.
    """
    spec = read_spec(config.model.path)
    tokenizer = read_tokenizer_files(config.model.path)
    started_ray = connect_ray(config.cluster.address)
    placement: PlacementGroup | None = None
    actors: list[Any] = []
    try:
        _check_name(config.cluster.name)
        placement = _place(config)
        workers = _start_workers(config, placement)
        actors += workers.values()
        described = _loaded(workers, config.cluster.start_timeout_s)
        nodes = sorted({worker.node for worker in described})
        _check_store(config, nodes, described[0])
        pools = {node: _start_pool(config, node, described[0]) for node in nodes}
        actors += pools.values()
        description = ServiceDescription(
            config=config,
            vocab_size=spec.vocab_size,
            max_context=min(worker.max_context for worker in described),
            generation_defaults=dict(spec.generation_defaults),
            tokenizer=tokenizer,
        )
        controller = (
            ray.remote(ControllerActor)
            .options(name=controller_name(config.cluster.name), namespace=NAMESPACE, num_cpus=0)
            .remote(description, workers, described, pools)
        )
        actors.append(controller)
        _wait([controller.begin.remote()], config.cluster.start_timeout_s, "the controller")
        for worker in workers.values():
            worker.warm.remote()
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        if placement is not None:
            remove_placement_group(placement)
        if started_ray:
            ray.shutdown()
        raise
    return Service(controller=controller, placement=placement, started_ray=started_ray)


def _check_name(service: str) -> None:
    try:
        find(service)
    except ServiceNotFoundError:
        return
    raise ConfigError(f"cluster.name: a service named {service!r} runs in this Ray cluster already")


def _place(config: Config) -> PlacementGroup:
    """Room for every worker, or an error that names what was asked for and what there is."""
    cluster = config.cluster
    per_worker = {"CPU": float(cluster.cpus_per_worker)}
    if cluster.gpus_per_worker:
        per_worker["GPU"] = float(cluster.gpus_per_worker)
    total = ray.cluster_resources()
    for kind, each in per_worker.items():
        asked, there = each * cluster.workers, total.get(kind, 0.0)
        if asked > there:
            raise ClusterTooSmallError(
                f"cluster.workers: {cluster.workers} workers of {each:g} {kind} need {asked:g} {kind}, "
                f"the Ray cluster has {there:g}"
            )
    placement = placement_group([dict(per_worker) for _ in range(cluster.workers)], strategy="PACK")
    try:
        ray.get(placement.ready(), timeout=PLACEMENT_S)
    except GetTimeoutError:
        remove_placement_group(placement)
        free = ray.available_resources()
        wanted = ", ".join(f"{each * cluster.workers:g} {kind}" for kind, each in per_worker.items())
        there = ", ".join(f"{free.get(kind, 0.0):g} of {total.get(kind, 0.0):g} {kind}" for kind in per_worker)
        raise ClusterTooSmallError(
            f"cluster.workers: {cluster.workers} workers need {wanted}; {there} are free, "
            f"and no nodes could hold them within {PLACEMENT_S:g} s"
        ) from None
    return placement


def _start_workers(config: Config, placement: PlacementGroup) -> dict[WorkerId, Any]:
    cluster = config.cluster
    actor = ray.remote(concurrency_groups=GROUPS)(Worker)
    weights_id = uuid.uuid4().hex
    workers = {}
    for index in range(cluster.workers):
        worker = WorkerId(f"worker-{index}")
        workers[worker] = actor.options(
            num_cpus=cluster.cpus_per_worker,
            num_gpus=cluster.gpus_per_worker,
            max_restarts=cluster.max_restarts,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(cluster.cpus_per_worker)}},
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=index),
        ).remote(worker, config, weights_id)
    return workers


def _loaded(workers: dict[WorkerId, Any], timeout_s: float) -> list[WorkerDescription]:
    described: list[WorkerDescription] = _wait(
        [worker.describe.remote() for worker in workers.values()], timeout_s, f"{len(workers)} workers"
    )
    return described


def _start_pool(config: Config, node: NodeId, worker: WorkerDescription) -> Any:
    return (
        ray.remote(Pool)
        .options(
            name=pool_name(config.cluster.name, node),
            namespace=NAMESPACE,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(node, config.pool, worker.page_tokens, worker.token_bytes, worker.fingerprint)
    )


def _check_store(config: Config, nodes: Sequence[NodeId], worker: WorkerDescription) -> None:
    """Ray never says that its store is full, it spills: so what may be in it must fit, by arithmetic."""
    copies = worker.max_context * worker.token_bytes if len(nodes) > 1 else 0
    need = int(config.pool.budget_bytes) + int(config.pool.reserve_bytes) + copies + STORE_SLACK_BYTES
    for node in ray.nodes():
        store = node["Resources"].get("object_store_memory", 0.0)
        if node["NodeID"] in nodes and need > STORE_SHARE * store:
            most = int(STORE_SHARE * store) - need + int(config.pool.budget_bytes)
            raise ConfigError(
                f"pool.budget_bytes: got {int(config.pool.budget_bytes)}, allowed: at most {max(0, most)} "
                f"with the object store of {int(store)} bytes on node {node['NodeID'][:8]}"
            )


def _wait(refs: list[Any], timeout_s: float, what: str) -> Any:
    start = time.monotonic()
    try:
        return ray.get(refs, timeout=timeout_s)
    except GetTimeoutError:
        raise DeadlineError(f"{what} were not up within {time.monotonic() - start:.0f} s") from None
    except RayError as error:
        raise _typed(error) from None


async def call(method: Any, *args: Any, timeout_s: float) -> Any:
    """Call an actor's method and wait for the answer.

    Raises what the method raised if it is one of our errors, `ServiceClosedError` if the actor is gone,
    `DeadlineError` at the timeout.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await method.remote(*args)
    except TimeoutError:
        raise DeadlineError(f"the service did not answer within {timeout_s:g} s") from None
    except RayActorError:
        raise ServiceClosedError("the service was closed, or its controller died") from None
    except RayTaskError as error:
        raise _typed(error) from None


def _typed(error: RayError) -> Exception:
    """Our own error, if that is what a remote call raised."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, RolloutError) else error
