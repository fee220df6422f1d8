"""Workers that come, are drained and are paused while trajectories run; nothing is lost."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.control.commands import Export, KeepThere, Pause, Retire, Start, Stop, Unpause
from rollout.errors import UnknownWorkerError
from rollout.types import AbortReason, Keep, Phase, Then, WorkerId
from tests.control.stage import W1, W2, W3, Stage, member, start_of, started, stopped, submission

A, B = member("a"), member("b")


def two(**options: object) -> Stage:
    """a runs on w1 and b on w2, each with three tokens."""
    stage = Stage(W1, W2, **options)  # type: ignore[arg-type]
    stage.submit("a")
    stage.submit("b")
    assert {t: stage.record(t).worker for t in (A, B)} == {A: W1, B: W2}
    for t in (A, B):
        stage.admit(t)
        stage.sample(t, 3)
    return stage


def retired(stage: Stage) -> list[WorkerId]:
    return [each.worker for each in stage.commands if isinstance(each, Retire)]


# Added ----------------------------------------------------------------------------------------------


def test_a_worker_that_is_added_takes_what_waits() -> None:
    stage = Stage(W1, room=1)
    stage.submit("a", 2)
    stage.controller.expect_workers(1)
    assert started(stage.up(W2)) == [(W2, member("a", 1))]


def test_while_more_are_expected_nothing_is_hopeless() -> None:
    stage = Stage(W1)
    stage.controller.expect_workers(1)
    stage.submit("a")
    stage.down(W1, final=True)
    assert stage.phase(A) is Phase.QUEUED
    assert started(stage.up(W2)) == [(W2, A)]
    stage.down(W2, final=True)
    assert "no worker is left" in str(stage.take_one().error)


# Drained --------------------------------------------------------------------------------------------


def test_what_runs_on_a_drained_worker_goes_on_elsewhere_with_its_tokens_and_its_kv() -> None:
    stage = two()
    moved, commands = stage.controller.drain(W1, stage.now)
    assert moved == (A,)
    assert [type(each) for each in stage.take_note(commands)] == [Stop]
    assert stage.controller.keeping.made == 0
    export, *_ = stage.park(A)
    assert isinstance(export, Export)
    assert retired(stage) == []
    stage.answer_all()
    assert retired(stage) == [W1]
    assert stage.controller.is_retired(W1)
    assert stage.record(A).worker == W2
    assignment = start_of(stage.commands, A).assignment
    assert (list(assignment.output.ids), assignment.image is not None) == ([100, 101, 102], True)
    decision = stage.controller.keeping.last[0]
    assert (decision.reason, decision.then, decision.keep) == (AbortReason.DRAIN, Then.REQUEUE, Keep.POOL)
    stage.finish(A, 1)
    assert stage.take_one().abort_reason is None


def test_nothing_starts_on_a_worker_that_is_drained() -> None:
    stage = two()
    stage.drain(W1)
    stage.submit("c", 9)
    assert {worker for worker, t in started(stage.commands) if t.startswith("c/")} == {W2}


@pytest.mark.parametrize("where", [Keep.DEVICE, Keep.HOST])
def test_what_is_held_there_is_moved_and_held_still(where: Keep) -> None:
    stage = two()
    stage.hold(A, keep=where)
    moved, commands = stage.controller.drain(W1, stage.now)
    assert moved == (A,)
    stage.take_note(commands)
    assert retired(stage) == []
    stage.answer_all()
    assert retired(stage) == [W1]
    assert (stage.phase(A), stage.controller.suspended) == (Phase.SUSPENDED, {"pool": 1})
    assert stage.record(A).abort_reason is AbortReason.DRIVER
    stage.resume(A)
    assert start_of(stage.commands, A).worker == W2


def test_what_waits_there_for_room_is_moved_and_starts_elsewhere() -> None:
    stage = two(room=1)
    stage.hold(A, keep=Keep.HOST)
    stage.submit("c")
    assert stage.record(member("c")).worker == W1
    stage.resume(A)
    assert stage.phase(A) is Phase.QUEUED
    stage.drain(W1)
    stage.answer_all()
    stage.finish(B, 1)
    assert start_of(stage.commands, A).worker == W2
    assert start_of(stage.commands, A).assignment.image is not None
    stage.finish(A, 1)
    stage.answer_all()
    assert stage.record(member("c")).worker == W2
    assert retired(stage) == [W1]


@pytest.mark.parametrize("where", [Keep.DEVICE, Keep.HOST])
def test_what_the_pool_has_no_room_for_is_computed_again_elsewhere(where: Keep) -> None:
    stage = two()
    stage.hold(A, keep=where)
    stage.drain(W1)
    stage.answer_all(pool_is_full=True)
    stage.wait(1.0)
    assert retired(stage) == [W1]
    assert (stage.phase(A), stage.controller.suspended) == (Phase.SUSPENDED, {"none": 1})
    stage.resume(A)
    assignment = start_of(stage.commands, A).assignment
    assert (assignment.image, assignment.kv_tokens, len(assignment.output)) == (None, 6, 3)


def test_what_is_on_its_way_to_be_kept_there_is_moved_as_soon_as_it_is() -> None:
    stage = two()
    stage.abort(A, keep=Keep.HOST)
    (keep,) = stage.park(A)
    assert isinstance(keep, KeepThere)
    stage.drain(W1)
    assert retired(stage) == []
    stage.answer_all()
    assert retired(stage) == [W1]
    assert stage.controller.suspended == {"pool": 1}


def test_what_is_being_moved_within_the_worker_is_moved_out_of_it_as_soon_as_that_is_done() -> None:
    stage = two()
    stage.hold(A, keep=Keep.HOST)
    stage.abort(A, keep=Keep.DEVICE)
    assert stage.phase(A) is Phase.SUSPENDING
    assert stage.drain(W1) == []
    stage.answer_all()
    assert (retired(stage), stage.controller.suspended) == ([W1], {"pool": 1})


def test_what_was_told_to_stop_before_goes_to_the_pool_and_then_where_it_was_told() -> None:
    stage = two()
    stage.abort(A, keep=Keep.DEVICE)
    assert stopped(stage.drain(W1)) == [], "it is stopping"
    stage.answer_all()
    assert retired(stage) == [W1]
    assert (stage.phase(A), stage.controller.suspended) == (Phase.SUSPENDED, {"pool": 1})


def test_what_keeps_nothing_is_not_saved_for_a_drain() -> None:
    stage = two()
    stage.abort(A, keep=Keep.NONE)
    stage.drain(W1)
    stage.answer_all()
    assert (retired(stage), stage.controller.suspended) == ([W1], {"none": 1})


def test_what_waits_for_its_caller_is_moved_and_waits_still() -> None:
    stage = Stage(W1, W2, keep="host")
    stage.submit("a", multi_turn=True)
    stage.sample(A, 3)
    stage.park(A, AbortReason.TURN)
    stage.answer_all()
    stage.drain(W1)
    stage.answer_all()
    assert retired(stage) == [W1]
    assert [each.trajectory_id for each in stage.controller.turns({}, 999)] == [A]
    stage.extend(A, [7])
    assert start_of(stage.commands, A).worker == W2


def test_what_a_collection_holds_is_moved_and_goes_on_with_the_next() -> None:
    stage = two(keep="host")
    stage.collect(1)
    stage.finish(B, 1)
    stage.answer_all()
    stage.take()
    stage.drain(W1)
    stage.answer_all()
    assert stage.record(A).abort_reason is AbortReason.QUOTA
    stage.collect(1)
    assert start_of(stage.commands, A).worker == W2


def test_an_empty_worker_is_let_go_of_at_once() -> None:
    stage = two()
    stage.finish(A)
    assert stage.drain(W1) == [Retire(worker=W1)]


def test_what_finishes_before_it_stops_is_all_that_was_left() -> None:
    stage = two()
    stage.drain(W1)
    assert stage.finish(A, 1)[-1] == Retire(worker=W1)


def test_the_last_worker_and_one_that_is_not_there_cannot_be_drained() -> None:
    stage = two()
    with pytest.raises(UnknownWorkerError, match="got 'w9', allowed: one of w1, w2"):
        stage.drain(WorkerId("w9"))
    stage.drain(W1)
    with pytest.raises(UnknownWorkerError, match="the only one in service"):
        stage.drain(W2)
    stage.answer_all()
    with pytest.raises(UnknownWorkerError, match="got 'w1', allowed: one of w2"):
        stage.drain(W1)
    with pytest.raises(UnknownWorkerError, match="the only one in service"):
        stage.drain(W2)
    assert stage.running == {A, B}


def test_a_drain_that_is_told_twice_is_one() -> None:
    stage = two()
    stage.drain(W1)
    assert stage.drain(W1) == []
    stage.answer_all()
    assert retired(stage) == [W1]


@pytest.mark.parametrize("again", [True, False], ids=["down, and up again", "up again"])
@pytest.mark.parametrize("when", ["running", "exporting", "kept"])
def test_a_worker_that_is_killed_while_it_is_drained_is_out_of_service_and_costs_no_token(
    when: str, again: bool
) -> None:
    stage = two()
    if when == "kept":
        stage.hold(A, keep=Keep.HOST)
    stage.drain(W1)
    if when == "exporting":
        stage.park(A)
    if again:
        stage.down(W1)
        assert retired(stage) == [W1]
    assert started(stage.up(W1, "b")) == [] or again is False
    assert retired(stage) == [W1]
    stage.answer_all(pool_is_full=True)
    if when == "kept":
        stage.resume(A)
    stage.submit("c", 9)
    assert all(worker == W2 for worker, t in started(stage.commands) if t.startswith("c/"))
    assert start_of(stage.commands, A).worker == W2
    assert list(start_of(stage.commands, A).assignment.output.ids) == [100, 101, 102]
    assert stage.controller.counters.workers_lost == 1


def test_if_the_other_worker_is_lost_for_good_during_a_drain_the_drain_is_off() -> None:
    """Nothing would be left to run on otherwise."""
    stage = two()
    stage.drain(W1)
    stage.down(W2, final=True)
    stage.answer_all()
    assert stage.running == {A, B}
    assert all(stage.record(t).worker == W1 for t in (A, B))
    assert any("its drain is off" in trouble for trouble in stage.controller.troubles)


def test_a_worker_that_is_lost_for_good_after_its_drain_gives_up_nothing() -> None:
    stage = two()
    stage.drain(W1)
    stage.answer_all()
    stage.down(W1, final=True)
    assert stage.running == {A, B}
    assert stage.controller.counters.workers_lost == 0


def test_two_may_be_drained_at_once() -> None:
    stage = Stage(W1, W2, W3)
    for group in ("a", "b", "c"):
        stage.submit(group)
    stage.drain(W1)
    stage.drain(W2)
    stage.answer_all()
    assert sorted(retired(stage)) == [W1, W2]
    assert {stage.record(member(group)).worker for group in ("a", "b", "c")} == {W3}


@given(seed=st.integers(0, 2**32), keep=st.sampled_from(["auto", "device", "host", "pool", "none"]))
@settings(max_examples=60, deadline=None)
def test_whatever_is_where_a_drain_loses_nothing_and_ends(seed: int, keep: str) -> None:
    luck = Random(seed)
    stage = Stage(W1, W2, W3, room=2, keep=keep)
    stage.submit_all(*(submission(f"g{i}", 2) for i in range(5)))
    names = [record.trajectory_id for record in stage.controller.resolve(None)[0]]
    tokens = dict.fromkeys(names, 0)
    drained = luck.choice([W1, W2, W3])
    for moment in range(60):
        running = sorted(t for t in stage.running if stage.record(t).intent is None)
        match luck.randrange(4):
            case 0 if running:
                t = luck.choice(running)
                stage.sample(t)
                tokens[t] += 1
            case 1:
                stage.abort(
                    luck.choice(names), keep=luck.choice(list(Keep)), then=luck.choice([Then.HOLD, Then.REQUEUE])
                )
            case 2:
                stage.resume(luck.choice(names))
            case _ if stage.unanswered:
                stage.answer_all(pool_is_full=luck.random() < 0.3)
        if moment == 20:
            stage.drain(drained)
    stage.answer_all()
    stage.wait(1.0)
    stage.answer_all()
    stage.wait(1.0)
    assert retired(stage) == [drained]
    assert {t: len(stage.record(t).columns) for t in names} == tokens
    stage.resume(*names)
    while stage.running:
        for t in sorted(stage.running):
            assert stage.record(t).worker != drained
            stage.finish(t)
    assert sum(len(delivery.trajectories) for delivery in stage.take()) == len(names)


# Paused ---------------------------------------------------------------------------------------------


def test_a_pause_is_told_to_every_worker_once_and_nothing_starts_until_it_ends() -> None:
    stage = two()
    pauses = stage.take_note(stage.controller.pause(stage.now))
    assert pauses == [Pause(worker=W1), Pause(worker=W2)]
    assert stage.take_note(stage.controller.pause(stage.now)) == []
    assert stage.phases() == [Phase.PAUSED, Phase.PAUSED]
    assert stage.submit("c") == []
    first, second, start = stage.take_note(stage.controller.unpause(stage.now))
    assert [first, second] == [Unpause(worker=W1), Unpause(worker=W2)]
    assert isinstance(start, Start)
    assert stage.take_note(stage.controller.unpause(stage.now)) == []
    assert stage.phases()[:2] == [Phase.DECODING, Phase.DECODING]


def test_a_worker_that_comes_up_during_a_pause_is_paused() -> None:
    stage = Stage(W1)
    stage.submit("a")
    stage.controller.pause(stage.now)
    stage.controller.expect_workers(1)
    assert stage.up(W2) == [Pause(worker=W2)]


def test_what_was_told_during_a_pause_is_where_it_goes_on() -> None:
    """What a worker did before it heard of the pause."""
    stage = Stage(W1)
    stage.submit("a")
    stage.controller.pause(stage.now)
    stage.admit(A)
    stage.sample(A, 2)
    assert stage.phase(A) is Phase.PAUSED
    stage.controller.unpause(stage.now)
    assert (stage.phase(A), len(stage.record(A).columns)) == (Phase.DECODING, 2)


def test_a_preemption_during_a_pause_is_counted_once() -> None:
    stage = two()
    stage.controller.pause(stage.now)
    stage.preempt(A)
    stage.preempt(A)
    assert stage.controller.counters.preemptions == 1
    stage.controller.unpause(stage.now)
    assert stage.phase(A) is Phase.PREEMPTED


@pytest.mark.parametrize("then", Then)
def test_an_abort_during_a_pause_takes_effect(then: Then) -> None:
    """Case A1: with exactly the tokens that it has."""
    stage = two()
    stage.controller.pause(stage.now)
    ticket = stage.abort(A, then=then)
    assert not ticket.done
    stage.answer_all()
    assert ticket.done
    assert len(ticket.report().partials[0].output_ids) == (0 if then is Then.RETRY else 3)
    assert (A in stage.running, B in stage.running) == (False, True)


def test_a_worker_that_is_lost_during_a_pause_gives_back_what_it_ran() -> None:
    stage = two()
    stage.controller.pause(stage.now)
    stage.down(W1)
    assert stage.phase(A) is Phase.QUEUED
    unpaused = stage.take_note(stage.controller.unpause(stage.now))
    assert started(unpaused) == [(W2, A)]


def test_what_finishes_as_it_is_paused_is_over() -> None:
    stage = two()
    stage.controller.pause(stage.now)
    stage.finish(A, 1)
    assert stage.take_one().trajectory_id == A
