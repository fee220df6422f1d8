"""Memory that workers give back to a trainer on the same machine, and take again."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from ray.exceptions import RayActorError, RayError

from rollout.cluster.calls import one_line
from rollout.cluster.supervision import Supervisor
from rollout.cluster.updater import Until, Updater
from rollout.control.commands import Command
from rollout.control.controller import Controller
from rollout.errors import DeadlineError, UnknownWorkerError, WeightsSourceError
from rollout.reports import ReleaseReport
from rollout.types import MemoryOf, WorkerId

logger = logging.getLogger(__name__)


class Releases:
    """Of one service; takes turns with updates of the weights."""

    def __init__(
        self,
        core: Controller,
        workers: Supervisor,
        updater: Updater,
        *,
        carry_out: Callable[[Sequence[Command]], None],
        until: Until,
    ) -> None:
        self._core = core
        self._workers = workers
        self._updater = updater
        self._carry_out = carry_out
        self._until = until

    async def release(self, what: Set[MemoryOf], workers: Sequence[WorkerId] | None, timeout_s: float) -> ReleaseReport:
        """Empty workers, then have them give memory back; nothing starts on them until they have it again.

        Raises `DeadlineError` if something is still there or in use in the end; then they go on as before.
        """
        deadline = time.monotonic() + timeout_s
        async with self._updater.turn(timeout_s, "a release of memory"):
            names = self._named(workers)
            fresh = [name for name in names if name not in self._updater.released]
            moved, commands = self._core.release(fresh, time.time())
            self._carry_out(commands)
            try:
                await self._until(lambda: all(map(self._core.is_empty, names)), deadline - time.monotonic())
                if occupied := [name for name in names if not self._core.is_empty(name)]:
                    raise DeadlineError(f"{', '.join(occupied)}: not empty after {timeout_s:g} s")
                left_s = max(0.0, deadline - time.monotonic())
                serving = self._workers.serving
                await asyncio.gather(*(actor.empty.remote(named, left_s) for actor, named in _of(serving, names)))
            except BaseException as error:
                self._carry_out(self._core.reclaim(fresh, time.time()))
                if isinstance(error, RayError):
                    raise DeadlineError(f"pages are still in use: {one_line(error)}") from None
                raise
            for name in names:
                self._updater.released.setdefault(name, set()).update(what)
                if MemoryOf.WEIGHTS in what:
                    self._updater.provision.lacking.add(name)
            calls = [actor.release_memory.remote(named, what) for actor, named in _of(serving, names)]
            given = await asyncio.gather(*calls, return_exceptions=True)
            nbytes: dict[WorkerId, int] = {}
            for name, answer in zip(names, given, strict=True):
                if isinstance(answer, BaseException):
                    if not isinstance(answer, RayActorError):
                        raise answer
                    logger.warning("%s died; its memory is given back when it has come up again", name)
                else:
                    nbytes[name] = answer
            return ReleaseReport(nbytes=nbytes, suspended=moved)

    async def reclaim(self, what: Set[MemoryOf], workers: Sequence[WorkerId] | None, timeout_s: float) -> None:
        """Have workers take memory again, and load the live weights if they lack them.

        Raises `WeightsSourceError` for weights that nobody has: an update brings them.
        """
        async with self._updater.turn(timeout_s, "a reclaim of memory"):
            try:
                async with asyncio.timeout(timeout_s):
                    for name in self._named(workers):
                        if name in self._updater.released:
                            await self._reclaim(name, what)
            except TimeoutError:
                raise DeadlineError(f"memory was not reclaimed within {timeout_s:g} s") from None

    async def _reclaim(self, name: WorkerId, what: Set[MemoryOf]) -> None:
        actor, incarnation = self._workers.serving[name]
        lacking = await actor.reclaim_memory.remote(incarnation, what)
        self._updater.released[name] -= what - {MemoryOf.WEIGHTS}
        if MemoryOf.WEIGHTS in what and lacking:
            await self._provide(name, actor, incarnation)
        self._updater.is_whole(name)

    async def _provide(self, name: WorkerId, actor: Any, incarnation: str) -> None:
        try:
            await self._updater.provision.to_empty(actor, incarnation, self._updater.live)
        except RayError as error:
            raise WeightsSourceError(f"{name}: {one_line(error)}; update the weights") from None
        self._updater.has_weights(name)

    def _named(self, workers: Sequence[WorkerId] | None) -> list[WorkerId]:
        serving = self._workers.serving
        if unknown := [name for name in workers or () if name not in serving]:
            allowed = ", ".join(sorted(serving)) or "none"
            raise UnknownWorkerError(f"workers: got {', '.join(unknown)}, allowed: some of {allowed}")
        return sorted(serving) if workers is None else sorted(set(workers))


def _of(serving: Mapping[WorkerId, tuple[Any, str]], names: Sequence[WorkerId]) -> list[tuple[Any, str]]:
    """Actors and incarnations of those that still serve."""
    return [serving[name] for name in names if name in serving]
