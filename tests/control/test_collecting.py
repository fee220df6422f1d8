"""Collections: k of n groups with over-sampling; the rest is held, and goes first in the next one."""

import math
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.control.collection import Collection
from rollout.types import AbortReason, FinishReason, Phase, Priority, Then, TrajectoryId
from tests.control.stage import W1, W2, Stage, member, start_of, stopped, submission


def with_groups(count: int, n: int = 1, *, room: int = 99, at: int = 2, **options: Any) -> Stage:
    """Groups g0, g1, ... that were submitted during a collection of `at` groups, if that is not 0."""
    stage = Stage(W1, room=room, **options)
    if at:
        stage.collect(at)
    stage.submit_all(*(submission(f"g{i}", n) for i in range(count)))
    return stage


def begun(stage: Stage) -> set[str]:
    """Groups of which a member was started."""
    return {each.group_id for each in stage.controller.resolve(None)[0] if each.workers}


def finish(stage: Stage, group: str, tokens: int = 1) -> None:
    for record in stage.controller.resolve([group])[0]:
        if record.on_worker:
            stage.finish(record.trajectory_id, tokens)


def taken(stage: Stage) -> list[str]:
    return [str(delivery.group_id) for delivery in stage.take()]


def test_without_a_collection_everything_runs() -> None:
    assert len(begun(with_groups(9, at=0))) == 9


@pytest.mark.parametrize(("wanted", "over_sample", "window"), [(4, 0.0, 4), (4, 0.5, 6), (3, 0.5, 5), (2, 2.0, 6)])
def test_no_more_groups_begin_than_wanted_and_the_share_on_top(wanted: int, over_sample: float, window: int) -> None:
    stage = Stage(W1, room=99)
    stage.collect(wanted, over_sample)
    stage.submit_all(*(submission(f"g{i}", 2) for i in range(9)))
    assert begun(stage) == {f"g{i}" for i in range(window)}
    finish(stage, "g1")
    assert begun(stage) == {f"g{i}" for i in range(window)}, "it counts as one of them still"


def test_all_members_of_a_group_that_began_may_start() -> None:
    stage = with_groups(3, n=4, room=6, at=1)
    assert stage.running == {member("g0", i) for i in range(4)}


def test_groups_of_which_enough_are_complete_beforehand_do_not_begin() -> None:
    stage = Stage(W1, room=99)
    stage.submit("done")
    stage.finish(member("done"), 1)
    stage.collect(2)
    stage.submit_all(*(submission(f"g{i}") for i in range(4)))
    assert begun(stage) == {"done", "g0"}


def test_enough_that_is_complete_beforehand_begins_nothing() -> None:
    stage = Stage(W1, room=99)
    for group in ("a", "b"):
        stage.submit(group)
        stage.finish(member(group), 1)
    stage.submit("c")
    assert stopped(stage.collect(2, 1.0)) == [member("c")]


def test_when_enough_are_complete_the_rest_is_stopped_and_held() -> None:
    stage = Stage(W1, room=99)
    stage.collect(2, 1.0)
    stage.submit_all(*(submission(f"g{i}", 2) for i in range(6)))
    stage.sample(member("g0"), 5)
    finish(stage, "g1")
    assert stopped(stage.commands) == []
    finish(stage, "g2")
    assert set(stopped(stage.commands)) == {member(f"g{i}", j) for i in (0, 3) for j in (0, 1)}
    stage.answer_all()
    assert set(stage.phases("g0", "g3", "g4", "g5")) == {Phase.SUSPENDED}
    assert stage.controller.coming_groups == stage.controller.complete_groups == 2
    assert stage.controller.unfinished_groups == 4
    assert taken(stage) == ["g1", "g2"]


def test_what_did_not_begin_is_held_too_and_nothing_starts_after_the_end() -> None:
    stage = with_groups(5, at=1)
    finish(stage, "g0")
    stage.answer_all()
    assert stage.running == set()
    assert begun(stage) == {"g0"}


def test_the_next_collection_goes_on_with_what_was_left_before_it_begins_anything() -> None:
    stage = Stage(W1, room=99)
    stage.collect(1, 2.0)
    stage.submit_all(*(submission(f"g{i}") for i in range(6)))
    for i in range(3):
        stage.sample(member(f"g{i}"), 4 + i)
    finish(stage, "g1")
    stage.answer_all()
    stage.take()
    stage.collect(1, 1.0)
    assert stage.running == {member("g0"), member("g2")}
    assert len(start_of(stage.commands, member("g2")).assignment.output) == 6
    assert start_of(stage.commands, member("g2")).assignment.image is not None
    finish(stage, "g2")
    (delivery,) = stage.take()
    assert delivery.trajectories[0].output_ids == tuple(range(100, 107))
    assert delivery.trajectories[0].abort_reason is None


def test_what_a_driver_holds_is_not_resumed_by_a_collection() -> None:
    stage = with_groups(2, at=0)
    stage.hold(member("g0"))
    stage.collect(2)
    assert stage.running == {member("g1")}


def test_what_is_still_being_put_away_goes_on_with_the_next_collection() -> None:
    stage = with_groups(2, at=0)
    stage.collect(1)
    finish(stage, "g0")
    stage.park(member("g1"))
    stage.take()
    stage.collect(1)
    stage.answer_all()
    assert stage.running == {member("g1")}


def test_what_was_told_to_stop_and_has_not_goes_on_with_the_next_collection() -> None:
    stage = with_groups(2, at=0)
    stage.collect(1)
    finish(stage, "g0")
    stage.take()
    stage.collect(1)
    stage.answer_all()
    assert stage.running == {member("g1")}


def test_what_ends_a_turn_as_the_quota_stops_it_waits_for_its_caller_and_not_for_a_collection() -> None:
    stage = Stage(W1)
    stage.submit("a", multi_turn=True)
    stage.submit("b")
    stage.collect(1)
    finish(stage, "b")
    assert stopped(stage.commands) == [member("a")]
    stage.sample(member("a"), 2)
    stage.park(member("a"), AbortReason.TURN)
    stage.answer_all()
    stage.take()
    stage.collect(1)
    assert stage.phase(member("a")) is Phase.SUSPENDED
    assert stage.controller.suspended == {"waiting": 1}


def test_a_slice_that_is_being_put_away_is_held_and_not_queued_when_the_collection_ends() -> None:
    stage = Stage(W1, policies=[{"kind": "slice_budget", "tokens": 2}])
    stage.submit_all(submission("a"), submission("b"))
    stage.collect(1)
    stage.sample(member("a"), 2)
    stage.park(member("a"), AbortReason.SLICE_BUDGET)
    finish(stage, "b")
    stage.answer_all()
    assert stage.phase(member("a")) is Phase.SUSPENDED
    assert stage.record(member("a")).abort_reason is AbortReason.QUOTA


# What is refused ------------------------------------------------------------------------------------


def test_for_every_group_that_is_refused_another_begins() -> None:
    stage = Stage(W1, room=99)
    stage.collect(2, stop_when_met=False)
    stage.submit_all(*(submission(f"g{i}") for i in range(5)))
    finish(stage, "g0")
    assert begun(stage) == {"g0", "g1"}
    assert taken(stage) == ["g0"]
    stage.reject()
    assert stage.running == {member("g1"), member("g2")}
    finish(stage, "g1")
    finish(stage, "g2")
    assert taken(stage) == ["g1", "g2"]
    assert stage.running == set()


def test_one_that_does_not_fire_goes_on_until_it_is_told() -> None:
    stage = with_groups(3, at=0)
    stage.collect(1, stop_when_met=False)
    finish(stage, "g0")
    assert len(stage.running) == 2
    assert set(stopped(stage.end_collection())) == {member("g1"), member("g2")}


def test_a_group_that_is_discarded_is_made_up_for() -> None:
    """It is never handed out, and so the collection could not end."""
    stage = with_groups(4, at=2)
    stage.discard("g0")
    stage.answer_all()
    assert stage.running == {member("g1"), member("g2")}


def test_a_group_that_is_handed_out_without_members_counts() -> None:
    stage = with_groups(3, at=2)
    stage.abort("g0", then=Then.DROP)
    stage.answer_all()
    finish(stage, "g1")
    assert taken(stage) == ["g0", "g1"]
    assert begun(stage) == set()


def test_refusing_without_a_collection_changes_nothing() -> None:
    stage = with_groups(1, at=0)
    assert stage.reject() == []
    assert stage.end_collection() == []


# Instead of an abort --------------------------------------------------------------------------------


def test_what_is_withheld_runs_on_and_is_handed_out_by_the_next() -> None:
    stage = Stage(W1, room=99, groups={"rest": "withhold"})
    stage.submit_all(*(submission(f"g{i}") for i in range(3)))
    stage.collect(1)
    finish(stage, "g0")
    assert stopped(stage.commands) == []
    assert taken(stage) == ["g0"]
    finish(stage, "g1")
    stage.collect(1)
    assert taken(stage) == ["g1"]
    assert stage.running == {member("g2")}


# All of it ------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32),
    wanted=st.integers(1, 4),
    over_sample=st.sampled_from([0.0, 0.34, 1.0]),
    n=st.integers(1, 3),
    room=st.integers(1, 6),
    slices=st.sampled_from([None, 3]),
)
@settings(max_examples=60, deadline=None)
def test_collections_one_after_the_other_hand_out_every_group_once_with_all_its_tokens(
    seed: int, wanted: int, over_sample: float, n: int, room: int, slices: int | None
) -> None:
    """Whatever finishes when; each trajectory has a length of its own, in tokens that continue."""
    luck = Random(seed)
    policies = [{"kind": "slice_budget", "tokens": slices}] if slices is not None else []
    stage = Stage(size=2, policies=policies)
    groups = 9
    length = {member(f"g{i}", j): luck.randint(1, 12) for i in range(groups) for j in range(n)}
    stage.submit_all(*(submission(f"g{i}", n, budget=50) for i in range(groups)))
    seen: list[str] = []
    while len(seen) < groups:
        old = begun(stage)
        stage.collect(wanted, over_sample)
        if not seen:
            stage.up(W1, room=room)
            stage.up(W2, room=room)
        asked = min(wanted, groups - len(seen))
        for _ in range(1000):
            if stage.controller.complete_groups >= asked:
                break
            live(stage, luck, length, slices)
        else:
            raise AssertionError(stage.controller.state(stage.now))
        fresh = begun(stage) - old
        assert len(fresh) <= math.ceil(wanted * (1 + over_sample))
        stage.end_collection()
        stage.answer_all()
        assert stage.running == set()
        for delivery in stage.take():
            seen.append(delivery.group_id)
            for trajectory in delivery.trajectories:
                tokens = length[trajectory.trajectory_id]
                assert trajectory.output_ids == tuple(range(100, 100 + tokens))
                assert trajectory.finish_reason is FinishReason.STOP
    assert sorted(seen) == sorted(f"g{i}" for i in range(groups))
    assert stage.controller.counters.tokens == sum(length.values()), "nothing was sampled twice"


def live(stage: Stage, luck: Random, length: dict[TrajectoryId, int], slices: int | None) -> None:
    """One trajectory gets a token, or answers."""
    running = sorted(t for t in stage.running if stage.record(t).intent is None)
    if not running:
        stage.answer_all()
        return
    t = luck.choice(running)
    record = stage.record(t)
    if len(record.columns) < length[t]:
        stage.sample(t)
    if len(record.columns) == length[t]:
        stage.finish(t)
    elif slices is not None and len(record.columns) % slices == 0:
        stage.park(t, AbortReason.SLICE_BUDGET)
        stage.answer_all()


# Several collections, and what does not count ------------------------------------------------------


def collection(call: str, wanted: int, *, ends_at: float = math.inf) -> Collection:
    return Collection(call=call, wanted=wanted, over_sample=0.0, stop_when_met=False, ends_at=ends_at)


def test_the_end_of_one_that_another_took_the_place_of_stops_nothing() -> None:
    stage = Stage(W1, room=99)
    for group in ("a", "b"):
        stage.submit(group)
    controller = stage.controller
    controller.begin_collection(collection("first", 1), stage.now)
    controller.begin_collection(collection("second", 2), stage.now)
    assert controller.collected("first") == math.inf
    assert controller.end_collection("first", stage.now) == []
    assert controller.reject("first", stage.now) == []
    assert controller.collected("second") == 0
    assert stopped(controller.end_collection("second", stage.now)) == [member("a"), member("b")]


def test_one_whose_driver_is_gone_ends_by_itself() -> None:
    stage = Stage(W1, room=99)
    stage.controller.begin_collection(collection("lost", 1, ends_at=stage.now + 10.0), stage.now)
    stage.submit("a")
    stage.submit("b")
    assert stage.running == {member("a")}
    assert stopped(stage.wait(9.0)) == []
    assert stopped(stage.wait(1.0)) == [member("a")]
    stage.answer_all()
    stage.submit("c")
    assert stage.running == {member("c")}, "there is no window any more"


def test_evaluation_counts_neither_as_collected_nor_as_under_way() -> None:
    stage = Stage(W1, room=99)
    for group in ("a", "b", "c"):
        stage.submit(group)
    stage.collect(2)
    stage.submit("e", priority=Priority.EVAL)
    stage.submit("f", priority=Priority.EVAL)
    for group in ("e", "f"):
        assert stopped(stage.finish(member(group), 1)) == []
    assert stage.controller.collected("collect") == 0
    stage.finish(member("a"), 1)
    assert stopped(stage.finish(member("b"), 1)) == [member("c")]
    taken = stage.controller.take_collected(9, "call")
    assert [delivery.group_id for delivery in taken] == ["a", "b"]
    assert {delivery.group_id for delivery in stage.take()} == {"e", "f"}


def test_parts_of_a_group_are_no_group() -> None:
    stage = Stage(W1, room=99)
    stage.submit("a", n=2, partial=True)
    stage.collect(1)
    assert stopped(stage.finish(TrajectoryId("a/0"), 1)) == []
    assert stage.controller.collected("collect") == 0
    stage.finish(TrajectoryId("a/1"), 1)
    assert stage.controller.collected("collect") == 1
