"""Caches whose copies are plans only, with sequences of known tokens."""

from rollout.config import NoWrites, WriteBack, WritePolicy, WriteThrough, WriteThroughSelective
from rollout.kv.cache import KVCache, Stored
from rollout.kv.holding import Holding
from rollout.kv.kept import FreedPages, Kept
from rollout.kv.nodes import Node, edge_bytes
from rollout.kv.tiers import Copy, Residency, Tier
from rollout.types import TrajectoryId

PAGE = 4
ANN, BOB, EVE = TrajectoryId("ann"), TrajectoryId("bob"), TrajectoryId("eve")
TOKENS = tuple(range(100, 140))
OTHERS = tuple(range(200, 240))

FOREVER = float("inf")
NONE = NoWrites(kind="none")
THROUGH = WriteThrough(kind="write_through")
BACK = WriteBack(kind="write_back")


def selective(hits: int) -> WritePolicy:
    return WriteThroughSelective(kind="write_through_selective", hits=hits)


def key(tokens: tuple[int, ...], count: int) -> bytes:
    """The whole pages of the first `count` tokens."""
    return edge_bytes(tokens[: count // PAGE * PAGE])


def stored(cache: KVCache, tokens: tuple[int, ...] = TOKENS, pages: int | None = None, weights_id: str = "w") -> Stored:
    pages = len(tokens) // PAGE if pages is None else pages
    return cache.stored(weights_id, key(tokens, pages * PAGE), pages)


def open_up_to(cache: KVCache, owner: TrajectoryId, tokens: tuple[int, ...], pages: int) -> Holding:
    return cache.open(owner, "w", key(tokens, pages * PAGE), pages)


def filled(
    cache: KVCache, owner: TrajectoryId, count: int, tokens: tuple[int, ...] = TOKENS, *, write: bool = True
) -> Holding:
    """A holding of the first `count` tokens, its whole pages in the tree."""
    holding = open_up_to(cache, owner, tokens, count // PAGE)
    assert cache.grow(holding, cache.pages_for(count))
    cache.commit(holding, key(tokens, count), write=write)
    return holding


def left(cache: KVCache, owner: TrajectoryId, count: int, tokens: tuple[int, ...] = TOKENS) -> None:
    """What a sequence of `count` tokens leaves in the tree when it is over."""
    cache.close(filled(cache, owner, count, tokens))


def parked(cache: KVCache, owner: TrajectoryId, count: int, tokens: tuple[int, ...] = TOKENS) -> Kept:
    return cache.park(filled(cache, owner, count, tokens), key(tokens, count), count)


def land(cache: KVCache, *, ok: bool = True) -> list[Copy]:
    """All copies come to their end, those that this starts, too."""
    landed: list[Copy] = []
    while copies := cache.tiered.take_copies():
        for copy in copies:
            cache.tiered.copied(copy.copy_id, ok=ok)
        landed += copies
    return landed


def on_host(cache: KVCache, owner: TrajectoryId, count: int, tokens: tuple[int, ...] = TOKENS) -> None:
    """Whole pages of `count` tokens end up on the host only, with write_through or write_back."""
    left(cache, owner, count, tokens)
    land(cache)
    evict_all(cache)


def evict_all(cache: KVCache) -> None:
    """Everything that may leaves the device."""
    for _ in range(2):
        cache.make_room(cache.available)
        land(cache)


def moved(cache: KVCache, kept: Kept, to: Tier, *, ok: bool = True) -> FreedPages:
    """Move an image, with all its copies succeeding or failing."""
    cache.kept.pin(kept)
    assert cache.kept.move(kept, to)
    land(cache, ok=ok)
    ((image, freed),) = cache.kept.take_moved(expires_at=FOREVER)
    assert image is kept
    assert kept.failed != ok
    return freed


def host_image(cache: KVCache, count: int = 10) -> Kept:
    kept = parked(cache, ANN, count)
    moved(cache, kept, Tier.HOST)
    return kept


def residencies(cache: KVCache, tokens: tuple[int, ...] = TOKENS) -> list[tuple[Residency, int]]:
    """Along a sequence, the nodes' residencies and pages."""
    count = len(tokens) // PAGE
    nodes: list[Node] = [node for node, _ in cache._tree.find("w", key(tokens, len(tokens)), count)]
    return [(node.residency, max(len(node.device.pages), len(node.host.pages))) for node in nodes]


def counts(cache: KVCache, tier: Tier) -> tuple[int, int, int, int]:
    """Free, in the tree, private, reserved."""
    stats = cache.stats(tier)
    return stats.free, stats.tree, stats.private, stats.reserved
