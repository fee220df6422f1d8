"""What became of stopped trajectories, as the controller saw it: against averages done by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.control.experience import OVERDUE, WEIGHT, Experience
from rollout.control.intent import Intent
from rollout.types import AbortReason, Keep, Then
from tests.control.stage import W1, Stage, member

A, B = member("a"), member("b")
HELD = Intent(keep=Keep.AUTO, then=Then.HOLD)
QUEUED = Intent(keep=Keep.AUTO, then=Then.REQUEUE, reason=AbortReason.SLICE_BUDGET)


def experience(stage: Stage) -> Experience:
    return stage.controller.keeping.experience


def with_one(**fields: object) -> Stage:
    """A stage on which a decodes, with three tokens."""
    stage = Stage(W1)
    stage.submit("a", **fields)  # type: ignore[arg-type]
    stage.admit(A)
    stage.sample(A, 3)
    return stage


def test_what_was_never_seen_is_expected_back_at_once() -> None:
    stage = with_one()
    assert experience(stage).likely(stage.record(A), HELD) == 1.0
    assert experience(stage).wait_s(stage.record(A), HELD) == 0.0


@pytest.mark.parametrize("then", [Then.FINISH, Then.DROP, Then.RETRY])
def test_what_does_not_go_on_with_what_it_has_is_never_expected_back(then: Then) -> None:
    stage = with_one()
    assert experience(stage).likely(stage.record(A), Intent(keep=Keep.AUTO, then=then)) == 0.0


def test_the_wait_is_that_between_the_park_and_the_next_start() -> None:
    stage = with_one()
    stage.hold(A)
    stage.wait(7.0)
    stage.resume(A)
    assert experience(stage).wait_s(stage.record(A), HELD) == 7.0
    stage.hold(A)
    stage.wait(17.0)
    stage.resume(A)
    assert experience(stage).wait_s(stage.record(A), HELD) == pytest.approx(7.0 + WEIGHT * 10.0)
    assert experience(stage).wait_s(stage.record(A), QUEUED) == 0.0, "that is another kind of stop"


def test_who_waits_for_room_has_that_counted() -> None:
    stage = Stage(W1, room=1)
    stage.submit("a")
    stage.submit("b")
    stage.hold(A)
    stage.wait(2.0)
    stage.resume(A)
    stage.wait(3.0)
    stage.finish(B, 1)
    assert stage.running == {A}
    assert experience(stage).wait_s(stage.record(A), HELD) == 5.0


def test_one_that_is_given_up_while_it_is_held_makes_others_less_likely_to_return() -> None:
    stage = with_one()
    stage.hold(A)
    stage.submit("b")
    stage.discard(A)
    assert experience(stage).likely(stage.record(B), HELD) == pytest.approx(1.0 - WEIGHT)
    assert experience(stage).likely(stage.record(B), QUEUED) == 1.0


def test_aborts_to_the_end_tell_nothing_about_those_that_hold() -> None:
    """Both are a driver's, but who finishes was never meant to return."""
    stage = with_one()
    stage.submit("b")
    stage.abort(A, then=Then.FINISH)
    stage.answer_all()
    assert experience(stage).likely(stage.record(B), HELD) == 1.0


@given(st.lists(st.booleans(), max_size=30))
@settings(deadline=None)
def test_likelihood_is_a_moving_average_of_returns(returns: list[bool]) -> None:
    stage = Stage(W1)
    expected = 1.0
    for number, back in enumerate(returns):
        t = member(f"g{number}")
        stage.submit(f"g{number}")
        stage.hold(t)
        if back:
            stage.resume(t)
            stage.finish(t, 1)
        else:
            stage.discard(t)
        expected += WEIGHT * (back - expected)
    stage.submit("last")
    assert experience(stage).likely(stage.record(member("last")), HELD) == pytest.approx(expected)


def test_waits_for_a_turn_are_measured_by_caller() -> None:
    stage = Stage(W1)
    turn = Intent(keep=Keep.AUTO, then=Then.HOLD, reason=AbortReason.TURN)
    for group, caller, seconds in (("a", "search", 30.0), ("b", "calculator", 0.5)):
        t = member(group)
        stage.submit(group, multi_turn=True, caller=caller)
        stage.sample(t, 2)
        stage.park(t, AbortReason.TURN)
        stage.answer_all()
        stage.wait(seconds)
        stage.extend(t, [7])
    assert experience(stage).wait_s(stage.record(A), turn) == 30.0
    assert experience(stage).wait_s(stage.record(B), turn) == 0.5


# Weights ------------------------------------------------------------------------------------------


def test_before_two_updates_were_seen_weights_are_expected_to_stay() -> None:
    stage = Stage(W1)
    assert experience(stage).same_weights(1e9, 0.0) == 1.0
    stage.live(1)
    assert experience(stage).same_weights(1e9, 0.0) == 1.0


def test_weights_are_expected_to_change_when_the_last_interval_has_passed_again() -> None:
    stage = Stage(W1)
    stage.live(1)
    stage.wait(10.0)
    stage.live(2)
    assert experience(stage).same_weights(9.0, stage.now) == 1.0
    assert experience(stage).same_weights(11.0, stage.now) == 0.0
    stage.wait(8.0)
    assert experience(stage).same_weights(1.0, stage.now) == 1.0
    assert experience(stage).same_weights(3.0, stage.now) == 0.0


def test_the_interval_between_updates_is_a_moving_average() -> None:
    stage = Stage(W1)
    for version, seconds in enumerate((0.0, 10.0, 20.0), start=1):
        stage.wait(seconds)
        stage.live(version)
    assert experience(stage).same_weights(10.0 + WEIGHT * 10.0 - 0.01, stage.now) == 1.0
    assert experience(stage).same_weights(10.0 + WEIGHT * 10.0 + 0.01, stage.now) == 0.0


def test_an_update_that_is_late_is_expected_at_any_moment_but_not_for_ever() -> None:
    """When training has ended nothing would be saved any more otherwise."""
    stage = Stage(W1)
    stage.live(1)
    stage.wait(10.0)
    stage.live(2)
    stage.wait(OVERDUE * 10.0)
    assert experience(stage).same_weights(0.1, stage.now) == 0.0
    stage.wait(0.1)
    assert experience(stage).same_weights(1000.0, stage.now) == 1.0


def test_an_update_that_is_told_twice_is_one() -> None:
    stage = Stage(W1)
    for version in (1, 1, 2, 2):
        stage.live(version)
        stage.wait(5.0)
    assert experience(stage).same_weights(4.9, 10.0) == 1.0, "10 s passed between 1 and 2"


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_kv_is_of_use_for_as_many_updates_as_it_may_be_behind(lag: int) -> None:
    stage = Stage(W1)
    stage.live(1)
    stage.wait(10.0)
    stage.live(2)
    left_s = 10.0 * (1 + lag)
    assert experience(stage).same_weights(left_s - 0.1, stage.now, updates=lag) == 1.0
    assert experience(stage).same_weights(left_s + 0.1, stage.now, updates=lag) == 0.0


@pytest.mark.parametrize(("lag", "likely"), [(0, 0.0), (1, 1.0)])
def test_what_comes_back_after_the_next_update_is_likely_to_go_on_only_if_its_kv_may_be_stale(
    lag: int, likely: float
) -> None:
    reuse = {"kind": "stale", "max_lag": lag} if lag else {"kind": "same_weights"}
    stage = Stage(W1, weights={"kv_reuse": reuse}, keep="auto")
    stage.live(1)
    stage.wait(10.0)
    stage.live(2)
    stage.submit("a")
    stage.admit(A)
    stage.sample(A, 3, version=2)
    stage.hold(A)
    stage.wait(15.0)
    stage.resume(A)
    stage.admit(A)
    stage.live(3)
    stage.hold(A)
    assert stage.controller.keeping.last[-1].likely == likely


# Room at home -------------------------------------------------------------------------------------
