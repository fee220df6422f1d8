"""Keeps watch over workers: hands their events to the core, through all their incarnations, until they are gone.

One task per worker polls and notices its death; every wait has a deadline, that of `admit` being the one of the update
before it. Whoever commands a worker asks here for its address.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.placement_group import remove_placement_group

from rollout.cluster.background import Background
from rollout.cluster.calls import one_line
from rollout.cluster.description import WorkerDescription
from rollout.cluster.pool import start_pool
from rollout.cluster.workforce import Post
from rollout.config import Config
from rollout.control.messages import Event, RestoreFailed, WorkerDown, WorkerReport
from rollout.errors import WeightsError
from rollout.types import NodeId, WorkerId

logger = logging.getLogger(__name__)

RETRY_S = 0.5
"""Pause between two looks at a worker that is being restarted."""


class Supervisor:
    """All workers of a service, and the pools of their nodes."""

    def __init__(
        self,
        config: Config,
        posts: Mapping[WorkerId, Post],
        pools: Mapping[NodeId, Any],
        *,
        handle: Callable[[Event], None],
        admit: Callable[[Any, WorkerDescription], Awaitable[None]],
        background: Background,
    ) -> None:
        """`admit` takes a worker into service, and has `serve` called."""
        self._config = config
        self._posts = dict(posts)
        self._handle = handle
        self._admit = admit
        self._background = background
        self._incarnations: dict[WorkerId, str] = {}
        self._serving: set[WorkerId] = set()
        self.pools = dict(pools)

    def watch(self, described: WorkerDescription) -> None:
        """Begin to watch one that has loaded its model."""
        worker = described.worker
        self._background.spawn(self._watch(self._posts[worker].actor, described), partial(self._give_up, worker))

    def hire(self, posts: Mapping[WorkerId, Post]) -> None:
        """More workers; `watch` them when they have loaded."""
        self._posts |= posts

    def retire(self, worker: WorkerId) -> None:
        """End its process and give its place back."""
        post = self._posts.pop(worker)
        self._serving.discard(worker)
        ray.kill(post.actor)
        if post.placement is not None:
            remove_placement_group(post.placement)

    @property
    def actors(self) -> dict[WorkerId, Any]:
        return {worker: post.actor for worker, post in self._posts.items()}

    def address(self, worker: WorkerId) -> tuple[Any, str] | None:
        """Its actor, and the incarnation that commands are for; None if it was retired, with all that was on it."""
        post = self._posts.get(worker)
        return (post.actor, self._incarnations[worker]) if post is not None else None

    def serve(self, worker: WorkerId) -> None:
        """It has the live weights."""
        self._serving.add(worker)

    @property
    def serving(self) -> dict[WorkerId, tuple[Any, str]]:
        """The workers in service, with their actors and incarnations."""
        return {name: (self._posts[name].actor, self._incarnations[name]) for name in sorted(self._serving)}

    def fence(self, worker: WorkerId, why: str) -> None:
        """End its process, of which the core hears at once; it comes back as another one."""
        if worker in self._serving:
            self._serving.discard(worker)
            incarnation = self._incarnations[worker]
            self._handle(WorkerDown(worker=worker, incarnation=incarnation, error=why, final=False))
        if worker in self._posts:
            ray.kill(self._posts[worker].actor, no_restart=False)

    async def _watch(self, worker: Any, described: WorkerDescription) -> None:
        health = self._config.cluster
        current: WorkerDescription | None = described
        while current is not None:
            self._incarnations[current.worker] = current.incarnation
            if current.node not in self.pools:
                self.pools[current.node] = start_pool(self._config, current)
            self._background.spawn(self._warm(worker, current), lambda _: None)
            try:
                await self._admit(worker, current)
            except (RayError, WeightsError, TimeoutError) as refused:
                error = f"it could not load the live weights: {one_line(refused)}"
                self.fence(current.worker, error)
            else:
                error = await self._relay(worker, current, health.health_interval_s, health.unresponsive_s)
            self._serving.discard(current.worker)
            if current.worker not in self._posts:
                return  # it was retired
            logger.warning("worker %s is lost: %s", current.worker, error)
            self._down(current, error, final=False)
            current = await self._recover(worker, current)

    async def _warm(self, worker: Any, described: WorkerDescription) -> None:
        """Have a worker touch shared memory, and tell the pool it exports to."""
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(self._config.cluster.start_timeout_s):
                touched = await worker.warm.remote()
            self.pools[described.node].warmed.remote(described.incarnation, touched)

    async def _relay(self, worker: Any, described: WorkerDescription, wait_s: float, unresponsive_s: float) -> str:
        """Poll one incarnation for as long as it answers; returns why it does no more."""
        acknowledged = 0
        while True:
            try:
                async with asyncio.timeout(wait_s + unresponsive_s):
                    batch = await worker.poll.remote(acknowledged, wait_s)
            except TimeoutError:
                ray.kill(worker, no_restart=False)
                return f"no answer for {wait_s + unresponsive_s:g} s"
            except RayError as error:
                return one_line(error)
            if batch.incarnation != described.incarnation:
                return "its process was restarted"
            acknowledged = batch.number
            if batch.silent_s > unresponsive_s:
                ray.kill(worker, no_restart=False)
                return f"its engine did not finish a step for {batch.silent_s:.0f} s"
            for event in batch.events:
                if isinstance(event, RestoreFailed):
                    logger.warning("%s: its KV is computed again: %s", event.trajectory_id, event.error)
            if batch.events or batch.facts is not None:
                self._handle(
                    WorkerReport(
                        worker=described.worker,
                        incarnation=batch.incarnation,
                        events=batch.events,
                        facts=batch.facts,
                    )
                )

    async def _recover(self, worker: Any, lost: WorkerDescription) -> WorkerDescription | None:
        """Wait for Ray to restart a worker and for it to load; None, and the core knows, if it does not."""
        error: Exception = TimeoutError()
        try:
            async with asyncio.timeout(self._config.cluster.start_timeout_s):
                while True:
                    try:
                        described: WorkerDescription = await worker.describe.remote()
                        if described.incarnation != lost.incarnation:
                            return described
                        ray.kill(worker, no_restart=False)  # alive, but commands to it may have been lost
                    except ActorDiedError as died:
                        error = died
                        break
                    except RayError as unavailable:
                        error = unavailable
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            ray.kill(worker)
        self._down(lost, one_line(error), final=True)
        return None

    def _give_up(self, worker: WorkerId, error: str) -> None:
        """Nobody watches a worker any more."""
        if worker in self._posts:
            ray.kill(self._posts[worker].actor)
        incarnation = self._incarnations[worker]
        self._handle(WorkerDown(worker=worker, incarnation=incarnation, error=error, final=True))

    def _down(self, described: WorkerDescription, error: str, *, final: bool) -> None:
        self._handle(WorkerDown(worker=described.worker, incarnation=described.incarnation, error=error, final=final))
