"""Evaluation goes first: it takes the places of the youngest training trajectories, which lose nothing."""

import pytest

from rollout.control.commands import Export
from rollout.types import AbortReason, Keep, Phase, Priority, Version
from tests.control.stage import W1, W2, Stage, member, started, stopped, submission


def full(room: int = 3, **options: object) -> Stage:
    """A worker with room for three, taken by t0, t1 and t2."""
    stage = Stage(W1, room=room, **options)  # type: ignore[arg-type]
    stage.submit_all(*(submission(f"t{i}") for i in range(room)))
    for i in range(room):
        stage.admit(member(f"t{i}"))
        stage.sample(member(f"t{i}"), 2)
    return stage


def test_where_there_is_room_nobody_is_stopped() -> None:
    stage = Stage(W1, room=2)
    stage.submit("t")
    assert started(stage.evaluate("e")) == [(W1, member("e"))]
    assert stopped(stage.commands) == []


def test_the_youngest_give_way_one_for_each_that_waits() -> None:
    stage = full()
    assert stopped(stage.evaluate("e", 2)) == [member("t2"), member("t1")]
    stage.answer_all()
    assert stage.running == {member("t0"), member("e"), member("e", 1)}


def test_nobody_is_stopped_for_a_place_that_is_being_made() -> None:
    stage = full()
    stage.evaluate("e")
    assert stage.wait(1.0) == []
    assert stopped(stage.evaluate("f")) == [member("t1")]
    assert stage.wait(1.0) == []


def test_evaluation_does_not_give_way_to_evaluation() -> None:
    stage = full(room=1)
    stage.evaluate("e")
    stage.answer_all()
    assert stage.evaluate("f") == []
    assert stage.running == {member("e")}
    assert started(stage.finish(member("e"), 1)) == [(W1, member("f"))], "before t0, which is older"


def test_who_gave_way_keeps_its_tokens_and_goes_on_after_that() -> None:
    stage = full(room=1)
    stage.evaluate("e")
    export, _ = stage.park(member("t0"))
    assert isinstance(export, Export)
    stage.answer_all()
    record = stage.record(member("t0"))
    assert (record.phase, record.abort_reason, len(record.columns)) == (Phase.QUEUED, AbortReason.PRIORITY, 2)
    assert started(stage.finish(member("e"), 1)) == [(W1, member("t0"))]
    stage.finish(member("t0"), 1)
    deliveries = {str(delivery.group_id): delivery.trajectories[0] for delivery in stage.take()}
    assert deliveries["t0"].output_ids == (100, 101, 102)


def test_what_finishes_by_itself_makes_the_place_that_one_was_stopped_for() -> None:
    stage = full()
    stage.evaluate("e")
    stage.finish(member("t0"), 1)
    assert member("e") in stage.running
    stage.answer_all()
    assert member("t2") in stage.running, "there is room for it again"


def test_while_the_service_is_paused_nobody_is_stopped() -> None:
    stage = full()
    stage.take_note(stage.controller.pause(stage.now))
    assert stopped(stage.evaluate("e")) == []
    assert stopped(stage.take_note(stage.controller.unpause(stage.now))) == [member("t2")]


def test_evaluation_goes_first_among_those_that_wait() -> None:
    stage = Stage(size=1)
    stage.submit("t")
    stage.evaluate("e")
    stage.evaluate("f")
    assert [t for _, t in started(stage.up(W1, room=2))] == [member("e"), member("f")]


def test_longest_first_is_within_a_priority() -> None:
    stage = Stage(size=1, resume={"order": "longest"})
    stage.submit_all(submission("t", budget=90), submission("e", budget=10, priority=Priority.EVAL))
    assert started(stage.up(W1, room=1)) == [(W1, member("e"))]


def test_a_collection_holds_no_evaluation_back() -> None:
    """Otherwise training would give way, take its place again since nothing else may start, and so for ever."""
    stage = Stage(W1, room=2)
    stage.collect(2)
    stage.submit_all(submission("a"), submission("b"))
    assert stopped(stage.evaluate("e")) == [member("b")]
    stage.answer_all()
    assert stage.running == {member("a"), member("e")}
    assert stage.wait(1.0) == []
    assert stage.record(member("b")).suspensions == 1


def test_a_collection_that_ends_stops_no_evaluation() -> None:
    """It would stand until the next one otherwise."""
    stage = Stage(W1, room=3)
    stage.collect(1)
    stage.submit("a")
    stage.submit("b")
    stage.evaluate("e")
    stage.end_collection()
    stage.answer_all()
    assert stage.running == {member("e")}


def at_home_elsewhere() -> Stage:
    """Evaluation e has its KV on w1, where t0 runs, and waits; on w2 younger training runs."""
    stage = Stage(W1, W2, room=1)
    stage.evaluate("e")
    assert stage.record(member("e")).worker == W1
    stage.sample(member("e"), 3)
    stage.hold(member("e"), keep=Keep.HOST)
    stage.submit("t0")
    stage.submit("t1")
    assert (stage.record(member("t0")).worker, stage.record(member("t1")).worker) == (W1, W2)
    return stage


def test_where_evaluation_has_its_kv_training_gives_way_and_not_elsewhere() -> None:
    stage = at_home_elsewhere()
    assert stopped(stage.resume(member("e"))) == [member("t0")]
    assert stage.wait(1.0) == []
    stage.answer_all()
    assert stage.running == {member("e"), member("t1")}
    assert stage.record(member("t1")).suspensions == 0


def test_nobody_gives_way_elsewhere_for_one_that_waits_for_its_home() -> None:
    """Training would take the place again, and be stopped again, for ever."""
    stage = at_home_elsewhere()
    stage.evaluate("f")
    stage.finish(member("t1"), 1)
    stage.answer_all()
    stage.evaluate("g")
    stage.answer_all()
    assert stage.running == {member("f"), member("g")}
    stage.finish(member("g") if stage.record(member("g")).worker == W2 else member("f"), 1)
    stage.submit("t2")
    stage.answer_all()
    before = len(stage.commands)
    stage.resume(member("e"))
    stage.wait(1.0)
    stage.answer_all()
    assert stopped(stage.commands[before:]) == []


def test_nobody_gives_way_for_one_that_has_to_wait_for_tokens_of_its_group() -> None:
    stage = Stage(W1, room=2)
    stage.submit("t")
    stage.submit("e", 2, priority=Priority.EVAL, max_group_tokens=1)
    assert stopped(stage.commands) == []
    assert stage.running == {member("t"), member("e")}


def test_on_two_workers_the_youngest_of_both_gives_way() -> None:
    stage = Stage(W1, W2, room=1)
    stage.submit("t0")
    stage.submit("t1")
    assert stopped(stage.evaluate("e")) == [member("t1")]
    stage.answer_all()
    assert stage.running == {member("t0"), member("e")}


def test_it_waits_for_its_home_without_stopping_more_than_one() -> None:
    stage = full(room=1)
    stage.evaluate("e")
    stage.answer_all()
    stage.sample(member("e"), 3)
    stage.hold(member("e"), keep=Keep.HOST)
    assert stage.running == {member("t0")}
    assert stopped(stage.resume(member("e"))) == [member("t0")]
    assert stage.wait(1.0) == []
    stage.answer_all()
    assert stage.running == {member("e")}


@pytest.mark.parametrize("kept", [Keep.NONE, Keep.HOST])
def test_no_training_that_prefers_another_worker_takes_the_place_that_was_made(kept: Keep) -> None:
    """It would be stopped in turn, while what gave way prefers the place of yet another, and so for ever."""
    stage = Stage(W1, W2, room=1, resume={"prefer": "other"})
    stage.evaluate("e")
    stage.sample(member("e"), 3)
    stage.submit("t0")
    assert (stage.record(member("e")).worker, stage.record(member("t0")).worker) == (W1, W2)
    stage.hold(member("t0"))
    stage.submit("t1")  # on w2
    stage.hold(member("e"), keep=kept)
    stage.submit("t2")  # on w1
    stage.resume(member("t0"))
    before = len(stage.commands)
    stage.resume(member("e"))
    stage.answer_all()
    assert stage.running == {member("t1"), member("e")}
    assert stopped(stage.commands[before:]) == [member("t2")]


def test_nobody_gives_way_for_one_that_has_to_wait_for_a_version() -> None:
    """Training would take the place again, and be stopped again, until that is live."""
    stage = Stage(W1, room=1)
    stage.submit("t")
    stage.submit("e", priority=Priority.EVAL, min_version=Version(1))
    assert stage.wait(1.0) == []
    assert stopped(stage.commands) == []
    assert stopped(stage.live(1)) == [member("t")]
    stage.answer_all()
    assert stage.running == {member("e")}
