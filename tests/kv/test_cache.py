"""Page tables: sharing, growing, loading from the host, and what closing gives back."""

from collections.abc import Callable

import pytest

from rollout.kv.cache import KVCache, Stored
from rollout.kv.holding import Holding
from rollout.kv.tiers import Residency, Tier
from tests.kv.plans import (
    ANN,
    BACK,
    BOB,
    EVE,
    OTHERS,
    PAGE,
    THROUGH,
    TOKENS,
    counts,
    filled,
    key,
    land,
    left,
    on_host,
    open_up_to,
    parked,
    residencies,
    stored,
)


def test_pages_for_rounds_up() -> None:
    cache = KVCache(4, PAGE)
    assert [cache.pages_for(tokens) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_a_second_sequence_shares_whole_pages_and_not_the_tail() -> None:
    cache = KVCache(10, PAGE)
    first, second = filled(cache, ANN, 10), filled(cache, BOB, 10)
    assert first.table[:2] == second.table[:2]
    assert first.table[2] != second.table[2]
    assert (first.shared, len(first.table)) == (second.shared, len(second.table)) == (2, 3)
    assert counts(cache, Tier.DEVICE) == (10 - 4, 2, 2, 0)


def test_commit_adopts_pages_that_are_stored_and_frees_its_own() -> None:
    cache = KVCache(10, PAGE)
    first, second = open_up_to(cache, ANN, TOKENS, 0), open_up_to(cache, BOB, TOKENS, 0)
    assert cache.grow(first, 3)
    assert cache.grow(second, 3)
    own = [*second.table]
    cache.commit(first, key(TOKENS, 8))
    cache.commit(second, key(TOKENS, 12))
    assert second.table == [*first.table[:2], own[2]]
    assert cache.stats().free == 10 - 4
    cache.audit([first, second])


def test_closing_leaves_what_is_in_the_tree_for_the_next_one() -> None:
    cache = KVCache(10, PAGE)
    cache.close(filled(cache, ANN, 10))
    assert counts(cache, Tier.DEVICE) == (8, 2, 0, 0)
    assert stored(cache) == Stored(device=2, evictable=2, host=0, arriving=False)
    assert cache.available == 10


def test_growing_evicts_but_never_what_is_held() -> None:
    cache = KVCache(4, PAGE)
    held = filled(cache, ANN, 8)
    left(cache, BOB, 8, OTHERS)
    assert cache.stats().free == 0
    assert not cache.grow(held, 5)
    assert cache.stats().evicted == 0
    assert cache.grow(held, 4)
    assert cache.stats().evicted == 2
    assert held.table[:2] != held.table[2:]
    cache.audit([held])


def test_growing_to_what_it_has_already_changes_nothing() -> None:
    cache = KVCache(4, PAGE)
    holding = filled(cache, ANN, 8)
    before = cache.stats()
    assert cache.grow(holding, 1)
    assert cache.grow(holding, 2, reserved=True)
    assert (cache.stats(), len(holding.table)) == (before, 2)


@pytest.mark.parametrize("use", [lambda cache, holding: cache.commit(holding, key(TOKENS, 4)), KVCache.close])
def test_pages_that_a_copy_writes_to_are_neither_shared_nor_given_back(
    use: Callable[[KVCache, Holding], object],
) -> None:
    cache = KVCache(4, PAGE)
    holding = open_up_to(cache, ANN, TOKENS, 0)
    assert cache.grow(holding, 2, reserved=True)
    assert counts(cache, Tier.DEVICE) == (2, 0, 0, 2)
    with pytest.raises(AssertionError, match="during a copy"):
        use(cache, holding)
    cache.settle(holding)
    use(cache, holding)


def test_committing_more_than_the_table_holds_asserts() -> None:
    cache = KVCache(4, PAGE)
    holding = open_up_to(cache, ANN, TOKENS, 0)
    assert cache.grow(holding, 1)
    with pytest.raises(AssertionError):
        cache.commit(holding, key(TOKENS, 8))


# Looking


def shape(cache: KVCache) -> list[tuple[object, ...]]:
    """All that the tree knows of its pages."""
    nodes = [node for node in cache._tree.nodes() if node.edge]
    return [
        (node, node.edge, *node.device.pages, node.device.locks, *node.host.pages, node.owner, node.hits, node.used_at)
        for node in nodes
    ]


@pytest.mark.parametrize("pages", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("weights_id", ["w", "v"])
def test_looking_changes_nothing(weights_id: str, pages: int) -> None:
    """An admission that finds no room leaves no trace."""
    cache = KVCache(10, PAGE, host_pages=4, write=THROUGH)
    holding = filled(cache, ANN, 8)
    left(cache, BOB, 18)
    land(cache)
    before, stats, available = shape(cache), cache.stats(), cache.available
    found = stored(cache, pages=pages, weights_id=weights_id)
    assert found.device == (min(4, pages) if weights_id == "w" else 0)
    assert found.evictable == max(0, found.device - 2)
    assert (shape(cache), cache.stats(), cache.available) == (before, stats, available)
    cache.audit([holding])


def test_what_was_only_looked_at_is_evicted_as_if_it_was_not() -> None:
    cache = KVCache(2, PAGE)
    left(cache, ANN, 4, TOKENS)
    left(cache, ANN, 4, OTHERS)
    assert stored(cache).device == 1
    assert cache.grow(open_up_to(cache, BOB, TOKENS, 0), 1)
    assert (stored(cache).device, stored(cache, OTHERS).device) == (0, 1)


def test_found_and_missed_pages_are_counted_for_each_tier() -> None:
    cache = KVCache(10, PAGE, host_pages=10)
    holding = open_up_to(cache, BOB, TOKENS, 0)
    cache.admitted(holding, Stored(device=2, evictable=0, host=3, arriving=False), 7)
    cache.admitted(holding, Stored(device=1, evictable=1, host=0, arriving=False), 1)
    device, host = cache.stats(Tier.DEVICE), cache.stats(Tier.HOST)
    assert (device.hits, device.misses, host.hits, host.misses) == (3, 5, 3, 2)


# Loading from the host


def host_only(*, pages: int = 3, device: int = 8) -> KVCache:
    """A cache with the first pages of `TOKENS` on the host only."""
    cache = KVCache(device, PAGE, host_pages=8, write=THROUGH)
    on_host(cache, ANN, pages * PAGE)
    assert residencies(cache) == [(Residency.HOST, pages)]
    return cache


def test_what_is_on_the_host_is_loaded_and_then_in_both_tiers() -> None:
    cache = host_only()
    assert stored(cache) == Stored(device=0, evictable=0, host=3, arriving=False)
    holding = open_up_to(cache, BOB, TOKENS, 0)
    assert cache.load(holding, key(TOKENS, 12), 3, room=4)
    assert counts(cache, Tier.DEVICE) == (5, 0, 0, 3)
    assert (len(holding.table), holding.shared, len(holding.loads)) == (3, 3, 1)
    cache.audit([holding])
    (copy,) = land(cache)
    assert (copy.to, [*copy.targets]) == (Tier.DEVICE, holding.table)
    assert not holding.loads
    assert residencies(cache) == [(Residency.BOTH, 3)]
    assert counts(cache, Tier.DEVICE) == (5, 3, 0, 0)
    assert cache.stats(Tier.DEVICE).arrived == 3
    cache.audit([holding])


def test_a_prefix_on_the_device_is_continued_with_what_is_on_the_host() -> None:
    cache = KVCache(8, PAGE, host_pages=8, write=THROUGH)
    held = filled(cache, EVE, 4)
    on_host(cache, ANN, 12)
    holding = open_up_to(cache, BOB, TOKENS, 1)
    assert cache.load(holding, key(TOKENS, 12), 3, room=2)
    assert holding.table[0] == held.table[0]
    land(cache)
    assert stored(cache) == Stored(device=3, evictable=0, host=0, arriving=False)
    cache.audit([held, holding])


def test_nothing_is_found_committed_or_closed_in_pages_before_they_are_loaded() -> None:
    """The fourth fence, decoding after the copy: a load is of use when it is told of, and no earlier."""
    cache = host_only()
    holding = open_up_to(cache, BOB, TOKENS, 0)
    assert cache.load(holding, key(TOKENS, 12), 3, room=4)
    assert stored(cache) == Stored(device=0, evictable=0, host=0, arriving=True)
    assert open_up_to(cache, EVE, TOKENS, 3).table == []
    assert cache.grow(holding, 4)
    with pytest.raises(AssertionError, match="during a load"):
        cache.commit(holding, key(TOKENS, 16))
    with pytest.raises(AssertionError, match="during a load"):
        cache.close(holding)
    land(cache)
    assert stored(cache) == Stored(device=3, evictable=0, host=0, arriving=False)
    cache.commit(holding, key(TOKENS, 16))


def test_without_room_nothing_is_loaded_and_nothing_is_held() -> None:
    cache = host_only(device=4)
    other = filled(cache, BOB, 8, OTHERS, write=False)
    holding = open_up_to(cache, BOB, TOKENS, 0)
    before = counts(cache, Tier.DEVICE)
    assert not cache.load(holding, key(TOKENS, 12), 3, room=3)
    assert (holding.table, holding.loads, counts(cache, Tier.DEVICE)) == ([], set(), before)
    cache.close(holding)
    assert cache.stats(Tier.HOST).tree == cache._tree.host.evictable == 3
    cache.audit([other])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_loads_are_of_use_from_the_first_page_on_in_whatever_order_they_end(order: tuple[int, ...]) -> None:
    cache = KVCache(8, PAGE, host_pages=8, write=THROUGH)
    left(cache, ANN, 4)
    on_host(cache, ANN, 12)
    holding = open_up_to(cache, BOB, TOKENS, 0)
    assert cache.load(holding, key(TOKENS, 12), 3, room=3)
    copies = cache.tiered.take_copies()
    found = []
    for index in order:
        cache.tiered.copied(copies[index].copy_id, ok=True)
        found.append((stored(cache).device, len(holding.loads)))
        cache.audit([holding])
    assert found == [(1, 1) if order == (0, 1) else (0, 2), (3, 0)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}])
def test_a_load_that_fails_leaves_what_is_above_and_the_host_as_it_was(
    order: tuple[int, ...], failing: set[int]
) -> None:
    """Two copies, the second of use only with the first, completed in either order."""
    cache = KVCache(8, PAGE, host_pages=8, write=THROUGH)
    left(cache, ANN, 4)
    on_host(cache, ANN, 12)
    assert residencies(cache) == [(Residency.HOST, 1), (Residency.HOST, 2)]
    holding = open_up_to(cache, BOB, TOKENS, 0)
    assert cache.load(holding, key(TOKENS, 12), 3, room=4)
    copies = cache.tiered.take_copies()
    for index in order:
        cache.tiered.copied(copies[index].copy_id, ok=index not in failing)
        cache.audit([holding])
    good = 0 if 0 in failing else 1
    assert holding.load_failed
    assert (len(holding.table), holding.shared) == (good, good)
    assert stored(cache) == Stored(device=good, evictable=0, host=3 - good, arriving=False)
    assert cache.stats().failed == 3 - good
    cache.close(holding)
    assert counts(cache, Tier.DEVICE) == (8 - good, good, 0, 0)
    assert cache.available == 8


def test_with_write_back_pages_are_in_one_tier_again_after_a_load() -> None:
    cache = KVCache(8, PAGE, host_pages=8, write=BACK)
    on_host(cache, ANN, 12)
    assert residencies(cache) == [(Residency.HOST, 3)]
    holding = open_up_to(cache, BOB, TOKENS, 0)
    assert cache.load(holding, key(TOKENS, 12), 3, room=3)
    land(cache)
    assert residencies(cache) == [(Residency.DEVICE, 3)]
    assert counts(cache, Tier.HOST) == (8, 0, 0, 0)
    cache.audit([holding])


def test_a_sequence_that_computed_what_another_one_is_loading_keeps_its_own_pages() -> None:
    cache = host_only()
    computing = open_up_to(cache, ANN, TOKENS, 0)
    assert cache.grow(computing, 3)
    loading = open_up_to(cache, BOB, TOKENS, 0)
    assert cache.load(loading, key(TOKENS, 12), 3, room=3)
    cache.commit(computing, key(TOKENS, 12))
    assert (computing.shared, len(set(computing.table) & set(loading.table))) == (0, 0)
    kept = cache.park(computing, key(TOKENS, 12), 12)
    assert (kept.tokens, kept.key) == (0, b""), "it has what is in the tree, and that is another's to fill"
    cache.audit([loading])
    land(cache)
    assert residencies(cache) == [(Residency.BOTH, 3)]


def test_pages_that_were_computed_again_meanwhile_need_no_load() -> None:
    cache = host_only()
    again = filled(cache, BOB, 12)
    assert residencies(cache) == [(Residency.BOTH, 3)]
    cache.audit([again])


@pytest.mark.parametrize("cached", [True, False])
def test_an_image_of_no_pages_can_be_parked_and_dropped(cached: bool) -> None:
    cache = KVCache(4, PAGE)
    kept = parked(cache, ANN, 0) if cached else cache.park_nothing(ANN, "w")
    assert (kept.tokens, cache.kept.sources(kept)) == (0, ())
    cache.audit([])
    assert cache.kept.drop(kept) is not None
    cache.audit([])
