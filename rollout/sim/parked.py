"""Which parked sequences of a worker the pool may read: what `cluster.exports` is, without threads.

A sequence's pages are its worker's again once that was asked for and no export reads them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from rollout.errors import SegmentMissingError
from rollout.types import SequenceKey


@dataclass(slots=True, kw_only=True)
class _Open:
    readers: int = 0
    closed: bool = False
    finish: list[Callable[[], None]] = field(default_factory=list)


class ParkedSequences:
    """What one worker has parked, and the exports that read it."""

    def __init__(self, then: Callable[[Callable[[], None]], None]) -> None:
        """`then` is given what is to be done, at the next step boundary, once nobody reads."""
        self._open: dict[SequenceKey, _Open] = {}
        self._then = then

    def open(self, key: SequenceKey) -> None:
        """A sequence was parked, or recalled."""
        self._open.setdefault(key, _Open())

    def begin(self, key: SequenceKey) -> None:
        """An export reads from now on. Raises `SegmentMissingError` if the sequence is not parked any more."""
        parked = self._open.get(key)
        if parked is None or parked.closed:
            raise SegmentMissingError(f"{key[0]} epoch {key[1]} is not parked on this worker")
        parked.readers += 1

    def end(self, key: SequenceKey) -> None:
        self._open[key].readers -= 1
        self._finish(key)

    def close(self, key: SequenceKey, finish: Callable[[], None]) -> None:
        """No export begins any more; `finish` comes when none is under way."""
        parked = self._open.get(key)
        if parked is None:
            self._then(finish)
            return
        parked.closed = True
        parked.finish.append(finish)
        self._finish(key)

    def _finish(self, key: SequenceKey) -> None:
        parked = self._open[key]
        if parked.closed and not parked.readers:
            del self._open[key]
            for finish in parked.finish:
                self._then(finish)
