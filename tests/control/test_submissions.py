"""Submissions are taken in all or none, and may be told twice."""

import dataclasses

import pytest

from rollout.errors import DuplicateKeyError
from rollout.types import SamplingParams, TrajectoryId
from tests.control.scene import PROMPT, W1, Scene, T, finished, sampled, starts, submission


def test_groups_that_are_submitted_together_start_in_their_order() -> None:
    scene = Scene(W1, room=9)
    assert [t for _, t, _ in starts(scene.submit_all(submission("a", n=2), submission("b")))] == ["a/0", "a/1", "b/0"]
    assert scene.controller.counters.trajectories == 3


@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_duplicate_among_three_takes_none_of_them_in(position: int) -> None:
    scene = Scene(W1)
    scene.submit()
    three = [submission("a"), submission("b")]
    three.insert(position, submission("g", budget=3))
    with pytest.raises(DuplicateKeyError, match="'g'"):
        scene.submit_all(*three)
    assert scene.trajectories == [T]
    assert scene.controller.counters.trajectories == 1
    assert scene.controller.coming_groups == 1
    assert len(starts(scene.submit_all(submission("a"), submission("b")))) == 2, "their keys are not in use"


@pytest.mark.parametrize("second", [submission("a"), submission("a", n=2)], ids=["equal", "different"])
def test_one_key_twice_in_a_call_takes_nothing_in(second: object) -> None:
    scene = Scene(W1)
    with pytest.raises(DuplicateKeyError, match="'a'"):
        scene.submit_all(submission("a"), submission("b"), second)  # type: ignore[arg-type]
    assert scene.trajectories == []
    assert scene.controller.coming_groups == 0


def test_an_equal_resubmission_changes_nothing_and_does_not_keep_new_ones_out() -> None:
    scene = Scene(W1)
    scene.submit_all(submission("a", n=2))
    scene.report(W1, sampled(TrajectoryId("a/0"), count=2))
    assert scene.submit_all(submission("a", n=2)) == []
    commands = scene.submit_all(submission("a", n=2), submission("b"))
    assert [t for _, t, _ in starts(commands)] == ["b/0"]
    assert scene.trajectories == ["a/0", "a/1", "b/0"]
    assert scene.controller.counters.trajectories == 3
    assert len(scene.record(TrajectoryId("a/0")).columns) == 2


def test_an_equal_resubmission_of_a_finished_group_does_not_run_it_again() -> None:
    scene = Scene(W1)
    scene.submit()
    scene.report(W1, finished())
    assert scene.submit() == []
    assert [delivery.group_id for delivery in scene.take(9)] == ["g"]
    assert scene.take(9) == []


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_ids": (*PROMPT, 6)},
        {"seeds": (1,)},
        {"sampling": (SamplingParams(max_new_tokens=7),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_resubmission_that_differs_in_anything_is_refused(change: dict[str, object]) -> None:
    scene = Scene(W1)
    scene.submit()
    with pytest.raises(DuplicateKeyError):
        scene.submit_all(dataclasses.replace(submission(), **change))  # type: ignore[arg-type]
    assert scene.trajectories == [T]


def test_a_key_that_is_used_again_meets_nothing_of_its_first_life() -> None:
    scene = Scene(W1)
    scene.submit()
    late = sampled(count=1), finished()
    scene.report(W1, finished())
    assert len(scene.take(9)) == 1
    scene.submit()
    scene.report(W1, *late)  # of the first life, told late
    assert not scene.record(T).over
    assert len(scene.record(T).columns) == 0
