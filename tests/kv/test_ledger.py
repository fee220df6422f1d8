"""The pool's ledger: rules one by one, and random operations against a model that recomputes everything."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from rollout.errors import PoolFullError, SegmentMissingError
from rollout.kv.keys import PageKey
from rollout.kv.ledger import Place, PoolLedger
from rollout.types import SegmentId, TrajectoryId

ANN, BOB = TrajectoryId("ann"), TrajectoryId("bob")
S1, S2, S3 = SegmentId("s1"), SegmentId("s2"), SegmentId("s3")


def keys(names: str) -> list[PageKey]:
    return [PageKey(name.encode()) for name in names]


def stored(budget: int = 100, **segments: str) -> PoolLedger:
    """A ledger in which Ann holds segments of 10 bytes with these pages, each page named by a letter."""
    ledger = PoolLedger(budget)
    for segment, names in segments.items():
        ledger.charge(10)
        ledger.commit(SegmentId(segment), 10, keys(names), ANN)
    ledger.audit()
    return ledger


def test_the_budget_is_charged_before_an_export_and_refused_when_it_does_not_fit() -> None:
    ledger = stored(30, s1="a", s2="b")
    ledger.charge(10)
    with pytest.raises(PoolFullError, match=r"1 bytes asked for, 0 of 30 are free"):
        ledger.charge(1)
    assert (ledger.stored, ledger.reserved, ledger.refused) == (20, 10, 1)
    ledger.refund(10)
    ledger.charge(10)


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
    assert ledger.drop(S1) == [S1]
    ledger.audit()
    assert ledger.find(keys("ab")) == [Place(segment=S2, index=0), Place(segment=S2, index=1)]
    assert ledger.drop(S2) == [S2]
    assert ledger.find(keys("ab")) == []
    ledger.audit()


def test_a_segment_lives_until_the_last_holder_lets_go() -> None:
    ledger = stored(s1="a")
    ledger.hold(BOB, [S1])
    assert ledger.retain(ANN, []) == []
    assert ledger.holds(S1)
    assert ledger.retain(BOB, []) == [S1]
    assert (ledger.stored, ledger.segments) == (0, 0)


def test_retain_keeps_what_is_named_and_stored_and_nothing_else() -> None:
    ledger = stored(s1="a", s2="b")
    assert ledger.retain(ANN, [S2, S3]) == [S1]
    assert ledger.held_by(ANN) == {S2}
    ledger.audit()


def test_a_segment_that_is_read_is_credited_when_the_last_reader_is_done() -> None:
    ledger = stored(20, s1="a", s2="b")
    first, second = ledger.lease([S1, S2], 1.0), ledger.lease([S1], 1.0)
    assert ledger.drop(S1) == []
    assert (ledger.stored, ledger.still_read) == (10, 10)
    with pytest.raises(PoolFullError):
        ledger.charge(1)
    assert ledger.close_lease(first) == []
    assert ledger.close_lease(second) == [S1]
    assert ledger.close_lease(second) == []
    ledger.charge(10)
    ledger.audit()


def test_a_lease_that_nobody_closes_expires_and_credits_its_bytes() -> None:
    ledger = stored(10, s1="a")
    ledger.lease([S1], deadline=5.0)
    ledger.drop(S1)
    assert ledger.expire(4.9) == []
    assert ledger.still_read == 10
    assert ledger.expire(5.0) == [S1]
    ledger.charge(10)
    ledger.audit()


def test_a_dropped_segment_is_neither_found_nor_leased_again() -> None:
    ledger = stored(s1="a", s2="b")
    lease = ledger.lease([S1], 1.0)
    ledger.drop(S1)
    assert ledger.find(keys("a")) == []
    with pytest.raises(SegmentMissingError, match="s1"):
        ledger.lease([S2, S1], 1.0)
    assert ledger.drop(S1) == []
    assert ledger.close_lease(lease) == [S1]
    assert ledger.drop(S2) == [S2]
    ledger.audit()


def test_dropping_takes_a_segment_from_everybody() -> None:
    ledger = stored(s1="a")
    ledger.hold(BOB, [S1])
    assert ledger.drop(S1) == [S1]
    assert ledger.held_by(ANN) == ledger.held_by(BOB) == frozenset()
    assert ledger.retain(BOB, [S1]) == []
    ledger.audit()


@dataclass
class Known:
    """What the model knows of one segment."""

    nbytes: int
    names: list[PageKey]
    holders: set[TrajectoryId]
    live: bool = True
    leases: set[int] = field(default_factory=set)


class AnyOrder(RuleBasedStateMachine):
    """Exports, holds, drops and leases in any order: every counter is what the model recomputes."""

    BUDGET = 60
    charges = Bundle("charges")
    trajectories = st.sampled_from([ANN, BOB, TrajectoryId("cid")])

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PoolLedger(self.BUDGET)
        self.known: dict[SegmentId, Known] = {}
        self.charged: list[int] = []
        self.leases: dict[int, float] = {}
        self.let_go: list[SegmentId] = []
        self.named = 0
        self.now = 0.0

    def alive(self) -> list[SegmentId]:
        return [segment for segment, known in self.known.items() if known.live]

    def some(self, data: st.DataObject) -> list[SegmentId]:
        alive = self.alive()
        return data.draw(st.lists(st.sampled_from(alive), unique=True)) if alive else []

    def gone(self, named: list[SegmentId]) -> None:
        """The ledger names exactly the segments that nobody needs or reads any more, each once in its life."""
        assert len(set(named)) == len(named)
        for known in self.known.values():
            known.live = known.live and bool(known.holders)
        over = {segment for segment, known in self.known.items() if not known.live and not known.leases}
        assert set(named) == over
        for segment in named:
            del self.known[segment]

    @rule(target=charges, nbytes=st.integers(1, 25))
    def charge(self, nbytes: int) -> int:
        used = sum(self.charged) + sum(known.nbytes for known in self.known.values())
        if used + nbytes > self.BUDGET:
            with pytest.raises(PoolFullError):
                self.ledger.charge(nbytes)
            return 0
        self.ledger.charge(nbytes)
        self.charged.append(nbytes)
        return nbytes

    @rule(nbytes=consumes(charges))
    def refund(self, nbytes: int) -> None:
        if nbytes:
            self.ledger.refund(nbytes)
            self.charged.remove(nbytes)

    @rule(nbytes=consumes(charges), names=st.text("abcd", max_size=3), who=trajectories)
    def commit(self, nbytes: int, names: str, who: TrajectoryId) -> None:
        if not nbytes:
            return
        self.named += 1
        segment = SegmentId(f"s{self.named}")
        pages = keys("".join(dict.fromkeys(names)))
        self.ledger.commit(segment, nbytes, pages, who)
        self.charged.remove(nbytes)
        self.known[segment] = Known(nbytes=nbytes, names=pages, holders={who})

    @rule(data=st.data(), who=trajectories)
    def hold(self, data: st.DataObject, who: TrajectoryId) -> None:
        wanted = self.some(data)
        self.ledger.hold(who, wanted)
        for segment in wanted:
            self.known[segment].holders.add(who)

    @rule(data=st.data(), who=trajectories)
    def retain(self, data: st.DataObject, who: TrajectoryId) -> None:
        wanted = self.some(data)
        named = self.ledger.retain(who, [*wanted, SegmentId("never stored")])
        for segment in self.alive():
            self.known[segment].holders.discard(who)
        for segment in wanted:
            self.known[segment].holders.add(who)
        self.gone(named)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if not self.known:
            return
        segment = data.draw(st.sampled_from(list(self.known)))
        known = self.known[segment]
        named = self.ledger.drop(segment)
        known.live, known.holders = False, set()
        self.gone(named)

    @rule(data=st.data(), ttl=st.integers(1, 3))
    def lease(self, data: st.DataObject, ttl: int) -> None:
        wanted = self.some(data)
        lease = self.ledger.lease(wanted, self.now + ttl)
        assert lease not in self.leases
        self.leases[lease] = self.now + ttl
        for segment in wanted:
            self.known[segment].leases.add(lease)

    @rule(data=st.data())
    def close_lease(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([*self.leases, 10**9]))
        self.close([lease], self.ledger.close_lease(lease))

    @rule(seconds=st.integers(1, 2))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        late = [lease for lease, deadline in self.leases.items() if deadline <= self.now]
        self.close(late, self.ledger.expire(self.now))

    def close(self, leases: list[int], named: list[SegmentId]) -> None:
        for lease in leases:
            self.leases.pop(lease, None)
            for known in self.known.values():
                known.leases.discard(lease)
        self.gone(named)

    @invariant()
    def counters_are_what_the_model_recomputes(self) -> None:
        self.ledger.audit()
        live = [known for known in self.known.values() if known.live]
        read = [known for known in self.known.values() if not known.live]
        assert self.ledger.stored == sum(known.nbytes for known in live)
        assert self.ledger.still_read == sum(known.nbytes for known in read)
        assert self.ledger.reserved == sum(self.charged)
        assert self.ledger.segments == len(live)

    @invariant()
    def pages_are_found_where_they_are(self) -> None:
        for name in keys("abcd"):
            holders = {
                s: known.names.index(name) for s, known in self.known.items() if known.live and name in known.names
            }
            found = self.ledger.find([name])
            assert bool(found) == bool(holders)
            assert all(holders[place.segment] == place.index for place in found)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
