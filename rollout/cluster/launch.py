"""Starts a service in a Ray cluster: placement, workers, pools, controller; and finds a running one.

Everything that can be known to be wrong is refused before anything is started. The actors belong to the
driver that started them and end with it.
"""

import logging
import socket
import time
import uuid
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError, GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout.cluster.calls import one_line, wait_for
from rollout.cluster.controller import ControllerActor
from rollout.cluster.description import (
    NAMESPACE,
    ServiceDescription,
    controller_name,
)
from rollout.cluster.placement import check_alike, check_store, place, remove_places
from rollout.cluster.pool import start_pool
from rollout.cluster.workforce import describe, start_workers
from rollout.config import Config
from rollout.errors import (
    ConfigError,
    DeadlineError,
    ServiceClosedError,
    ServiceError,
    ServiceNotFoundError,
)
from rollout.model.spec import read_spec
from rollout.text import read_tokenizer_files
from rollout.types import Version, Weights, WeightsId, WorkerId

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
"""Seconds for a Ray cluster to accept a connection."""
TOO_SLOW = "timed out during startup"
"""What Ray says if its node was not up in half a minute; the machine may just be busy."""
DESCRIBE_S = 30.0
"""Seconds for a running service to say what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A started service, as its driver holds it."""

    controller: Any
    description: ServiceDescription
    actors: tuple[Any, ...]
    """All of it, the controller first, so that it does not see the others end."""
    started_ray: bool
    """This process joined Ray for the service, and leaves it again."""

    def close(self) -> None:
        """End every actor, and leave Ray if it was joined for this."""
        _end(self.actors, self.started_ray, self.description.config.cluster.name, self.description.service_id)


def connect(service: str, address: str | None) -> tuple[Any, ServiceDescription]:
    """Controller and description of a running service; joins the cluster at `address`, or the one running here.

    Raises `ServiceNotFoundError`, `ServiceClosedError` if it ends meanwhile.
    """
    try:
        _join_ray(address or "auto")
    except (OSError, ValueError) as error:
        raise ServiceNotFoundError(f"no Ray cluster runs at {address or 'this machine'}: {error}") from None
    controller = _find(service)
    try:
        return controller, ray.get(controller.describe.remote(), timeout=DESCRIBE_S)
    except GetTimeoutError:
        raise DeadlineError(f"the service {service!r} did not answer within {DESCRIBE_S:g} s") from None
    except RayActorError:
        raise ServiceClosedError(f"the service {service!r} was closed, or its controller died") from None


def _join_ray(address: str | None, timeout_s: float = 0.0) -> bool:
    """Join the cluster at `address`, or the one the environment names, or start a local one; False if joined before.

    One that does not start in time is started again until `timeout_s`. Raises `OSError` if there is none at the
    address, `ServiceError` if none starts, or it cannot be joined, as one of another version of Ray.
    """
    if ray.is_initialized():
        return False
    host, _, port = (address or "").rpartition(":")
    if port.isdigit():  # Ray itself would try for two minutes, then end the process
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    since = time.monotonic()
    while True:
        try:
            ray.init(
                address=address,
                namespace=NAMESPACE,
                include_dashboard=False,
                logging_level=logging.WARNING,
                log_to_driver=False,
            )
            return True
        except (OSError, ValueError):
            raise
        except Exception as error:  # Ray has no kind for it
            if TOO_SLOW not in str(error) or time.monotonic() - since >= timeout_s:
                where = f"at {address}" if address else "on this machine"
                raise ServiceError(f"no Ray cluster could be started or joined {where}: {one_line(error)}") from error
            logger.warning("Ray did not start, and is asked again: %s", one_line(error))


def _find(service: str) -> Any:
    try:
        return ray.get_actor(controller_name(service), namespace=NAMESPACE)
    except ValueError:
        raise ServiceNotFoundError(f"no service named {service!r} runs in this Ray cluster") from None


def launch(config: Config) -> Service:
    """Start the service that `config` describes and wait until every worker has loaded the model.

    Raises `ConfigError` (and its kinds) for what cannot work, `ServiceError` if Ray does not start or let it in,
    `DeadlineError` if the service is not up in time.
    """
    spec = read_spec(config.model.path)
    tokenizer = read_tokenizer_files(config.model.path)
    try:
        started_ray = _join_ray(config.cluster.address, config.cluster.start_timeout_s)
    except (OSError, ValueError) as error:
        where = config.cluster.address or "this machine"
        raise ConfigError(f"cluster.address: no Ray cluster runs at {where}: {error}") from None
    actors: deque[Any] = deque()
    service_id = uuid.uuid4().hex
    try:
        _check_name(config.cluster.name)
        places = place(config.cluster, config.cluster.workers, service_id)
        names = [WorkerId(f"worker-{index}") for index in range(config.cluster.workers)]
        weights = Weights(WeightsId(uuid.uuid4().hex), Version(0))
        posts = start_workers(config, names, places, weights)
        actors += [post.actor for post in posts.values()]
        described = describe(posts.values(), config.cluster.start_timeout_s)
        check_alike(described, deterministic=config.engine.deterministic)
        pool = check_store(config.pool, config.weights, described)
        config = config.model_copy(update={"pool": pool})
        pools = {worker.node: start_pool(config, worker) for worker in {each.node: each for each in described}.values()}
        actors += pools.values()
        description = ServiceDescription(
            service_id=service_id,
            config=config,
            vocab_size=spec.vocab_size,
            max_context=min(worker.max_context for worker in described),
            generation_defaults=dict(spec.generation_defaults),
            tokenizer=tokenizer,
        )
        controller = (
            ray.remote(ControllerActor)
            .options(
                name=controller_name(config.cluster.name),
                namespace=NAMESPACE,
                num_cpus=0,
                # Beside the driver, with which the service ends anyway. Without CPUs, Ray heeds hard wishes only.
                scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
            )
            .remote(description, posts, described, pools, weights)
        )
        actors.appendleft(controller)
        wait_for([controller.begin.remote()], config.cluster.start_timeout_s, "the controller")
    except BaseException as error:
        _end(actors, started_ray, config.cluster.name, service_id)
        if isinstance(error, ActorAlreadyExistsError):
            raise _taken(config.cluster.name) from None
        raise
    return Service(
        controller=controller,
        description=description,
        actors=tuple(actors),
        started_ray=started_ray,
    )


def _end(actors: Iterable[Any], started_ray: bool, service: str, service_id: str) -> None:
    if not ray.is_initialized():
        return
    for actor in actors:
        ray.kill(actor)
    remove_places(service_id)
    if started_ray and not _other_services(service):
        ray.shutdown()


def _other_services(service: str) -> list[str]:
    """Controllers of other services here, which end when the process that started them leaves Ray."""
    suffix = controller_name("")
    names: list[str] = ray.util.list_named_actors()
    return [name for name in names if name.endswith(suffix) and name != controller_name(service)]


def _check_name(service: str) -> None:
    try:
        _find(service)
    except ServiceNotFoundError:
        return
    raise _taken(service)


def _taken(service: str) -> ConfigError:
    return ConfigError(f"cluster.name: a service named {service!r} runs in this Ray cluster already")
