"""What other weights wrote is freed as soon as nobody holds it, and their roots are forgotten."""

import random

import pytest

from rollout.config import WritePolicy
from rollout.kv.cache import KVCache
from rollout.kv.holding import Holding
from rollout.kv.nodes import Node
from rollout.kv.tiers import Residency, Tier
from rollout.types import TrajectoryId
from tests.kv.plans import (
    ANN,
    BACK,
    BOB,
    FOREVER,
    NONE,
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
    on_host,
    open_up_to,
    parked,
    residencies,
    stored,
)

LIVE = frozenset({"v"})


def filled_by(cache: KVCache, weights_id: str, owner: TrajectoryId, tokens: tuple[int, ...], count: int) -> Holding:
    found = stored(cache, tokens, count // PAGE, weights_id)
    holding = cache.open(owner, weights_id, key(tokens, found.device * PAGE), found.device)
    assert cache.grow(holding, cache.pages_for(count))
    cache.commit(holding, key(tokens, count))
    return holding


def roots(cache: KVCache) -> set[str]:
    return set(cache._tree._roots)


@pytest.mark.parametrize("write", [NONE, THROUGH, BACK])
def test_what_nobody_holds_is_freed_in_both_tiers_and_what_the_live_weights_wrote_stays(write: WritePolicy) -> None:
    cache = KVCache(20, PAGE, host_pages=20, write=write)
    for count in (4, 12, 20):
        left(cache, ANN, count)
    left(cache, BOB, 12, TOKENS[:4] + OTHERS)
    land(cache)
    if write is BACK:
        evict_all(cache)
    cache.close(filled_by(cache, "v", ANN, TOKENS, 8))
    land(cache)
    assert cache.tiered.purge(LIVE)
    assert roots(cache) == {"v"}
    on_the_host = 2 if write is THROUGH else 0
    assert (counts(cache, Tier.DEVICE), counts(cache, Tier.HOST)) == (
        (18, 2, 0, 0),
        (20 - on_the_host, on_the_host, 0, 0),
    )
    assert stored(cache, pages=2, weights_id="v").device == 2
    cache.audit([])
    evict_all(cache)
    assert cache.available == 20
    cache.audit([])


def test_all_that_is_named_stays() -> None:
    cache = KVCache(20, PAGE)
    left(cache, ANN, 8)
    cache.close(filled_by(cache, "v", ANN, TOKENS, 8))
    cache.close(filled_by(cache, "u", ANN, TOKENS, 8))
    assert cache.tiered.purge({"v", "w", "u"})
    assert cache.stats().tree == 6
    assert cache.tiered.purge({"v", "w"})
    assert (cache.stats().tree, roots(cache)) == (4, {"v", "w"})
    assert cache.tiered.purge({"v"})
    assert (cache.stats().tree, roots(cache)) == (2, {"v"})


def test_of_a_branch_that_a_sequence_holds_the_others_go_and_it_goes_when_it_is_closed() -> None:
    cache = KVCache(20, PAGE, host_pages=20, write=THROUGH)
    left(cache, ANN, 20)
    left(cache, BOB, 12, TOKENS[:8] + OTHERS)
    land(cache)
    holding = open_up_to(cache, BOB, TOKENS, 3)
    assert not cache.tiered.purge(LIVE)
    # The host's copies go; where two pages of a held path were on both, they stay on the device.
    assert residencies(cache) == [(Residency.DEVICE, 2), (Residency.DEVICE, 1)]
    assert cache.stats(Tier.HOST).free == 20
    assert roots(cache) == {"w"}
    cache.audit([holding])
    cache.close(holding)
    assert cache.tiered.purge(LIVE)
    assert (cache.stats().free, roots(cache)) == (20, set())
    cache.audit([])


@pytest.mark.parametrize("ok", [True, False])
def test_what_is_being_written_to_the_host_goes_when_that_is_over(ok: bool) -> None:
    cache = KVCache(20, PAGE, host_pages=20, write=THROUGH)
    left(cache, ANN, 12)
    left(cache, BOB, 12, OTHERS)
    (first, second) = cache.tiered.take_copies()
    cache.tiered.copied(first.copy_id, ok=ok)
    assert not cache.tiered.purge(LIVE)
    assert (counts(cache, Tier.DEVICE), counts(cache, Tier.HOST)) == ((17, 3, 0, 0), (17, 0, 0, 3))
    cache.audit([])
    cache.tiered.copied(second.copy_id, ok=ok)
    assert cache.tiered.purge(LIVE)
    assert (cache.stats().free, cache.stats(Tier.HOST).free) == (20, 20)
    cache.audit([])


@pytest.mark.parametrize("ok", [True, False])
def test_what_leaves_by_write_back_goes_when_that_is_over(ok: bool) -> None:
    cache = KVCache(4, PAGE, host_pages=8, write=BACK)
    left(cache, ANN, 12)
    assert not cache.make_room(4)
    assert not cache.tiered.purge(LIVE)
    assert (cache.leaving, cache.available) == (3, 4)
    cache.audit([])
    land(cache, ok=ok)
    assert cache.tiered.purge(LIVE)
    assert (cache.stats().free, cache.stats(Tier.HOST).free, cache.leaving) == (4, 8, 0)


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("write", [THROUGH, BACK])
def test_what_a_sequence_is_loading_goes_when_it_is_closed(write: WritePolicy, ok: bool) -> None:
    cache = KVCache(8, PAGE, host_pages=8, write=write)
    on_host(cache, ANN, 12)
    holding = open_up_to(cache, BOB, TOKENS, 0)
    assert cache.load(holding, key(TOKENS, 8), 2, room=2)
    assert not cache.tiered.purge(LIVE)
    assert residencies(cache) == [(Residency.HOST, 2)], "the third page was nobody's"
    cache.audit([holding])
    land(cache, ok=ok)
    assert not cache.tiered.purge(LIVE)
    cache.audit([holding])
    cache.close(holding)
    assert cache.tiered.purge(LIVE)
    assert (cache.stats().free, cache.stats(Tier.HOST).free, roots(cache)) == (8, 8, set())
    cache.audit([])


@pytest.mark.parametrize("tier", Tier)
def test_what_images_hold_stays(tier: Tier) -> None:
    """Pinned on the device, or on the host."""
    cache = KVCache(8, PAGE, host_pages=8, write=THROUGH)
    kept = parked(cache, ANN, 10) if tier is Tier.DEVICE else host_image(cache)
    land(cache)
    assert not cache.tiered.purge(LIVE)
    assert residencies(cache) == [(Residency(tier.value), 2)]
    cache.audit([])
    cache.kept.pin(kept)
    assert (kept.tokens, len(cache.kept.sources(kept))) == (10, 3)
    cache.kept.forget(kept)
    assert cache.tiered.purge(LIVE)
    assert (cache.stats().free, cache.stats(Tier.HOST).free, roots(cache)) == (8, 8, set())


def test_an_image_that_moves_arrives_and_goes_when_it_is_dropped() -> None:
    cache = KVCache(8, PAGE, host_pages=8)
    kept = parked(cache, ANN, 10)
    assert cache.kept.move(kept, Tier.HOST)
    assert not cache.tiered.purge(LIVE)
    land(cache)
    cache.kept.take_moved(expires_at=FOREVER)
    assert not cache.tiered.purge(LIVE)
    moved(cache, kept, Tier.DEVICE)
    assert cache.tiered.purge(LIVE), "it may be evicted there"
    cache.kept.pin(kept)
    assert (kept.tokens, kept.tail) == (0, {})
    assert cache.kept.drop(kept) is not None
    assert (cache.stats().free, cache.stats(Tier.HOST).free) == (8, 8)
    assert cache.tiered.purge(LIVE)
    assert roots(cache) == set()


def test_a_tail_is_not_the_trees_and_is_spare_for_as_long_as_its_image_is_kept() -> None:
    cache = KVCache(8, PAGE)
    holding = filled(cache, ANN, 8)
    assert cache.grow(holding, 5)
    kept = cache.park(holding, key(TOKENS, 8), 19)
    cache.kept.unpin(kept, expires_at=FOREVER)
    assert cache.tiered.purge(LIVE)
    assert (counts(cache, Tier.DEVICE), cache.available, cache.kept.spare) == ((5, 0, 3, 0), 8, 3)
    cache.kept.forget(kept)
    assert cache.stats().free == 8


def test_with_nothing_there_all_is_gone() -> None:
    cache = KVCache(8, PAGE)
    assert cache.tiered.purge(LIVE)
    stored(cache)
    cache.close(open_up_to(cache, ANN, TOKENS, 0))
    assert roots(cache) == {"w"}
    assert cache.tiered.purge(LIVE)
    assert roots(cache) == set()


@pytest.mark.parametrize("write", [NONE, THROUGH, BACK])
@pytest.mark.parametrize("seed", range(20))
def test_in_any_forest_exactly_what_nobody_holds_is_freed(write: WritePolicy, seed: int) -> None:
    """By the locks, counted beforehand: a page without a lock goes unless what is below it hangs there by the host."""
    draw = random.Random(seed)
    cache = KVCache(60, PAGE, host_pages=60, write=write)
    holdings: list[Holding] = []
    for number in range(14):
        tokens = tuple(token for _ in range(6) for token in [draw.choice((1, 2))] * PAGE)
        weights_id = draw.choice(("w", "v", "u"))
        count = draw.randint(1, 6) * PAGE
        found = stored(cache, tokens, count // PAGE, weights_id)
        if found.arriving:
            continue
        holding = filled_by(cache, weights_id, TrajectoryId(f"t{number}"), tokens, count)
        if draw.random() < 0.7:
            cache.close(holding)
        else:
            holdings.append(holding)
        if draw.random() < 0.5:
            land(cache, ok=draw.random() < 0.8)
        if draw.random() < 0.3:
            cache.make_room(min(cache.available, draw.randint(1, 50)))
    foreign = [node for name in ("w", "u") if name in roots(cache) for node in _below(cache._tree._roots[name])]
    live = [node for name in ("v",) if name in roots(cache) for node in _below(cache._tree._roots[name])]
    held = {tier: {page for node in foreign if node.at(tier).locks for page in node.at(tier).pages} for tier in Tier}
    mine = {tier: {page for node in live for page in node.at(tier).pages} for tier in Tier}
    done = cache.tiered.purge(LIVE)
    cache.audit(holdings)
    for tier in Tier:
        now = {page for node in cache._tree.nodes() for page in node.at(tier).pages}
        assert now >= held[tier] | mine[tier]
        extra = now - held[tier] - mine[tier]
        rest = [node for node in cache._tree.nodes() if extra & set(node.at(tier).pages)]
        assert all(node.children and not node.at(tier.other).pages for node in rest), "kept for nothing"
    assert done == (roots(cache) <= LIVE)
    for holding in holdings:
        cache.close(holding)
    land(cache)
    assert cache.tiered.purge(LIVE)
    assert roots(cache) <= LIVE
    assert cache.stats().tree == len({p for node in cache._tree.nodes() for p in node.device.pages})
    cache.audit([])


def _below(root: Node) -> list[Node]:
    found, stack = [], [*root.children.values()]
    while stack:
        node = stack.pop()
        found.append(node)
        stack += node.children.values()
    return found
