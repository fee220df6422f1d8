"""Which images a full pool gives up: the latest first, weighed by what they spare, never more than needed."""

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from rollout.kv.displacement import StoredImage, choose_victims
from rollout.types import SegmentId, TrajectoryId, Turn, Wait

NOW = Turn(Wait.QUEUED, 0)


def turn(order: int) -> Turn:
    return Turn(Wait.QUEUED, order)


def image(name: str, order: int, segments: str, *, tokens: int = 10, pinned: bool = False) -> StoredImage:
    """Each segment is a letter."""
    return StoredImage(
        trajectory=TrajectoryId(name),
        turn=turn(order),
        kv_tokens=tokens,
        segments=frozenset(SegmentId(segment) for segment in segments),
        pinned=pinned,
    )


def victims(need: int, images: Sequence[StoredImage], order: int = 0, **nbytes: int) -> list[str]:
    """Segments have 10 bytes unless said otherwise."""
    freeable = {segment: 10 for image in images for segment in image.segments}
    freeable |= {SegmentId(segment): size for segment, size in nbytes.items()}
    return list(choose_victims(images, freeable, need=need, turn=turn(order)))


def test_the_image_that_is_needed_last_goes_first_and_no_more_than_needed() -> None:
    images = [image("b", 2, "b"), image("d", 4, "d"), image("a", 1, "a"), image("c", 3, "c")]
    assert victims(1, images) == victims(10, images) == ["d"]
    assert victims(11, images) == ["d", "c"]
    assert victims(40, images) == ["d", "c", "b", "a"]


def test_nothing_goes_for_what_is_needed_later_or_cannot_fit_all_the_same() -> None:
    images = [image("a", 1, "a"), image("b", 2, "b"), image("c", 3, "c")]
    assert victims(10, images, order=3) == []
    assert victims(10, images, order=2) == ["c"]
    assert victims(11, images, order=2) == []
    assert victims(31, images) == []


def test_what_is_held_goes_before_what_is_queued_and_what_runs_before_both() -> None:
    turns = {"queued": Turn(Wait.QUEUED, 7), "held": Turn(Wait.HELD, 2), "running": Turn(Wait.RUNNING, 1)}
    images = [
        StoredImage(trajectory=TrajectoryId(name), turn=turn, kv_tokens=10, segments=[SegmentId(name)], pinned=False)
        for name, turn in turns.items()
    ]
    sizes = {SegmentId(name): 10 for name in turns}
    assert choose_victims(images, sizes, need=30, turn=NOW) == ["running", "held", "queued"]
    assert choose_victims(images, sizes, need=20, turn=Turn(Wait.HELD, 1)) == ["running", "held"]


def test_what_is_pinned_stays() -> None:
    images = [image("a", 1, "a"), image("b", 2, "b", pinned=True)]
    assert victims(10, images) == ["a"]
    assert victims(11, images) == []


def test_an_image_is_worth_the_tokens_it_spares_for_the_bytes_that_only_it_needs() -> None:
    images = [image("dear", 3, "d", tokens=30), image("cheap", 2, "c", tokens=10)]
    assert victims(10, images) == ["cheap"]  # 2 × 10 / 10 against 3 × 10 / 30
    siblings = [image("x", 3, "px", tokens=20), image("y", 4, "py", tokens=20), image("alone", 2, "a", tokens=20)]
    assert victims(10, siblings, x=2, y=2, a=20, p=100) == ["alone"]


def test_what_siblings_share_is_freed_by_the_last_of_them() -> None:
    siblings = [image("x", 1, "px"), image("y", 2, "py")]
    assert victims(21, siblings) == ["y", "x"]
    assert victims(30, siblings) == ["y", "x"]
    assert victims(31, siblings) == []


def test_one_that_would_be_given_up_for_nothing_is_spared() -> None:
    images = [image("small", 9, "s"), image("large", 1, "l", tokens=30)]
    assert victims(30, images, l=30, s=10) == ["large"]  # although small is the first choice
    assert victims(31, images, l=30, s=10) == ["small", "large"]


def test_bytes_that_do_not_come_free_do_not_count() -> None:
    images = [image("read", 2, "r"), image("a", 1, "a")]
    assert victims(10, images, r=0) == ["a"]
    assert victims(11, images, r=0) == []


letters = st.sampled_from("pqrstuvw")
stored = st.builds(
    lambda segments, tokens, pinned: (segments, tokens, pinned),
    st.frozensets(letters, min_size=1, max_size=4),
    st.integers(1, 50),
    st.integers(0, 4).map(lambda number: number == 4),
)


@given(
    images=st.lists(stored, max_size=7),
    sizes=st.fixed_dictionaries({letter: st.integers(0, 9) for letter in "pqrstuvw"}),
    need=st.integers(1, 40),
    order=st.integers(0, 7),
)
def test_it_frees_enough_with_none_to_spare_or_nothing(
    images: list[tuple[frozenset[str], int, bool]], sizes: Mapping[str, int], need: int, order: int
) -> None:
    made = [
        image(str(number), number, "".join(sorted(segments)), tokens=tokens, pinned=pinned)
        for number, (segments, tokens, pinned) in enumerate(images)
    ]

    def freed(gone: set[str]) -> int:
        left = {segment for one in made if one.trajectory not in gone for segment in one.segments}
        return sum(sizes[s] for s in {s for one in made for s in one.segments} - left)

    chosen = victims(need, made, order, **sizes)
    able = {one.trajectory for one in made if not one.pinned and one.turn > turn(order)}
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= able
    if chosen:
        assert freed(set(chosen)) >= need
        assert all(freed(set(chosen) - {one}) < need for one in chosen)
    else:
        assert freed(set(able)) < need
