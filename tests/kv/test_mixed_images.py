"""Images whose later pages several weights wrote: tails of several pages, which are nobody else's, in every move."""

import pytest

from rollout.kv.cache import KVCache
from rollout.kv.holding import Holding
from rollout.kv.kept import FreedPages, Kept
from rollout.kv.tiers import Residency, Tier
from tests.kv.plans import (
    ANN,
    BACK,
    BOB,
    EVE,
    FOREVER,
    OTHERS,
    PAGE,
    THROUGH,
    TOKENS,
    counts,
    filled,
    key,
    land,
    moved,
    open_up_to,
    residencies,
    stored,
)

TAIL = 3
"""Pages: the weights changed in the third page of 19 tokens."""


def mixed(cache: KVCache, *, pure: int = 2, count: int = 19, tokens: tuple[int, ...] = TOKENS) -> Kept:
    """Ann's, parked: the first `pure` pages of one load of weights, the others not."""
    holding = filled(cache, ANN, pure * PAGE, tokens)
    assert cache.grow(holding, cache.pages_for(count))
    return cache.park(holding, key(tokens, pure * PAGE), count)


def resumed(cache: KVCache, kept: Kept, *, ok: bool = True) -> Holding:
    """A sequence that goes on with all of it."""
    whole = len(kept.key) // (4 * PAGE)
    found = stored(cache, pages=whole)
    assert found.device + found.host == whole
    holding = open_up_to(cache, ANN, TOKENS, found.device)
    if kept.tail:
        cache.kept.hold_tail(kept, held=True)
    if found.host:
        assert cache.load(holding, kept.key, whole, room=found.host + len(kept.tail.get(Tier.HOST, ())))
    cache.adopt(kept, holding)
    cache.audit([holding])
    land(cache, ok=ok)
    cache.settle(holding)
    cache.audit([holding])
    return holding


def assert_all_free(cache: KVCache) -> None:
    cache.audit([])
    assert cache.available == cache.total
    assert cache.kept.spare == 0
    assert cache.stats(Tier.HOST).private == cache.stats(Tier.HOST).reserved == 0
    assert cache.make_room(cache.total)


# Pinned, and left on the device


@pytest.mark.parametrize(("pure", "count"), [(0, 1), (0, 8), (0, 19), (1, 7), (2, 19), (4, 19), (2, 16), (4, 16)])
def test_what_one_load_of_weights_wrote_is_in_the_tree_and_the_rest_its_own(pure: int, count: int) -> None:
    cache = KVCache(8, PAGE)
    holding = filled(cache, ANN, pure * PAGE)
    assert cache.grow(holding, 7)
    table = [*holding.table]
    kept = cache.park(holding, key(TOKENS, pure * PAGE), count)
    pages = cache.pages_for(count)
    assert cache.kept.sources(kept) == tuple((Tier.DEVICE, page) for page in table[:pages])
    assert (kept.tokens, kept.key) == (count, key(TOKENS, pure * PAGE))
    assert counts(cache, Tier.DEVICE) == (8 - pages, pure, pages - pure, 0)
    assert (cache.available, cache.kept.spare) == (8 - pages, 0), "what is pinned cannot be had"
    cache.audit([])


def test_pages_of_several_weights_are_not_found_by_others() -> None:
    cache = KVCache(8, PAGE)
    kept = mixed(cache)
    cache.kept.unpin(kept, expires_at=FOREVER)
    assert stored(cache, pages=4).device == 2
    assert residencies(cache) == [(Residency.DEVICE, 2)]


def test_a_tail_of_several_pages_is_spare_with_all_of_them_once_however_often_it_is_offered() -> None:
    cache = KVCache(8, PAGE)
    kept = mixed(cache)
    for _ in range(2):
        cache.kept.unpin(kept, expires_at=FOREVER)
        assert (cache.kept.spare, cache.available) == (TAIL, 8)
    cache.kept.hold_tail(kept, held=True)
    cache.kept.hold_tail(kept, held=True)
    assert (cache.kept.spare, cache.available) == (0, 5)
    cache.kept.hold_tail(kept, held=False)
    cache.kept.hold_tail(kept, held=False)
    assert (cache.kept.spare, cache.available) == (TAIL, 8)
    cache.kept.pin(kept)
    assert (cache.kept.spare, cache.available) == (0, 3)
    cache.kept.hold_tail(kept, held=False)
    assert (cache.kept.spare, cache.available) == (0, 3), "it is pinned"
    cache.kept.forget(kept)
    assert_all_free(cache)


@pytest.mark.parametrize("wanted", range(1, 9))
def test_a_tail_is_taken_whole_and_only_when_nothing_else_is_left(wanted: int) -> None:
    """Three pages are free, two in the tree, three the tail."""
    cache = KVCache(8, PAGE)
    kept = mixed(cache)
    cache.kept.unpin(kept, expires_at=FOREVER)
    assert cache.make_room(wanted)
    tree = 2 if wanted <= 3 else 0
    assert stored(cache, pages=2).device == tree
    assert bool(kept.tail) == (wanted <= 5)
    assert cache.available == 8
    assert counts(cache, Tier.DEVICE)[2] == (TAIL if wanted <= 5 else 0)
    cache.audit([])
    cache.kept.pin(kept)
    assert kept.tokens == (19 if wanted <= 3 else 0)
    assert cache.kept.drop(kept) is not None
    assert_all_free(cache)


def test_of_several_tails_as_many_are_taken_as_are_needed_oldest_first() -> None:
    cache = KVCache(9, PAGE)
    images = []
    for owner, first in ((ANN, 0), (BOB, 20), (EVE, 40)):
        holding = cache.open(owner, "w", b"", 0)
        assert cache.grow(holding, 3)
        kept = cache.park(holding, key(tuple(range(first, first + 12)), 0), 11)
        cache.kept.unpin(kept, expires_at=FOREVER)
        images.append(kept)
    assert (cache.kept.spare, cache.available) == (9, 9)
    assert cache.make_room(4)
    assert [bool(kept.tail) for kept in images] == [False, False, True]
    assert (cache.kept.spare, cache.stats().free, cache.available) == (3, 6, 9)


def test_an_image_whose_tail_was_taken_is_pinned_with_its_whole_pages() -> None:
    cache = KVCache(8, PAGE)
    kept = mixed(cache)
    cache.kept.unpin(kept, expires_at=FOREVER)
    holding = open_up_to(cache, BOB, TOKENS, 2)
    assert cache.make_room(6)
    cache.kept.pin(kept)
    assert (kept.tokens, kept.key, kept.tail) == (8, key(TOKENS, 8), {})
    assert len(cache.kept.sources(kept)) == 2
    cache.close(holding)
    assert cache.kept.drop(kept) == FreedPages(exclusive=0, freed=0), "Bob used them, too"
    assert_all_free(cache)


@pytest.mark.parametrize("lost", [1, 2])
def test_an_image_that_lost_a_page_of_the_tree_gives_up_all_that_follows(lost: int) -> None:
    cache = KVCache(8, PAGE)
    kept = mixed(cache)
    cache.kept.unpin(kept, expires_at=FOREVER)
    node = cache._tree.pop_leaf(Tier.DEVICE, lost)
    assert node is not None
    cache.tiered._drop(node, Tier.DEVICE)
    assert (cache.kept.spare, cache.available) == (TAIL, 8)
    cache.kept.pin(kept)
    assert (kept.tokens, kept.tail) == (8 - 4 * lost, {})
    assert counts(cache, Tier.DEVICE) == (6 + lost, 2 - lost, 0, 0)
    cache.audit([])


@pytest.mark.parametrize("pure", [0, 2])
def test_a_tail_of_several_pages_expires_whole(pure: int) -> None:
    cache = KVCache(8, PAGE)
    kept = mixed(cache, pure=pure)
    cache.kept.unpin(kept, expires_at=7.0)
    cache.kept.expire(6.9)
    assert cache.kept.spare == 5 - pure
    cache.kept.expire(7.0)
    assert (cache.kept.spare, kept.tail) == (0, {})
    assert counts(cache, Tier.DEVICE) == (8 - pure, pure, 0, 0)
    cache.kept.pin(kept)
    assert kept.tokens == pure * PAGE
    cache.audit([])


# Moved


@pytest.mark.parametrize("pure", [0, 2, 4])
def test_it_moves_to_the_host_and_back_whole(pure: int) -> None:
    cache = KVCache(8, PAGE, host_pages=8)
    kept = mixed(cache, pure=pure)
    assert moved(cache, kept, Tier.HOST) == FreedPages(exclusive=5, freed=5)
    assert counts(cache, Tier.DEVICE) == (8, 0, 0, 0)
    assert counts(cache, Tier.HOST) == (3, pure, 5 - pure, 0)
    assert (cache.kept.spare, cache.available) == (0, 8)
    assert [tier for tier, _ in _sources(cache, kept)] == [Tier.HOST] * 5
    cache.audit([])
    moved(cache, kept, Tier.DEVICE)
    assert counts(cache, Tier.DEVICE)[2] == 5 - pure
    assert (cache.kept.spare, cache.available) == (5 - pure, 8)
    assert set(kept.tail) == {Tier.DEVICE}
    assert counts(cache, Tier.HOST)[2] == 0
    assert _sources(cache, kept)[pure:] == tuple((Tier.DEVICE, page) for page in kept.tail[Tier.DEVICE])
    assert cache.kept.drop(kept) is not None
    assert_all_free(cache)


def _sources(cache: KVCache, kept: Kept) -> tuple[tuple[Tier, int], ...]:
    cache.kept.pin(kept)
    return cache.kept.sources(kept)


@pytest.mark.parametrize("failing", range(2))
@pytest.mark.parametrize("to", Tier)
def test_a_copy_that_fails_leaves_it_where_it_was(to: Tier, failing: int) -> None:
    """That of the tail, or that of what is in the tree; the other one succeeds."""
    cache = KVCache(8, PAGE, host_pages=8)
    kept = mixed(cache)
    if to is Tier.DEVICE:
        moved(cache, kept, Tier.HOST)
        cache.kept.pin(kept)
    before = [page for _, page in cache.kept.sources(kept)]
    assert cache.kept.move(kept, to)
    copies = cache.tiered.take_copies()
    assert sorted(len(copy.sources) for copy in copies) == [2, TAIL]
    for index, copy in enumerate(copies):
        assert cache.kept.take_moved(expires_at=FOREVER) == []
        cache.tiered.copied(copy.copy_id, ok=index != failing)
        cache.audit([])
    ((image, _),) = cache.kept.take_moved(expires_at=FOREVER)
    assert (image, kept.failed, kept.tier) == (kept, True, to.other)
    assert set(kept.tail) == {to.other}
    assert [page for _, page in _sources(cache, kept) if page in before] == before
    assert kept.tokens == 19
    cache.audit([])
    assert cache.kept.drop(kept) is not None
    assert_all_free(cache)


def test_both_sides_of_a_tail_are_accounted_for_while_it_is_copied() -> None:
    cache = KVCache(8, PAGE, host_pages=8)
    kept = mixed(cache)
    before = cache.kept.sources(kept)
    assert cache.kept.move(kept, Tier.HOST)
    assert counts(cache, Tier.DEVICE) == (3, 2, TAIL, 0)
    assert counts(cache, Tier.HOST) == (3, 0, 0, 5)
    assert cache.available == 3
    assert cache.kept.sources(kept) == before, "they may still be exported from where they are"
    assert cache.kept.drop(kept) is None
    land(cache)
    ((_, freed),) = cache.kept.take_moved(expires_at=FOREVER)
    assert freed == FreedPages(exclusive=5, freed=5)
    assert cache.kept.drop(kept) == FreedPages(exclusive=0, freed=0)
    assert_all_free(cache)
    assert cache.stats(Tier.HOST).free == 8


@pytest.mark.parametrize("room", [0, 2, 4, 5])
@pytest.mark.parametrize("to", Tier)
def test_it_moves_whole_or_not_at_all(to: Tier, room: int) -> None:
    cache = KVCache(room + 5 if to is Tier.DEVICE else 8, PAGE, host_pages=8 if to is Tier.DEVICE else room)
    kept = mixed(cache)
    if to is Tier.DEVICE:
        moved(cache, kept, Tier.HOST)
        cache.kept.pin(kept)
        holding = open_up_to(cache, BOB, OTHERS, 0)
        assert cache.grow(holding, 5)
    assert cache.kept.move(kept, to) == (room == 5)
    if room == 5:
        land(cache)
        ((_, freed),) = cache.kept.take_moved(expires_at=FOREVER)
        assert freed.freed == (5 if to is Tier.HOST else 0)
    else:
        assert cache.tiered.take_copies() == []
        cache.kept.unpin(kept, expires_at=FOREVER)
    assert (kept.tokens, set(kept.tail)) == (19, {to if room == 5 else to.other})
    cache.audit([holding] if to is Tier.DEVICE else [])


# Taken up again


@pytest.mark.parametrize("pure", [0, 2, 4])
@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("ok", [True, False])
def test_a_sequence_goes_on_with_all_pages_of_the_tail(tier: Tier, ok: bool, pure: int) -> None:
    cache = KVCache(8, PAGE, host_pages=8)
    kept = mixed(cache, pure=pure)
    refs = cache.kept.sources(kept)
    if tier is Tier.HOST:
        moved(cache, kept, Tier.HOST)
    else:
        cache.kept.unpin(kept, expires_at=FOREVER)
    holding = resumed(cache, kept, ok=ok)
    assert cache.kept.images() == []
    assert cache.stats(Tier.HOST).private == 0
    assert holding.load_failed == (tier is Tier.HOST and not ok)
    if not holding.load_failed:
        assert (len(holding.table), holding.shared) == (5, pure)
        assert cache.available == 3
        assert tier is Tier.HOST or holding.table == [page for _, page in refs]
    cache.close(holding)
    assert_all_free(cache)


def test_a_tail_is_adopted_only_behind_all_that_it_follows() -> None:
    cache = KVCache(12, PAGE)
    kept = mixed(cache)
    cache.kept.unpin(kept, expires_at=FOREVER)
    for pages in (0, 1):
        with pytest.raises(AssertionError):
            cache.adopt(kept, open_up_to(cache, ANN, TOKENS, pages))


def test_a_sequence_grows_out_of_what_others_left_behind_but_not_out_of_the_tail_it_is_about_to_adopt() -> None:
    cache = KVCache(8, PAGE)
    kept = mixed(cache)
    cache.kept.unpin(kept, expires_at=FOREVER)
    cache.close(filled(cache, BOB, 12, OTHERS))
    holding = open_up_to(cache, ANN, TOKENS, 2)
    cache.kept.hold_tail(kept, held=True)
    assert (cache.available, cache.make_room(4)) == (3, False)
    cache.adopt(kept, holding)
    assert (holding.shared, len(holding.table)) == (2, 5)
    assert cache.grow(holding, 8)
    cache.audit([holding])
    cache.close(holding)
    assert_all_free(cache)


# Given up


@pytest.mark.parametrize("tier", Tier)
def test_dropping_frees_the_whole_tail(tier: Tier) -> None:
    cache = KVCache(8, PAGE, host_pages=8, write=THROUGH)
    kept = mixed(cache)
    land(cache)
    if tier is Tier.HOST:
        moved(cache, kept, Tier.HOST)
    freed = 5 if tier is Tier.DEVICE else 0
    assert cache.kept.drop(kept) == FreedPages(exclusive=freed, freed=freed)
    assert (cache.stats().free, cache.stats(Tier.HOST).free) == (8, 8)


def test_a_tail_is_not_written_through_nor_back() -> None:
    """The host's part of the tree is for all; what is there of a tail is there because its image was moved."""
    for write in (THROUGH, BACK):
        cache = KVCache(8, PAGE, host_pages=8, write=write)
        cache.kept.unpin(mixed(cache), expires_at=FOREVER)
        land(cache)
        cache.make_room(8)
        land(cache)
        assert cache.make_room(8)
        assert counts(cache, Tier.HOST) == (6, 2, 0, 0)


def test_what_another_sequence_is_just_loading_is_not_waited_for() -> None:
    """Parked behind pages that arrive for another one: it has those before them only, and its tail is free."""
    cache = KVCache(12, PAGE, host_pages=8)
    first = filled(cache, BOB, 8)
    image = cache.park(first, key(TOKENS, 8), 8)
    moved(cache, image, Tier.HOST)
    ann = open_up_to(cache, ANN, TOKENS, 0)
    assert cache.grow(ann, 5)
    bob = open_up_to(cache, BOB, TOKENS, 0)
    assert cache.load(bob, key(TOKENS, 8), 2, room=2)
    kept = cache.park(ann, key(TOKENS, 8), 19)
    assert (kept.tokens, kept.tail) == (0, {})
    cache.audit([bob])
    land(cache)
    cache.settle(bob)
    cache.close(bob)
    cache.kept.forget(kept)
    cache.kept.forget(image)
    assert_all_free(cache)
