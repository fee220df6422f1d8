"""Budgets are cumulative: of a trajectory over its suspensions, of a group over its members and their attempts."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.types import AbortReason, FinishReason, Keep, Phase, Then
from tests.control.stage import W1, W2, Stage, member, start_of, started


def allowed(stage: Stage, index: int) -> int | None:
    """What its last start lets a member of g sample."""
    return start_of(stage.commands, member("g", index)).assignment.watch.slice_tokens


def test_without_a_budget_of_its_group_a_member_is_not_sliced() -> None:
    stage = Stage(W1)
    stage.submit("g")
    assert allowed(stage, 0) is None


def test_each_member_may_sample_its_part() -> None:
    stage = Stage(W1)
    stage.submit("g", 4, max_group_tokens=40)
    assert [allowed(stage, i) for i in range(4)] == [10, 10, 10, 10]


def test_those_that_wait_have_their_part_kept_for_them() -> None:
    stage = Stage(W1, room=1)
    stage.submit("g", 4, max_group_tokens=40)
    assert allowed(stage, 0) == 10
    stage.finish(member("g"), 4)
    assert allowed(stage, 1) == 12, "a third of the 36 that are left"


def test_what_a_short_one_leaves_goes_to_those_that_come_back_for_more() -> None:
    stage = Stage(W1)
    stage.submit("g", 2, max_group_tokens=20, budget=1000)
    stage.finish(member("g", 1), 2)
    stage.sample(member("g"), 10)
    stage.park(member("g"), AbortReason.SLICE_BUDGET)
    stage.answer_all()
    assert stage.controller.keeping.counts == {AbortReason.BUDGET: {Keep.POOL: 1}}
    assert allowed(stage, 0) == 8
    stage.sample(member("g"), 8)
    stage.park(member("g"), AbortReason.SLICE_BUDGET)
    stage.answer_all()
    (delivery,) = stage.take()
    assert [(t.finish_reason, t.sampled_tokens) for t in delivery.trajectories] == [
        (FinishReason.LENGTH, 18),
        (FinishReason.STOP, 2),
    ]


def test_a_slice_is_the_shorter_of_both() -> None:
    stage = Stage(W1, policies=[{"kind": "slice_budget", "tokens": 7}])
    stage.submit("g", 2, max_group_tokens=20)
    assert (allowed(stage, 0), allowed(stage, 1)) == (7, 7)


def test_members_for_which_nothing_is_left_wait_for_those_that_run_and_end_without_a_worker() -> None:
    stage = Stage(W1, room=1)
    stage.submit("g", 3, max_group_tokens=1)
    assert allowed(stage, 0) == 1
    assert stage.phases("g")[1:] == [Phase.QUEUED, Phase.QUEUED]
    stage.sample(member("g"))
    stage.park(member("g"), AbortReason.SLICE_BUDGET)
    stage.answer_all()
    (delivery,) = stage.take()
    assert [(t.finish_reason, t.sampled_tokens) for t in delivery.trajectories] == [
        (FinishReason.LENGTH, tokens) for tokens in (1, 0, 0)
    ]
    assert [len(t.workers) for t in delivery.trajectories] == [1, 0, 0]


def test_a_budget_of_nothing_ends_the_group_without_a_worker() -> None:
    """Case B1."""
    stage = Stage(W1)
    assert started(stage.submit("g", 2, max_group_tokens=0)) == []
    (delivery,) = stage.take()
    assert {t.finish_reason for t in delivery.trajectories} == {FinishReason.LENGTH}


def test_earlier_attempts_count() -> None:
    stage = Stage(W1)
    stage.submit("g", max_group_tokens=20, budget=1000)
    stage.sample(member("g"), 12)
    stage.abort(member("g"), then=Then.RETRY)
    stage.answer_all()
    assert allowed(stage, 0) == 8


def test_groups_have_budgets_of_their_own() -> None:
    stage = Stage(W1)
    stage.submit("g", max_group_tokens=5)
    stage.submit("h", max_group_tokens=9)
    assert allowed(stage, 0) == 5
    assert start_of(stage.commands, member("h")).assignment.watch.slice_tokens == 9


def test_what_is_on_a_worker_for_its_kv_only_holds_no_tokens_of_the_group() -> None:
    stage = Stage(W1)
    stage.submit("g", 2, max_group_tokens=20)
    stage.sample(member("g"), 4)
    stage.hold(member("g"))
    stage.abort(member("g"), keep=Keep.HOST)
    assert stage.phase(member("g")) is Phase.RESTORING
    assert stage.record(member("g")).group.budget_left == 6, "20 less 4 sampled less 10 allowed to the other"


def test_what_is_lost_with_a_worker_gives_back_what_it_was_allowed() -> None:
    stage = Stage(W1, W2, room=2)
    stage.submit("g", 2, max_group_tokens=20)
    lost = stage.record(member("g")).worker
    assert lost is not None
    stage.sample(member("g"), 4)
    stage.down(lost)
    allowances = [allowed(stage, i) for i in range(2)]
    sampled = [stage.record(member("g", i)).sampled_tokens for i in range(2)]
    assert sum(a for a in allowances if a is not None) + sum(sampled) <= 20


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 4),
    most=st.integers(0, 40),
    budget=st.integers(0, 15),
    room=st.integers(1, 4),
    slices=st.sampled_from([None, 2, 5]),
)
@settings(max_examples=80, deadline=None)
def test_however_often_they_are_stopped_members_sample_together_what_they_may_and_no_more(
    seed: int, n: int, most: int, budget: int, room: int, slices: int | None
) -> None:
    """Case B1: at random points, by drivers, slices, retries and lost workers. Workers obey the watch; no one stops by
    itself, so all end by length: their own, or that of the group, which is then used up."""
    luck = Random(seed)
    policies = [{"kind": "slice_budget", "tokens": slices}] if slices is not None else []
    stage = Stage(W1, policies=policies, room=room, resume={"max_resumes": None})
    stage.submit("g", n, budget=budget, max_group_tokens=most)
    incarnation = 0
    for _ in range(2000):
        if not stage.controller.unfinished_groups:
            break
        step(stage, luck)
        if luck.random() < 0.02:
            stage.down(W1, incarnation="a")
            stage.up(W1, room=room)
            incarnation += 1
    else:
        raise AssertionError(stage.controller.state(stage.now))
    (delivery,) = stage.take()
    spent = [t.sampled_tokens + sum(len(a.output_ids) for a in t.attempts) for t in delivery.trajectories]
    assert sum(spent) <= most
    assert all(t.sampled_tokens <= budget for t in delivery.trajectories)
    assert {t.finish_reason for t in delivery.trajectories} == {FinishReason.LENGTH}
    assert sum(spent) == most or all(t.sampled_tokens == budget for t in delivery.trajectories)
    assert sum(spent) == stage.controller.counters.tokens == stage.tokens


def step(stage: Stage, luck: Random) -> None:
    """One member gets a token and is stopped by its worker if it was told to, or by a driver now and then."""
    running = sorted(t for t in stage.running if stage.record(t).intent is None)
    held = [r.trajectory_id for r in stage.controller.resolve(None)[0] if r.phase is Phase.SUSPENDED]
    if held and luck.random() < 0.5:
        stage.resume(luck.choice(held))
    if not running:
        stage.answer_all()
        return
    t = luck.choice(running)
    watch = start_of(stage.commands, t).assignment
    before = watch.output.sampled
    stage.sample(t)
    record = stage.record(t)
    if record.sampled_tokens == record.sampling.max_new_tokens:
        stage.finish(t, 0, FinishReason.LENGTH)
    elif record.sampled_tokens - before == watch.watch.slice_tokens:
        stage.park(t, AbortReason.SLICE_BUDGET)
    elif luck.random() < 0.15:
        stage.abort(t, then=luck.choice([Then.HOLD, Then.REQUEUE, Then.HOLD, Then.RETRY]))
    if luck.random() < 0.5:
        stage.answer_all()


@pytest.mark.parametrize("keep", ["device", "host", "pool", "none"])
@given(points=st.lists(st.integers(1, 6), max_size=8), budget=st.integers(1, 30))
@settings(deadline=None)
def test_the_tokens_of_a_trajectory_over_all_its_suspensions_are_its_budget(
    keep: str, points: list[int], budget: int
) -> None:
    """Cases B1 and B3."""
    t = member("g")
    stage = Stage(W1, keep=keep)
    stage.submit("g", budget=budget)
    for point in points:
        left = budget - stage.record(t).sampled_tokens
        if left <= point:
            break
        stage.sample(t, point)
        stage.hold(t)
        stage.resume(t)
        snapshot = stage.record(t).snapshot()
        assert len(snapshot.output_ids) == len(snapshot.logprobs) == len(snapshot.loss_mask)
        assert start_of(stage.commands, t).assignment.output.sampled == snapshot.sampled_tokens
    stage.sample(t, budget - stage.record(t).sampled_tokens)
    stage.hold(t)
    assert started(stage.resume(t)) == []
    trajectory = stage.take_one()
    assert (trajectory.finish_reason, len(trajectory.output_ids)) == (FinishReason.LENGTH, budget)
