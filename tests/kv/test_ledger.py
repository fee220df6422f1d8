"""The pool's ledger: rules one by one, and random operations against a model that recomputes everything."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout.errors import PoolFullError, SegmentMissingError
from rollout.kv.keys import PageKey
from rollout.kv.ledger import DropReason, Place, PoolLedger
from rollout.types import SegmentId, TrajectoryId, Turn, Wait

ANN, BOB, CID = TrajectoryId("ann"), TrajectoryId("bob"), TrajectoryId("cid")
S1, S2, S3 = SegmentId("s1"), SegmentId("s2"), SegmentId("s3")

Displacements = dict[TrajectoryId, frozenset[SegmentId]]


def keys(names: str) -> list[PageKey]:
    return [PageKey(name.encode()) for name in names]


def turn(order: int) -> Turn:
    return Turn(Wait.QUEUED, order)


def store(
    ledger: PoolLedger,
    who: TrajectoryId,
    *,
    epoch: int = 1,
    order: int = 1,
    shares: tuple[SegmentId, ...] = (),
    **segments: str,
) -> Displacements:
    """A whole export: segments of 10 bytes with these pages, each page named by a letter, beside what it shares."""
    claim = ledger.open_claim(who)
    ledger.hold(claim, shares)
    displaced = commit(ledger, claim, segments, order)
    ledger.complete(claim, epoch=epoch, turn=turn(order), kv_tokens=10)
    ledger.audit()
    return displaced


def stored(budget: int = 100, **segments: str) -> PoolLedger:
    """A ledger in which Ann has an image of these segments."""
    ledger = PoolLedger(budget)
    claim = ledger.open_claim(ANN)
    commit(ledger, claim, segments)
    ledger.complete(claim, epoch=1, turn=turn(1), kv_tokens=10)
    return ledger


def commit(ledger: PoolLedger, claim: int, segments: Mapping[str, str], order: int = 1) -> Displacements:
    displaced = ledger.reserve(claim, 10 * len(segments), turn(order))
    for segment, names in segments.items():
        ledger.commit(claim, SegmentId(segment), 10, keys(names))
    return displaced


def gone(ledger: PoolLedger) -> set[SegmentId]:
    ledger.audit()
    named = ledger.take_gone()
    assert len(set(named)) == len(named)
    return set(named)


# Budget and claims --------------------------------------------------------------------------------


def test_the_budget_is_charged_before_an_export_and_refused_when_it_does_not_fit() -> None:
    ledger = stored(30, s1="a", s2="b")
    claim = ledger.open_claim(BOB)
    ledger.reserve(claim, 10, turn(5))
    with pytest.raises(PoolFullError, match=r"11 bytes asked for, 0 of 30 are free"):
        ledger.reserve(claim, 11, turn(5))
    assert (ledger.stored, ledger.reserved, ledger.refused) == (20, 10, 1)
    ledger.end_claim(claim)
    assert (ledger.reserved, ledger.free) == (0, 10)
    ledger.audit()


def test_an_export_reserves_what_it_still_lacks_no_matter_what_it_reserved_before() -> None:
    ledger = PoolLedger(30)
    claim = ledger.open_claim(ANN)
    ledger.reserve(claim, 30, turn(1))
    ledger.commit(claim, S1, 10, keys("a"))
    ledger.reserve(claim, 20, turn(1))
    assert (ledger.stored, ledger.reserved) == (10, 20)
    ledger.reserve(claim, 5, turn(1))
    assert (ledger.stored, ledger.reserved) == (10, 5)
    ledger.audit()


def test_an_export_that_ends_before_it_is_complete_takes_back_what_it_stored_and_no_more() -> None:
    ledger = stored(s1="a", s2="b")
    claim = ledger.open_claim(ANN)
    ledger.hold(claim, [S1])
    ledger.reserve(claim, 20, turn(1))
    ledger.commit(claim, S3, 10, keys("c"))
    ledger.end_claim(claim)
    ledger.end_claim(claim)
    assert gone(ledger) == {S3}
    assert ledger.held_by(ANN) == {S1, S2}
    assert (ledger.reserved, ledger.dropped) == (0, {DropReason.ABANDONED: 1})


def test_what_a_claim_builds_on_stays_though_its_trajectory_lets_go() -> None:
    ledger = stored(s1="a")
    claim = ledger.open_claim(ANN)
    ledger.hold(claim, [S1])
    ledger.retain(ANN, [])
    assert gone(ledger) == set()
    assert ledger.find(keys("a")) == [Place(segment=S1, index=0)]
    ledger.complete(claim, epoch=2, turn=turn(1), kv_tokens=10)
    assert ledger.held_by(ANN) == {S1}
    ledger.audit()


def test_bytes_that_may_still_be_written_stay_reserved_until_the_claim_is_ended_again() -> None:
    ledger = PoolLedger(30)
    claim = ledger.open_claim(ANN)
    ledger.reserve(claim, 30, turn(1))
    ledger.commit(claim, S1, 10, keys("a"))
    ledger.end_claim(claim, still_written=10)
    assert gone(ledger) == {S1}
    assert (ledger.stored, ledger.reserved) == (0, 10)
    ledger.end_claim(claim)
    assert ledger.reserved == 0
    ledger.audit()


def test_an_older_epoch_that_is_complete_later_is_superseded() -> None:
    ledger = PoolLedger(100)
    old, new = ledger.open_claim(ANN), ledger.open_claim(ANN)
    for claim, segment in ((old, S1), (new, S2)):
        ledger.reserve(claim, 10, turn(1))
        ledger.commit(claim, segment, 10, [])
    assert not ledger.superseded(new, 2)
    ledger.complete(new, epoch=2, turn=turn(1), kv_tokens=10)
    assert ledger.superseded(old, 1)
    ledger.end_claim(old)
    assert gone(ledger) == {S1}
    assert ledger.held_by(ANN) == {S2}


# Segments -----------------------------------------------------------------------------------------


def test_a_prefix_is_found_across_segments_up_to_the_first_page_that_is_missing() -> None:
    ledger = stored(s1="ab", s2="cd")
    assert ledger.find(keys("abcxd")) == [
        Place(segment=S1, index=0),
        Place(segment=S1, index=1),
        Place(segment=S2, index=0),
    ]
    assert ledger.find(keys("xab")) == []


def test_a_page_stored_twice_is_still_found_when_the_first_copy_is_dropped() -> None:
    ledger = stored(s1="ab", s2="ab")
    ledger.drop(S1)
    assert gone(ledger) == {S1}
    assert ledger.find(keys("ab")) == [Place(segment=S2, index=0), Place(segment=S2, index=1)]
    ledger.drop(S2)
    assert gone(ledger) == {S2}
    assert ledger.find(keys("ab")) == []


def test_a_segment_lives_until_the_last_holder_lets_go() -> None:
    ledger = stored(s1="a")
    store(ledger, BOB, shares=(S1,))
    ledger.retain(ANN, [])
    assert gone(ledger) == set()
    assert ledger.holds(S1)
    ledger.retain(BOB, [])
    assert gone(ledger) == {S1}
    assert (ledger.stored, ledger.segments, ledger.images) == (0, 0, 0)
    assert ledger.dropped == {DropReason.RELEASED: 1}


def test_retain_keeps_what_is_named_and_held_and_adds_nothing() -> None:
    ledger = stored(s1="a", s2="b")
    store(ledger, BOB, s3="c")
    ledger.retain(ANN, [S2, S3])
    assert gone(ledger) == {S1}
    assert ledger.held_by(ANN) == {S2}
    assert ledger.held_by(BOB) == {S3}
    ledger.retain(CID, [S2])
    assert ledger.held_by(CID) == frozenset()


def test_dropping_takes_a_segment_from_everybody() -> None:
    ledger = stored(s1="a")
    store(ledger, BOB, shares=(S1,))
    claim = ledger.open_claim(CID)
    ledger.hold(claim, [S1])
    ledger.drop(S1)
    ledger.drop(S1)
    assert gone(ledger) == {S1}
    assert ledger.held_by(ANN) == ledger.held_by(BOB) == frozenset()
    assert ledger.dropped == {DropReason.DAMAGED: 1}
    ledger.complete(claim, epoch=1, turn=turn(1), kv_tokens=10)
    ledger.audit()


# Displacement (which: test_displacement) ----------------------------------------------------------


def test_what_is_needed_later_makes_room_and_its_bytes_are_credited() -> None:
    ledger = PoolLedger(30)
    store(ledger, ANN, order=3, s1="a", s2="b")
    store(ledger, BOB, order=1, s3="c")
    assert store(ledger, CID, order=2, s4="d") == {ANN: {S1, S2}}
    assert gone(ledger) == {S1, S2}
    assert (ledger.displaced, ledger.dropped) == (1, {DropReason.DISPLACED: 2})
    assert (ledger.stored, ledger.images) == (20, 2)


def test_what_another_image_needs_stays_and_is_not_named() -> None:
    ledger = PoolLedger(30)
    store(ledger, ANN, order=9, s1="p", s2="b")
    store(ledger, BOB, order=1, shares=(S1,), s3="c")
    assert store(ledger, CID, order=2, s4="d") == {ANN: {S2}}
    assert ledger.find(keys("p"))
    assert ledger.held_by(BOB) == {S1, S3}


def test_a_refusal_loses_nothing() -> None:
    ledger = PoolLedger(30)
    store(ledger, ANN, order=9, s1="a")
    store(ledger, BOB, order=1, s2="b", s3="c")
    with pytest.raises(PoolFullError):
        store(ledger, CID, order=5, s4="d", s5="e")
    assert gone(ledger) == set()
    assert (ledger.stored, ledger.displaced, ledger.refused) == (30, 0, 1)


def test_a_change_of_mind_changes_who_goes() -> None:
    ledger = PoolLedger(20)
    store(ledger, ANN, order=1, s1="a")
    store(ledger, BOB, order=2, s2="b")
    ledger.expect(ANN, Turn(Wait.HELD, 1))
    ledger.expect(CID, turn(0))
    assert store(ledger, CID, order=0, s3="c") == {ANN: {S1}}


def test_what_is_read_or_being_extended_is_not_displaced() -> None:
    ledger = PoolLedger(20)
    store(ledger, ANN, order=8, s1="a")
    store(ledger, BOB, order=9, s2="b")
    lease, claim = ledger.lease([S1], 1.0), ledger.open_claim(BOB)
    with pytest.raises(PoolFullError):
        store(ledger, CID, order=0, s3="c")
    ledger.close_lease(lease)
    assert store(ledger, CID, order=0, s4="d") == {ANN: {S1}}
    ledger.end_claim(claim)
    assert store(ledger, ANN, order=0, epoch=2, s5="e") == {BOB: {S2}}


# Readers ------------------------------------------------------------------------------------------


def test_a_segment_that_is_read_is_credited_when_the_last_reader_is_done() -> None:
    ledger = stored(20, s1="a", s2="b")
    first, second = ledger.lease([S1, S2], 1.0), ledger.lease([S1], 1.0)
    ledger.drop(S1)
    assert (ledger.stored, ledger.still_read, ledger.free) == (10, 10, 0)
    ledger.close_lease(first)
    assert gone(ledger) == set()
    ledger.close_lease(second)
    ledger.close_lease(second)
    assert gone(ledger) == {S1}
    assert ledger.free == 10


def test_a_lease_that_nobody_closes_expires_and_credits_its_bytes() -> None:
    ledger = stored(10, s1="a")
    ledger.lease([S1], deadline=5.0)
    ledger.drop(S1)
    ledger.expire(4.9)
    assert ledger.still_read == 10
    ledger.expire(5.0)
    assert gone(ledger) == {S1}
    assert ledger.free == 10


def test_a_dropped_segment_is_neither_found_nor_leased_again() -> None:
    ledger = stored(s1="a", s2="b")
    lease = ledger.lease([S1], 1.0)
    ledger.drop(S1)
    assert ledger.find(keys("a")) == []
    with pytest.raises(SegmentMissingError, match="s1"):
        ledger.lease([S2, S1], 1.0)
    ledger.close_lease(lease)
    assert gone(ledger) == {S1}


def test_copies_have_room_of_their_own_and_then_use_the_budget_but_displace_nothing() -> None:
    ledger = PoolLedger(30, copy_room=10)
    store(ledger, ANN, order=9, s1="a", s2="b")
    first = ledger.lease_copy(10, 1.0)
    assert (ledger.copied, ledger.free) == (10, 10)
    second = ledger.lease_copy(10, 2.0)
    assert (ledger.copied, ledger.free) == (20, 0)
    with pytest.raises(PoolFullError, match="a copy of 1 bytes asked for, 0 of 30 are free"):
        ledger.lease_copy(1, 1.0)
    ledger.audit()
    ledger.close_lease(first)
    ledger.close_lease(first)
    assert (ledger.copied, ledger.free) == (10, 10)
    ledger.expire(2.0)
    ledger.close_lease(second)
    assert (ledger.copied, ledger.refused_copies, ledger.refused) == (0, 1, 0)
    ledger.audit()


# Any order ----------------------------------------------------------------------------------------


@dataclass
class Known:
    """What the model knows of one segment."""

    nbytes: int
    names: list[PageKey]
    holders: set[TrajectoryId] = field(default_factory=set)
    claims: set[int] = field(default_factory=set)
    live: bool = True
    leases: set[int] = field(default_factory=set)

    @property
    def needed(self) -> bool:
        return bool(self.holders or self.claims)


@dataclass
class Work:
    """What the model knows of one export."""

    who: TrajectoryId
    epoch: int
    reserved: int = 0
    over: bool = False


class AnyOrder(RuleBasedStateMachine):
    """Exports that overlap, images, displacements and leases in any order: all is what the model recomputes."""

    BUDGET, COPY_ROOM = 60, 10
    trajectories = st.sampled_from([ANN, BOB, CID, TrajectoryId("dan")])
    turns = st.builds(Turn, st.sampled_from(Wait), st.integers(0, 9))

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PoolLedger(self.BUDGET, copy_room=self.COPY_ROOM)
        self.known: dict[SegmentId, Known] = {}
        self.works: dict[int, Work] = {}
        self.turn: dict[TrajectoryId, Turn] = {}
        self.epochs: dict[TrajectoryId, int] = {}
        self.leases: dict[int, float] = {}
        self.copies: dict[int, int] = {}
        self.named = 0
        self.now = 0.0

    def alive(self) -> list[SegmentId]:
        return [segment for segment, known in self.known.items() if known.live]

    def some(self, data: st.DataObject) -> list[SegmentId]:
        alive = self.alive()
        return data.draw(st.lists(st.sampled_from(alive), unique=True)) if alive else []

    def held(self, who: TrajectoryId) -> set[SegmentId]:
        return {segment for segment, known in self.known.items() if who in known.holders}

    @property
    def free(self) -> int:
        reserved = sum(work.reserved for work in self.works.values())
        over = max(0, sum(self.copies.values()) - self.COPY_ROOM)
        return self.BUDGET - reserved - over - sum(known.nbytes for known in self.known.values())

    def gone(self) -> None:
        """The ledger names exactly the segments that nobody needs or reads any more, each once in its life."""
        named = self.ledger.take_gone()
        assert len(set(named)) == len(named)
        for known in self.known.values():
            known.live = known.live and known.needed
        over = {segment for segment, known in self.known.items() if not known.live and not known.leases}
        assert set(named) == over
        for segment in named:
            del self.known[segment]

    def a_work(self, data: st.DataObject, *, over: bool = False) -> int:
        return data.draw(st.sampled_from([claim for claim, work in self.works.items() if over or not work.over]))

    @rule(who=trajectories, epoch=st.integers(0, 3))
    def open(self, who: TrajectoryId, epoch: int) -> None:
        self.works[self.ledger.open_claim(who)] = Work(who=who, epoch=epoch)

    @precondition(lambda self: any(not work.over for work in self.works.values()))
    @rule(data=st.data())
    def build_on(self, data: st.DataObject) -> None:
        claim, wanted = self.a_work(data), self.some(data)
        self.ledger.hold(claim, wanted)
        for segment in wanted:
            self.known[segment].claims.add(claim)

    @precondition(lambda self: any(not work.over for work in self.works.values()))
    @rule(data=st.data(), nbytes=st.integers(1, 40), turn=turns)
    def reserve(self, data: st.DataObject, nbytes: int, turn: Turn) -> None:
        claim = self.a_work(data)
        need = nbytes - self.works[claim].reserved - self.free
        extended = {work.who for work in self.works.values()}
        able = {who for who, told in self.turn.items() if told > turn and who not in extended and not self.is_read(who)}
        if need > self.freed(able) and need > 0:
            with pytest.raises(PoolFullError):
                self.ledger.reserve(claim, nbytes, turn)
            return
        displaced = self.ledger.reserve(claim, nbytes, turn)
        assert set(displaced) <= able
        assert bool(displaced) == (need > 0)
        assert need <= self.freed(set(displaced))
        assert all(self.freed(set(displaced) - {who}) < need for who in displaced)
        had = {who: self.held(who) for who in displaced}
        for who in displaced:
            self.forget(who)
        for who, segments in displaced.items():
            assert segments == {segment for segment in had[who] if not self.known[segment].needed}
            assert segments
        self.works[claim].reserved = nbytes
        self.gone()

    def is_read(self, who: TrajectoryId) -> bool:
        return any(known.leases and known.holders == {who} and known.live for known in self.known.values())

    def freed(self, going: set[TrajectoryId]) -> int:
        return sum(
            known.nbytes
            for known in self.known.values()
            if known.live and known.holders and known.holders <= going and not known.claims and not known.leases
        )

    def forget(self, who: TrajectoryId) -> None:
        for known in self.known.values():
            known.holders.discard(who)
        self.turn.pop(who, None)
        self.epochs.pop(who, None)

    @precondition(lambda self: any(work.reserved and not work.over for work in self.works.values()))
    @rule(data=st.data(), part=st.integers(1, 40), names=st.text("abcd", max_size=3))
    def commit(self, data: st.DataObject, part: int, names: str) -> None:
        able = [claim for claim, work in self.works.items() if work.reserved and not work.over]
        claim = data.draw(st.sampled_from(able))
        nbytes = min(part, self.works[claim].reserved)
        self.named += 1
        segment = SegmentId(f"s{self.named}")
        pages = keys("".join(dict.fromkeys(names)))
        self.ledger.commit(claim, segment, nbytes, pages)
        self.works[claim].reserved -= nbytes
        self.known[segment] = Known(nbytes=nbytes, names=pages, claims={claim})

    @precondition(lambda self: any(not work.over for work in self.works.values()))
    @rule(data=st.data(), turn=turns)
    def complete(self, data: st.DataObject, turn: Turn) -> None:
        claim = self.a_work(data)
        work = self.works[claim]
        late = self.epochs.get(work.who, -1) > work.epoch
        assert self.ledger.superseded(claim, work.epoch) == late
        if late:
            self.ledger.end_claim(claim)
        else:
            self.ledger.complete(claim, epoch=work.epoch, turn=turn, kv_tokens=1 + self.named % 7)
        for known in self.known.values():
            if claim in known.claims and not late:
                known.holders.add(work.who)
            known.claims.discard(claim)
        if not late and self.held(work.who):
            self.turn[work.who], self.epochs[work.who] = turn, work.epoch
        del self.works[claim]
        self.gone()

    @precondition(lambda self: self.works)
    @rule(data=st.data(), still_written=st.integers(0, 10))
    def give_up(self, data: st.DataObject, still_written: int) -> None:
        claim = self.a_work(data, over=True)
        left = min(still_written, self.works[claim].reserved)
        self.ledger.end_claim(claim, still_written=left)
        for known in self.known.values():
            known.claims.discard(claim)
        self.works[claim].reserved, self.works[claim].over = left, True
        if not left:
            del self.works[claim]
            self.ledger.end_claim(claim)
        self.gone()

    @rule(who=trajectories, turn=turns)
    def expect(self, who: TrajectoryId, turn: Turn) -> None:
        self.ledger.expect(who, turn)
        if who in self.turn:
            self.turn[who] = turn

    @rule(data=st.data(), who=trajectories)
    def retain(self, data: st.DataObject, who: TrajectoryId) -> None:
        wanted = self.some(data)
        self.ledger.retain(who, [*wanted, SegmentId("never stored")])
        for segment, known in self.known.items():
            if segment not in wanted:
                known.holders.discard(who)
        self.let_go_of_empty_images()
        self.gone()

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        segment = data.draw(st.sampled_from(list(self.known)))
        self.ledger.drop(segment)
        known = self.known[segment]
        known.holders, known.claims = set(), set()
        self.let_go_of_empty_images()
        self.gone()

    def let_go_of_empty_images(self) -> None:
        for who in [who for who in self.turn if not self.held(who)]:
            self.forget(who)

    @rule(data=st.data(), ttl=st.integers(1, 3))
    def lease(self, data: st.DataObject, ttl: int) -> None:
        wanted = self.some(data)
        lease = self.ledger.lease(wanted, self.now + ttl)
        assert lease not in self.leases
        self.leases[lease] = self.now + ttl
        for segment in wanted:
            self.known[segment].leases.add(lease)

    @rule(nbytes=st.integers(1, 25), ttl=st.integers(1, 3))
    def copy(self, nbytes: int, ttl: int) -> None:
        copied = sum(self.copies.values())
        if max(0, copied + nbytes - self.COPY_ROOM) - max(0, copied - self.COPY_ROOM) > self.free:
            with pytest.raises(PoolFullError):
                self.ledger.lease_copy(nbytes, self.now + ttl)
            return
        lease = self.ledger.lease_copy(nbytes, self.now + ttl)
        self.leases[lease], self.copies[lease] = self.now + ttl, nbytes

    @rule(data=st.data())
    def close_lease(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([*self.leases, 10**9]))
        self.ledger.close_lease(lease)
        self.close([lease])

    @rule(seconds=st.integers(1, 2))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        self.ledger.expire(self.now)
        self.close([lease for lease, deadline in self.leases.items() if deadline <= self.now])

    def close(self, leases: list[int]) -> None:
        for lease in leases:
            self.leases.pop(lease, None)
            self.copies.pop(lease, None)
            for known in self.known.values():
                known.leases.discard(lease)
        self.gone()

    @invariant()
    def counters_are_what_the_model_recomputes(self) -> None:
        self.ledger.audit()
        live = [known for known in self.known.values() if known.live]
        read = [known for known in self.known.values() if not known.live]
        assert self.ledger.stored == sum(known.nbytes for known in live)
        assert self.ledger.still_read == sum(known.nbytes for known in read)
        assert self.ledger.reserved == sum(work.reserved for work in self.works.values())
        assert self.ledger.copied == sum(self.copies.values())
        assert self.ledger.free == self.free >= 0
        assert self.ledger.known == set(self.known)
        assert (self.ledger.segments, self.ledger.images) == (len(live), len(self.turn))
        assert all(self.ledger.held_by(who) == self.held(who) for who in (ANN, BOB, CID))

    @invariant()
    def pages_are_found_where_they_are(self) -> None:
        for name in keys("abcd"):
            holders = {
                s: known.names.index(name) for s, known in self.known.items() if known.live and name in known.names
            }
            found = self.ledger.find([name])
            assert bool(found) == bool(holders)
            assert all(holders[place.segment] == place.index for place in found)

    def teardown(self) -> None:
        """All let go: the counters are back at the start."""
        for claim in self.works:
            self.ledger.end_claim(claim)
        for who in list(self.turn):
            self.ledger.retain(who, [])
        self.ledger.expire(self.now + 99)
        self.ledger.audit()
        assert self.ledger.free == self.BUDGET
        assert (self.ledger.stored, self.ledger.reserved, self.ledger.still_read, self.ledger.copied) == (0, 0, 0, 0)
        assert (self.ledger.segments, self.ledger.images) == (0, 0)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
