"""The canary: damage to a page, a table row or a segment is caught where it is, and nothing else ever is."""

import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from rollout.errors import CanaryError
from rollout.kv import canary as canary_module
from rollout.kv.canary import SLOT_BYTES, Canary, Difference
from rollout.kv.chain import Chain
from rollout.types import SequenceKey, TrajectoryId
from tests.kv.pool import DEVICES, DTYPES, HEAD_DIM, HEADS, LAYERS, PAGE, tokens_in

ANN, BOB = (TrajectoryId("ann"), 3), (TrajectoryId("bob"), 0)
SHAPE = (LAYERS, 2, PAGE, HEADS, HEAD_DIM)
WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}

on_all_devices = pytest.mark.parametrize("device", DEVICES)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])


def make_pages(count: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros((count + 1, *SHAPE), dtype=dtype, device=device)


def strided_pages(count: int, dtype: torch.dtype) -> Tensor:
    """Pages that are contiguous in no dimension but lie in a tensor twice as large."""
    large = torch.zeros((count + 1, HEADS, LAYERS, 2, PAGE, 2 * HEAD_DIM), dtype=dtype)
    return large[..., ::2].permute(0, 2, 3, 4, 1, 5)


class Worker:
    """Pages, their canary, and forwards that write random bytes."""

    def __init__(self, pages: Tensor, seed: int = 0) -> None:
        self.pages = pages
        self.canary = Canary(pages)
        self._random = torch.Generator().manual_seed(seed)

    def forward(self, table: Sequence[int], chain: Chain, start: int, *, padding: int = 0) -> None:
        """Write positions from `start` on to where the table says; padding rows go to page 0."""
        positions = range(start, len(chain))
        where = [table[position // PAGE] for position in positions] + [0] * padding
        slots = [position % PAGE for position in positions] + [row % PAGE for row in range(padding)]
        pages_T, slots_T = (torch.tensor(column, device=self.pages.device) for column in (where, slots))
        rows = torch.randn((len(where), LAYERS, 2, HEADS, HEAD_DIM), generator=self._random)
        self.pages[pages_T, :, :, slots_T] = rows.to(self.pages)
        self.canary.written(pages_T, slots_T, chain.values(start, len(chain)))

    def table(self, *rows: Sequence[int]) -> Tensor:
        longest = max(len(row) for row in rows)
        padded = [[*row, *[0] * (longest - len(row))] for row in rows]
        return torch.tensor(padded, dtype=torch.int32, device=self.pages.device)

    def verify(self, table: Sequence[int], chain: Chain, key: SequenceKey = ANN) -> None:
        self.canary.verify([key], self.table(table), [chain.values(0, len(chain))])

    def flip(
        self, page: int, slot: int, layer: int = 0, kv: int = 0, head: int = 0, dim: int = 0, bit: int = 0
    ) -> None:
        words = self.pages.view(WORDS[self.pages.dtype])
        words[page, layer, kv, slot, head, dim] ^= 1 << bit

    def scatter(self, pages: Sequence[int], tokens: int, source: Tensor, sources: Sequence[int]) -> None:
        for index, (page, origin) in enumerate(zip(pages, sources, strict=True)):
            valid = tokens_in(index, tokens)
            self.pages[page, :, :, :valid] = source[origin, :, :, :valid].to(self.pages)


def chain_of(tokens: Sequence[int], weights_id: str = "w") -> Chain:
    chain = Chain()
    chain.extend(tokens, weights_id)
    return chain


def caught(check: Callable[[], None]) -> CanaryError:
    with pytest.raises(CanaryError) as found:
        check()
    return found.value


def place(error: CanaryError) -> tuple[object, ...]:
    return error.what, error.position, error.page, error.slot


@pytest.fixture(params=[*itertools.product(DEVICES, DTYPES, [False]), *itertools.product(["cpu"], DTYPES, [True])])
def worker(request: pytest.FixtureRequest) -> Worker:
    device, dtype, strided = request.param
    return Worker(strided_pages(9, dtype) if strided else make_pages(9, dtype=dtype, device=device))


TABLE = [7, 2, 9]
TOKENS = list(range(100, 100 + 2 * PAGE + 3))
GOLDEN_CHAIN = [7654062949550977938, 125658520017779562, -2748085536060744094]


# chain values


def test_chain_values_are_the_same_in_every_process() -> None:
    assert chain_of([1, 2, 3]).values(0, 3).tolist() == GOLDEN_CHAIN


@given(st.lists(st.integers(0, 2**40), max_size=20), st.lists(st.integers(0, 20), max_size=4))
def test_values_do_not_depend_on_how_the_tokens_came(tokens: list[int], cuts: list[int]) -> None:
    chain, whole = Chain(), chain_of(tokens)
    for cut in sorted(cuts):
        chain.extend(tokens[len(chain) : cut], "w")
        assert chain.values(0, len(chain)).tolist() == whole.values(0, len(chain)).tolist()
    chain.extend(tokens[len(chain) :], "w")
    assert chain.values(0, len(tokens)).tolist() == whole.values(0, len(tokens)).tolist()
    assert len(set(whole.values(0, len(tokens)).tolist())) == len(tokens)


@given(st.integers(0, 7), st.integers(0, 2**40), st.sampled_from(["", "v"]))
def test_a_token_or_other_weights_change_all_values_from_there_on(position: int, token: int, weights_id: str) -> None:
    tokens = [token + 1] * 8
    changed = [*tokens[:position], token, *tokens[position + 1 :]]
    mixed = Chain()
    mixed.extend(tokens[:position], "w")
    mixed.extend(tokens[position:], weights_id)
    before = chain_of(tokens).values(0, 8).tolist()
    for other in (chain_of(changed), mixed):
        after = other.values(0, 8).tolist()
        assert after[:position] == before[:position]
        assert not set(after[position:]) & set(before)


def test_values_stay_as_they_were_handed_out() -> None:
    chain = chain_of([1, 2])
    values = chain.values(1, 2)
    before = values.tolist()
    chain.extend([5], "w")
    assert values.tolist() == before
    assert chain.values(2, 2).tolist() == []
    with pytest.raises(AssertionError):
        chain.values(0, 4)


# mixes


def python_mix(pages: Tensor, page: int, slot: int) -> int:
    """The mix of a slot by the rule, number by number."""
    factors = canary_module._factors(LAYERS * 2 * HEADS * HEAD_DIM).tolist()
    words = pages.cpu()[page, :, :, slot].contiguous().view(WORDS[pages.dtype]).flatten().tolist()
    total: int = sum(word * factor for word, factor in zip(words, factors, strict=True))
    return (total + 2**63) % 2**64 - 2**63


def shadow_rows(canary: Canary, page: int, tokens: int = PAGE) -> list[list[int]]:
    rows: list[list[int]] = np.frombuffer(canary.take([page], tokens), dtype="<i8").reshape(-1, 2).tolist()
    return rows


@pytest.mark.parametrize("words_at_once", [1, 1 << 22])
def test_a_shadow_is_chain_and_mix_by_the_rule(
    worker: Worker, words_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary_module, "WORDS_AT_ONCE", words_at_once)
    chain = chain_of(TOKENS)
    worker.forward(TABLE, chain, 0, padding=3)
    for position, value in enumerate(chain.values(0, len(chain)).tolist()):
        page, slot = TABLE[position // PAGE], position % PAGE
        assert shadow_rows(worker.canary, page)[slot] == [value, python_mix(worker.pages, page, slot)]


def test_factors_are_odd_different_and_the_same_in_every_process() -> None:
    factors = canary_module._factors(10_000).tolist()
    assert all(factor % 2 for factor in factors)
    assert len(set(factors)) == 10_000
    assert factors[0] == (16294208416658607535 | 1) - 2**64  # SplitMix64 with seed 0


# verify


@pytest.mark.parametrize("tokens", range(1, 2 * PAGE + 4))
def test_what_was_written_and_not_damaged_verifies(worker: Worker, tokens: int) -> None:
    chain = chain_of(TOKENS[: tokens - 1])
    worker.forward(TABLE, chain, 0, padding=2)
    worker.verify(TABLE, chain)
    chain.extend(TOKENS[tokens - 1 : tokens], "w")
    worker.forward(TABLE, chain, tokens - 1, padding=7)
    worker.verify(TABLE, chain)
    worker.verify([*TABLE, 0, 0], chain)


@pytest.mark.parametrize("position", range(len(TOKENS)))
def test_every_flipped_bit_of_a_page_is_caught(position: int, worker: Worker) -> None:
    chain = chain_of(TOKENS)
    worker.forward(TABLE, chain, 0)
    page, slot = TABLE[position // PAGE], position % PAGE
    spots = itertools.product(range(LAYERS), range(2), range(HEADS), (0, HEAD_DIM - 1), (0, 14))
    for layer, kv, head, dim, bit in spots:
        worker.flip(page, slot, layer, kv, head, dim, bit)
        error = caught(lambda: worker.verify(TABLE, chain))
        assert place(error) == (Difference.PAGE_BYTES, position, page, slot)
        worker.flip(page, slot, layer, kv, head, dim, bit)
        worker.verify(TABLE, chain)


def test_an_error_names_the_sequence_the_place_and_what_differs() -> None:
    worker = Worker(make_pages(9))
    ann, bob = chain_of(TOKENS), chain_of(TOKENS[::-1])
    worker.forward(TABLE, ann, 0)
    worker.forward([1, 3, 4], bob, 0)
    worker.flip(3, 1)
    worker.flip(3, 2)
    table = worker.table(TABLE, [1, 3, 4], [])
    chains = [ann.values(0, 11), bob.values(0, 11)]
    error = caught(lambda: worker.canary.verify([ANN, BOB], table, chains))
    assert str(error) == (
        "page bytes of sequence ('bob', 0), position 5, page 3, slot 1: its bytes are not those that were written "
        "(2 positions differ)"
    )
    assert (error.sequence, *place(error)) == (BOB, "page bytes", 5, 3, 1)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.sequence, place(again)) == (str(error), BOB, place(error))


@pytest.mark.parametrize("move", ["layers", "kv", "heads", "dims", "slots"])
def test_bytes_in_another_order_are_caught(worker: Worker, move: str) -> None:
    chain = chain_of(TOKENS)
    worker.forward(TABLE, chain, 0)
    axis = ["layers", "kv", "slots", "heads", "dims"].index(move)
    worker.pages[2] = worker.pages[2].flip(axis)
    assert place(caught(lambda: worker.verify(TABLE, chain))) == (Difference.PAGE_BYTES, PAGE, 2, 0)


@pytest.mark.parametrize("damage", ["zero", "scale", "stale"])
def test_a_page_overwritten_as_a_whole_is_caught(worker: Worker, damage: str) -> None:
    chain = chain_of(TOKENS)
    worker.forward(TABLE, chain, 0)
    others = {"zero": torch.zeros_like(worker.pages[2]), "scale": worker.pages[2] * 2, "stale": worker.pages[7]}
    worker.pages[2] = others[damage].clone()
    assert place(caught(lambda: worker.verify(TABLE, chain))) == (Difference.PAGE_BYTES, PAGE, 2, 0)


def test_unused_slots_scratch_and_pages_of_others_are_not_looked_at(worker: Worker) -> None:
    chain = chain_of(TOKENS)
    worker.forward(TABLE, chain, 0)
    for page in (0, 1, 3, 4, 5, 6, 8):
        worker.pages[page] = 7
    worker.pages[9][:, :, 3:] = 7
    worker.verify([*TABLE, 8], chain)


@pytest.mark.parametrize(
    ("row", "position", "page"),
    [
        ([2, 7, 9], 0, 2),
        ([7, 9, 2], 4, 9),
        ([7, 2, 2], 8, 2),
        ([7, 2, 4], 8, 4),
        ([7, 2, 5], 8, 5),
        ([3, 2, 9], 0, 3),
        ([7, 2, 0], 8, 0),
        ([7, -3, 9], 4, -3),
        ([10, 2, 9], 0, 10),
        ([7, 2], 8, 0),
    ],
)
def test_a_damaged_table_row_is_caught(worker: Worker, row: list[int], position: int, page: int) -> None:
    ann, bob = chain_of(TOKENS), chain_of(TOKENS[::-1])
    worker.forward(TABLE, ann, 0, padding=4)
    worker.forward([3, 4, 6], bob, 0)
    error = caught(lambda: worker.verify(row, ann))
    assert place(error) == (Difference.TABLE_ROW, position, page, 0)
    worker.verify(TABLE, ann)


def test_rows_of_two_sequences_that_changed_places_are_caught() -> None:
    worker = Worker(make_pages(9))
    ann, bob = chain_of([*TOKENS[:PAGE], 1]), chain_of([*TOKENS[:PAGE], 2])
    worker.forward([1, 2], ann, 0)
    worker.forward([1, 3], bob, PAGE)
    chains = [ann.values(0, PAGE + 1), bob.values(0, PAGE + 1)]
    worker.canary.verify([ANN, BOB], worker.table([1, 2], [1, 3]), chains)
    error = caught(lambda: worker.canary.verify([ANN, BOB], worker.table([1, 3], [1, 2]), chains))
    assert (error.sequence, *place(error)) == (ANN, Difference.TABLE_ROW, PAGE, 3, 0)


def test_pages_computed_by_other_weights_are_caught(worker: Worker) -> None:
    worker.forward(TABLE, chain_of(TOKENS, "v"), 0)
    assert place(caught(lambda: worker.verify(TABLE, chain_of(TOKENS, "w")))) == (Difference.TABLE_ROW, 0, 7, 0)


def test_a_position_that_was_never_written_is_caught(worker: Worker) -> None:
    chain = chain_of(TOKENS[:-1])
    worker.forward(TABLE, chain, 0)
    chain.extend(TOKENS[-1:], "w")
    assert place(caught(lambda: worker.verify(TABLE, chain))) == (Difference.TABLE_ROW, 10, 9, 2)


def test_a_forward_that_wrote_to_a_page_of_another_sequence_is_caught(worker: Worker) -> None:
    ann, bob = chain_of(TOKENS), chain_of(TOKENS[:3])
    worker.forward(TABLE, ann, 0)
    worker.forward([2], bob, 1)
    assert place(caught(lambda: worker.verify(TABLE, ann))) == (Difference.TABLE_ROW, PAGE + 1, 2, 1)


def test_scratch_is_no_page_even_for_what_was_written_there() -> None:
    worker = Worker(make_pages(9))
    chain = chain_of(TOKENS)
    worker.forward([7, 0, 9], chain, 0)
    assert place(caught(lambda: worker.verify([7, 0, 9], chain))) == (Difference.TABLE_ROW, PAGE, 0, 0)


def test_a_damaged_page_of_something_else_is_the_fault_of_the_table_row() -> None:
    worker = Worker(make_pages(9))
    worker.forward(TABLE, chain_of(TOKENS), 0)
    worker.flip(2, 0)
    error = caught(lambda: worker.verify([2], chain_of(TOKENS[:PAGE])))
    assert place(error) == (Difference.TABLE_ROW, 0, 2, 0)


def test_sequences_without_kv_and_no_sequences_verify() -> None:
    worker = Worker(make_pages(3))
    nothing = np.zeros(0, dtype=np.int64)
    worker.canary.verify([], torch.zeros((2, 0), dtype=torch.int32), [])
    worker.canary.verify([ANN], worker.table([3]), [nothing])
    worker.forward([2], chain_of([1]), 0)
    worker.canary.verify([ANN, BOB], worker.table([3], [2]), [nothing, chain_of([1]).values(0, 1)])
    error = caught(
        lambda: worker.canary.verify([ANN, BOB], worker.table([2], [3]), [nothing, chain_of([1]).values(0, 1)])
    )
    assert (error.sequence, error.position) == (BOB, 0)


def test_forwards_in_inference_mode_are_shadowed() -> None:
    worker = Worker(make_pages(9))
    chain = chain_of(TOKENS)
    with torch.inference_mode():
        worker.forward(TABLE, chain, 0)
        worker.verify(TABLE, chain)
    worker.verify(TABLE, chain)


# copies between tiers


@on_all_devices
@all_dtypes
def test_a_copy_takes_the_shadow_to_the_other_tier_and_back(dtype: torch.dtype, device: str) -> None:
    worker = Worker(make_pages(9, dtype=dtype, device=device))
    host = Worker(make_pages(4, dtype=dtype).pin_memory() if device == "cuda" else make_pages(4, dtype=dtype))
    chain = chain_of(TOKENS)
    worker.forward(TABLE, chain, 0)
    host.pages[[4, 1, 3]] = worker.pages[TABLE].cpu()
    worker.canary.copy(TABLE, host.canary, [4, 1, 3])
    if device == "cuda":
        torch.cuda.synchronize()
    host.verify([4, 1, 3], chain)
    worker.forward(TABLE, chain_of(TOKENS, "v"), 0)
    host.verify([4, 1, 3], chain)
    worker.pages[[1, 2, 3]] = host.pages[[4, 1, 3]].to(device)
    host.canary.copy([4, 1, 3], worker.canary, [1, 2, 3])
    worker.verify([1, 2, 3], chain)


def test_a_copy_that_did_not_happen_came_late_or_went_elsewhere_is_caught() -> None:
    worker, host = Worker(make_pages(9)), Worker(make_pages(4))
    chain = chain_of(TOKENS[: 2 * PAGE])
    worker.forward([7, 2], chain, 0)
    worker.canary.copy([7, 2], host.canary, [4, 1])
    assert place(caught(lambda: host.verify([4, 1], chain))) == (Difference.PAGE_BYTES, 0, 4, 0)
    host.pages[[4, 1]] = worker.pages[[2, 7]]
    assert place(caught(lambda: host.verify([4, 1], chain))) == (Difference.PAGE_BYTES, 0, 4, 0)
    host.pages[[4, 1]] = worker.pages[[7, 2]]
    host.verify([4, 1], chain)
    worker.forward([7, 2], chain_of(TOKENS[: 2 * PAGE], "v"), 0)  # the source is used again before the copy read it
    host.pages[1] = worker.pages[2]
    assert place(caught(lambda: host.verify([4, 1], chain))) == (Difference.PAGE_BYTES, PAGE, 1, 0)


def test_bytes_damaged_in_host_memory_are_caught_on_the_device() -> None:
    worker, host = Worker(make_pages(9)), Worker(make_pages(4))
    chain = chain_of(TOKENS[:PAGE])
    worker.forward([7], chain, 0)
    host.pages[4] = worker.pages[7]
    worker.canary.copy([7], host.canary, [4])
    host.flip(4, 2, layer=1)
    worker.pages[5] = host.pages[4]
    host.canary.copy([4], worker.canary, [5])
    assert place(caught(lambda: worker.verify([5], chain))) == (Difference.PAGE_BYTES, 2, 5, 2)


def test_a_copy_to_another_number_of_pages_is_an_error() -> None:
    worker = Worker(make_pages(9))
    with pytest.raises(ValueError, match="zip"):
        worker.canary.copy([1, 2], worker.canary, [3])


# segments


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A segment as the canary sees it: pages in memory of its own and their shadow."""

    pages: Tensor
    tokens: int
    shadow: bytes


def export(worker: Worker, pages: Sequence[int], tokens: int) -> Sent:
    return Sent(pages=worker.pages[list(pages)].clone(), tokens=tokens, shadow=worker.canary.take(pages, tokens))


def restore(
    worker: Worker, sent: Sent, pages: Sequence[int], chain: Chain, *, first: int = 0, start: int | None = None
) -> None:
    """Scatter, put and verify pages `first`… of a segment; they hold positions `start`… of `chain`."""
    start = first * PAGE if start is None else start
    tokens = sent.tokens - first * PAGE
    worker.scatter(pages, tokens, sent.pages, range(first, len(sent.pages)))
    worker.canary.put(pages, tokens, sent.shadow, first=first)
    worker.canary.verify_restored(ANN, pages, chain.values(start, start + tokens), start=start)


@on_all_devices
@all_dtypes
@pytest.mark.parametrize("tokens", range(1, 2 * PAGE + 4))
def test_a_restored_segment_verifies_on_another_worker(tokens: int, dtype: torch.dtype, device: str) -> None:
    source, target = (Worker(make_pages(9, dtype=dtype, device=device), seed) for seed in range(2))
    chain = chain_of(TOKENS[:tokens])
    source.forward(TABLE, chain, 0)
    pages = -(-tokens // PAGE)
    sent = export(source, TABLE[:pages], tokens)
    assert len(sent.shadow) == tokens * SLOT_BYTES
    restore(target, sent, [1, 5, 4][:pages], chain)
    target.verify([1, 5, 4], chain)
    if pages > 1:
        restore(target, sent, [8, 3][: pages - 1], chain, first=1)
        target.verify([1, 8, 3], chain)


def test_a_restore_leaves_the_shadow_of_other_slots_alone() -> None:
    source, target = Worker(make_pages(9)), Worker(make_pages(9), seed=1)
    ann, bob = chain_of(TOKENS[:2]), chain_of(TOKENS[::-1][:PAGE])
    source.forward([4], ann, 0)
    target.forward([4], bob, 0)
    restore(target, export(source, [4], 2), [4], ann)
    assert shadow_rows(target.canary, 4)[2:] == [
        [bob.values(2, 4)[i], python_mix(target.pages, 4, 2 + i)] for i in (0, 1)
    ]


OTHERS = {
    "tokens": chain_of([*TOKENS[:-1], 1]),
    "first token": chain_of([1, *TOKENS[1:]]),
    "weights": chain_of(TOKENS, "v"),
    "position": chain_of([1] * PAGE + TOKENS[: PAGE + 3]),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_segment_swapped_for_another_valid_one_is_caught(other: Chain) -> None:
    source, target = Worker(make_pages(9)), Worker(make_pages(9), seed=1)
    chain = chain_of(TOKENS)
    source.forward([3, 4, 5], other, 0)
    restore(target, export(source, [3, 4, 5], 11), TABLE, other)
    error = caught(lambda: restore(target, export(source, [3, 4, 5], 11), TABLE, chain))
    first = next(i for i in range(11) if other.values(i, i + 1) != chain.values(i, i + 1))
    assert place(error) == (Difference.SEGMENT, first, TABLE[first // PAGE], first % PAGE)


def test_pages_of_a_segment_put_at_another_place_are_caught() -> None:
    source, target = Worker(make_pages(9)), Worker(make_pages(9), seed=1)
    chain = chain_of([5] * 3 * PAGE)
    source.forward(TABLE, chain, 0)
    whole = export(source, TABLE, 3 * PAGE)
    error = caught(lambda: restore(target, whole, [1, 2], chain, first=1, start=0))
    assert place(error) == (Difference.SEGMENT, 0, 1, 0)
    error = caught(lambda: restore(target, export(source, [7, 9, 2], 3 * PAGE), [1, 2, 3], chain))
    assert place(error) == (Difference.SEGMENT, PAGE, 2, 0)


@pytest.mark.parametrize("position", range(len(TOKENS)))
def test_bytes_of_a_segment_damaged_on_the_way_are_caught(position: int) -> None:
    source, target = Worker(make_pages(9)), Worker(make_pages(9), seed=1)
    chain = chain_of(TOKENS)
    source.forward(TABLE, chain, 0)
    sent = export(source, TABLE, 11)
    sent.pages[position // PAGE, 2, 1, position % PAGE, 1, 3] += 1
    error = caught(lambda: restore(target, sent, [1, 5, 4], chain))
    assert place(error) == (Difference.PAGE_BYTES, position, [1, 5, 4][position // PAGE], position % PAGE)


def test_damage_in_a_part_of_a_segment_is_named_by_its_position_in_the_sequence() -> None:
    source, target = Worker(make_pages(9)), Worker(make_pages(9), seed=1)
    chain = chain_of(TOKENS)
    source.forward(TABLE, chain, 0)
    sent = export(source, TABLE, 11)
    sent.pages[2, 0, 0, 1, 0, 0] += 1
    error = caught(lambda: restore(target, sent, [5, 4], chain, first=1))
    assert place(error) == (Difference.PAGE_BYTES, 2 * PAGE + 1, 4, 1)


@given(st.integers(0, len(TOKENS) * SLOT_BYTES - 1), st.integers(0, 7))
def test_a_damaged_shadow_is_caught(byte: int, bit: int) -> None:
    source, target = Worker(make_pages(9)), Worker(make_pages(9), seed=1)
    chain = chain_of(TOKENS)
    source.forward(TABLE, chain, 0)
    sent = export(source, TABLE, 11)
    shadow = bytearray(sent.shadow)
    shadow[byte] ^= 1 << bit
    damaged = Sent(pages=sent.pages, tokens=11, shadow=bytes(shadow))
    error = caught(lambda: restore(target, damaged, TABLE, chain))
    what = Difference.SEGMENT if byte % SLOT_BYTES < SLOT_BYTES // 2 else Difference.PAGE_BYTES
    assert (error.what, error.position) == (what, byte // SLOT_BYTES)


def test_a_shadow_of_fewer_tokens_is_refused() -> None:
    worker = Worker(make_pages(9))
    worker.forward(TABLE, chain_of(TOKENS), 0)
    before = shadow_rows(worker.canary, 2)
    with pytest.raises(CanaryError, match="shadow of 80 bytes, expected 16 for each of 6 tokens"):
        worker.canary.put([2], 2, worker.canary.take([7, 9], 5), first=1)
    assert shadow_rows(worker.canary, 2) == before


@pytest.mark.parametrize(("pages", "tokens"), [([1], 0), ([1], PAGE + 1), ([1, 2], PAGE), ([], 1)])
def test_pages_and_tokens_that_do_not_fit_each_other_assert(pages: list[int], tokens: int) -> None:
    canary = Canary(make_pages(3))
    with pytest.raises(AssertionError):
        canary.take(pages, tokens)
    with pytest.raises(AssertionError):
        canary.put(pages, tokens, bytes(1024))


# any history, against a model that remembers tokens and bytes themselves

PAGES = 7
Fact = tuple[tuple[int, str], ...]
"""All tokens of a sequence up to a position, each with the weights that computed its KV."""
Slot = tuple[int, int]


class Run:
    """A sequence as the model knows it."""

    def __init__(self, facts: Fact = (), table: Sequence[int] = ()) -> None:
        self.facts = facts
        self.table = list(table)
        self.host: list[int] | None = None
        self.chain = Chain()
        for token, weights_id in facts:
            self.chain.extend([token], weights_id)


class CanaryMachine(RuleBasedStateMachine):
    """Writes, sharing, copies, segments and damage of every kind; `verify` raises exactly where the model differs."""

    def __init__(self) -> None:
        super().__init__()
        self.tiers = [Worker(make_pages(PAGES), seed=0), Worker(make_pages(PAGES), seed=1)]
        self.expected: list[dict[Slot, tuple[Fact, bytes]]] = [{}, {}]
        self.runs: list[Run] = []

    def slot_bytes(self, tier: int, page: int, slot: int) -> bytes:
        return self.tiers[tier].pages[page, :, :, slot].contiguous().view(torch.uint8).numpy().tobytes()

    def note(self, tier: int, page: int, slot: int, fact: Fact) -> None:
        self.expected[tier][page, slot] = (fact, self.slot_bytes(tier, page, slot))

    def pick(self, number: int) -> Run:
        if not self.runs:
            self.runs.append(Run())
        return self.runs[number % len(self.runs)]

    def free(self, tier: int) -> list[int]:
        tables = [run.table if tier == 0 else run.host or [] for run in self.runs]
        return [page for page in range(1, PAGES + 1) if not any(page in table for table in tables)]

    @initialize(lengths=st.lists(st.integers(1, 2 * PAGE), min_size=2, max_size=3))
    def begin(self, lengths: list[int]) -> None:
        for n, length in enumerate(lengths):
            self.runs.append(Run())
            self.write(n, [n // 2] * length, "w", 0)
            self.demote(n)

    @rule(n=st.integers(0, 3))
    def drop(self, n: int) -> None:
        self.pick(n)
        del self.runs[n % len(self.runs)]

    @rule(
        n=st.integers(0, 3),
        tokens=st.lists(st.sampled_from([0, 1]), min_size=1, max_size=PAGE + 1),
        weights_id=st.sampled_from(["v", "w"]),
        padding=st.integers(0, 2),
    )
    def write(self, n: int, tokens: list[int], weights_id: str, padding: int) -> None:
        run = self.pick(n)
        start, end = len(run.facts), len(run.facts) + len(tokens)
        missing = -(-end // PAGE) - len(run.table)
        if missing > len(self.free(0)):
            return
        run.table += self.free(0)[:missing]
        run.facts += tuple((token, weights_id) for token in tokens)
        run.chain.extend(tokens, weights_id)
        self.tiers[0].forward(run.table, run.chain, start, padding=padding)
        for position in range(start, end):
            self.note(0, run.table[position // PAGE], position % PAGE, run.facts[: position + 1])

    @rule(n=st.integers(0, 3), pages=st.integers(0, 2))
    def fork(self, n: int, pages: int) -> None:
        run = self.pick(n)
        pages = min(pages, len(run.facts) // PAGE)
        self.runs = [*self.runs, Run(run.facts[: pages * PAGE], run.table[:pages])][-4:]

    def copy(self, source: int, sources: list[int], target: int, targets: list[int]) -> None:
        self.tiers[target].pages[targets] = self.tiers[source].pages[sources]
        self.tiers[source].canary.copy(sources, self.tiers[target].canary, targets)
        for origin, page in zip(sources, targets, strict=True):
            for slot in range(PAGE):
                self.expected[target].pop((page, slot), None)
                if (origin, slot) in self.expected[source]:
                    self.expected[target][page, slot] = self.expected[source][origin, slot]

    @rule(n=st.integers(0, 3))
    def demote(self, n: int) -> None:
        run = self.pick(n)
        if len(run.table) <= len(self.free(1)):
            run.host = self.free(1)[: len(run.table)]
            self.copy(0, run.table, 1, run.host)

    @rule(n=st.integers(0, 3))
    def promote(self, n: int) -> None:
        run = self.pick(n)
        if run.host is not None and len(run.host) == len(run.table) and len(run.host) <= len(self.free(0)):
            run.table = self.free(0)[: len(run.host)]
            self.copy(1, run.host, 0, run.table)

    @rule(n=st.integers(0, 3), first=st.integers(0, 2))
    def move_as_a_segment(self, n: int, first: int) -> None:
        """Pages from `first` on go out and come back in elsewhere."""
        run = self.pick(n)
        tokens = len(run.facts) - first * PAGE
        pages = -(-tokens // PAGE)
        if tokens <= 0 or pages > len(self.free(0)):
            return
        end = first + pages
        sent = export(self.tiers[0], run.table[:end], len(run.facts))
        broken = self.differences(0, run.table, run)
        sources, targets = run.table[first:end], self.free(0)[:pages]
        for index, (origin, page) in enumerate(zip(sources, targets, strict=True)):
            for slot in range(tokens_in(index, tokens)):
                self.expected[0][page, slot] = self.expected[0].get((origin, slot), ((), b""))
        run.table[first:end] = targets
        if any(position >= first * PAGE for position, *_ in broken):
            assert caught(lambda: restore(self.tiers[0], sent, targets, run.chain, first=first)).sequence == ANN
        else:
            restore(self.tiers[0], sent, targets, run.chain, first=first)

    @rule(
        n=st.integers(0, 3), entry=st.integers(0, 3), slot=st.integers(0, 3), host=st.booleans(), bit=st.integers(0, 31)
    )
    def flip(self, n: int, entry: int, slot: int, host: bool, bit: int) -> None:
        """One bit of a page that a run has or, past its end, of any page, scratch included."""
        run = self.pick(n)
        table = (run.host or []) if host else run.table
        page = table[entry] if entry < len(table) else entry
        words = self.tiers[host].pages.view(torch.int32).numpy().view(np.uint32)
        words[page, bit % LAYERS, bit % 2, slot, bit % HEADS, bit % HEAD_DIM] ^= np.uint32(1 << bit)

    @rule(n=st.integers(0, 3), entry=st.integers(0, 5), page=st.integers(1, PAGES))
    def change_a_table_row(self, n: int, entry: int, page: int) -> None:
        run = self.pick(n)
        if entry < len(run.table):
            run.table[entry] = page

    @rule(n=st.integers(0, 3))
    def heal(self, n: int) -> None:
        """Recompute a run into pages of its own, if there are any."""
        run = self.pick(n)
        pages = -(-len(run.facts) // PAGE)
        if pages <= len(self.free(0)):
            run.table = self.free(0)[:pages]
            if run.facts:
                self.tiers[0].forward(run.table, run.chain, 0)
            for position in range(len(run.facts)):
                self.note(0, run.table[position // PAGE], position % PAGE, run.facts[: position + 1])
            assert not self.differences(0, run.table, run)

    def differences(self, tier: int, table: list[int], run: Run) -> list[tuple[int, Difference]]:
        found = []
        for position in range(len(run.facts)):
            place = (table[position // PAGE], position % PAGE)
            fact, content = self.expected[tier].get(place, ((), b""))
            if fact != run.facts[: position + 1]:
                found.append((position, Difference.TABLE_ROW))
            elif content != self.slot_bytes(tier, *place):
                found.append((position, Difference.PAGE_BYTES))
        return found

    @invariant()
    def verify_raises_exactly_where_something_differs(self) -> None:
        for tier, worker in enumerate(self.tiers):
            tables = [run.table if tier == 0 else run.host for run in self.runs]
            batch = [
                (run, table)
                for run, table in zip(self.runs, tables, strict=True)
                if table is not None and len(table) * PAGE >= len(run.facts)
            ]
            if not batch:
                continue
            keys = [(TrajectoryId("run"), index) for index in range(len(batch))]
            chains = [run.chain.values(0, len(run.facts)) for run, _ in batch]
            table_SP = worker.table(*(table for _, table in batch), [])
            found = [
                (key, *difference)
                for key, (run, table) in zip(keys, batch, strict=True)
                for difference in self.differences(tier, table, run)
            ]
            if found:
                error = caught(lambda: worker.canary.verify(keys, table_SP, chains))  # noqa: B023
                assert (error.sequence, error.position, error.what) == found[0]
                assert f"({len(found)} positions differ)" in str(error)
            else:
                worker.canary.verify(keys, table_SP, chains)


TestCanaryMachine = CanaryMachine.TestCase
TestCanaryMachine.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
