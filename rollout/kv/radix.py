"""The prefix tree of one worker: whole pages of token ids to page numbers. Integers only.

A node's edge holds one or more whole pages; children are told apart by their first page's ids, which
are compared in full. Each weights_id has its own root, so KV of other weights can never match.

1. `locks` counts the sequences that hold the node or a descendant: a locked node's parent is locked.
2. `pages` and `evictable` (pages of unlocked nodes) are kept incrementally.
3. `owner` is the one trajectory that ever used the node, or None once a second one did; what hangs
   below a node that has an owner has the same one.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence

from rollout.types import TrajectoryId

PageIds = tuple[int, ...]
"""Token ids of one page."""

MOST_LEAVES = 1024
"""Entries of the eviction heap that are kept before it is cleaned."""


class Node:
    """An edge of the tree with what hangs below it."""

    __slots__ = ("children", "chunks", "locks", "owner", "pages", "parent", "used_at")

    def __init__(
        self, parent: "Node | None", chunks: list[PageIds], pages: list[int], owner: TrajectoryId | None
    ) -> None:
        self.parent = parent
        self.chunks = chunks
        self.pages = pages
        self.children: dict[PageIds, Node] = {}
        self.locks = 0
        self.owner = owner
        self.used_at = 0


class RadixTree:
    """Longest-prefix matching, insertion, locks and LRU eviction."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._roots: dict[str, Node] = {}
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []
        """A heap of (used_at, serial, node): every evictable leaf, and entries that are out of date."""
        self._offers = itertools.count()
        self._most_leaves = MOST_LEAVES
        self.pages = 0
        self.evictable = 0

    def root(self, weights_id: str) -> Node:
        return self._roots.setdefault(weights_id, Node(None, [], [], None))

    def match(self, weights_id: str, tokens: Sequence[int], max_pages: int, user: TrajectoryId) -> Node:
        """The node at which the longest stored prefix of at most `max_pages` pages ends.

        A node that matches in part is split, so the result always ends at a node. Every node on the
        way counts as used by `user`.
        """
        self._clock += 1
        node = self.root(weights_id)
        done = 0
        while done < max_pages:
            child = node.children.get(self._chunk(tokens, done))
            if child is None:
                break
            common = self._common(child, tokens, done, max_pages)
            if common < len(child.chunks):
                child = self._split(child, common)
            node = child
            done += common
            node.used_at = self._clock
            if node.owner != user:
                node.owner = None
        return node

    def stored_pages(self, weights_id: str, tokens: Sequence[int], max_pages: int) -> tuple[int, int]:
        """How many pages `match` would find, and how many of them are evictable now; changes nothing."""
        node = self._roots.get(weights_id)
        done = evictable = 0
        while node is not None and done < max_pages:
            child = node.children.get(self._chunk(tokens, done))
            if child is None:
                break
            common = self._common(child, tokens, done, max_pages)
            done += common
            evictable += 0 if child.locks else common
            if common < len(child.chunks):
                break
            node = child
        return done, evictable

    def insert(
        self, node: Node, tokens: Sequence[int], pages: list[int], owner: TrajectoryId
    ) -> tuple[Node, list[int]]:
        """Add `pages` holding `tokens` below `node`.

        Returns the node at which they end and the pages of the tree along the way: where the tree had a
        page already, its page stands in the list and the caller still owns the one it brought.
        """
        kept: list[int] = []
        self._clock += 1
        while len(kept) < len(pages):
            done = len(kept)
            child = node.children.get(self._chunk(tokens, done))
            if child is None:
                chunks = [self._chunk(tokens, page) for page in range(done, len(pages))]
                child = Node(node, chunks, pages[done:], owner)
                node.children[chunks[0]] = child
                self.pages += len(chunks)
                self.evictable += len(chunks)
            else:
                common = self._common(child, tokens, done, len(pages))
                if common < len(child.chunks):
                    child = self._split(child, common)
                if child.owner != owner:
                    child.owner = None
            child.used_at = self._clock
            kept += child.pages
            node = child
        self._offer(node)
        return node, kept

    def lock(self, node: Node) -> None:
        walk: Node | None = node
        while walk is not None:
            if walk.locks == 0:
                self.evictable -= len(walk.pages)
            walk.locks += 1
            walk = walk.parent

    def unlock(self, node: Node) -> None:
        """Take a lock back; all that it held counts as used until now."""
        self._clock += 1
        walk: Node | None = node
        while walk is not None:
            assert walk.locks > 0, "unlock of a node that is not locked"
            walk.locks -= 1
            walk.used_at = self._clock
            if walk.locks == 0:
                self.evictable += len(walk.pages)
                self._offer(walk)
            walk = walk.parent

    def evict(self, count: int) -> list[int]:
        """Remove at least `count` pages of unlocked leaves, least recently used first, or all there are."""
        freed: list[int] = []
        while self._leaves and len(freed) < count:
            used_at, _, node = heapq.heappop(self._leaves)
            if not self._is_leaf(node):
                continue
            if node.used_at != used_at:
                self._offer(node)
                continue
            parent = node.parent
            freed += self._remove(node)
            if parent is not None:
                self._offer(parent)
        return freed

    def _offer(self, node: Node) -> None:
        """Let `evict` know of a node that it may take now."""
        if not self._is_leaf(node):
            return
        heapq.heappush(self._leaves, (node.used_at, next(self._offers), node))
        if len(self._leaves) > self._most_leaves:
            self._leaves = [(leaf.used_at, next(self._offers), leaf) for leaf in self.nodes() if self._is_leaf(leaf)]
            heapq.heapify(self._leaves)
            self._most_leaves = max(MOST_LEAVES, 2 * len(self._leaves))

    def _is_leaf(self, node: Node) -> bool:
        """Whether it hangs in the tree with nothing below it and nobody holding it; a root does not."""
        return node.parent is not None and not node.children and not node.locks

    def exclusive(self, node: Node, owner: TrajectoryId) -> list[Node]:
        """What only `owner` ever used and nobody holds: `node`, such nodes above it, and all below them.

        Parents come first. There is something below `node` if its owner came back for a part only.
        """
        top: Node | None = None
        while node.parent is not None and node.owner == owner and not node.locks:
            top, node = node, node.parent
        found: list[Node] = []
        stack = [top] if top is not None else []
        while stack:
            node = stack.pop()
            found.append(node)
            stack += node.children.values()
        return found

    def remove_exclusive(self, node: Node, owner: TrajectoryId) -> list[int]:
        """Remove what `exclusive` names; returns the pages."""
        mine = self.exclusive(node, owner)
        above = mine[0].parent if mine else None
        freed = [page for node in reversed(mine) for page in self._remove(node)]
        if above is not None:
            self._offer(above)
        return freed

    def nodes(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    def _remove(self, node: Node) -> list[int]:
        assert node.parent is not None
        assert not node.locks, "removing a locked node"
        del node.parent.children[node.chunks[0]]
        node.parent = None
        self.pages -= len(node.pages)
        self.evictable -= len(node.pages)
        return node.pages

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` after `at` pages; returns the upper half, which is new."""
        assert node.parent is not None
        upper = Node(node.parent, node.chunks[:at], node.pages[:at], node.owner)
        upper.locks = node.locks
        upper.used_at = node.used_at
        node.parent.children[upper.chunks[0]] = upper
        node.chunks, node.pages, node.parent = node.chunks[at:], node.pages[at:], upper
        upper.children[node.chunks[0]] = node
        return upper

    def _chunk(self, tokens: Sequence[int], page: int) -> PageIds:
        return tuple(tokens[page * self._page_tokens : (page + 1) * self._page_tokens])

    def _common(self, node: Node, tokens: Sequence[int], start: int, end: int) -> int:
        """Pages of `node` that equal those of `tokens` from page `start`, looking at pages before `end`."""
        common = 1
        for chunk in node.chunks[1 : end - start]:
            if chunk != self._chunk(tokens, start + common):
                break
            common += 1
        return common
