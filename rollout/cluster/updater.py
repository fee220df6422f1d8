"""Brings new weights to all workers: one update at a time, all of it or nothing.

    announced → prepared by every worker, while they decode → trajectories paused, or made to leave
    → committed between two steps of every worker → live → trajectories go on

Until the first commit nothing has changed, and any failure leaves all workers on the old weights. A worker that fails
to commit is fenced: its process ends, and the next one serves when it has loaded what is live. So does every worker
that comes up: `admit` is the only way into service.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from rollout.cluster.calls import one_line
from rollout.cluster.description import WorkerDescription
from rollout.cluster.supervision import Supervisor
from rollout.cluster.weights import BroadcastWeights, Parcel
from rollout.control.commands import Command
from rollout.control.controller import Controller
from rollout.control.messages import Event, WeightsLive, WorkerUp
from rollout.errors import DeadlineError, WeightsSourceError, WeightsUpdateError
from rollout.types import UpdateMode, UpdateReport, Version, Weights, WeightsId, WorkerId

logger = logging.getLogger(__name__)

PEER_BUCKET_BYTES = 32 << 20
"""Of weights that one worker gives to another."""


class Updater:
    """Of one service."""

    def __init__(
        self,
        core: Controller,
        workers: Supervisor,
        *,
        handle: Callable[[Event], None],
        carry_out: Callable[[Sequence[Command]], None],
        until: Callable[[Callable[[], bool], float], Awaitable[None]],
        admit_s: float,
    ) -> None:
        """`until` waits for what events bring about; `admit_s` is what a new worker has to load the live weights."""
        self._core = core
        self._workers = workers
        self._handle = handle
        self._carry_out = carry_out
        self._until = until
        self._admit_s = admit_s
        self._turn = asyncio.Lock()
        self._live: tuple[Parcel, ...] | None = ()
        """What makes the live weights of those that workers load by themselves, in this order; None if that was sent
        once."""

    async def update(
        self, parcel: Parcel, version: Version, mode: UpdateMode, timeout_s: float, *, delta: bool
    ) -> UpdateReport:
        """Have every worker replace its weights.

        Raises `WeightsUpdateError`, which says for each worker what went wrong, or `DeadlineError`; all workers have
        the old weights then.
        """
        deadline = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            raise DeadlineError(f"version {version}: another update went on for {timeout_s:g} s") from None
        try:
            return await self._update(parcel, version, mode, deadline, delta=delta)
        finally:
            self._turn.release()

    async def admit(self, actor: Any, described: WorkerDescription) -> None:
        """Take a worker that has come up into service, with the live weights.

        Raises `RayError`, `WeightsError` or `TimeoutError`; it does not serve then.
        """
        async with self._turn:
            live = self._core.weights
            if described.weights != live:
                async with asyncio.timeout(self._admit_s):
                    await self._bring_up_to_date(actor, described.incarnation, live)
            self._workers.serve(described.worker)
            self._handle(
                WorkerUp(
                    worker=described.worker,
                    node=described.node,
                    incarnation=described.incarnation,
                    max_running=described.max_running,
                )
            )

    async def _bring_up_to_date(self, actor: Any, incarnation: str, live: Weights) -> None:
        """Give a worker the live weights: as they came, if that can be read again, or else from one that has them."""
        if self._live is not None:
            try:
                for parcel in self._live:
                    await self._load(actor, incarnation, parcel, live)
                return
            except RayTaskError as error:
                logger.warning("the live weights cannot be read as they came: %s", one_line(error))
        peer = next(iter(self._workers.serving.values()), None)
        if peer is None:
            raise WeightsSourceError(f"nobody has the live weights, version {live.version}: update them again")
        held, parcel = await peer[0].share_weights.remote(peer[1], PEER_BUCKET_BYTES)
        assert held == live, f"a worker in service has {held}, not {live}"
        await self._load(actor, incarnation, parcel, live)

    async def _load(self, actor: Any, incarnation: str, parcel: Parcel, live: Weights) -> None:
        name = uuid.uuid4().hex
        await actor.prepare_weights.remote(incarnation, name, parcel, 1, 2)
        await actor.commit_weights.remote(incarnation, name, live, frozenset({live.weights_id}), False)

    async def _update(
        self, parcel: Parcel, version: Version, mode: UpdateMode, deadline: float, *, delta: bool
    ) -> UpdateReport:
        began = time.monotonic()
        before, weights = self._core.weights, Weights(WeightsId(uuid.uuid4().hex), version)
        self._carry_out(self._core.announce_update(version, time.time()))
        workers = await self._prepare(weights, parcel, deadline)
        prepared = time.monotonic()
        self._carry_out(self._core.begin_update(mode, time.time()))
        try:
            await self._until(lambda: self._core.clear_for_update(mode), deadline - time.monotonic())
            if not self._core.clear_for_update(mode):
                await self._drop(workers, weights)
                raise DeadlineError(f"version {version}: trajectories still ran at the deadline (mode {mode})")
            cleared = time.monotonic()
            committed, failures = await self._commit(workers, weights, mode, deadline)
            for worker in failures:
                self._workers.fence(worker)
            if not committed:
                raise WeightsUpdateError(f"version {version}: no worker loaded it: {_listed(failures)}")
            before_it = self._live if delta else ()
            sent_once = isinstance(parcel, BroadcastWeights) or before_it is None
            self._live = None if before_it is None or sent_once else (*before_it, parcel)
            self._handle(WeightsLive(weights=weights))
        finally:
            self._carry_out(self._core.end_update(time.time()))
        return UpdateReport(
            version=version,
            previous=before.version,
            mode=mode,
            workers=tuple(sorted(committed)),
            fenced={worker: str(error) for worker, error in failures.items()},
            nbytes=max(committed.values()),
            prepare_s=prepared - began,
            pause_s=time.monotonic() - prepared,
            commit_s=time.monotonic() - cleared,
        )

    async def _prepare(self, weights: Weights, parcel: Parcel, deadline: float) -> dict[WorkerId, tuple[Any, str]]:
        """The workers that can read all of it and found that it fits; those that died meanwhile load it later."""
        workers = self._workers.serving
        calls = {
            worker: actor.prepare_weights.remote(incarnation, weights.weights_id, parcel, rank, len(workers) + 1)
            for rank, (worker, (actor, incarnation)) in enumerate(workers.items(), start=1)
        }
        _, failures = await _answers(calls, deadline)
        lost = {worker for worker, error in failures.items() if isinstance(error, RayActorError)}
        ready = {worker: address for worker, address in workers.items() if worker not in failures}
        refused = {worker: error for worker, error in failures.items() if worker not in lost}
        if refused or not ready:
            await self._drop(ready, weights)
            text = _listed(failures) or "no worker is up"
            raise WeightsUpdateError(f"version {weights.version}: nothing was changed: {text}")
        return ready

    async def _commit(
        self, workers: Mapping[WorkerId, tuple[Any, str]], weights: Weights, mode: UpdateMode, deadline: float
    ) -> tuple[dict[WorkerId, int], dict[WorkerId, Exception]]:
        reusable, in_place = self._core.reusable_with(weights), mode is UpdateMode.IN_PLACE
        calls = {
            worker: actor.commit_weights.remote(incarnation, weights.weights_id, weights, reusable, in_place)
            for worker, (actor, incarnation) in workers.items()
        }
        return await _answers(calls, deadline)

    async def _drop(self, workers: Mapping[WorkerId, tuple[Any, str]], weights: Weights) -> None:
        """What was prepared will not be committed."""
        for actor, incarnation in workers.values():
            actor.drop_weights.remote(incarnation, weights.weights_id)


async def _answers(
    calls: Mapping[WorkerId, Any], deadline: float
) -> tuple[dict[WorkerId, int], dict[WorkerId, Exception]]:
    """What workers answered, and what went wrong with the others."""
    waits = {worker: asyncio.ensure_future(answer) for worker, answer in calls.items()}
    if waits:
        await asyncio.wait(waits.values(), timeout=max(0.0, deadline - time.monotonic()))
    answers: dict[WorkerId, int] = {}
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
