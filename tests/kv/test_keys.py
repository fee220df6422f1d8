"""A page's name covers everything its bytes depend on, and nothing that comes after it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.kv.keys import KEY_BYTES, Fingerprint, PageKey, PageNames, root_key
from rollout.kv.written import Written
from rollout.types import Version, Weights, WeightsId

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


def test_more_pages_than_tokens_asserts() -> None:
    with pytest.raises(AssertionError):
        PageNames(ROOT, page_tokens=PAGE, written=by("w")).of(TOKENS, 4)
