"""The controller actor: the deciding core behind one event loop, with the calls that carry out its commands.

One task per worker polls its events and notices its death; one task per export waits for the pool. Every
wait has a deadline. Commands to workers are sent and forgotten: if one is lost its worker is, and the
core hears of that.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from rollout.cluster.calls import one_line
from rollout.cluster.description import ServiceDescription, WorkerDescription
from rollout.cluster.pool import start_pool
from rollout.control.controller import Controller
from rollout.control.messages import (
    Command,
    Drop,
    Event,
    Expect,
    Export,
    ExportFailed,
    KeepThere,
    Recall,
    Release,
    RestoreFailed,
    Retain,
    Spilled,
    Start,
    Stop,
    WorkerDown,
    WorkerReport,
    WorkerUp,
)
from rollout.control.records import Submission
from rollout.metrics import KVCheck, ServiceStats
from rollout.types import (
    AbortReport,
    Delivery,
    Keep,
    NodeId,
    ResumeReport,
    Then,
    WorkerId,
)

logger = logging.getLogger(__name__)

CALL_S = 10.0
"""Deadline of a call that should answer at once."""
RETRY_S = 0.5
"""Pause between two looks at a worker that is being restarted."""
SPILL_LOOK_S = 5.0
"""Pause between two questions to the pools whether their nodes spill."""


class ControllerActor:
    """What clients talk to."""

    def __init__(
        self,
        description: ServiceDescription,
        workers: Mapping[WorkerId, Any],
        described: Sequence[WorkerDescription],
        pools: Mapping[NodeId, Any],
    ) -> None:
        config = description.config
        self._description = description
        self._config = config
        self._workers = dict(workers)
        self._described = list(described)
        self._pools = dict(pools)
        self._incarnations: dict[WorkerId, str] = {}
        self._core = Controller(
            workers=len(workers),
            max_context=description.max_context,
            slice_tokens=config.abort.slice_tokens,
            keep=Keep(config.abort.keep),
            prefer_other=config.resume.prefer == "other",
        )
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        """Start watching the workers, and the object stores of their nodes."""
        self._spawn(self._watch_stores(), lambda _: None)
        for described in self._described:
            worker = described.worker
            self._spawn(self._watch(self._workers[worker], described), partial(self._give_up, worker))

    async def describe(self) -> ServiceDescription:
        return self._description

    async def submit(self, submissions: Sequence[Submission]) -> None:
        """Take groups in, all or none; one that is here already, all of it equal, was told twice.

        Raises `DuplicateKeyError`.
        """
        self._carry_out(self._core.submit(submissions, time.time()))

    async def next_groups(
        self, count: int, timeout_s: float, call: str, arrived: Sequence[str], abandoned: Sequence[str]
    ) -> list[Delivery]:
        """Up to `count` finished groups, waiting until there are so many, or no more to come, or the timeout.

        They are handed out to `call`. Until a later call names it in `arrived` they are kept, and handed out
        again if one names it in `abandoned`.
        """
        self._core.settle_calls(arrived=arrived, abandoned=abandoned)
        await self._until(lambda: self._core.complete_groups >= min(count, self._core.coming_groups), timeout_s)
        return self._core.take(count, call)

    async def abort(self, ids: Sequence[str] | None, keep: Keep, then: Then, timeout_s: float) -> AbortReport:
        """Stop trajectories (all for None; a group's id stands for its members) and wait until they are."""
        ticket, commands = self._core.abort(ids, keep, then, time.time())
        self._carry_out(commands)
        await self._until(lambda: ticket.done, timeout_s)
        return ticket.report()

    async def resume(self, ids: Sequence[str] | None) -> ResumeReport:
        """Queue suspended trajectories again (all for None)."""
        report, commands = self._core.resume(ids, time.time())
        self._carry_out(commands)
        return report

    async def stats(self) -> ServiceStats:
        """Counters, and snapshots of the workers and pools that answer in time."""
        workers = await asyncio.gather(*(self._ask(worker.stats) for worker in self._workers.values()))
        pools = await asyncio.gather(*(self._ask(pool.stats) for pool in self._pools.values()))
        return ServiceStats(
            phases=self._core.phases,
            counters=self._core.counters,
            troubles=self._core.troubles,
            workers=tuple(stats for stats in workers if stats is not None),
            pools=tuple(stats for stats in pools if stats is not None),
        )

    async def check_kv(self) -> tuple[KVCheck, ...]:
        """Have every worker and pool recompute its accounting."""
        parts = {str(name): worker.audit.remote(CALL_S) for name, worker in self._workers.items()}
        parts |= {f"pool of {node}": pool.audit.remote() for node, pool in self._pools.items()}
        return tuple(await asyncio.gather(*(self._violation(part, answer) for part, answer in parts.items())))

    # Events and commands ------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        self._carry_out(self._core.handle(event, time.time()))

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Start():
                    worker, incarnation = self._address(command.worker)
                    worker.start.remote(incarnation, command.assignment)
                case Stop():
                    worker, incarnation = self._address(command.worker)
                    worker.stop.remote(incarnation, (command.trajectory_id, command.epoch))
                case KeepThere():
                    worker, incarnation = self._address(command.worker)
                    worker.keep.remote(incarnation, (command.trajectory_id, command.epoch), command.where)
                case Recall():
                    worker, incarnation = self._address(command.worker)
                    worker.recall.remote(incarnation, (command.trajectory_id, command.epoch))
                case Release():
                    worker, incarnation = self._address(command.worker)
                    worker.release.remote(incarnation, (command.trajectory_id, command.epoch))
                case Retain():
                    self._pools[command.node].retain.remote(command.trajectory_id, command.segments)
                case Expect():
                    self._pools[command.node].expect.remote(command.trajectory_id, command.turn)
                case Drop():
                    self._pools[command.node].drop.remote(command.segment)
                case Export():
                    self._spawn(self._export(command), partial(self._export_failed, command))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _export(self, order: Export) -> None:
        """Have a pool store an image. What it says after the deadline still reaches the core, which lets go of it."""
        worker, incarnation = self._address(order.worker)
        answer = asyncio.ensure_future(self._pools[order.node].export.remote(worker, incarnation, order))
        timeout_s = self._config.pool.export_timeout_s + CALL_S
        done, _ = await asyncio.wait([answer], timeout=timeout_s)
        if not done:
            self._export_failed(order, f"the pool did not answer within {timeout_s:g} s")
        try:
            event = await answer
        except RayError as error:
            self._export_failed(order, one_line(error))
            return
        if isinstance(event, ExportFailed):
            logger.warning("%s: its KV was not stored: %s", order.trajectory_id, event.error)
        self._handle(event)

    def _export_failed(self, order: Export, error: str) -> None:
        logger.warning("%s: its KV was not stored: %s", order.trajectory_id, error)
        self._handle(ExportFailed(trajectory_id=order.trajectory_id, epoch=order.epoch, error=error))

    async def _watch_stores(self) -> None:
        while True:
            await asyncio.sleep(SPILL_LOOK_S)
            for node, pool in list(self._pools.items()):
                if nbytes := await self._ask(pool.spilled):
                    self._handle(Spilled(node=node, nbytes=nbytes))

    def _address(self, worker: WorkerId) -> tuple[Any, str]:
        return self._workers[worker], self._incarnations[worker]

    # Workers ------------------------------------------------------------------------------------------

    async def _watch(self, worker: Any, described: WorkerDescription) -> None:
        """Hand a worker's events to the core, through all its incarnations, until it is gone for good."""
        health = self._config.cluster
        current: WorkerDescription | None = described
        while current is not None:
            self._incarnations[current.worker] = current.incarnation
            if current.node not in self._pools:
                self._pools[current.node] = start_pool(self._config, current)
            self._spawn(self._warm(worker, current), lambda _: None)
            self._handle(
                WorkerUp(
                    worker=current.worker,
                    node=current.node,
                    incarnation=current.incarnation,
                    max_running=current.max_running,
                )
            )
            error = await self._relay(worker, current, health.health_interval_s, health.unresponsive_s)
            logger.warning("worker %s is lost: %s", current.worker, error)
            self._down(current, error, final=False)
            current = await self._recover(worker, current)

    async def _warm(self, worker: Any, described: WorkerDescription) -> None:
        """Have a worker touch shared memory, and tell the pool it exports to."""
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(self._config.cluster.start_timeout_s):
                touched = await worker.warm.remote()
            self._pools[described.node].warmed.remote(described.incarnation, touched)

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
            if batch.events:
                self._handle(WorkerReport(worker=described.worker, incarnation=batch.incarnation, events=batch.events))

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
        ray.kill(self._workers[worker])
        incarnation = self._incarnations[worker]
        self._handle(WorkerDown(worker=worker, incarnation=incarnation, error=error, final=True))

    def _down(self, described: WorkerDescription, error: str, *, final: bool) -> None:
        self._handle(WorkerDown(worker=described.worker, incarnation=described.incarnation, error=error, final=final))

    # Waiting ------------------------------------------------------------------------------------------

    async def _until(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Until `done()`, or the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                while not done():
                    await self._changed.wait()
        except TimeoutError:
            return

    async def _ask(self, method: Any) -> Any:
        try:
            async with asyncio.timeout(CALL_S):
                return await method.remote()
        except (RayError, TimeoutError):
            return None

    async def _violation(self, part: str, answer: Any) -> KVCheck:
        try:
            async with asyncio.timeout(2 * CALL_S):
                violation = await answer
        except TimeoutError:
            violation = f"no answer for {2 * CALL_S:g} s"
        except RayError as error:
            violation = f"no answer: {one_line(error)}"
        if violation is not None:
            logger.error("%s: %s", part, violation)
        return KVCheck(part=part, violation=violation)

    def _spawn(self, work: Coroutine[Any, Any, None], failed: Callable[[str], None]) -> None:
        """Run `work` in the background; `failed` hears of a fault of ours, so that what waits for it ends."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("a background task of the controller failed", exc_info=error)
                failed(one_line(error))

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)
