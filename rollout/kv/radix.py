"""The prefix tree of one worker: whole pages of token ids to page numbers in two tiers. Integers only.

A node's edge is the ids of one or more whole pages, as bytes, so that an edge is compared with one memcmp;
children are told apart by their first page. Each weights_id has its own root, so KV of other weights can
never match.

1. A node has pages in at least one tier (a root in none), one page for each page of its edge.
2. A node with device pages hangs below one with device pages, or below a root.
3. `locks` of a tier counts who holds the node or a descendant there: a locked node's parent is locked.
   Pages of a locked node stay; of a node below which something is locked in either tier, a copy stays.
4. `owner` is the one trajectory that ever used the node, or None once a second one did; what hangs
   below a node that has an owner has the same one.
"""

import heapq
import itertools
from collections.abc import Iterator, Set

from rollout.kv.nodes import ID_BYTES, Arriving, Node
from rollout.kv.tiers import Tier
from rollout.types import TrajectoryId

MOST_LEAVES = 1024
"""Entries of an eviction heap that are kept before it is cleaned."""


class Level:
    """Counters of one tier and the order in which its leaves are evicted."""

    def __init__(self) -> None:
        self.pages = 0
        self.evictable = 0
        """Pages of nodes without locks."""
        self.leaves: list[tuple[tuple[bool, int], int, Node]] = []
        """A heap of (rank, serial, node): every evictable leaf, and entries that are out of date."""
        self.most_leaves = MOST_LEAVES


class RadixTree:
    """Longest-prefix matching, insertion, locks and eviction order; who owns page numbers is the caller's affair."""

    def __init__(self, page_tokens: int, *, prefer_shared: bool = False) -> None:
        """`prefer_shared`: nodes that one trajectory alone ever used are evicted before any others."""
        self._page_bytes = page_tokens * ID_BYTES
        self._prefer_shared = prefer_shared
        self._roots: dict[str, Node] = {}
        self._clock = 0
        self._serial = itertools.count()
        self.device = Level()
        self.host = Level()

    def level(self, tier: Tier) -> Level:
        return self.device if tier is Tier.DEVICE else self.host

    def root(self, weights_id: str) -> Node:
        return self._roots.setdefault(weights_id, Node(None, b"", None))

    # Finding and adding -------------------------------------------------------------------------------

    def match(self, weights_id: str, key: bytes, max_pages: int, user: TrajectoryId) -> Node:
        """The node at which the longest stored prefix of at most `max_pages` pages ends, in whatever tiers.

        A node that matches in part is split, so the result always ends at a node. Every node on the
        way counts as used by `user`.
        """
        self._clock += 1
        node = self.root(weights_id)
        for child, common in self._walk(node, key, max_pages):
            node = child if common == len(child.edge) else self.split(child, common // self._page_bytes)
            node.used_at = self._clock
            if node.owner != user:
                node.owner = None
        return node

    def hit(self, node: Node) -> None:
        """A sequence uses the path to `node`."""
        for step in node.path():
            step.hits += 1

    def find(self, weights_id: str, key: bytes, max_pages: int) -> Iterator[tuple[Node, int]]:
        """The nodes that `match` would go through, each with how many of its pages match; changes nothing."""
        root = self._roots.get(weights_id)
        if root is not None:
            for node, common in self._walk(root, key, max_pages):
                yield node, common // self._page_bytes

    def insert(self, node: Node, key: bytes, pages: list[int], owner: TrajectoryId) -> tuple[Node, list[int]]:
        """Add device `pages` holding the ids of `key` below `node`, which is in the device tier itself.

        Returns the node at which they end and the device pages of the tree along the way. Where the tree had a
        device page already that one stands in the list, and the caller still owns the one it brought. The list
        is shorter than `pages` if a copy is just writing the rest: the caller owns that rest, too.
        """
        kept: list[int] = []
        self._clock += 1
        while len(kept) < len(pages):
            start = len(kept) * self._page_bytes
            child = node.children.get(key[start : start + self._page_bytes])
            if child is None:
                child = Node(node, key[start : len(pages) * self._page_bytes], owner)
                node.children[child.edge[: self._page_bytes]] = child
                self.place(child, Tier.DEVICE, pages[len(kept) :])
            else:
                common = self._common(child.edge, key, start, len(pages) * self._page_bytes)
                if not child.device.pages and child.arriving is not None:
                    break
                if common < len(child.edge):
                    child = self.split(child, common // self._page_bytes)
                if child.owner != owner:
                    child.owner = None
                if not child.device.pages:
                    self.place(child, Tier.DEVICE, pages[len(kept) : len(kept) + common // self._page_bytes])
            child.used_at = self._clock
            kept += child.device.pages
            node = child
        for tier in Tier:
            self.offer(node, tier)
        return node, kept

    # Locks --------------------------------------------------------------------------------------------

    def lock(self, node: Node, tier: Tier) -> None:
        level = self.level(tier)
        walk: Node | None = node
        while walk is not None:
            spot = walk.at(tier)
            if spot.locks == 0:
                level.evictable -= len(spot.pages)
            spot.locks += 1
            walk = walk.parent

    def unlock(self, node: Node, tier: Tier) -> None:
        """Take a lock back; all that it held counts as used until now."""
        self._clock += 1
        level = self.level(tier)
        walk: Node | None = node
        while walk is not None:
            spot = walk.at(tier)
            assert spot.locks > 0, f"unlock of a node that is not locked on {tier}"
            spot.locks -= 1
            walk.used_at = self._clock
            if spot.locks == 0:
                level.evictable += len(spot.pages)
                self.offer(walk, tier)
            walk = walk.parent

    # Pages --------------------------------------------------------------------------------------------

    def place(self, node: Node, tier: Tier, pages: list[int]) -> None:
        """`pages` hold the node's KV in this tier from now on, where it had none."""
        spot = node.at(tier)
        assert not spot.pages, f"a node has its pages on {tier} already"
        assert len(pages) * self._page_bytes == len(node.edge), (len(pages), len(node.edge))
        spot.pages = pages
        level = self.level(tier)
        level.pages += len(pages)
        if not spot.locks:
            level.evictable += len(pages)
        if node.parent is not None:
            node.parent.at(tier).below += 1
        self.offer(node, tier)

    def displace(self, node: Node, tier: Tier) -> list[int]:
        """The node's pages are no longer in this tier; returns them. Without any in the other it is removed."""
        spot = node.at(tier)
        assert node.parent is not None
        assert spot.pages, f"a node has no pages on {tier}"
        assert not spot.locks, f"displacing a node that is locked on {tier}"
        assert not spot.below, f"displacing a node below which there is something on {tier}"
        pages, spot.pages = spot.pages, []
        level = self.level(tier)
        level.pages -= len(pages)
        level.evictable -= len(pages)
        parent = node.parent
        parent.at(tier).below -= 1
        if not node.at(tier.other).pages:
            assert not node.children, "removing a node that has children"
            assert node.arriving is None, "removing a node to which a copy writes"
            del parent.children[node.edge[: self._page_bytes]]
            node.parent = None
        self.offer(parent, tier)
        return pages

    # Eviction -----------------------------------------------------------------------------------------

    def pop_leaf(self, tier: Tier, most_pages: int) -> Node | None:
        """The next node to be evicted from a tier; one with more than `most_pages` pages is split, its end returned.

        The caller displaces it, or offers it again.
        """
        level = self.level(tier)
        while level.leaves:
            rank, _, node = heapq.heappop(level.leaves)
            if not self._is_leaf(node, tier):
                continue
            if self._rank(node) != rank:
                self.offer(node, tier)
                continue
            if len(node.at(tier).pages) > most_pages:
                self.split(node, len(node.at(tier).pages) - most_pages)
            return node
        return None

    def offer(self, node: Node, tier: Tier) -> None:
        """Let `pop_leaf` know of a node that it may take now."""
        if not self._is_leaf(node, tier):
            return
        level = self.level(tier)
        heapq.heappush(level.leaves, (self._rank(node), next(self._serial), node))
        if len(level.leaves) > level.most_leaves:
            leaves = (leaf for leaf in self.nodes() if self._is_leaf(leaf, tier))
            level.leaves = [(self._rank(leaf), next(self._serial), leaf) for leaf in leaves]
            heapq.heapify(level.leaves)
            level.most_leaves = max(MOST_LEAVES, 2 * len(level.leaves))

    def _is_leaf(self, node: Node, tier: Tier) -> bool:
        """Whether it has pages in the tier that nobody holds, and nothing below it there; a root has none."""
        spot = node.at(tier)
        return bool(spot.pages) and not spot.locks and not spot.below and node.parent is not None

    def _rank(self, node: Node) -> tuple[bool, int]:
        return (self._prefer_shared and node.owner is None, node.used_at)

    # What one trajectory alone used -------------------------------------------------------------------

    def exclusive(self, node: Node, owner: TrajectoryId) -> list[Node]:
        """What only `owner` ever used and nobody holds: `node`, such nodes above it, and all below them.

        Parents come first. There is something below `node` if its owner came back for a part only.
        """
        top: Node | None = None
        while node.parent is not None and node.owner == owner and not node.device.locks and not node.host.locks:
            top, node = node, node.parent
        found: list[Node] = []
        stack = [top] if top is not None else []
        while stack:
            node = stack.pop()
            found.append(node)
            stack += node.children.values()
        return found

    def nodes(self) -> Iterator[Node]:
        """All of them, roots included."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    # Other weights ------------------------------------------------------------------------------------

    def foreign(self, weights_ids: Set[str]) -> list[Node]:
        """What weights other than these wrote, children before their parents."""
        found: list[Node] = []
        stack = [
            child for name, root in self._roots.items() if name not in weights_ids for child in root.children.values()
        ]
        while stack:
            node = stack.pop()
            found.append(node)
            stack += node.children.values()
        return found[::-1]

    def uproot(self, weights_ids: Set[str]) -> bool:
        """Forget the roots of other weights below which there is nothing left; whether these are all of them."""
        foreign = [name for name in self._roots if name not in weights_ids]
        for name in foreign:
            root = self._roots[name]
            if not (root.children or root.device.locks or root.host.locks):
                del self._roots[name]
        return all(name in weights_ids for name in self._roots)

    # Edges --------------------------------------------------------------------------------------------

    def _walk(self, node: Node, key: bytes, max_pages: int) -> Iterator[tuple[Node, int]]:
        """Nodes below `node` along `key`, each with the bytes of its edge that match; the last may match in part."""
        start, end = 0, max_pages * self._page_bytes
        assert end <= len(key), (max_pages, len(key))
        while start < end:
            child = node.children.get(key[start : start + self._page_bytes])
            if child is None:
                return
            common = self._common(child.edge, key, start, end)
            whole = common == len(child.edge)
            yield child, common
            if not whole:
                return
            start += common
            node = child

    def _common(self, edge: bytes, key: bytes, start: int, end: int) -> int:
        """Bytes of the whole pages at which `edge` equals `key` from `start`, looking at nothing from `end` on."""
        length = min(len(edge), end - start)
        if length == self._page_bytes:  # by which it was found
            return length
        if edge[:length] == key[start : start + length]:
            return length
        low, high = 1, length // self._page_bytes  # pages below low are equal, the first `high` are not
        while high - low > 1:
            middle = (low + high) // 2
            size = middle * self._page_bytes
            if edge[:size] == key[start : start + size]:
                low = middle
            else:
                high = middle
        return low * self._page_bytes

    def split(self, node: Node, at: int) -> Node:
        """Cut `node` after `at` pages; returns the upper half, which is new: the lower one keeps its identity."""
        assert node.parent is not None
        cut = at * self._page_bytes
        upper = Node(node.parent, node.edge[:cut], node.owner)
        upper.hits, upper.used_at = node.hits, node.used_at
        for tier in Tier:
            spot = node.at(tier)
            half = upper.at(tier)
            half.pages, spot.pages = spot.pages[:at], spot.pages[at:]
            half.locks = spot.locks
            half.below = 1 if spot.pages else 0
        if node.arriving is not None:
            arriving = node.arriving
            upper.arriving = Arriving(arriving.copy_id, arriving.to, arriving.pages[:at])
            node.arriving = Arriving(arriving.copy_id, arriving.to, arriving.pages[at:])
        node.parent.children[upper.edge[: self._page_bytes]] = upper
        node.edge, node.parent = node.edge[cut:], upper
        upper.children[node.edge[: self._page_bytes]] = node
        return upper
