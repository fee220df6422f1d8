"""The same client for drivers without an event loop: one of its own on a thread behind every call."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rollout.client.asynchronous import ALL, AsyncRollout, Ids
from rollout.config import Config
from rollout.errors import InvalidArgumentError, ServiceClosedError
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
    UpdateMode,
    WorkerId,
)

T = TypeVar("T")


class Rollout:
    """The same surface for drivers without an event loop; `aio` is the asynchronous client behind it."""

    def __init__(self, aio: AsyncRollout) -> None:
        self.aio = aio
        self._loop = asyncio.new_event_loop()
        self._scheduling = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-client", daemon=True)
        self._thread.start()

    @property
    def config(self) -> Config:
        return self.aio.config

    @property
    def sampling(self) -> SamplingParams:
        """As `AsyncRollout.sampling`."""
        return self.aio.sampling

    @property
    def tokenizer(self) -> Tokenizer:
        return self.aio.tokenizer

    def submit(
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
        """As `AsyncRollout.submit`."""
        return self._run(
            self.aio.submit(
                prompts,
                n=n,
                sampling=sampling,
                key=key,
                metadata=metadata,
                chat=chat,
                priority=priority,
                deadline_s=deadline_s,
                max_group_tokens=max_group_tokens,
                multi_turn=multi_turn,
                caller=caller,
                partial=partial,
                min_version=min_version,
                exact_version=exact_version,
                timeout_s=timeout_s,
            )
        )

    def next_groups(self, k: int = 1, timeout_s: float = 600.0) -> list[Delivery]:
        """As `AsyncRollout.next_groups`."""
        return self._run(self.aio.next_groups(k, timeout_s))

    def as_completed(self, timeout_s: float = 600.0) -> Iterator[Delivery]:
        """As `AsyncRollout.as_completed`."""
        deliveries = self.aio.as_completed(timeout_s)
        while (delivery := self._run(_next(deliveries))) is not None:
            yield delivery

    def collect(
        self,
        groups: int,
        *,
        over_sample: float = 0.0,
        accept: Callable[[Delivery], bool] | None = None,
        timeout_s: float = 600.0,
    ) -> Collected:
        """As `AsyncRollout.collect`; `accept` is called on the client's own thread, and may not call it."""
        return self._run(self.aio.collect(groups, over_sample=over_sample, accept=accept, timeout_s=timeout_s))

    def abort(
        self, ids: Ids = ALL, *, keep: Keep | str = Keep.AUTO, then: Then | str = Then.HOLD, timeout_s: float = 60.0
    ) -> AbortReport:
        """As `AsyncRollout.abort`."""
        return self._run(self.aio.abort(ids, keep=keep, then=then, timeout_s=timeout_s))

    def resume(self, ids: Ids = ALL) -> ResumeReport:
        """As `AsyncRollout.resume`."""
        return self._run(self.aio.resume(ids))

    def discard(self, ids: str | Sequence[str]) -> DiscardReport:
        """As `AsyncRollout.discard`."""
        return self._run(self.aio.discard(ids))

    def next_turns(self, k: int = 1, timeout_s: float = 600.0) -> list[Trajectory]:
        """As `AsyncRollout.next_turns`."""
        return self._run(self.aio.next_turns(k, timeout_s))

    def extend(self, trajectory: Trajectory | str, what: str | Sequence[Mapping[str, Any]] | Sequence[int]) -> None:
        """As `AsyncRollout.extend`."""
        self._run(self.aio.extend(trajectory, what))

    def pause(self) -> None:
        """As `AsyncRollout.pause`."""
        self._run(self.aio.pause())

    def unpause(self) -> None:
        """As `AsyncRollout.unpause`."""
        self._run(self.aio.unpause())

    def update_weights(
        self,
        source: Path | str | Mapping[str, Any] | Iterable[tuple[str, Any]],
        version: int,
        *,
        mode: UpdateMode | str | None = None,
        delta: bool = False,
        timeout_s: float | None = None,
    ) -> UpdateReport:
        """As `AsyncRollout.update_weights`; `source` is read on another thread."""
        return self._run(self.aio.update_weights(source, version, mode=mode, delta=delta, timeout_s=timeout_s))

    def flush(self) -> FlushReport:
        """As `AsyncRollout.flush`."""
        return self._run(self.aio.flush())

    def release_memory(
        self,
        what: MemoryOf | str | Sequence[MemoryOf | str] = (MemoryOf.KV, MemoryOf.WEIGHTS),
        *,
        workers: Sequence[str] | None = None,
        timeout_s: float = 60.0,
    ) -> ReleaseReport:
        """As `AsyncRollout.release_memory`."""
        return self._run(self.aio.release_memory(what, workers=workers, timeout_s=timeout_s))

    def reclaim_memory(
        self,
        what: MemoryOf | str | Sequence[MemoryOf | str] = (MemoryOf.KV, MemoryOf.WEIGHTS),
        *,
        workers: Sequence[str] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """As `AsyncRollout.reclaim_memory`."""
        self._run(self.aio.reclaim_memory(what, workers=workers, timeout_s=timeout_s))

    def state_dict(self) -> dict[str, Any]:
        """As `AsyncRollout.state_dict`."""
        return self._run(self.aio.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `AsyncRollout.load_state_dict`."""
        self._run(self.aio.load_state_dict(state))

    def add_workers(self, count: int = 1) -> tuple[WorkerId, ...]:
        """As `AsyncRollout.add_workers`."""
        return self._run(self.aio.add_workers(count))

    def drain(self, worker: str, timeout_s: float = 60.0) -> DrainReport:
        """As `AsyncRollout.drain`."""
        return self._run(self.aio.drain(worker, timeout_s))

    def stats(self) -> ServiceStats:
        """As `AsyncRollout.stats`."""
        return self._run(self.aio.stats())

    def check_kv(self) -> tuple[KVCheck, ...]:
        """As `AsyncRollout.check_kv`."""
        return self._run(self.aio.check_kv())

    def close(self) -> None:
        """As `AsyncRollout.close`."""
        with self._scheduling:
            if self._ended:
                return
            self._ended = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _end(self) -> None:
        """End the calls that other threads wait in, whose groups go to others, and close."""
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await self.aio.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if threading.current_thread() is self._thread:
            work.close()
            raise InvalidArgumentError("accept: it calls this client, which would wait for itself")
        with self._scheduling:
            if self._ended:
                work.close()
                raise ServiceClosedError("this client was closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ServiceClosedError("this client was closed while the call waited") from None
        except BaseException:
            future.cancel()  # an interrupt here must not leave the call to take groups for nobody
            raise


async def _next(deliveries: AsyncIterator[Delivery]) -> Delivery | None:
    return await anext(deliveries, None)


def start(config: Config | Mapping[str, Any] | Path | str) -> Rollout:
    """Start a service in the Ray cluster that the configuration or the environment names, else in a local one.

    `config` is a configuration, a mapping, or the path of a YAML file. The service ends with `close`, or
    with this process. Raises `ConfigError` for what cannot work and `DeadlineError` if it is not up in time.
    """
    return Rollout(AsyncRollout.start_blocking(config))


def connect(name: str = "rollout", address: str | None = None) -> Rollout:
    """A client of the running service `name`; closing it leaves the service running.

    Raises `ServiceNotFoundError`.
    """
    return Rollout(AsyncRollout.connect_blocking(name, address))
