"""Plans as tensors: token ids, positions, page tables and write slots for one forward.

Padding rows have token 0, position 0, an empty context, and write to scratch page 0.
Shape letters: T rows of a prefill, B rows of a decode step, S sequences, P pages of the longest one.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.attention.interface import DecodeBatch, PrefillBatch
from rollout.engine.scheduler import Chunk
from rollout.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Input of the decoder, int64, and the batch that its attention works on."""

    ids_T: Tensor
    positions_T: Tensor
    attention: PrefillBatch | DecodeBatch


def prefill_forward(chunks: Seq[Chunk], *, rows: int | None, page_tokens: int, device: torch.device) -> Forward:
    """One forward over `chunks`, padded to `rows` rows if given."""
    queries = tuple(chunk.end - chunk.start for chunk in chunks)
    keys = tuple(chunk.end for chunk in chunks)
    filled = sum(queries)
    total = rows or filled
    assert total >= filled, (rows, filled)
    tables_SP = _tables([chunk.sequence.pages.packed for chunk in chunks], -(-np.array(keys) // page_tokens), len(keys))
    ids_T, positions_T, pages_T = (np.zeros(total, dtype=np.int64) for _ in range(3))
    slots_T = np.arange(total) - filled
    first = 0
    for chunk, table_P in zip(chunks, tables_SP, strict=True):
        last = first + chunk.end - chunk.start
        ids_T[first:last] = chunk.sequence.tokens[chunk.start : chunk.end]
        positions_T[first:last] = np.arange(chunk.start, chunk.end)
        pages_T[first:last] = table_P[positions_T[first:last] // page_tokens]
        first = last
    slots_T[:filled] = positions_T[:filled]
    return Forward(
        ids_T=_to(ids_T, device),
        positions_T=_to(positions_T, device),
        attention=PrefillBatch(
            tables_SP=_to(tables_SP, device),
            cu_queries=_to(_offsets(queries), device),
            cu_keys=_to(_offsets(keys), device),
            query_lengths=queries,
            key_lengths=keys,
            write_pages_T=_to(pages_T, device),
            write_slots_T=_to(slots_T % page_tokens, device),
        ),
    )


def decode_forward(sequences: Seq[Sequence], *, rows: int | None, page_tokens: int, device: torch.device) -> Forward:
    """One forward that feeds the next token of each sequence, padded to `rows` rows if given."""
    filled = len(sequences)
    total = rows or filled
    assert total >= filled, (rows, filled)
    ids_B, positions_B, pages_B = (np.zeros(total, dtype=np.int64) for _ in range(3))
    lengths = [sequence.computed for sequence in sequences]
    ids_B[:filled] = [sequence.tokens[length] for sequence, length in zip(sequences, lengths, strict=True)]
    positions_B[:filled] = lengths
    pages = positions_B[:filled] // page_tokens
    tables_BP = _tables([sequence.pages.packed for sequence in sequences], pages + 1, total)
    pages_B[:filled] = tables_BP[np.arange(filled), pages]
    return Forward(
        ids_T=_to(ids_B, device),
        positions_T=_to(positions_B, device),
        attention=DecodeBatch(
            tables_BP=_to(tables_BP, device),
            lengths_B=_to(positions_B.astype(np.int32), device),
            max_length=max(lengths),
            write_pages_B=_to(pages_B, device),
            write_slots_B=_to(positions_B % page_tokens, device),
        ),
    )


def _tables(tables: Seq["array[int]"], used: NDArray[np.int64], rows: int) -> NDArray[np.int32]:
    """The first `used` pages of each table, in rows padded with 0."""
    counts = used.tolist()
    parts = [table if len(table) == count else table[:count] for table, count in zip(tables, counts, strict=True)]
    padded_BP = np.zeros((rows, max(counts)), dtype=np.int32)
    held_BP = np.arange(padded_BP.shape[1]) < used[:, None]
    padded_BP[: len(parts)][held_BP] = np.frombuffer(b"".join(parts), dtype=np.int32)
    return padded_BP


def _offsets(lengths: Seq[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *lengths], dtype=np.int32)


def _to(values: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
