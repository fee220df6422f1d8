"""Who holds which device page: the allocator, the prefix tree and the sequences' own pages. Integers only.

A `Holding` is one sequence's page table: first pages shared with the tree (locked there), then its own.
Conservation, after every operation: `free + tree + private + reserved = total`, where reserved pages are
destinations of a copy that is not complete. `audit` recomputes it from the structures.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollout.kv.pages import PageAllocator
from rollout.kv.radix import Node, RadixTree
from rollout.metrics import PageCounts
from rollout.types import TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class FreedPages:
    """What closing a holding gave back."""

    exclusive: int
    """Pages that only this trajectory used when it was closed."""
    freed: int
    """Pages that became free."""


class Holding:
    """The page table of one sequence."""

    __slots__ = ("node", "owner", "reserved", "shared", "table")

    def __init__(self, owner: TrajectoryId, node: Node, table: list[int]) -> None:
        self.owner = owner
        self.node = node
        self.table = table
        self.shared = len(table)
        self.reserved = 0
        """Own pages that a copy is writing to."""


class KVCache:
    """Page tables for sequences, with sharing through the tree and eviction when pages run out."""

    def __init__(self, total_pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._allocator = PageAllocator(total_pages)
        self._tree = RadixTree(page_tokens)
        self._private = 0
        self._reserved = 0
        self.evicted_pages = 0

    @property
    def available(self) -> int:
        """Pages that can be had at once: free or evictable."""
        return self._allocator.free + self._tree.evictable

    @property
    def total(self) -> int:
        return self._allocator.total

    @property
    def counts(self) -> PageCounts:
        return PageCounts(
            total=self._allocator.total,
            free=self._allocator.free,
            tree=self._tree.pages,
            private=self._private,
            reserved=self._reserved,
        )

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def stored_pages(self, weights_id: str, tokens: Sequence[int], max_tokens: int) -> tuple[int, int]:
        """Whole pages of `tokens[:max_tokens]` that the tree holds, and how many of them `available` counts."""
        return self._tree.stored_pages(weights_id, tokens, max_tokens // self.page_tokens)

    def open(self, owner: TrajectoryId, weights_id: str, tokens: Sequence[int], max_tokens: int) -> Holding:
        """A holding of the longest stored prefix of `tokens[:max_tokens]`, locked."""
        node = self._tree.match(weights_id, tokens, max_tokens // self.page_tokens, owner)
        self._tree.lock(node)
        return Holding(owner, node, _path_pages(node))

    def grow(self, holding: Holding, pages: int, *, reserved: bool = False) -> bool:
        """Extend the table to `pages` pages, evicting from the tree if need be; False if there is no room.

        With `reserved` the new pages are destinations of a copy until `settle`.
        """
        count = pages - len(holding.table)
        if count <= 0:
            return True
        if count > self.available:
            return False
        if count > self._allocator.free:
            evicted = self._tree.evict(count - self._allocator.free)
            self.evicted_pages += self._allocator.give(evicted)
        taken = self._allocator.take(count)
        assert taken is not None, (count, self.counts)
        holding.table += taken
        if reserved:
            holding.reserved += count
            self._reserved += count
        else:
            self._private += count
        return True

    def settle(self, holding: Holding) -> None:
        """The copy into the reserved pages is over, whatever its outcome."""
        self._reserved -= holding.reserved
        self._private += holding.reserved
        holding.reserved = 0

    def commit(self, holding: Holding, tokens: Sequence[int], complete_tokens: int) -> None:
        """Put the whole pages of `tokens[:complete_tokens]`, whose KV is written, into the tree.

        Where the tree has such a page already the holding adopts it and its own one is freed.
        """
        assert holding.reserved == 0, "commit during a copy"
        first, end = holding.shared, complete_tokens // self.page_tokens
        assert end <= len(holding.table), (complete_tokens, len(holding.table))
        if end <= first:
            return
        own = holding.table[first:end]
        rest = tokens[first * self.page_tokens : end * self.page_tokens]
        node, kept = self._tree.insert(holding.node, rest, own, holding.owner)
        self._tree.lock(node)
        self._tree.unlock(holding.node)
        holding.node = node
        holding.table[first:end] = kept
        holding.shared = end
        self._private -= len(own)
        self._allocator.give(page for page, keep in zip(own, kept, strict=True) if page != keep)

    def close(self, holding: Holding, *, keep_exclusive: bool) -> FreedPages:
        """Give up a holding. Its own pages are freed, and unless `keep_exclusive` also those of the tree
        that no other trajectory ever used."""
        assert holding.reserved == 0, "close during a copy"
        free = self._allocator.free
        own = holding.table[holding.shared :]
        self._private -= len(own)
        self._allocator.give(own)
        self._tree.unlock(holding.node)
        exclusive = len(own) + sum(len(node.pages) for node in self._tree.exclusive(holding.node, holding.owner))
        if not keep_exclusive:
            self._allocator.give(self._tree.remove_exclusive(holding.node, holding.owner))
        holding.table = []
        holding.shared = 0
        return FreedPages(exclusive=exclusive, freed=self._allocator.free - free)

    def audit(self, holdings: Iterable[Holding]) -> None:
        """Recompute every counter from the structures; asserts with the numbers if one is wrong."""
        holdings = list(holdings)
        nodes = list(self._tree.nodes())
        in_tree = [page for node in nodes for page in node.pages]
        own = [page for holding in holdings for page in holding.table[holding.shared :]]
        reserved = sum(holding.reserved for holding in holdings)
        counts = self.counts
        assert (len(in_tree), len(own) - reserved, reserved) == (counts.tree, counts.private, counts.reserved), counts
        assert len(set(in_tree + own)) == len(in_tree) + len(own), "a page is held twice"
        assert set(in_tree + own) == self._allocator.owned(), "owned pages and held pages differ"
        assert counts.free + counts.tree + counts.private + counts.reserved == counts.total, counts
        locks = dict.fromkeys(nodes, 0)
        for holding in holdings:
            assert holding.table[: holding.shared] == _path_pages(holding.node), "table and tree path differ"
            for node in _path(holding.node):
                assert node in locks, "a holding's node is not in the tree"
                locks[node] += 1
        assert all(node.locks == count for node, count in locks.items()), "locks and holdings differ"
        assert self._tree.evictable == sum(len(node.pages) for node in nodes if not node.locks), counts


def _path(node: Node) -> list[Node]:
    """The nodes from `node` up to its root, which holds no pages."""
    path = [node]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path


def _path_pages(node: Node) -> list[int]:
    return [page for step in reversed(_path(node)) for page in step.pages]
