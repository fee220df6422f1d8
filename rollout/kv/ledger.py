"""What the pool of one node holds and what it may still take. Bytes and ids only; no objects, no Ray.

An export holds what it finds and stores by a claim of its own; only when it is complete does the trajectory
hold that, unless a newer epoch has stored something meanwhile. So an export that fails, or is late, takes
nothing away. A segment lives while a trajectory or a claim holds it; one that is dropped is credited when no
lease reads it. Copies are what readers on this node fetch from other nodes; those up to `copy_room` bytes have
their own place beside the budget:

    stored + reserved + still_read + max(0, copied - copy_room) <= budget

Whole pages are found by name, so what one trajectory stored another need not send.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rollout.errors import PoolFullError, SegmentMissingError
from rollout.kv.displacement import StoredImage, choose_victims
from rollout.kv.keys import PageKey
from rollout.kv.leases import Leases
from rollout.types import SegmentId, TrajectoryId, Turn


class DropReason(StrEnum):
    """Why a segment is not in the pool any more."""

    RELEASED = "released"
    """No image needs it."""
    DISPLACED = "displaced"
    """Its images made room for one that is needed sooner."""
    DAMAGED = "damaged"
    """It was of no use to a reader."""
    ABANDONED = "abandoned"
    """The export that stored it was not completed."""


@dataclass(slots=True, kw_only=True)
class _Entry:
    nbytes: int
    keys: tuple[PageKey, ...]
    """Names of its whole pages, in order."""
    holders: set[TrajectoryId] = field(default_factory=set)
    claims: set[int] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class _Image:
    epoch: int
    """Of the newest export that was completed."""
    turn: Turn
    kv_tokens: int
    segments: set[SegmentId]


@dataclass(slots=True, kw_only=True)
class _Claim:
    trajectory: TrajectoryId
    segments: set[SegmentId] = field(default_factory=set)
    reserved: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a page is."""

    segment: SegmentId
    index: int


class PoolLedger:
    """`take_gone` names the segments whose objects the caller must let go of."""

    def __init__(self, budget: int, *, copy_room: int = 0, first_lease: int = 1) -> None:
        self.budget = budget
        self.copy_room = copy_room
        self.reserved = 0
        self.stored = 0
        self.still_read = 0
        self.refused = 0
        self.refused_copies = 0
        self.displaced = 0
        self.dropped: Counter[DropReason] = Counter()
        self._live: dict[SegmentId, _Entry] = {}
        self._dropped: dict[SegmentId, _Entry] = {}
        """Dropped, but a lease still reads them."""
        self._gone: list[SegmentId] = []
        self._places: dict[PageKey, dict[SegmentId, int]] = {}
        """Every live segment that has a page, and where in it; what was stored first stands first."""
        self._images: dict[TrajectoryId, _Image] = {}
        self._claims: dict[int, _Claim] = {}
        self._claim_ids = itertools.count(1)
        self._leases = Leases(first_lease)

    @property
    def segments(self) -> int:
        return len(self._live)

    @property
    def known(self) -> set[SegmentId]:
        """Segments that are live or still read."""
        return {*self._live, *self._dropped}

    @property
    def images(self) -> int:
        return len(self._images)

    @property
    def copied(self) -> int:
        return self._leases.copied

    @property
    def free(self) -> int:
        """Bytes that may be charged without displacing anything."""
        copies = max(0, self.copied - self.copy_room)
        return self.budget - self.stored - self.reserved - self.still_read - copies

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

    def nbytes(self, segments: Iterable[SegmentId]) -> int:
        """Of live segments."""
        return sum(self._live[segment].nbytes for segment in segments)

    def held_by(self, trajectory: TrajectoryId) -> frozenset[SegmentId]:
        image = self._images.get(trajectory)
        return frozenset(image.segments) if image is not None else frozenset()

    def take_gone(self) -> list[SegmentId]:
        """Segments that nobody holds or reads any more, each once."""
        gone, self._gone = self._gone, []
        return gone

    # Exports ------------------------------------------------------------------------------------------

    def open_claim(self, trajectory: TrajectoryId) -> int:
        """An export begins. Its trajectory's image is not displaced before `end_claim`."""
        claim = next(self._claim_ids)
        self._claims[claim] = _Claim(trajectory=trajectory)
        return claim

    def hold(self, claim: int, segments: Iterable[SegmentId]) -> None:
        """The export builds on these."""
        for segment in segments:
            self._live[segment].claims.add(claim)
            self._claims[claim].segments.add(segment)

    def reserve(self, claim: int, nbytes: int, turn: Turn) -> dict[TrajectoryId, frozenset[SegmentId]]:
        """The export will store so many bytes more, no matter what it reserved before, for an image of `turn`.

        Returns whose images were displaced for that, with what of them is gone. Raises `PoolFullError` if the
        budget does not allow it and images that are needed later do not hold enough; nothing is changed then.
        """
        more = nbytes - self._claims[claim].reserved
        victims: list[TrajectoryId] = []
        if more > self.free:
            victims = self._choose_victims(more - self.free, turn)
            if not victims:
                self.refused += 1
                raise PoolFullError(
                    f"{nbytes} bytes asked for, {self.free} of {self.budget} are free, "
                    f"and what is needed later does not hold enough"
                )
        held = {victim: self._images.pop(victim).segments for victim in victims}
        for victim, segments in held.items():
            for segment in segments:
                self._live[segment].holders.discard(victim)
        for segment in set().union(*held.values()):
            self._drop_unless_held(segment, DropReason.DISPLACED)
        self.displaced += len(held)
        self._reserve(claim, nbytes)
        return {victim: frozenset(segments - self._live.keys()) for victim, segments in held.items()}

    def commit(self, claim: int, segment: SegmentId, nbytes: int, keys: Iterable[PageKey]) -> None:
        """Bytes that were reserved are stored."""
        entry = _Entry(nbytes=nbytes, keys=tuple(keys))
        self._reserve(claim, self._claims[claim].reserved - nbytes)
        self.stored += nbytes
        self._live[segment] = entry
        for index, key in enumerate(entry.keys):
            self._places.setdefault(key, {})[segment] = index
        self.hold(claim, [segment])

    def superseded(self, claim: int, epoch: int) -> bool:
        """Whether an export of a later epoch than this was completed and its image is still here."""
        image = self._images.get(self._claims[claim].trajectory)
        return image is not None and image.epoch > epoch

    def complete(self, claim: int, *, epoch: int, turn: Turn, kv_tokens: int) -> None:
        """The export is complete, and not superseded: its trajectory holds what the claim does, besides what it
        held before."""
        made = self._claims[claim]
        assert not self.superseded(claim, epoch), (made.trajectory, epoch)
        before = self._images.get(made.trajectory)
        segments = made.segments | (before.segments if before is not None else set())
        if segments:
            self._images[made.trajectory] = _Image(epoch=epoch, turn=turn, kv_tokens=kv_tokens, segments=segments)
        for segment in segments:
            self._live[segment].holders.add(made.trajectory)
        self.end_claim(claim)

    def end_claim(self, claim: int, *, still_written: int = 0) -> None:
        """The export is over: what it stored goes if nobody else holds it. Ending twice is harmless.

        `still_written` bytes stay reserved, and the claim open, until it is ended again.
        """
        made = self._claims.get(claim)
        if made is None:
            return
        self._reserve(claim, still_written)
        for segment in made.segments:
            self._live[segment].claims.discard(claim)
            self._drop_unless_held(segment, DropReason.ABANDONED)
        made.segments = set()
        if not still_written:
            del self._claims[claim]

    # Images -------------------------------------------------------------------------------------------

    def expect(self, trajectory: TrajectoryId, turn: Turn) -> None:
        """This is when the trajectory's image, if there is one, will be needed."""
        if trajectory in self._images:
            self._images[trajectory].turn = turn

    def retain(self, trajectory: TrajectoryId, segments: Iterable[SegmentId]) -> None:
        """The trajectory lets go of all that it holds but these."""
        image = self._images.get(trajectory)
        if image is None:
            return
        released = image.segments - set(segments)
        image.segments -= released
        if not image.segments:
            del self._images[trajectory]
        for segment in released:
            self._live[segment].holders.discard(trajectory)
            self._drop_unless_held(segment, DropReason.RELEASED)

    def drop(self, segment: SegmentId) -> None:
        """Forget a segment that is of no use, whoever holds it."""
        if segment not in self._live:
            return
        entry = self._live[segment]
        for holder in entry.holders:
            self._images[holder].segments.discard(segment)
            if not self._images[holder].segments:
                del self._images[holder]
        for claim in entry.claims:
            self._claims[claim].segments.discard(segment)
        entry.holders.clear()
        entry.claims.clear()
        self._drop_unless_held(segment, DropReason.DAMAGED)

    # Readers ------------------------------------------------------------------------------------------

    def lease(self, segments: Sequence[SegmentId], deadline: float) -> int:
        """Keep `segments` readable until the lease is closed or `deadline` (same clock as `expire`).

        Raises `SegmentMissingError` if one is not stored.
        """
        for segment in segments:
            if segment not in self._live:
                raise SegmentMissingError(f"segment {segment} is not in the pool")
        return self._leases.read(segments, deadline)

    def lease_copy(self, nbytes: int, deadline: float) -> int:
        """Room for a copy of what another node's pool holds, until the lease is closed or `deadline`.

        Raises `PoolFullError` if there is none: a copy displaces nothing.
        """
        over = max(0, self.copied + nbytes - self.copy_room) - max(0, self.copied - self.copy_room)
        if over > self.free:
            self.refused_copies += 1
            raise PoolFullError(f"a copy of {nbytes} bytes asked for, {self.free} of {self.budget} are free")
        return self._leases.copy(nbytes, deadline)

    def close_lease(self, lease: int) -> None:
        """The reader is done; closing twice is harmless."""
        for segment in self._leases.close(lease):
            if segment in self._dropped:
                self.still_read -= self._dropped.pop(segment).nbytes
                self._gone.append(segment)

    def expire(self, now: float) -> None:
        """Close the leases whose deadline has passed."""
        for lease in self._leases.late(now):
            self.close_lease(lease)

    def audit(self) -> None:
        """Recompute every counter and index from the structures; asserts if one is wrong."""
        assert self.stored == sum(entry.nbytes for entry in self._live.values()), self.stored
        assert self.still_read == sum(entry.nbytes for entry in self._dropped.values()), self.still_read
        assert self.reserved == sum(claim.reserved for claim in self._claims.values()), self.reserved
        assert all(claim.reserved >= 0 for claim in self._claims.values()), "an export stored more than it reserved"
        self._leases.audit(self.known)
        assert self.free >= 0, (self.stored, self.reserved, self.still_read, self.copied, self.budget)
        assert all(entry.holders or entry.claims for entry in self._live.values()), "a segment is held by nobody"
        assert all(image.segments and image.kv_tokens > 0 for image in self._images.values()), "an image of nothing"
        holds = {(holder, segment) for segment, entry in self._live.items() for holder in entry.holders}
        assert holds == {(holder, s) for holder, image in self._images.items() for s in image.segments}, holds
        claims = {(claim, segment) for segment, entry in self._live.items() for claim in entry.claims}
        assert claims == {(claim, s) for claim, made in self._claims.items() for s in made.segments}, claims
        places: dict[PageKey, dict[SegmentId, int]] = {}
        for segment, entry in self._live.items():
            for index, key in enumerate(entry.keys):
                places.setdefault(key, {})[segment] = index
        assert places == self._places, "names and segments differ"
        assert all(self._leases.reads(segment) for segment in self._dropped), "a dropped segment is read by nobody"
        assert not any(entry.holders or entry.claims for entry in self._dropped.values()), "a dropped segment is held"

    def _choose_victims(self, need: int, turn: Turn) -> list[TrajectoryId]:
        extended = {claim.trajectory for claim in self._claims.values()}
        images = [
            StoredImage(
                trajectory=trajectory,
                turn=image.turn,
                kv_tokens=image.kv_tokens,
                segments=image.segments,
                pinned=trajectory in extended or any(self._is_read_for(trajectory, s) for s in image.segments),
            )
            for trajectory, image in self._images.items()
        ]
        freeable = {
            segment: 0 if entry.claims or self._leases.reads(segment) else entry.nbytes
            for segment, entry in self._live.items()
        }
        return choose_victims(images, freeable, need=need, turn=turn)

    def _is_read_for(self, trajectory: TrajectoryId, segment: SegmentId) -> bool:
        """Whether a reader has this open, and it can only be the trajectory's."""
        return self._leases.reads(segment) and self._live[segment].holders == {trajectory}

    def _reserve(self, claim: int, nbytes: int) -> None:
        self.reserved += nbytes - self._claims[claim].reserved
        self._claims[claim].reserved = nbytes

    def _drop_unless_held(self, segment: SegmentId, reason: DropReason) -> None:
        entry = self._live[segment]
        if entry.holders or entry.claims:
            return
        del self._live[segment]
        for key in entry.keys:
            stored = self._places[key]
            del stored[segment]
            if not stored:
                del self._places[key]
        self.stored -= entry.nbytes
        self.dropped[reason] += 1
        if self._leases.reads(segment):
            self.still_read += entry.nbytes
            self._dropped[segment] = entry
        else:
            self._gone.append(segment)
