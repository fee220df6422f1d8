"""The native decoder at the edges of its kernels: odd shapes, uneven tiles, inputs out of range, and its threads.

Shape letters: S sequences, B decode rows, V vocabulary.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollout.attention.interface import DecodeBatch, PrefillBatch
from rollout.model.native import NativeDecoder
from tests.model.paged import UNEVEN, PagedDecoder, native_decoder
from tests.tiny_models import make_tiny_llama, make_tiny_qwen2

MODELS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "uneven": (make_tiny_llama, UNEVEN),
    "uneven-untied": (make_tiny_qwen2, {**UNEVEN, "tie_word_embeddings": False}),
    "head-dim-256": (make_tiny_llama, {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "64-heads-on-1": (make_tiny_llama, {"num_attention_heads": 64, "num_key_value_heads": 1}),
}
STEPS = 8
LONGEST = 260


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make, overrides = MODELS[request.param]
    return make(tmp_path_factory.mktemp("model"), **overrides)


def _sequences(count: int) -> list[list[int]]:
    """The first one's decode steps pass position 256, others' pass 64 and 128, and the last one starts with one id."""
    lengths = [LONGEST, *(1 + STEPS + 11 * s % 130 for s in range(1, count - 1)), 1 + STEPS]
    ids = torch.randint(4, 320, (count, LONGEST), generator=torch.Generator().manual_seed(2)).tolist()
    return [row[:length] for row, length in zip(ids, lengths, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "page_tokens"), [(13, 1), (25, 256), (37, 1)])
def test_uneven_tiles_give_the_bits_of_each_sequence_alone(
    path: Path, dtype: torch.dtype, rows: int, page_tokens: int
) -> None:
    sequences = _sequences(rows)
    alone, team = native_decoder(path, dtype, threads=1), native_decoder(path, dtype, threads=5)
    paged = PagedDecoder(team, sequences=rows, max_tokens=LONGEST, page_tokens=page_tokens)
    prefilled = paged.prefill([ids[:-STEPS] for ids in sequences])
    steps_SBV = torch.stack([paged.decode([ids[step] for ids in sequences]) for step in range(-STEPS, 0)], dim=1)
    for ids, first_TV, later_TV in zip(sequences, prefilled, steps_SBV, strict=True):
        (truth_TV,) = PagedDecoder(alone, max_tokens=LONGEST).prefill([ids])
        assert torch.equal(torch.cat((first_TV, later_TV)), truth_TV)
    alone.close()
    team.close()


@pytest.mark.parametrize("page_tokens", [1, 256])
def test_13_decode_rows_give_the_logits_of_hugging_face(path: Path, page_tokens: int) -> None:
    sequences = _sequences(13)
    decoder = native_decoder(path, threads=5)
    paged = PagedDecoder(decoder, sequences=13, max_tokens=LONGEST, page_tokens=page_tokens)
    prefilled = paged.prefill([ids[:-STEPS] for ids in sequences])
    steps_SBV = torch.stack([paged.decode([ids[step] for ids in sequences]) for step in range(-STEPS, 0)], dim=1)
    decoder.close()
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for ids, first_TV, later_TV in zip(sequences, prefilled, steps_SBV, strict=True):
        with torch.inference_mode():
            expected_TV = theirs(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(torch.cat((first_TV, later_TV)), expected_TV, atol=1e-4, rtol=0)


# What is out of range


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeDecoder]:
    decoder = native_decoder(make_tiny_llama(tmp_path_factory.mktemp("model")))
    yield decoder
    decoder.close()


def _forward(
    decoder: NativeDecoder, kind: str, ids: Sequence[int], positions: Sequence[int], tables: Sequence[Sequence[int]]
) -> Tensor:
    """One row of each sequence, on nine pages of four tokens."""
    rows, spec = len(ids), decoder.spec
    tables_SP = torch.tensor(tables, dtype=torch.int32).view(rows, 2)
    positions_T, blank_T = torch.tensor(positions, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    lengths, offsets = tuple(position + 1 for position in positions), torch.arange(rows + 1, dtype=torch.int32)
    batch: PrefillBatch | DecodeBatch
    if kind == "decode":
        lengths_B = positions_T.to(torch.int32)
        batch = DecodeBatch(
            tables_BP=tables_SP, lengths_B=lengths_B, max_length=8, write_pages_B=blank_T, write_slots_B=blank_T
        )
    else:
        batch = PrefillBatch(
            tables_SP=tables_SP,
            cu_queries=offsets,
            cu_keys=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            query_lengths=(1,) * rows,
            key_lengths=lengths,
            write_pages_T=blank_T,
            write_slots_T=blank_T,
        )
    pages = torch.zeros(9, spec.layers, 2, 4, spec.kv_heads, spec.head_dim)
    return decoder.forward(torch.tensor(ids, dtype=torch.int64), positions_T, pages, batch)


kinds = pytest.mark.parametrize("kind", ["prefill", "decode"])


@kinds
def test_what_is_just_within_range_runs(decoder: NativeDecoder, kind: str) -> None:
    assert _forward(decoder, kind, [0, 319], [0, 7], [[1, 2], [8, 0]]).isfinite().all()


@kinds
@pytest.mark.parametrize(
    ("ids", "positions", "tables", "message"),
    [
        ([5, 320], [0, 7], [[1, 2], [3, 4]], "320"),
        ([5, -1], [0, 7], [[1, 2], [3, 4]], "-1"),
        ([5, 1 << 40], [0, 7], [[1, 2], [3, 4]], str(1 << 40)),
        ([5, 6], [0, 8], [[1, 2], [3, 4]], "8"),
        ([5, 6], [0, -1], [[1, 2], [3, 4]], "-1"),
        ([5, 6], [0, 4096], [[1, 2], [3, 4]], "4096"),
        ([5, 6], [0, 7], [[1, 2], [3, 9]], "9"),
        ([5, 6], [0, 7], [[1, 2], [-1, 4]], "-1"),
        ([], [], [], "no rows"),
    ],
)
def test_what_is_out_of_range_is_refused_with_its_numbers(
    decoder: NativeDecoder,
    kind: str,
    ids: list[int],
    positions: list[int],
    tables: list[list[int]],
    message: str,
) -> None:
    with pytest.raises(AssertionError, match=rf"(?<![-\d]){message}(?!\d)"):
        _forward(decoder, kind, ids, positions, tables)


# Threads


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_threads_end_with_the_decoder(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path)
    before = _threads()
    decoder = native_decoder(path, threads=5)
    PagedDecoder(decoder).prefill([[5, 6, 7]])
    ours = _threads() - before
    assert len(ours) == 4
    decoder.close()
    # The kernel takes an ended thread off the list a moment after others may know of its end.
    for _ in range(10_000):
        if not ours & _threads():
            break
        os.sched_yield()
    assert not ours & _threads()
    decoder.close()
