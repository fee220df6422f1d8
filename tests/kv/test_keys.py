"""A page's name covers everything its bytes depend on, and nothing that comes after it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.kv.keys import KEY_BYTES, Fingerprint, PageKey, PageNames, root_key
from rollout.kv.written import Written
from rollout.types import KVRun, Version, Weights, WeightsId
from tests.weights import loaded

ROOT = root_key(Fingerprint("model"))
PAGE = 4
TOKENS = list(range(100, 112))


def by(weights_id: str) -> Written:
    return Written(Weights(WeightsId(weights_id), Version(0)))


def keys(
    tokens: list[int], *, root: PageKey = ROOT, weights_id: str = "w", page_tokens: int = PAGE
) -> tuple[PageKey, ...]:
    return PageNames(root, page_tokens=page_tokens, written=by(weights_id)).of(tokens, len(tokens) // page_tokens)


def test_a_name_is_the_same_in_every_process() -> None:
    assert ROOT.hex() == "d4b24a65839c66d0d37c029dfbb09332"
    assert [key.hex() for key in keys(TOKENS)] == [
        "6e2272af29061b5d46f45a88a2b758ef",
        "b007a108ee43936f8d27e205fe4abb72",
        "192456d4273d5837f5b32c7160f96e63",
    ]


@given(st.lists(st.integers(0, 2**40), max_size=20), st.integers(0, 5))
def test_names_of_a_prefix_are_the_prefix_of_the_names(tokens: list[int], pages: int) -> None:
    pages = min(pages, len(tokens) // PAGE)
    names = PageNames(ROOT, page_tokens=PAGE, written=by("w"))
    shorter = names.of(tokens[: pages * PAGE], pages)
    assert shorter == keys(tokens)[:pages]
    assert names.of(tokens, len(tokens) // PAGE) == keys(tokens)
    assert names.of(tokens, pages) == shorter
    assert all(len(key) == KEY_BYTES for key in shorter)


@given(position=st.integers(0, 11), token=st.integers(0, 2**40))
def test_a_token_changes_its_page_and_all_after_it(position: int, token: int) -> None:
    changed = [*TOKENS]
    changed[position] = token
    page = position // PAGE if token != TOKENS[position] else 3
    before, after = keys(TOKENS), keys(changed)
    assert after[:page] == before[:page]
    assert not set(after[page:]) & set(before[page:])


def test_weights_model_page_size_and_position_are_part_of_the_name() -> None:
    same_page_twice = [1, 2, 3, 4, 1, 2, 3, 4]
    names = [
        *keys(TOKENS),
        *keys(TOKENS, weights_id="v"),
        *keys(TOKENS, weights_id=""),
        *keys(TOKENS, root=root_key(Fingerprint("model2"))),
        *keys(TOKENS, page_tokens=2),
        *keys(same_page_twice),
    ]
    assert len(set(names)) == 4 * 3 + 6 + 2


@given(prefilled=st.integers(0, 12), other=st.integers(0, 12))
def test_pages_with_decoded_positions_are_named_by_where_prefill_ended(prefilled: int, other: int) -> None:
    def split(at: int | None) -> tuple[PageKey, ...]:
        return PageNames(ROOT, page_tokens=PAGE, written=by("w"), prefilled=at).of(TOKENS, 3)

    whole = prefilled // PAGE
    assert split(prefilled)[:whole] == split(None)[:whole] == keys(TOKENS)[:whole]
    assert not set(split(prefilled)[whole:]) & set(split(None))
    same = min(whole, other // PAGE) if other != prefilled else 3
    assert split(prefilled)[:same] == split(other)[:same]
    assert not set(split(prefilled)[same:]) & set(split(other)[same:])


Changes = list[tuple[int, Weights]]
changes = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3).map(loaded)), max_size=3)
"""Who wrote the first so many positions, and so on."""


def column(runs: Changes) -> list[Weights]:
    """Who wrote each of the twelve."""
    return [by for tokens, by in [*runs, (12, loaded(0))] for _ in range(tokens)][:12]


def mixed(runs: Changes) -> tuple[PageKey, ...]:
    written = Written.continued([KVRun(by, tokens) for tokens, by in runs], loaded(0))
    return PageNames(ROOT, page_tokens=PAGE, written=written).of(TOKENS, 3)


@given(changes, changes)
def test_pages_have_one_name_if_and_only_if_the_same_weights_wrote_all_positions_up_to_their_end(
    one: Changes, other: Changes
) -> None:
    """Where in a page the weights changed is part of its name, and of all that follow; a pure chain is named as one."""
    for page in range(3):
        end = (page + 1) * PAGE
        same = column(one)[:end] == column(other)[:end]
        assert (mixed(one)[page] == mixed(other)[page]) == same
    assert len(set(mixed(one))) == 3


@given(changes)
def test_names_do_not_depend_on_when_they_are_made(runs: Changes) -> None:
    """All at the end, or as soon as a page is full, with the weights replaced behind it."""
    by = column(runs)
    written = Written(by[0])
    names = PageNames(ROOT, page_tokens=PAGE, written=written)
    for position in range(12):
        written.change(position, by[position])
        names.of(TOKENS[: position + 1], (position + 1) // PAGE)
    assert names.of(TOKENS, 3) == mixed(runs)


@pytest.mark.parametrize("at", range(13))
def test_names_that_are_forgotten_are_made_again_as_others_wrote_the_pages(at: int) -> None:
    """A sequence lost its pages and computes them anew; the weights are replaced when it has `at` positions."""
    written = Written(loaded(5))
    names = PageNames(ROOT, page_tokens=PAGE, written=written)
    before = names.of(TOKENS, 3)
    written.change(at, loaded(6))
    names.forget(at)
    after = names.of(TOKENS, 3)
    assert after[: at // PAGE] == before[: at // PAGE]
    assert not set(after[at // PAGE :]) & set(before)
    assert after == mixed([(at, loaded(5)), (12, loaded(6))] if at else [(12, loaded(6))])


def test_the_same_tokens_are_named_by_other_weights_without_a_trace_of_the_first() -> None:
    names = PageNames(ROOT, page_tokens=PAGE, written=Written(loaded(1)))
    names.of(TOKENS, 3)
    other = Written.continued([KVRun(loaded(1), 6)], loaded(2))
    assert names.written_by(other).of(TOKENS, 3) == mixed([(6, loaded(1)), (6, loaded(2))])


def test_more_pages_than_tokens_asserts() -> None:
    with pytest.raises(AssertionError):
        PageNames(ROOT, page_tokens=PAGE, written=by("w")).of(TOKENS, 4)
