"""Sends what the core commands to workers and pools.

Commands are sent and forgotten: if one is lost its worker is, and the core hears of that. Only exports are waited for,
each by a task of its own.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from functools import partial

from ray.exceptions import RayError

from rollout.cluster.background import Background
from rollout.cluster.calls import one_line
from rollout.cluster.supervision import Supervisor
from rollout.control.commands import (
    Command,
    Drop,
    Expect,
    Export,
    KeepThere,
    Pause,
    Recall,
    Release,
    Retain,
    Retire,
    Start,
    Stop,
    Unpause,
)
from rollout.control.messages import Event, ExportFailed

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""For the answer of a pool, beyond the time it has for an export."""


class Orders:
    """To all workers and pools of a service."""

    def __init__(
        self,
        workers: Supervisor,
        export_timeout_s: float,
        *,
        handle: Callable[[Event], None],
        background: Background,
    ) -> None:
        """`handle` hears what came of exports."""
        self._workers = workers
        self._export_timeout_s = export_timeout_s
        self._handle = handle
        self._background = background

    def send(self, command: Command) -> None:
        """What is for a worker that was taken out of service is dropped."""
        pools = self._workers.pools
        match command:
            case Retain():
                pools[command.node].retain.remote(command.trajectory_id, command.segments)
            case Expect():
                pools[command.node].expect.remote(command.trajectory_id, command.turn)
            case Drop():
                pools[command.node].drop.remote(command.segment)
            case Export():
                self._background.spawn(self._export(command), partial(self._export_failed, command))
            case Retire():
                self._workers.retire(command.worker)
            case _:
                self._send_to_worker(command)

    def _send_to_worker(self, command: Start | Stop | KeepThere | Recall | Release | Pause | Unpause) -> None:
        address = self._workers.address(command.worker)
        if address is None:
            return
        worker, incarnation = address
        match command:
            case Start():
                worker.start.remote(incarnation, command.assignment)
            case Stop():
                worker.stop.remote(incarnation, (command.trajectory_id, command.epoch))
            case KeepThere():
                worker.keep.remote(incarnation, (command.trajectory_id, command.epoch), command.where)
            case Recall():
                worker.recall.remote(incarnation, (command.trajectory_id, command.epoch))
            case Release():
                worker.release.remote(incarnation, (command.trajectory_id, command.epoch))
            case Pause():
                worker.pause.remote(incarnation)
            case Unpause():
                worker.unpause.remote(incarnation)

    async def _export(self, order: Export) -> None:
        """Have a pool store an image. What it says after the deadline still reaches the core, which lets go of it."""
        began = time.monotonic()
        address = self._workers.address(order.worker)
        if address is None:
            self._export_failed(order, f"{order.worker} was taken out of service")
            return
        answer = asyncio.ensure_future(self._workers.pools[order.node].export.remote(*address, order))
        timeout_s = self._export_timeout_s + GRACE_S
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
        else:
            event = dataclasses.replace(event, seconds=time.monotonic() - began)
        self._handle(event)

    def _export_failed(self, order: Export, error: str) -> None:
        logger.warning("%s: its KV was not stored: %s", order.trajectory_id, error)
        self._handle(ExportFailed(trajectory_id=order.trajectory_id, epoch=order.epoch, error=error))
