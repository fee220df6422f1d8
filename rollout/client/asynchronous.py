"""The client of a service, with coroutines.

Prompts are turned into token ids here, so a bad one raises where it was passed and reaches nobody else.
"""

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from enum import Enum, StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

from rollout.client.handouts import Handouts
from rollout.client.intake import Intake
from rollout.client.state import from_state, to_state
from rollout.cluster import launch
from rollout.cluster.calls import call
from rollout.cluster.description import ServiceDescription
from rollout.cluster.shipment import Publications, Shipment
from rollout.cluster.updater import COMMIT_S
from rollout.config import Config, load_config
from rollout.errors import DeadlineError, InvalidArgumentError, RolloutError, ServiceClosedError, WeightsError
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
from rollout.text import Prompt, Tokenizer
from rollout.types import (
    Delivery,
    GroupId,
    Keep,
    MemoryOf,
    Priority,
    SamplingParams,
    Then,
    Trajectory,
    TrajectoryId,
    TurnMark,
    UpdateMode,
    WorkerId,
    turn_mark,
)

CALL_S = 30.0
"""Deadline of a call that should answer at once, and grace of one with a timeout of its own."""
STATE_S = 300.0
"""Deadline of a call that carries all trajectories."""


E = TypeVar("E", bound=StrEnum)


class _All(Enum):
    ALL = "all"


ALL: Final = _All.ALL
"""Every trajectory that was not handed out."""

Ids = str | Sequence[str] | Literal[_All.ALL]
"""One trajectory id or several; a group's id stands for all its members."""


class AsyncRollout:
    """A client of a running service."""

    def __init__(
        self, controller: Any, description: ServiceDescription, *, key_prefix: str, on_close: Callable[[], None] | None
    ) -> None:
        """`on_close` ends the service; None if somebody else owns it."""
        self._controller = controller
        self._config = description.config
        self._on_close = on_close
        self._closed = False
        self._handouts = Handouts()
        self._publications = Publications()
        self._turns: dict[TrajectoryId, TurnMark] = {}
        """The last turn of each trajectory that was handed out."""
        self.tokenizer = Tokenizer(description.tokenizer)
        self._intake = Intake(description, self.tokenizer, key_prefix=key_prefix)

    @classmethod
    async def start(cls, config: Config | Mapping[str, Any] | Path | str) -> Self:
        """As `rollout.start`, without blocking the event loop."""
        return await asyncio.to_thread(cls.start_blocking, config)

    @classmethod
    async def connect(cls, name: str = "rollout", address: str | None = None) -> Self:
        """As `rollout.connect`, without blocking the event loop."""
        return await asyncio.to_thread(cls.connect_blocking, name, address)

    @classmethod
    def start_blocking(cls, config: Config | Mapping[str, Any] | Path | str) -> Self:
        service = launch.launch(config if isinstance(config, Config) else load_config(config))
        try:
            return cls(service.controller, service.description, key_prefix="", on_close=service.close)
        except BaseException:
            service.close()
            raise

    @classmethod
    def connect_blocking(cls, name: str, address: str | None) -> Self:
        controller, description = launch.connect(name, address)
        return cls(controller, description, key_prefix=f"{uuid.uuid4().hex[:8]}-", on_close=None)

    @property
    def config(self) -> Config:
        return self._config

    @property
    def sampling(self) -> SamplingParams:
        """What a submission without parameters of its own uses."""
        return self._intake.sampling

    async def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        n: int = 1,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        key: str | Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        chat: bool | None = None,
        priority: Priority | str = Priority.TRAIN,
        deadline_s: float | None = None,
        max_group_tokens: int | None = None,
        multi_turn: bool = False,
        caller: str = "",
        partial: bool = False,
        min_version: int | None = None,
        exact_version: int | None = None,
        timeout_s: float = 0.0,
    ) -> list[GroupId]:
        """Queue `n` trajectories of each prompt; returns one group id a prompt, which is its key.

        A prompt is a string, a list of chat messages or a list of token ids; a list of those is several. With
        `chat` (default: run.chat) a string is one user message. Seeds follow from the run seed, or
        `sampling.seed`, and the key, so equal keys draw equal tokens. `sampling` may be a list of one for each of the
        `n` samples.

        `priority` eval goes before train; if no place is free, it takes that of a training trajectory. After
        `deadline_s` a trajectory is stopped as the policy `deadline` says (default: it ends with the tokens it has).
        `max_group_tokens` bounds what all samples of a prompt sample together. With `multi_turn` a stop ends a turn:
        see `next_turns` and `extend`; waits of trajectories of one `caller` are expected to be alike. With `partial`,
        samples are handed out as they end. Nothing is sampled with weights older than `min_version`, or with others
        than `exact_version`: a trajectory waits for these, for weights.version_timeout_s at most, and ends when its
        exact version is past. Beyond driver.max_outstanding it waits for up to `timeout_s`, then raises
        `ServiceBusyError`.

        Raises `InvalidPromptError`, `PromptTooLongError`, `InvalidSamplingError`, `InvalidArgumentError`,
        `UnsatisfiableVersionError` or `DuplicateKeyError`, and nothing of the call is queued. Equal submissions of one
        key are one, so a call that timed out can be repeated.
        """
        if metadata is not None and not isinstance(metadata, Mapping):
            raise InvalidArgumentError(f"metadata: got {type(metadata).__name__}, allowed: a mapping")
        submissions = self._intake.submissions(
            prompts,
            n=n,
            sampling=sampling,
            key=key,
            chat=chat,
            metadata=dict(metadata or {}),
            priority=_one_of(Priority, "priority", priority),
            deadline_s=deadline_s,
            max_group_tokens=max_group_tokens,
            multi_turn=multi_turn,
            caller=caller,
            partial=partial,
            min_version=min_version,
            exact_version=exact_version,
        )
        timeout_s = _seconds(timeout_s)
        await self._call(self._controller.submit, submissions, timeout_s, timeout_s=timeout_s + CALL_S)
        return [submission.group_id for submission in submissions]

    async def next_groups(self, k: int = 1, timeout_s: float = 600.0) -> list[Delivery]:
        """Up to `k` finished groups, each handed out once: as soon as there are `k`, or no more to come without
        a `resume` or `submit`, or at the timeout what there is.

        A call that fails or is cancelled loses nothing: its groups are handed out again. Raises `StalledError` if
        nothing goes on for driver.stall_timeout_s.
        """
        _check_count("k", k)
        handout, deliveries = await self._next_groups(k, _seconds(timeout_s))
        self._handouts.arrived({handout})
        return deliveries

    async def _next_groups(self, k: int, timeout_s: float) -> tuple[str, list[Delivery]]:
        """With the call that they were handed out to."""
        with self._handouts.open() as handout:
            deliveries: list[Delivery] = await self._call(
                self._controller.next_groups, k, timeout_s, *handout, timeout_s=timeout_s + CALL_S
            )
        self._forget_turns(deliveries)
        return handout.call, deliveries

    async def as_completed(self, timeout_s: float = 600.0) -> AsyncIterator[Delivery]:
        """Finished groups one by one, until no more are to come without a `resume` or `submit`.

        Raises `DeadlineError` if none finishes for `timeout_s`.
        """
        while True:
            began = time.monotonic()
            deliveries = await self.next_groups(1, timeout_s)
            if deliveries:
                yield deliveries[0]
            elif not (await self.stats()).coming_groups:
                return
            elif time.monotonic() - began >= timeout_s:
                raise DeadlineError(f"no group finished within {timeout_s:g} s")

    async def collect(
        self,
        groups: int,
        *,
        over_sample: float = 0.0,
        accept: Callable[[Delivery], bool] | None = None,
        timeout_s: float = 600.0,
    ) -> Collected:
        """`groups` finished groups of those that were submitted, while a share of `over_sample` more are under way.

        As soon as there are so many, everything else is stopped and held (policy `quota`; `groups.rest: withhold`
        lets it run on), and is what the next `collect` begins with. Groups that `accept` refuses, such as those whose
        rewards are all alike, do not count, and others are begun for them. What was held by something else (a policy,
        `abort`) is not resumed by this. Raises `StalledError`.
        """
        timeout_s = _seconds(timeout_s)
        _check_count("groups", groups)
        if not isinstance(over_sample, int | float) or not 0 <= over_sample < math.inf:
            raise InvalidArgumentError(f"over_sample: got {over_sample!r}, allowed: a share >= 0")
        if accept is not None and not callable(accept):
            raise InvalidArgumentError(f"accept: got {accept!r:.80}, allowed: a function of a Delivery")
        if accept is None:
            with self._handouts.open() as handout:
                collected: Collected = await self._call(
                    self._controller.collect, groups, over_sample, timeout_s, *handout, timeout_s=timeout_s + CALL_S
                )
            self._handouts.arrived({handout.call})
            self._forget_turns(collected.groups)
            return collected
        return await self._collect_accepted(groups, over_sample, accept, timeout_s)

    async def _collect_accepted(
        self, groups: int, over_sample: float, accept: Callable[[Delivery], bool], timeout_s: float
    ) -> Collected:
        taken: list[Delivery] = []
        rejected: list[Delivery] = []
        calls: set[str] = set()
        collection = uuid.uuid4().hex
        deadline = time.monotonic() + timeout_s
        try:
            try:
                await self._call(self._controller.begin_collection, collection, groups, over_sample, timeout_s)
                while len(taken) < groups:
                    left_s = max(0.0, deadline - time.monotonic())
                    handout, delivery = await self._next_collected(collection, left_s)
                    calls.add(handout)
                    if delivery is None:
                        break
                    if accept(delivery):
                        taken.append(delivery)
                    else:
                        rejected.append(delivery)
                        await self._call(self._controller.reject, collection)
            finally:
                held = await self._call(self._controller.end_collection, collection)
        except BaseException:
            self._handouts.abandoned(calls)
            raise
        self._handouts.arrived(calls)
        late = len(taken) < groups and time.monotonic() >= deadline
        return Collected(groups=tuple(taken), rejected=tuple(rejected), held=held, timed_out=late)

    async def _next_collected(self, collection: str, timeout_s: float) -> tuple[str, Delivery | None]:
        """The next group of a collection, with the call that it was handed out to; None if there is none to come."""
        with self._handouts.open() as handout:
            delivery: Delivery | None = await self._call(
                self._controller.next_collected, collection, timeout_s, *handout, timeout_s=timeout_s + CALL_S
            )
        self._forget_turns([delivery] if delivery is not None else [])
        return handout.call, delivery

    async def abort(
        self, ids: Ids = ALL, *, keep: Keep | str = Keep.AUTO, then: Then | str = Then.HOLD, timeout_s: float = 60.0
    ) -> AbortReport:
        """Stop trajectories at their next step, put their KV where `keep` says, and report their tokens so far.

        The KV of one that is suspended already is moved there; with `auto` it stays. What cannot be moved stays where
        it is, which `stats().troubles` tells; tokens are never lost.

        Raises `InvalidArgumentError` for a `keep` or `then` that does not exist.
        """
        timeout_s = _seconds(timeout_s)
        where, what = _one_of(Keep, "keep", keep), _one_of(Then, "then", then)
        if where is Keep.HOST and not self._config.host.bytes:
            raise InvalidArgumentError("keep: got host, which needs host.bytes > 0 in the configuration")
        report: AbortReport = await self._call(
            self._controller.abort, _names(ids), where, what, timeout_s, timeout_s=timeout_s + CALL_S
        )
        return report

    async def resume(self, ids: Ids = ALL) -> ResumeReport:
        """Queue suspended trajectories again; they continue exactly where they stopped. One that ended a turn waits
        for `extend`, and is reported with the unknown ones."""
        report: ResumeReport = await self._call(self._controller.resume, _names(ids))
        return report

    async def discard(self, ids: str | Sequence[str]) -> DiscardReport:
        """Give trajectories up, tokens and all; a group of which all are given up is not handed out."""
        report: DiscardReport = await self._call(self._controller.discard, _names(ids))
        return report

    async def next_turns(self, k: int = 1, timeout_s: float = 600.0) -> list[Trajectory]:
        """Up to `k` trajectories that ended a turn, with their tokens so far, each once a turn: as soon as there are
        `k`, or nothing goes on any more, or at the timeout what there is. Each waits for `extend`, or for
        `abort(then="finish")`, which ends it as completed. Raises `StalledError`.
        """
        _check_count("k", k)
        deadline = time.monotonic() + _seconds(timeout_s)
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            turns: list[Trajectory] = await self._call(
                self._controller.next_turns, dict(self._turns), k, left_s, timeout_s=left_s + CALL_S
            )
            # Another call of this client may have been told meanwhile.
            new = [turn for turn in turns if self._turns.get(turn.trajectory_id) != turn_mark(turn)]
            self._turns.update((turn.trajectory_id, turn_mark(turn)) for turn in new)
            if new or not turns:
                return new

    async def extend(
        self, trajectory: Trajectory | str, what: str | Sequence[Mapping[str, Any]] | Sequence[int]
    ) -> None:
        """Append tokens that were not sampled to a suspended trajectory, or one that waits after a turn, and queue it.

        `what` is token ids or text, taken as they are, or chat messages, which become what follows an answer in the
        model's chat template; for these pass the trajectory as it was handed out, so that its last token is known.
        Nothing that was there is tokenised again, budgets stay as they are, and only the new tokens are computed.
        Raises `NotExtendableError`, `PromptTooLongError` or `InvalidPromptError`.
        """
        name = TrajectoryId(trajectory if isinstance(trajectory, str) else trajectory.trajectory_id)
        ids = self._intake.appended_ids(what, to=trajectory if isinstance(trajectory, Trajectory) else None)
        await self._call(self._controller.extend, name, ids, uuid.uuid4().hex)

    async def pause(self) -> None:
        """Have no worker run a step, and start nothing, until `unpause`.

        Aborts and submissions are taken all the same, and calls that wait do so until their timeout; that is no stall.
        """
        await self._call(self._controller.pause)

    async def unpause(self) -> None:
        await self._call(self._controller.unpause)

    async def update_weights(
        self,
        source: Path | str | Mapping[str, Any] | Iterable[tuple[str, Any]],
        version: int,
        *,
        mode: UpdateMode | str | None = None,
        delta: bool = False,
        timeout_s: float | None = None,
    ) -> UpdateReport:
        """Have every worker replace its weights, between two steps; what is queued starts on the new ones.

        `source` is a directory of safetensors that every node can read, or tensors under their Hugging Face names, in
        a mapping or as pairs, which are read once, in this process, and sent as weights.transport says. With `delta`
        tensors that are not named stay as they are. `version` is the label that tokens carry; an older one than the
        live one is a rollback, and works. `mode` is what happens to trajectories that run (default: weights.mode).

        Updates are done one after the other. Raises `WeightsUpdateError`, which says what was wrong for each worker,
        `WeightsError` for tensors that cannot be read, or `DeadlineError` after `timeout_s` (default:
        weights.timeout_s); the old weights are live then. A worker that fails when the others have begun to replace
        theirs is ended, and serves again when it has the new ones: `fenced` in the report.
        """
        weights = self._config.weights
        chosen = _one_of(UpdateMode, "mode", mode if mode is not None else weights.mode)
        if chosen is UpdateMode.IN_PLACE and weights.kv_reuse.kind == "same_weights":
            raise InvalidArgumentError("mode: got in_place, which needs weights.kv_reuse: stale")
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise InvalidArgumentError(f"version: got {version!r:.80}, allowed: an integer >= 0")
        timeout_s = _seconds(timeout_s) if timeout_s is not None else weights.timeout_s
        deadline = time.monotonic() + timeout_s
        shipment = await asyncio.to_thread(Shipment, source, weights.transport, delta=delta, timeout_s=timeout_s)
        left_s = max(0.0, deadline - time.monotonic())
        sending = asyncio.ensure_future(asyncio.to_thread(shipment.send))
        try:
            report: UpdateReport = await self._call(
                self._controller.update_weights,
                *(shipment.parcel, version, chosen, left_s),
                timeout_s=left_s + COMMIT_S + CALL_S,
            )
        except WeightsError as error:
            self._publications.refused(shipment.written)
            unsent = sending.exception() if sending.done() and not sending.cancelled() else None
            raise error from unsent
        except BaseException:  # it may be live all the same
            self._publications.live(shipment.written, delta=True)
            raise
        finally:
            shipment.close()
            sending.add_done_callback(lambda sent: sent.cancelled() or sent.exception())
        self._publications.live(shipment.written, delta=delta)
        return report

    async def flush(self) -> FlushReport:
        """Drop all KV that no running trajectory uses, in every tier; suspended trajectories compute it again."""
        report: FlushReport = await self._call(self._controller.flush)
        return report

    async def release_memory(
        self,
        what: MemoryOf | str | Sequence[MemoryOf | str] = (MemoryOf.KV, MemoryOf.WEIGHTS),
        *,
        workers: Sequence[str] | None = None,
        timeout_s: float = 60.0,
    ) -> ReleaseReport:
        """Have workers (default: all) give memory back to the system, for a trainer on the same machine.

        What is on them is suspended and goes to the pool, from where other workers, or they themselves after
        `reclaim_memory`, go on with it. Raises `UnknownWorkerError`, or `DeadlineError` if pages are still in use
        then: the workers go on.
        """
        timeout_s = _seconds(timeout_s)
        report: ReleaseReport = await self._call(
            self._controller.release_memory, *(_memory(what), workers, timeout_s), timeout_s=timeout_s + CALL_S
        )
        return report

    async def reclaim_memory(
        self,
        what: MemoryOf | str | Sequence[MemoryOf | str] = (MemoryOf.KV, MemoryOf.WEIGHTS),
        *,
        workers: Sequence[str] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """Have workers take memory again, and load the live weights; those that have all of it go on.

        `update_weights` takes memory for weights by itself. Raises `UnknownWorkerError`, `WeightsGoneError` if the live
        weights cannot be had any more, so that an update is needed, or `DeadlineError`.
        """
        timeout_s = _seconds(timeout_s)
        await self._call(
            self._controller.reclaim_memory, *(_memory(what), workers, timeout_s), timeout_s=timeout_s + CALL_S
        )

    async def state_dict(self) -> dict[str, Any]:
        """Everything that was not handed out, as plain values for a driver's checkpoint: tokens, log-probabilities,
        versions, and what was asked for. KV is not in it, nor are weights.

        Trajectories go on meanwhile. What this client got is not in it; what a call of another client or thread is
        about to get, or did not confirm by a later call, is.
        """
        saved = await self._call(self._controller.saved, *self._handouts.last_words(), timeout_s=STATE_S)
        return to_state(saved, next_key=self._intake.next_key)

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` of another service told: what was held is held, all else is queued, and computes
        its KV again. Load the weights first (`update_weights`), under the version that they had.

        Ages of trajectories, which deadlines count, do not count the time between. Raises `InvalidArgumentError` for
        what is no such state, `InvalidPromptError` for tokens that this model does not have, or `DuplicateKeyError` if
        a group of that key is here; nothing of it is taken then.
        """
        saved, next_key = from_state(state)
        self._intake.check_saved(saved)
        await self._call(self._controller.restore, saved, timeout_s=STATE_S)
        self._intake.next_key = max(self._intake.next_key, next_key)

    async def add_workers(self, count: int = 1) -> tuple[WorkerId, ...]:
        """Start more workers like the others; returns their names once they have loaded the model.

        Raises `ClusterTooSmallError`, `ConfigError`, `WorkerLostError` or `DeadlineError`, and none is added.
        """
        timeout_s = self._config.cluster.start_timeout_s + CALL_S
        added: tuple[WorkerId, ...] = await self._call(self._controller.add_workers, count, timeout_s=timeout_s)
        return added

    async def drain(self, worker: str, timeout_s: float = 60.0) -> DrainReport:
        """Take a worker out of service: what it runs or keeps is suspended and goes on elsewhere, then it ends.

        Raises `UnknownWorkerError` for one that is not there or is the last.
        """
        timeout_s = _seconds(timeout_s)
        report: DrainReport = await self._call(
            self._controller.drain, WorkerId(worker), timeout_s, timeout_s=timeout_s + CALL_S
        )
        return report

    async def stats(self) -> ServiceStats:
        """Counters and snapshots of every part of the service."""
        stats: ServiceStats = await self._call(self._controller.stats)
        return stats

    async def check_kv(self) -> tuple[KVCheck, ...]:
        """Have every worker and pool recompute its accounting from its structures, while it runs."""
        checks: tuple[KVCheck, ...] = await self._call(self._controller.check_kv)
        return checks

    async def close(self) -> None:
        """Leave the service, and end it if this client started it. Closing twice is harmless.

        Every other call raises `ServiceClosedError` from then on.
        """
        if not self._closed and self._on_close is None:
            with contextlib.suppress(RolloutError):  # what this client did not get is handed out to others
                await self._call(self._controller.settle, *self._handouts.last_words())
        self._closed = True
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            await asyncio.get_running_loop().run_in_executor(None, on_close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _forget_turns(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            for trajectory in (*delivery.trajectories, *delivery.dropped):
                self._turns.pop(trajectory.trajectory_id, None)

    async def _call(self, method: Any, *args: Any, timeout_s: float = CALL_S) -> Any:
        if self._closed:
            raise ServiceClosedError("this client was closed")
        return await call(method, *args, timeout_s=timeout_s)


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgumentError(f"{name}: got {value!r:.80}, allowed: an integer >= 1")


def _seconds(timeout_s: float) -> float:
    if not isinstance(timeout_s, int | float) or math.isnan(timeout_s):
        raise InvalidArgumentError(f"timeout_s: got {timeout_s!r:.80}, allowed: seconds")
    return max(0.0, timeout_s)


def _names(ids: Ids) -> list[str] | None:
    if ids is ALL:
        return None
    names = [ids] if isinstance(ids, str) else list(ids) if isinstance(ids, Iterable) else [ids]
    if not all(isinstance(name, str) for name in names):
        raise InvalidArgumentError(f"ids: got {ids!r:.80}, allowed: ids of trajectories or groups, or ALL")
    return names


def _memory(what: MemoryOf | str | Sequence[MemoryOf | str]) -> set[MemoryOf]:
    if not what:
        raise InvalidArgumentError(f"what: got {what!r}, allowed: {', '.join(MemoryOf)}, or both")
    return {_one_of(MemoryOf, "what", each) for each in ([what] if isinstance(what, str) else what)}


def _one_of(kind: type[E], name: str, value: str) -> E:
    """The member of an enumeration that a driver names."""
    try:
        return kind(value)
    except ValueError:
        raise InvalidArgumentError(f"{name}: got {value!r}, allowed: {', '.join(kind)}") from None
