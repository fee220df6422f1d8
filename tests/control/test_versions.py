"""KV of weights that may not be gone on with any more is let go of, wherever it is; what asks for a version waits for
it; how far tokens were behind is counted once.

Every history is tried with one to three updates, and with `kv_reuse` for none, one and two of them.
"""

from collections import Counter

import pytest

from rollout.config import WeightsConfig
from rollout.control.commands import Command, Export, KeepThere, Recall, Release, Retain
from rollout.control.messages import ExportFailed, Moved, Recalled
from rollout.control.versions import Versions
from rollout.errors import UnsatisfiableVersionError
from rollout.types import (
    AbortReason,
    FinishReason,
    Keep,
    KVRun,
    Phase,
    Then,
    Version,
    Weights,
    WeightsId,
)
from tests.control.stage import NODES, PROMPT, W1, W2, Stage, member, start_of, started, stopped
from tests.weights import WEIGHTS, loaded, written

A, B = member("a"), member("b")
HERE = NODES[W1]
KV = len(PROMPT) + 3 - 1
"""Of `A`, once it was stopped after three tokens."""
LAGS = pytest.mark.parametrize("lag", [0, 1, 2])
UPDATES = pytest.mark.parametrize("updates", [1, 2, 3])
WORKER_TIERS = pytest.mark.parametrize("where", [Keep.DEVICE, Keep.HOST])


def reuse(lag: int) -> dict[str, object]:
    return {"kv_reuse": {"kind": "same_weights"} if lag == 0 else {"kind": "stale", "max_lag": lag}}


def decoding(lag: int = 0, **options: object) -> Stage:
    """A stage on which `A` decodes on w1 and has sampled three tokens."""
    stage = Stage(W1, weights=reuse(lag), **options)  # type: ignore[arg-type]
    stage.submit("a")
    stage.admit(A)
    stage.sample(A, 3)
    return stage


def held(where: Keep, lag: int, **options: object) -> Stage:
    stage = decoding(lag, **options)
    stage.hold(A, keep=where)
    assert stage.record(A).kept is where
    return stage


def let_go(updates: int, lag: int) -> bool:
    return updates > lag


def releases(stage: Stage) -> list[Release]:
    """None of them told twice."""
    told = [each for each in stage.commands if isinstance(each, Release)]
    assert len(set(told)) == len(told)
    return told


def of_type(commands: list[Command], *kinds: type[Command]) -> list[Command]:
    return [each for each in commands if isinstance(each, kinds)]


# Which weights ------------------------------------------------------------------------------------


@LAGS
@pytest.mark.parametrize("labels", [(1, 2, 3, 4), (1, 0, 1, 0), (0, 0, 0, 0), (5, 3, 1, 2)])
def test_kv_is_reusable_for_so_many_loads_whatever_they_are_called(lag: int, labels: tuple[int, ...]) -> None:
    versions = Versions(WEIGHTS, WeightsConfig.model_validate(reuse(lag)).kv_reuse)
    history = [WEIGHTS]
    for number, label in enumerate(labels):
        weights = Weights(WeightsId(f"load {number}"), Version(label))
        after = {each.weights_id for each in [*history, weights][-lag - 1 :]}
        assert versions.reusable_with(weights) == after
        assert versions.load(weights)
        assert not versions.load(weights)
        history.append(weights)
        assert versions.live == weights
        assert versions.reusable_with(weights) == after
        for each in history:
            assert versions.may_use(written(3, each)) == (each.weights_id in after)
            mixed = (KVRun(each, 2), KVRun(weights, 1))
            assert versions.may_use(mixed) == (each.weights_id in after)
        assert versions.may_use(())


# In every place -----------------------------------------------------------------------------------


@LAGS
@WORKER_TIERS
def test_kv_at_home_is_released_when_it_is_of_no_use_any_more(where: Keep, lag: int) -> None:
    stage = held(where, lag)
    for updates in (1, 2, 3):
        commands = stage.live(updates)
        gone = [Release(worker=W1, trajectory_id=A, epoch=1)] if updates == lag + 1 else []
        assert commands == gone
        assert stage.record(A).kept is (Keep.NONE if let_go(updates, lag) else where)
    start = start_of(stage.resume(A), A)
    assert (start.assignment.image, start.assignment.kv_tokens) == (None, KV)
    assert len(releases(stage)) == 1


@LAGS
@UPDATES
@WORKER_TIERS
def test_what_is_resumed_goes_on_where_it_is_kept_if_its_kv_may_be_used(where: Keep, updates: int, lag: int) -> None:
    stage = held(where, lag, room=1)
    stage.submit("b")  # fills its home
    stage.up(W2)
    for version in range(1, updates + 1):
        stage.live(version)
    started_there = started(stage.resume(A))
    assert started_there == ([(W2, A)] if let_go(updates, lag) else [])
    assert len(releases(stage)) == let_go(updates, lag)


@LAGS
@UPDATES
@WORKER_TIERS
def test_what_waits_for_its_home_waits_no_longer_when_its_kv_is_of_no_use(where: Keep, updates: int, lag: int) -> None:
    stage = held(where, lag, room=1)
    stage.submit("b")
    stage.up(W2)
    assert stage.resume(A) == []
    begun = [start for version in range(updates) for start in started(stage.live(version + 1))]
    assert begun == ([(W2, A)] if let_go(updates, lag) else [])


@LAGS
def test_an_image_in_the_pool_is_let_go_of_when_it_is_of_no_use_any_more(lag: int) -> None:
    stage = held(Keep.POOL, lag)
    for updates in (1, 2, 3):
        commands = stage.live(updates)
        gone = [Retain(node=HERE, trajectory_id=A, segments=frozenset())] if updates == lag + 1 else []
        assert commands == gone
        assert stage.record(A).kept is (Keep.NONE if let_go(updates, lag) else Keep.POOL)
    assert start_of(stage.resume(A), A).assignment.image is None


@LAGS
@UPDATES
def test_an_export_under_way_is_waited_for_and_its_image_used_only_if_it_may_be(updates: int, lag: int) -> None:
    stage = decoding(lag)
    stage.abort(A)
    (order,) = stage.park(A)
    assert isinstance(order, Export)
    assert [command for version in range(updates) for command in stage.live(version + 1)] == []
    done = stage.exported(order)
    segments = frozenset() if let_go(updates, lag) else frozenset({done.image.runs[0].segment})
    commands = stage.handle(done)
    assert commands[0] == Release(worker=W1, trajectory_id=A, epoch=1)
    assert commands[-1] == Retain(node=HERE, trajectory_id=A, segments=segments)
    assert stage.record(A).kept is (Keep.NONE if let_go(updates, lag) else Keep.POOL)
    assert stage.handle(done) == [] or let_go(updates, lag)
    assert len(releases(stage)) == 1


@LAGS
@UPDATES
@WORKER_TIERS
def test_what_is_just_being_kept_is_released_when_that_is_done(where: Keep, updates: int, lag: int) -> None:
    stage = decoding(lag)
    stage.abort(A, keep=where)
    (order,) = stage.park(A)
    assert isinstance(order, KeepThere)
    assert [command for version in range(updates) for command in stage.live(version + 1)] == []
    commands = stage.tell(A, Moved, where=where, kv_tokens=KV, error=None)
    assert commands == ([Release(worker=W1, trajectory_id=A, epoch=1)] if let_go(updates, lag) else [])
    assert (stage.phase(A), stage.record(A).kept) == (Phase.SUSPENDED, Keep.NONE if let_go(updates, lag) else where)


@LAGS
@UPDATES
@WORKER_TIERS
def test_what_is_just_being_recalled_is_released_once_and_sent_nowhere(where: Keep, updates: int, lag: int) -> None:
    stage = held(where, lag)
    stage.abort(A, keep=Keep.POOL)
    assert isinstance(stage.commands[-1], Recall)
    assert [command for version in range(updates) for command in stage.live(version + 1)] == []
    commands = stage.tell(A, Recalled, kv_tokens=KV, prompt_pages=1, page_keys=(), written=written(KV))
    if let_go(updates, lag):
        assert commands == [Release(worker=W1, trajectory_id=A, epoch=1)]
        assert (stage.phase(A), stage.record(A).kept) == (Phase.SUSPENDED, Keep.NONE)
    else:
        assert of_type(commands, Export, Release) == of_type(commands, Export)
    stage.answer_all()
    assert len(releases(stage)) == 1


@LAGS
@UPDATES
def test_the_worker_of_a_recall_may_be_lost_after_an_update(updates: int, lag: int) -> None:
    stage = held(Keep.HOST, lag, size=2)
    stage.abort(A, keep=Keep.POOL)
    for version in range(updates):
        stage.live(version + 1)
    assert stage.down(W1) == []
    assert (stage.phase(A), stage.record(A).kept, releases(stage)) == (Phase.SUSPENDED, Keep.NONE, [])


@LAGS
@UPDATES
def test_an_export_that_fails_after_an_update_leaves_nothing_at_home_that_is_of_no_use(updates: int, lag: int) -> None:
    stage = held(Keep.HOST, lag)
    stage.abort(A, keep=Keep.POOL)
    stage.tell(A, Recalled, kv_tokens=KV, prompt_pages=1, page_keys=(), written=written(KV))
    for version in range(updates):
        stage.live(version + 1)
    stage.handle(ExportFailed(trajectory_id=A, epoch=1, error="the pool is full"))
    stage.unanswered = [each for each in stage.unanswered if isinstance(each, KeepThere)]
    stage.answer_all()
    assert (stage.phase(A), stage.record(A).kept) == (
        Phase.SUSPENDED,
        Keep.NONE if let_go(updates, lag) else Keep.HOST,
    )
    assert len(releases(stage)) == let_go(updates, lag)


@LAGS
@UPDATES
def test_what_waits_to_have_its_kv_brought_to_a_worker_loses_it_when_it_is_of_no_use(updates: int, lag: int) -> None:
    stage = held(Keep.POOL, lag, room=1)
    stage.submit("b")
    stage.abort(A, keep=Keep.HOST)
    assert stage.phase(A) is Phase.QUEUED
    told = [command for version in range(updates) for command in stage.live(version + 1)]
    assert told == ([Retain(node=HERE, trajectory_id=A, segments=frozenset())] if let_go(updates, lag) else [])
    start = start_of(stage.finish(B), A)
    assert start.assignment.watch.only_loads
    assert (start.assignment.image is None) == let_go(updates, lag)
    stage.admit(A) if let_go(updates, lag) else stage.admit(A, restored=KV, runs=written(KV))
    stage.park(A, runs=() if let_go(updates, lag) else written(KV))
    stage.unanswered = [each for each in stage.unanswered if isinstance(each, KeepThere)]
    stage.answer_all()
    assert (stage.phase(A), stage.record(A).kept) == (
        Phase.SUSPENDED,
        Keep.NONE if let_go(updates, lag) else Keep.HOST,
    )


@LAGS
@UPDATES
def test_a_running_trajectory_keeps_its_older_image_as_long_as_it_is_of_use(updates: int, lag: int) -> None:
    """It spares bytes when it is exported again, and tokens if its worker is lost."""
    stage = held(Keep.POOL, lag)
    first = start_of(stage.resume(A), A).assignment.image
    stage.admit(A, restored=KV)
    told = [command for version in range(updates) for command in stage.live(version + 1)]
    assert told == ([Retain(node=HERE, trajectory_id=A, segments=frozenset())] if let_go(updates, lag) else [])
    stage.down(W1)
    again = start_of(stage.up(W1, "b"), A).assignment.image
    assert again == (None if let_go(updates, lag) else first)


@LAGS
@UPDATES
def test_an_image_is_the_base_of_a_later_one_only_if_that_begins_like_it(updates: int, lag: int) -> None:
    stage = held(Keep.POOL, lag)
    stage.resume(A)
    stage.admit(A, restored=KV)
    first = stage.record(A).pooled.image
    for version in range(1, updates + 1):
        stage.live(version)
    live = stage.controller.weights
    if let_go(updates, lag):  # computed again
        stage.preempt(A, outdated=True)
        stage.admit(A)
        runs = (KVRun(live, KV + 2),)
    else:
        runs = (KVRun(WEIGHTS, KV), KVRun(live, 2))
    stage.sample(A, 2, version=updates)
    stage.abort(A)
    order = of_type(stage.park(A, runs=runs), Export)[0]
    assert isinstance(order, Export)
    assert order.written == runs
    assert order.base == (None if let_go(updates, lag) else first)


def test_an_image_with_another_history_is_no_base_although_it_is_of_use() -> None:
    """The worker did not use it, and computed all with what is live."""
    stage = held(Keep.POOL, lag=1)
    stage.resume(A)
    stage.live(1)
    stage.admit(A, runs=())
    stage.sample(A, 2, version=1)
    stage.abort(A)
    (order,) = stage.park(A)
    assert isinstance(order, Export)
    assert (order.written, order.base) == (written(KV + 2, loaded(1)), None)
    assert stage.record(A).pooled.image is not None


@LAGS
@UPDATES
def test_what_an_export_builds_on_may_become_useless_while_it_is_under_way(updates: int, lag: int) -> None:
    stage = held(Keep.POOL, lag)
    stage.resume(A)
    stage.admit(A, restored=KV)
    stage.sample(A, 2)
    stage.abort(A)
    (order,) = stage.park(A)
    assert isinstance(order, Export)
    assert order.base is not None
    assert [command for version in range(updates) for command in stage.live(version + 1)] == []
    done = stage.exported(order)
    commands = of_type(stage.handle(done), Retain)
    segments = frozenset() if let_go(updates, lag) else frozenset({done.image.runs[0].segment})
    assert commands[-1] == Retain(node=HERE, trajectory_id=A, segments=segments)


@LAGS
@UPDATES
def test_the_older_image_is_let_go_of_too_when_an_export_fails_after_an_update(updates: int, lag: int) -> None:
    stage = held(Keep.POOL, lag)
    stage.resume(A)
    stage.admit(A, restored=KV)
    stage.sample(A, 2)
    stage.abort(A)
    stage.park(A)
    for version in range(updates):
        stage.live(version + 1)
    commands = stage.handle(ExportFailed(trajectory_id=A, epoch=2, error="the pool is full"))
    gone = [Retain(node=HERE, trajectory_id=A, segments=frozenset())] if let_go(updates, lag) else []
    assert commands == [Release(worker=W1, trajectory_id=A, epoch=2), *gone]
    assert stage.record(A).kept is (Keep.NONE if let_go(updates, lag) else Keep.POOL)


@LAGS
@UPDATES
def test_mixed_kv_is_of_use_for_as_long_as_its_oldest_part(updates: int, lag: int) -> None:
    stage = decoding(2)
    stage.live(1)
    stage.sample(A, 2, version=1)
    stage.abort(A, keep=Keep.HOST)
    stage.park(A, runs=(KVRun(WEIGHTS, KV), KVRun(loaded(1), 2)))
    stage.answer_all()
    told = [command for version in range(updates) for command in stage.live(version + 2)]
    gone = let_go(updates + 1, 2)
    assert told == ([Release(worker=W1, trajectory_id=A, epoch=1)] if gone else [])


@WORKER_TIERS
def test_what_was_evicted_of_mixed_kv_may_leave_what_is_of_use(where: Keep) -> None:
    """Of the kept positions only the first are left, and these were written by weights that may be used."""
    stage = decoding(1)
    stage.live(1)
    stage.sample(A, 2, version=1)
    stage.abort(A, keep=where)
    stage.park(A, runs=(KVRun(WEIGHTS, KV), KVRun(loaded(1), 2)))
    stage.tell(A, Moved, where=where, kv_tokens=KV - 2, error=None)
    home = stage.record(A).home
    assert home is not None
    assert home.written == written(KV - 2)


@pytest.mark.parametrize("keep", [Keep.DEVICE, Keep.HOST, Keep.POOL])
def test_kv_that_is_parked_after_an_update_goes_nowhere_if_nothing_may_go_on_with_it(keep: Keep) -> None:
    """The worker parked it before, and that is heard of only now."""
    stage = decoding()
    stage.abort(A, keep=keep)
    stage.live(1)
    assert stage.park(A, runs=written(KV)) == [Release(worker=W1, trajectory_id=A, epoch=1)]
    assert (stage.phase(A), stage.record(A).kept) == (Phase.SUSPENDED, Keep.NONE)


def test_a_rollback_reuses_nothing() -> None:
    stage = held(Keep.POOL, lag=0)
    stage.live(Weights(WeightsId("a second load"), Version(1)))
    assert stage.record(A).pooled.image is None
    stage.live(Weights(WeightsId("a third load"), WEIGHTS.version))
    assert stage.controller.weights.version == WEIGHTS.version
    assert start_of(stage.resume(A), A).assignment.image is None


@WORKER_TIERS
def test_other_weights_with_the_same_label_reuse_nothing(where: Keep) -> None:
    stage = held(where, lag=0)
    other = Weights(WeightsId("other"), WEIGHTS.version)
    assert stage.live(other) == [Release(worker=W1, trajectory_id=A, epoch=1)]
    assert stage.live(other) == []


def test_what_is_found_at_home_after_an_update_says_nothing_of_evictions() -> None:
    stage = held(Keep.DEVICE, lag=0)
    stage.resume(A)
    stage.live(1)
    stage.admit(A)
    (worker,) = stage.controller._fleet.workers
    assert worker.lost_share(stage.now) == 0.0


# Asked for ----------------------------------------------------------------------------------------

OVERDUE = "{} was not live within 600 s (weights.version_timeout_s); live: {}"


@pytest.mark.parametrize("asked", [{"min_version": Version(2)}, {"exact_version": Version(2)}])
def test_what_asks_for_a_version_starts_when_it_is_live(asked: dict[str, Version]) -> None:
    stage = Stage(W1)
    assert stage.submit("a", **asked) == []
    assert started(stage.submit("b")) == [(W1, B)]
    assert started(stage.live(1)) == []
    assert stage.phase(A) is Phase.QUEUED
    assert started(stage.live(2)) == [(W1, A)]


@pytest.mark.parametrize("asked", [{"min_version": Version(0)}, {"exact_version": Version(0)}])
def test_what_asks_for_the_live_version_starts_at_once(asked: dict[str, Version]) -> None:
    assert started(Stage(W1).submit("a", **asked)) == [(W1, A)]


@pytest.mark.parametrize(
    ("asked", "wants"),
    [({"min_version": Version(2)}, "min_version 2"), ({"exact_version": Version(2)}, "exact_version 2")],
)
def test_what_has_waited_for_its_version_for_too_long_fails_and_says_so(asked: dict[str, Version], wants: str) -> None:
    stage = Stage(W1)
    stage.submit("a", **asked)
    stage.wait(599.0)
    stage.live(1)
    assert not stage.record(A).over
    stage.wait(1.0)
    result = stage.take_one()
    assert (result.finish_reason, result.error) == (FinishReason.ERROR, OVERDUE.format(wants, 1))


def test_how_long_is_configured() -> None:
    stage = Stage(W1, weights={"version_timeout_s": 5.0})
    stage.submit("a", min_version=Version(1))
    stage.wait(5.0)
    assert "within 5 s" in str(stage.take_one().error)


def test_a_group_fails_as_a_whole_if_its_version_does_not_come() -> None:
    stage = Stage(W1, groups={"failed_member": "fail"})
    stage.submit("a", 2, min_version=Version(1))
    stage.wait(600.0)
    (delivery,) = stage.take()
    assert delivery.error is not None
    assert "min_version 1 was not live" in delivery.error


def test_a_version_that_is_past_is_refused_at_once_and_nothing_is_taken_in() -> None:
    stage = Stage(W1)
    stage.live(3)
    stage.submit("b")
    with pytest.raises(UnsatisfiableVersionError, match="exact_version: got 2, allowed: 3, which is live, or a later"):
        stage.submit("a", exact_version=Version(2))
    assert stage.controller.accounts().submitted == 1
    stage.submit("a", min_version=Version(2))
    assert stage.running == {A, B}


def test_a_submission_that_is_told_twice_is_not_refused_for_what_is_past_by_now() -> None:
    stage = Stage(W1)
    stage.submit("a", exact_version=Version(0))
    stage.live(1)
    assert stage.submit("a", exact_version=Version(0)) == []


@pytest.mark.parametrize("keep", ["device", "host", "pool", "none"])
def test_everything_that_asked_for_a_version_that_is_past_ends_with_its_tokens(keep: str) -> None:
    """Running, held, on the move and queued."""
    stage = Stage(W1, keep=keep)
    stage.submit("a", 4, exact_version=Version(0))
    running, suspended, moving, queued = (member("a", i) for i in range(4))
    for t in (running, suspended, moving):
        stage.admit(t)
        stage.sample(t, 2)
    stage.hold(suspended)
    stage.abort(moving)
    stage.park(moving)
    stage.pause()
    stage.abort(queued, then=Then.REQUEUE)
    stage.park(queued, kv=0)
    assert stage.phase(queued) is Phase.QUEUED
    commands = stage.live(1)
    assert stopped(commands) == [running]
    stage.answer_all()
    stage.unanswered.clear()
    (delivery,) = stage.take()
    ends = {t.trajectory_id: (t.finish_reason, t.abort_reason, len(t.output_ids)) for t in delivery.trajectories}
    over = (FinishReason.ABORT, AbortReason.VERSION)
    assert ends == {running: (*over, 2), suspended: (*over, 2), moving: (*over, 2), queued: (*over, 0)}
    told = [(each.trajectory_id, each.epoch) for each in releases(stage)]
    assert max(Counter(told).values(), default=0) <= 1


def test_what_ended_its_turn_with_the_version_it_asked_for_is_whole() -> None:
    stage = Stage(W1)
    stage.submit("a", exact_version=Version(0), multi_turn=True)
    stage.admit(A)
    stage.sample(A, 2)
    stage.park(A, AbortReason.TURN)
    stage.answer_all()
    stage.live(1)
    result = stage.take_one()
    assert (result.finish_reason, result.abort_reason) == (FinishReason.STOP, None)


@pytest.mark.parametrize("asked", [{"min_version": Version(2)}, {"exact_version": Version(2)}])
def test_after_a_rollback_what_asks_for_more_waits_again_without_its_kv(asked: dict[str, Version]) -> None:
    stage = Stage(W1)
    stage.live(2)
    stage.submit("a", **asked)
    stage.admit(A)
    stage.sample(A, 2, version=2)
    assert stopped(stage.live(1)) == [A]
    assert stage.park(A) == [Release(worker=W1, trajectory_id=A, epoch=1)]
    assert (stage.phase(A), stage.record(A).abort_reason) == (Phase.QUEUED, AbortReason.VERSION)
    assert not stage.controller.busy
    again = Weights(WeightsId("again"), Version(2))
    start = start_of(stage.live(again), A)
    assert len(start.assignment.output) == 2
    stage.admit(A)
    stage.finish(A)
    assert {run.version for run in stage.take_one().versions} == {2}


def test_it_waits_for_its_version_from_the_rollback_on() -> None:
    """Before that it waited for a worker, and its version was there."""
    stage = Stage(W1, room=1)
    stage.live(2)
    stage.submit("b")
    stage.submit("a", min_version=Version(2))
    stage.wait(1000.0)
    stage.live(1)
    stage.wait(599.0)
    assert stage.phase(A) is Phase.QUEUED
    stage.live(0)
    stage.wait(1.0)
    assert stage.record(A).error == OVERDUE.format("min_version 2", 0)


def test_it_waits_for_its_version_from_its_resume_on() -> None:
    stage = Stage(W1)
    stage.submit("a", min_version=Version(2))
    stage.hold(A)
    stage.wait(1000.0)
    stage.resume(A)
    stage.wait(599.0)
    assert stage.phase(A) is Phase.QUEUED
    stage.wait(1.0)
    assert stage.phase(A) is Phase.FAILED


@pytest.mark.parametrize("then", [Then.HOLD, Then.FINISH, Then.RETRY, Then.DROP])
def test_a_rollback_does_not_change_what_a_driver_said_of_what_is_being_stopped(then: Then) -> None:
    stage = Stage(W1)
    stage.live(2)
    stage.submit("a", min_version=Version(2))
    stage.admit(A)
    stage.sample(A, 2, version=2)
    stage.abort(A, then=then)
    assert stage.live(1) == []
    intent = stage.record(A).intent
    assert intent is not None
    assert (intent.then, intent.reason) == (then, AbortReason.DRIVER)


@pytest.mark.parametrize(
    ("then", "becomes"),
    [
        (Then.REQUEUE, Then.FINISH),
        (Then.HOLD, Then.FINISH),
        (Then.RETRY, Then.FINISH),
        (Then.FINISH, Then.FINISH),
        (Then.DROP, Then.DROP),
    ],
)
def test_what_is_being_stopped_and_asked_for_a_version_that_is_past_ends(then: Then, becomes: Then) -> None:
    stage = Stage(W1)
    stage.submit("a", exact_version=Version(0))
    stage.admit(A)
    stage.sample(A, 2)
    stage.abort(A, then=then)
    assert stage.live(1) == []
    intent = stage.record(A).intent
    assert intent is not None
    assert intent.then is becomes
    stage.park(A)
    assert stage.record(A).over


def test_what_is_discarded_stays_so_when_its_version_is_past() -> None:
    stage = Stage(W1)
    stage.submit("a", exact_version=Version(0))
    stage.admit(A)
    stage.sample(A, 2)
    stage.discard(A)
    assert stage.live(1) == []
    stage.answer_all()
    assert stage.take() == []
    assert stage.controller.accounts().dropped == {AbortReason.DISCARD: 1}


@pytest.mark.parametrize("asked", [{"min_version": Version(2)}, {"exact_version": Version(2)}])
def test_kv_is_brought_to_a_worker_whatever_version_is_asked_for(asked: dict[str, Version]) -> None:
    """It samples nothing there."""
    stage = Stage(W1, weights=reuse(1))
    stage.live(2)
    stage.submit("a", **asked)
    stage.admit(A)
    stage.sample(A, 2, version=2)
    stage.hold(A)
    stage.live(1)
    assert stage.record(A).kept is Keep.POOL
    stage.abort(A, keep=Keep.HOST)
    stage.answer_all()
    assert (stage.phase(A), stage.record(A).kept) == (Phase.SUSPENDED, Keep.HOST)
    assert started(stage.resume(A)) == []


def test_what_is_on_a_worker_for_its_kv_only_stays_there_when_its_version_ceases_to_be_live() -> None:
    stage = Stage(W1, weights=reuse(1))
    stage.live(2)
    stage.submit("a", min_version=Version(2))
    stage.admit(A)
    stage.sample(A, 2, version=2)
    stage.hold(A)
    stage.abort(A, keep=Keep.HOST)
    assert stage.record(A).promoting
    assert stage.live(1) == []
    stage.answer_all()
    assert (stage.phase(A), stage.record(A).kept) == (Phase.SUSPENDED, Keep.HOST)


def test_what_waits_for_its_kv_only_is_never_overdue() -> None:
    stage = Stage(W1, room=1, weights=reuse(1))
    stage.live(2)
    stage.submit("a", min_version=Version(2))
    stage.admit(A)
    stage.sample(A, 2, version=2)
    stage.hold(A)
    stage.submit("b")
    stage.abort(A, keep=Keep.HOST)
    stage.live(1)
    stage.wait(9999.0)
    assert stage.phase(A) is Phase.QUEUED


def test_others_of_a_full_window_run_while_one_waits_for_its_version() -> None:
    stage = Stage(W1)
    stage.collect(1)
    stage.submit("a", min_version=Version(1))
    assert started(stage.submit("b")) == [(W1, B)]


# Staleness ----------------------------------------------------------------------------------------


def scripted(stage: Stage, group: str, *versions: int) -> None:
    """A trajectory with a token of each of these versions, in this order."""
    t = member(group)
    stage.submit(group, priority="train")
    stage.admit(t)
    for version in versions:
        stage.sample(t, version=version)
    stage.finish(t)


def counted(stage: Stage) -> dict[int, int]:
    return dict(stage.controller.staleness.tokens)


def test_tokens_are_counted_by_how_far_they_were_behind_when_they_were_handed_out() -> None:
    """Case E5."""
    stage = Stage(W1)
    assert (counted(stage), stage.controller.staleness.mean, stage.controller.staleness.max) == ({}, None, None)
    scripted(stage, "a", 0, 0)
    stage.live(1)
    scripted(stage, "b", 0, 1, 1)
    assert counted(stage) == {}
    (first,) = stage.take(1)
    assert (first.version, counted(stage)) == (1, {1: 2})
    stage.live(3)
    (second,) = stage.take(1)
    assert (second.version, counted(stage)) == (3, {1: 2, 2: 2, 3: 1})
    stage.live(4)
    assert counted(stage) == {1: 2, 2: 2, 3: 1}
    assert stage.controller.staleness.mean == pytest.approx((2 * 1 + 2 * 2 + 1 * 3) / 5)
    assert stage.controller.staleness.max == 3


def test_tokens_of_a_later_version_than_is_live_are_ahead() -> None:
    stage = Stage(W1)
    stage.live(2)
    scripted(stage, "a", 2)
    stage.live(1)
    stage.take()
    assert counted(stage) == {-1: 1}


def test_what_is_handed_out_again_is_counted_once() -> None:
    stage = Stage(W1)
    scripted(stage, "a", 0, 0)
    (first,) = stage.take()
    stage.controller.settle_calls(arrived=(), abandoned=["call 1"])
    stage.live(5)
    (again,) = stage.take()
    assert again == first
    assert (again.version, counted(stage)) == (0, {0: 2})


def test_a_call_that_nobody_waits_for_counts_nothing() -> None:
    stage = Stage(W1)
    scripted(stage, "a", 0)
    stage.controller.settle_calls(arrived=(), abandoned=["call 1"])
    assert stage.take() == []
    stage.live(1)
    stage.take()
    assert counted(stage) == {1: 1}


def test_appended_tokens_are_of_no_version_and_are_not_counted() -> None:
    stage = Stage(W1)
    stage.submit("a", multi_turn=True)
    stage.admit(A)
    stage.sample(A, 2)
    stage.park(A, AbortReason.TURN)
    stage.answer_all()
    stage.live(1)
    stage.extend(A, [7, 8, 9])
    stage.admit(A)
    stage.finish(A, 0)
    stage.take()
    assert counted(stage) == {1: 2}


def test_members_that_are_handed_out_before_the_others_are_counted_each_when_it_is() -> None:
    stage = Stage(W1)
    stage.submit("a", 2, partial=True)
    for i in range(2):
        stage.admit(member("a", i))
        stage.sample(member("a", i), 3)
    stage.finish(member("a", 0))
    stage.take()
    stage.live(1)
    stage.finish(member("a", 1))
    stage.take()
    assert counted(stage) == {0: 3, 1: 3}


def test_what_leaves_its_group_and_what_was_begun_anew_is_not_handed_out_and_not_counted() -> None:
    stage = Stage(W1)
    stage.submit("a", 2)
    for i in range(2):
        stage.admit(member("a", i))
        stage.sample(member("a", i), 3)
    stage.abort(member("a", 0), then=Then.DROP)
    stage.abort(member("a", 1), then=Then.RETRY)
    stage.answer_all()
    stage.live(1)
    stage.admit(member("a", 1))
    stage.sample(member("a", 1), 2, version=1)
    stage.finish(member("a", 1))
    stage.take()
    assert counted(stage) == {0: 2}
