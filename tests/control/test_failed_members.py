"""What a member that fails does to its group; and groups that are handed out in parts, or without a member."""

from typing import Any

import pytest

from rollout.control.commands import Release
from rollout.errors import GroupFailedError
from rollout.types import AbortReason, FinishReason, Keep, Phase, Then
from tests.control.stage import W1, W2, Stage, member, start_of, started, stopped

A0, A1, A2 = (member("a", i) for i in range(3))


def three(failed_member: str = "keep", **options: Any) -> Stage:
    """A group of three that decodes, with 3, 4 and 5 tokens."""
    rules = {"failed_member": failed_member, "max_retries": options.pop("max_retries", 1)}
    stage = Stage(W1, groups=rules, **options)
    stage.submit("a", 3)
    for t, tokens in ((A0, 3), (A1, 4), (A2, 5)):
        stage.admit(t)
        stage.sample(t, tokens)
    return stage


# A member that fails --------------------------------------------------------------------------------


def test_it_is_handed_out_with_the_others() -> None:
    stage = three("keep")
    assert stopped(stage.fail(A1)) == []
    for t in (A0, A2):
        stage.finish(t)
    (delivery,) = stage.take()
    assert delivery.raise_for_failure() is delivery
    assert [t.finish_reason for t in delivery.trajectories] == [
        FinishReason.STOP,
        FinishReason.ERROR,
        FinishReason.STOP,
    ]
    assert (delivery.trajectories[1].error, len(delivery.trajectories[1].output_ids)) == ("it cannot go on", 4)


def test_its_group_fails_with_it_at_once_and_with_a_typed_error() -> None:
    """Case E2."""
    stage = three("fail")
    assert set(stopped(stage.fail(A1, "out of luck"))) == {A0, A2}
    stage.answer_all()
    (delivery,) = stage.take()
    with pytest.raises(GroupFailedError, match="group a: a/1: out of luck"):
        delivery.raise_for_failure()
    assert [(t.finish_reason, t.abort_reason, len(t.output_ids)) for t in delivery.trajectories] == [
        (FinishReason.ABORT, AbortReason.GROUP_FAILED, 3),
        (FinishReason.ERROR, None, 4),
        (FinishReason.ABORT, AbortReason.GROUP_FAILED, 5),
    ]


@pytest.mark.parametrize("where", ["held", "being put away", "queued", "finished"])
def test_wherever_the_others_are_they_end_with_it(where: str) -> None:
    stage = three("fail")
    if where == "finished":
        stage.finish(A0)
    else:
        stage.abort(A0, then=Then.REQUEUE if where == "queued" else Then.HOLD)
        if where == "queued":
            stage.take_note(stage.controller.pause(stage.now))
        stage.park(A0)
        if where != "being put away":
            stage.answer_all()
    stage.fail(A1)
    stage.answer_all()
    (delivery,) = stage.take()
    assert delivery.error == "a/1: it cannot go on"
    ended = FinishReason.STOP if where == "finished" else FinishReason.ABORT
    assert delivery.trajectories[0].finish_reason is ended


def test_the_first_failure_is_the_one_that_is_told() -> None:
    stage = three("fail")
    stage.fail(A1, "first")
    stage.fail(A0, "second")
    stage.answer_all()
    (delivery,) = stage.take()
    assert delivery.error == "a/1: first"
    assert [t.error for t in delivery.trajectories] == ["second", "first", None]


def test_when_no_worker_is_left_groups_fail_too() -> None:
    """Case E2."""
    stage = three("fail")
    stage.hold(A0)
    stage.down(W1, final=True)
    (delivery,) = stage.take()
    with pytest.raises(GroupFailedError, match="no worker is left"):
        delivery.raise_for_failure()
    assert delivery.trajectories[0].finish_reason is FinishReason.ABORT, "it was held, and nobody will want it"


def test_a_retry_goes_on_from_its_tokens() -> None:
    stage = three("retry")
    assert started(stage.fail(A1)) == [(W1, A1)]
    assignment = start_of(stage.commands, A1).assignment
    assert (list(assignment.output.ids), assignment.epoch) == ([100, 101, 102, 103], 2)
    assert stage.controller.counters.retries == 1
    for t in (A0, A1, A2):
        stage.finish(t, 1)
    (delivery,) = stage.take()
    assert (delivery.error, delivery.trajectories[1].attempts) == (None, ())
    assert len(delivery.trajectories[1].output_ids) == 5


def test_a_replacement_begins_clean_and_the_old_tokens_are_beside_it() -> None:
    """Case E6."""
    stage = three("replace")
    assert started(stage.fail(A1)) == [(W1, A1)]
    assignment = start_of(stage.commands, A1).assignment
    assert (len(assignment.output), assignment.kv_tokens, assignment.image) == (0, 0, None)
    stage.sample(A1, 2, version=3)
    for t in (A0, A1, A2):
        stage.finish(t)
    trajectory = stage.take()[0].trajectories[1]
    assert [(run.version, run.tokens) for run in trajectory.versions] == [(3, 2)]
    (attempt,) = trajectory.attempts
    assert (attempt.output_ids, attempt.error, attempt.reason) == ((100, 101, 102, 103), "it cannot go on", None)
    assert attempt.seed == 1
    assert trajectory.seed not in (0, 1, 2)


def test_a_replacement_does_not_start_from_the_image_of_what_it_replaces() -> None:
    stage = three("replace")
    stage.hold(A1, keep=Keep.POOL)
    stage.resume(A1)
    assert start_of(stage.commands, A1).assignment.image is not None
    stage.fail(A1)
    assignment = start_of(stage.commands, A1).assignment
    assert (assignment.image, len(assignment.output)) == (None, 0)


@pytest.mark.parametrize("rule", ["retry", "replace"])
def test_after_its_last_retry_its_group_fails(rule: str) -> None:
    """Case E2: in a number of failures that is bounded."""
    stage = three(rule, max_retries=2)
    for _ in range(2):
        assert started(stage.fail(A1)) == [(W1, A1)]
    assert set(stopped(stage.fail(A1))) == {A0, A2}
    stage.answer_all()
    (delivery,) = stage.take()
    assert delivery.error == "a/1: it cannot go on"
    assert stage.controller.counters.retries == 2


def test_each_member_has_retries_of_its_own() -> None:
    stage = three("retry")
    for t in (A0, A1, A2):
        assert started(stage.fail(t)) == [(W1, t)]


@pytest.mark.parametrize("rule", ["retry", "replace"])
@pytest.mark.parametrize("then", Then)
def test_one_that_fails_as_it_is_stopped_is_stopped_all_the_same(rule: str, then: Then) -> None:
    stage = three(rule)
    ticket = stage.abort(A1, then=then)
    stage.fail(A1)
    assert ticket.done
    again = (Phase.PREFILLING,)
    expected = {Then.HOLD: (Phase.SUSPENDED,), Then.FINISH: (Phase.FINISHED,), Then.DROP: (Phase.DROPPED,)}
    assert stage.phase(A1) in expected.get(then, again)


def test_workers_lost_under_a_member_make_it_fail_and_it_is_tried_again() -> None:
    stage = Stage(W1, W2, groups={"failed_member": "retry"})
    stage.submit("a")
    for number in range(8):
        worker = stage.record(A0).worker
        assert worker is not None
        stage.down(worker, incarnation="a")
        stage.up(worker)
        assert (stage.record(A0).failures, stage.record(A0).over) == ((number + 1) // 4, number == 7) or number == 7
    trajectory = stage.take_one()
    assert "4 workers were lost under it" in str(trajectory.error)


def test_one_that_began_again_by_a_driver_is_clean() -> None:
    """Case E6: tokens beside, fresh draws, one version, no KV of before."""
    stage = three()
    stage.abort(A0, keep=Keep.POOL, then=Then.RETRY)
    assert isinstance(stage.park(A0)[0], Release)
    assignment = start_of(stage.commands, A0).assignment
    assert (len(assignment.output), assignment.image, assignment.kv_tokens) == (0, None, 0)
    stage.sample(A0, 2, version=5)
    stage.finish(A0)
    for t in (A1, A2):
        stage.finish(t)
    first = stage.take()[0].trajectories[0]
    assert [run.version for run in first.versions] == [5]
    assert [(len(each.output_ids), each.reason, each.seed) for each in first.attempts] == [(3, AbortReason.DRIVER, 0)]
    assert first.seed not in (0, 1, 2)


def test_every_attempt_has_draws_of_its_own() -> None:
    stage = three()
    for _ in range(5):
        stage.abort(A0, then=Then.RETRY)
        stage.answer_all()
    record = stage.record(A0)
    seeds = {record.seed, *(each.seed for each in record.attempts)}
    assert len(seeds) == 6


# Dropped, discarded, in parts -----------------------------------------------------------------------


def test_a_group_is_handed_out_only_when_all_of_it_is_over() -> None:
    stage = three()
    for t in (A1, A0):
        stage.finish(t)
        assert stage.take() == []
    stage.finish(A2)
    (delivery,) = stage.take()
    assert [t.trajectory_id for t in delivery.trajectories] == [A0, A1, A2]
    assert (delivery.complete, delivery.dropped) == (True, ())


def test_one_that_is_dropped_comes_beside_its_group_with_its_tokens() -> None:
    stage = three()
    stage.abort(A1, then=Then.DROP)
    stage.answer_all()
    for t in (A0, A2):
        stage.finish(t)
    (delivery,) = stage.take()
    assert [t.trajectory_id for t in delivery.trajectories] == [A0, A2]
    (dropped,) = delivery.dropped
    assert (dropped.trajectory_id, len(dropped.output_ids), dropped.abort_reason) == (A1, 4, AbortReason.DRIVER)
    assert stage.controller.accounts().dropped == {AbortReason.DRIVER: 1}


def test_one_that_is_discarded_is_gone_with_its_tokens() -> None:
    stage = three()
    stage.discard(str(A1))
    stage.answer_all()
    for t in (A0, A2):
        stage.finish(t)
    (delivery,) = stage.take()
    assert ([t.trajectory_id for t in delivery.trajectories], delivery.dropped) == ([A0, A2], ())


def test_a_group_of_which_all_is_discarded_is_never_handed_out_and_its_key_is_free() -> None:
    stage = three()
    report, commands = stage.controller.discard(["a", "b"], stage.now)
    assert (report.discarded, report.unknown) == ((A0, A1, A2), ("b",))
    stage.take_note(commands)
    stage.answer_all()
    assert stage.take() == []
    assert (stage.controller.outstanding, stage.controller.unfinished_groups) == (0, 0)
    assert stage.controller.accounts().dropped == {AbortReason.DISCARD: 3}
    assert len(started(stage.submit("a", 2))) == 2


def test_a_group_of_which_all_is_dropped_is_handed_out_empty() -> None:
    stage = three()
    stage.abort("a", then=Then.DROP)
    stage.answer_all()
    (delivery,) = stage.take()
    assert (delivery.trajectories, len(delivery.dropped), delivery.complete) == ((), 3, True)


@pytest.mark.parametrize("phase", ["queued", "held", "being put away", "paused"])
def test_what_is_discarded_is_gone_wherever_it_is(phase: str) -> None:
    stage = Stage(*([] if phase == "queued" else [W1]), size=1)
    stage.submit("a")
    if phase == "held":
        stage.hold(A0)
    if phase == "being put away":
        stage.abort(A0)
        stage.park(A0, kv=3)
    if phase == "paused":
        stage.controller.pause(stage.now)
    stage.discard(A0)
    stage.answer_all()
    assert (stage.find(A0), stage.take()) == (None, [])
    report, _ = stage.controller.discard([A0], stage.now)
    assert report.unknown == (A0,)


def test_what_is_over_cannot_be_discarded() -> None:
    stage = three()
    stage.finish(A0)
    report, _ = stage.controller.discard([A0], stage.now)
    assert (report.discarded, report.unknown) == ((), (A0,))


def in_parts(n: int = 3) -> Stage:
    stage = Stage(W1)
    stage.submit("a", n, partial=True)
    for i in range(n):
        stage.sample(member("a", i), 3)
    return stage


def test_members_are_handed_out_as_they_end_if_asked_for_each_once() -> None:
    stage = in_parts()
    stage.finish(A1)
    (first,) = stage.take()
    assert ([t.trajectory_id for t in first.trajectories], first.complete) == ([A1], False)
    assert stage.controller.outstanding == 2
    assert stage.take() == []
    stage.finish(A0)
    stage.finish(A2)
    (second,) = stage.take()
    assert ([t.trajectory_id for t in second.trajectories], second.complete) == ([A0, A2], True)
    assert stage.controller.outstanding == 0


def test_a_group_in_parts_that_is_taken_late_comes_in_one() -> None:
    stage = in_parts()
    for t in (A0, A1, A2):
        stage.finish(t)
    (delivery,) = stage.take()
    assert (len(delivery.trajectories), delivery.complete) == (3, True)


def test_a_part_that_got_lost_is_handed_out_again() -> None:
    stage = in_parts()
    stage.finish(A1)
    first = stage.controller.take(9, "lost")
    stage.controller.settle_calls(arrived=(), abandoned=["lost"])
    stage.take_note([])
    assert stage.take() == first


def test_a_member_that_is_dropped_is_told_with_the_last_part_and_makes_no_part_of_its_own() -> None:
    stage = in_parts()
    stage.abort(A1, then=Then.DROP)
    stage.answer_all()
    assert stage.controller.complete_groups == 0
    assert stage.take() == []
    stage.finish(A0)
    assert [t.trajectory_id for t in stage.take()[0].trajectories] == [A0]
    stage.finish(A2)
    (last,) = stage.take()
    assert [t.trajectory_id for t in last.trajectories] == [A2]
    assert [t.trajectory_id for t in last.dropped] == [A1]
    assert last.complete


def test_if_the_last_member_is_discarded_the_end_is_told_with_nothing_in_it() -> None:
    stage = in_parts(2)
    stage.finish(A0)
    stage.take()
    stage.discard(A1)
    stage.answer_all()
    (last,) = stage.take()
    assert (last.trajectories, last.dropped, last.complete) == ((), (), True)


def test_what_was_handed_out_cannot_be_aborted_and_is_not_handed_out_again_by_that() -> None:
    stage = in_parts()
    stage.finish(A1)
    stage.take()
    stage.abort("a", then=Then.FINISH)
    stage.answer_all()
    (delivery,) = stage.take()
    assert [t.trajectory_id for t in delivery.trajectories] == [A0, A2]
