"""What a controller saved, taken up by another one: nothing is lost, nothing is there twice, all goes on as it was."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rollout.client.state import from_state, to_state
from rollout.control.commands import Command
from rollout.control.saved import Saved
from rollout.errors import DuplicateKeyError, NotExtendableError
from rollout.types import (
    AbortReason,
    FinishReason,
    Keep,
    KVRun,
    Phase,
    Priority,
    Then,
    Trajectory,
    TrajectoryId,
    Version,
    VersionRun,
)
from tests.control.stage import PROMPT, W1, W2, Stage, member, start_of, started, submission
from tests.weights import loaded

T, U = member("g"), member("g", 1)
BETWEEN_S = 1000.0
"""From the end of a service to the next one."""


def saved(stage: Stage) -> Saved:
    """As it comes out of a checkpoint."""
    state = json.loads(json.dumps(to_state(stage.controller.saved(stage.now), next_key=0)))
    return from_state(state)[0]


def restore(stage: Stage, what: Saved) -> list[Command]:
    return stage.take_note(stage.controller.restore(what, stage.now))


def succeed(stage: Stage, *, room: int = 4, live: int = 0, **options: Any) -> tuple[Stage, list[Command]]:
    """Another service, with one worker and these options, that took up everything; and what it did then."""
    after = Stage(W2, room=room, **options)
    after.now = stage.now + BETWEEN_S
    if live:
        after.live(live)
    return after, restore(after, saved(stage))


def same(now: Trajectory, was: Trajectory, **changed: Any) -> bool:
    """But for the time between."""
    assert now.submitted_at == was.submitted_at + BETWEEN_S
    assert now.finished_at == (was.finished_at + BETWEEN_S if was.finished_at is not None else None)
    return replace(now, submitted_at=was.submitted_at, finished_at=was.finished_at) == replace(was, **changed)


def decoding(tokens: int = 3, n: int = 1, *, then: Sequence[TrajectoryId] = (), **options: Any) -> Stage:
    """Members of one group run on w1; `T`, and the ones that `then` names, have sampled `tokens` tokens."""
    fields = {name: options.pop(name) for name in [*options] if name not in STAGE}
    stage = Stage(W1, **options)
    stage.wait(5)
    stage.submit("g", n, **fields)
    for t in (T, *then):
        stage.admit(t)
        stage.sample(t, tokens)
    stage.wait(2)
    return stage


STAGE = {"room", "policies", "keep", "context", "resume", "groups", "weights"}

# What waits and what runs -----------------------------------------------------------------------------


def test_what_waited_for_a_worker_waits_for_one_in_the_order_it_was_submitted() -> None:
    stage = Stage(W1, room=1)
    for group in "abc":
        stage.submit(group)
    was = [record.snapshot() for record in stage.controller.resolve(["b", "c"])[0]]
    after, commands = succeed(stage, room=2)
    assert started(commands) == [(W2, member("a")), (W2, member("b"))]
    after.finish(member("a"), 1)
    assert after.running == {member("b"), member("c")}
    now = [record.snapshot() for record in after.controller.resolve(["b", "c"])[0]]
    assert all(same(one, other, workers=(W2,)) for one, other in zip(now, was, strict=True))


def test_what_ran_goes_on_from_its_tokens_with_its_draws_and_computes_its_kv_again() -> None:
    stage = decoding()
    was = stage.record(T).snapshot()
    after, commands = succeed(stage)
    assignment = start_of(commands, T).assignment
    assert (assignment.output, assignment.seed) == (stage.record(T).columns, was.seed)
    assert (assignment.image, assignment.kv_tokens) == (None, len(PROMPT) + 2)
    assert same(after.record(T).snapshot(), was, workers=(W1, W2))
    after.admit(T)
    (resume,) = after.record(T).resumes
    assert (resume.worker, resume.recomputed_tokens) == (W2, len(PROMPT) + 2)
    after.finish(T, 1)
    assert after.take_one().output_ids == (100, 101, 102, 103)
    assert after.controller.counters.tokens == 1


def test_what_was_started_and_has_no_token_did_not_begin() -> None:
    stage = Stage(W1)
    stage.submit("g")
    stage.admit(T)
    after, _ = succeed(stage)
    after.admit(T)
    assert after.record(T).resumes == []
    assert after.record(T).workers == [W1, W2]


def test_a_worker_that_comes_up_later_runs_it() -> None:
    after = Stage(size=1)
    assert restore(after, saved(decoding())) == []
    assert after.phase(T) is Phase.QUEUED
    assert started(after.up(W2)) == [(W2, T)]


def test_evaluation_goes_first_again() -> None:
    stage = Stage(W1, room=1)
    stage.submit("g")
    stage.evaluate("e", 2)
    _, commands = succeed(stage, room=2)
    assert started(commands) == [(W2, member("e")), (W2, member("e", 1))]


# What was held ----------------------------------------------------------------------------------------


def test_what_a_driver_held_is_held_until_it_says_otherwise() -> None:
    stage = decoding()
    stage.hold(T)
    was = stage.record(T).snapshot()
    after, commands = succeed(stage)
    assert commands == []
    assert same(after.record(T).snapshot(), was)
    assert (after.controller.coming_groups, after.controller.suspended) == (0, {"none": 1})
    assert started(after.resume(T)) == [(W2, T)]


def test_the_next_collection_goes_on_with_what_the_last_one_left() -> None:
    stage = Stage(W1, room=3)
    for group in "abcd":
        stage.submit(group)
    stage.collect(1, over_sample=1.0)
    for group in "abc":
        stage.sample(member(group), 2)
    stage.finish(member("a"))
    stage.answer_all()
    assert [delivery.group_id for delivery in stage.take()] == ["a"]
    stage.arrived()
    assert stage.phases() == [Phase.SUSPENDED] * 3
    after, commands = succeed(stage, room=2)
    assert commands == []
    after.submit("new")
    assert after.running == {member("new")}
    after.end_collection()
    assert started(after.collect(2)) == [(W2, member("b"))]
    after.finish(member("new"), 1)
    assert after.running == {member("b"), member("c")}


def test_a_stop_for_a_met_quota_that_was_not_heard_of_holds() -> None:
    stage = Stage(W1)
    stage.submit("a")
    stage.submit("b")
    stage.collect(1, over_sample=1.0)
    stage.finish(member("a"), 1)
    assert stage.phase(member("b")) is Phase.PREFILLING
    after, commands = succeed(stage)
    assert commands == []
    assert after.record(member("b")).abort_reason is AbortReason.QUOTA
    assert len(after.take()) == 1
    assert started(after.collect(1)) == [(W2, member("b"))]


def test_a_group_that_had_begun_goes_first_in_a_window_though_it_has_no_token() -> None:
    stage = Stage(size=1)
    stage.submit("older")
    stage.abort("older")
    stage.submit("begun")
    stage.up(W1, room=1)
    stage.resume("older")
    assert stage.running == {member("begun")}
    after = Stage(size=1)
    after.collect(1)
    restore(after, saved(stage))
    after.up(W2)
    assert after.running == {member("begun")}


@pytest.mark.parametrize("phase", [Phase.SUSPENDING, Phase.SUSPENDED])
def test_what_ended_a_turn_is_told_of_and_waits_to_be_extended(phase: Phase) -> None:
    stage = decoding(multi_turn=True)
    stage.park(T, AbortReason.TURN)
    if phase is Phase.SUSPENDED:
        stage.answer_all()
    assert stage.phase(T) is phase
    was = stage.record(T).snapshot()
    after, commands = succeed(stage)
    assert commands == []
    (turn,) = after.controller.turns({}, 9)
    assert same(turn, was, abort_reason=AbortReason.TURN)
    assert after.resume(T) == []
    assert started(after.extend(T, [7, 8])) == [(W2, T)]
    after.admit(T)
    after.finish(T, 2)
    whole = after.take_one()
    assert whole.output_ids == (100, 101, 102, 7, 8, 105, 106)
    assert whole.loss_mask == (1, 1, 1, 0, 0, 1, 1)


def test_what_was_appended_had_no_kv_and_is_not_computed_again() -> None:
    stage = decoding(multi_turn=True)
    stage.park(T, AbortReason.TURN)
    stage.answer_all()
    stage.pause()
    stage.extend(T, [7, 8, 9])
    _, commands = succeed(stage)
    assert start_of(commands, T).assignment.kv_tokens == len(PROMPT) + 2


def test_what_was_extended_before_it_ever_ran_did_not_begin() -> None:
    stage = Stage(W1, room=1)
    stage.submit("a")
    stage.submit("g")
    stage.abort(T)
    stage.extend(T, [7, 8])
    after, commands = succeed(stage)
    assert start_of(commands, T).assignment.kv_tokens == 0
    after.admit(T)
    assert after.record(T).resumes == []


# Aborts that were under way ---------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.DECODING, Phase.SUSPENDING])
@pytest.mark.parametrize("then", list(Then))
def test_an_abort_that_was_under_way_has_its_end(then: Then, phase: Phase) -> None:
    stage = decoding(2, 2, then=[U])
    stage.abort(T, then=Then.HOLD)
    if phase is Phase.SUSPENDING:
        stage.park(T)
    stage.abort(T, then=then)
    assert stage.phase(T) is phase
    was = stage.record(T).snapshot()
    after, commands = succeed(stage)
    now = after.record(T)
    assert (W2, U) in started(commands)
    assert after.controller.accounts().submitted == 2
    match then:
        case Then.HOLD:
            assert (now.phase, now.abort_reason, now.held) == (Phase.SUSPENDED, AbortReason.DRIVER, True)
        case Then.REQUEUE:
            assert (W2, T) in started(commands)
        case Then.FINISH:
            assert (now.phase, now.finish_reason) == (Phase.FINISHED, FinishReason.ABORT)
        case Then.DROP:
            assert (now.phase, now.abort_reason) == (Phase.DROPPED, AbortReason.DRIVER)
            assert after.controller.accounts().dropped == {AbortReason.DRIVER: 1}
        case Then.RETRY:
            assert (W2, T) in started(commands)
            (attempt,) = now.attempts
            assert (attempt.output_ids, attempt.seed, attempt.reason) == (was.output_ids, was.seed, AbortReason.DRIVER)
            assert (len(now.columns), now.seed == was.seed) == (0, False)
    if then is not Then.RETRY:
        assert now.snapshot().output_ids == was.output_ids
        assert now.suspensions == was.suspensions


def test_a_turn_that_was_told_to_finish_is_whole() -> None:
    stage = decoding(multi_turn=True)
    stage.abort(T)
    stage.park(T, AbortReason.TURN)
    assert stage.phase(T) is Phase.SUSPENDING
    stage.abort(T, then=Then.FINISH)
    after, _ = succeed(stage)
    assert after.take_one().finish_reason is FinishReason.STOP


def test_what_was_held_and_on_the_move_is_held() -> None:
    stage = decoding()
    stage.hold(T, keep=Keep.DEVICE)
    stage.abort(T, keep=Keep.POOL)
    assert stage.phase(T) is Phase.SUSPENDING
    after, commands = succeed(stage)
    assert commands == []
    assert after.record(T).held


def test_what_was_brought_to_a_worker_for_its_kv_only_is_held() -> None:
    stage = decoding()
    stage.hold(T)
    assert started(stage.take_note(stage.controller.abort([T], Keep.DEVICE, Then.HOLD, stage.now)[1])) == [(W1, T)]
    after, commands = succeed(stage)
    assert commands == []
    assert (after.record(T).held, after.record(T).snapshot().output_ids) == (True, (100, 101, 102))


def test_a_discard_that_was_under_way_gives_all_up() -> None:
    stage = decoding()
    stage.discard(T)
    assert stage.phase(T) is Phase.DECODING
    after, commands = succeed(stage)
    assert commands == []
    assert after.find(T) is None
    assert after.take() == []
    assert after.controller.accounts().dropped == {AbortReason.DISCARD: 1}


def test_a_member_that_was_given_up_does_not_come_back() -> None:
    stage = decoding(2, 2, then=[U])
    stage.discard(U)
    stage.park(U)
    after, commands = succeed(stage)
    assert started(commands) == [(W2, T)]
    after.finish(T)
    (delivery,) = after.take()
    assert [one.trajectory_id for one in delivery.trajectories] == [T]
    assert delivery.dropped == ()
    assert after.controller.accounts().dropped == {AbortReason.DISCARD: 1}


# What is over -----------------------------------------------------------------------------------------


def test_finished_groups_are_handed_out_in_the_order_in_which_they_finished() -> None:
    stage = Stage(W1)
    for group in "abc":
        stage.submit(group)
    for group in "bca":
        stage.wait(1)
        stage.finish(member(group), 1)
    was = {group: stage.record(member(group)).snapshot() for group in "abc"}
    after, commands = succeed(stage)
    assert commands == []
    deliveries = after.take()
    assert [delivery.group_id for delivery in deliveries] == ["b", "c", "a"]
    assert all(same(*d.trajectories, was[d.group_id]) for d in deliveries)


def test_what_arrived_is_gone_and_what_did_not_is_handed_out_again_first() -> None:
    stage = Stage(W1)
    for group in "abcd":
        stage.submit(group)
    stage.wait(1)
    for group in "abcd":
        stage.finish(member(group), 1)
    stage.take(1)
    stage.arrived()
    (lost,) = stage.controller.take(1, "lost")
    stage.controller.settle_calls(arrived=(), abandoned=["lost"])
    (returned,) = stage.take(1)
    (other,) = stage.take(1)
    assert lost == returned
    after, _ = succeed(stage)
    assert after.controller.accounts().submitted == after.controller.counters.trajectories == 3
    after.submit("e")
    after.finish(member("e"), 1)
    assert [delivery.group_id for delivery in after.take()] == ["b", "c", "d", "e"]
    after.arrived()
    assert after.controller.accounts().acknowledged == 4
    again, _ = succeed(stage)
    assert again.take(2) == [lost, other]  # as they were


def test_a_key_that_is_used_again_is_not_taken_for_the_group_before() -> None:
    stage = Stage(W1)
    stage.submit("g", 2, partial=True)
    stage.finish(T, 1)
    early = stage.take()
    stage.finish(U, 2)
    rest = stage.take()
    stage.wait(9)
    stage.submit("g", 2, partial=True)
    stage.finish(T, 3)
    new = stage.take()
    stage.controller.settle_calls(arrived=["call 3"], abandoned=())
    after, commands = succeed(stage)
    assert started(commands) == [(W2, U)]
    assert new[0].trajectories[0].sampled_tokens == 3
    assert after.take() == [*early, *rest]
    after.finish(U, 4)
    (last,) = after.take()
    assert [one.trajectory_id for one in last.trajectories] == [U]


def test_a_group_that_all_left_is_not_taken_for_the_next_of_its_key() -> None:
    stage = decoding()
    stage.abort(T, then=Then.DROP)
    stage.park(T)
    left = stage.take()
    assert left[0].trajectories == ()
    stage.submit("g")
    after, _ = succeed(stage)
    assert after.take() == left
    assert after.controller.accounts().submitted == 2


@pytest.mark.parametrize("arrives", [True, False])
def test_a_group_that_was_handed_out_in_part_has_only_the_rest_to_come(arrives: bool) -> None:
    stage = Stage(W1)
    stage.submit("g", 3, partial=True)
    stage.finish(T, 2)
    (early,) = stage.take()
    if arrives:
        stage.arrived()
    stage.finish(U, 1)
    after, commands = succeed(stage)
    assert started(commands) == [(W2, member("g", 2))]
    accounts = after.controller.accounts()
    assert (accounts.submitted, accounts.acknowledged, accounts.buffered) == (3, int(arrives), 2 - int(arrives))
    (delivery,) = after.take()
    assert [one.trajectory_id for one in delivery.trajectories] == [U] if arrives else [T, U]
    assert not delivery.complete
    if not arrives:
        assert same(delivery.trajectories[0], early.trajectories[0])
    after.finish(member("g", 2), 1)
    (last,) = after.take()
    assert ([one.sample_index for one in last.trajectories], last.complete) == ([2], True)
    after.arrived()
    assert after.controller.accounts().acknowledged == 3
    assert after.controller.outstanding == 0


def test_members_that_left_or_failed_are_still_so() -> None:
    stage = decoding(2, 3, then=[U])
    stage.abort(T, then=Then.DROP)
    stage.park(T)
    stage.fail(U, "no such kernel")
    was = stage.record(T).snapshot(), stage.record(U).snapshot()
    after, commands = succeed(stage)
    assert started(commands) == [(W2, member("g", 2))]
    after.finish(member("g", 2), 1)
    (delivery,) = after.take()
    assert same(*delivery.dropped, was[0])
    assert same(delivery.trajectories[0], was[1])
    assert delivery.trajectories[0].error == "no such kernel"
    assert after.controller.accounts().dropped == {AbortReason.DRIVER: 1}


def test_a_group_that_failed_as_a_whole_says_why() -> None:
    rules = {"failed_member": "fail"}
    stage = decoding(2, 2, then=[U], groups=rules)
    stage.fail(T, "no such kernel")
    assert stage.phase(U) is Phase.DECODING  # its stop is under way
    after, commands = succeed(stage, groups=rules)
    assert commands == []
    (delivery,) = after.take()
    assert delivery.error == "g/0: no such kernel"
    assert delivery.trajectories[1].abort_reason is AbortReason.GROUP_FAILED
    assert len(delivery.trajectories[1].output_ids) == 2


def test_attempts_count_on() -> None:
    rules = {"failed_member": "replace", "max_retries": 1}
    stage = decoding(2, groups=rules)
    stage.fail(T, "first")
    stage.sample(T, 1)
    was = stage.record(T).snapshot()
    assert len(was.attempts) == 1
    after, commands = succeed(stage, groups=rules)
    assert start_of(commands, T).assignment.seed == was.seed
    assert same(after.record(T).snapshot(), was, workers=(*was.workers, W2))
    after.fail(T, "second")
    whole = after.take_one()
    assert (whole.error, len(whole.attempts)) == ("second", 1)


def test_another_attempt_draws_what_it_would_have_drawn() -> None:
    stage, other = decoding(), decoding()
    after, _ = succeed(stage)
    for each in (after, other):
        each.abort(T, then=Then.RETRY)
        each.park(T)
    assert after.record(T).seed == other.record(T).seed
    assert after.record(T).attempts == other.record(T).attempts


# Policies ---------------------------------------------------------------------------------------------


def test_the_budget_of_a_group_counts_what_was_sampled_before_and_in_earlier_attempts() -> None:
    stage = decoding(3, 2, max_group_tokens=8)
    stage.abort(T, then=Then.RETRY)
    stage.park(T)
    stage.sample(T, 2)
    after, commands = succeed(stage)
    allowed = [start_of(commands, t).assignment.watch.slice_tokens for t in (T, U)]
    assert [tokens for tokens in allowed if tokens is not None] == [1, 2]
    after.sample(U, 2)
    after.park(U)
    after.sample(T, 1)
    after.park(T)
    after.answer_all()
    (delivery,) = after.take()
    assert [one.finish_reason for one in delivery.trajectories] == [FinishReason.LENGTH] * 2


def test_a_budget_that_is_spent_ends_what_waited() -> None:
    stage = decoding(3, budget=3)
    stage.abort(T, then=Then.HOLD)
    stage.park(T)  # before the worker told that it has all its tokens
    stage.resume(T)
    after, commands = succeed(stage)
    assert commands == []
    assert after.take_one().finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("own", [True, False])
def test_a_deadline_does_not_count_the_time_between(own: bool) -> None:
    policies = [{"kind": "deadline", "seconds": 99.0 if own else 10.0, "then": "finish"}]
    stage = decoding(policies=policies, **({"deadline_s": 10.0} if own else {}))
    stage.wait(5)  # 7 in all
    after, _ = succeed(stage, policies=policies)
    after.wait(2)
    assert after.phase(T) is not Phase.FINISHED
    assert after.record(T).intent is None
    after.wait(1)
    assert after.record(T).intent is not None
    after.park(T)
    assert after.take_one().abort_reason is AbortReason.DEADLINE


def test_a_deadline_stops_a_trajectory_once() -> None:
    policies = [{"kind": "deadline", "seconds": 10.0, "then": "hold"}]
    stage = decoding(policies=policies)
    stage.wait(10)
    stage.park(T)
    stage.answer_all()
    stage.resume(T)
    after, _ = succeed(stage, policies=policies)
    assert after.wait(50) == []
    assert after.record(T).on_worker


def test_a_policy_that_stopped_a_trajectory_once_does_not_again() -> None:
    policies = [{"kind": "over_long", "tokens": 3, "then": "requeue"}]
    stage = decoding(policies=policies)
    stage.park(T, AbortReason.OVER_LONG)
    assert stage.record(T).fired == {AbortReason.OVER_LONG}
    _, commands = succeed(stage, policies=policies)
    assert start_of(commands, T).assignment.watch.most_tokens is None


def test_what_is_too_old_for_the_weights_that_are_live_now_is_stopped() -> None:
    policies = [{"kind": "stale", "behind": 2, "then": "finish"}]
    stage = decoding(policies=policies)
    for live, phase in ((1, Phase.PREFILLING), (2, Phase.FINISHED)):
        after, _ = succeed(stage, policies=policies, live=live)
        assert after.phase(T) is phase
    assert after.take_one().abort_reason is AbortReason.STALE


def test_what_was_too_old_and_was_resumed_goes_on() -> None:
    policies = [{"kind": "stale", "behind": 1, "then": "hold"}]
    stage = decoding(policies=policies)
    stage.live(1)
    stage.park(T)
    stage.answer_all()
    stage.resume(T)
    assert stage.record(T).on_worker
    after, _ = succeed(stage, policies=policies, live=1)
    assert after.record(T).on_worker
    assert after.record(T).intent is None
    after, _ = succeed(stage, policies=policies, live=2)
    assert after.phase(T) is Phase.SUSPENDED


def test_the_tail_of_a_batch_is_of_all_that_was_submitted_with_it() -> None:
    policies = [{"kind": "tail", "share": 0.25, "then": "finish"}]
    stage = Stage(W1, policies=policies)
    stage.submit_all(*(submission(group) for group in "abcd"))
    stage.submit("other")
    for group in "ab":
        stage.finish(member(group), 1)
    stage.take()
    stage.arrived()
    after, _ = succeed(stage, policies=policies)
    after.finish(member("c"), 1)
    assert after.record(member("d")).intent is not None
    assert after.record(member("other")).intent is None


def test_lengths_of_what_is_gone_still_tell_what_is_too_long() -> None:
    policies = [{"kind": "over_long", "factor": 2.0, "of": "batch", "min_finished": 2, "then": "finish"}]
    stage = Stage(W1, policies=policies)
    stage.submit_all(*(submission(group) for group in "abc"))
    for group in "ab":
        stage.finish(member(group), 2)
    stage.take()
    stage.arrived()
    after, _ = succeed(stage, policies=policies)
    after.sample(member("c"), 5)
    assert after.record(member("c")).intent is not None


# Versions ---------------------------------------------------------------------------------------------


def test_tokens_keep_their_versions_and_their_kv_is_of_those_that_are_live_now() -> None:
    stage = decoding(2)
    stage.live(1)
    stage.sample(T, 2, version=1)
    was = stage.record(T).snapshot()
    assert len(was.kv_spans) == 2
    after, _ = succeed(stage, live=3)
    assert same(after.record(T).snapshot(), was, workers=(W1, W2))
    after.admit(T)
    after.sample(T, 2, version=3)
    whole = after.record(T).snapshot()
    assert whole.versions == tuple(VersionRun(version=Version(v), tokens=2) for v in (0, 1, 3))
    first, second, third = whole.kv_spans
    assert (first, second) == was.kv_spans
    at = len(PROMPT) + 4
    assert (third.first, third.stop, third.kv) == (at, at + 2, ((0, at, Version(3)),))


def test_spans_of_what_has_appended_tokens_only_or_goes_on_with_old_kv_are_the_same() -> None:
    stage = decoding(2, weights={"kv_reuse": {"kind": "stale", "max_lag": 1}}, multi_turn=True)
    stage.hold(T)
    stage.live(1)
    stage.resume(T)
    kv = stage.record(T).tokens - 1
    stage.admit(T, restored=kv, runs=(KVRun(loaded(0), kv),))
    stage.sample(T, 2, version=1)
    stage.park(T, AbortReason.TURN, runs=(KVRun(loaded(0), kv), KVRun(loaded(1), 2)))
    stage.answer_all()
    stage.pause()
    stage.extend(T, [1, 2, 3])
    was = stage.record(T).snapshot()
    first, _ = succeed(stage, live=1)
    first.now -= BETWEEN_S
    assert first.record(T).snapshot().kv_spans == was.kv_spans
    second, _ = succeed(first, live=1)
    assert second.record(T).snapshot().kv_spans == was.kv_spans


@pytest.mark.parametrize(
    ("wants", "live", "phase"),
    [
        ({"exact_version": 1}, 1, Phase.PREFILLING),
        ({"exact_version": 1}, 0, Phase.QUEUED),
        ({"exact_version": 1}, 2, Phase.FINISHED),
        ({"min_version": 1}, 0, Phase.QUEUED),
        ({"min_version": 1}, 2, Phase.PREFILLING),
    ],
)
@pytest.mark.parametrize("tokens", [0, 2])
def test_what_asks_for_a_version_waits_for_it_or_is_over_if_it_is_past(
    wants: dict[str, int], live: int, phase: Phase, tokens: int
) -> None:
    stage = Stage(W1)
    stage.live(1)
    stage.submit("g", **wants)
    if tokens:
        stage.sample(T, tokens, version=1)
    after, _ = succeed(stage, live=live)
    assert after.phase(T) is phase
    if phase is Phase.QUEUED:
        assert started(after.live(1)) == [(W2, T)]
    if phase is Phase.FINISHED:
        whole = after.take_one()
        assert (whole.abort_reason, len(whole.output_ids)) == (AbortReason.VERSION, tokens)


def test_what_is_held_and_asks_for_a_version_that_is_past_is_over() -> None:
    stage = decoding(exact_version=0)
    stage.hold(T)
    after, _ = succeed(stage, live=1)
    assert after.take_one().abort_reason is AbortReason.VERSION


def test_what_waits_for_its_version_waits_as_long_as_if_it_had_just_begun_to() -> None:
    stage = Stage(W1, weights={"version_timeout_s": 60.0})
    stage.submit("g", min_version=1)
    stage.wait(50)
    after, _ = succeed(stage, weights={"version_timeout_s": 60.0})
    after.wait(59)
    assert after.phase(T) is Phase.QUEUED
    after.wait(1)
    assert after.phase(T) is Phase.FAILED


# Several times ----------------------------------------------------------------------------------------


def lived() -> Stage:
    """Everything at once."""
    stage = Stage(W1, room=9)
    stage.submit_all(*(submission(group, 2) for group in "ab"), submission("p", 3, partial=True))
    stage.evaluate("e")
    stage.submit("m", multi_turn=True, max_group_tokens=40, deadline_s=500.0)
    for t in (member("a"), member("b"), member("p"), member("m")):
        stage.wait(1)
        stage.admit(t)
        stage.sample(t, 2)
    stage.finish(member("p"), 1)
    stage.take()
    stage.arrived()
    stage.finish(member("e"), 1)
    stage.take()
    stage.hold(member("a"))
    stage.abort(member("b"), then=Then.RETRY)
    stage.park(member("b"))
    stage.park(member("m"), AbortReason.TURN)
    stage.finish(member("p", 1), 3)
    stage.fail(member("b", 1))
    stage.wait(1)
    return stage


def test_what_is_saved_at_once_again_is_what_was_saved() -> None:
    first = saved(lived())
    for _ in range(3):
        stage = Stage(size=1)
        stage.now = BETWEEN_S
        restore(stage, first)
        second = saved(stage)
        # What was about to happen has happened, and times are of another clock: only what they tell is the same.
        ages = [group.age_s for group in first.groups]
        assert [group.age_s for group in second.groups] == ages
        assert [group.submission for group in second.groups] == [group.submission for group in first.groups]
        assert (second.batches, second.deliveries, second.version) == (first.batches, first.deliveries, first.version)
        assert [group.handed for group in second.groups] == [group.handed for group in first.groups]
        for new, old in zip(second.groups, first.groups, strict=True):
            for now, was in zip(new.members, old.members, strict=True):
                times = {"submitted_at": 0.0, "finished_at": None}
                reason = now.trajectory.abort_reason
                assert replace(now.trajectory, **times) == replace(was.trajectory, **times, abort_reason=reason)
                assert replace(now, trajectory=was.trajectory) == was
        first = second


def test_a_service_that_was_saved_goes_on_as_if_it_were_not() -> None:
    stage, other = lived(), lived()
    saved(stage)
    assert (stage.finish(member("a", 1), 2), stage.take()) == (other.finish(member("a", 1), 2), other.take())
    assert stage.controller.state(stage.now) == other.controller.state(other.now)


def test_a_service_that_did_something_before_takes_up_what_it_does_not_have() -> None:
    after = Stage(W2, room=9)
    after.submit("g")
    after.finish(T, 1)
    after.take()  # a key that was handed out is free again
    after.submit("first")
    stage = decoding()
    restore(after, saved(stage))
    assert after.record(T).epoch > 1  # not one that its worker knows
    assert after.record(T).order > after.record(member("first")).order
    assert after.controller.accounts().submitted == after.controller.counters.trajectories == 3
    after.submit("h")
    assert after.record(member("h")).order > after.record(T).order
    after.finish(T, 1)
    assert [delivery.group_id for delivery in after.take()] == ["g"]


@pytest.mark.parametrize("group", ["g", "a"])
def test_a_group_that_is_here_already_is_refused_and_nothing_changes(group: str) -> None:
    stage = lived()
    stage.submit("g")
    after = Stage(W2)
    after.submit(group)
    before = after.controller.state(after.now), after.controller.accounts(), after.controller.counters
    with pytest.raises(DuplicateKeyError, match=f"key '{group}' is in use"):
        after.controller.restore(saved(stage), after.now)
    assert (after.controller.state(after.now), after.controller.accounts(), after.controller.counters) == before
    assert after.controller.saved(after.now).groups[0].submission.group_id == group


def test_what_is_taken_up_twice_is_refused_the_second_time() -> None:
    stage = decoding()
    stage.finish(T)
    stage.take()
    after, _ = succeed(stage)
    assert saved(stage).groups == ()
    with pytest.raises(DuplicateKeyError, match="key 'g' is in use"):
        after.controller.restore(saved(stage), after.now)
    assert len(after.take()) == 1


def test_nothing_is_a_state_too() -> None:
    after, commands = succeed(Stage(W1))
    assert commands == []
    assert after.controller.accounts().submitted == 0


def test_where_no_worker_is_left_all_fails_at_once() -> None:
    after = Stage(W2)
    after.down(W2, final=True)
    restore(after, saved(decoding()))
    whole = after.take_one()
    assert whole.error is not None
    assert (whole.finish_reason, whole.output_ids) == (FinishReason.ERROR, (100, 101, 102))


def test_what_has_more_tokens_than_the_context_is_over() -> None:
    after, _ = succeed(decoding(), context=6)
    assert after.take_one().finish_reason is FinishReason.LENGTH


def test_only_what_was_held_can_be_extended() -> None:
    stage = decoding()
    after, _ = succeed(stage)
    with pytest.raises(NotExtendableError):
        after.extend(T, [1])


def test_priorities_and_callers_are_kept() -> None:
    stage = Stage(W1)
    stage.submit("g", priority=Priority.EVAL, caller="tool", metadata={"answer": 42})
    after, _ = succeed(stage)
    found = after.record(T).group.submission
    assert (found.priority, found.caller, found.metadata) == (Priority.EVAL, "tool", {"answer": 42})
