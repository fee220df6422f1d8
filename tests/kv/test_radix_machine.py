"""The prefix tree in two tiers against a dictionary of prefixes."""

import itertools
from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout.kv.nodes import Node, edge_bytes
from rollout.kv.radix import RadixTree
from rollout.kv.tiers import Tier
from rollout.types import TrajectoryId

PAGE = 2
PAGE_BYTES = len(edge_bytes(range(PAGE)))
ANN, BOB = TrajectoryId("ann"), TrajectoryId("bob")
Prefix = tuple[str, bytes]
"""A weights_id and the token ids of some pages."""

keys = st.lists(st.sampled_from([edge_bytes((0, 0)), edge_bytes((0, 1))]), max_size=4).map(b"".join)


class Stored:
    """What the model knows of one page."""

    def __init__(self) -> None:
        self.pages: dict[Tier, int] = {}
        self.users: set[TrajectoryId] = set()
        self.used_at = 0


class Held:
    """A lock on the device that somebody holds, with the prefix it is on."""

    def __init__(self, node: Node, user: TrajectoryId, weights_id: str, key: bytes) -> None:
        self.node = node
        self.user = user
        self.weights_id = weights_id
        self.key = key

    def prefixes(self) -> list[Prefix]:
        return prefixes(self.weights_id, self.key)


class TreeAgainstDictionary(RuleBasedStateMachine):
    """Sequences match, insert below what they matched, and let go; pages come and go in both tiers."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[Prefix, Stored] = {}
        self.held: list[Held] = []
        self.numbers = itertools.count(1)
        self.clock = itertools.count(1)

    @initialize(prefer_shared=st.booleans())
    def begin(self, prefer_shared: bool) -> None:
        self.prefer_shared = prefer_shared
        self.tree = RadixTree(PAGE, prefer_shared=prefer_shared)

    def prefix_of(self, node: Node) -> Prefix:
        """Where a node ends."""
        path = node.path()
        root = path[0].parent if path else node
        (weights_id,) = [weights_id for weights_id in "vw" if self.tree.root(weights_id) is root]
        return weights_id, b"".join(step.edge for step in path)

    def of_node(self, node: Node) -> list[Prefix]:
        """Those of its own pages."""
        count = len(node.edge) // PAGE_BYTES
        return prefixes(*self.prefix_of(node))[-count:] if count else []

    def locks(self, prefix: Prefix) -> int:
        return sum(prefix in held.prefixes() for held in self.held)

    def use(self, used: Iterable[Prefix], user: TrajectoryId | None) -> None:
        now = next(self.clock)
        for prefix in used:
            self.stored[prefix].used_at = now
            if user is not None:
                self.stored[prefix].users.add(user)

    def gone(self, node: Node, tier: Tier) -> None:
        """Take the pages of a node out of tree and model."""
        mine = self.of_node(node)
        pages = [self.stored[prefix].pages.pop(tier) for prefix in mine]
        assert self.tree.displace(node, tier) == pages
        for prefix in mine:
            if not self.stored[prefix].pages:
                del self.stored[prefix]

    def leaves(self, tier: Tier) -> list[Prefix]:
        """What could be evicted from a tier: nothing follows there on the next page."""
        there = [prefix for prefix, stored in self.stored.items() if tier in stored.pages]
        above = {(weights_id, ids[:-PAGE_BYTES]) for weights_id, ids in there}
        return [prefix for prefix in there if prefix not in above and not (tier is Tier.DEVICE and self.locks(prefix))]

    def rank(self, prefix: Prefix) -> tuple[bool, int]:
        stored = self.stored[prefix]
        return self.prefer_shared and len(stored.users) > 1, stored.used_at

    @rule(user=st.sampled_from([ANN, BOB]), weights_id=st.sampled_from("vww"), key=keys, limit=st.integers(0, 4))
    def match(self, user: TrajectoryId, weights_id: str, key: bytes, limit: int) -> None:
        limit = min(limit, len(key) // PAGE_BYTES)
        found = list(itertools.takewhile(self.stored.__contains__, prefixes(weights_id, key)[:limit]))
        looked = list(self.tree.find(weights_id, key, limit))
        assert sum(pages for _, pages in looked) == len(found)
        node = self.tree.match(weights_id, key, limit, user)
        assert self.prefix_of(node) == (weights_id, key[: len(found) * PAGE_BYTES])
        self.use(found, user)
        while node.parent is not None and not node.device.pages:
            node = node.parent
        self.tree.lock(node, Tier.DEVICE)
        self.held.append(Held(node, user, *self.prefix_of(node)))

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99), key=keys.filter(bool))
    def insert(self, pick: int, key: bytes) -> None:
        held = self.held[pick % len(self.held)]
        own = [next(self.numbers) for _ in range(len(key) // PAGE_BYTES)]
        above = held.prefixes()
        news = prefixes(held.weights_id, held.key + key)[len(above) :]
        expected = []
        for prefix, page in zip(news, own, strict=True):
            expected.append(self.stored.setdefault(prefix, Stored()).pages.setdefault(Tier.DEVICE, page))
        node, kept = self.tree.insert(held.node, key, own, held.user)
        assert kept == expected
        self.use(news, held.user)
        self.tree.lock(node, Tier.DEVICE)
        self.tree.unlock(held.node, Tier.DEVICE)
        self.use(above, None)
        held.node, held.key = node, held.key + key

    @precondition(lambda self: self.stored)
    @rule(pick=st.integers(0, 99))
    def place(self, pick: int) -> None:
        """A copy into the other tier is complete."""
        nodes = [node for node in self.tree.nodes() if node.parent is not None]
        node = nodes[pick % len(nodes)]
        tier = next((tier for tier in Tier if not node.at(tier).pages), None)
        assert node.parent is not None
        if tier is None or (tier is Tier.DEVICE and node.parent.parent is not None and not node.parent.device.pages):
            return
        pages = [next(self.numbers) for _ in range(len(node.edge) // PAGE_BYTES)]
        self.tree.place(node, tier, pages)
        for prefix, page in zip(self.of_node(node), pages, strict=True):
            self.stored[prefix].pages[tier] = page

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99), remove=st.booleans())
    def let_go(self, pick: int, remove: bool) -> None:
        held = self.held.pop(pick % len(self.held))
        self.tree.unlock(held.node, Tier.DEVICE)
        self.use(held.prefixes(), None)
        if not remove:
            return
        mine = [p for p in held.prefixes() if self.stored[p].users == {held.user} and not self.locks(p)][:1]
        expected = {prefix for prefix in self.stored for top in mine if extends(prefix, top)}
        nodes = self.tree.exclusive(held.node, held.user)
        assert {prefix for node in nodes for prefix in self.of_node(node)} == expected
        assert all(self.stored[prefix].users == {held.user} for prefix in expected)
        for node in reversed(nodes):
            for tier in Tier:
                if node.at(tier).pages:
                    self.gone(node, tier)

    @rule(tier=st.sampled_from(Tier), most=st.integers(1, 4))
    def evict(self, tier: Tier, most: int) -> None:
        leaves = self.leaves(tier)
        node = self.tree.pop_leaf(tier, most)
        if not leaves:
            assert node is None
            return
        assert node is not None
        assert 1 <= len(node.at(tier).pages) <= most
        assert self.prefix_of(node) in leaves
        assert self.rank(self.prefix_of(node)) == min(map(self.rank, leaves))
        if tier is Tier.DEVICE and not node.host.pages:
            below = [other for other in self.tree.nodes() if node in other.path()[:-1]]
            for other in sorted(below, key=lambda other: -len(other.path())):
                self.gone(other, Tier.HOST)
        elif tier is Tier.HOST and not node.device.pages:
            assert not node.children
        self.gone(node, tier)

    @rule(tier=st.sampled_from(Tier))
    def offer_again(self, tier: Tier) -> None:
        """What was popped and is not evicted comes again."""
        node = self.tree.pop_leaf(tier, 9)
        if node is not None:
            self.tree.offer(node, tier)

    @invariant()
    def the_heaps_of_leaves_are_cleaned_often(self) -> None:
        if hasattr(self, "tree"):
            for tier in Tier:
                self.tree.level(tier).most_leaves = 3

    @invariant()
    def tree_and_dictionary_agree(self) -> None:
        if not hasattr(self, "tree"):
            return
        seen: dict[Prefix, tuple[dict[Tier, int], TrajectoryId | None, int]] = {}
        for node in self.tree.nodes():
            for first, child in node.children.items():
                assert child.parent is node
                assert child.edge[:PAGE_BYTES] == first
            for index, prefix in enumerate(self.of_node(node)):
                pages = {tier: node.at(tier).pages[index] for tier in Tier if node.at(tier).pages}
                seen[prefix] = pages, node.owner, node.device.locks
                assert not node.host.locks
        assert seen == {
            prefix: (stored.pages, next(iter(stored.users)) if len(stored.users) == 1 else None, self.locks(prefix))
            for prefix, stored in self.stored.items()
        }
        for tier in Tier:
            level = self.tree.level(tier)
            there = [(prefix, stored) for prefix, stored in self.stored.items() if tier in stored.pages]
            assert level.pages == len(there)
            assert level.evictable == sum(tier is Tier.HOST or not self.locks(prefix) for prefix, _ in there)

    def teardown(self) -> None:
        if not hasattr(self, "tree"):
            return
        while self.held:
            self.let_go(0, remove=False)
        while any(self.leaves(tier) for tier in Tier):
            for tier in Tier:
                self.evict(tier, 9)
        assert not self.stored
        assert all(self.tree.level(tier).pages == self.tree.level(tier).evictable == 0 for tier in Tier)


def prefixes(weights_id: str, key: bytes) -> list[Prefix]:
    return [(weights_id, key[:end]) for end in range(PAGE_BYTES, len(key) + 1, PAGE_BYTES)]


def extends(prefix: Prefix, other: Prefix) -> bool:
    return prefix[0] == other[0] and prefix[1].startswith(other[1])


TestTreeAgainstDictionary = TreeAgainstDictionary.TestCase
TestTreeAgainstDictionary.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
