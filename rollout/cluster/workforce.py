"""Starts worker actors, each in a place of its own, so that one can be taken out of service alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.cluster.calls import wait_for
from rollout.cluster.description import ServiceDescription, WorkerDescription
from rollout.cluster.placement import check_alike, check_room, check_store, place
from rollout.cluster.worker import GROUPS, Worker
from rollout.config import Config
from rollout.types import Weights, WorkerId

HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Has torch ask the kernel for huge pages on the CPU: attention reads KV from all over memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A worker actor and the resources it holds."""

    actor: Any
    placement: PlacementGroup | None


def start_workers(
    config: Config, names: Iterable[WorkerId], places: Sequence[PlacementGroup], weights: Weights
) -> dict[WorkerId, Post]:
    """One actor in each place; they load the model when they are asked what they are, and call that `weights`."""
    cluster = config.cluster
    actor = ray.remote(concurrency_groups=GROUPS)(Worker)
    posts = {}
    for worker, held in zip(names, places, strict=True):
        started = actor.options(
            num_cpus=cluster.cpus_per_worker,
            num_gpus=cluster.gpus_per_worker,
            max_restarts=cluster.max_restarts,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(cluster.cpus_per_worker), **HUGE_PAGES}},
            scheduling_strategy=PlacementGroupSchedulingStrategy(held, placement_group_bundle_index=0),
        ).remote(worker, config, weights)
        posts[worker] = Post(actor=started, placement=held)
    return posts


def describe(posts: Iterable[Post], timeout_s: float) -> list[WorkerDescription]:
    """Wait until all have loaded the model.

    Raises `ConfigError` for what cannot work, `WorkerLostError` if one died, `DeadlineError`.
    """
    actors = [post.actor for post in posts]
    described: list[WorkerDescription] = wait_for(
        [actor.describe.remote() for actor in actors], timeout_s, f"{len(actors)} workers"
    )
    return described


def hire(
    service: ServiceDescription, names: Sequence[WorkerId], weights: Weights, there: Sequence[WorkerDescription]
) -> tuple[dict[WorkerId, Post], list[WorkerDescription]]:
    """More workers for a running service, loaded, beside those that are `there`. Blocks.

    Raises `ClusterTooSmallError`, `ConfigError`, `WorkerLostError` or `DeadlineError`, and nothing is left of them.
    """
    config = service.config
    places = place(config.cluster, len(names), service.service_id)
    posts: dict[WorkerId, Post] = {}
    try:
        posts = start_workers(config, names, places, weights)
        described = describe(posts.values(), config.cluster.start_timeout_s)
        check_alike([*there, *described], deterministic=config.engine.deterministic)
        check_room(described, max_context=service.max_context)
        check_store(config.pool, config.weights, [*there, *described])
    except BaseException:
        for post in posts.values():
            ray.kill(post.actor)
        for each in places:
            remove_placement_group(each)
        raise
    return posts, described
