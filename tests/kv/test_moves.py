"""Images move between the tiers whole, or stay where they are."""

import pytest

from rollout.kv.cache import KVCache
from rollout.kv.kept import FreedPages
from rollout.kv.tiers import Copy, Residency, Tier
from tests.kv.plans import (
    ANN,
    BOB,
    FOREVER,
    OTHERS,
    PAGE,
    THROUGH,
    TOKENS,
    counts,
    evict_all,
    filled,
    host_image,
    key,
    land,
    left,
    moved,
    open_up_to,
    parked,
    residencies,
    selective,
)


def test_a_move_to_the_host_frees_all_that_only_this_trajectory_has() -> None:
    cache = KVCache(8, PAGE, host_pages=8)
    left(cache, BOB, 4)
    kept = parked(cache, ANN, 10)
    freed = moved(cache, kept, Tier.HOST)
    assert freed == FreedPages(exclusive=2, freed=2)
    assert residencies(cache) == [(Residency.BOTH, 1), (Residency.HOST, 1)]
    assert counts(cache, Tier.DEVICE) == (7, 1, 0, 0)
    assert counts(cache, Tier.HOST) == (5, 2, 1, 0)
    cache.audit([])


def test_what_is_on_the_host_as_an_image_stays_whatever_else_needs_host_pages() -> None:
    cache = KVCache(8, PAGE, host_pages=4, write=THROUGH)
    kept = host_image(cache)
    left(cache, BOB, 16, OTHERS)
    land(cache)
    assert cache.tiered.room_on_host == 1
    evict_all(cache)
    cache.kept.pin(kept)
    assert (kept.tokens, {tier for tier, _ in cache.kept.sources(kept)}) == (10, {Tier.HOST})
    cache.audit([])


def test_a_move_back_brings_every_page_to_the_device() -> None:
    cache = KVCache(8, PAGE, host_pages=8)
    kept = host_image(cache)
    assert moved(cache, kept, Tier.DEVICE) == FreedPages(exclusive=0, freed=0)
    assert (kept.tier, set(kept.tail)) == (Tier.DEVICE, {Tier.DEVICE})
    cache.kept.pin(kept)
    assert {tier for tier, _ in cache.kept.sources(kept)} == {Tier.DEVICE}
    assert counts(cache, Tier.HOST)[2:] == (0, 0)
    cache.audit([])


def test_nothing_is_copied_that_is_there_already() -> None:
    cache = KVCache(8, PAGE, host_pages=8, write=THROUGH)
    kept = parked(cache, ANN, 8)
    land(cache)
    assert cache.kept.move(kept, Tier.HOST)
    assert cache.tiered.take_copies() == []
    ((image, freed),) = cache.kept.take_moved(expires_at=FOREVER)
    assert (image.tier, freed) == (Tier.HOST, FreedPages(exclusive=2, freed=2))


def test_a_move_waits_for_copies_that_were_under_way_already() -> None:
    cache = KVCache(8, PAGE, host_pages=8, write=THROUGH)
    kept = parked(cache, ANN, 8)
    (copy,) = cache.tiered.take_copies()
    assert cache.kept.move(kept, Tier.HOST)
    assert cache.tiered.take_copies() == []
    assert cache.kept.take_moved(expires_at=FOREVER) == []
    cache.tiered.copied(copy.copy_id, ok=True)
    assert [image for image, _ in cache.kept.take_moved(expires_at=FOREVER)] == [kept]
    cache.audit([])


@pytest.mark.parametrize("host_pages", [0, 2])
def test_a_move_to_a_full_host_is_refused_and_the_device_copy_stays(host_pages: int) -> None:
    """Case C7."""
    cache = KVCache(8, PAGE, host_pages=host_pages)
    kept = parked(cache, ANN, 10)
    before = cache.kept.sources(kept)
    assert not cache.kept.move(kept, Tier.HOST)
    assert cache.tiered.take_copies() == []
    assert cache.kept.sources(kept) == before
    cache.kept.unpin(kept, expires_at=FOREVER)
    holding = open_up_to(cache, ANN, TOKENS, 2)
    cache.adopt(kept, holding)
    assert [(Tier.DEVICE, page) for page in holding.table] == [*before]
    cache.audit([holding])


def test_a_move_to_the_host_displaces_what_is_there_for_reuse_only() -> None:
    cache = KVCache(8, PAGE, host_pages=3, write=THROUGH)
    left(cache, BOB, 12, OTHERS)
    land(cache)
    kept = cache.park(filled(cache, ANN, 10, write=False), key(TOKENS, 10), 10)
    moved(cache, kept, Tier.HOST)
    assert cache.stats(Tier.HOST).evicted == 3
    cache.audit([])


@pytest.mark.parametrize("to", Tier)
@pytest.mark.parametrize("failing", [0, 1])
def test_an_image_of_which_a_copy_fails_is_where_it_was(to: Tier, failing: int) -> None:
    cache = KVCache(8, PAGE, host_pages=8)
    kept = parked(cache, ANN, 10) if to is Tier.HOST else host_image(cache)
    cache.kept.pin(kept)
    assert cache.kept.move(kept, to)
    copies: list[Copy] = cache.tiered.take_copies()
    assert len(copies) == 2, "the whole pages and the tail"
    for index, copy in enumerate(copies):
        assert cache.kept.take_moved(expires_at=FOREVER) == []
        cache.tiered.copied(copy.copy_id, ok=index != failing)
        cache.audit([])
    assert len(cache.kept.take_moved(expires_at=FOREVER)) == 1
    assert (kept.failed, kept.tier, set(kept.tail)) == (True, to.other, {to.other})
    assert counts(cache, Tier.DEVICE) == ((5, 2, 1, 0) if to is Tier.HOST else (8, 0, 0, 0))
    cache.kept.pin(kept)
    assert (kept.tokens, len(cache.kept.sources(kept))) == (10, 3)
    cache.audit([])


def test_an_image_whose_move_failed_can_be_moved_again() -> None:
    cache = KVCache(8, PAGE, host_pages=8)
    kept = parked(cache, ANN, 10)
    moved(cache, kept, Tier.HOST, ok=False)
    assert moved(cache, kept, Tier.HOST) == FreedPages(exclusive=3, freed=3)


def test_a_sibling_that_splits_a_node_during_a_move_does_not_hurt() -> None:
    cache = KVCache(8, PAGE, host_pages=8, write=selective(1))
    kept = parked(cache, ANN, 10)
    assert cache.kept.move(kept, Tier.HOST)
    sibling = filled(cache, BOB, 8, TOKENS[:4] + OTHERS)
    land(cache)
    ((_, freed),) = cache.kept.take_moved(expires_at=FOREVER)
    assert freed == FreedPages(exclusive=2, freed=2)
    assert residencies(cache) == [(Residency.BOTH, 1), (Residency.HOST, 1)]
    cache.audit([sibling])


@pytest.mark.parametrize("use", ["unpin", "move"])
def test_during_a_move_an_image_is_neither_unpinned_nor_moved(use: str) -> None:
    cache = KVCache(8, PAGE, host_pages=8)
    kept = parked(cache, ANN, 10)
    assert cache.kept.move(kept, Tier.HOST)
    with pytest.raises(AssertionError, match="during a move"):
        cache.kept.unpin(kept, expires_at=FOREVER) if use == "unpin" else cache.kept.move(kept, Tier.DEVICE)
