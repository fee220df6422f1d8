"""Workers and pools that note when what they do begins and ends, on the clock that all processes here share.

Nothing of what they do is replaced: `TRACED` names methods of the product, each wrapped once per process with
two looks at the monotonic clock. Whoever renames one of them renames it here, and in `updates`.
"""

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

import ray

from rollout.cluster import host
from rollout.cluster.host import Host
from rollout.cluster.pool import Pool
from rollout.cluster.reader import PoolReader
from rollout.cluster.worker import Worker
from rollout.config import Config
from rollout.control.commands import Export
from rollout.control.messages import Exported, ExportFailed, WorkerFacts
from rollout.engine.engine import Engine
from rollout.engine.scheduler import Scheduler
from rollout.engine.sequence import Sequence
from rollout.kv import restore
from rollout.kv.restore import Restorer
from rollout.kv.storage import KVStorage
from rollout.types import Weights, WorkerId

Traced = Mapping[str, tuple[Any, str]]
"""Who has what is traced, under which attribute, by the names of the marks."""

TRACED: Traced = {
    "start": (Host, "start"),
    "stop": (Host, "stop"),
    "release": (Host, "release"),
    "export": (Host, "export"),
    "describe": (host, "describe"),
    "step": (Engine, "step"),
    "abort": (Engine, "abort"),
    "free": (Engine, "release"),
    "gather": (KVStorage, "gather"),
    "submit_restore": (Restorer, "submit"),
    "open": (PoolReader, "open"),
    "verify": (restore, "verify_page"),
    "scatter": (KVStorage, "scatter"),
    "restored": (Scheduler, "restored"),
    "sampled": (Sequence, "accept"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that was done, in seconds of the monotonic clock."""

    name: str
    """A key of what is traced, or `pool`."""
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class TracedWorker(Worker):
    """A worker that can say what it did when."""

    traced: ClassVar[Traced] = TRACED

    def __init__(self, worker: WorkerId, config: Config, weights: Weights) -> None:
        super().__init__(worker, config, weights)
        self._marks: deque[Mark] = deque()
        for name, (owner, attribute) in self.traced.items():
            setattr(owner, attribute, _traced(getattr(owner, attribute), name, self._marks))

    @ray.method(concurrency_group="control")
    def marks(self) -> list[Mark]:
        """What was done since the last call."""
        return [self._marks.popleft() for _ in range(len(self._marks))]

    @ray.method(concurrency_group="control")
    def facts(self) -> WorkerFacts:
        """What it measured of itself."""
        assert self._host is not None
        return self._host.facts


class TracedPool(Pool):
    """A pool that can say when it stored what."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._marks: list[Mark] = []

    async def export(self, worker: Any, incarnation: str, order: Export) -> Exported | ExportFailed:
        begin = time.monotonic()
        answer = await super().export(worker, incarnation, order)
        self._marks.append(Mark(name="pool", begin=begin, end=time.monotonic()))
        return answer

    async def marks(self) -> list[Mark]:
        marks, self._marks = self._marks, []
        return marks


class Trace:
    """Marks of one operation."""

    def __init__(self, marks: Iterable[Mark]) -> None:
        self._marks = sorted(marks, key=lambda mark: mark.begin)

    def all(self, name: str) -> list[Mark]:
        return [mark for mark in self._marks if mark.name == name]

    def first(self, name: str) -> Mark:
        return self.all(name)[0]

    def seconds(self, name: str) -> float:
        """Of all marks of that name together."""
        return sum(mark.seconds for mark in self.all(name))

    def within(self, name: str, begin: float, end: float) -> float:
        """Seconds of [begin, end] that marks of that name cover."""
        return sum(max(0.0, min(mark.end, end) - max(mark.begin, begin)) for mark in self.all(name))


def _traced(function: Callable[..., Any], name: str, marks: deque[Mark]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        result = function(*args, **kwargs)
        if hasattr(result, "__enter__"):
            return _TracedEntry(result, name, marks)
        marks.append(Mark(name=name, begin=begin, end=time.monotonic()))
        return result

    return wrapper


class _TracedEntry:
    """A context manager of which entering is noted."""

    def __init__(self, inner: AbstractContextManager[Any], name: str, marks: deque[Mark]) -> None:
        self._inner = inner
        self._name = name
        self._marks = marks

    def __enter__(self) -> Any:
        begin = time.monotonic()
        entered = self._inner.__enter__()
        self._marks.append(Mark(name=self._name, begin=begin, end=time.monotonic()))
        return entered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._inner.__exit__(kind, error, trace)
