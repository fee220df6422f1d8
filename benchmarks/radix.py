"""How fast the prefix tree finds, takes in and gives up long keys, against one dict lookup for each page's hash.

`trunks` keys of `key_tokens` tokens are inserted, then short branches off them at random pages until the tree has
`nodes` nodes, as groups and multi-turn prompts make them; `results.*.path_nodes` is what a match then goes
through. `match`: the longest prefix of a trunk, from token ids in an array to the last node. `insert`: a trunk that
is not there. `evict`: as many pages as a trunk has, least recently used first. `dict`: one lookup for each of the
trunk's page hashes, made before, in a dict of as many entries as the tree has pages; interleaved with `match`.
`results.match_10k_ms` and `ratios.match_vs_dict` are the worst of all sizes. `worst`: the same match where every
page of the trunk is a node of its own.
"""

import gc
import hashlib
import itertools
import random
from array import array
from functools import partial
from statistics import median
from typing import Any

from pydantic import PositiveInt

from benchmarks.measure import Repeats, in_ms, interleaved, timed
from rollout.config import Section
from rollout.kv.nodes import Node, edge_bytes
from rollout.kv.radix import RadixTree
from rollout.kv.tiers import Tier
from rollout.types import TrajectoryId

WEIGHTS = "weights"
OWNER = TrajectoryId("owner")


class Settings(Section):
    nodes: tuple[PositiveInt, ...] = (10_000, 1_000_000)
    """Sizes of the tree."""
    page_tokens: PositiveInt = 16
    """Tokens in a page."""
    key_tokens: PositiveInt = 10_000
    """Tokens in a key."""
    trunk_share: float = 0.03
    """Trunks for each node: about as many branches hang off each as its inverse."""
    most_trunks: PositiveInt = 5_000
    """Bounds the memory: each is a key of its own."""
    repeats: Repeats = 25
    """Measurements of each kind."""


class Grown:
    """A tree of a size, with the keys it was grown from."""

    def __init__(self, settings: Settings, nodes: int) -> None:
        self._random = random.Random(nodes)
        self._settings = settings
        self._next_page = 1
        self.tree = RadixTree(settings.page_tokens)
        count = min(settings.most_trunks, max(1, int(nodes * settings.trunk_share)))
        self.trunks = [self.key() for _ in range(count)]
        for trunk in self.trunks:
            self.insert(trunk)
        made = len(self.trunks)
        edges = [edge_bytes(trunk) for trunk in self.trunks]
        gc.disable()  # it would look through all nodes again and again
        while made < nodes:
            self.branch(self._random.choice(edges), self._random.randrange(self.pages))
            made += 2  # the branch, and the half that it cuts off, but where one was cut off before
        gc.enable()
        self.nodes = sum(1 for _ in self.tree.nodes())

    @property
    def pages(self) -> int:
        return self._settings.key_tokens // self._settings.page_tokens

    def key(self) -> "array[int]":
        return array("i", self._random.choices(range(100_000), k=self.pages * self._settings.page_tokens))

    def insert(self, key: "array[int]") -> None:
        pages = len(key) // self._settings.page_tokens
        self.tree.insert(self.tree.root(WEIGHTS), edge_bytes(key), self._take(pages), OWNER)

    def branch(self, trunk: bytes, page: int) -> None:
        """One page that differs from page `page` of a trunk."""
        node = self.tree.match(WEIGHTS, trunk, page, OWNER)
        branch = array("i", self._random.choices(range(100_000), k=self._settings.page_tokens))
        self.tree.insert(node, edge_bytes(branch), self._take(1), OWNER)

    def match(self, key: "array[int]") -> Node:
        return self.tree.match(WEIGHTS, edge_bytes(key), self.pages, OWNER)

    def evict(self) -> None:
        left = self.pages
        while left > 0:
            node = self.tree.pop_leaf(Tier.DEVICE, left)
            assert node is not None
            left -= len(self.tree.displace(node, Tier.DEVICE))

    def _take(self, count: int) -> list[int]:
        self._next_page += count
        return list(range(self._next_page - count, self._next_page))


def run(settings: Settings) -> tuple[dict[str, Any], dict[str, float]]:
    results: dict[str, Any] = {}
    for nodes in settings.nodes:
        results[f"nodes_{nodes}"] = _measure(settings, nodes)
    sizes = [dict(result) for result in results.values()]
    results["match_10k_ms"] = max(size["match_ms"] for size in sizes)
    ratios = {
        "match_vs_dict": max(size["match_ms"] / size["dict_ms"] for size in sizes),
        "worst_match_vs_dict": max(size["worst_match_ms"] / size["dict_ms"] for size in sizes),
    }
    return results, ratios


def _measure(settings: Settings, nodes: int) -> dict[str, Any]:
    grown = Grown(settings, nodes)
    hashes = [_hashes(trunk, settings.page_tokens) for trunk in grown.trunks[: settings.repeats]]
    known = {digest: page for page, digest in enumerate(digest for trunk in hashes for digest in trunk)}
    known |= {hashlib.blake2b(str(i).encode(), digest_size=16).digest(): i for i in range(grown.tree.device.pages)}
    turns = itertools.count()

    def match() -> float:
        trunk = grown.trunks[next(turns) % len(hashes)]
        return timed(lambda: grown.match(trunk))

    def look_up() -> float:
        digests = hashes[next(turns) % len(hashes)]
        return timed(lambda: [known[digest] for digest in digests])

    ours = interleaved({"match": match, "dict": look_up}, settings.repeats)
    paths = [len(grown.match(trunk).path()) for trunk in grown.trunks[: settings.repeats]]
    fresh = [grown.key() for _ in range(settings.repeats)]
    inserts = [timed(partial(grown.insert, key)) for key in fresh]
    evictions = [timed(grown.evict) for _ in range(settings.repeats)]
    worst = grown.key()
    grown.insert(worst)
    for page in range(grown.pages):
        grown.branch(edge_bytes(worst), page)
    splits = [timed(partial(grown.match, worst)) for _ in range(settings.repeats)]
    return {
        "nodes": grown.nodes,
        "path_nodes": median(paths),
        **in_ms({side: median(seconds) for side, seconds in ours.items()}),
        **in_ms({"insert": median(inserts), "evict": median(evictions), "worst_match": median(splits)}),
    }


def _hashes(key: "array[int]", page_tokens: int) -> list[bytes]:
    """A hash chain over the pages, as caches that are keyed by page hash use."""
    digests: list[bytes] = []
    parent = b""
    for start in range(0, len(key), page_tokens):
        page = key[start : start + page_tokens].tobytes()
        parent = hashlib.blake2b(parent + page, digest_size=16).digest()
        digests.append(parent)
    return digests
