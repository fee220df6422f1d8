"""Page tables, sharing, eviction and what closing gives back, against a model that knows what every page holds."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout.kv.cache import FreedPages, Holding, KVCache
from rollout.types import TrajectoryId

PAGE = 4
PROMPTS = [(1,) * 9, (1,) * 6 + (2,) * 6, (3,) * 4]
"""The first two begin with the same page."""
OWNERS = {
    TrajectoryId(f"{prompt}/{sample}"): (*tokens, *(100 * prompt + 10 * sample + i for i in range(8)))
    for (prompt, tokens), sample in itertools.product(enumerate(PROMPTS), range(2))
}
"""Everything that each trajectory will ever have, prompt and output."""
ANN, BOB = TrajectoryId("ann"), TrajectoryId("bob")


class Sequence:
    """A holding with what the model knows of it."""

    def __init__(self, holding: Holding, weights_id: str) -> None:
        self.holding = holding
        self.weights_id = weights_id
        self.committed = len(holding.table)

    @property
    def tokens(self) -> tuple[int, ...]:
        return OWNERS[self.holding.owner]

    def content(self, page: int) -> tuple[str, tuple[int, ...]]:
        """What page `page` of its table must hold."""
        return self.weights_id, self.tokens[: (page + 1) * PAGE]


class CacheAgainstContents(RuleBasedStateMachine):
    """`contents` says what is written in each page of the tree, `users` who ever used it there."""

    total = 14

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(self.total, PAGE)
        self.open_ones: list[Sequence] = []
        self.contents: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.users: dict[int, set[TrajectoryId]] = {}
        self.evicted = 0

    def pick(self, number: int) -> Sequence:
        return self.open_ones[number % len(self.open_ones)]

    def held(self) -> set[int]:
        return {page for sequence in self.open_ones for page in sequence.holding.table}

    def forget(self, pages: set[int]) -> None:
        for page in pages:
            del self.contents[page], self.users[page]

    def stored(self, weights_id: str, tokens: tuple[int, ...]) -> list[int]:
        """The pages in the tree that hold the longest prefix of `tokens`."""
        where = {content: page for page, content in self.contents.items()}
        ends = range(PAGE, len(tokens) + 1, PAGE)
        found = (where.get((weights_id, tokens[:end])) for end in ends)
        return [page for page in itertools.takewhile(lambda page: page is not None, found) if page is not None]

    @rule(owner=st.sampled_from(sorted(OWNERS)), weights_id=st.sampled_from("vww"), limit=st.integers(0, 20))
    def open(self, owner: TrajectoryId, weights_id: str, limit: int) -> None:
        tokens = OWNERS[owner]
        limit = min(limit, len(tokens))
        expected = self.stored(weights_id, tokens[:limit])
        stored, evictable = self.cache.stored_pages(weights_id, tokens, limit)
        assert (stored, evictable) == (len(expected), len(set(expected) - self.held()))
        available = self.cache.available
        holding = self.cache.open(owner, weights_id, tokens, limit)
        assert self.cache.available == available - evictable, "what opening costs is not what looking said"
        assert holding.table == expected
        assert holding.shared == len(expected)
        for page in expected:
            self.users[page].add(owner)
        self.open_ones.append(Sequence(holding, weights_id))

    @precondition(lambda self: self.open_ones)
    @rule(number=st.integers(0, 99), more=st.integers(0, 4), reserved=st.booleans())
    def grow(self, number: int, more: int, reserved: bool) -> None:
        holding = self.pick(number).holding
        before, free = [*holding.table], self.cache.counts.free
        available = free + len(set(self.contents) - self.held())
        grown = self.cache.grow(holding, len(before) + more, reserved=reserved)
        assert grown == (more <= available)
        news = holding.table[len(before) :]
        assert holding.table == before + news
        assert len(news) == more * grown
        others = [
            page for sequence in self.open_ones if sequence.holding is not holding for page in sequence.holding.table
        ]
        assert not set(news) & {*before, *others}
        gone = set(news) & set(self.contents)  # evicted, and handed out again
        gone |= set(self.contents) - {page for page in self.contents if self.in_tree(page)}
        assert not gone & {*before, *others}
        assert bool(gone) == (grown and more > free)
        self.evicted += len(gone)
        self.forget(gone)

    def in_tree(self, page: int) -> bool:
        weights_id, tokens = self.contents[page]
        return self.cache.stored_pages(weights_id, tokens, len(tokens))[0] == len(tokens) // PAGE

    @precondition(lambda self: self.open_ones)
    @rule(number=st.integers(0, 99))
    def settle(self, number: int) -> None:
        holding = self.pick(number).holding
        counts = self.cache.counts
        before = holding.reserved
        self.cache.settle(holding)
        after = self.cache.counts
        assert holding.reserved == 0
        assert (after.private, after.reserved) == (counts.private + before, counts.reserved - before)

    @precondition(lambda self: any(not sequence.holding.reserved for sequence in self.open_ones))
    @rule(number=st.integers(0, 99), back=st.integers(0, 6))
    def commit(self, number: int, back: int) -> None:
        able = [sequence for sequence in self.open_ones if not sequence.holding.reserved]
        sequence = able[number % len(able)]
        holding = sequence.holding
        complete = max(0, min(len(holding.table) * PAGE, len(sequence.tokens)) - back)
        before, shared, free = [*holding.table], holding.shared, self.cache.counts.free
        stored = self.stored(sequence.weights_id, sequence.tokens[:complete])
        self.cache.commit(holding, sequence.tokens, complete)
        assert holding.shared == max(shared, complete // PAGE)
        for index in range(shared, holding.shared):
            page = stored[index] if index < len(stored) else before[index]
            assert holding.table[index] == page
            self.contents[page] = sequence.content(index)
            self.users.setdefault(page, set()).add(holding.owner)
        assert holding.table[holding.shared :] == before[holding.shared :]
        assert self.cache.counts.free - free == len(set(before) - set(holding.table))

    @precondition(lambda self: any(not sequence.holding.reserved for sequence in self.open_ones))
    @rule(number=st.integers(0, 99), keep=st.booleans())
    def close(self, number: int, keep: bool) -> None:
        able = [sequence for sequence in self.open_ones if not sequence.holding.reserved]
        sequence = able[number % len(able)]
        self.open_ones.remove(sequence)
        holding = sequence.holding
        own, shared, free = holding.table[holding.shared :], holding.table[: holding.shared], self.cache.counts.free
        only = {page for page, users in self.users.items() if users == {holding.owner} and page not in self.held()}
        mine = [sequence.content(index) for index, page in enumerate(shared) if page in only][:1]
        exclusive = {page for page in only for top in mine if self.extends(page, top)}
        freed = self.cache.close(holding, keep_exclusive=keep)
        assert freed.exclusive == len(own) + len(exclusive)
        assert freed.freed == (len(own) if keep else freed.exclusive)
        assert self.cache.counts.free == free + freed.freed
        assert (holding.table, holding.shared) == ([], 0)
        if not keep:
            self.forget(exclusive)

    def extends(self, page: int, content: tuple[str, tuple[int, ...]]) -> bool:
        weights_id, tokens = self.contents[page]
        return weights_id == content[0] and tokens[: len(content[1])] == content[1]

    @invariant()
    def pages_hold_what_their_tables_say(self) -> None:
        self.cache.audit(sequence.holding for sequence in self.open_ones)
        for sequence in self.open_ones:
            holding = sequence.holding
            for index, page in enumerate(holding.table[: holding.shared]):
                assert self.contents[page] == sequence.content(index)
                assert holding.owner in self.users[page]
        assert all(self.in_tree(page) for page in self.contents)

    @invariant()
    def counts_are_what_the_model_counts(self) -> None:
        holdings = [sequence.holding for sequence in self.open_ones]
        own = sum(len(holding.table) - holding.shared for holding in holdings)
        counts = self.cache.counts
        assert counts.total == self.cache.total == self.total
        assert counts.tree == len(self.contents)
        assert counts.reserved == sum(holding.reserved for holding in holdings)
        assert counts.private == own - counts.reserved
        assert counts.free == self.total - own - len(self.contents)
        assert self.cache.available == counts.free + len(set(self.contents) - self.held())
        assert self.cache.evicted_pages == self.evicted

    def teardown(self) -> None:
        for sequence in self.open_ones:
            self.cache.settle(sequence.holding)
            self.cache.close(sequence.holding, keep_exclusive=True)
        assert self.cache.available == self.total
        everything = self.cache.open(ANN, "w", (), 0)
        assert self.cache.grow(everything, self.total)
        assert sorted(everything.table) == list(range(1, self.total + 1))
        assert self.cache.close(everything, keep_exclusive=False).freed == self.total
        assert self.cache.counts.free == self.total
        self.cache.audit([])


TestCacheAgainstContents = CacheAgainstContents.TestCase
TestCacheAgainstContents.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

TOKENS = tuple(range(100, 120))


def filled(cache: KVCache, owner: TrajectoryId, tokens: int) -> Holding:
    """A holding of the first `tokens` of `TOKENS`, its whole pages in the tree."""
    holding = cache.open(owner, "w", TOKENS, tokens)
    assert cache.grow(holding, cache.pages_for(tokens))
    cache.commit(holding, TOKENS, tokens)
    return holding


def test_pages_for_rounds_up() -> None:
    cache = KVCache(4, PAGE)
    assert [cache.pages_for(tokens) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_a_second_sequence_shares_whole_pages_and_not_the_tail() -> None:
    cache = KVCache(10, PAGE)
    first, second = filled(cache, ANN, 10), filled(cache, BOB, 10)
    assert first.table[:2] == second.table[:2]
    assert first.table[2] != second.table[2]
    assert (first.shared, len(first.table)) == (second.shared, len(second.table)) == (2, 3)
    assert cache.counts.private == 2
    assert cache.counts.free == 10 - 4


def test_commit_adopts_pages_that_are_stored_and_frees_its_own() -> None:
    cache = KVCache(10, PAGE)
    first, second = cache.open(ANN, "w", TOKENS, 0), cache.open(BOB, "w", TOKENS, 0)
    assert cache.grow(first, 3)
    assert cache.grow(second, 3)
    own = [*second.table]
    cache.commit(first, TOKENS, 8)
    cache.commit(second, TOKENS, 12)
    assert second.table == [*first.table[:2], own[2]]
    assert cache.counts.free == 10 - 4
    cache.audit([first, second])


def test_closing_frees_all_that_is_exclusive_and_nothing_that_is_shared() -> None:
    cache = KVCache(10, PAGE)
    first = filled(cache, ANN, 8)
    second = cache.open(BOB, "w", TOKENS, 8)
    assert cache.grow(second, 5)
    cache.commit(second, TOKENS, 17)
    assert cache.close(second, keep_exclusive=False) == FreedPages(exclusive=3, freed=3)
    assert cache.stored_pages("w", TOKENS, 20) == (2, 0)
    assert cache.close(first, keep_exclusive=False) == FreedPages(exclusive=0, freed=0)
    assert cache.counts.tree == 2


def test_closing_with_its_pages_kept_leaves_them_for_the_next_one() -> None:
    cache = KVCache(10, PAGE)
    assert cache.close(filled(cache, ANN, 10), keep_exclusive=True) == FreedPages(exclusive=3, freed=1)
    assert cache.stored_pages("w", TOKENS, 20) == (2, 2)
    assert cache.available == 10


def test_closing_a_part_frees_what_its_owner_had_left_below_it() -> None:
    """A sequence that was preempted and may reuse a part of its pages only, as with chunks of several pages."""
    cache = KVCache(10, PAGE)
    cache.close(filled(cache, ANN, 12), keep_exclusive=True)
    again = cache.open(ANN, "w", TOKENS, 4)
    assert cache.grow(again, 3)
    assert cache.close(again, keep_exclusive=False) == FreedPages(exclusive=5, freed=5)
    assert cache.counts.free == 10


def test_pages_that_another_epoch_of_the_same_trajectory_holds_survive_a_close() -> None:
    cache = KVCache(10, PAGE)
    parked = filled(cache, ANN, 10)
    resumed = cache.open(ANN, "w", TOKENS, 8)
    assert cache.close(parked, keep_exclusive=False) == FreedPages(exclusive=1, freed=1)
    cache.audit([resumed])
    assert cache.close(resumed, keep_exclusive=False) == FreedPages(exclusive=2, freed=2)
    assert cache.counts.free == 10


def test_growing_evicts_but_never_what_is_held() -> None:
    cache = KVCache(4, PAGE)
    held = filled(cache, ANN, 8)
    other = cache.open(BOB, "w", TOKENS[4:], 0)
    assert cache.grow(other, 2)
    cache.commit(other, TOKENS[4:], 8)
    cache.close(other, keep_exclusive=True)
    assert cache.counts.free == 0
    assert not cache.grow(held, 5)
    assert cache.evicted_pages == 0
    assert cache.grow(held, 4)
    assert cache.evicted_pages == 2
    assert held.table[:2] != held.table[2:]
    cache.audit([held])


def test_growing_to_what_it_has_already_changes_nothing() -> None:
    cache = KVCache(4, PAGE)
    holding = filled(cache, ANN, 8)
    before = cache.counts
    assert cache.grow(holding, 1)
    assert cache.grow(holding, 2, reserved=True)
    assert (cache.counts, len(holding.table)) == (before, 2)


@pytest.mark.parametrize(
    "use",
    [lambda cache, holding: cache.commit(holding, TOKENS, 4), lambda cache, h: cache.close(h, keep_exclusive=True)],
)
def test_pages_that_a_copy_writes_to_are_neither_shared_nor_given_back(
    use: Callable[[KVCache, Holding], object],
) -> None:
    cache = KVCache(4, PAGE)
    holding = cache.open(ANN, "w", TOKENS, 0)
    assert cache.grow(holding, 2, reserved=True)
    assert cache.counts.reserved == 2
    with pytest.raises(AssertionError, match="during a copy"):
        use(cache, holding)
    cache.settle(holding)
    use(cache, holding)


def test_committing_more_than_the_table_holds_asserts() -> None:
    cache = KVCache(4, PAGE)
    holding = cache.open(ANN, "w", TOKENS, 0)
    assert cache.grow(holding, 1)
    with pytest.raises(AssertionError):
        cache.commit(holding, TOKENS, 8)


def hold_a_page_twice(cache: KVCache, first: Holding, second: Holding) -> None:
    second.table[-1] = first.table[-1]


def lose_a_page(cache: KVCache, first: Holding, second: Holding) -> None:
    first.table.pop()


def count_a_page_as_private(cache: KVCache, first: Holding, second: Holding) -> None:
    cache._private += 1


def count_a_page_as_reserved(cache: KVCache, first: Holding, second: Holding) -> None:
    second.reserved += 1


def count_a_page_as_stored(cache: KVCache, first: Holding, second: Holding) -> None:
    cache._tree.pages += 1


def count_a_page_as_evictable(cache: KVCache, first: Holding, second: Holding) -> None:
    cache._tree.evictable += 1


def lock_once_more(cache: KVCache, first: Holding, second: Holding) -> None:
    cache._tree.lock(second.node)


def forget_a_lock(cache: KVCache, first: Holding, second: Holding) -> None:
    cache._tree.unlock(second.node)


def share_another_page_than_the_tree(cache: KVCache, first: Holding, second: Holding) -> None:
    first.table[0], first.table[-1] = first.table[-1], first.table[0]


def give_back_a_page_that_is_held(cache: KVCache, first: Holding, second: Holding) -> None:
    cache._allocator.give(first.table[-1:])


def take_a_page_that_nobody_holds(cache: KVCache, first: Holding, second: Holding) -> None:
    cache._allocator.take(1)


def remove_what_is_held(cache: KVCache, first: Holding, second: Holding) -> None:
    node = second.node
    assert node.parent is not None
    node.parent.children.clear()
    cache._tree.pages -= cache._allocator.give(second.table[: second.shared])


@pytest.mark.parametrize(
    "corrupt",
    [
        hold_a_page_twice,
        lose_a_page,
        count_a_page_as_private,
        count_a_page_as_reserved,
        count_a_page_as_stored,
        count_a_page_as_evictable,
        lock_once_more,
        forget_a_lock,
        share_another_page_than_the_tree,
        give_back_a_page_that_is_held,
        take_a_page_that_nobody_holds,
        remove_what_is_held,
    ],
)
def test_an_audit_finds(corrupt: Callable[[KVCache, Holding, Holding], None]) -> None:
    cache = KVCache(10, PAGE)
    first, second = filled(cache, ANN, 10), filled(cache, BOB, 10)
    cache.audit([first, second])
    corrupt(cache, first, second)
    with pytest.raises(AssertionError):
        cache.audit([first, second])


def test_an_audit_finds_a_holding_that_it_is_not_told_of() -> None:
    cache = KVCache(10, PAGE)
    first, _ = filled(cache, ANN, 8), filled(cache, BOB, 8)
    with pytest.raises(AssertionError, match="locks"):
        cache.audit([first])


def shape(cache: KVCache) -> list[tuple[object, ...]]:
    """All that the tree knows of its pages."""
    nodes = [node for node in cache._tree.nodes() if node.pages]
    return [(node, *node.pages, *node.chunks, node.owner, node.locks, node.used_at) for node in nodes]


@pytest.mark.parametrize("max_tokens", [0, 3, 4, 8, 12, 20])
@pytest.mark.parametrize("weights_id", ["w", "v"])
def test_looking_changes_nothing(weights_id: str, max_tokens: int) -> None:
    """An admission that finds no room leaves no trace."""
    cache = KVCache(10, PAGE)
    holding = filled(cache, ANN, 8)
    cache.close(filled(cache, BOB, 18), keep_exclusive=True)
    before, counts, available = shape(cache), cache.counts, cache.available
    found, evictable = cache.stored_pages(weights_id, TOKENS, max_tokens)
    assert found == (min(4, max_tokens // PAGE) if weights_id == "w" else 0)
    assert evictable == max(0, found - 2)
    assert (shape(cache), cache.counts, cache.available) == (before, counts, available)
    cache.audit([holding])


def test_what_was_only_looked_at_is_evicted_as_if_it_was_not() -> None:
    cache = KVCache(2, PAGE)
    for tokens in (TOKENS[:4], TOKENS[4:8]):
        holding = cache.open(ANN, "w", tokens, 0)
        assert cache.grow(holding, 1)
        cache.commit(holding, tokens, 4)
        cache.close(holding, keep_exclusive=True)
    assert cache.stored_pages("w", TOKENS, 4) == (1, 1)
    assert cache.grow(cache.open(BOB, "w", TOKENS, 0), 1)
    assert cache.stored_pages("w", TOKENS, 4) == (0, 0)
    assert cache.stored_pages("w", TOKENS[4:], 4) == (1, 1)
