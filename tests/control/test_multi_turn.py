"""Turns: a stop ends one, `extend` appends what was not sampled and continues; nothing is lost or sampled twice."""

from typing import Any

import pytest

from rollout.control.commands import Release
from rollout.errors import NotExtendableError, PromptTooLongError
from rollout.types import AbortReason, FinishReason, Keep, Phase, Then
from tests.control.stage import W1, W2, Stage, member, start_of, started, stopped, submission

A = member("a")


def waiting(*, tokens: int = 3, policies: Any = (), context: int = 4096, **fields: Any) -> Stage:
    """A stage on which a has ended a turn of so many tokens, its KV in the pool."""
    stage = Stage(W1, policies=policies, context=context)
    stage.submit("a", multi_turn=True, **fields)
    turn(stage, tokens)
    return stage


def turn(stage: Stage, tokens: int) -> None:
    stage.admit(A)
    stage.sample(A, tokens)
    stage.park(A, AbortReason.TURN)
    stage.answer_all()


def test_a_stop_ends_a_turn_and_the_trajectory_waits_for_its_caller() -> None:
    stage = waiting()
    assert start_of(stage.commands, A).assignment.watch.turns
    assert (stage.phase(A), stage.controller.suspended) == (Phase.SUSPENDED, {"waiting": 1})
    (partial,) = stage.controller.turns({}, 999)
    assert (partial.trajectory_id, partial.output_ids, partial.finish_reason) == (A, (100, 101, 102), None)
    assert stage.controller.coming_groups == 0
    assert not stage.controller.busy


def test_without_turns_a_worker_is_not_told_of_them() -> None:
    stage = Stage(W1)
    stage.submit("a")
    assert not start_of(stage.commands, A).assignment.watch.turns


def test_what_is_appended_follows_what_was_sampled_and_is_masked() -> None:
    """Case B3: all columns are of one length after every step."""
    stage = waiting()
    assert started(stage.extend(A, [7, 8])) == [(W1, A)]
    assignment = start_of(stage.commands, A).assignment
    assert list(assignment.output.ids) == [100, 101, 102, 7, 8]
    assert assignment.image is not None
    assert assignment.image.kv_tokens == assignment.kv_tokens == 6, "only the last token and the new ones are prefilled"
    turn(stage, 2)
    stage.extend(A, [9])
    stage.finish(A, 1)
    trajectory = stage.take_one()
    assert trajectory.output_ids == (100, 101, 102, 7, 8, 105, 106, 9, 108)
    assert trajectory.loss_mask == (1, 1, 1, 0, 0, 1, 1, 0, 1)
    assert trajectory.logprobs == (-0.5, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5, 0.0, -0.5)
    assert [(run.version, run.tokens) for run in trajectory.versions] == [(0, 3), (None, 2), (0, 2), (None, 1), (0, 1)]
    assert (trajectory.sampled_tokens, trajectory.suspensions) == (6, 2)
    assert stage.controller.counters.tokens == 6


def test_a_call_that_is_told_twice_appends_once() -> None:
    stage = waiting()
    stage.extend(A, [7], "one")
    assert stage.extend(A, [7], "one") == []
    assert list(stage.record(A).columns.ids) == [100, 101, 102, 7]
    turn(stage, 1)
    assert stage.extend(A, [7], "one") == [], "however late"
    assert stage.phase(A) is Phase.SUSPENDED
    stage.extend(A, [7], "two")
    assert len(stage.record(A).columns) == 6


def test_it_may_be_extended_while_its_kv_is_put_away() -> None:
    stage = Stage(W1)
    stage.submit("a", multi_turn=True)
    stage.sample(A, 3)
    stage.park(A, AbortReason.TURN)
    assert stage.phase(A) is Phase.SUSPENDING
    stage.extend(A, [7])
    assert stage.controller.turns({}, 999) == []
    stage.answer_all()
    assert stage.running == {A}
    assert list(start_of(stage.commands, A).assignment.output.ids) == [100, 101, 102, 7]


def test_what_was_stopped_by_a_driver_may_be_extended_too() -> None:
    stage = Stage(W1)
    stage.submit("a")
    stage.sample(A, 3)
    stage.hold(A)
    stage.extend(A, [7])
    assert stage.running == {A}


@pytest.mark.parametrize("phase", ["queued", "prefilling", "decoding", "stopping to finish", "finished", "unknown"])
def test_what_is_not_suspended_cannot_be_extended(phase: str) -> None:
    stage = Stage(*([W1] if phase != "queued" else []), size=1)
    if phase != "unknown":
        stage.submit("a", multi_turn=True)
    if phase in ("decoding", "stopping to finish", "finished"):
        stage.sample(A, 3)
    if phase == "stopping to finish":
        stage.abort(A, then=Then.FINISH)
    if phase == "finished":
        stage.finish(A)
    with pytest.raises(NotExtendableError, match=r"a/0.*(it is|no such)"):
        stage.extend(A, [7], "one")
    assert phase == "unknown" or 7 not in stage.record(A).columns.ids


@pytest.mark.parametrize(("appended", "fits"), [(56, True), (57, False)])
def test_one_more_token_must_fit_into_the_context(appended: int, fits: bool) -> None:
    """Case B2: 4 of the prompt, 3 sampled, and the next one."""
    stage = waiting(context=64)
    if not fits:
        with pytest.raises(PromptTooLongError, match="7 tokens and 57 more, allowed: fewer than the context of 64"):
            stage.extend(A, range(appended))
        assert (len(stage.record(A).columns), stage.phase(A)) == (3, Phase.SUSPENDED)
        return
    stage.extend(A, range(appended))
    assert stage.record(A).tokens == 63
    assert stage.running == {A}
    stage.finish(A, 1, FinishReason.LENGTH)
    assert len(stage.take_one().output_ids) == 60


def test_a_resume_at_the_context_length_less_one_samples_one_token() -> None:
    """Case B2; with not one more, it is over without a worker."""
    for tokens, runs in ((59, True), (60, False)):
        stage = Stage(W1, context=64)
        stage.submit("a", budget=1000)
        stage.sample(A, tokens)
        stage.hold(A)
        assert bool(started(stage.resume(A))) == runs
        if not runs:
            trajectory = stage.take_one()
            assert (trajectory.finish_reason, len(trajectory.output_ids)) == (FinishReason.LENGTH, 60)


def test_budgets_count_what_was_sampled_over_all_turns_and_not_what_was_appended() -> None:
    stage = waiting(budget=5)
    stage.extend(A, range(20))
    assert stage.running == {A}
    turn(stage, 2)
    assert started(stage.extend(A, [7])) == []
    trajectory = stage.take_one()
    assert (trajectory.finish_reason, trajectory.sampled_tokens) == (FinishReason.LENGTH, 5)
    assert trajectory.output_ids[-1] == 7


def test_what_waits_for_its_caller_is_resumed_by_nothing_else() -> None:
    stage = waiting()
    report, commands = stage.controller.resume([A], stage.now)
    assert (report.resumed, report.unknown, commands) == ((), (A,), [])
    report, _ = stage.controller.resume(None, stage.now)
    assert report.resumed == ()
    assert stage.phase(A) is Phase.SUSPENDED


def test_what_ends_a_turn_as_it_is_to_give_way_waits_for_its_caller() -> None:
    """It would go on after its own end otherwise."""
    stage = Stage(W1, room=1)
    stage.submit("a", multi_turn=True)
    stage.sample(A, 3)
    assert stopped(stage.evaluate("e")) == [A]
    stage.park(A, AbortReason.TURN)
    stage.answer_all()
    stage.finish(member("e"), 1)
    assert stage.phase(A) is Phase.SUSPENDED
    assert [each.trajectory_id for each in stage.controller.turns({}, 999)] == [A]


def test_to_finish_it_where_it_waits_is_to_stop_by_itself() -> None:
    stage = waiting()
    stage.abort(A, then=Then.FINISH)
    trajectory = stage.take_one()
    assert (trajectory.finish_reason, trajectory.abort_reason) == (FinishReason.STOP, None)
    assert stage.controller.turns({}, 999) == []


def test_what_waits_may_be_dropped_discarded_and_begun_again() -> None:
    for then in (Then.DROP, Then.RETRY):
        stage = waiting()
        stage.abort(A, then=then)
        assert stage.phase(A) is (Phase.DROPPED if then is Then.DROP else Phase.PREFILLING)
        assert stage.controller.turns({}, 999) == []
    stage = waiting()
    stage.discard(A)
    assert stage.find(A) is None


def test_a_turn_that_was_extended_is_no_more_waiting_when_a_driver_stops_it() -> None:
    stage = waiting()
    stage.extend(A, [7])
    stage.hold(A)
    assert stage.controller.turns({}, 999) == []
    stage.resume(A)
    assert stage.running == {A}


def test_what_waits_loses_its_kv_and_nothing_else_with_its_worker() -> None:
    stage = Stage(W1, W2)
    stage.submit("a", multi_turn=True)
    home = stage.record(A).worker
    assert home is not None
    stage.sample(A, 3)
    stage.abort(A, keep=Keep.HOST)
    stage.park(A, AbortReason.TURN)
    stage.answer_all()
    stage.down(home)
    assert [each.trajectory_id for each in stage.controller.turns({}, 999)] == [A]
    stage.extend(A, [7])
    other = W2 if home == W1 else W1
    assert started(stage.commands)[-1] == (other, A)
    assert start_of(stage.commands, A).assignment.kv_tokens == 6


def test_turns_are_told_oldest_first() -> None:
    stage = Stage(W1)
    stage.submit_all(*(submission(group, multi_turn=True) for group in "abc"))
    for group in "cab":
        stage.park(member(group), AbortReason.TURN)
        stage.answer_all()
    assert [each.group_id for each in stage.controller.turns({}, 999)] == ["a", "b", "c"]


def test_a_group_is_not_over_while_a_member_waits() -> None:
    stage = Stage(W1)
    stage.submit("a", 2, multi_turn=True)
    stage.finish(member("a", 1), 1, FinishReason.LENGTH)
    turn(stage, 1)
    assert stage.take() == []
    stage.extend(A, [7])
    stage.finish(A, 1)
    assert [len(each.trajectories) for each in stage.take()] == [2]


def test_the_kv_of_a_turn_is_released_or_kept_exactly_once() -> None:
    stage = waiting()
    assert len([each for each in stage.commands if isinstance(each, Release)]) == 1
