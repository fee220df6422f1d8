"""An audit recomputes everything from the structures: every way to be wrong is found."""

from collections.abc import Callable

import pytest

from rollout.kv.cache import KVCache
from rollout.kv.holding import Holding
from rollout.kv.tiers import Tier
from tests.kv.plans import ANN, BOB, PAGE, THROUGH, filled, land


def hold_a_page_twice(cache: KVCache, first: Holding, second: Holding) -> None:
    second.table[-1] = first.table[-1]


def lose_a_page(cache: KVCache, first: Holding, second: Holding) -> None:
    first.table.pop()


def count_a_page_as_private(cache: KVCache, first: Holding, second: Holding) -> None:
    cache.tiered.counts[Tier.DEVICE].private += 1


def count_a_host_page_as_private(cache: KVCache, first: Holding, second: Holding) -> None:
    cache.tiered.counts[Tier.HOST].private += 1


def count_a_page_as_reserved(cache: KVCache, first: Holding, second: Holding) -> None:
    second.reserved += 1


def count_a_page_as_leaving(cache: KVCache, first: Holding, second: Holding) -> None:
    cache.tiered.leaving += 1


def count_a_page_as_stored(cache: KVCache, first: Holding, second: Holding) -> None:
    cache._tree.device.pages += 1


def count_a_page_as_evictable(cache: KVCache, first: Holding, second: Holding) -> None:
    cache._tree.host.evictable -= 1


def lock_once_more(cache: KVCache, first: Holding, second: Holding) -> None:
    cache._tree.lock(second.node, Tier.DEVICE)


def lock_on_the_host(cache: KVCache, first: Holding, second: Holding) -> None:
    cache._tree.lock(second.node, Tier.HOST)


def forget_a_lock(cache: KVCache, first: Holding, second: Holding) -> None:
    cache._tree.unlock(second.node, Tier.DEVICE)


def share_another_page_than_the_tree(cache: KVCache, first: Holding, second: Holding) -> None:
    first.table[0], first.table[-1] = first.table[-1], first.table[0]


def give_back_a_page_that_is_held(cache: KVCache, first: Holding, second: Holding) -> None:
    cache.tiered.give(Tier.DEVICE, first.table[-1:])


def give_back_a_host_page_that_is_stored(cache: KVCache, first: Holding, second: Holding) -> None:
    cache.tiered.give(Tier.HOST, second.node.host.pages[:1])


def take_a_page_that_nobody_holds(cache: KVCache, first: Holding, second: Holding) -> None:
    cache.tiered.take(Tier.DEVICE, 1)


def remove_what_is_held(cache: KVCache, first: Holding, second: Holding) -> None:
    node = second.node
    assert node.parent is not None
    node.parent.children.clear()
    for tier in Tier:
        cache._tree.level(tier).pages -= cache.tiered.give(tier, node.at(tier).pages)
    cache._tree.host.evictable = 0


def forget_a_copy(cache: KVCache, first: Holding, second: Holding) -> None:
    cache.tiered.write_policy = THROUGH
    cache.commit(first, b"\0" * 4 * PAGE * 3)
    assert first.node.arriving is not None
    first.node.arriving = None


def count_children_wrongly(cache: KVCache, first: Holding, second: Holding) -> None:
    assert second.node.parent is not None
    second.node.parent.host.below = 0


@pytest.mark.parametrize(
    "corrupt",
    [
        hold_a_page_twice,
        lose_a_page,
        count_a_page_as_private,
        count_a_host_page_as_private,
        count_a_page_as_reserved,
        count_a_page_as_leaving,
        count_a_page_as_stored,
        count_a_page_as_evictable,
        lock_once_more,
        lock_on_the_host,
        forget_a_lock,
        share_another_page_than_the_tree,
        give_back_a_page_that_is_held,
        give_back_a_host_page_that_is_stored,
        take_a_page_that_nobody_holds,
        remove_what_is_held,
        forget_a_copy,
        count_children_wrongly,
    ],
)
def test_an_audit_finds(corrupt: Callable[[KVCache, Holding, Holding], None]) -> None:
    cache = KVCache(10, PAGE, host_pages=10, write=THROUGH)
    first, second = filled(cache, ANN, 10), filled(cache, BOB, 10)
    land(cache)
    cache.audit([first, second])
    corrupt(cache, first, second)
    with pytest.raises(AssertionError):
        cache.audit([first, second])


def test_an_audit_finds_a_holding_that_it_is_not_told_of() -> None:
    cache = KVCache(10, PAGE)
    first, _ = filled(cache, ANN, 8), filled(cache, BOB, 8)
    with pytest.raises(AssertionError, match="locks"):
        cache.audit([first])
