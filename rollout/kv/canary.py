"""The canary: beside every slot a shadow of what it must hold, compared before every forward that reads it.

A `Canary` shadows the pages of one tier. The shadow of a slot is two int64: the chain value (`kv.chain`: token,
position, previous value, weights_id) of the position it was written for, and a mix of its KV bytes over all
layers. It is for tests and for hunting a fault: a verification reads all KV of the batch.

1. The shadow changes only next to the bytes: `written` after a forward, `copy` and `put` with a copy.
2. A position with KV is at its place in the page table: that slot's chain value is the position's, and the slot's
   bytes mix to the slot's value. Slots without a position are never looked at.
3. A mix depends on the bytes and their place in the slot only, so shadows travel between tiers and workers.
4. Page 0 is scratch: padding rows write there, and no table names it.

Shape letters: T rows written, U pages mixed, N positions verified, S sequences, P pages of the longest one.
"""

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.errors import CanaryError
from rollout.kv.chain import ChainValues
from rollout.types import SequenceKey

CHAIN, MIX = 0, 1
"""The two values of a slot's shadow."""
SLOT_BYTES = 16
"""Shadow of one slot, as it travels in a manifest: two little-endian int64."""
WORDS_AT_ONCE = 1 << 22
"""Elements that are widened to int64 together; bounds the memory that mixing takes."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class Difference(StrEnum):
    """What is not as it must be."""

    TABLE_ROW = "table row"
    """The page table names a slot that was written for something else, or no slot at all."""
    PAGE_BYTES = "page bytes"
    """The slot was written for this position, but its bytes changed since."""
    SEGMENT = "segment"
    """What was restored is KV of something else."""


class Canary:
    """The shadow of the pages of one tier, `[pages, layers, 2, page_tokens, kv_heads, head_dim]`."""

    def __init__(self, pages: Tensor) -> None:
        """Nothing in `pages`, which is kept and read, counts as written."""
        count, layers, kv, self._page_tokens, heads, dim = pages.shape
        self._words = pages.view(_WORDS[pages.element_size()])
        self._factors = _factors(layers * kv * heads * dim).view(layers, kv, 1, heads, dim).to(pages.device)
        shape = (count, self._page_tokens, 2)
        self._shadow = torch.zeros(shape, dtype=torch.int64, device=pages.device, pin_memory=pages.is_pinned())

    def written(self, pages_T: Tensor, slots_T: Tensor, chain: ChainValues) -> None:
        """A forward wrote these slots, the first of them for positions of these chain values; the rest is padding."""
        rows = len(chain)
        assert rows <= len(pages_T) == len(slots_T), (rows, len(pages_T), len(slots_T))
        pages_T, slots_T = pages_T[:rows], slots_T[:rows]
        pages_U, place_T = torch.unique(pages_T, return_inverse=True)
        chain_T = torch.from_numpy(chain.copy()).to(self._shadow.device)
        self._shadow[pages_T, slots_T] = torch.stack((chain_T, self._mixes(pages_U)[place_T, slots_T]), dim=-1)

    def copy(self, pages: Sequence[int], target: "Canary", target_pages: Sequence[int]) -> None:
        """The bytes of whole pages are copied to pages of `target`, a tier's or another's, in this order.

        Ordered with CUDA's current stream like the copy of the bytes must be.
        """
        for page, target_page in zip(pages, target_pages, strict=True):
            target._shadow[target_page].copy_(self._shadow[page], non_blocking=True)

    def take(self, pages: Sequence[int], tokens: int) -> bytes:
        """The shadow of the first `tokens` slots of `pages`, for the manifest of a segment made of them."""
        assert self._fit(pages, tokens), (len(pages), tokens)
        values = np.concatenate([self._shadow[page].cpu().numpy() for page in pages])
        return values[:tokens].astype("<i8").tobytes()

    def put(self, pages: Sequence[int], tokens: int, shadow: bytes, *, first: int = 0) -> None:
        """Pages `first`… of the segment that `shadow` was taken for, `tokens` tokens, were scattered into `pages`.

        What it says is believed until `verify_restored`. Raises `CanaryError` if it is of fewer tokens.
        """
        assert self._fit(pages, tokens), (len(pages), tokens)
        start = first * self._page_tokens
        if len(shadow) < (start + tokens) * SLOT_BYTES:
            raise CanaryError(
                f"shadow of {len(shadow)} bytes, expected {SLOT_BYTES} for each of {start + tokens} tokens",
                what=Difference.SEGMENT,
            )
        values = np.frombuffer(shadow, dtype="<i8", count=2 * tokens, offset=start * SLOT_BYTES)
        rows = values.astype(np.int64).reshape(tokens, 2)
        for index, page in enumerate(pages):
            part = rows[index * self._page_tokens : (index + 1) * self._page_tokens]
            self._shadow[page, : len(part)].copy_(torch.from_numpy(part))

    def verify(self, keys: Sequence[SequenceKey], tables_SP: Tensor, chains: Sequence[ChainValues]) -> None:
        """Check all that a forward is about to read: for each sequence the positions that have KV, [0, len(chain)).

        `tables_SP` is the table that attention will use; rows past the sequences are padding. Raises `CanaryError`.
        """
        tables = tables_SP.tolist()
        assert len(tables) >= len(keys), (len(tables), len(keys))
        self._verify(keys, tables[: len(keys)], chains, 0, Difference.TABLE_ROW)

    def verify_restored(self, key: SequenceKey, pages: Sequence[int], chain: ChainValues, *, start: int) -> None:
        """Check pages that were restored, and `put`, for positions `start`… of a sequence. Raises `CanaryError`."""
        self._verify([key], [pages], [chain], start, Difference.SEGMENT)

    def _verify(
        self,
        keys: Sequence[SequenceKey],
        tables: Sequence[Sequence[int]],
        chains: Sequence[ChainValues],
        start: int,
        foreign: Difference,
    ) -> None:
        """Compare slot by slot; `foreign` is what to call a slot that was written for something else."""
        places = [
            self._places(key, table, len(chain), start) for key, table, chain in zip(keys, tables, chains, strict=True)
        ]
        if not any(len(chain) for chain in chains):
            return
        device = self._shadow.device
        pages_N, slots_N = (torch.from_numpy(column).to(device) for column in np.concatenate(places, axis=1))
        expected_N = torch.from_numpy(np.concatenate(chains)).to(device)
        pages_U, place_N = torch.unique(pages_N, return_inverse=True)
        shadow_N2 = self._shadow[pages_N, slots_N]
        foreign_N = shadow_N2[:, CHAIN] != expected_N
        damaged_N = shadow_N2[:, MIX] != self._mixes(pages_U)[place_N, slots_N]
        wrong = torch.nonzero(foreign_N | damaged_N)
        if not len(wrong):
            return
        row = int(wrong[0])
        ends = np.cumsum([len(chain) for chain in chains])
        index = int(np.searchsorted(ends, row, side="right"))
        position = start + row - int(ends[index]) + len(chains[index])
        what = foreign if foreign_N[row] else Difference.PAGE_BYTES
        found = int(shadow_N2[row, CHAIN])
        detail = {
            Difference.TABLE_ROW: f"the slot was written for chain value {found:#x}, not {int(expected_N[row]):#x}",
            Difference.SEGMENT: f"the segment holds chain value {found:#x}, not {int(expected_N[row]):#x}",
            Difference.PAGE_BYTES: "its bytes are not those that were written",
        }[what]
        raise _error(keys[index], position, int(pages_N[row]), int(slots_N[row]), what, detail, len(wrong))

    def _places(self, key: SequenceKey, table: Sequence[int], tokens: int, start: int) -> NDArray[np.int64]:
        """Page and slot of each of `tokens` positions, [2, tokens], of a table that begins at position `start`."""
        needed = -(-tokens // self._page_tokens)
        last = len(self._shadow) - 1
        for index in range(needed):
            if index >= len(table) or not 0 < table[index] <= last:
                page = table[index] if index < len(table) else 0
                detail = f"allowed: pages 1 … {last}, {needed} of them; the table has {len(table)}"
                raise _error(key, start + index * self._page_tokens, page, 0, Difference.TABLE_ROW, detail, 1)
        pages = np.repeat(np.array(table[:needed], dtype=np.int64), self._page_tokens)
        slots = np.tile(np.arange(self._page_tokens), needed)
        return np.stack((pages, slots))[:, :tokens]

    def _fit(self, pages: Sequence[int], tokens: int) -> bool:
        return (len(pages) - 1) * self._page_tokens < tokens <= len(pages) * self._page_tokens

    def _mixes(self, pages_U: Tensor) -> Tensor:
        """A mix of the bytes of each slot of `pages_U`, `[U, page_tokens]`: a wrapping sum of its elements as
        integers, each times the odd factor of its place, so a change of a single element is never missed."""
        mixes = torch.empty((len(pages_U), self._page_tokens), dtype=torch.int64, device=self._shadow.device)
        step = max(1, WORDS_AT_ONCE // self._words[0].numel())
        for first in range(0, len(pages_U), step):
            words = self._words[pages_U[first : first + step]].to(torch.int64)
            mixes[first : first + step] = words.mul_(self._factors).sum(dim=(1, 2, 4, 5))
        return mixes


def _factors(count: int) -> Tensor:
    """Odd 64-bit numbers, the same in every process: SplitMix64 (Steele et al., 2014) of 1, 2, …"""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64))


def _error(
    key: SequenceKey, position: int, page: int, slot: int, what: Difference, detail: str, wrong: int
) -> CanaryError:
    return CanaryError(
        f"{what} of sequence {key}, position {position}, page {page}, slot {slot}: {detail} ({wrong} positions differ)",
        sequence=key,
        position=position,
        page=page,
        slot=slot,
        what=what,
    )
