"""Plans as tensors: token ids, positions, page tables and write slots for one forward.

Padding rows have token 0, position 0, an empty context, and write to scratch page 0.
Shape letters: T rows of a prefill, B rows of a decode step, S sequences, P pages of the longest one.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
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
    ids: list[int] = []
    positions: list[int] = []
    pages: list[int] = []
    for chunk in chunks:
        table = chunk.sequence.pages.table
        ids += chunk.sequence.tokens[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
        pages += [table[position // page_tokens] for position in range(chunk.start, chunk.end)]
    padding = (rows or len(ids)) - len(ids)
    assert padding >= 0, (rows, len(ids))
    slots = [position % page_tokens for position in positions] + [row % page_tokens for row in range(padding)]
    queries = tuple(chunk.end - chunk.start for chunk in chunks)
    keys = tuple(chunk.end for chunk in chunks)
    used = [chunk.sequence.pages.table[: -(-chunk.end // page_tokens)] for chunk in chunks]
    return Forward(
        ids_T=_int64(ids + [0] * padding, device),
        positions_T=_int64(positions + [0] * padding, device),
        attention=PrefillBatch(
            tables_SP=_tables(used, device),
            cu_queries=_offsets(queries, device),
            cu_keys=_offsets(keys, device),
            query_lengths=queries,
            key_lengths=keys,
            write_pages_T=_int64(pages + [0] * padding, device),
            write_slots_T=_int64(slots, device),
        ),
    )


def decode_forward(sequences: Seq[Sequence], *, rows: int | None, page_tokens: int, device: torch.device) -> Forward:
    """One forward that feeds the next token of each sequence, padded to `rows` rows if given."""
    padding = (rows or len(sequences)) - len(sequences)
    assert padding >= 0, (rows, len(sequences))
    lengths = [sequence.computed for sequence in sequences]
    used = [
        sequence.pages.table[: length // page_tokens + 1] for sequence, length in zip(sequences, lengths, strict=True)
    ]
    ids = [sequence.tokens[length] for sequence, length in zip(sequences, lengths, strict=True)]
    blank = [0] * padding
    return Forward(
        ids_T=_int64(ids + blank, device),
        positions_T=_int64(lengths + blank, device),
        attention=DecodeBatch(
            tables_BP=_tables(used + [[] for _ in blank], device),
            lengths_B=_int32(lengths + blank, device),
            max_length=max(lengths),
            write_pages_B=_int64([table[-1] for table in used] + blank, device),
            write_slots_B=_int64([length % page_tokens for length in lengths] + blank, device),
        ),
    )


def _tables(tables: Seq[Seq[int]], device: torch.device) -> Tensor:
    longest = max(len(table) for table in tables)
    return _int32([[*table, *[0] * (longest - len(table))] for table in tables], device)


def _offsets(lengths: Seq[int], device: torch.device) -> Tensor:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return _int32(offsets, device)


def _int64(values: object, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def _int32(values: object, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)
