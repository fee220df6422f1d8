"""Memory that workers give back to a trainer on the same machine, and take again."""

import asyncio
import time
from collections.abc import Callable, Sequence, Set
from typing import Any

from ray.exceptions import RayError

from rollout.cluster.calls import is_lost, one_line
from rollout.cluster.supervision import Supervisor
from rollout.cluster.updater import Until, Updater
from rollout.control.commands import Command
from rollout.control.controller import Controller
from rollout.errors import DeadlineError, UnknownWorkerError, WeightsSourceError
from rollout.reports import ReleaseReport
from rollout.types import MemoryOf, WorkerId

GRACE_S = 30.0
"""For an answer, beyond the time that a worker was given."""


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
        released = self._updater.provision.released
        async with self._updater.turn(timeout_s, "a release of memory"):
            names = self._named(workers)
            fresh = [name for name in names if name not in released]
            moved, commands = self._core.release(fresh, time.time())
            self._carry_out(commands)
            try:
                await self._until(lambda: all(map(self._core.is_empty, names)), deadline - time.monotonic())
                if occupied := [name for name in names if not self._core.is_empty(name)]:
                    raise DeadlineError(f"{', '.join(occupied)}: not empty after {timeout_s:g} s")
                await self._empty(names, max(0.0, deadline - time.monotonic()))
            except BaseException:
                self._carry_out(self._core.reclaim(fresh, time.time()))
                raise
            for name in names:
                released.setdefault(name, set()).update(what)
            return ReleaseReport(nbytes=await self._give_back(names, what), suspended=moved)

    async def _empty(self, names: Sequence[WorkerId], timeout_s: float) -> None:
        calls = (actor.empty.remote(incarnation, timeout_s) for actor, incarnation in self._serving(names).values())
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                answers = await asyncio.gather(*calls, return_exceptions=True)
        except TimeoutError:
            raise DeadlineError(f"no answer within {timeout_s + GRACE_S:g} s") from None
        for answer in answers:  # a worker that is gone is empty
            if isinstance(answer, BaseException) and not is_lost(answer):
                raise DeadlineError(f"pages are still in use: {one_line(answer)}")

    async def _give_back(self, names: Sequence[WorkerId], what: Set[MemoryOf]) -> dict[WorkerId, int]:
        """By those that are there; the others do when they come up."""
        there = self._serving(names)
        calls = (actor.release_memory.remote(incarnation, what) for actor, incarnation in there.values())
        try:
            async with asyncio.timeout(GRACE_S):
                given = await asyncio.gather(*calls, return_exceptions=True)
        except TimeoutError:
            raise DeadlineError(f"no answer within {GRACE_S:g} s") from None
        nbytes: dict[WorkerId, int] = {}
        for name, answer in zip(there, given, strict=True):
            if not isinstance(answer, BaseException):
                nbytes[name] = answer
            elif not is_lost(answer):
                raise answer
        return nbytes

    async def reclaim(self, what: Set[MemoryOf], workers: Sequence[WorkerId] | None, timeout_s: float) -> None:
        """Have workers take memory again, and load the live weights if they lack them.

        Raises `WeightsGoneError` for weights that nobody has: an update brings them.
        """
        released = self._updater.provision.released
        async with self._updater.turn(timeout_s, "a reclaim of memory"):
            try:
                async with asyncio.timeout(timeout_s):
                    for name in sorted(released) if workers is None else self._named(workers):
                        if name in released:
                            await self._reclaim(name, what)
            except TimeoutError:
                raise DeadlineError(f"memory was not reclaimed within {timeout_s:g} s") from None

    async def _reclaim(self, name: WorkerId, what: Set[MemoryOf]) -> None:
        """One that is gone has all its memory when it comes up."""
        released = self._updater.provision.released
        there = self._workers.serving.get(name)
        try:
            if there is not None:
                lacking = await there[0].reclaim_memory.remote(there[1], what)
                released[name] -= what - {MemoryOf.WEIGHTS}
                if MemoryOf.WEIGHTS in what and lacking:
                    await self._updater.provision.to_empty(*there, self._updater.live)
        except RayError as error:
            if not is_lost(error):
                raise WeightsSourceError(f"{name}: {one_line(error)}; update the weights") from None
        released[name] -= what
        self._updater.is_whole(name)

    def _serving(self, names: Sequence[WorkerId]) -> dict[WorkerId, tuple[Any, str]]:
        serving = self._workers.serving
        return {name: serving[name] for name in names if name in serving}

    def _named(self, workers: Sequence[WorkerId] | None) -> list[WorkerId]:
        serving = self._workers.serving
        if unknown := [name for name in workers or () if name not in serving]:
            allowed = ", ".join(sorted(serving)) or "none"
            raise UnknownWorkerError(f"workers: got {', '.join(unknown)}, allowed: some of {allowed}")
        return sorted(serving) if workers is None else sorted(set(workers))
