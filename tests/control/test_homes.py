"""KV that a trajectory keeps on its worker: left there, gone back to, given up, lost. Moves of it: `test_moves.py`."""

import pytest

from rollout.control.commands import KeepThere, Stop
from rollout.types import FinishReason, Keep, Phase, Then, TrajectoryId
from tests.control.scene import (
    W1,
    W2,
    Scene,
    T,
    U,
    admitted,
    at_home,
    decoding,
    finished,
    image,
    keep_there,
    keeping,
    moved,
    only_start,
    only_trajectory,
    parked,
    release,
    resumed,
    retain,
    sampled,
    starts,
    stop,
)

ON_WORKER = pytest.mark.parametrize("where", [Keep.DEVICE, Keep.HOST])


# Kept and gone back to ----------------------------------------------------------------------------


@ON_WORKER
def test_what_is_aborted_is_kept_on_its_worker_and_held_once_it_is_there(where: Keep) -> None:
    scene = decoding()
    ticket, commands = scene.open_abort(keep=where)
    assert commands == [stop()]
    assert scene.report(W1, parked(kv=7)) == [keep_there(where)]
    assert (scene.phase(), ticket.done, scene.controller.coming_groups) == (Phase.SUSPENDING, False, 1)
    assert scene.report(W1, moved(where=where)) == []
    assert (scene.phase(), ticket.done, scene.controller.coming_groups) == (Phase.SUSPENDED, True, 0)
    home = scene.record().home
    assert home is not None
    assert (home.worker, home.epoch, home.where, home.kv_tokens) == (W1, 1, where, 7)
    assert scene.record().suspensions == 1


@ON_WORKER
def test_a_resume_goes_to_where_its_kv_is_and_nothing_is_released(where: Keep) -> None:
    scene = at_home(where)
    commands = scene.resume()
    start = only_start(commands)
    assert commands == [start]
    assert (start.worker, start.assignment.image, start.assignment.kv_tokens) == (W1, None, 7)
    assert (scene.phase(), scene.record().home) == (Phase.RESTORING, None)
    scene.report(W1, admitted(epoch=2, cached=7), sampled(epoch=2, offset=3))
    assert scene.report(W1, finished(epoch=2)) == []
    assert (scene.controller.counters.resumes, scene.controller.counters.resumed_elsewhere) == (1, 0)


@ON_WORKER
def test_a_slice_is_kept_and_goes_on_where_it_was(where: Keep) -> None:
    scene = decoding(slice_tokens=3, keep=where)
    assert scene.report(W1, parked(kv=7)) == [keep_there(where)]
    assert scene.controller.coming_groups == 1
    assert starts(scene.report(W1, moved(where=where))) == [(W1, T, 2)]
    scene.report(W1, admitted(epoch=2, cached=7), sampled(epoch=2, offset=3, count=3))
    assert scene.report(W1, parked(epoch=2, kv=10)) == [keep_there(where, epoch=2)]


@pytest.mark.parametrize("prefer_other", [False, True])
def test_it_waits_for_room_at_home_though_another_worker_is_free(prefer_other: bool) -> None:
    scene = keeping(Keep.HOST, then=Then.REQUEUE, room=1, worker_count=1, prefer_other=prefer_other)
    assert starts(scene.submit("next")) == [(W1, "next/0", 1)], "room came back with the park"
    scene.report(W1, moved(where=Keep.HOST))
    assert starts(scene.up(W2)) == []
    assert scene.phase() is Phase.QUEUED
    assert starts(scene.submit("other")) == [(W2, "other/0", 1)], "who has no home does not wait for it"
    assert starts(scene.report(W1, finished(TrajectoryId("next/0")))) == [(W1, T, 2)]


def test_a_preference_for_other_workers_does_not_take_it_from_home() -> None:
    scene = at_home(Keep.DEVICE, prefer_other=True)
    assert starts(scene.resume()) == [(W1, T, 2)]


def test_an_abort_of_what_waits_on_the_worker_again_keeps_it_under_the_new_epoch() -> None:
    """The worker parks again what was there, if the start had not got to it."""
    scene = at_home(Keep.HOST)
    scene.resume()
    scene.abort(keep=Keep.HOST)
    assert scene.report(W1, parked(epoch=2, kv=7)) == [keep_there(Keep.HOST, epoch=2)]
    scene.report(W1, moved(epoch=2, where=Keep.HOST))
    assert scene.abort(then=Then.FINISH) == [release(epoch=2)]


def test_a_park_without_kv_is_released_and_keeps_nothing() -> None:
    scene = Scene(W1)
    scene.submit()
    scene.abort(keep=Keep.HOST)
    assert scene.report(W1, parked(kv=0)) == [release()]
    assert (scene.phase(), scene.record().home) == (Phase.SUSPENDED, None)


# Given up -----------------------------------------------------------------------------------------


@ON_WORKER
@pytest.mark.parametrize("then", Then)
def test_an_abort_that_keeps_nothing_or_ends_it_releases_what_was_kept(where: Keep, then: Then) -> None:
    for keep in Keep if then is Then.FINISH else (Keep.NONE,):
        scene = at_home(where)
        assert scene.abort(keep=keep, then=then)[0] == release()
        assert scene.record().home is None
        assert not [c for c in scene.abort(then=Then.FINISH) if c == release()], "released twice"


def test_a_spent_budget_ends_it_and_releases_what_was_kept() -> None:
    scene = decoding(tokens=8)
    scene.abort(keep=Keep.HOST)
    scene.report(W1, parked(kv=12), moved(where=Keep.HOST, kv=12))
    assert scene.resume() == [release()]
    assert only_trajectory(scene).finish_reason is FinishReason.LENGTH


def test_what_waits_for_its_home_can_be_ended_or_held_again() -> None:
    for then, phase in ((Then.FINISH, Phase.FINISHED), (Then.HOLD, Phase.SUSPENDED)):
        scene = keeping(Keep.HOST, then=Then.REQUEUE, room=1, worker_count=1)
        scene.submit("next")
        scene.report(W1, moved(where=Keep.HOST))
        assert scene.phase() is Phase.QUEUED
        assert scene.abort(keep=Keep.HOST, then=then) == [release()] * (then is Then.FINISH)
        assert scene.phase() is phase
        assert (scene.record().home is None) == (then is Then.FINISH)


# What does not work out ---------------------------------------------------------------------------


@pytest.mark.parametrize("then", [Then.HOLD, Then.REQUEUE])
def test_with_a_full_host_it_stays_on_the_device_and_still_resumes_there(then: Then) -> None:
    """Case C7."""
    scene = keeping(Keep.HOST, then=then)
    commands = scene.report(W1, moved(where=Keep.DEVICE, error="no room on the host for 7 tokens"))
    assert not [c for c in commands if c == release() or isinstance(c, KeepThere)], "one try"
    assert scene.controller.counters.keep_failures == 1
    assert scene.controller.troubles == ("g/0: kept on the device: no room on the host for 7 tokens",)
    if then is Then.HOLD:
        assert scene.phase() is Phase.SUSPENDED
        commands = scene.resume()
    assert starts(commands) == [(W1, T, 2)]


def test_what_is_gone_from_the_worker_has_no_home_and_goes_anywhere() -> None:
    scene = keeping(Keep.HOST)
    assert scene.report(W1, moved(where=Keep.DEVICE, kv=0, error="it is not on this worker any more")) == []
    assert (scene.phase(), scene.record().home) == (Phase.SUSPENDED, None)
    scene.submit("other")
    assert starts(scene.resume()) == [(W2, T, 2)], "where there is more room"


@ON_WORKER
@pytest.mark.parametrize("kv", [7, 8])
def test_the_pools_image_is_let_go_of_once_it_is_kept_on_the_worker_unless_that_has_more(where: Keep, kv: int) -> None:
    """An older one spares bytes the next time, and tokens if what is kept is evicted."""
    scene = resumed()
    scene.report(W1, admitted(epoch=2, restored=7), sampled(epoch=2, offset=3))
    scene.abort(keep=where)
    assert scene.report(W1, parked(epoch=2, kv=kv)) == [keep_there(where, epoch=2)]
    assert scene.retained
    assert scene.report(W1, moved(epoch=2, where=where, kv=kv)) == [retain("a", "b") if kv == 8 else retain()]
    assert scene.record().pooled.image == (image(7, "a", "b") if kv == 8 else None)


@pytest.mark.parametrize("kv", [0, 7])
def test_the_pools_image_stays_if_it_could_not_be_kept_as_told(kv: int) -> None:
    scene = resumed()
    scene.report(W1, admitted(epoch=2, restored=7), sampled(epoch=2, offset=3))
    scene.abort(keep=Keep.HOST)
    scene.report(W1, parked(epoch=2, kv=8))
    assert scene.report(W1, moved(epoch=2, where=Keep.DEVICE, kv=kv, error="no room")) == []
    assert scene.record().pooled.image == image(7, "a", "b")
    assert (scene.record().home is None) == (kv == 0)


@ON_WORKER
@pytest.mark.parametrize("kv", [0, 4])
def test_what_stopped_with_less_than_its_image_does_not_cost_the_image(where: Keep, kv: int) -> None:
    """An abort while it is being restored: the image is brought to a worker instead, if it is held."""
    scene = resumed(slice_tokens=5)
    scene.abort(keep=where, then=Then.REQUEUE)
    commands = scene.report(W1, parked(epoch=2, kv=kv))
    assert commands[0] == release(epoch=2)
    start = only_start(commands).assignment
    assert (start.image, start.watch.slice_tokens, start.epoch) == (image(7, "a", "b"), 5, 3)
    scene.abort(keep=where)
    promotion = only_start(scene.report(W1, parked(epoch=3, kv=kv))).assignment
    assert (promotion.image, promotion.watch.only_loads, promotion.epoch) == (image(7, "a", "b"), True, 4)
    scene.report(W1, parked(epoch=4, kv=kv))
    assert scene.phase() is Phase.SUSPENDED, "one try"
    assert scene.record().pooled.image == image(7, "a", "b")


# Lost workers -------------------------------------------------------------------------------------


@ON_WORKER
@pytest.mark.parametrize("restarted", [False, True])
def test_a_lost_worker_takes_what_was_kept_there_with_it(where: Keep, restarted: bool) -> None:
    scene = at_home(where)
    assert (scene.up(W1, "b") if restarted else scene.down(W1)) == []
    assert (scene.phase(), scene.record().home) == (Phase.SUSPENDED, None)
    assert scene.controller.coming_groups == 0
    scene.down(W1, "b" if restarted else "a")
    again = only_start(scene.resume())
    assert (again.worker, again.assignment.image, again.assignment.kv_tokens) == (W2, None, 7)
    assert (scene.controller.counters.resumes, scene.controller.counters.restarts) == (1, 0)
    scene.report(W2, admitted(epoch=2, again=7), finished(epoch=2))
    assert scene.controller.counters.recomputed_tokens == 7


@ON_WORKER
def test_a_worker_that_is_lost_takes_nothing_that_is_kept_on_another(where: Keep) -> None:
    scene = at_home(where)
    scene.down(W2)
    scene.up(W2, "b")
    assert scene.record().home is not None
    assert starts(scene.resume()) == [(W1, T, 2)]


def test_what_waits_for_a_home_that_is_lost_starts_elsewhere() -> None:
    scene = keeping(Keep.HOST, then=Then.REQUEUE, room=1, worker_count=1)
    scene.submit("next")
    scene.report(W1, moved(where=Keep.HOST))
    scene.up(W2, room=2)
    assert starts(scene.down(W1)) == [(W2, T, 2), (W2, "next/0", 2)]


@pytest.mark.parametrize(
    ("then", "phase"), [(Then.HOLD, Phase.SUSPENDED), (Then.FINISH, Phase.FINISHED), (Then.REQUEUE, Phase.PREFILLING)]
)
def test_an_abort_takes_effect_though_the_worker_is_lost_before_it_told_where_the_kv_is(
    then: Then, phase: Phase
) -> None:
    scene = keeping(Keep.HOST)
    ticket, _ = scene.open_abort(keep=Keep.HOST, then=then)
    assert not [c for c in scene.down(W1) if c == release()]
    assert (scene.phase(), scene.record().home, ticket.done) == (phase, None, True)
    scene.up(W1, "b")
    assert scene.report(W1, moved(where=Keep.HOST), incarnation="a") == []
    assert scene.report(W1, moved(where=Keep.HOST), incarnation="b") == []
    assert scene.record().home is None


def test_what_is_held_at_home_fails_when_it_is_resumed_after_the_last_worker_is_lost() -> None:
    scene = at_home(Keep.HOST, worker_count=1)
    scene.down(W1, final=True)
    assert scene.phase() is Phase.SUSPENDED
    assert scene.resume() == []
    assert only_trajectory(scene).error == "no worker is left: w1: w1 was killed"


# What is told late or twice -----------------------------------------------------------------------


def test_where_it_is_kept_is_heard_once() -> None:
    scene = at_home(Keep.HOST)
    assert scene.report(W1, moved(where=Keep.DEVICE, error="no room")) == []
    assert scene.report(W1, parked(kv=7)) == []
    home = scene.record().home
    assert home is not None
    assert home.where is Keep.HOST
    assert scene.controller.counters.keep_failures == 0


def test_an_answer_of_an_older_epoch_is_not_that_of_the_next() -> None:
    scene = at_home(Keep.HOST)
    scene.resume()
    scene.abort(keep=Keep.HOST)
    scene.report(W1, parked(epoch=2, kv=8))
    assert scene.report(W1, moved(epoch=1, where=Keep.HOST)) == []
    assert scene.phase() is Phase.SUSPENDING
    scene.report(W1, moved(epoch=2, where=Keep.HOST, kv=8))
    assert scene.phase() is Phase.SUSPENDED


def test_where_an_unknown_or_finished_trajectory_is_kept_is_nobodys_affair() -> None:
    scene = at_home(Keep.HOST)
    scene.abort(then=Then.FINISH)
    assert scene.report(W1, moved(where=Keep.HOST), moved(U, where=Keep.HOST)) == []
    only_trajectory(scene)
    assert scene.report(W1, moved(where=Keep.HOST)) == []


def test_an_abort_while_it_is_being_kept_stops_nothing() -> None:
    scene = keeping(Keep.DEVICE)
    assert not [c for c in scene.abort(keep=Keep.HOST) if isinstance(c, Stop)]
