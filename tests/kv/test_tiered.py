"""What leaves and enters the tiers by itself: write policies, evictions, splits and failures of copies."""

import pytest

from rollout.config import WritePolicy
from rollout.kv.cache import KVCache, Stored
from rollout.kv.holding import Holding
from rollout.kv.tiers import Residency, Tier
from tests.kv.plans import (
    ANN,
    BACK,
    BOB,
    EVE,
    NONE,
    OTHERS,
    PAGE,
    THROUGH,
    TOKENS,
    counts,
    evict_all,
    filled,
    key,
    land,
    left,
    on_host,
    open_up_to,
    residencies,
    selective,
    stored,
)

DEVICE, HOST, BOTH = Residency.DEVICE, Residency.HOST, Residency.BOTH


# Write policies


def test_write_through_copies_what_is_committed_at_once_and_only_once() -> None:
    cache = KVCache(8, PAGE, host_pages=8, write=THROUGH)
    holding = filled(cache, ANN, 8)
    (copy,) = cache.tiered.take_copies()
    assert (copy.to, [*copy.sources]) == (Tier.HOST, holding.table)
    assert counts(cache, Tier.HOST) == (6, 0, 0, 2)
    cache.tiered.copied(copy.copy_id, ok=True)
    assert counts(cache, Tier.HOST) == (6, 2, 0, 0)
    assert residencies(cache) == [(BOTH, 2)]
    assert cache.grow(holding, 3)
    cache.commit(holding, key(TOKENS, 12))
    (copy,) = cache.tiered.take_copies()
    assert [*copy.sources] == holding.table[2:]
    cache.audit([holding])


@pytest.mark.parametrize("write", [THROUGH, BACK, NONE, selective(1)])
def test_what_is_committed_without_writing_is_not_copied_then(write: WritePolicy) -> None:
    cache = KVCache(8, PAGE, host_pages=8, write=write)
    filled(cache, ANN, 8, write=False)
    assert cache.tiered.take_copies() == []


def admitted(cache: KVCache, pages: int) -> Holding:
    """A sequence of Bob's goes on with the first `pages` pages; one more attempt found no room."""
    cache.close(open_up_to(cache, BOB, TOKENS, pages))
    holding = open_up_to(cache, BOB, TOKENS, pages)
    cache.admitted(holding, cache.stored("w", key(TOKENS, pages * PAGE), pages), pages)
    return holding


@pytest.mark.parametrize("hits", [1, 2, 3])
def test_selective_writing_waits_for_so_many_hits(hits: int) -> None:
    cache = KVCache(8, PAGE, host_pages=8, write=selective(hits))
    left(cache, ANN, 8)
    for _ in range(hits):
        assert land(cache) == []
        cache.close(admitted(cache, 2))
    assert [len(copy.sources) for copy in land(cache)] == [2]
    assert residencies(cache) == [(BOTH, 2)]


def test_selective_writing_copies_the_part_that_was_found_often() -> None:
    cache = KVCache(8, PAGE, host_pages=8, write=selective(2))
    left(cache, ANN, 12)
    for _ in range(2):
        cache.close(admitted(cache, 1))
    land(cache)
    assert residencies(cache) == [(BOTH, 1), (DEVICE, 2)]


def test_write_back_copies_what_is_evicted_and_has_it_in_one_tier() -> None:
    cache = KVCache(4, PAGE, host_pages=8, write=BACK)
    left(cache, ANN, 12)
    assert land(cache) == []
    assert not cache.make_room(4)
    assert cache.leaving == 3
    assert cache.available == 4, "the pages can be had, after the copy"
    assert counts(cache, Tier.DEVICE) == (1, 3, 0, 0)
    land(cache)
    assert residencies(cache) == [(HOST, 3)]
    assert counts(cache, Tier.DEVICE) == (4, 0, 0, 0)
    assert counts(cache, Tier.HOST) == (5, 3, 0, 0)
    assert cache.make_room(4)
    cache.audit([])


def test_write_back_loses_nothing_that_is_found_while_it_leaves() -> None:
    cache = KVCache(4, PAGE, host_pages=8, write=BACK)
    left(cache, ANN, 12)
    assert not cache.make_room(4)
    holding = open_up_to(cache, BOB, TOKENS, 3)
    assert len(holding.table) == 3
    land(cache)
    assert residencies(cache) == [(BOTH, 3)]
    assert not cache.make_room(4)
    cache.audit([holding])


def test_write_back_with_room_for_a_part_keeps_the_first_pages() -> None:
    cache = KVCache(4, PAGE, host_pages=2, write=BACK)
    left(cache, ANN, 16)
    evict_all(cache)
    assert residencies(cache) == [(HOST, 2)]
    assert cache.stats().evicted == 2
    cache.audit([])


@pytest.mark.parametrize("write", [NONE, THROUGH])
def test_what_is_not_on_the_host_is_gone_when_it_is_evicted(write: WritePolicy) -> None:
    cache = KVCache(4, PAGE, host_pages=8, write=write)
    cache.close(filled(cache, ANN, 12, write=False))
    assert cache.make_room(4)
    assert stored(cache) == Stored(device=0, evictable=0, host=0, arriving=False)
    assert cache.stats().evicted == 3


def test_what_hangs_on_the_host_below_what_is_gone_is_freed() -> None:
    """Nobody could find it."""
    cache = KVCache(6, PAGE, host_pages=8, write=THROUGH)
    left(cache, ANN, 4)
    left(cache, ANN, 8)
    upper, lower = cache.tiered.take_copies()
    cache.tiered.copied(upper.copy_id, ok=False)
    cache.tiered.copied(lower.copy_id, ok=True)
    assert residencies(cache) == [(DEVICE, 1), (BOTH, 1)]
    assert cache.make_room(5)
    assert residencies(cache) == [(DEVICE, 1), (HOST, 1)]
    assert cache.make_room(6)
    assert (counts(cache, Tier.HOST), cache.stats(Tier.HOST).evicted) == ((8, 0, 0, 0), 1)
    cache.audit([])


# The host is small


def test_what_is_written_evicts_the_least_recently_used_of_the_host() -> None:
    cache = KVCache(8, PAGE, host_pages=2, write=THROUGH)
    left(cache, ANN, 4)
    left(cache, ANN, 4, OTHERS)
    land(cache)
    cache.close(open_up_to(cache, BOB, TOKENS, 1))
    left(cache, EVE, 4, TOKENS[8:])
    land(cache)
    assert [residencies(cache, tokens) for tokens in (TOKENS, OTHERS, TOKENS[8:])] == [
        [(BOTH, 1)],
        [(DEVICE, 1)],
        [(BOTH, 1)],
    ]
    assert cache.stats(Tier.HOST).evicted == 1
    cache.audit([])


def test_with_room_on_the_host_for_a_part_the_first_pages_are_written() -> None:
    cache = KVCache(8, PAGE, host_pages=2, write=THROUGH)
    left(cache, ANN, 16)
    land(cache)
    assert residencies(cache) == [(BOTH, 2), (DEVICE, 2)]
    cache.audit([])


def test_a_prefix_does_not_evict_itself_from_the_host() -> None:
    cache = KVCache(8, PAGE, host_pages=2, write=THROUGH)
    left(cache, ANN, 8)
    land(cache)
    left(cache, ANN, 16)
    assert land(cache) == []
    assert residencies(cache) == [(BOTH, 2), (DEVICE, 2)]


def test_a_host_page_that_a_copy_writes_to_is_not_handed_out_twice() -> None:
    cache = KVCache(8, PAGE, host_pages=1, write=THROUGH)
    left(cache, ANN, 4)
    left(cache, ANN, 4, OTHERS)
    (copy,) = land(cache)
    assert len(copy.targets) == 1
    assert residencies(cache, OTHERS) == [(DEVICE, 1)]
    left(cache, BOB, 4, TOKENS[8:])
    assert [len(copy.targets) for copy in land(cache)] == [1]
    cache.audit([])


@pytest.mark.parametrize("write", [THROUGH, BACK, selective(1)])
@pytest.mark.parametrize("host_pages", [0, 1])
def test_pages_come_free_on_a_device_that_is_larger_than_the_host(host_pages: int, write: WritePolicy) -> None:
    """Case C8: no deadlock at one host page, or none."""
    cache = KVCache(6, PAGE, host_pages=host_pages, write=write)
    for start in range(10):
        tokens = tuple(range(1000 * start, 1000 * start + 40))
        holding = open_up_to(cache, ANN, tokens, 0)
        for _ in range(2):  # perhaps after a copy
            if cache.grow(holding, 5):
                break
            land(cache)
        assert len(holding.table) == 5
        cache.commit(holding, key(tokens, 20))
        cache.close(holding)
    cache.audit([])


# Copies and what happens meanwhile


def test_a_sibling_splits_a_node_while_it_is_copied_and_both_halves_arrive() -> None:
    """Case C4, on page numbers; `test_fences` compares the bytes."""
    cache = KVCache(8, PAGE, host_pages=8, write=THROUGH)
    first = filled(cache, ANN, 12)
    (copy,) = cache.tiered.take_copies()
    sibling = filled(cache, BOB, 12, TOKENS[:4] + OTHERS)
    assert residencies(cache) == [(DEVICE, 1), (DEVICE, 2)]
    cache.audit([first, sibling])
    cache.tiered.copied(copy.copy_id, ok=True)
    assert residencies(cache) == [(BOTH, 1), (BOTH, 2)]
    pages = [page for node in first.node.path() for page in node.host.pages]
    assert pages == [*copy.targets]
    cache.audit([first, sibling])


@pytest.mark.parametrize("write", [THROUGH, BACK])
def test_a_copy_to_the_host_that_fails_leaves_the_pages_on_the_device(write: WritePolicy) -> None:
    cache = KVCache(4, PAGE, host_pages=8, write=write)
    left(cache, ANN, 12)
    if write is BACK:
        assert not cache.make_room(4)
    (copy,) = cache.tiered.take_copies()
    cache.tiered.copied(copy.copy_id, ok=False)
    assert residencies(cache) == [(DEVICE, 3)]
    assert (counts(cache, Tier.HOST), cache.stats(Tier.HOST).failed) == ((8, 0, 0, 0), 3)
    assert (cache.leaving, cache.available) == (0, 4)
    cache.audit([])


def test_pages_that_are_copied_stay_whatever_is_evicted() -> None:
    """The fence before page reuse (C1), on page numbers."""
    cache = KVCache(4, PAGE, host_pages=8, write=THROUGH)
    left(cache, ANN, 12)
    (copy,) = cache.tiered.take_copies()
    other = open_up_to(cache, BOB, OTHERS, 0)
    assert not cache.grow(other, 2)
    assert cache.grow(other, 1)
    assert not set(other.table) & set(copy.sources)
    cache.tiered.copied(copy.copy_id, ok=True)
    assert cache.grow(other, 4)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_copies_are_completed_in_any_order(order: tuple[int, ...]) -> None:
    cache = KVCache(8, PAGE, host_pages=8, write=THROUGH)
    for count in (4, 12, 20):
        left(cache, ANN, count)
    copies = cache.tiered.take_copies()
    for index in order:
        cache.tiered.copied(copies[index].copy_id, ok=True)
        cache.audit([])
    assert residencies(cache) == [(BOTH, 1), (BOTH, 2), (BOTH, 2)]
    assert cache.tiered.flights == 0


def test_with_shared_prompts_preferred_private_outputs_leave_first() -> None:
    cache = KVCache(4, PAGE, prefer_shared=True)
    prompt, output = TOKENS[:4], OTHERS
    left(cache, ANN, 4, prompt)
    left(cache, BOB, 4, prompt)
    left(cache, EVE, 8, output)
    assert cache.make_room(3)
    assert (stored(cache, prompt).device, stored(cache, output).device) == (1, 0)


def test_other_weights_find_nothing_in_either_tier() -> None:
    """Case D1: old pages are out of reach without a flush, and leave as they are not used."""
    cache = KVCache(4, PAGE, host_pages=4, write=THROUGH)
    on_host(cache, ANN, 8)
    left(cache, ANN, 8)
    for pages in range(3):
        assert stored(cache, pages=pages, weights_id="v") == Stored(device=0, evictable=0, host=0, arriving=False)
    holding = cache.open(BOB, "v", key(TOKENS, 8), 2)
    assert holding.table == []
    assert cache.grow(holding, 4)
    cache.audit([holding])
