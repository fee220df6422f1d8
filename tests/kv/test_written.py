"""Runs of positions and who wrote them, against a list of one name a position."""

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.kv.written import Written
from rollout.types import KVRun, Weights, first_tokens
from tests.weights import loaded

END = 24
"""Positions that are looked at."""
weights = st.integers(0, 3).map(loaded)
changes = st.lists(st.tuples(st.integers(0, 5), weights), max_size=6)
"""After how many more positions, and to what."""


def runs_of(column: list[Weights]) -> tuple[KVRun, ...]:
    return tuple(KVRun(by, len(list(run))) for by, run in groupby(column))


def build(first: Weights, steps: list[tuple[int, Weights]]) -> tuple[Written, list[Weights]]:
    """The same history as runs and as a list."""
    written, column, at = Written(first), [first] * END, 0
    for more, by in steps:
        at = min(at + more, END)
        written.change(at, by)
        column[at:] = [by] * (END - at)
    return written, column


@given(first=weights, steps=changes, tokens=st.integers(0, END), start=st.integers(0, END))
def test_it_says_what_a_list_of_positions_says(
    first: Weights, steps: list[tuple[int, Weights]], tokens: int, start: int
) -> None:
    written, column = build(first, steps)
    assert written.first == column[0]
    assert written.until(tokens) == runs_of(column[:tokens])
    purely = next((index for index, by in enumerate(column[:tokens]) if by != column[0]), tokens)
    assert written.pure(tokens) == purely
    if start < tokens:
        pieces = [*written.between(start, tokens)]
        assert [by for begin, stop, by in pieces for _ in range(begin, stop)] == column[start:tokens]
        assert [begin for begin, _, _ in pieces] == [start, *(stop for _, stop, _ in pieces[:-1])]
        assert all(begin < stop for begin, stop, _ in pieces)


@given(first=weights, steps=changes, tokens=st.integers(0, END), by=weights)
def test_what_goes_on_from_runs_is_what_went_on(
    first: Weights, steps: list[tuple[int, Weights]], tokens: int, by: Weights
) -> None:
    """Those of some positions, written on by others: the same as if the change had been seen."""
    written, column = build(first, steps)
    runs = written.until(tokens)
    later = Written.continued(runs, by)
    assert later.until(END) == runs_of(column[:tokens] + [by] * (END - tokens))
    assert later.until(tokens) == runs
    again = Written.continued(later.until(END), by)
    assert again == later


@given(first=weights, steps=changes, tokens=st.integers(0, END), fewer=st.integers(0, END + 3))
def test_first_tokens_of_runs_are_the_runs_of_the_first_tokens(
    first: Weights, steps: list[tuple[int, Weights]], tokens: int, fewer: int
) -> None:
    written, column = build(first, steps)
    assert first_tokens(written.until(tokens), fewer) == runs_of(column[: min(tokens, fewer)])


@given(steps=changes)
def test_two_histories_are_equal_if_all_their_positions_are(steps: list[tuple[int, Weights]]) -> None:
    """Whatever weights were live in between and wrote nothing."""
    one, column = build(loaded(0), steps)
    other = Written.continued(runs_of(column), steps[-1][1] if steps else loaded(0))
    assert one == other
    other.change(END, loaded(9))
    assert one != other
    assert one.until(END) == other.until(END)


def test_a_change_that_is_taken_back_before_anything_was_written_is_none() -> None:
    written = Written(loaded(0))
    written.change(5, loaded(1))
    written.change(5, loaded(0))
    assert written == Written(loaded(0))


def test_what_is_written_does_not_change() -> None:
    written = Written(loaded(0))
    written.change(5, loaded(1))
    with pytest.raises(AssertionError):
        written.change(4, loaded(2))


def test_two_loads_of_one_version_are_not_the_same() -> None:
    written = Written(loaded(0))
    written.change(3, Weights(loaded(1).weights_id, loaded(0).version))
    assert [run.tokens for run in written.until(5)] == [3, 2]
