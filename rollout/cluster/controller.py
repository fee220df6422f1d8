"""The controller actor: the deciding core behind one event loop, with the calls that carry out its commands.

One task per worker polls its events and notices its death; one task per export waits for the pool. Every
wait has a deadline. Commands to workers are sent and forgotten: if one is lost its worker is, and the
core hears of that.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from rollout.cluster.description import ServiceDescription, WorkerDescription
from rollout.control.controller import Controller
from rollout.control.messages import (
    AbortRequested,
    Command,
    Event,
    Export,
    Exported,
    ExportFailed,
    Release,
    ResumeRequested,
    Retain,
    Start,
    Stop,
    WorkerDown,
    WorkerReport,
    WorkerUp,
)
from rollout.control.records import Submission
from rollout.metrics import ServiceStats
from rollout.types import (
    AbortReport,
    Delivery,
    FinishReason,
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
            slice_tokens=config.abort.slice_tokens,
            keep=Keep(config.abort.keep),
            prefer_other=config.resume.prefer == "other",
        )
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        """Start watching the workers."""
        for described in self._described:
            self._spawn(self._watch(self._workers[described.worker], described))

    async def describe(self) -> ServiceDescription:
        return self._description

    async def submit(self, submissions: Sequence[Submission]) -> None:
        """Take groups in.

        Raises `DuplicateKeyError`; the groups before the duplicate are taken in then.
        """
        for submission in submissions:
            self._carry_out(self._core.submit(submission, time.time()))

    async def next_groups(self, count: int, timeout_s: float) -> list[Delivery]:
        """Up to `count` finished groups, waiting until there are so many, or no more to come, or the timeout."""
        await self._until(lambda: self._core.complete_groups >= min(count, self._core.live_groups), timeout_s)
        return self._core.take(count)

    async def abort(self, ids: Sequence[str] | None, keep: Keep, then: Then, timeout_s: float) -> AbortReport:
        """Stop trajectories (all for None; a group's id stands for its members) and wait until they are."""
        known, unknown = self._core.resolve(ids)
        finished = {record.trajectory_id for record in known if record.over}
        asked = [record for record in known if record.trajectory_id not in finished]
        self._handle(
            AbortRequested(trajectory_ids=tuple(record.trajectory_id for record in asked), keep=keep, then=then)
        )
        await self._until(lambda: all(record.intent is None or record.over for record in asked), timeout_s)
        found, unreached = [], []
        for record in asked:
            if record.over and record.finish_reason is not FinishReason.ABORT:
                finished.add(record.trajectory_id)
            elif record.intent is None:
                found.append(record)
            else:
                unreached.append(record.trajectory_id)
        return AbortReport(
            found=tuple(record.trajectory_id for record in found),
            unknown=unknown,
            finished=tuple(sorted(finished)),
            unreached=tuple(unreached),
            partials=tuple(record.snapshot() for record in found),
        )

    async def resume(self, ids: Sequence[str] | None) -> ResumeReport:
        """Queue suspended trajectories again (all for None)."""
        known, unknown = self._core.resolve(ids)
        resumable = tuple(record.trajectory_id for record in known if not record.over)
        over = tuple(record.trajectory_id for record in known if record.over)
        self._handle(ResumeRequested(trajectory_ids=resumable))
        return ResumeReport(resumed=resumable, unknown=unknown + over)

    async def stats(self) -> ServiceStats:
        """Counters, and snapshots of the workers and pools that answer in time."""
        workers = await asyncio.gather(*(self._ask(worker.stats) for worker in self._workers.values()))
        pools = await asyncio.gather(*(self._ask(pool.stats) for pool in self._pools.values()))
        return ServiceStats(
            phases=self._core.phases,
            counters=self._core.counters,
            workers=tuple(stats for stats in workers if stats is not None),
            pools=tuple(stats for stats in pools if stats is not None),
        )

    async def close(self) -> None:
        """End workers and pools. The service is gone; nothing it held can be asked for any more."""
        for task in self._tasks:
            task.cancel()
        for actor in [*self._workers.values(), *self._pools.values()]:
            ray.kill(actor)

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
                case Release():
                    worker, incarnation = self._address(command.worker)
                    worker.release.remote(incarnation, (command.trajectory_id, command.epoch))
                case Retain():
                    self._pools[command.node].retain.remote(command.trajectory_id, command.segments)
                case Export():
                    self._spawn(self._export(command))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _export(self, order: Export) -> None:
        worker, incarnation = self._address(order.worker)
        event: Event
        try:
            async with asyncio.timeout(self._config.pool.export_timeout_s + CALL_S):
                image, sent = await self._pools[order.node].export.remote(worker, incarnation, order)
            event = Exported(trajectory_id=order.trajectory_id, epoch=order.epoch, image=image, sent_bytes=sent)
        except (RayError, TimeoutError) as error:
            logger.warning("%s: its KV was not stored: %s", order.trajectory_id, _one_line(error))
            event = ExportFailed(trajectory_id=order.trajectory_id, epoch=order.epoch, error=_one_line(error))
        self._handle(event)

    def _address(self, worker: WorkerId) -> tuple[Any, str]:
        return self._workers[worker], self._incarnations[worker]

    # Workers ------------------------------------------------------------------------------------------

    async def _watch(self, worker: Any, described: WorkerDescription) -> None:
        """Hand a worker's events to the core, through all its incarnations, until it is gone for good."""
        health = self._config.cluster
        current: WorkerDescription | None = described
        while current is not None:
            self._incarnations[current.worker] = current.incarnation
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
                return _one_line(error)
            if batch.incarnation != described.incarnation:
                return "its process was restarted"
            acknowledged = batch.number
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
                        return described
                    except ActorDiedError as died:
                        error = died
                        break
                    except RayError as unavailable:
                        error = unavailable
                        await asyncio.sleep(RETRY_S)
        except TimeoutError:
            ray.kill(worker)
        self._down(lost, _one_line(error), final=True)
        return None

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

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The supervisor: a background task that fails has met a fault of ours; it is logged with its trace."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a background task of the controller failed", exc_info=task.exception())


def _one_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[0]}" if text else type(cause).__name__
