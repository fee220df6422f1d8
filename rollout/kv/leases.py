"""Who reads what of a pool, and what copies are open on its node, each until a deadline at most."""

import itertools
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

from rollout.types import SegmentId


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lease:
    deadline: float
    segments: tuple[SegmentId, ...] = ()
    copied: int = 0


class Leases:
    """Numbered; all deadlines are of one clock."""

    def __init__(self, first: int) -> None:
        self.copied = 0
        """Bytes of all open copies."""
        self._open: dict[int, _Lease] = {}
        self._readers: Counter[SegmentId] = Counter()
        self._numbers = itertools.count(first)

    def read(self, segments: Sequence[SegmentId], deadline: float) -> int:
        self._readers.update(segments)
        return self._add(_Lease(deadline=deadline, segments=tuple(segments)))

    def copy(self, nbytes: int, deadline: float) -> int:
        self.copied += nbytes
        return self._add(_Lease(deadline=deadline, copied=nbytes))

    def close(self, lease: int) -> list[SegmentId]:
        """The segments that nobody reads any more; closing twice is harmless."""
        closed = self._open.pop(lease, None)
        if closed is None:
            return []
        self.copied -= closed.copied
        self._readers.subtract(closed.segments)
        unread = [segment for segment in dict.fromkeys(closed.segments) if not self._readers[segment]]
        for segment in unread:
            del self._readers[segment]
        return unread

    def late(self, now: float) -> list[int]:
        """Those whose deadline has passed."""
        return [number for number, lease in self._open.items() if lease.deadline <= now]

    def reads(self, segment: SegmentId) -> bool:
        return segment in self._readers

    def audit(self, known: Set[SegmentId]) -> None:
        """Recompute the counters; asserts if one is wrong or something is read that is not known."""
        assert self.copied == sum(lease.copied for lease in self._open.values()), self.copied
        readers = Counter(segment for lease in self._open.values() for segment in lease.segments)
        assert readers == self._readers, (readers, self._readers)
        assert readers.keys() <= known, f"read, but not there: {readers.keys() - known}"

    def _add(self, lease: _Lease) -> int:
        number = next(self._numbers)
        self._open[number] = lease
        return number
