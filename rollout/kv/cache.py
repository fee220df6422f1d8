"""Page tables of running sequences, on the pages and the prefix tree of one worker. Integers only.

A `Holding` is one sequence's page table: first device pages shared with the tree (locked there), then its
own. Conservation of each tier, after every operation: `free + tree + private + reserved = total`, where
reserved pages are destinations of a copy that is not complete. `audit` recomputes it from the structures.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from rollout.config import NoWrites, WritePolicy, WriteThroughSelective
from rollout.kv.holding import Holding
from rollout.kv.kept import Kept, KeptImages
from rollout.kv.nodes import ID_BYTES, Node
from rollout.kv.radix import RadixTree
from rollout.kv.tiered import TieredTree
from rollout.kv.tiers import CopyId, Tier
from rollout.metrics import TierStats
from rollout.types import TrajectoryId

NO_WRITES = NoWrites(kind="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What the tree has of a prefix, in pages: first on the device, then on the host."""

    device: int
    evictable: int
    """Of the device pages, those that `available` counts."""
    host: int
    arriving: bool
    """The next page after the device's is just being loaded for another sequence."""


class KVCache:
    """Page tables for sequences, images of stopped ones (`kept`), and what both share (`tiered`)."""

    def __init__(
        self,
        total_pages: int,
        page_tokens: int,
        *,
        host_pages: int = 0,
        write: WritePolicy = NO_WRITES,
        prefer_shared: bool = False,
    ) -> None:
        self.page_tokens = page_tokens
        self._tree = RadixTree(page_tokens, prefer_shared=prefer_shared)
        self.tiered = TieredTree(self._tree, device_pages=total_pages, host_pages=host_pages, write=write)
        self.kept = KeptImages(self.tiered, page_tokens)
        self._counts = self.tiered.counts[Tier.DEVICE]
        self._borrowed: dict[CopyId, list[int]] = {}
        """Host pages of tails that are being copied to holdings."""

    @property
    def total(self) -> int:
        """Device pages."""
        return self.tiered.total(Tier.DEVICE)

    @property
    def available(self) -> int:
        """Device pages that can be had, some of them after a copy: free, evictable, leaving, or spare tails."""
        return self.tiered.free(Tier.DEVICE) + self._tree.device.evictable + self.tiered.leaving + self.kept.spare

    @property
    def leaving(self) -> int:
        """Device pages that become free when copies to the host are complete."""
        return self.tiered.leaving

    def stats(self, tier: Tier = Tier.DEVICE) -> TierStats:
        return self.tiered.stats(tier)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def stored(self, weights_id: str, key: bytes, max_pages: int) -> Stored:
        """What the tree has of the first `max_pages` pages of `key`; changes nothing."""
        device = evictable = host = 0
        for node, pages in self._tree.find(weights_id, key, max_pages):
            if node.device.pages:
                device += pages
                evictable += 0 if node.device.locks else pages
            elif node.arriving is not None:
                return Stored(device=device, evictable=evictable, host=0, arriving=True)
            else:
                host += pages
        return Stored(device=device, evictable=evictable, host=host, arriving=False)

    def open(self, owner: TrajectoryId, weights_id: str, key: bytes, pages: int) -> Holding:
        """A holding of the first `pages` pages of `key`, or as many as the device has, locked."""
        node = self._tree.match(weights_id, key, pages, owner)
        while node.parent is not None and not node.device.pages:
            node = node.parent
        self._tree.lock(node, Tier.DEVICE)
        return Holding(owner, weights_id, node, _device_pages(node))

    def admitted(self, holding: Holding, found: Stored, wanted: int) -> None:
        """A sequence that looked for `wanted` pages goes on with its holding: that is a hit of all it has."""
        self._tree.hit(holding.node)
        if isinstance(self.tiered.write_policy, WriteThroughSelective) and not holding.loads:
            self.tiered.write_through(holding.node)
        device, host = (self.tiered.counts[tier] for tier in Tier)
        device.hits += found.device
        device.misses += wanted - found.device
        host.hits += found.host
        host.misses += wanted - found.device - found.host

    def make_room(self, pages: int) -> bool:
        """Evict until `pages` device pages are free; False if some are locked, or still being copied to the host."""
        return self.tiered.make_room(pages)

    def load(self, holding: Holding, key: bytes, pages: int, *, room: int) -> bool:
        """Continue the table up to page `pages` with copies of host pages.

        False, and nothing was done, if there are not `room` free pages now, of which this takes what it needs. To be
        called before it gets own pages. The copies are `holding.loads` until they are over; if one fails,
        the holding can only be closed.
        """
        assert len(holding.table) == holding.shared, "loading behind own pages"
        node = self._tree.match(holding.weights_id, key, pages, holding.owner)
        missing = [step for step in node.path() if not step.device.pages]
        count = sum(len(step.host.pages) for step in missing)
        assert len(holding.table) + count == pages, (len(holding.table), count, pages)
        self._tree.lock(node, Tier.HOST)
        assert count <= room, (count, room)
        if self.tiered.make_room(room):
            for step in missing:
                holding.loads.add(self.tiered.load(step, done=partial(self._landed, holding)))
                assert step.arriving is not None
                holding.append(step.arriving.pages)
            self._tree.lock(node, Tier.DEVICE)
            self._tree.unlock(holding.node, Tier.DEVICE)
            holding.node = node
            holding.shared = len(holding.table)
        self._tree.unlock(node, Tier.HOST)
        return len(holding.table) == pages

    def grow(self, holding: Holding, pages: int, *, reserved: bool = False) -> bool:
        """Extend the table to `pages` pages, evicting from the tree if need be; False if there is no room now.

        With `reserved` the new pages are destinations of a copy until `settle`.
        """
        count = pages - len(holding.table)
        if count <= 0:
            return True
        if count > self.tiered.free(Tier.DEVICE) and (count > self.available or not self.tiered.make_room(count)):
            return False
        holding.append(self.tiered.take(Tier.DEVICE, count))
        if reserved:
            holding.reserved += count
            self._counts.reserved += count
        else:
            self._counts.private += count
        return True

    def grow_each(self, holdings: Sequence[Holding]) -> bool:
        """One more page for each table, if so many are free; otherwise nothing is done."""
        if len(holdings) > self.tiered.free(Tier.DEVICE):
            return False
        for holding, page in zip(holdings, self.tiered.take(Tier.DEVICE, len(holdings)), strict=True):
            holding.append((page,))
        self._counts.private += len(holdings)
        return True

    def settle(self, holding: Holding) -> None:
        """The copies into the reserved pages are over, whatever their outcome."""
        self._counts.reserved -= holding.reserved
        self._counts.private += holding.reserved
        holding.reserved = 0

    def commit(self, holding: Holding, key: bytes, *, write: bool = True) -> None:
        """Put the whole pages of `key`, whose KV is written, into the tree.

        Where the tree has such a page already the holding adopts it and its own one is freed. Without `write`
        they are not copied to the host for that.
        """
        assert not holding.loads, "commit during a load"
        assert holding.reserved == 0, "commit during a copy"
        page_bytes = self.page_tokens * ID_BYTES
        first, end = holding.shared, len(key) // page_bytes
        assert end <= len(holding.table), (end, len(holding.table))
        if end <= first:
            return
        own = holding.table[first:end]
        node, kept = self._tree.insert(holding.node, key[first * page_bytes :], own, holding.owner)
        self._tree.lock(node, Tier.DEVICE)
        self._tree.unlock(holding.node, Tier.DEVICE)
        holding.node = node
        holding.replace(first, first + len(kept), kept)
        holding.shared = first + len(kept)
        self._counts.private -= len(kept)
        self.tiered.give(Tier.DEVICE, (mine for mine, page in zip(own, kept, strict=False) if mine != page))
        if write:
            self.tiered.write_through(node)

    def close(self, holding: Holding) -> None:
        """Give up a holding: its own pages are freed, those of the tree stay."""
        assert not holding.loads, "close during a load"
        assert holding.reserved == 0, "close during a copy"
        own = holding.table[holding.shared :]
        self._counts.private -= self.tiered.give(Tier.DEVICE, own)
        self._tree.unlock(holding.node, Tier.DEVICE)
        holding.clear()
        holding.shared = 0

    def park(self, holding: Holding, key: bytes, tokens: int) -> Kept:
        """Turn a holding into a pinned image of positions [0, tokens).

        `key` is the ids of the whole pages that one load of weights wrote; the others are the tail.
        """
        self.commit(holding, key, write=False)
        page_bytes = self.page_tokens * ID_BYTES
        assert len(key) // page_bytes <= tokens // self.page_tokens, (len(key), tokens)
        if holding.shared * page_bytes < len(key):  # another sequence is just loading the rest
            key = key[: holding.shared * page_bytes]
            tokens = holding.shared * self.page_tokens
        end = self.pages_for(tokens)
        rest, spare = holding.table[holding.shared : end], holding.table[end:]
        tail = {Tier.DEVICE: rest} if rest else {}
        self._counts.private -= self.tiered.give(Tier.DEVICE, spare)
        kept = Kept(
            owner=holding.owner, weights_id=holding.weights_id, key=key, tokens=tokens, node=holding.node, tail=tail
        )
        self.kept.add(kept)
        holding.clear()
        return kept

    def park_nothing(self, owner: TrajectoryId, weights_id: str) -> Kept:
        """The image of a sequence that has no pages."""
        root = self._tree.root(weights_id)
        self._tree.lock(root, Tier.DEVICE)
        kept = Kept(owner=owner, weights_id=weights_id, key=b"", tokens=0, node=root)
        self.kept.add(kept)
        return kept

    def adopt(self, kept: Kept, holding: Holding) -> None:
        """Continue a holding of all that the tree has of an image with its tail; the image is over then.

        A tail on the host needs free pages and becomes one of the holding's loads.
        """
        assert kept.tail, "an image without a tail"
        first = len(holding.table)
        assert first * self.page_tokens * ID_BYTES == len(kept.key), (first, len(kept.key))
        if Tier.HOST in kept.tail:
            grown = self.grow(holding, first + len(kept.tail[Tier.HOST]), reserved=True)
            assert grown, self.stats()
        tier, pages = self.kept.take_tail(kept)
        if tier is Tier.DEVICE:
            holding.append(pages)
            return

        def copied(copy_id: CopyId, ok: bool) -> None:
            freed = self.tiered.give(Tier.HOST, self._borrowed.pop(copy_id))
            self.tiered.counts[Tier.HOST].private -= freed
            self._landed(holding, copy_id, ok)

        copy_id = self.tiered.copy_pages(Tier.DEVICE, pages, holding.table[first:], done=copied)
        self._borrowed[copy_id] = pages
        holding.loads.add(copy_id)

    def _landed(self, holding: Holding, copy_id: CopyId, ok: bool) -> None:
        """A copy into a holding's pages is over. One that failed leaves the holding what is above."""
        holding.loads.discard(copy_id)
        if ok:
            return
        holding.load_failed = True
        path = holding.node.path()
        node = path[0].parent if path else holding.node
        assert node is not None
        for step in path:
            if not step.device.pages and step.arriving is None:
                break
            node = step
        self._tree.lock(node, Tier.DEVICE)
        self._tree.unlock(holding.node, Tier.DEVICE)
        shared = _device_pages(node)
        holding.replace(0, holding.shared, shared)
        holding.node, holding.shared = node, len(shared)

    def audit(self, holdings: Iterable[Holding]) -> None:
        """Recompute every counter from the structures; asserts with the numbers if one is wrong."""
        holdings = list(holdings)
        images = self.kept.images()
        nodes = list(self._tree.nodes())
        arriving = {
            tier: [n.arriving for n in nodes if n.arriving is not None and n.arriving.to is tier] for tier in Tier
        }
        own = [page for holding in holdings for page in holding.table[holding.shared :]]
        tails = {tier: [page for image in images for page in image.tail.get(tier, ())] for tier in Tier}
        moving = {tier: sum(len(each.tail[tier]) for each in images if tier is each.tail_to) for tier in Tier}
        borrowed = [page for pages in self._borrowed.values() for page in pages]
        for tier in Tier:
            counts = self.stats(tier)
            in_tree = [page for node in nodes for page in node.at(tier).pages]
            landing = [page for copy in arriving[tier] for page in copy.pages]
            reserved = sum(h.reserved for h in holdings) if tier is Tier.DEVICE else 0
            private = tails[tier] + (own if tier is Tier.DEVICE else borrowed)
            held = [*in_tree, *landing, *private]
            found = (len(in_tree), len(private) - reserved - moving[tier], len(landing) + reserved + moving[tier])
            assert found == (counts.tree, counts.private, counts.reserved), (tier, found, counts)
            assert len(set(held)) == len(held), f"a page is held twice on {tier}"
            assert set(held) == self.tiered.owned(tier), f"owned pages and held pages differ on {tier}"
            assert counts.free + counts.tree + counts.private + counts.reserved == counts.total, (tier, counts)
            level = self._tree.level(tier)
            unlocked = sum(len(node.at(tier).pages) for node in nodes if not node.at(tier).locks)
            assert level.evictable == unlocked, (tier, level.evictable, unlocked)
            locks = Counter(step for node in self.kept.locked(tier) for step in _up(node))
            locks += Counter(step for node in self.tiered.locked(tier) for step in _up(node))
            if tier is Tier.DEVICE:
                locks += Counter(step for holding in holdings for step in _up(holding.node))
            wrong = [(node.at(tier).locks, locks[node]) for node in nodes if node.at(tier).locks != locks[node]]
            assert not wrong, f"locks and those who hold them differ on {tier}: {wrong}"
            assert set(locks) <= set(nodes), f"a locked node is not in the tree on {tier}"
            below = Counter(node.parent for node in nodes if node.at(tier).pages)
            assert all(node.at(tier).below == below[node] for node in nodes), f"children miscounted on {tier}"
        for holding in holdings:
            assert holding.table[: holding.shared] == _device_pages(holding.node), "table and tree path differ"
        self.tiered.audit()


def _up(node: Node) -> list[Node]:
    """The node and those above, its root included."""
    path = [node]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path


def _device_pages(node: Node) -> list[int]:
    """Of a path, the device pages, those included that a copy is writing."""
    pages: list[int] = []
    for step in node.path():
        if step.device.pages:
            pages += step.device.pages
        else:
            assert step.arriving is not None
            pages += step.arriving.pages
    return pages
