"""What the structures of a cache say of its pages, as claims that `contents` can check, and the rules they keep."""

from collections.abc import Sequence

from rollout.kv.cache import KVCache
from rollout.kv.kept import Kept
from rollout.kv.nodes import ID_BYTES, Node
from rollout.kv.radix import RadixTree
from rollout.kv.tiers import PageRef, Residency, Tier
from tests.kv.contents import Claim


def claims_of_pages(refs: Sequence[PageRef], weights_id: str, ids: bytes, page_tokens: int) -> list[Claim]:
    """The pages hold `ids` from the first on; pages beyond are not looked at."""
    size = page_tokens * ID_BYTES
    ends = range(size, len(ids) + size, size)
    assert len(refs) >= len(ends), (len(refs), len(ids))
    return [Claim(tier, page, weights_id, ids[:end]) for (tier, page), end in zip(refs, ends, strict=False)]


def claims_of_tree(tree: RadixTree, page_tokens: int) -> list[Claim]:
    """All that the tree has, in both tiers; asserts what its module promises of nodes."""
    claims: list[Claim] = []
    size = page_tokens * ID_BYTES
    for weights_id, root in tree._roots.items():
        stack: list[tuple[Node, bytes]] = [(root, b"")]
        while stack:
            node, above = stack.pop()
            _check_node(node, page_tokens)
            ids = above + node.edge
            ends = range(len(above) + size, len(ids) + size, size)
            for tier in Tier:
                claims += [
                    Claim(tier, page, weights_id, ids[:end])
                    for page, end in zip(node.at(tier).pages, ends, strict=False)
                ]
            stack += [(child, ids) for child in node.children.values()]
    return claims


def _check_node(node: Node, page_tokens: int) -> None:
    for first, child in node.children.items():
        assert child.parent is node
        assert child.edge[: page_tokens * ID_BYTES] == first
    counts = [len(node.device.pages), len(node.host.pages)]
    if node.parent is None:
        assert counts == [0, 0]
        return
    expected = len(node.edge) // (page_tokens * ID_BYTES)
    assert {*counts} <= {0, expected}, (counts, expected)
    residency = {(True, True): Residency.BOTH, (True, False): Residency.DEVICE, (False, True): Residency.HOST}
    assert node.residency is residency[counts[0] > 0, counts[1] > 0]
    above = node.parent
    if above.parent is not None:
        assert above.device.pages or not node.device.pages, "on the device below what is not"
        assert above.owner is None or above.owner == node.owner, "below what one trajectory owns is another's"


def claims_of_image(cache: KVCache, kept: Kept, ids: bytes, page_tokens: int) -> list[Claim]:
    """What an image has for sure: all of it where it is pinned or on the host, otherwise its tail."""
    tails = [(tier, page) for tier, pages in kept.tail.items() for page in pages if tier is not kept.moving_to]
    tail = [Claim(tier, page, kept.weights_id, ids) for tier, page in tails]
    whole = len(kept.key) // (page_tokens * ID_BYTES)
    assert kept.tokens // page_tokens == whole
    if kept.tier is Tier.HOST:
        assert Tier.HOST in kept.locked
        assert sum(len(node.host.pages) for node in kept.node.path()) == whole, "an image on the host is not there"
        assert bool(kept.tail) == bool(kept.tokens % page_tokens)
    if not kept.pinned:
        return tail
    refs = cache.kept.sources(kept)
    assert len(refs) == cache.pages_for(kept.tokens)
    return tail + claims_of_pages(refs[:whole], kept.weights_id, kept.key, page_tokens)
