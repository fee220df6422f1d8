"""Page numbers are handed out once and taken back once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.kv.pages import PageAllocator


def test_every_page_but_scratch_is_handed_out_once() -> None:
    pages = PageAllocator(5)
    taken = [page for _ in range(5) for page in pages.take(1) or ()]
    assert sorted(taken) == [1, 2, 3, 4, 5]
    assert pages.free == 0
    assert pages.owned() == set(taken)


def test_taking_more_than_is_free_takes_nothing() -> None:
    pages = PageAllocator(3)
    pages.take(2)
    assert pages.take(2) is None
    assert pages.free == 1
    assert pages.take(1) is not None


@pytest.mark.parametrize("page", [0, 2])
def test_giving_back_what_is_not_owned_asserts(page: int) -> None:
    pages = PageAllocator(2)
    assert pages.take(1) == [1]
    with pytest.raises(AssertionError, match=f"page {page} given back but not owned"):
        pages.give([page])


def test_a_tier_may_have_no_pages() -> None:
    pages = PageAllocator(0)
    assert pages.take(1) is None
    assert pages.take(0) == []


def test_giving_back_twice_asserts() -> None:
    pages = PageAllocator(2)
    taken = pages.take(1)
    assert taken is not None
    assert pages.give(taken) == 1
    with pytest.raises(AssertionError, match="not owned"):
        pages.give(taken)
    assert pages.free == 2


@given(total=st.integers(1, 9), wishes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30))
def test_any_takes_and_gives_agree_with_a_set(total: int, wishes: list[tuple[int, int]]) -> None:
    pages = PageAllocator(total)
    owned: list[int] = []
    for take, give in wishes:
        taken = pages.take(take)
        assert (taken is None) == (take > total - len(owned))
        owned += taken or []
        back, owned = owned[:give], owned[give:]
        assert pages.give(back) == len(back)
        assert len(set(owned)) == len(owned)
        assert pages.owned() == set(owned)
        assert pages.free == total - len(owned)
        assert set(owned) <= set(range(1, total + 1))
