"""The controller actor: the deciding core behind one event loop, with the calls that carry out its commands.

`supervision` watches the workers, `orders` sends what is commanded. Every wait has a deadline.
"""

import asyncio
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

from ray.exceptions import RayError

from rollout.cluster.background import Background
from rollout.cluster.calls import one_line
from rollout.cluster.description import ServiceDescription, WorkerDescription
from rollout.cluster.orders import Orders
from rollout.cluster.parcels import Parcel
from rollout.cluster.provision import Provision
from rollout.cluster.releases import Releases
from rollout.cluster.supervision import Supervisor
from rollout.cluster.updater import Updater
from rollout.cluster.workforce import Post, hire
from rollout.control.collection import Collection
from rollout.control.commands import Command
from rollout.control.controller import Controller
from rollout.control.messages import Event, PoolRoom, Spilled, Tick
from rollout.control.saved import Saved
from rollout.control.submission import Submission
from rollout.errors import InvalidArgumentError, ServiceBusyError, StalledError
from rollout.metrics import KVCheck, ServiceStats
from rollout.reports import (
    AbortReport,
    Collected,
    DiscardReport,
    DrainReport,
    FlushReport,
    ReleaseReport,
    ResumeReport,
    UpdateReport,
)
from rollout.types import (
    Delivery,
    Keep,
    MemoryOf,
    NodeId,
    Then,
    Trajectory,
    TrajectoryId,
    TurnMark,
    UpdateMode,
    Version,
    Weights,
    WorkerId,
)

logger = logging.getLogger(__name__)

CALL_S = 10.0
"""Deadline of a call that should answer at once."""
GRACE_S = 30.0
"""After the timeout of a collection, until it ends although its driver does not say so."""
LOOK_S = 1.0
"""Pause between two looks at the pools: what room they have, whether their nodes spill."""
TICK_S = 0.25
"""Pause between two looks at deadlines and at whether anything goes on."""


class ControllerActor:
    """What clients talk to."""

    def __init__(
        self,
        description: ServiceDescription,
        posts: Mapping[WorkerId, Post],
        described: Sequence[WorkerDescription],
        pools: Mapping[NodeId, Any],
        weights: Weights,
    ) -> None:
        """`weights` are what every worker loads by itself."""
        config = description.config
        self._description = description
        self._config = config
        self._described = list(described)
        self._first_weights = weights
        assert config.pool.budget_bytes is not None, "placement gives it one"
        self._pool_bytes = int(config.pool.budget_bytes)
        self._numbers = itertools.count(len(posts))
        self._background = Background()
        self._workers = Supervisor(
            config, posts, pools, handle=self._handle, admit=self._admit, background=self._background
        )
        self._orders = Orders(
            self._workers, config.pool.export_timeout_s, handle=self._handle, background=self._background
        )
        self._core = Controller(
            workers=len(posts),
            max_context=description.max_context,
            weights=weights,
            abort=config.abort,
            resume=config.resume,
            groups=config.groups,
            versions=config.weights,
        )
        provision = Provision(config.model.path, self._described[0].digest, self._workers)
        until = partial(self._until, progress=False)
        self._updater = Updater(
            self._core,
            self._workers,
            handle=self._handle,
            carry_out=self._carry_out,
            until=until,
            provision=provision,
            admit_s=config.cluster.start_timeout_s,
        )
        self._releases = Releases(self._core, self._workers, self._updater, carry_out=self._carry_out, until=until)
        self._decisions = 0
        """How many were logged."""
        self._changed = asyncio.Event()

    async def begin(self) -> None:
        """Start watching the workers, the pools and the clock."""
        self._background.spawn(self._watch_pools(), lambda _: None)
        self._keep_ticking()
        for described in self._described:
            self._workers.watch(described)

    async def describe(self) -> ServiceDescription:
        return self._description

    # Groups -------------------------------------------------------------------------------------------

    async def submit(self, submissions: Sequence[Submission], wait_s: float = 0.0) -> None:
        """Take groups in, all or none; one that is here already, all of it equal, was told twice.

        Raises `DuplicateKeyError`, and `ServiceBusyError` if there is no room for them within `wait_s`.
        """
        most = self._config.driver.max_outstanding

        def room() -> bool:
            return self._core.outstanding + self._core.new_trajectories(submissions) <= most

        if self._core.new_trajectories(submissions) <= most:
            await self._until(room, wait_s)
        if not room():
            raise ServiceBusyError(
                f"{self._core.outstanding} trajectories are outstanding, {self._core.new_trajectories(submissions)} "
                f"more were submitted; allowed: {most} (driver.max_outstanding)"
            )
        self._carry_out(self._core.submit(submissions, time.time()))

    async def saved(self, arrived: Sequence[str], abandoned: Sequence[str]) -> Saved:
        """Everything that is not known to have arrived at a driver, with its tokens so far."""
        self._core.settle_calls(arrived=arrived, abandoned=abandoned)
        return self._core.saved(time.time())

    async def restore(self, saved: Saved) -> None:
        """Go on with what another service knew. Raises `DuplicateKeyError`."""
        self._carry_out(self._core.restore(saved, time.time()))

    async def settle(self, arrived: Sequence[str], abandoned: Sequence[str]) -> None:
        """What became of calls that groups were handed out to; the last words of a client."""
        self._core.settle_calls(arrived=arrived, abandoned=abandoned)

    async def next_groups(
        self, count: int, timeout_s: float, call: str, arrived: Sequence[str], abandoned: Sequence[str]
    ) -> list[Delivery]:
        """Up to `count` finished groups, waiting until there are so many, or no more to come, or the timeout.

        They are handed out to `call`. Until a later call names it in `arrived` they are kept, and handed out
        again if one names it in `abandoned`. Raises `StalledError`.
        """
        self._core.settle_calls(arrived=arrived, abandoned=abandoned)
        await self._until(lambda: self._core.complete_groups >= min(count, self._core.coming_groups), timeout_s)
        return self._core.take(count, call)

    async def collect(
        self,
        count: int,
        over_sample: float,
        timeout_s: float,
        call: str,
        arrived: Sequence[str],
        abandoned: Sequence[str],
    ) -> Collected:
        """`count` finished groups of training, in a collection named `call`: as soon as it has them, or at the timeout,
        all else is stopped and held. It is handed out as by `next_groups`. Raises `StalledError`.
        """
        self._core.settle_calls(arrived=arrived, abandoned=abandoned)
        begin = Collection(call=call, wanted=count, over_sample=over_sample, stop_when_met=True, ends_at=math.inf)
        self._carry_out(self._core.begin_collection(begin, time.time()))
        try:
            await self._until(lambda: self._core.collected(call) >= min(count, self._core.collectable), timeout_s)
        finally:
            superseded = math.isinf(self._core.collected(call))
            possible = min(count, self._core.collectable)
            self._carry_out(self._core.end_collection(call, time.time()))
        groups = self._core.take_collected(0 if superseded else count, call)
        return Collected(groups=tuple(groups), held=self._core.unfinished_groups, timed_out=len(groups) < possible)

    async def begin_collection(self, call: str, count: int, over_sample: float, timeout_s: float) -> None:
        """Of groups that the driver looks at one by one; it ends when it is told to, or some time after the timeout."""
        now = time.time()
        ends_at = now + timeout_s + GRACE_S
        begin = Collection(call=call, wanted=count, over_sample=over_sample, stop_when_met=False, ends_at=ends_at)
        self._carry_out(self._core.begin_collection(begin, now))

    async def next_collected(
        self, collection: str, timeout_s: float, call: str, arrived: Sequence[str], abandoned: Sequence[str]
    ) -> Delivery | None:
        """The next finished group of training, handed out to `call` as by `next_groups`; None at the timeout, if no
        more are to come, or if another collection took this one's place. Raises `StalledError`.
        """
        self._core.settle_calls(arrived=arrived, abandoned=abandoned)
        await self._until(lambda: self._core.collected(collection) >= min(1, self._core.collectable), timeout_s)
        superseded = math.isinf(self._core.collected(collection))
        return next(iter(self._core.take_collected(0 if superseded else 1, call)), None)

    async def reject(self, call: str) -> None:
        """A group of this collection does not count: another may be begun for it."""
        self._carry_out(self._core.reject(call, time.time()))

    async def end_collection(self, call: str) -> int:
        """Returns the number of groups that are not finished."""
        self._carry_out(self._core.end_collection(call, time.time()))
        return self._core.unfinished_groups

    # Trajectories -------------------------------------------------------------------------------------

    async def abort(self, ids: Sequence[str] | None, keep: Keep, then: Then, timeout_s: float) -> AbortReport:
        """Stop trajectories (all for None; a group's id stands for its members) and wait until they are."""
        ticket, commands = self._core.abort(ids, keep, then, time.time())
        self._carry_out(commands)
        await self._until(lambda: ticket.done, timeout_s, progress=False)
        return ticket.report()

    async def resume(self, ids: Sequence[str] | None) -> ResumeReport:
        """Queue suspended trajectories again (all for None)."""
        report, commands = self._core.resume(ids, time.time())
        self._carry_out(commands)
        return report

    async def discard(self, ids: Sequence[str]) -> DiscardReport:
        """Give trajectories up, tokens and all."""
        report, commands = self._core.discard(ids, time.time())
        self._carry_out(commands)
        return report

    async def extend(self, trajectory_id: TrajectoryId, ids: Sequence[int], call: str) -> None:
        """Append tokens to a suspended trajectory and queue it.

        Raises `NotExtendableError` or `PromptTooLongError`.
        """
        self._carry_out(self._core.extend(trajectory_id, ids, call, time.time()))

    async def next_turns(
        self, known: Mapping[TrajectoryId, TurnMark], count: int, timeout_s: float
    ) -> list[Trajectory]:
        """Trajectories that ended a turn: `count`, or what there is at the timeout, or when no more can come.

        `known` are those that the caller has been told of, with the turn that they had ended.
        """
        await self._until(lambda: self._core.ended_turns(known) >= count or not self._core.busy, timeout_s)
        return self._core.turns(known, count)

    # The service --------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Have no worker run a step until `unpause`."""
        self._carry_out(self._core.pause(time.time()))

    async def unpause(self) -> None:
        self._carry_out(self._core.unpause(time.time()))

    async def update_weights(
        self, parcel: Parcel, version: Version, mode: UpdateMode, timeout_s: float
    ) -> UpdateReport:
        """Have every worker replace its weights.

        Raises `WeightsUpdateError` or `DeadlineError`, and nothing has changed.
        """
        return await self._updater.update(parcel, version, mode, timeout_s)

    async def flush(self) -> FlushReport:
        """Drop all KV that no running trajectory uses, everywhere."""
        pools = list(self._workers.pools.values())
        before = await asyncio.gather(*(self._ask(pool.stored) for pool in pools))
        self._carry_out(self._core.flush(time.time()))
        serving = self._workers.serving.values()
        reports = await asyncio.gather(*(self._ask(worker.flush, incarnation) for worker, incarnation in serving))
        after = await asyncio.gather(*(self._ask(pool.stored) for pool in pools))
        dropped = sum(max(0, old - new) for old, new in zip(before, after, strict=True) if None not in (old, new))
        return sum((report for report in reports if report is not None), FlushReport(pool_bytes=dropped))

    async def release_memory(
        self, what: Set[MemoryOf], workers: Sequence[WorkerId] | None, timeout_s: float
    ) -> ReleaseReport:
        """Have workers (None: all) give memory back; what is on them is suspended and goes on elsewhere, or later.

        Raises `UnknownWorkerError` or `DeadlineError`; then they go on as before.
        """
        return await self._releases.release(what, workers, timeout_s)

    async def reclaim_memory(self, what: Set[MemoryOf], workers: Sequence[WorkerId] | None, timeout_s: float) -> None:
        """Have them take it again; with all of it, and the live weights, they go on.

        Raises `WeightsSourceError` if the live weights cannot be had: then they go on with an update.
        """
        await self._releases.reclaim(what, workers, timeout_s)

    async def _admit(self, actor: Any, described: WorkerDescription) -> None:
        await self._updater.admit(actor, described)

    async def add_workers(self, count: int) -> tuple[WorkerId, ...]:
        """Start more workers; they take part as soon as they have loaded the model.

        Raises `ClusterTooSmallError`, `ConfigError`, `WorkerLostError` or `DeadlineError`, and none is added.
        """
        if not isinstance(count, int) or count < 1:
            raise InvalidArgumentError(f"count: got {count!r}, allowed: an integer >= 1")
        names = [WorkerId(f"worker-{next(self._numbers)}") for _ in range(count)]
        there = [each for each in self._described if each.worker in self._workers.actors]
        self._core.expect_workers(count)
        try:
            posts, described = await asyncio.to_thread(hire, self._description, names, self._first_weights, there)
        except BaseException:
            self._core.expect_workers(-count)
            raise
        self._described += described
        self._workers.hire(posts)
        for each in described:
            self._workers.watch(each)
        return tuple(names)

    async def drain(self, worker: WorkerId, timeout_s: float) -> DrainReport:
        """Take a worker out of service: everything on it is suspended and goes on elsewhere; then its process ends.

        At the timeout that goes on in the background. Raises `UnknownWorkerError`.
        """
        moved, commands = self._core.drain(worker, time.time())
        self._carry_out(commands)
        await self._until(lambda: self._core.is_retired(worker), timeout_s, progress=False)
        return DrainReport(worker=worker, moved=moved, empty=self._core.is_retired(worker))

    async def stats(self) -> ServiceStats:
        """Counters, and snapshots of the workers and pools that answer in time."""
        workers = await asyncio.gather(*(self._ask(worker.stats) for worker in self._workers.actors.values()))
        pools = await asyncio.gather(*(self._ask(pool.stats) for pool in self._workers.pools.values()))
        return ServiceStats(
            phases=self._core.phases,
            suspended=self._core.suspended,
            coming_groups=self._core.coming_groups,
            accounts=self._core.accounts(),
            decisions=self._core.keeping.counts,
            last_decisions=self._core.keeping.last,
            counters=self._core.counters,
            weights=self._core.weights,
            staleness=self._core.staleness,
            troubles=self._core.troubles,
            workers=tuple(stats for stats in workers if stats is not None),
            pools=tuple(stats for stats in pools if stats is not None),
        )

    async def check_kv(self) -> tuple[KVCheck, ...]:
        """Have every worker and pool recompute its accounting."""
        parts = {str(name): worker.audit.remote(CALL_S) for name, worker in self._workers.actors.items()}
        parts |= {f"pool of {node}": pool.audit.remote() for node, pool in self._workers.pools.items()}
        return tuple(await asyncio.gather(*(self._violation(part, answer) for part, answer in parts.items())))

    # Events and commands ------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        self._carry_out(self._core.handle(event, time.time()))

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self._orders.send(command)
        made = self._core.keeping.made
        if made > self._decisions:
            for decision in self._core.keeping.last[self._decisions - made :]:
                logger.info("%s", decision)
            self._decisions = made
        self._changed.set()
        self._changed = asyncio.Event()

    async def _watch_pools(self) -> None:
        while True:
            for node, pool in list(self._workers.pools.items()):
                if (free := await self._ask(pool.room)) is not None:
                    self._handle(PoolRoom(node=node, free_bytes=free, budget_bytes=self._pool_bytes))
                if nbytes := await self._ask(pool.spilled):
                    self._handle(Spilled(node=node, nbytes=nbytes))
            await asyncio.sleep(LOOK_S)

    def _keep_ticking(self) -> None:
        """Deadlines and the watchdog outlive a fault of what they set off."""
        self._background.spawn(self._tick(), lambda _: self._keep_ticking())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._handle(Tick())

    # Waiting ------------------------------------------------------------------------------------------

    async def _until(self, done: Callable[[], bool], timeout_s: float, *, progress: bool = True) -> None:
        """Until `done()`, or the timeout; with `progress`, `StalledError` is raised if nothing goes on."""
        try:
            async with asyncio.timeout(timeout_s):
                while not done():
                    await self._changed.wait()
                    if progress:
                        self._check_progress()
        except TimeoutError:
            return

    def _check_progress(self) -> None:
        now, most = time.time(), self._config.driver.stall_timeout_s
        if self._core.stalled_s(now) >= most:
            state = json.dumps(self._core.state(now), indent=2)
            raise StalledError(f"nothing went on for {most:g} s (driver.stall_timeout_s)", state=state)

    async def _ask(self, method: Any, *args: Any) -> Any:
        try:
            async with asyncio.timeout(CALL_S):
                return await method.remote(*args)
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
