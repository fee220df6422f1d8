"""The prefix tree against a dictionary of prefixes, and the rules that it promises one by one."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout.kv.radix import MOST_LEAVES, Node, PageIds, RadixTree
from rollout.types import TrajectoryId

PAGE = 2
ANN, BOB = TrajectoryId("ann"), TrajectoryId("bob")
Prefix = tuple[str, tuple[PageIds, ...]]
"""A weights_id and the token ids of some pages."""

chunks = st.lists(st.sampled_from([(0, 0), (0, 1)]), max_size=4)


def tokens_of(pages: Sequence[PageIds]) -> list[int]:
    return [token for page in pages for token in page]


def path(node: Node) -> list[Node]:
    """From below the root down to `node`."""
    nodes = []
    while node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def path_pages(node: Node) -> list[int]:
    return [page for step in path(node) for page in step.pages]


class Stored:
    """What the model knows of one page."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.users: set[TrajectoryId] = set()
        self.used_at = 0


class Held:
    """A lock that somebody holds, with the prefix it is on."""

    def __init__(self, node: Node, user: TrajectoryId, weights_id: str, pages: list[PageIds]) -> None:
        self.node = node
        self.user = user
        self.weights_id = weights_id
        self.pages = pages

    def prefixes(self) -> list[Prefix]:
        return [(self.weights_id, tuple(self.pages[: end + 1])) for end in range(len(self.pages))]


class TreeAgainstDictionary(RuleBasedStateMachine):
    """Sequences match, insert below what they matched, and let go, as the cache has them do."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree(PAGE)
        self.stored: dict[Prefix, Stored] = {}
        self.held: list[Held] = []
        self.numbers = itertools.count(1)
        self.clock = itertools.count(1)

    def locks(self, prefix: Prefix) -> int:
        return sum(prefix in held.prefixes() for held in self.held)

    def use(self, prefixes: list[Prefix], user: TrajectoryId | None) -> None:
        now = next(self.clock)
        for prefix in prefixes:
            self.stored[prefix].used_at = now
            if user is not None:
                self.stored[prefix].users.add(user)

    def forget(self, pages: list[int]) -> list[Stored]:
        """Take the pages out of the model; they must be there, unlocked, with all that extends them."""
        assert len(set(pages)) == len(pages)
        gone = {prefix: stored for prefix, stored in self.stored.items() if stored.page in pages}
        assert len(gone) == len(pages)
        for prefix in gone:
            assert not self.locks(prefix)
            del self.stored[prefix]
        for weights_id, rest in self.stored:
            assert all((weights_id, rest[:end]) in self.stored for end in range(1, len(rest)))
        return list(gone.values())

    @rule(user=st.sampled_from([ANN, BOB]), weights_id=st.sampled_from("vww"), pages=chunks, limit=st.integers(0, 4))
    def match(self, user: TrajectoryId, weights_id: str, pages: list[PageIds], limit: int) -> None:
        prefixes: list[Prefix] = [(weights_id, tuple(pages[:end])) for end in range(1, len(pages) + 1)]
        found = list(itertools.takewhile(self.stored.__contains__, prefixes[:limit]))
        unlocked = [prefix for prefix in found if not self.locks(prefix)]
        assert self.tree.stored_pages(weights_id, tokens_of(pages), limit) == (len(found), len(unlocked))
        node = self.tree.match(weights_id, tokens_of(pages), limit, user)
        assert path_pages(node) == [self.stored[prefix].page for prefix in found]
        self.use(found, user)
        self.tree.lock(node)
        self.held.append(Held(node, user, weights_id, pages[: len(found)]))

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99), pages=chunks.filter(bool))
    def insert(self, pick: int, pages: list[PageIds]) -> None:
        held = self.held[pick % len(self.held)]
        own = [next(self.numbers) for _ in pages]
        all_pages = held.pages + pages
        prefixes: list[Prefix] = [(held.weights_id, tuple(all_pages[:end])) for end in range(1, len(all_pages) + 1)]
        news = prefixes[len(held.pages) :]
        expected = [self.stored[p].page if p in self.stored else page for p, page in zip(news, own, strict=True)]
        node, kept = self.tree.insert(held.node, tokens_of(pages), own, held.user)
        assert kept == expected
        for prefix, page in zip(news, own, strict=True):
            self.stored.setdefault(prefix, Stored(page))
        self.use(news, held.user)
        self.tree.lock(node)
        self.tree.unlock(held.node)
        self.use(prefixes[: len(held.pages)], None)
        held.node, held.pages = node, all_pages
        assert path_pages(node) == [self.stored[prefix].page for prefix in prefixes]

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99), remove=st.booleans())
    def let_go(self, pick: int, remove: bool) -> None:
        held = self.held.pop(pick % len(self.held))
        self.tree.unlock(held.node)
        self.use(held.prefixes(), None)
        if not remove:
            return
        mine = [p for p in held.prefixes() if self.stored[p].users == {held.user} and not self.locks(p)]
        expected = set()
        if mine:
            weights_id, top = mine[0]
            for prefix, stored in self.stored.items():
                if prefix[0] == weights_id and prefix[1][: len(top)] == top:
                    expected.add(stored.page)
        removed = self.tree.remove_exclusive(held.node, held.user)
        assert set(removed) == expected
        assert all(stored.users == {held.user} for stored in self.forget(removed))

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        evictable = sum(not self.locks(prefix) for prefix in self.stored)
        evicted = self.tree.evict(count)
        assert len(evicted) >= min(count, evictable)
        gone = self.forget(evicted)
        leaves = [
            stored.used_at
            for prefix, stored in self.stored.items()
            if not self.locks(prefix)
            and not any(
                other != prefix and other[1][: len(prefix[1])] == prefix[1]
                for other in self.stored
                if other[0] == prefix[0]
            )
        ]
        assert max((stored.used_at for stored in gone), default=0) <= min(leaves, default=1 << 60)

    @invariant()
    def the_heap_of_leaves_is_cleaned_often(self) -> None:
        self.tree._most_leaves = 3

    @invariant()
    def tree_and_dictionary_agree(self) -> None:
        seen: dict[Prefix, tuple[int, TrajectoryId | None, int]] = {}
        for weights_id in "vw":
            todo: list[tuple[Node, tuple[PageIds, ...]]] = [(self.tree.root(weights_id), ())]
            while todo:
                node, above = todo.pop()
                assert len(node.chunks) == len(node.pages)
                for end, page in enumerate(node.pages, 1):
                    seen[weights_id, above + tuple(node.chunks[:end])] = (page, node.owner, node.locks)
                for first, child in node.children.items():
                    assert child.parent is node
                    assert child.chunks[0] == first
                    todo.append((child, above + tuple(node.chunks)))
        assert seen == {
            prefix: (stored.page, next(iter(stored.users)) if len(stored.users) == 1 else None, self.locks(prefix))
            for prefix, stored in self.stored.items()
        }
        assert self.tree.pages == len(seen)
        assert self.tree.evictable == sum(not locks for _, _, locks in seen.values())

    def teardown(self) -> None:
        for held in self.held:
            self.tree.unlock(held.node)
        self.held = []
        self.forget(self.tree.evict(self.tree.pages))
        assert not self.stored
        assert self.tree.pages == self.tree.evictable == 0


TestTreeAgainstDictionary = TreeAgainstDictionary.TestCase
TestTreeAgainstDictionary.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)

A, B, C, D = (0, 1), (2, 3), (4, 5), (6, 7)


def insert(tree: RadixTree, pages: Sequence[PageIds], numbers: list[int], owner: TrajectoryId = ANN) -> Node:
    return tree.insert(tree.root("w"), tokens_of(pages), numbers, owner)[0]


def match(tree: RadixTree, pages: Sequence[PageIds], user: TrajectoryId = ANN, weights_id: str = "w") -> Node:
    return tree.match(weights_id, tokens_of(pages), len(pages), user)


def test_other_weights_never_match() -> None:
    tree = RadixTree(PAGE)
    insert(tree, [A, B], [1, 2])
    assert path_pages(match(tree, [A, B], weights_id="v")) == []
    assert tree.stored_pages("v", tokens_of([A, B]), 2) == (0, 0)
    assert path_pages(match(tree, [A, B])) == [1, 2]


def test_a_page_that_differs_in_its_last_token_does_not_match() -> None:
    tree = RadixTree(PAGE)
    insert(tree, [A, B], [1, 2])
    assert path_pages(match(tree, [A, (2, 4)])) == [1]
    assert path_pages(match(tree, [(0, 0), B])) == []


def test_a_partly_filled_page_never_matches() -> None:
    tree = RadixTree(PAGE)
    insert(tree, [A, B], [1, 2])
    assert tree.stored_pages("w", [0, 1, 2], 2) == (1, 1)
    assert path_pages(tree.match("w", [0, 1, 2], 2, ANN)) == [1]


def test_what_follows_after_the_pages_differ_does_not_match() -> None:
    tree = RadixTree(PAGE)
    node = insert(tree, [A, B], [1, 2])
    tree.insert(node, tokens_of([C]), [3], ANN)
    assert tree.stored_pages("w", tokens_of([A, C]), 2) == (1, 1)
    assert path_pages(match(tree, [A, C])) == [1]


def test_a_split_keeps_locks_owner_and_pages_of_both_halves() -> None:
    tree = RadixTree(PAGE)
    node = insert(tree, [A, B, C], [1, 2, 3])
    tree.lock(node)
    upper = match(tree, [A])
    assert [(step.pages, step.locks, step.owner) for step in path(node)] == [([1], 1, ANN), ([2, 3], 1, ANN)]
    assert node.parent is upper
    assert (tree.pages, tree.evictable) == (3, 0)
    tree.unlock(node)
    assert tree.evictable == 3


def test_a_second_user_ends_ownership_of_what_it_used_and_of_nothing_else() -> None:
    tree = RadixTree(PAGE)
    node = insert(tree, [A, B, C], [1, 2, 3])
    match(tree, [A, B], BOB)
    assert [(step.pages, step.owner) for step in path(node)] == [([1, 2], None), ([3], ANN)]
    match(tree, [A, B, C], ANN)
    assert [step.owner for step in path(node)] == [None, ANN]


def test_looking_without_matching_changes_nobodys_ownership() -> None:
    tree = RadixTree(PAGE)
    node = insert(tree, [A, B], [1, 2])
    assert tree.stored_pages("w", tokens_of([A]), 1) == (1, 1)
    assert [(step.pages, step.owner) for step in path(node)] == [([1, 2], ANN)]


def test_inserting_what_is_stored_returns_the_stored_pages_and_shares_them() -> None:
    tree = RadixTree(PAGE)
    insert(tree, [A, B], [1, 2])
    node, kept = tree.insert(tree.root("w"), tokens_of([A, B, C]), [7, 8, 9], BOB)
    assert kept == [1, 2, 9]
    assert [(step.pages, step.owner) for step in path(node)] == [([1, 2], None), ([9], BOB)]
    assert tree.pages == 3


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3])))
def test_eviction_takes_the_least_recently_used_leaf_first(order: tuple[int, ...]) -> None:
    tree = RadixTree(PAGE)
    pages = {1: A, 2: B, 3: C}
    for number, page in pages.items():
        insert(tree, [page], [number])
    for number in order:
        match(tree, [pages[number]])
    assert [tree.evict(1) for _ in range(4)] == [[order[0]], [order[1]], [order[2]], []]


def test_a_prefix_is_evicted_after_what_hangs_below_it() -> None:
    tree = RadixTree(PAGE)
    node = insert(tree, [A], [1])
    tree.insert(node, tokens_of([B]), [2], ANN)
    tree.insert(node, tokens_of([C]), [3], ANN)
    assert [tree.evict(1) for _ in range(3)] == [[2], [3], [1]]


@pytest.mark.parametrize("held", [1, 2])
def test_a_prefix_that_was_in_use_until_now_is_evicted_after_what_was_used_before(held: int) -> None:
    tree = RadixTree(PAGE)
    nodes = {number: insert(tree, [page], [number]) for number, page in {1: A, 2: B}.items()}
    tree.lock(nodes[held])
    match(tree, [{1: B, 2: A}[held]])
    tree.unlock(nodes[held])
    assert [tree.evict(1) for _ in range(2)] == [[3 - held], [held]]


def test_locked_pages_and_what_is_above_them_are_never_evicted() -> None:
    tree = RadixTree(PAGE)
    node = insert(tree, [A, B], [1, 2])
    tree.insert(node, tokens_of([C]), [3], ANN)
    middle = match(tree, [A])
    tree.insert(middle, tokens_of([D]), [4], ANN)
    tree.lock(node)
    assert sorted(tree.evict(99)) == [3, 4]
    assert path_pages(match(tree, [A, B])) == [1, 2]


def test_removing_what_is_exclusive_stops_at_a_shared_page() -> None:
    tree = RadixTree(PAGE)
    insert(tree, [A], [1])
    node, _ = tree.insert(match(tree, [A], BOB), tokens_of([B, C]), [2, 3], BOB)
    assert sorted(tree.remove_exclusive(node, BOB)) == [2, 3]
    assert tree.remove_exclusive(match(tree, [A], BOB), BOB) == []
    assert tree.pages == 1


def test_removing_what_is_exclusive_stops_at_a_locked_page() -> None:
    tree = RadixTree(PAGE)
    upper = insert(tree, [A], [1])
    node, _ = tree.insert(upper, tokens_of([B]), [2], ANN)
    tree.lock(upper)
    assert tree.remove_exclusive(node, ANN) == [2]
    tree.lock(match(tree, [A]))
    assert tree.remove_exclusive(upper, ANN) == []
    assert tree.pages == 1


def test_removing_what_is_exclusive_includes_what_its_owner_left_below() -> None:
    """A preempted sequence leaves pages behind and may come back for a part of them only."""
    tree = RadixTree(PAGE)
    insert(tree, [A, B, C], [1, 2, 3])
    assert sorted(tree.remove_exclusive(match(tree, [A]), ANN)) == [1, 2, 3]
    assert tree.pages == tree.evictable == 0


def test_eviction_keeps_its_order_when_the_leaves_are_gone_over() -> None:
    tree = RadixTree(PAGE)
    nodes = [insert(tree, [(number, number)], [number]) for number in range(20)]
    order = [7 * number % 20 for number in range(20)]
    for number in order:
        tree._most_leaves = 3
        tree.lock(nodes[number])
        tree.unlock(nodes[number])
    assert [tree.evict(1) for _ in order] == [[number] for number in order]


def test_what_is_kept_for_eviction_does_not_grow_with_use() -> None:
    tree = RadixTree(PAGE)
    nodes = [insert(tree, [page], [number]) for number, page in enumerate([A, B], 1)]
    for _ in range(MOST_LEAVES):
        for node in nodes:
            tree.lock(node)
            tree.unlock(node)
    assert len(tree._leaves) <= MOST_LEAVES
    assert [tree.evict(1) for _ in range(3)] == [[1], [2], []]


def test_unlocking_what_is_not_locked_asserts() -> None:
    tree = RadixTree(PAGE)
    node = insert(tree, [A], [1])
    with pytest.raises(AssertionError, match="not locked"):
        tree.unlock(node)
