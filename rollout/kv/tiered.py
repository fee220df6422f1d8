"""The prefix tree with the page numbers of both tiers: eviction, write policies, copies under way. Integers only.

Copies are plans (`take_copies`), executed elsewhere, their end told by `copied`. Of every copy:

    RESIDENT: nothing under way → COPYING: destination reserved, source locked → COPIED: indexed, unlocked
    → FREED: the source, where the move was exclusive; a failure returns to RESIDENT, the destination freed.

Whatever happens meanwhile to those who wanted a copy, only its end unlocks and frees what it used.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from rollout.config import NoWrites, WriteBack, WritePolicy, WriteThrough, WriteThroughSelective
from rollout.kv.nodes import Arriving, Node
from rollout.kv.pages import PageAllocator
from rollout.kv.radix import RadixTree
from rollout.kv.tiers import Copy, CopyId, Tier
from rollout.metrics import TierStats

Done = Callable[[CopyId, bool], None]
"""Is told whether a copy succeeded."""
EVICTED_PAGES = 16
"""Least pages of a long node that are evicted at once: page by page, each would become a node."""


@dataclass(slots=True, kw_only=True)
class TierCounts:
    """Of one tier, in pages."""

    private: int = 0
    """Owned by one sequence or image."""
    reserved: int = 0
    """Destinations of copies that are not complete."""
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    arrived: int = 0
    failed: int = 0


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A copy under way."""

    copy: Copy
    anchor: Node | None
    """Whose pages arrive; where it was split meanwhile, so do those of the nodes above it with the same copy."""
    leaves: bool
    """An eviction: the device pages are freed in the end."""
    done: list[Done]
    """Told of the outcome, once the tree is up to date."""


class TieredTree:
    """What the tree holds where. `tree` may be read, matched and locked; its pages change here only."""

    def __init__(self, tree: RadixTree, *, device_pages: int, host_pages: int, write: WritePolicy) -> None:
        self.tree = tree
        self.write_policy = write
        self.counts = {tier: TierCounts() for tier in Tier}
        self.leaving = 0
        """Device pages that become free when copies of evicted nodes are complete."""
        self.spare_pages: Callable[[int], int] = lambda _: 0
        """Last resort of `make_room`: frees up to so many device pages outside the tree; returns how many."""
        self._allocators = {Tier.DEVICE: PageAllocator(device_pages), Tier.HOST: PageAllocator(host_pages)}
        self._ids = itertools.count(1)
        self._planned: list[Copy] = []
        self._flights: dict[CopyId, _Flight] = {}

    def stats(self, tier: Tier) -> TierStats:
        counts = self.counts[tier]
        return TierStats(
            total=self.total(tier),
            free=self.free(tier),
            tree=self.tree.level(tier).pages,
            private=counts.private,
            reserved=counts.reserved,
            hits=counts.hits,
            misses=counts.misses,
            evicted=counts.evicted,
            arrived=counts.arrived,
            failed=counts.failed,
        )

    # Page numbers -------------------------------------------------------------------------------------

    def total(self, tier: Tier) -> int:
        return self._allocators[tier].total

    def free(self, tier: Tier) -> int:
        return self._allocators[tier].free

    def owned(self, tier: Tier) -> set[int]:
        return self._allocators[tier].owned()

    def take(self, tier: Tier, count: int) -> list[int]:
        """Pages that are known to be free."""
        pages = self._allocators[tier].take(count)
        assert pages is not None, (tier, count, self.free(tier))
        return pages

    def give(self, tier: Tier, pages: Iterable[int]) -> int:
        return self._allocators[tier].give(pages)

    @property
    def room_on_host(self) -> int:
        """Host pages that can be had at once."""
        return self.free(Tier.HOST) + self.tree.host.evictable

    def make_room(self, pages: int) -> bool:
        """Evict until `pages` device pages are free; False if some are locked, or being copied to the host."""
        short = pages - self.free(Tier.DEVICE) - self.leaving
        while short > 0 and (node := self.tree.pop_leaf(Tier.DEVICE, max(short, EVICTED_PAGES))) is not None:
            short -= self._evict(node)
        if short > 0:
            self.spare_pages(short)
        return self.free(Tier.DEVICE) >= pages

    def make_room_on_host(self, pages: int) -> bool:
        """Evict until `pages` host pages are free; False, and nothing is evicted, if so many cannot be had."""
        if self.room_on_host < pages:
            return False
        while (short := pages - self.free(Tier.HOST)) > 0:
            node = self.tree.pop_leaf(Tier.HOST, max(short, EVICTED_PAGES))
            assert node is not None, (pages, self.free(Tier.HOST), self.tree.host.evictable)
            self._drop(node, Tier.HOST)
        return True

    def _evict(self, node: Node) -> int:
        """A leaf leaves the device; returns how many pages that frees, perhaps after a copy."""
        count = len(node.device.pages)
        if not node.host.pages and isinstance(self.write_policy, WriteBack):
            room = min(self.room_on_host, count)
            if 0 < room < count:
                self.tree.split(node, room)
                count -= room
            elif room:
                self.write(node, leaves=True)
                return count
        if not node.host.pages:
            for step in reversed(list(_below(node))):  # out of reach from now on
                self._drop(step, Tier.HOST)
        self._drop(node, Tier.DEVICE)
        return count

    def _drop(self, node: Node, tier: Tier) -> None:
        pages = self.tree.displace(node, tier)
        self.counts[tier].evicted += self.give(tier, pages)

    def purge(self, weights_ids: Set[str]) -> bool:
        """Free all that weights other than these wrote, but for what is held; whether all of it is gone."""
        for node in self.tree.foreign(weights_ids):
            for tier in Tier:
                spot = node.at(tier)
                if (
                    spot.pages
                    and not spot.locks
                    and not spot.below
                    and (node.at(tier.other).pages or not node.children)
                ):
                    self._drop(node, tier)
        return self.tree.uproot(weights_ids)

    # Copies -------------------------------------------------------------------------------------------

    def write(self, node: Node, *, leaves: bool = False, done: Done | None = None) -> CopyId:
        """Copy a node's device pages to the host, for which there must be room."""
        self.tree.lock(node, Tier.DEVICE)
        roomy = self.make_room_on_host(len(node.device.pages))
        assert roomy, (len(node.device.pages), self.room_on_host)
        if leaves:
            self.leaving += len(node.device.pages)
        return self._fly(node, Tier.HOST, leaves=leaves, done=done)

    def load(self, node: Node, *, done: Done) -> CopyId:
        """Copy a node's host pages to the device, for which pages must be free.

        The nodes above are on the device or being loaded.
        """
        for tier in Tier:
            self.tree.lock(node, tier)
        return self._fly(node, Tier.DEVICE, leaves=False, done=done)

    def copy_pages(self, to: Tier, sources: Sequence[int], targets: Sequence[int], *, done: Done) -> CopyId:
        """Copy pages that are not in the tree; all are the caller's before and after."""
        copy = Copy(copy_id=self._next_id(), to=to, sources=tuple(sources), targets=tuple(targets))
        return self._plan(copy, done=done)

    def watch(self, copy_id: CopyId, done: Done) -> CopyId:
        """Be told of the end of a copy that is under way."""
        self._flights[copy_id].done.append(done)
        return copy_id

    def write_through(self, node: Node) -> None:
        """A node was committed or matched: copy its path to the host, as far as policy and room allow."""
        match self.write_policy:
            case WriteThrough():
                hits = 0
            case WriteThroughSelective(hits=hits):
                pass
            case WriteBack() | NoWrites():
                return
        if not self.total(Tier.HOST):
            return
        for step in node.path():
            if step.host.pages or step.arriving is not None or step.hits < hits:
                continue
            self.tree.lock(step, Tier.HOST)  # what is above stays
            room = min(self.room_on_host, len(step.device.pages))
            self.tree.unlock(step, Tier.HOST)
            if not room:
                return
            if room < len(step.device.pages):
                step = self.tree.split(step, room)
            self.tree.lock(step, Tier.HOST)
            self.write(step)
            self.tree.unlock(step, Tier.HOST)

    def take_copies(self) -> list[Copy]:
        """Copies that were planned since the last call, to be executed in any order."""
        copies, self._planned = self._planned, []
        return copies

    def copied(self, copy_id: CopyId, *, ok: bool) -> None:
        """A copy is complete, or it failed. A load is of use, and indexed, once that of what is above it is."""
        flight = self._flights[copy_id]
        if flight.anchor is not None:
            nodes = _arriving(flight.anchor, copy_id)
            above = nodes[-1].parent
            assert above is not None
            if flight.copy.to is Tier.DEVICE and above.parent is not None and not above.device.pages:
                if above.arriving is not None:
                    self.watch(above.arriving.copy_id, lambda _, also: self.copied(copy_id, ok=ok and also))
                    return
                ok = False
            self._land(flight, nodes, ok)
        else:
            counts, pages = self.counts[flight.copy.to], len(flight.copy.targets)
            counts.arrived += pages if ok else 0
            counts.failed += 0 if ok else pages
        del self._flights[copy_id]
        for done in flight.done:
            done(copy_id, ok)

    @property
    def flights(self) -> int:
        """Copies under way."""
        return len(self._flights)

    def locked(self, tier: Tier) -> Iterator[Node]:
        """The nodes that copies lock, once for each lock."""
        for flight in self._flights.values():
            if flight.anchor is not None and (tier is Tier.DEVICE or flight.copy.to is Tier.DEVICE):
                yield flight.anchor

    def audit(self) -> None:
        """Check that copies and nodes agree; asserts if they do not."""
        arriving = Counter(
            {
                copy_id: len(flight.copy.targets)
                for copy_id, flight in self._flights.items()
                if flight.anchor is not None
            }
        )
        found: Counter[CopyId] = Counter()
        for node in self.tree.nodes():
            if node.arriving is not None:
                assert len(node.arriving.pages) == len(node.at(node.arriving.to.other).pages), node.arriving.copy_id
                found[node.arriving.copy_id] += len(node.arriving.pages)
        assert found == arriving, (found, arriving)
        leaving = sum(len(flight.copy.targets) for flight in self._flights.values() if flight.leaves)
        assert self.leaving == leaving, (self.leaving, leaving)

    def _fly(self, node: Node, to: Tier, *, leaves: bool, done: Done | None) -> CopyId:
        assert node.arriving is None, "two copies of one node"
        sources = node.at(to.other).pages
        targets = self.take(to, len(sources))
        self.counts[to].reserved += len(targets)
        copy = Copy(copy_id=self._next_id(), to=to, sources=tuple(sources), targets=tuple(targets))
        node.arriving = Arriving(copy.copy_id, to, targets)
        return self._plan(copy, anchor=node, leaves=leaves, done=done)

    def _plan(
        self,
        copy: Copy,
        *,
        anchor: Node | None = None,
        leaves: bool = False,
        done: Done | None = None,
    ) -> CopyId:
        self._planned.append(copy)
        self._flights[copy.copy_id] = _Flight(
            copy=copy, anchor=anchor, leaves=leaves, done=[done] if done is not None else []
        )
        return copy.copy_id

    def _next_id(self) -> CopyId:
        return CopyId(next(self._ids))

    def _land(self, flight: _Flight, nodes: list[Node], ok: bool) -> None:
        to, count, anchor = flight.copy.to, len(flight.copy.targets), nodes[0]
        self.counts[to].reserved -= count
        for node in reversed(nodes):
            assert node.arriving is not None
            pages, node.arriving = node.arriving.pages, None
            if ok:
                self.tree.place(node, to, pages)
                self.counts[to].arrived += len(pages)
            else:
                self.counts[to].failed += self.give(to, pages)
        self.tree.unlock(anchor, Tier.DEVICE)
        if to is Tier.DEVICE:
            self.tree.unlock(anchor, Tier.HOST)
            if ok and isinstance(self.write_policy, WriteBack):
                self.leave(reversed(anchor.path()), Tier.HOST)
        elif flight.leaves:
            self.leaving -= count
            if ok:
                self.leave(nodes, Tier.DEVICE)

    def leave(self, nodes: Iterable[Node], tier: Tier) -> int:
        """Of a path, upwards, free pages of a tier that are in both and held by nobody; returns how many."""
        count = 0
        for node in nodes:
            spot = node.at(tier)
            if not node.at(tier.other).pages or not spot.pages or spot.locks or spot.below:
                break
            count += len(spot.pages)
            self.give(tier, self.tree.displace(node, tier))
        return count


def _arriving(anchor: Node, copy_id: CopyId) -> list[Node]:
    """The nodes to which a copy writes, lowest first."""
    nodes: list[Node] = []
    node: Node | None = anchor
    while node is not None and node.arriving is not None and node.arriving.copy_id == copy_id:
        nodes.append(node)
        node = node.parent
    return nodes


def _below(node: Node) -> Iterable[Node]:
    """All nodes below, parents first."""
    stack = list(node.children.values())
    while stack:
        step = stack.pop()
        yield step
        stack += step.children.values()
