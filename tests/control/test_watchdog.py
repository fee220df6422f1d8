"""Case E3: for how long nothing went on although something could, and what is told of it."""

import json
from dataclasses import replace

import pytest

from rollout.errors import StalledError
from rollout.types import AbortReason, Keep
from tests.control.stage import W1, W2, Stage, facts, member

A = member("a")


def stalled(stage: Stage, seconds: float = 100.0) -> float:
    """After so many seconds in which only the clock ticks and workers say how they are."""
    for _ in range(10):
        stage.wait(seconds / 10)
        for worker in stage.controller._fleet.workers:
            stage.report(worker.worker_id, facts=facts())
    return stage.controller.stalled_s(stage.now)


def test_with_nothing_to_do_nothing_is_stalled() -> None:
    stage = Stage(W1)
    assert stalled(stage) == 0.0
    stage.submit("a")
    stage.finish(A, 1)
    assert stalled(stage) == 0.0


def test_what_runs_and_is_not_heard_of_is_stalled_since_it_was_heard_of_last() -> None:
    stage = Stage(W1)
    stage.wait(1000.0)
    stage.submit("a")
    assert stage.controller.stalled_s(stage.now) == 0.0, "before that there was nothing to do"
    assert stalled(stage) == pytest.approx(100.0)
    stage.sample(A)
    assert stage.controller.stalled_s(stage.now) == 0.0
    assert stalled(stage, 50.0) == pytest.approx(50.0)


@pytest.mark.parametrize("keep", [Keep.POOL, Keep.HOST])
def test_whatever_is_waited_for_counts(keep: Keep) -> None:
    stage = Stage(W1)
    stage.submit("a")
    stage.sample(A, 2)
    stage.abort(A, keep=keep)
    stage.park(A)
    assert stalled(stage) == pytest.approx(100.0)


def test_while_every_worker_is_still_coming_nothing_is_stalled() -> None:
    """They have a deadline of their own, after which there is no worker left."""
    stage = Stage(size=1)
    stage.submit("a")
    assert stalled(stage) == 0.0
    stage.up(W1)
    assert stalled(stage) == pytest.approx(100.0)


def test_a_worker_that_computes_is_heard_of_without_events() -> None:
    """Such as one that prefills for long."""
    stage = Stage(W1)
    stage.submit("a")
    stage.report(W1, facts=facts())
    for computed in (100, 200):
        stage.wait(100.0)
        assert stage.controller.stalled_s(stage.now) == pytest.approx(100.0)
        stage.report(W1, facts=replace(facts(), computed_tokens=computed))
        assert stage.controller.stalled_s(stage.now) == 0.0
    stage.wait(100.0)
    stage.report(W1, facts=replace(facts(), computed_tokens=200))
    assert stage.controller.stalled_s(stage.now) == pytest.approx(100.0)


def test_what_is_held_or_waits_for_its_caller_is_not_stalled() -> None:
    stage = Stage(W1)
    stage.submit("a")
    stage.submit("b", multi_turn=True)
    stage.hold(A)
    stage.park(member("b"), AbortReason.TURN)
    stage.answer_all()
    assert stalled(stage) == 0.0
    stage.resume(A)
    assert stage.controller.stalled_s(stage.now) == 0.0, "it was asked for only now"
    assert stalled(stage) == pytest.approx(100.0)


def test_a_pause_is_no_stall_and_what_follows_counts_from_its_end() -> None:
    stage = Stage(W1)
    stage.submit("a")
    stage.controller.pause(stage.now)
    assert stalled(stage) == 0.0
    stage.controller.unpause(stage.now)
    assert stage.controller.stalled_s(stage.now) == 0.0
    assert stalled(stage) == pytest.approx(100.0)


def test_news_of_pools_and_empty_reports_are_no_progress() -> None:
    stage = Stage(W1)
    stage.submit("a")
    stage.now += 50.0
    stage.room(W1, free=1, budget=2)
    stage.report(W1)
    assert stage.controller.stalled_s(stage.now) == pytest.approx(50.0)


def test_a_worker_that_comes_or_goes_is_progress() -> None:
    stage = Stage(W1)
    stage.submit("a")
    stage.now += 50.0
    stage.controller.expect_workers(1)
    stage.up(W2)
    assert stage.controller.stalled_s(stage.now) == 0.0


def test_what_waits_only_for_a_window_whose_groups_wait_for_their_callers_is_not_stalled() -> None:
    """Nothing can go on before somebody extends or resumes something."""
    stage = Stage(W1)
    stage.collect(1)
    stage.submit("a", multi_turn=True)
    stage.submit("b")
    stage.sample(A, 2)
    stage.park(A, AbortReason.TURN)
    stage.answer_all()
    assert stalled(stage) == 0.0 or stage.running == {member("b")}


def test_the_state_names_who_does_what_and_can_be_written_down() -> None:
    stage = Stage(W1, room=2)
    stage.submit("a", 12)
    stage.sample(A, 3)
    stage.abort(A)
    stage.park(A)
    stage.hold(member("a", 1), keep=Keep.NONE)
    stage.unanswered.clear()
    assert stalled(stage, 30.0) == pytest.approx(30.0)
    state = json.loads(json.dumps(stage.controller.state(stage.now)))
    assert state["stalled_s"] == 30.0
    assert state["phases"]["queued"] == len(stage.phases()) - 2 - len(stage.running)
    assert set(state["workers"]["w1"]["running"]) == set(stage.running)
    assert (state["workers"]["w1"]["max_running"], state["workers"]["w1"]["draining"]) == (2, False)
    assert len(state["queued"]) == 8, "the first ones"
    (moving,) = [each for each in state["moving"] if each["trajectory"] == "a/0"] or [{}]
    assert moving == {} or (moving["phase"], moving["tokens"]) == ("suspending", 3)
    assert state["window"] is None


def test_the_error_says_what_everything_was_doing() -> None:
    stage = Stage(W1)
    stage.submit("a")
    state = json.dumps(stage.controller.state(stage.now))
    error = StalledError("nothing went on for 3 s", state=state)
    assert "nothing went on for 3 s" in str(error)
    assert "a/0" in str(error)
