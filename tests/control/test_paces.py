"""A line through measurements: exact where they lie on one, never below zero, and not forgotten for lack of spread."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.control.paces import DECAY, PaceMeter


def seen(*measurements: tuple[float, float]) -> PaceMeter:
    meter = PaceMeter()
    for units, seconds in measurements:
        meter.saw(units, seconds)
    return meter


def test_nothing_is_known_before_anything_was_seen() -> None:
    assert PaceMeter().pace is None


@given(st.lists(st.integers(1, 10**12), min_size=2, max_size=40).filter(lambda sizes: max(sizes) > 1.5 * min(sizes)))
def test_measurements_on_a_line_give_the_line(sizes: list[int]) -> None:
    """Bytes, too: no digits are lost."""
    fixed_s, unit_s = 0.002, 1e-10
    pace = seen(*((size, fixed_s + unit_s * size) for size in sizes)).pace
    assert pace is not None
    for size in (min(sizes), max(sizes)):
        assert pace.seconds(size) == pytest.approx(fixed_s + unit_s * size, rel=1e-4)


def test_of_one_size_only_all_is_proportional_to_it() -> None:
    pace = seen(*[(256, 0.5), (256, 1.5)] * 3).pace
    assert pace is not None
    assert pace.fixed_s == 0
    assert pace.seconds(256) == pytest.approx(1.0, abs=0.02)


def test_something_of_no_size_takes_a_fixed_time() -> None:
    pace = seen((0, 0.5)).pace
    assert pace is not None
    assert (pace.fixed_s, pace.unit_s) == (0.5, 0.0)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0, 100)), min_size=1, max_size=60))
def test_neither_part_is_ever_negative(measurements: list[tuple[int, float]]) -> None:
    pace = seen(*measurements).pace
    assert pace is not None
    assert pace.fixed_s >= 0
    assert pace.unit_s >= 0


def test_what_takes_longer_the_smaller_it_is_takes_a_fixed_time() -> None:
    pace = seen(*[(1, 3.0), (100, 1.0)] * 50).pace
    assert pace is not None
    assert pace.unit_s == 0
    assert pace.fixed_s == pytest.approx(2.0, abs=0.05)


def test_the_latest_measurements_count_most() -> None:
    """The weights are those of the docstring: least squares by hand over all of them."""
    draw = random.Random(3)
    sizes = [draw.randint(1, 64) for _ in range(300)]
    measurements = [(size, (0.01 + 0.001 * size) * (1 if index < 100 else 2)) for index, size in enumerate(sizes)]
    pace = seen(*measurements).pace
    assert pace is not None
    weights = [DECAY ** (len(sizes) - 1 - index) for index in range(len(sizes))]
    total = sum(weights)
    mean_u = sum(w * u for w, (u, _) in zip(weights, measurements, strict=True)) / total
    mean_s = sum(w * s for w, (_, s) in zip(weights, measurements, strict=True)) / total
    pairs = list(zip(weights, measurements, strict=True))
    slope = sum(w * (u - mean_u) * (s - mean_s) for w, (u, s) in pairs) / sum(
        w * (u - mean_u) ** 2 for w, (u, _) in pairs
    )
    assert pace.unit_s == pytest.approx(slope)
    assert pace.fixed_s == pytest.approx(mean_s - slope * mean_u)
    assert pace.seconds(32) == pytest.approx(0.084, rel=0.02)


def test_a_batch_that_stays_of_one_size_does_not_make_it_forget_how_size_matters() -> None:
    draw = random.Random(4)

    def step_s(size: int) -> float:
        return (0.010 + 0.0001 * size) * draw.uniform(0.95, 1.05)

    sizes = [*(draw.randint(1, 64) for _ in range(200)), *[64] * 5000]
    pace = seen(*((size, step_s(size)) for size in sizes)).pace
    assert pace is not None
    assert pace.seconds(64) == pytest.approx(0.0164, rel=0.05)
    assert pace.seconds(1) == pytest.approx(0.0101, rel=0.25)
