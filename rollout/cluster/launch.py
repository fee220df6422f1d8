"""Starts a service in a Ray cluster: placement, workers, pools, controller; and finds a running one.

Everything that can be known to be wrong is refused before anything is started. The actors belong to the
driver that started them and end with it.
"""

import asyncio
import logging
import socket
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.cluster.controller import ControllerActor
from rollout.cluster.description import (
    NAMESPACE,
    ServiceDescription,
    WorkerDescription,
    controller_name,
)
from rollout.cluster.pool import start_pool
from rollout.cluster.worker import GROUPS, Worker
from rollout.config import Config
from rollout.errors import (
    ClusterTooSmallError,
    ConfigError,
    DeadlineError,
    RolloutError,
    ServiceClosedError,
    ServiceNotFoundError,
    WorkerLostError,
)
from rollout.model.spec import read_spec
from rollout.text import read_tokenizer_files
from rollout.types import WorkerId

PLACEMENT_S = 20.0
"""Seconds for CPUs or GPUs that the cluster has, but others use, to become free."""
CONNECT_S = 5.0
"""Seconds for a Ray cluster to accept a connection."""
DESCRIBE_S = 30.0
"""Seconds for a running service to say what it is."""
STORE_SLACK_BYTES = 64 << 20
STORE_SHARE = 0.75
"""Of the object store, what may be used: Ray spills above 0.8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A started service, as its driver holds it."""

    controller: Any
    description: ServiceDescription
    actors: tuple[Any, ...]
    """All of it, the controller first, so that it does not see the others end."""
    placement: PlacementGroup
    started_ray: bool
    """This process joined Ray for the service, and leaves it again."""

    def close(self) -> None:
        """End every actor, and leave Ray if it was joined for this."""
        _end(self.actors, self.placement, self.started_ray)


def connect(service: str, address: str | None) -> tuple[Any, ServiceDescription]:
    """Controller and description of a running service; joins the cluster at `address`, or the one running here.

    Raises `ServiceNotFoundError`, `ServiceClosedError` if it ends meanwhile.
    """
    try:
        _join_ray(address or "auto")
    except OSError as error:
        raise ServiceNotFoundError(f"no Ray cluster runs at {address or 'this machine'}: {error}") from None
    controller = _find(service)
    try:
        return controller, ray.get(controller.describe.remote(), timeout=DESCRIBE_S)
    except GetTimeoutError:
        raise DeadlineError(f"the service {service!r} did not answer within {DESCRIBE_S:g} s") from None
    except RayActorError:
        raise ServiceClosedError(f"the service {service!r} was closed, or its controller died") from None


def _join_ray(address: str | None) -> bool:
    """Join the cluster at `address`, or the one the environment names, or start a local one; False if joined before.

    Raises `OSError` if there is none at the address.
    """
    if ray.is_initialized():
        return False
    host, _, port = (address or "").rpartition(":")
    if port.isdigit():  # Ray itself would try for two minutes, then end the process
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    ray.init(
        address=address,
        namespace=NAMESPACE,
        include_dashboard=False,
        logging_level=logging.WARNING,
        log_to_driver=False,
    )
    return True


def _find(service: str) -> Any:
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
    try:
        started_ray = _join_ray(config.cluster.address)
    except OSError as error:
        raise ConfigError(f"cluster.address: no Ray cluster runs at {config.cluster.address}: {error}") from None
    placement: PlacementGroup | None = None
    actors: deque[Any] = deque()
    try:
        _check_name(config.cluster.name)
        placement = _place(config)
        workers = _start_workers(config, placement)
        actors += workers.values()
        described = _loaded(workers, config.cluster.start_timeout_s)
        _check_store(config, described)
        pools = {worker.node: start_pool(config, worker) for worker in {each.node: each for each in described}.values()}
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
        actors.appendleft(controller)
        _wait([controller.begin.remote()], config.cluster.start_timeout_s, "the controller")
    except BaseException as error:
        _end(actors, placement, started_ray)
        if isinstance(error, ActorAlreadyExistsError):
            raise _taken(config.cluster.name) from None
        raise
    return Service(
        controller=controller,
        description=description,
        actors=tuple(actors),
        placement=placement,
        started_ray=started_ray,
    )


def _end(actors: Iterable[Any], placement: PlacementGroup | None, started_ray: bool) -> None:
    for actor in actors:
        ray.kill(actor)
    if placement is not None:
        remove_placement_group(placement)
    if started_ray:
        ray.shutdown()


def _check_name(service: str) -> None:
    try:
        _find(service)
    except ServiceNotFoundError:
        return
    raise _taken(service)


def _taken(service: str) -> ConfigError:
    return ConfigError(f"cluster.name: a service named {service!r} runs in this Ray cluster already")


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
    if placement.wait(PLACEMENT_S):
        return placement
    remove_placement_group(placement)
    free = ray.available_resources()
    wanted = ", ".join(f"{each * cluster.workers:g} {kind}" for kind, each in per_worker.items())
    there = ", ".join(f"{free.get(kind, 0.0):g} of {total.get(kind, 0.0):g} {kind}" for kind in per_worker)
    raise ClusterTooSmallError(
        f"cluster.workers: {cluster.workers} workers need {wanted}; {there} are free, "
        f"and no nodes could hold them within {PLACEMENT_S:g} s"
    )


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


def _check_store(config: Config, described: Sequence[WorkerDescription]) -> None:
    """Ray never says that its store is full, it spills: so what may be in it must fit, by arithmetic.

    Beside the pool that is what the driver reserves, what each worker of a node touches to warm up, and, where
    images come from other nodes, the copy that each of them reads.
    """
    workers = Counter(worker.node for worker in described)
    image_bytes = described[0].max_context * described[0].token_bytes if len(workers) > 1 else 0
    budget = int(config.pool.budget_bytes)
    for node in ray.nodes():
        store = int(node["Resources"].get("object_store_memory", 0.0))
        each = int(config.pool.warm_bytes) + image_bytes
        rest = int(config.pool.reserve_bytes) + workers[node["NodeID"]] * each + STORE_SLACK_BYTES
        most = max(0, int(STORE_SHARE * store) - rest)
        if node["NodeID"] in workers and budget > most:
            raise ConfigError(
                f"pool.budget_bytes: got {budget}, allowed: at most {most} "
                f"with the object store of {store} bytes on node {node['NodeID'][:8]}"
            )


def _wait(refs: list[Any], timeout_s: float, what: str) -> Any:
    start = time.monotonic()
    try:
        return ray.get(refs, timeout=timeout_s)
    except GetTimeoutError:
        raise DeadlineError(f"{what} were not up within {time.monotonic() - start:.0f} s") from None
    except RayActorError as error:
        raise WorkerLostError(f"{what}: a process died while it was started: {_first_line(error)}") from None
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


def _first_line(error: RayError) -> str:
    return str(error).strip().splitlines()[0]


def _typed(error: RayError) -> Exception:
    """Our own error, if that is what a remote call raised."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, RolloutError) else error
