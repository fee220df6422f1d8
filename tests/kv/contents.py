"""What pages must hold: KV that is a function of token, position, all that is before it, and the weights of each.

`Contents` is the model that caches are checked against: it knows nothing of pages but what their owner says.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.kv.chain import Chain
from rollout.kv.nodes import ID_BYTES
from rollout.kv.storage import KVStorage
from rollout.kv.tiers import Tier
from rollout.types import KVRun, TrajectoryId

LAYERS = 2
POISON = 0x5A
"""Every byte of a page that nobody owns."""
_FACTORS = np.array([[0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9], [0x94D049BB133111EB, 0xD6E8FEB86659FD93]], np.uint64)
Words = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Claim:
    """That the slots of a page, from its first on, hold the last positions of `ids` (as bytes), written by `runs`."""

    tier: Tier
    page: int
    runs: tuple[KVRun, ...]
    ids: bytes


class Contents:
    """The tensors of both tiers with a canary beside each, and what every page of them is said to hold."""

    def __init__(self, *, device_pages: int, host_pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.storage = KVStorage(
            pages=device_pages,
            host_pages=host_pages,
            layers=LAYERS,
            page_tokens=page_tokens,
            kv_heads=1,
            head_dim=1,
            dtype=torch.float32,
            device=torch.device("cpu"),
            canary=True,
        )
        assert self.storage.canaries is not None
        self.canaries = self.storage.canaries
        tensors = {Tier.DEVICE: self.storage.pages, Tier.HOST: self.storage.host_pages}
        self.words: dict[Tier, Words] = {tier: pages.view(torch.int32).numpy() for tier, pages in tensors.items()}
        """Of each tier `[pages, layers, 2, page_tokens, 1, 1]`."""
        self._owned = {tier: set(range(1, len(words))) for tier, words in self.words.items()}
        """As of the last look; at first all pages count, so that all are poisoned."""
        self._touched: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        """Written since then, and perhaps given back."""
        self._known: dict[tuple[tuple[KVRun, ...], bytes], tuple[NDArray[np.int64], Words]] = {}

    def of(self, runs: tuple[KVRun, ...], ids: bytes) -> tuple[NDArray[np.int64], Words]:
        """Chain values and KV `[layers, 2, tokens]` of the last page of a sequence that ends with `ids`."""
        known = self._known.get((runs, ids))
        if known is None:
            tokens = array("i", ids)
            chain = chain_of(tokens, runs)
            values = chain.values((len(tokens) - 1) // self.page_tokens * self.page_tokens, len(tokens))
            known = self._known[runs, ids] = values, kv_of(values)
        return known

    def write(self, table: Sequence[int], runs: tuple[KVRun, ...], tokens: Sequence[int], start: int) -> None:
        """A forward computes the KV of positions `start`… of `tokens` into the pages of `table`; those before it were
        written by `runs`, of which the last goes on."""
        positions = range(start, len(tokens))
        values = chain_of(tokens, runs).values(start, len(tokens))
        pages = [table[position // self.page_tokens] for position in positions]
        slots = [position % self.page_tokens for position in positions]
        self._touched[Tier.DEVICE].update(pages)
        self.words[Tier.DEVICE][pages, :, :, slots, 0, 0] = np.moveaxis(kv_of(values), -1, 0)
        self.canaries[Tier.DEVICE].written(torch.tensor(pages), torch.tensor(slots), values)

    def own(self, tier: Tier, owned: set[int]) -> None:
        """From now on these pages of a tier are somebody's; nobody may read or write the others."""
        if gone := (self._owned[tier] | self._touched[tier]) - owned:
            self.words[tier].view(np.uint8)[[*gone]] = POISON
        self._owned[tier], self._touched[tier] = owned, set()

    def check_free_pages(self) -> None:
        """Nobody wrote to what nobody owns."""
        for tier in Tier:
            free = [*set(range(1, len(self.words[tier]))) - self._owned[tier]]
            assert (self.words[tier].view(np.uint8)[free] == POISON).all(), f"a free page of {tier} is written"

    def verify(self, claims: Sequence[Claim]) -> None:
        """Check the bytes of every claimed slot, and what the canary of its tier says of them."""
        for tier in Tier:
            mine = [claim for claim in claims if claim.tier is tier]
            if mine:
                self._verify(tier, mine)

    def _verify(self, tier: Tier, claims: Sequence[Claim]) -> None:
        size = self.page_tokens * ID_BYTES
        whole = [claim for claim in claims if len(claim.ids) % size == 0]
        chains, tables = [], []
        if whole:
            expected = [self.of(claim.runs, claim.ids) for claim in whole]
            table = [claim.page for claim in whole]
            wrong = (self.words[tier][table, :, :, :, 0, 0] != np.array([kv for _, kv in expected])).any(axis=(1, 2, 3))
            assert not wrong.any(), [whole[index] for index in np.nonzero(wrong)[0]]
            chains.append(np.concatenate([chain for chain, _ in expected]))
            tables.append(table)
        for claim in claims:
            if len(claim.ids) % size:
                chain, kv = self.of(claim.runs, claim.ids)
                assert (self.words[tier][claim.page, :, :, : len(chain), 0, 0] == kv).all(), claim
                chains.append(chain)
                tables.append([claim.page])
        longest = max(map(len, tables))
        tables_SP = torch.tensor([[*table, *[0] * (longest - len(table))] for table in tables])
        keys = [(TrajectoryId(f"{tier} {index}"), 0) for index in range(len(tables))]
        self.canaries[tier].verify(keys, tables_SP, chains)


def chain_of(tokens: Sequence[int], runs: Sequence[KVRun]) -> Chain:
    """The chain of tokens whose KV these wrote, all of it."""
    chain = Chain()
    for run in runs:
        chain.extend(tokens[len(chain) : len(chain) + run.tokens], run.weights.weights_id)
    assert len(chain) == len(tokens), (len(chain), len(tokens))
    return chain


def kv_of(values: NDArray[np.int64]) -> Words:
    """KV of slots with these chain values, `[layers, 2, slots]`."""
    mixed = values.view(np.uint64)[None, None, :] * _FACTORS[:, :, None]
    return (mixed >> np.uint64(32)).astype(np.uint32).view(np.int32)
