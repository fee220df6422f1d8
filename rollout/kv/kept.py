"""Images of stopped sequences on their worker: whole pages in the prefix tree, the tail apart. Integers only.

The tail is the page that is not full, and all pages from the first one on that several weights wrote: the tree holds
chains of one load of weights only.

    pinned → on the device (evictable; the tail for a bounded time) | on the host (stays) | given up
    either of these → pinned again, to be exported or moved

An image moves between the tiers whole: it has moved when every copy is complete, and where one fails it is
where it was. What only its trajectory used is freed on the tier it leaves.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from rollout.kv.nodes import ID_BYTES, Node
from rollout.kv.tiered import TieredTree
from rollout.kv.tiers import CopyId, PageRef, Tier
from rollout.types import TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class FreedPages:
    """What giving up an image, or moving it to the host, freed on the device."""

    exclusive: int
    """Pages that only this trajectory used."""
    freed: int
    """Pages that became free."""


@dataclass(slots=True, kw_only=True, eq=False)
class Kept:
    """The KV of positions [0, tokens) of a sequence that stopped, those of `key` and of the tail."""

    owner: TrajectoryId
    weights_id: str
    """What wrote the whole pages in the tree."""
    key: bytes
    """Ids of these."""
    tokens: int
    node: Node
    """Where they end, as long as something is locked."""
    locked: set[Tier] = field(default_factory=lambda: {Tier.DEVICE})
    """Tiers in which `node` is locked for it: pinned for as long as the device is one."""
    tier: Tier = Tier.DEVICE
    tail: dict[Tier, list[int]] = field(default_factory=dict)
    """The pages that follow; in both tiers while they are copied."""
    tail_to: Tier | None = None
    """Where it is being copied to."""
    moving: set[CopyId] = field(default_factory=set)
    """Copies of a move that are not complete."""
    moving_to: Tier | None = None
    failed: bool = False
    """A copy of the last move failed."""
    expires_at: float = float("inf")
    """When the tail is freed if it is on the device and nobody came back for it."""

    @property
    def pinned(self) -> bool:
        return Tier.DEVICE in self.locked


class KeptImages:
    """All images of one worker."""

    def __init__(self, tiered: TieredTree, page_tokens: int) -> None:
        self._tiered = tiered
        self._tree = tiered.tree
        self._page_tokens = page_tokens
        self._images: dict[Kept, None] = {}
        self._spare: dict[Kept, int] = {}
        """Those whose tail `make_room` may take, oldest first, with the pages of that."""
        self.spare = 0
        """Device pages of tails that may be taken."""
        self._moved: list[Kept] = []
        tiered.spare_pages = self._free_spare

    def images(self) -> list[Kept]:
        return list(self._images)

    def locked(self, tier: Tier) -> Iterator[Node]:
        """The nodes that images lock, once for each lock."""
        return (kept.node for kept in self._images if tier in kept.locked)

    def add(self, kept: Kept) -> None:
        """A pinned image; its lock and its tail are its own from now on."""
        self._images[kept] = None

    def sources(self, kept: Kept) -> tuple[PageRef, ...]:
        """Where the pages of a pinned image are, in order."""
        assert kept.pinned, "what is not pinned may be evicted"
        refs: list[PageRef] = []
        for node in kept.node.path():
            tier = Tier.DEVICE if node.device.pages else Tier.HOST
            refs += [(tier, page) for page in node.at(tier).pages]
        tail = next(((tier, pages) for tier, pages in kept.tail.items()), (Tier.DEVICE, []))
        return (*refs, *((tail[0], page) for page in tail[1]))

    def unpin(self, kept: Kept, *, expires_at: float) -> None:
        """Leave an image where it is: what is on the device may be evicted, what is on the host stays.

        A tail on the device is freed at `expires_at`, or earlier if pages run out.
        """
        assert not kept.moving, "unpin during a move"
        if kept.tier is Tier.DEVICE:
            self._tiered.write_through(kept.node)
        self._unlock(kept, {Tier.DEVICE, Tier.HOST} if kept.tier is Tier.DEVICE else {Tier.DEVICE})
        kept.expires_at = expires_at
        if kept.tier is Tier.DEVICE and kept.tail:
            self._offer(kept)

    def pin(self, kept: Kept) -> None:
        """Lock what is left of an image; `tokens` and `key` are less than before if something was evicted."""
        if kept.pinned:
            return
        self._take_back(kept)
        whole = len(kept.key) // self._page_bytes
        self._unlock(kept, {Tier.HOST})
        kept.node = self._tree.match(kept.weights_id, kept.key, whole, kept.owner)
        self._lock(kept, {Tier.DEVICE, Tier.HOST})
        pages = sum(len(node.edge) for node in kept.node.path()) // self._page_bytes
        if pages < whole or not kept.tail:
            kept.tokens = pages * self._page_tokens
            kept.key = kept.key[: pages * self._page_bytes]
            self._free_tail(kept)

    def move(self, kept: Kept, to: Tier) -> bool:
        """Start to move a pinned image; `take_moved` tells when that is over. False if there is no room now."""
        assert kept.pinned, "a move of what may be evicted"
        assert not kept.moving, "a move during a move"
        kept.moving_to, kept.failed = to, False
        self._lock(kept, {Tier.HOST})
        missing = [node for node in kept.node.path() if not node.at(to).pages and node.arriving is None]
        count = sum(len(node.at(to.other).pages) for node in missing)
        tail = kept.tail.get(to.other, []) if to not in kept.tail else []
        need = count + len(tail)
        if not (self._tiered.make_room_on_host(need) if to is Tier.HOST else self._tiered.make_room(need)):
            kept.moving_to = None
            return False
        if tail:
            kept.tail_to = to
            kept.tail[to] = self._tiered.take(to, len(tail))
            self._tiered.counts[to].reserved += len(tail)
            kept.moving.add(self._tiered.copy_pages(to, tail, kept.tail[to], done=partial(self._tail_copied, kept)))
        landed = partial(self._landed, kept)

        for node in kept.node.path():
            if node.at(to).pages:
                continue
            if node.arriving is not None:
                if node.arriving.copy_id not in kept.moving:  # that of a node which was split
                    kept.moving.add(self._tiered.watch(node.arriving.copy_id, landed))
            else:
                start = self._tiered.write if to is Tier.HOST else self._tiered.load
                kept.moving.add(start(node, done=landed))
        if not kept.moving:
            self._moved.append(kept)
        return True

    def take_moved(self, *, expires_at: float) -> list[tuple[Kept, FreedPages]]:
        """Images whose move is over, settled in the tier they are in now, with what that freed on the device.

        A tail on the device is held until `expires_at`. `failed` says whether the move did.
        """
        moved, self._moved = self._moved, []
        return [(kept, self._settle(kept, expires_at)) for kept in moved]

    def drop(self, kept: Kept) -> FreedPages | None:
        """Free all that only this trajectory used; None, with the image pinned, if copies of that are under way."""
        if kept.moving:
            return None
        self.pin(kept)
        mine = next((node for node in kept.node.path() if node.owner == kept.owner), None)
        if mine is not None and any(node.arriving is not None for node in _subtree(mine)):
            return None
        free, node = self._tiered.free(Tier.DEVICE), kept.node
        exclusive = len(kept.tail.get(Tier.DEVICE, ()))
        self.forget(kept)
        for step in reversed(self._tree.exclusive(node, kept.owner)):
            exclusive += len(step.device.pages)
            for tier in Tier:
                if step.at(tier).pages:
                    self._tiered.give(tier, self._tree.displace(step, tier))
        return FreedPages(exclusive=exclusive, freed=self._tiered.free(Tier.DEVICE) - free)

    def hold_tail(self, kept: Kept, *, held: bool) -> None:
        """Whether `make_room` must spare the tail of an image that is kept on the device."""
        self._take_back(kept)
        if not (held or kept.pinned) and Tier.DEVICE in kept.tail:
            self._offer(kept)

    def take_tail(self, kept: Kept) -> tuple[Tier, list[int]]:
        """The tail becomes the caller's; the image is over."""
        ((tier, pages),) = kept.tail.items()
        kept.tail = {}
        self.forget(kept)
        return tier, pages

    def forget(self, kept: Kept) -> None:
        """The image is over; what it had in the tree stays there, to be used or evicted."""
        self._take_back(kept)
        self._free_tail(kept)
        self._unlock(kept, set(kept.locked))
        del self._images[kept]

    def expire(self, now: float) -> None:
        """Free the tails that were held long enough."""
        for kept in [kept for kept in self._spare if kept.expires_at <= now]:
            self._take_back(kept)
            self._free_tail(kept)

    # Moves --------------------------------------------------------------------------------------------

    def _landed(self, kept: Kept, copy_id: CopyId, ok: bool) -> None:
        kept.moving.discard(copy_id)
        kept.failed = kept.failed or not ok
        if not kept.moving:
            self._moved.append(kept)

    def _tail_copied(self, kept: Kept, copy_id: CopyId, ok: bool) -> None:
        to, kept.tail_to = kept.tail_to, None
        assert to is not None
        pages = len(kept.tail[to])
        self._tiered.counts[to].reserved -= pages
        self._tiered.counts[to].private += pages
        self._landed(kept, copy_id, ok)

    def _settle(self, kept: Kept, expires_at: float) -> FreedPages:
        to, kept.moving_to = kept.moving_to, None
        assert to is not None
        if not kept.failed:
            kept.tier = to
        free = self._tiered.free(Tier.DEVICE)
        exclusive = len(kept.tail.get(Tier.DEVICE, ())) if kept.tier is Tier.HOST else 0
        for tier in [tier for tier in kept.tail if tier is not kept.tier]:
            self._free_pages(tier, kept.tail.pop(tier))
        if kept.tier is Tier.DEVICE:
            self.unpin(kept, expires_at=expires_at)
            return FreedPages(exclusive=0, freed=0)
        self._unlock(kept, {Tier.DEVICE})
        path = reversed(kept.node.path())
        mine = [node for node in path if node.owner == kept.owner and not node.device.locks]
        exclusive += sum(len(node.device.pages) for node in mine)
        self._tiered.leave(mine, Tier.DEVICE)
        return FreedPages(exclusive=exclusive, freed=self._tiered.free(Tier.DEVICE) - free)

    # Locks and tails ----------------------------------------------------------------------------------

    @property
    def _page_bytes(self) -> int:
        return self._page_tokens * ID_BYTES

    def _lock(self, kept: Kept, tiers: set[Tier]) -> None:
        for tier in tiers - kept.locked:
            self._tree.lock(kept.node, tier)
        kept.locked |= tiers

    def _unlock(self, kept: Kept, tiers: set[Tier]) -> None:
        for tier in tiers & kept.locked:
            self._tree.unlock(kept.node, tier)
        kept.locked -= tiers

    def _offer(self, kept: Kept) -> None:
        self._take_back(kept)
        self._spare[kept] = len(kept.tail[Tier.DEVICE])
        self.spare += self._spare[kept]

    def _take_back(self, kept: Kept) -> None:
        self.spare -= self._spare.pop(kept, 0)

    def _free_spare(self, count: int) -> int:
        before = self.spare
        while self._spare and before - self.spare < count:
            kept = next(iter(self._spare))
            self._take_back(kept)
            self._free_tail(kept)
        return before - self.spare

    def _free_tail(self, kept: Kept) -> None:
        for tier, pages in kept.tail.items():
            self._free_pages(tier, pages)
        kept.tail = {}

    def _free_pages(self, tier: Tier, pages: list[int]) -> None:
        self._tiered.counts[tier].private -= self._tiered.give(tier, pages)


def _subtree(node: Node) -> Iterator[Node]:
    """A node and all below, parents first."""
    stack = [node]
    while stack:
        node = stack.pop()
        stack += node.children.values()
        yield node
