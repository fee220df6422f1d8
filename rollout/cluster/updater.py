"""Brings new weights to all workers: one update at a time, all of it or nothing.

    prepared by every worker, while they decode → announced → trajectories paused, or made to leave
    → committed between two steps of every worker → live → trajectories go on

Until the first commit nothing has changed, and any failure leaves all workers on the old weights. A worker that fails
to commit is fenced: its process ends, and the next one serves when it has loaded what is live. So does every worker
that comes up: `admit` is the only way into service.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from ray.exceptions import RayError

from rollout.cluster.calls import is_lost, one_line
from rollout.cluster.description import WorkerDescription
from rollout.cluster.parcels import Parcel
from rollout.cluster.provision import Live, Provision, agreed
from rollout.cluster.supervision import Supervisor
from rollout.control.commands import Command
from rollout.control.controller import Controller
from rollout.control.messages import Event, WeightsLive, WorkerUp
from rollout.errors import DeadlineError, WeightsGoneError, WeightsUpdateError, WorkerLostError
from rollout.reports import UpdateReport
from rollout.types import MemoryOf, UpdateMode, Version, Weights, WeightsId, WorkerId

logger = logging.getLogger(__name__)

COMMIT_S = 60.0
"""Least time for workers to replace their weights: one that is late is ended."""
Address = tuple[Any, str]
"""An actor, and its incarnation."""
Until = Callable[[Callable[[], bool], float], Awaitable[None]]
"""Waits for what events bring about, for so many seconds at most."""


class Updater:
    """Of one service."""

    def __init__(
        self,
        core: Controller,
        workers: Supervisor,
        *,
        handle: Callable[[Event], None],
        carry_out: Callable[[Sequence[Command]], None],
        until: Until,
        provision: Provision,
        admit_s: float,
    ) -> None:
        """`admit_s` is what a new worker has to load the live weights."""
        self._core = core
        self._workers = workers
        self._handle = handle
        self._carry_out = carry_out
        self._until = until
        self._admit_s = admit_s
        self._lock = asyncio.Lock()
        self.provision = provision

    async def update(self, parcel: Parcel, version: Version, mode: UpdateMode, timeout_s: float) -> UpdateReport:
        """Have every worker replace its weights.

        Raises `WeightsUpdateError`, which says for each worker what went wrong, or `DeadlineError`; all workers have
        the old weights then.
        """
        deadline = time.monotonic() + timeout_s
        async with self.turn(timeout_s, f"version {version}"):
            return await self._update(parcel, version, mode, deadline)

    @contextlib.asynccontextmanager
    async def turn(self, timeout_s: float, what: str) -> AsyncIterator[None]:
        """Nobody else changes weights, or the memory of workers. Raises `DeadlineError`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            raise DeadlineError(
                f"{what}: another update, or a release of memory, went on for {timeout_s:g} s"
            ) from None
        try:
            yield
        finally:
            self._lock.release()

    async def admit(self, actor: Any, described: WorkerDescription) -> None:
        """Take a worker that has come up into service, with the live weights.

        Raises `RayError`, `WeightsError` or `TimeoutError`; it does not serve then.
        """
        worker, released = described.worker, self.provision.released
        async with self._lock:
            async with asyncio.timeout(self._admit_s):
                try:
                    await self.provision.to_new(actor, described, self.live)
                except WeightsGoneError as error:
                    logger.warning("%s waits for an update of the weights: %s", worker, error)
                    released.setdefault(worker, set()).add(MemoryOf.WEIGHTS)
                if worker in released:
                    await actor.release_memory.remote(described.incarnation, released[worker])
                    self._carry_out(self._core.release([worker], time.time())[1])
            self._workers.serve(described.worker)
            self._handle(
                WorkerUp(
                    worker=described.worker,
                    node=described.node,
                    incarnation=described.incarnation,
                    max_running=described.max_running,
                )
            )

    @property
    def live(self) -> Live:
        weights = self._core.weights
        return Live(weights, self._core.reusable_with(weights))

    def has_weights(self, worker: WorkerId) -> None:
        """It has the live ones, and memory for them."""
        self.provision.released.get(worker, set()).discard(MemoryOf.WEIGHTS)

    def is_whole(self, worker: WorkerId) -> None:
        """Things may start on it if it has all its memory again."""
        if self.provision.released.get(worker) == set():
            del self.provision.released[worker]
            self._carry_out(self._core.reclaim([worker], time.time()))

    async def _update(self, parcel: Parcel, version: Version, mode: UpdateMode, deadline: float) -> UpdateReport:
        began = time.monotonic()
        before, weights = self._core.weights, Weights(WeightsId(uuid.uuid4().hex), version)
        workers, digest = await self._prepare(weights, parcel, deadline)
        prepared = time.monotonic()
        self._carry_out(self._core.announce_update(version, time.time()))
        self._carry_out(self._core.begin_update(mode, time.time()))
        try:
            await self._until(lambda: self._core.clear_for_update(mode), deadline - time.monotonic())
            cleared = time.monotonic()
            if cleared >= deadline or not self._core.clear_for_update(mode):
                self._drop(workers, weights)
                raise DeadlineError(f"version {version}: trajectories still ran at the deadline (mode {mode})")
            committed, failures = await self._commit(workers, weights, mode, max(deadline, cleared + COMMIT_S))
            if not committed:
                self._fence(failures)
                raise WeightsUpdateError(f"version {version}: no worker loaded it: {_listed(failures)}")
            for worker in self._workers.serving.keys() - committed.keys():
                failures.setdefault(worker, WorkerLostError("it did not answer when all prepared"))
            self._fence(failures)
            self.provision.updated(parcel, digest)
            self._handle(WeightsLive(weights=weights))
            for worker in committed:
                self.has_weights(worker)
                self.is_whole(worker)
        finally:
            self._carry_out(self._core.end_update(time.time()))
        return UpdateReport(
            version=version,
            previous=before.version,
            mode=mode,
            workers=tuple(sorted(committed)),
            fenced={worker: one_line(error) for worker, error in failures.items()},
            nbytes=max(committed.values()),
            prepare_s=prepared - began,
            pause_s=time.monotonic() - prepared,
            commit_s=time.monotonic() - cleared,
        )

    async def _prepare(self, weights: Weights, parcel: Parcel, deadline: float) -> tuple[dict[WorkerId, Address], str]:
        """The workers that can read all of it and found that it fits, and the digest of what they found; those that
        died meanwhile load it later."""
        workers = self._workers.serving
        calls = {
            worker: actor.prepare_weights.remote(incarnation, weights.weights_id, parcel, rank, len(workers) + 1)
            for rank, (worker, (actor, incarnation)) in enumerate(workers.items(), start=1)
        }
        found, failures = await _answers(calls, deadline)
        ready = {worker: address for worker, address in workers.items() if worker in found}
        digest = agreed({worker: digest for worker, (_, digest) in found.items()})
        refused = not all(map(is_lost, failures.values()))
        if refused or digest is None:
            self._drop(workers, weights)
            text = _listed(failures) or ("they found different weights" if ready else "no worker is up")
            raise WeightsUpdateError(f"version {weights.version}: nothing was changed: {text}")
        return ready, digest

    async def _commit(
        self, workers: Mapping[WorkerId, Address], weights: Weights, mode: UpdateMode, deadline: float
    ) -> tuple[dict[WorkerId, int], dict[WorkerId, Exception]]:
        reusable, in_place = self._core.reusable_with(weights), mode is UpdateMode.IN_PLACE
        calls = {
            worker: actor.commit_weights.remote(incarnation, weights.weights_id, weights, reusable, in_place)
            for worker, (actor, incarnation) in workers.items()
        }
        return await _answers(calls, deadline)

    def _drop(self, workers: Mapping[WorkerId, Address], weights: Weights) -> None:
        """What was prepared, or will be, will not be committed."""
        for actor, incarnation in workers.values():
            actor.drop_weights.remote(incarnation, weights.weights_id)

    def _fence(self, failures: Mapping[WorkerId, Exception]) -> None:
        for worker, error in failures.items():
            self._workers.fence(worker, f"it did not load new weights: {one_line(error)}")


async def _answers(
    calls: Mapping[WorkerId, Any], deadline: float
) -> tuple[dict[WorkerId, Any], dict[WorkerId, Exception]]:
    """What workers answered, and what went wrong with the others."""
    waits = {worker: asyncio.ensure_future(answer) for worker, answer in calls.items()}
    if waits:
        await asyncio.wait(waits.values(), timeout=max(0.0, deadline - time.monotonic()))
    answers: dict[WorkerId, Any] = {}
    failures: dict[WorkerId, Exception] = {}
    for worker, wait in waits.items():
        if not wait.done():
            failures[worker] = DeadlineError("no answer before the deadline")
            wait.add_done_callback(lambda late: late.cancelled() or late.exception())
            continue
        error = wait.exception()
        if error is None:
            answers[worker] = wait.result()
        elif isinstance(error, RayError):
            failures[worker] = error
        else:
            raise error
    return answers, failures


def _listed(failures: Mapping[WorkerId, Exception]) -> str:
    return "; ".join(f"{worker}: {one_line(error)}" for worker, error in sorted(failures.items()))
