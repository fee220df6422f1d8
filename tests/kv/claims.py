"""What the structures of a cache say of its pages, as claims that `contents` can check, and the rules they keep."""

from collections.abc import Sequence

from rollout.kv.cache import KVCache
from rollout.kv.kept import Kept
from rollout.kv.nodes import ID_BYTES, Node
from rollout.kv.radix import RadixTree
from rollout.kv.tiers import PageRef, Residency, Tier
from rollout.types import KVRun, Version, Weights, WeightsId, first_tokens
from tests.kv.contents import Claim


def claims_of_pages(
    refs: Sequence[PageRef], runs: tuple[KVRun, ...], ids: bytes, page_tokens: int, *, first: int = 0
) -> list[Claim]:
    """The pages hold `ids`, from page `first` on, as `runs` wrote them; pages beyond are not looked at."""
    size = page_tokens * ID_BYTES
    ends = [min(end, len(ids)) for end in range(size, len(ids) + size, size)][first:]
    assert len(refs) >= len(ends), (len(refs), len(ids))
    return [
        Claim(tier, page, first_tokens(runs, end // ID_BYTES), ids[:end])
        for (tier, page), end in zip(refs, ends, strict=False)
    ]


def weights_of(weights_id: str) -> Weights:
    """As all here are labelled."""
    return Weights(WeightsId(weights_id), Version(0))


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
                    Claim(tier, page, (KVRun(weights_of(weights_id), end // ID_BYTES),), ids[:end])
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


def claims_of_image(cache: KVCache, kept: Kept, runs: tuple[KVRun, ...], ids: bytes, page_tokens: int) -> list[Claim]:
    """What an image has for sure: all of it where it is pinned or on the host, otherwise its tail."""
    whole = len(kept.key) // (page_tokens * ID_BYTES)
    assert whole <= kept.tokens // page_tokens
    assert len(first_tokens(runs, whole * page_tokens)) <= 1, "several weights wrote what is in the tree"
    assert all(run.weights.weights_id == kept.weights_id for run in first_tokens(runs, whole * page_tokens))
    tail: list[Claim] = []
    for tier, pages in kept.tail.items():
        assert len(pages) == cache.pages_for(kept.tokens) - whole > 0
        if tier is not kept.moving_to:
            tail += claims_of_pages([(tier, page) for page in pages], runs, ids, page_tokens, first=whole)
    if kept.tier is Tier.HOST:
        assert Tier.HOST in kept.locked
        assert sum(len(node.host.pages) for node in kept.node.path()) == whole, "an image on the host is not there"
        assert bool(kept.tail) == (kept.tokens > whole * page_tokens)
    if not kept.pinned:
        return tail
    refs = cache.kept.sources(kept)
    assert len(refs) == cache.pages_for(kept.tokens)
    return tail + claims_of_pages(refs, runs, ids, page_tokens)
