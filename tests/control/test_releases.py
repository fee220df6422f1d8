"""Workers that give memory back: what is on them moves to the pool; nothing starts there until they have it again."""

from collections.abc import Iterable

from rollout.control.commands import Command, Start
from rollout.types import AbortReason, Keep, Phase, TrajectoryId, WorkerId
from tests.control.stage import W1, W2, Stage, member

A, B = member("a"), member("b")


def started(commands: Iterable[Command]) -> list[tuple[WorkerId, TrajectoryId]]:
    return [(each.worker, each.assignment.trajectory_id) for each in commands if isinstance(each, Start)]


def release(stage: Stage, *workers: WorkerId) -> tuple[TrajectoryId, ...]:
    moved, commands = stage.controller.release(workers, stage.now)
    stage.take_note(commands)
    return moved


def running(stage: Stage, group: str, worker: WorkerId) -> TrajectoryId:
    """A trajectory that has sampled on this worker."""
    stage.submit(group)
    t = member(group)
    assert stage.record(t).worker == worker
    stage.admit(t)
    stage.sample(t, 8)
    return t


def test_what_runs_goes_to_the_pool_and_on_when_the_worker_has_its_memory_again() -> None:
    stage = Stage(W1)
    running(stage, "a", W1)
    assert release(stage, W1) == (A,)
    assert not stage.controller.is_empty(W1)
    stage.answer_all()
    assert stage.controller.is_empty(W1)
    assert stage.phase(A) is Phase.QUEUED
    assert stage.record(A).abort_reason is AbortReason.RELEASE
    assert stage.record(A).pooled.kv_tokens == stage.record(A).tokens - 1
    stage.submit("b")
    assert stage.phase(B) is Phase.QUEUED, "nothing starts"
    stage.wait(10_000.0)
    assert stage.controller.stalled_s(stage.now) == 0.0, "nothing could go on"
    assert set(started(stage.take_note(stage.controller.reclaim([W1], stage.now)))) == {(W1, A), (W1, B)}
    assert stage.record(A).columns.sampled == 8


def test_others_take_what_is_on_a_worker_that_gives_its_memory_back() -> None:
    stage = Stage(W1, W2)
    t = running(stage, "a", W1)
    release(stage, W1)
    stage.answer_all()
    assert stage.record(t).workers[-1] == W2
    stage.submit("b", 3)
    assert {stage.record(member("b", i)).worker for i in range(3)} == {W2}
    assert stage.controller.is_empty(W1)


def test_what_was_kept_there_goes_to_the_pool_and_stays_held() -> None:
    for keep in (Keep.DEVICE, Keep.HOST):
        stage = Stage(W1, keep=str(keep))
        running(stage, "a", W1)
        stage.hold(A)
        assert stage.record(A).home is not None
        assert release(stage, W1) == (A,)
        stage.answer_all()
        assert stage.controller.is_empty(W1)
        assert (stage.phase(A), stage.record(A).kept, stage.record(A).held) == (Phase.SUSPENDED, Keep.POOL, True)
        assert stage.controller.state(stage.now)["workers"][W1]["released"]


def test_what_the_pool_refuses_is_computed_again() -> None:
    stage = Stage(W1, keep="device")
    running(stage, "a", W1)
    stage.hold(A)
    release(stage, W1)
    stage.answer_all(pool_is_full=True)
    assert stage.controller.is_empty(W1)
    assert (stage.phase(A), stage.record(A).kept) == (Phase.SUSPENDED, Keep.NONE)


def test_what_comes_to_be_kept_there_later_is_moved_too() -> None:
    stage = Stage(W1, keep="device")
    t = running(stage, "a", W1)
    stage.abort(t, keep=Keep.DEVICE)
    release(stage, W1)
    stage.answer_all()
    assert stage.controller.is_empty(W1)
    assert stage.record(A).kept is Keep.POOL


def test_a_worker_that_was_lost_meanwhile_starts_nothing_when_it_comes_back() -> None:
    stage = Stage(W1)
    running(stage, "a", W1)
    release(stage, W1)
    stage.down(W1)
    assert release(stage, W1) == (), "it is not up"
    assert started(stage.up(W1, "b")) == []
    assert stage.controller.is_empty(W1)
    assert started(stage.take_note(stage.controller.reclaim([W1], stage.now))) == [(W1, A)]
    stage.controller.reclaim([WorkerId("w9")], stage.now)


def test_evaluation_takes_no_place_on_a_worker_without_memory() -> None:
    stage = Stage(W1, W2, room=1)
    running(stage, "a", W1)
    running(stage, "b", W2)
    release(stage, W1)
    stage.answer_all()
    stage.evaluate("e")
    assert stage.record(B).intent is not None
    assert stage.record(B).intent.reason is AbortReason.PRIORITY


def test_a_flush_gives_up_all_kv_that_nobody_uses() -> None:
    stage = Stage(W1, keep="device")
    running(stage, "a", W1)
    running(stage, "b", W1)
    c = running(stage, "c", W1)
    stage.hold(A, keep=Keep.POOL)
    stage.hold(B, keep=Keep.DEVICE)
    before = stage.record(c).kv_tokens
    stage.take_note(stage.controller.flush(stage.now))
    assert [stage.record(t).kept for t in (A, B)] == [Keep.NONE, Keep.NONE]
    assert stage.phase(c) is Phase.DECODING
    assert stage.record(c).kv_tokens == before
    stage.resume("a", "b")
    assert all(stage.record(t).pooled.image is None for t in (A, B))
