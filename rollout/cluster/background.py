"""Background tasks of an actor, whose faults are heard of."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from rollout.cluster.calls import one_line

logger = logging.getLogger(__name__)


class Background:
    """Keeps its tasks alive until they end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], failed: Callable[[str], None]) -> None:
        """Run `work`; `failed` hears of a fault of ours, so that what waits for it ends."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("a background task failed", exc_info=error)
                failed(one_line(error))

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)
