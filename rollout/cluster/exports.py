"""Parked sequences whose pages data threads may read. The one structure that the threads of a worker share.

A parked sequence's pages may be freed once its release was asked for, or its deadline passed, **and**
no export still reads them: an export ends when Ray has let go of every buffer it returned. Buffers may
be dropped anywhere, even by the garbage collector in the middle of a locked region, so their end is
put on a queue and counted by `collect`.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollout.errors import SegmentMissingError
from rollout.kv.fence import Fence
from rollout.kv.image import Buffer
from rollout.kv.tiers import PageRef
from rollout.types import SequenceKey


@dataclass(slots=True, kw_only=True)
class _Parked:
    pages: tuple[PageRef, ...]
    kv_tokens: int
    fence: Fence
    deadline: float
    expired: Callable[[], None]
    overdue: Callable[[], None] | None = None
    """What to do if it is closed and still read at the deadline; `expired` then takes the place of `finish`."""
    finish: list[Callable[[], None]] = field(default_factory=list)
    """What to do once it is closed and read by nobody."""
    readers: int = 0
    """Exports at work and buffers alive."""
    closed: bool = False


class Exports:
    """Who reads what."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when `collect` may have something new; it must not lock."""
        self._lock = threading.Lock()
        self._parked: dict[SequenceKey, _Parked] = {}
        self._gone: queue.SimpleQueue[SequenceKey] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Of sequences that were not open to exports."""
        self._wake = wake

    @property
    def exporting(self) -> int:
        """Sequences that an export reads."""
        with self._lock:
            return sum(parked.readers > 0 for parked in self._parked.values())

    def open(
        self,
        key: SequenceKey,
        pages: tuple[PageRef, ...],
        kv_tokens: int,
        fence: Fence,
        deadline: float,
        expired: Callable[[], None],
    ) -> None:
        """A sequence was parked; its pages can be exported, after `fence`, until `deadline`.

        `expired` is what `collect` returns then. Of one that is open already only the deadline changes.
        """
        with self._lock:
            if key in self._parked:
                self._parked[key].deadline = deadline
                return
            self._parked[key] = _Parked(
                pages=pages, kv_tokens=kv_tokens, fence=fence, deadline=deadline, expired=expired
            )

    def begin(self, key: SequenceKey) -> tuple[tuple[PageRef, ...], int, Fence]:
        """Pages and KV count of a parked sequence, kept until `end`, and what must be computed before they are read.

        Raises `SegmentMissingError` if it is not parked any more.
        """
        with self._lock:
            parked = self._parked.get(key)
            if parked is None or parked.closed:
                raise SegmentMissingError(f"{key[0]} epoch {key[1]} is not parked on this worker")
            parked.readers += 1
            return parked.pages, parked.kv_tokens, parked.fence

    def end(self, key: SequenceKey, buffers: Sequence[Buffer] = ()) -> None:
        """The export that `begin` started reads no more than `buffers`, as long as they live."""
        with self._lock:
            self._parked[key].readers += len(buffers) - 1
        for buffer in buffers:
            weakref.finalize(buffer, self._dropped, key).atexit = False
        self._wake()

    def _dropped(self, key: SequenceKey) -> None:
        self._gone.put(key)
        self._wake()

    def close(self, key: SequenceKey, finish: Callable[[], None], overdue: Callable[[], None] | None = None) -> None:
        """No new export may begin; `finish` is what `collect` returns once none is under way.

        With `overdue`, that is returned at the deadline if one still is, and what expired sequences have after it.
        """
        with self._lock:
            parked = self._parked.get(key)
            if parked is None:
                self._ends.put(finish)
            else:
                parked.closed = True
                parked.finish.append(finish)
                parked.overdue = overdue

    def collect(self, now: float) -> list[Callable[[], None]]:
        """What to do now, for sequences that are closed or past their deadline, and read by nobody."""
        with self._lock:
            while not self._gone.empty():
                self._parked[self._gone.get()].readers -= 1
            for parked in self._parked.values():
                if not parked.closed and parked.deadline <= now:
                    parked.closed = True
                    parked.finish.append(parked.expired)
            done = [key for key, parked in self._parked.items() if parked.closed and not parked.readers]
            late = [p for p in self._parked.values() if p.overdue and p.readers and p.deadline <= now]
            overdue = [parked.overdue for parked in late if parked.overdue]
            for parked in late:
                parked.finish, parked.overdue = [parked.expired], None
            finish = [what for key in done for what in self._parked.pop(key).finish]
        while not self._ends.empty():
            finish.append(self._ends.get())
        return overdue + finish
