"""Images of stopped sequences on their worker: pinned, left on the device, taken up again, given up."""

import pytest

from rollout.kv.cache import KVCache
from rollout.kv.kept import FreedPages
from rollout.kv.tiers import Residency, Tier
from tests.kv.plans import (
    ANN,
    BOB,
    FOREVER,
    NONE,
    OTHERS,
    PAGE,
    THROUGH,
    TOKENS,
    counts,
    filled,
    host_image,
    key,
    land,
    left,
    moved,
    open_up_to,
    parked,
    residencies,
    stored,
)

# Pinned


def test_a_parked_sequence_has_all_its_pages_in_order_and_gives_back_the_rest() -> None:
    cache = KVCache(8, PAGE)
    holding = filled(cache, ANN, 10)
    assert cache.grow(holding, 5)
    table = [*holding.table]
    kept = cache.park(holding, key(TOKENS, 10), 10)
    assert cache.kept.sources(kept) == tuple((Tier.DEVICE, page) for page in table[:3])
    assert counts(cache, Tier.DEVICE) == (5, 2, 1, 0)
    cache.audit([])


def test_what_is_pinned_is_not_evicted() -> None:
    cache = KVCache(3, PAGE)
    kept = parked(cache, ANN, 10)
    assert cache.available == 0
    assert not cache.make_room(1)
    assert len(cache.kept.sources(kept)) == 3


def test_sources_of_what_is_not_pinned_are_not_told() -> None:
    cache = KVCache(4, PAGE)
    kept = parked(cache, ANN, 10)
    cache.kept.unpin(kept, expires_at=FOREVER)
    with pytest.raises(AssertionError, match="evicted"):
        cache.kept.sources(kept)


@pytest.mark.parametrize("count", [8, 9])
def test_an_image_that_nobody_evicted_is_pinned_again_with_all_its_tokens(count: int) -> None:
    cache = KVCache(4, PAGE)
    kept = parked(cache, ANN, count)
    before = cache.kept.sources(kept)
    cache.kept.unpin(kept, expires_at=FOREVER)
    cache.kept.pin(kept)
    assert (kept.tokens, cache.kept.sources(kept)) == (count, before)
    cache.audit([])


def test_an_image_that_lost_pages_is_pinned_with_fewer_tokens_and_without_its_tail() -> None:
    cache = KVCache(8, PAGE)
    kept = parked(cache, ANN, 14)
    cache.kept.unpin(kept, expires_at=FOREVER)
    node = cache._tree.pop_leaf(Tier.DEVICE, 1)
    assert node is not None
    cache.tiered._drop(node, Tier.DEVICE)
    cache.kept.pin(kept)
    assert (kept.tokens, kept.key, kept.tail) == (8, key(TOKENS, 8), {})
    assert counts(cache, Tier.DEVICE) == (6, 2, 0, 0)
    cache.audit([])


# Left on the device


def test_a_tail_on_the_device_is_taken_only_when_nothing_else_is_left() -> None:
    cache = KVCache(4, PAGE)
    kept = parked(cache, ANN, 10)
    cache.kept.unpin(kept, expires_at=FOREVER)
    assert cache.available == 4
    assert cache.make_room(3)
    assert kept.tail, "whole pages go first"
    assert cache.make_room(4)
    assert not kept.tail
    cache.kept.pin(kept)
    assert kept.tokens == 0
    cache.audit([])


def test_of_several_tails_the_oldest_is_taken_first() -> None:
    cache = KVCache(4, PAGE)
    first, second = parked(cache, ANN, 3), parked(cache, BOB, 3, OTHERS)
    for kept in (first, second):
        cache.kept.unpin(kept, expires_at=FOREVER)
    assert cache.make_room(3)
    assert (bool(first.tail), bool(second.tail)) == (False, True)


def test_a_tail_that_is_held_is_spared() -> None:
    cache = KVCache(2, PAGE)
    kept = parked(cache, ANN, 6)
    cache.kept.unpin(kept, expires_at=FOREVER)
    cache.kept.hold_tail(kept, held=True)
    assert cache.available == 1
    assert not cache.make_room(2)
    cache.kept.hold_tail(kept, held=False)
    assert cache.make_room(2)
    cache.audit([])


def test_a_tail_is_freed_when_its_time_is_over_and_the_whole_pages_stay() -> None:
    cache = KVCache(4, PAGE)
    kept = parked(cache, ANN, 10)
    cache.kept.unpin(kept, expires_at=7.0)
    cache.kept.expire(6.9)
    assert kept.tail
    cache.kept.expire(7.0)
    assert not kept.tail
    cache.kept.pin(kept)
    assert kept.tokens == 8
    cache.audit([])


@pytest.mark.parametrize("tier", Tier)
def test_the_tail_of_what_is_pinned_or_on_the_host_does_not_expire(tier: Tier) -> None:
    cache = KVCache(4, PAGE, host_pages=4)
    kept = parked(cache, ANN, 10)
    cache.kept.unpin(kept, expires_at=7.0)
    cache.kept.pin(kept)
    if tier is Tier.HOST:
        moved(cache, kept, Tier.HOST)
    cache.kept.expire(100.0)
    assert set(kept.tail) == {tier}


def test_what_is_left_on_the_device_is_written_through() -> None:
    cache = KVCache(4, PAGE, host_pages=4, write=THROUGH)
    kept = cache.park(filled(cache, ANN, 10, write=False), key(TOKENS, 10), 10)
    assert cache.tiered.take_copies() == []
    cache.kept.unpin(kept, expires_at=FOREVER)
    land(cache)
    assert residencies(cache) == [(Residency.BOTH, 2)]


# Taken up again


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("ok", [True, False])
def test_a_sequence_goes_on_with_the_tail_of_its_image(tier: Tier, ok: bool) -> None:
    """Case C13: nothing is left to compute."""
    cache = KVCache(8, PAGE, host_pages=8)
    kept = parked(cache, ANN, 10) if tier is Tier.DEVICE else host_image(cache)
    if tier is Tier.DEVICE:
        cache.kept.unpin(kept, expires_at=FOREVER)
    found = stored(cache, pages=2)
    holding = open_up_to(cache, ANN, TOKENS, found.device)
    if found.host:
        assert cache.load(holding, key(TOKENS, 8), 2, room=3)
    cache.adopt(kept, holding)
    assert (len(holding.table), cache.kept.images()) == (3, [])
    cache.audit([holding])
    copies = land(cache, ok=ok)
    assert len(copies) == (2 if tier is Tier.HOST else 0)
    cache.settle(holding)
    assert holding.load_failed == (tier is Tier.HOST and not ok)
    assert cache.stats(Tier.HOST).private == 0, "the page on the host was borrowed until then"
    cache.audit([holding])
    cache.close(holding)
    assert cache.available == 8


@pytest.mark.parametrize("pages", [0, 1, 3])
def test_a_tail_is_adopted_only_behind_all_its_whole_pages(pages: int) -> None:
    cache = KVCache(8, PAGE)
    left(cache, BOB, 12)
    kept = parked(cache, ANN, 10)
    cache.kept.unpin(kept, expires_at=FOREVER)
    with pytest.raises(AssertionError):
        cache.adopt(kept, open_up_to(cache, ANN, TOKENS, pages))


# Given up


def test_dropping_frees_all_that_only_this_trajectory_has_in_both_tiers() -> None:
    cache = KVCache(8, PAGE, host_pages=8, write=THROUGH)
    left(cache, BOB, 4)
    kept = parked(cache, ANN, 14)
    land(cache)
    assert cache.kept.drop(kept) == FreedPages(exclusive=3, freed=3)
    assert residencies(cache) == [(Residency.BOTH, 1)]
    assert (counts(cache, Tier.DEVICE), counts(cache, Tier.HOST)) == ((7, 1, 0, 0), (7, 1, 0, 0))
    cache.audit([])


def test_dropping_waits_for_copies_of_what_it_would_free() -> None:
    """Case A7: each page is freed once, after the copy."""
    cache = KVCache(8, PAGE, host_pages=8, write=THROUGH)
    kept = parked(cache, ANN, 10)
    (copy,) = cache.tiered.take_copies()
    assert cache.kept.drop(kept) is None
    assert counts(cache, Tier.DEVICE) == (5, 2, 1, 0)
    cache.tiered.copied(copy.copy_id, ok=True)
    assert cache.kept.drop(kept) == FreedPages(exclusive=3, freed=3)
    assert (counts(cache, Tier.DEVICE), counts(cache, Tier.HOST)) == ((8, 0, 0, 0), (8, 0, 0, 0))


def test_dropping_does_not_free_what_a_later_run_of_the_trajectory_uses() -> None:
    cache = KVCache(8, PAGE)
    kept = parked(cache, ANN, 10)
    running = open_up_to(cache, ANN, TOKENS, 2)
    assert cache.kept.drop(kept) == FreedPages(exclusive=1, freed=1)
    cache.audit([running])
    assert cache.kept.drop(cache.park(running, key(TOKENS, 8), 8)) == FreedPages(exclusive=2, freed=2)


def test_dropping_a_part_frees_what_its_owner_had_left_below_it() -> None:
    """A sequence that was preempted and may reuse a part of its pages only, as with chunks of several pages."""
    cache = KVCache(8, PAGE)
    left(cache, ANN, 12)
    kept = cache.park(open_up_to(cache, ANN, TOKENS, 1), key(TOKENS, 4), 4)
    assert cache.kept.drop(kept) == FreedPages(exclusive=3, freed=3)


def test_forgetting_leaves_the_whole_pages_for_reuse() -> None:
    cache = KVCache(8, PAGE, write=NONE)
    kept = parked(cache, ANN, 10)
    cache.kept.forget(kept)
    assert counts(cache, Tier.DEVICE) == (6, 2, 0, 0)
    assert cache.available == 8
    cache.audit([])
