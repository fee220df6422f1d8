"""The rules that the prefix tree promises, one by one; `test_radix_machine` has it against a dictionary."""

import itertools
from collections.abc import Sequence

import pytest

from rollout.kv.nodes import Node, edge_bytes
from rollout.kv.radix import MOST_LEAVES, RadixTree
from rollout.kv.tiers import Residency, Tier
from rollout.types import TrajectoryId

PAGE = 2
ANN, BOB = TrajectoryId("ann"), TrajectoryId("bob")
A, B, C, D = (0, 1), (2, 3), (4, 5), (6, 7)
PageIds = tuple[int, ...]


def key_of(pages: Sequence[PageIds]) -> bytes:
    return edge_bytes([token for page in pages for token in page])


def path_pages(node: Node, tier: Tier = Tier.DEVICE) -> list[int]:
    return [page for step in node.path() for page in step.at(tier).pages]


def insert(tree: RadixTree, pages: Sequence[PageIds], numbers: list[int], owner: TrajectoryId = ANN) -> Node:
    return tree.insert(tree.root("w"), key_of(pages), numbers, owner)[0]


def match(tree: RadixTree, pages: Sequence[PageIds], user: TrajectoryId = ANN, weights_id: str = "w") -> Node:
    return tree.match(weights_id, key_of(pages), len(pages), user)


def found(tree: RadixTree, pages: Sequence[PageIds], weights_id: str = "w") -> int:
    return sum(count for _, count in tree.find(weights_id, key_of(pages), len(pages)))


def evict(tree: RadixTree, tier: Tier = Tier.DEVICE, most: int = 1) -> list[int]:
    node = tree.pop_leaf(tier, most)
    return tree.displace(node, tier) if node is not None else []


def test_other_weights_never_match() -> None:
    tree = RadixTree(PAGE)
    insert(tree, [A, B], [1, 2])
    assert path_pages(match(tree, [A, B], weights_id="v")) == []
    assert found(tree, [A, B], weights_id="v") == 0
    assert path_pages(match(tree, [A, B])) == [1, 2]


def test_a_page_that_differs_in_its_last_token_does_not_match() -> None:
    tree = RadixTree(PAGE)
    insert(tree, [A, B], [1, 2])
    assert path_pages(match(tree, [A, (2, 4)])) == [1]
    assert path_pages(match(tree, [(0, 0), B])) == []


def test_ids_whose_bytes_would_match_out_of_step_do_not() -> None:
    tree = RadixTree(PAGE)
    insert(tree, [(1, 256)], [1])
    assert found(tree, [(256, 65536)]) == 0
    assert found(tree, [(1, 0)]) == 0


def test_what_follows_after_the_pages_differ_does_not_match() -> None:
    tree = RadixTree(PAGE)
    node = insert(tree, [A, B], [1, 2])
    tree.insert(node, key_of([C]), [3], ANN)
    assert found(tree, [A, C]) == 1
    assert path_pages(match(tree, [A, C])) == [1]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 31, 32, 33])
def test_the_place_at_which_a_long_edge_differs_is_found(length: int) -> None:
    pages = [(number, number) for number in range(length)]
    for differs in range(length):
        tree = RadixTree(PAGE)
        insert(tree, pages, list(range(1, length + 1)))
        assert found(tree, [*pages[:differs], (differs, 99), *pages[differs + 1 :]]) == differs


def test_no_more_pages_match_than_were_asked_for() -> None:
    tree = RadixTree(PAGE)
    insert(tree, [A, B, C], [1, 2, 3])
    assert path_pages(tree.match("w", key_of([A, B, C]), 2, ANN)) == [1, 2]


def test_a_match_of_more_pages_than_the_key_has_asserts() -> None:
    with pytest.raises(AssertionError):
        RadixTree(PAGE).match("w", key_of([A]), 2, ANN)


def test_a_split_keeps_locks_owner_hits_and_pages_of_both_halves() -> None:
    tree = RadixTree(PAGE)
    node = insert(tree, [A, B, C], [1, 2, 3])
    tree.hit(node)
    tree.place(node, Tier.HOST, [7, 8, 9])
    tree.lock(node, Tier.DEVICE)
    upper = match(tree, [A])
    tree.hit(upper)
    halves = [(step.device.pages, step.device.locks, step.owner, step.hits) for step in node.path()]
    assert halves == [([1], 1, ANN, 2), ([2, 3], 1, ANN, 1)]
    assert [(step.host.pages, step.host.locks) for step in node.path()] == [([7], 0), ([8, 9], 0)]
    assert node.parent is upper
    assert [(tree.level(tier).pages, tree.level(tier).evictable) for tier in Tier] == [(3, 0), (3, 3)]
    tree.unlock(node, Tier.DEVICE)
    assert tree.device.evictable == 3


def test_a_second_user_ends_ownership_of_what_it_used_and_of_nothing_else() -> None:
    tree = RadixTree(PAGE)
    node = insert(tree, [A, B, C], [1, 2, 3])
    match(tree, [A, B], BOB)
    assert [(step.device.pages, step.owner) for step in node.path()] == [([1, 2], None), ([3], ANN)]
    match(tree, [A, B, C], ANN)
    assert [step.owner for step in node.path()] == [None, ANN]


def test_looking_without_matching_changes_nothing() -> None:
    tree = RadixTree(PAGE)
    node = insert(tree, [A, B], [1, 2])
    before = node.used_at
    assert found(tree, [A]) == 1
    assert [(step.device.pages, step.owner, step.hits) for step in node.path()] == [([1, 2], ANN, 0)]
    assert node.used_at == before


def test_inserting_what_is_stored_returns_the_stored_pages_and_shares_them() -> None:
    tree = RadixTree(PAGE)
    insert(tree, [A, B], [1, 2])
    node, kept = tree.insert(tree.root("w"), key_of([A, B, C]), [7, 8, 9], BOB)
    assert kept == [1, 2, 9]
    assert [(step.device.pages, step.owner) for step in node.path()] == [([1, 2], None), ([9], BOB)]
    assert tree.device.pages == 3


# Residency


def test_residency_says_where_the_pages_are() -> None:
    tree = RadixTree(PAGE)
    node = insert(tree, [A], [1])
    assert node.residency is Residency.DEVICE
    tree.place(node, Tier.HOST, [5])
    assert node.residency is Residency.BOTH
    assert tree.displace(node, Tier.DEVICE) == [1]
    assert node.residency is Residency.HOST
    assert match(tree, [A]) is node
    assert tree.displace(node, Tier.HOST) == [5]
    assert found(tree, [A]) == 0


def test_what_is_on_the_host_becomes_resident_again_where_it_is_inserted() -> None:
    tree = RadixTree(PAGE)
    node = insert(tree, [A, B, C], [1, 2, 3])
    tree.place(node, Tier.HOST, [7, 8, 9])
    tree.displace(node, Tier.DEVICE)
    end, kept = tree.insert(tree.root("w"), key_of([A, B]), [4, 5], ANN)
    assert kept == [4, 5]
    assert [(step.residency, step.device.pages, step.host.pages) for step in node.path()] == [
        (Residency.BOTH, [4, 5], [7, 8]),
        (Residency.HOST, [], [9]),
    ]
    assert node.parent is end


def test_pages_are_placed_once_and_as_many_as_the_edge_has() -> None:
    tree = RadixTree(PAGE)
    node = insert(tree, [A, B], [1, 2])
    with pytest.raises(AssertionError, match="already"):
        tree.place(node, Tier.DEVICE, [3, 4])
    with pytest.raises(AssertionError):
        tree.place(node, Tier.HOST, [3])


def test_what_is_held_or_above_something_in_a_tier_is_not_displaced_from_it() -> None:
    tree = RadixTree(PAGE)
    upper = insert(tree, [A], [1])
    node, _ = tree.insert(upper, key_of([B]), [2], ANN)
    with pytest.raises(AssertionError, match="below"):
        tree.displace(upper, Tier.DEVICE)
    tree.lock(node, Tier.DEVICE)
    with pytest.raises(AssertionError, match="locked"):
        tree.displace(node, Tier.DEVICE)
    with pytest.raises(AssertionError, match="no pages"):
        tree.displace(node, Tier.HOST)


def test_locks_of_the_tiers_are_apart() -> None:
    tree = RadixTree(PAGE)
    node = insert(tree, [A], [1])
    tree.place(node, Tier.HOST, [5])
    tree.lock(node, Tier.HOST)
    assert (tree.device.evictable, tree.host.evictable) == (1, 0)
    assert evict(tree, Tier.HOST) == []
    assert evict(tree, Tier.DEVICE) == [1]
    tree.unlock(node, Tier.HOST)
    assert evict(tree, Tier.HOST) == [5]


# Eviction


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3])))
def test_eviction_takes_the_least_recently_used_leaf_first(order: tuple[int, ...], tier: Tier) -> None:
    tree = RadixTree(PAGE)
    pages = {1: A, 2: B, 3: C}
    for number, page in pages.items():
        tree.place(insert(tree, [page], [number]), Tier.HOST, [number])
    for number in order:
        match(tree, [pages[number]])
    assert [evict(tree, tier) for _ in range(4)] == [[order[0]], [order[1]], [order[2]], []]


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize(("prefer_shared", "order"), [(False, [1, 2, 3]), (True, [2, 1, 3])])
def test_with_shared_ones_preferred_what_one_trajectory_used_goes_first(
    prefer_shared: bool, order: list[int], tier: Tier
) -> None:
    tree = RadixTree(PAGE, prefer_shared=prefer_shared)
    for number, page in {1: A, 2: B, 3: C}.items():
        tree.place(insert(tree, [page], [number]), Tier.HOST, [number])
    for page, user in ((A, BOB), (B, ANN), (C, BOB)):
        match(tree, [page], user)
    assert [evict(tree, tier) for _ in order] == [[number] for number in order]


def test_what_becomes_shared_after_it_was_offered_for_eviction_is_preferred() -> None:
    tree = RadixTree(PAGE, prefer_shared=True)
    for number, page in {1: A, 2: B}.items():
        insert(tree, [page], [number])
    match(tree, [A], BOB)
    assert [evict(tree), evict(tree)] == [[2], [1]]


def test_a_prefix_is_evicted_after_what_hangs_below_it() -> None:
    tree = RadixTree(PAGE)
    node = insert(tree, [A], [1])
    tree.insert(node, key_of([B]), [2], ANN)
    tree.insert(node, key_of([C]), [3], ANN)
    assert [evict(tree) for _ in range(3)] == [[2], [3], [1]]


def test_a_prefix_leaves_the_device_before_what_is_below_it_on_the_host_only() -> None:
    tree = RadixTree(PAGE)
    upper = insert(tree, [A], [1])
    node, _ = tree.insert(upper, key_of([B]), [2], ANN)
    for step, page in ((upper, 7), (node, 8)):
        tree.place(step, Tier.HOST, [page])
    assert [evict(tree), evict(tree), evict(tree)] == [[2], [1], []]
    assert [evict(tree, Tier.HOST) for _ in range(2)] == [[8], [7]]


def test_of_a_long_leaf_the_end_is_evicted() -> None:
    tree = RadixTree(PAGE)
    insert(tree, [A, B, C], [1, 2, 3])
    assert [evict(tree, most=2), evict(tree, most=2)] == [[2, 3], [1]]


@pytest.mark.parametrize("held", [1, 2])
def test_a_prefix_that_was_in_use_until_now_is_evicted_after_what_was_used_before(held: int) -> None:
    tree = RadixTree(PAGE)
    nodes = {number: insert(tree, [page], [number]) for number, page in {1: A, 2: B}.items()}
    tree.lock(nodes[held], Tier.DEVICE)
    match(tree, [{1: B, 2: A}[held]])
    tree.unlock(nodes[held], Tier.DEVICE)
    assert [evict(tree) for _ in range(2)] == [[3 - held], [held]]


def test_locked_pages_and_what_is_above_them_are_never_evicted() -> None:
    tree = RadixTree(PAGE)
    node = insert(tree, [A, B], [1, 2])
    tree.insert(node, key_of([C]), [3], ANN)
    middle = match(tree, [A])
    tree.insert(middle, key_of([D]), [4], ANN)
    tree.lock(node, Tier.DEVICE)
    assert sorted(evict(tree) + evict(tree) + evict(tree)) == [3, 4]
    assert path_pages(match(tree, [A, B])) == [1, 2]


def test_eviction_keeps_its_order_when_the_leaves_are_gone_over() -> None:
    tree = RadixTree(PAGE)
    nodes = [insert(tree, [(number, number)], [number]) for number in range(20)]
    order = [7 * number % 20 for number in range(20)]
    for number in order:
        tree.device.most_leaves = 3
        tree.lock(nodes[number], Tier.DEVICE)
        tree.unlock(nodes[number], Tier.DEVICE)
    assert [evict(tree) for _ in order] == [[number] for number in order]


def test_what_is_kept_for_eviction_does_not_grow_with_use() -> None:
    tree = RadixTree(PAGE)
    nodes = [insert(tree, [page], [number]) for number, page in enumerate([A, B], 1)]
    for _ in range(MOST_LEAVES):
        for node in nodes:
            tree.lock(node, Tier.DEVICE)
            tree.unlock(node, Tier.DEVICE)
    assert len(tree.device.leaves) <= MOST_LEAVES
    assert [evict(tree) for _ in range(3)] == [[1], [2], []]


def test_unlocking_what_is_not_locked_asserts() -> None:
    tree = RadixTree(PAGE)
    node = insert(tree, [A], [1])
    with pytest.raises(AssertionError, match="not locked"):
        tree.unlock(node, Tier.DEVICE)


# What one trajectory alone used


def exclusive(tree: RadixTree, node: Node, owner: TrajectoryId) -> list[int]:
    return [page for step in tree.exclusive(node, owner) for page in step.device.pages]


def test_what_is_exclusive_ends_at_a_shared_page() -> None:
    tree = RadixTree(PAGE)
    insert(tree, [A], [1])
    node, _ = tree.insert(match(tree, [A], BOB), key_of([B, C]), [2, 3], BOB)
    assert exclusive(tree, node, BOB) == [2, 3]
    assert exclusive(tree, match(tree, [A], BOB), BOB) == []


@pytest.mark.parametrize("tier", Tier)
def test_what_is_exclusive_ends_at_a_page_that_is_locked_in_either_tier(tier: Tier) -> None:
    tree = RadixTree(PAGE)
    upper = insert(tree, [A], [1])
    node, _ = tree.insert(upper, key_of([B]), [2], ANN)
    tree.lock(upper, tier)
    assert exclusive(tree, node, ANN) == [2]
    assert exclusive(tree, upper, ANN) == []


def test_what_is_exclusive_includes_what_its_owner_left_below() -> None:
    """A preempted sequence leaves pages behind and may come back for a part of them only."""
    tree = RadixTree(PAGE)
    insert(tree, [A, B, C], [1, 2, 3])
    assert exclusive(tree, match(tree, [A]), ANN) == [1, 2, 3]
