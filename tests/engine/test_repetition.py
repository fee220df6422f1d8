"""A loop is found where the definition, taken literally, says that there is one."""

import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout.control.commands import RepetitionWatch
from rollout.engine.repetition import RepetitionFinder


def oracle(tokens: Sequence[int], watch: RepetitionWatch) -> int | None:
    """Shortest piece that the end repeats `times` times, and further back until there are `min_tokens`."""
    for piece in range(1, watch.ngram + 1):
        times = watch.times
        while times * piece < watch.min_tokens:
            times += 1
        if times * piece <= len(tokens) and tokens[-times * piece :] == tokens[-piece:] * times:
            return piece
    return None


WATCHES = st.builds(RepetitionWatch, ngram=st.integers(1, 12), times=st.integers(2, 5), min_tokens=st.integers(1, 30))
TOKENS = st.lists(st.integers(0, 2), max_size=20)


@st.composite
def outputs(draw: st.DrawFn) -> list[int]:
    """Noise, then mostly a piece over and over, perhaps cut short, perhaps with one token changed."""
    tokens = draw(TOKENS) + draw(st.lists(st.integers(0, 3), min_size=1, max_size=13)) * draw(st.integers(1, 12))
    tokens = tokens[: len(tokens) - draw(st.integers(0, 3))]
    if tokens and draw(st.booleans()):
        tokens[draw(st.integers(0, len(tokens) - 1))] = draw(st.sampled_from([0, 256, 65536]))
    return tokens


@given(outputs(), WATCHES, TOKENS)
@example([0] * 5, RepetitionWatch(ngram=1, times=2, min_tokens=5), [])
@example([0] * 4, RepetitionWatch(ngram=1, times=2, min_tokens=5), [0] * 9)
@example([256, 0, 256, 0], RepetitionWatch(ngram=2, times=2, min_tokens=1), [])
def test_finds_the_shortest_piece_and_nothing_else(
    tokens: list[int], watch: RepetitionWatch, before: list[int]
) -> None:
    """What is before `first` takes no part."""
    assert RepetitionFinder(watch).piece(array("i", [*before, *tokens]), len(before)) == oracle(tokens, watch)


@pytest.mark.parametrize("tokens", [[], [1]])
def test_too_few_tokens_are_no_loop(tokens: list[int]) -> None:
    assert RepetitionFinder(RepetitionWatch(ngram=64, times=8, min_tokens=64)).piece(array("i", tokens), 0) is None


def test_the_defaults_find_a_sentence_said_again_and_again_and_no_text() -> None:
    finder = RepetitionFinder(RepetitionWatch(ngram=64, times=8, min_tokens=64))
    draw = random.Random(1)
    text = array("i", draw.choices(range(300), k=5000))
    assert all(finder.piece(text[:end], 0) is None for end in range(0, 5000, 7))
    sentence = array("i", draw.choices(range(50_000), k=37))
    assert finder.piece(text + sentence * 7, 0) is None
    assert finder.piece(text + sentence * 8, 0) == 37
    assert finder.piece(text + sentence[:1] * 63, 0) is None
    assert finder.piece(text + sentence[:1] * 64, 0) == 1


class Counting:
    """Counts what is taken out of it."""

    def __init__(self, tokens: "array[int]") -> None:
        self.tokens = tokens
        self.touched = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def itemsize(self) -> int:
        return self.tokens.itemsize

    def __getitem__(self, part: Any) -> Any:
        piece = self.tokens[part]
        self.touched += len(piece) if isinstance(part, slice) else 1
        return piece


@pytest.mark.parametrize("length", [1000, 100_000])
def test_what_a_look_costs_does_not_depend_on_the_length_of_the_output(length: int) -> None:
    """On text; `every` looks then cost a bounded number of tokens for each token sampled."""
    watch = RepetitionWatch(ngram=64, times=8, min_tokens=64)
    tokens = Counting(array("i", random.Random(2).choices(range(300), k=length)))
    finder = RepetitionFinder(watch)
    assert finder.piece(tokens, 0) is None  # type: ignore[arg-type]
    assert tokens.touched <= (watch.ngram + 8)
    assert tokens.touched / finder.every <= 9
