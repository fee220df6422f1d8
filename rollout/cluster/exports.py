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
from dataclasses import dataclass

from rollout.errors import SegmentMissingError
from rollout.kv.image import Buffer
from rollout.types import SequenceKey


@dataclass(slots=True, kw_only=True)
class _Parked:
    pages: tuple[int, ...]
    kv_tokens: int
    deadline: float
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
        self._wake = wake

    @property
    def exporting(self) -> int:
        """Sequences that an export reads."""
        with self._lock:
            return sum(parked.readers > 0 for parked in self._parked.values())

    def open(self, key: SequenceKey, pages: tuple[int, ...], kv_tokens: int, deadline: float) -> None:
        """A sequence was parked; its pages can be exported until `deadline`."""
        with self._lock:
            self._parked[key] = _Parked(pages=pages, kv_tokens=kv_tokens, deadline=deadline)

    def begin(self, key: SequenceKey) -> tuple[tuple[int, ...], int]:
        """Page table and KV count of a parked sequence, kept until `end`.

        Raises `SegmentMissingError` if it is not parked any more.
        """
        with self._lock:
            parked = self._parked.get(key)
            if parked is None or parked.closed:
                raise SegmentMissingError(f"{key[0]} epoch {key[1]} is not parked on this worker")
            parked.readers += 1
            return parked.pages, parked.kv_tokens

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

    def close(self, key: SequenceKey) -> None:
        """No new export may begin."""
        with self._lock:
            if key in self._parked:
                self._parked[key].closed = True

    def collect(self, now: float) -> list[SequenceKey]:
        """Sequences whose pages can be freed now: closed or past their deadline, and read by nobody."""
        with self._lock:
            while not self._gone.empty():
                self._parked[self._gone.get()].readers -= 1
            for parked in self._parked.values():
                parked.closed = parked.closed or parked.deadline <= now
            done = [key for key, parked in self._parked.items() if parked.closed and not parked.readers]
            for key in done:
                del self._parked[key]
        return done
