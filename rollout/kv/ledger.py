"""What the pool of one node holds and what it may still take. Bytes and ids only; no objects, no Ray.

A segment lives while a trajectory holds it. Bytes are charged before an export begins and credited when
the segment is dropped and no lease reads it: `stored + reserved + still_read <= budget`. Whole pages are
found by name, so what one trajectory stored another need not send.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rollout.errors import PoolFullError, SegmentMissingError
from rollout.kv.keys import PageKey
from rollout.types import SegmentId, TrajectoryId


@dataclass(slots=True, kw_only=True)
class _Entry:
    nbytes: int
    keys: tuple[PageKey, ...]
    """Names of its whole pages, in order."""
    holders: set[TrajectoryId] = field(default_factory=set)
    leases: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a page is."""

    segment: SegmentId
    index: int


class PoolLedger:
    """Every answer names the segments whose objects the caller must let go of now."""

    def __init__(self, budget: int, *, first_lease: int = 1) -> None:
        self.budget = budget
        self.reserved = 0
        self.stored = 0
        self.still_read = 0
        self.refused = 0
        self._live: dict[SegmentId, _Entry] = {}
        self._dropped: dict[SegmentId, _Entry] = {}
        """Dropped, but a lease still reads them."""
        self._places: dict[PageKey, dict[SegmentId, int]] = {}
        """Every live segment that has a page, and where in it; what was stored first stands first."""
        self._held: dict[TrajectoryId, set[SegmentId]] = {}
        self._leases: dict[int, tuple[float, tuple[SegmentId, ...]]] = {}
        self._lease_ids = itertools.count(first_lease)

    @property
    def segments(self) -> int:
        return len(self._live)

    def find(self, keys: Sequence[PageKey]) -> list[Place]:
        """The places of the longest prefix of `keys` that is stored."""
        places = []
        for key in keys:
            stored = self._places.get(key)
            if stored is None:
                break
            segment, index = next(iter(stored.items()))
            places.append(Place(segment=segment, index=index))
        return places

    def holds(self, segment: SegmentId) -> bool:
        return segment in self._live

    def held_by(self, trajectory: TrajectoryId) -> frozenset[SegmentId]:
        return frozenset(self._held.get(trajectory, ()))

    def charge(self, nbytes: int) -> None:
        """Reserve room for an export.

        Raises `PoolFullError` if the budget does not allow it.
        """
        used = self.stored + self.reserved + self.still_read
        if used + nbytes > self.budget:
            self.refused += 1
            raise PoolFullError(f"{nbytes} bytes asked for, {self.budget - used} of {self.budget} are free")
        self.reserved += nbytes

    def refund(self, nbytes: int) -> None:
        """The export that was charged did not happen."""
        self.reserved -= nbytes

    def commit(self, segment: SegmentId, nbytes: int, keys: Iterable[PageKey], holder: TrajectoryId) -> None:
        """The charged export is complete: its bytes are stored, held by `holder`."""
        entry = _Entry(nbytes=nbytes, keys=tuple(keys))
        self.reserved -= nbytes
        self.stored += nbytes
        self._live[segment] = entry
        for index, key in enumerate(entry.keys):
            self._places.setdefault(key, {})[segment] = index
        self.hold(holder, [segment])

    def hold(self, trajectory: TrajectoryId, segments: Iterable[SegmentId]) -> None:
        """The trajectory needs these, besides what it holds already."""
        held = self._held.setdefault(trajectory, set())
        for segment in segments:
            self._live[segment].holders.add(trajectory)
            held.add(segment)

    def retain(self, trajectory: TrajectoryId, segments: Iterable[SegmentId]) -> list[SegmentId]:
        """From now on the trajectory holds exactly those of `segments` that are stored."""
        wanted = {segment for segment in segments if segment in self._live}
        released = self._held.pop(trajectory, set()) - wanted
        if wanted:
            self.hold(trajectory, wanted)
        gone: list[SegmentId] = []
        for segment in released:
            entry = self._live.get(segment)
            if entry is None:
                continue
            entry.holders.discard(trajectory)
            if not entry.holders:
                gone += self.drop(segment)
        return gone

    def drop(self, segment: SegmentId) -> list[SegmentId]:
        """Forget a segment, whoever holds it; its bytes are credited once nobody reads it."""
        entry = self._live.pop(segment, None)
        if entry is None:
            return []
        for key in entry.keys:
            stored = self._places[key]
            del stored[segment]
            if not stored:
                del self._places[key]
        for holder in entry.holders:
            self._held[holder].discard(segment)
        self.stored -= entry.nbytes
        if entry.leases:
            self.still_read += entry.nbytes
            self._dropped[segment] = entry
            return []
        return [segment]

    def lease(self, segments: Sequence[SegmentId], deadline: float) -> int:
        """Keep `segments` readable until the lease is closed or `deadline` (same clock as `expire`).

        Raises `SegmentMissingError` if one is not stored.
        """
        for segment in segments:
            if segment not in self._live:
                raise SegmentMissingError(f"segment {segment} is not in the pool")
        for segment in segments:
            self._live[segment].leases += 1
        lease = next(self._lease_ids)
        self._leases[lease] = (deadline, tuple(segments))
        return lease

    def close_lease(self, lease: int) -> list[SegmentId]:
        """The reader is done; closing twice is harmless."""
        _, segments = self._leases.pop(lease, (0.0, ()))
        gone: list[SegmentId] = []
        for segment in segments:
            entry = self._live.get(segment) or self._dropped[segment]
            entry.leases -= 1
            if not entry.leases and segment in self._dropped:
                del self._dropped[segment]
                self.still_read -= entry.nbytes
                gone.append(segment)
        return gone

    def expire(self, now: float) -> list[SegmentId]:
        """Close the leases whose deadline has passed."""
        late = [lease for lease, (deadline, _) in self._leases.items() if deadline <= now]
        return [segment for lease in late for segment in self.close_lease(lease)]

    def audit(self) -> None:
        """Recompute every counter from the structures; asserts if one is wrong."""
        assert self.stored == sum(entry.nbytes for entry in self._live.values()), self.stored
        assert self.still_read == sum(entry.nbytes for entry in self._dropped.values()), self.still_read
        assert self.stored + self.reserved + self.still_read <= self.budget, (self.stored, self.reserved)
        assert all(entry.holders for entry in self._live.values()), "a segment is held by nobody"
        holds = {(holder, segment) for segment, entry in self._live.items() for holder in entry.holders}
        assert holds == {(holder, segment) for holder, held in self._held.items() for segment in held}, holds
        places: dict[PageKey, dict[SegmentId, int]] = {}
        for segment, entry in self._live.items():
            for index, key in enumerate(entry.keys):
                places.setdefault(key, {})[segment] = index
        assert places == self._places, "names and segments differ"
        leases = Counter(segment for _, segments in self._leases.values() for segment in segments)
        entries = self._live | self._dropped
        assert leases == Counter({segment: entry.leases for segment, entry in entries.items() if entry.leases}), leases
        assert all(entry.leases for entry in self._dropped.values()), "a dropped segment is read by nobody"
