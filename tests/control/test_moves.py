"""KV of a suspended trajectory that is moved by another abort: demoted, promoted, and whatever comes between."""

import pytest

from rollout.control.commands import Command, Export, KeepThere, Release, Start
from rollout.control.messages import ExportFailed
from rollout.types import FinishReason, Image, Keep, NodeId, Phase, Resume, Then
from tests.control.scene import (
    W1,
    W2,
    Scene,
    T,
    U,
    admitted,
    at_home,
    decoding,
    displaced,
    export_failed,
    exported,
    finished,
    image,
    keep_there,
    keeping,
    moved,
    only_export,
    only_start,
    only_trajectory,
    parked,
    preempted,
    recall,
    recalled,
    release,
    restore_failed,
    resumed,
    retain,
    sampled,
    starts,
    stop,
    suspended,
    suspending,
)
from tests.weights import written

HERE = NodeId("n1")
ON_WORKER = pytest.mark.parametrize("where", [Keep.DEVICE, Keep.HOST])


def other(where: Keep) -> Keep:
    return Keep.HOST if where is Keep.DEVICE else Keep.DEVICE


def recalling(where: Keep, keep: Keep, **options: object) -> Scene:
    """A scene in which `T` is held at home and is being recalled to go where `keep` says."""
    scene = at_home(where, **options)
    assert scene.abort(keep=keep) == [recall()]
    assert scene.phase() is Phase.SUSPENDING
    return scene


def demoting(where: Keep = Keep.HOST, **options: object) -> Scene:
    """A scene in which `T` was kept at home and is being exported."""
    scene = recalling(where, Keep.POOL, **options)
    only_export(scene.report(W1, recalled(kv=7)))
    return scene


def promotion_queued(keep: Keep = Keep.HOST) -> Scene:
    """A scene in which `T` is held with an image in a and b, and waits for room on w1 to have that kept there."""
    scene = suspended(worker_count=1, room=1)
    scene.submit("other")
    assert scene.abort(keep=keep) == []
    assert scene.phase() is Phase.QUEUED
    return scene


def promoting(keep: Keep = Keep.HOST, **options: object) -> Scene:
    """A scene in which `T` is held with an image in a and b, and was started on w1 as epoch 2 for that alone."""
    scene = suspended(worker_count=1, **options)
    start = only_start(scene.abort(keep=keep))
    assert (start.worker, start.assignment.epoch, start.assignment.watch.only_loads) == (W1, 2, True)
    return scene


def home(scene: Scene) -> tuple[Keep, int] | None:
    """Where on its worker `T` is kept, and of which epoch."""
    kept = scene.record().home
    return (kept.where, kept.epoch) if kept is not None else None


def held(scene: Scene) -> bool:
    return scene.phase() is Phase.SUSPENDED and scene.controller.coming_groups == len(scene.trajectories) - 1


# Down ---------------------------------------------------------------------------------------------


def test_one_image_goes_all_the_way_down() -> None:
    scene = recalling(Keep.DEVICE, Keep.HOST)
    assert scene.report(W1, recalled(kv=7)) == [keep_there(Keep.HOST)]
    assert scene.report(W1, moved(where=Keep.HOST)) == []
    assert held(scene)
    assert home(scene) == (Keep.HOST, 1)

    assert scene.abort(keep=Keep.POOL) == [recall()]
    told = recalled(kv=7)
    export = only_export(scene.report(W1, told))
    assert (export.worker, export.node, export.epoch, export.base) == (W1, HERE, 1, None)
    assert (export.kv_tokens, export.prompt_pages, export.page_keys) == (7, told.prompt_pages, told.page_keys)
    assert scene.handle(exported(image(7, "a", "b"))) == [release(), retain("a", "b")]
    assert held(scene)
    assert home(scene) is None

    assert scene.abort(keep=Keep.NONE) == [retain()]
    assert held(scene)
    assert only_start(scene.resume()).assignment.image is None
    assert scene.record().suspensions == 1, "it was suspended once, and moved thrice"


@ON_WORKER
def test_a_move_is_over_for_who_asked_when_the_kv_is_there(where: Keep) -> None:
    scene = at_home(where)
    ticket, _ = scene.open_abort(keep=other(where))
    assert not ticket.done
    scene.report(W1, recalled(kv=7))
    assert not ticket.done
    scene.report(W1, moved(where=other(where)))
    assert ticket.done
    assert ticket.report().found == (T,)


@ON_WORKER
def test_what_is_where_it_is_to_be_is_not_moved(where: Keep) -> None:
    scene = at_home(where)
    assert scene.abort(keep=where) == []
    assert held(scene)
    assert home(scene) == (where, 1)


def test_what_is_left_of_a_device_image_is_what_goes_to_the_pool() -> None:
    scene = recalling(Keep.DEVICE, Keep.POOL)
    assert only_export(scene.report(W1, recalled(kv=4))).kv_tokens == 4
    scene.handle(exported(image(4, "a")))
    again = only_start(scene.resume()).assignment
    assert (again.image, again.kv_tokens) == (image(4, "a"), 7)


@pytest.mark.parametrize("keep", [Keep.HOST, Keep.POOL])
def test_of_an_image_that_was_evicted_nothing_is_moved(keep: Keep) -> None:
    scene = recalling(Keep.DEVICE, keep)
    assert scene.report(W1, recalled(kv=0)) == [release()]
    assert held(scene)
    assert home(scene) is None


@ON_WORKER
def test_only_what_is_held_is_moved_what_is_queued_again_goes_home(where: Keep) -> None:
    scene = at_home(where)
    assert starts(scene.abort(keep=Keep.POOL, then=Then.REQUEUE)) == [(W1, T, 2)]


def test_what_waits_for_its_home_is_moved_by_an_abort_and_the_pools_hear_that_it_is_held() -> None:
    """It has an older image in the pool as well, since the host was full."""
    scene = resumed(room=1)
    scene.report(W1, admitted(epoch=2, restored=7), sampled(epoch=2, offset=3))
    scene.abort(keep=Keep.HOST, then=Then.REQUEUE)
    scene.report(W1, parked(epoch=2, kv=8))
    scene.submit("other")
    scene.report(W1, moved(epoch=2, where=Keep.DEVICE, kv=8, error="no room"))
    assert scene.phase() is Phase.QUEUED
    assert scene.abort(keep=Keep.HOST) == [recall(epoch=2)]
    assert scene.turns[HERE, T] == scene.record().turn


# Up -----------------------------------------------------------------------------------------------


@ON_WORKER
def test_a_pooled_image_is_brought_to_a_worker_and_kept_there(where: Keep) -> None:
    scene = suspended(worker_count=1)
    ticket, commands = scene.open_abort(keep=where)
    start = only_start(commands).assignment
    assert (start.image, start.watch.only_loads, start.epoch) == (image(7, "a", "b"), True, 2)
    assert (scene.phase(), ticket.done) == (Phase.RESTORING, False)
    assert scene.report(W1, admitted(epoch=2, restored=7)) == []
    assert scene.report(W1, parked(epoch=2, kv=7)) == [keep_there(where, epoch=2)]
    assert not ticket.done
    assert scene.report(W1, moved(epoch=2, where=where)) == [retain()]
    assert ticket.done
    assert held(scene)
    assert home(scene) == (where, 2)
    assert starts(scene.resume()) == [(W1, T, 3)]


def test_a_move_to_a_worker_is_neither_a_suspension_nor_a_resume_and_computes_nothing() -> None:
    scene = promoting()
    scene.report(W1, admitted(epoch=2, restored=4, again=3), parked(epoch=2, kv=7), moved(epoch=2, where=Keep.HOST))
    counters = scene.controller.counters
    assert (counters.suspensions, counters.resumes, counters.restarts, counters.recomputed_tokens) == (1, 0, 0, 0)
    assert (scene.record().suspensions, scene.record().resumes) == (1, [])
    scene.resume()
    scene.report(W1, admitted(epoch=3, cached=7))
    assert scene.controller.counters.resumes == 1
    assert scene.record().resumes == [Resume(worker=W1, cached_tokens=7, restored_tokens=0, recomputed_tokens=0)]


def test_host_to_device_is_a_move_on_the_worker() -> None:
    scene = recalling(Keep.HOST, Keep.DEVICE)
    assert scene.report(W1, recalled(kv=7)) == [keep_there(Keep.DEVICE)]
    scene.report(W1, moved(where=Keep.DEVICE))
    assert home(scene) == (Keep.DEVICE, 1)


@ON_WORKER
def test_what_is_queued_with_its_image_in_the_pool_is_brought_to_a_worker_and_held(where: Keep) -> None:
    """It waited already, so that the pools expect it in its turn: that nothing is to tell them does not lose it."""
    scene = suspended(worker_count=1, room=1)
    scene.submit("other")
    scene.resume()
    assert scene.phase() is Phase.QUEUED
    ticket, commands = scene.open_abort(keep=where)
    assert (commands, ticket.done) == ([], False)
    (start,) = scene.report(W1, finished(scene.trajectories[1]))
    assert isinstance(start, Start)
    assert start.assignment.watch.only_loads
    scene.report(W1, parked(epoch=2, kv=7), moved(epoch=2, where=where))
    assert ticket.done
    assert scene.phase() is Phase.SUSPENDED


def test_a_promotion_waits_its_turn_and_its_group_is_held_meanwhile() -> None:
    scene = promotion_queued()
    assert scene.controller.coming_groups == 1, "the other one"
    (start,) = scene.report(W1, finished(scene.trajectories[1]))
    assert isinstance(start, Start)
    assert start.assignment.watch.only_loads
    assert scene.controller.coming_groups == 1
    scene.report(W1, parked(epoch=2, kv=7), moved(epoch=2, where=Keep.HOST))
    assert held(scene)


def test_what_cannot_be_restored_is_not_brought_anywhere_and_held_without() -> None:
    scene = promoting()
    assert scene.report(W1, restore_failed(epoch=2, segment="b"))[0] == retain()
    scene.report(W1, admitted(epoch=2))
    assert scene.report(W1, parked(epoch=2, kv=0)) == [release(epoch=2)]
    assert held(scene)
    assert scene.abort(keep=Keep.HOST) == [], "there is nothing to move"


def test_a_preempted_promotion_is_kept_in_the_end() -> None:
    scene = promoting()
    scene.report(W1, admitted(epoch=2, restored=7), preempted(epoch=2), admitted(epoch=2, restored=7))
    assert scene.report(W1, parked(epoch=2, kv=7)) == [keep_there(Keep.HOST, epoch=2)]


def test_an_image_that_is_displaced_while_its_promotion_waits_leaves_nothing_to_bring() -> None:
    scene = promotion_queued()
    assert scene.handle(export_failed(U, 9, displaced=[displaced(T, "a")])) == [retain()]
    (start,) = scene.report(W1, finished(scene.trajectories[1]))
    assert isinstance(start, Start)
    assert start.assignment.image is None
    assert scene.report(W1, admitted(epoch=2), parked(epoch=2, kv=0)) == [release(epoch=2)]
    assert held(scene)


def test_with_a_spent_budget_nothing_is_started_to_have_its_kv_moved() -> None:
    scene = decoding(tokens=8, worker_count=1)
    scene.abort()
    scene.report(W1, parked(kv=12))
    scene.handle(exported(image(12, "a", "b", "c")))
    assert scene.abort(keep=Keep.HOST) == []
    assert held(scene)


# Resumed meanwhile --------------------------------------------------------------------------------


@ON_WORKER
def test_a_resume_while_it_is_being_kept_goes_home_as_soon_as_it_is(where: Keep) -> None:
    scene = keeping(where)
    assert scene.resume() == []
    assert scene.controller.coming_groups == 1
    assert starts(scene.report(W1, moved(where=where))) == [(W1, T, 2)]


@ON_WORKER
def test_a_resume_while_it_is_recalled_makes_its_group_come_at_once_and_starts_it_when_it_is_there(where: Keep) -> None:
    scene = recalling(where, other(where))
    assert scene.controller.coming_groups == 0
    assert scene.resume() == []
    assert scene.controller.coming_groups == 1, "no other command is needed"
    assert scene.report(W1, recalled(kv=7)) == [keep_there(other(where))]
    assert starts(scene.report(W1, moved(where=other(where)))) == [(W1, T, 2)]


def test_a_resume_while_it_is_demoted_starts_it_from_the_pool() -> None:
    scene = demoting()
    scene.resume()
    assert scene.controller.coming_groups == 1
    commands = scene.handle(exported(image(7, "a")))
    assert commands[:2] == [release(), retain("a")]
    assert only_start(commands).assignment.image == image(7, "a")


def test_a_resume_while_its_promotion_waits_makes_it_an_ordinary_start() -> None:
    scene = promotion_queued()
    assert scene.resume() == []
    assert scene.controller.coming_groups == 2
    (start,) = scene.report(W1, finished(scene.trajectories[1]))
    assert isinstance(start, Start)
    assert (start.assignment.watch.only_loads, start.assignment.image) == (False, image(7, "a", "b"))
    assert scene.controller.counters.resumes == 1


def test_a_resume_while_a_worker_gets_its_kv_goes_on_there() -> None:
    scene = promoting(slice_tokens=5)
    assert scene.resume() == []
    assert scene.controller.coming_groups == 1
    assert scene.report(W1, parked(epoch=2, kv=7)) == [keep_there(Keep.HOST, epoch=2)]
    commands = scene.report(W1, moved(epoch=2, where=Keep.HOST))
    start = only_start(commands)
    assert (start.worker, start.assignment.epoch, start.assignment.watch.slice_tokens) == (W1, 3, 5)


# Another abort meanwhile --------------------------------------------------------------------------


@ON_WORKER
@pytest.mark.parametrize("keep", [Keep.DEVICE, Keep.HOST, Keep.POOL, Keep.NONE])
def test_the_last_abort_during_a_keep_says_where_it_goes(where: Keep, keep: Keep) -> None:
    scene = keeping(where)
    assert scene.abort(keep=keep) == []
    commands = scene.report(W1, moved(where=where))
    assert commands == {where: [], Keep.NONE: [release()]}.get(keep, [recall()])
    if commands == [recall()]:
        (command,) = scene.report(W1, recalled(kv=7))
        assert isinstance(command, Export) if keep is Keep.POOL else command == keep_there(keep)
    else:
        assert held(scene)


@ON_WORKER
@pytest.mark.parametrize("keep", [Keep.DEVICE, Keep.HOST, Keep.POOL, Keep.NONE])
def test_the_last_abort_during_a_recall_says_where_it_goes(where: Keep, keep: Keep) -> None:
    scene = recalling(where, other(where))
    assert scene.abort(keep=keep) == []
    (command,) = scene.report(W1, recalled(kv=7))
    if keep is Keep.POOL:
        assert isinstance(command, Export)
    else:
        assert command == (release() if keep is Keep.NONE else keep_there(keep))
    assert (scene.phase() is Phase.SUSPENDED) == (keep is Keep.NONE)


@ON_WORKER
@pytest.mark.parametrize("begin", [suspending, demoting])
def test_an_abort_during_an_export_that_wants_it_on_a_worker_has_it_brought_back(begin: object, where: Keep) -> None:
    scene = begin(worker_count=1)  # type: ignore[operator]
    assert scene.abort(keep=where) == []
    commands = scene.handle(exported(image(7, "a")))
    assert commands[:2] == [release(), retain("a")]
    assert only_start(commands).assignment.watch.only_loads


@ON_WORKER
def test_an_abort_during_a_promotion_that_wants_it_on_a_worker_all_the_same_stops_nothing(where: Keep) -> None:
    scene = promoting(other(where))
    assert scene.abort(keep=where) == []
    assert scene.report(W1, parked(epoch=2, kv=7)) == [keep_there(where, epoch=2)]


@pytest.mark.parametrize(("keep", "then"), [(Keep.POOL, Then.HOLD), (Keep.NONE, Then.HOLD), (Keep.HOST, Then.FINISH)])
@pytest.mark.parametrize("kv", [0, 4, 7])
def test_an_abort_that_wants_it_elsewhere_stops_a_promotion_that_waits_on_the_worker(
    keep: Keep, then: Then, kv: int
) -> None:
    scene = promoting()
    ticket, commands = scene.open_abort(keep=keep, then=then)
    assert commands == [stop(epoch=2)]
    commands = scene.report(W1, parked(epoch=2, kv=kv))
    assert commands == [release(epoch=2)] + [retain()] * (keep is not Keep.POOL)
    assert ticket.done
    assert scene.phase() is (Phase.FINISHED if then is Then.FINISH else Phase.SUSPENDED)
    assert scene.record().pooled.image == (image(7, "a", "b") if keep is Keep.POOL else None)


def test_a_promotion_that_was_stopped_and_is_wanted_after_all_is_tried_again() -> None:
    scene = promoting()
    scene.abort(keep=Keep.POOL)
    scene.abort(keep=Keep.DEVICE)
    commands = scene.report(W1, parked(epoch=2, kv=0))
    assert commands[0] == release(epoch=2)
    assert only_start(commands).assignment.watch.only_loads


@pytest.mark.parametrize("keep", [Keep.POOL, Keep.NONE])
@pytest.mark.parametrize("then", Then)
def test_an_abort_takes_effect_at_once_while_a_promotion_waits_for_room(keep: Keep, then: Then) -> None:
    scene = promotion_queued()
    ticket, commands = scene.open_abort(keep=keep, then=then)
    assert ticket.done
    assert commands == [retain()] * (keep is Keep.NONE or then not in (Then.HOLD, Then.REQUEUE))
    expected = {
        Then.HOLD: Phase.SUSPENDED,
        Then.FINISH: Phase.FINISHED,
        Then.DROP: Phase.DROPPED,
        Then.REQUEUE: Phase.QUEUED,
        Then.RETRY: Phase.QUEUED,
    }
    assert scene.phase() is expected[then]
    assert scene.controller.coming_groups == (1 if then is Then.HOLD else 2)
    begun = starts(scene.report(W1, finished(scene.trajectories[1])))
    assert begun == [(W1, T, 2)] * (expected[then] is Phase.QUEUED)


@pytest.mark.parametrize("begin", [keeping, at_home])
def test_two_aborts_alike_move_it_once(begin: object) -> None:
    scene = begin(Keep.DEVICE)  # type: ignore[operator]
    commands: list[Command] = []
    for _ in range(2):
        commands += scene.abort(keep=Keep.HOST)
    if begin is keeping:
        commands += scene.report(W1, moved(where=Keep.DEVICE))
    commands += scene.report(W1, recalled(kv=7), moved(where=Keep.HOST))
    assert commands == [recall(), keep_there(Keep.HOST)]
    assert home(scene) == (Keep.HOST, 1)


@pytest.mark.parametrize("stage", ["keep", "recall", "export"])
def test_an_end_during_a_move_releases_once_and_delivers(stage: str) -> None:
    begin = {"keep": keeping, "recall": lambda where: recalling(where, Keep.POOL), "export": demoting}[stage]
    scene = begin(Keep.HOST)
    assert scene.abort(keep=Keep.HOST, then=Then.FINISH) == []
    assert scene.controller.coming_groups == 1
    events = {"keep": moved(where=Keep.HOST), "recall": recalled(kv=7)}
    commands = scene.report(W1, events[stage]) if stage in events else scene.handle(exported(image(7, "a")))
    assert [c for c in commands if isinstance(c, Release | KeepThere | Export)] == [release()]
    assert only_trajectory(scene).finish_reason is FinishReason.ABORT
    assert scene.retained == {}


# Exports that fail --------------------------------------------------------------------------------


def test_the_pool_frees_what_left_the_batch_but_not_what_may_be_kept_again() -> None:
    """A pool that answers too late must not have freed what is kept since."""
    scene = decoding()
    scene.abort()
    assert only_export(scene.report(W1, parked(kv=7))).release
    scene = recalling(Keep.HOST, Keep.POOL)
    assert not only_export(scene.report(W1, recalled(kv=7))).release
    assert scene.handle(export_failed()) == [keep_there(Keep.HOST)]
    assert scene.handle(exported(image(7, "a"))) == [retain()]
    scene.report(W1, moved(where=Keep.HOST))
    assert home(scene) == (Keep.HOST, 1)


@ON_WORKER
def test_an_image_whose_export_fails_is_kept_where_it_was(where: Keep) -> None:
    scene = demoting(where)
    ticket, _ = scene.open_abort(keep=Keep.POOL)
    assert scene.handle(export_failed()) == [keep_there(where)]
    assert not ticket.done
    assert scene.report(W1, moved(where=where)) == []
    assert ticket.done
    assert held(scene)
    assert home(scene) == (where, 1)
    assert starts(scene.resume()) == [(W1, T, 2)]


@pytest.mark.parametrize(
    ("keep", "then"), [(Keep.NONE, Then.HOLD), (Keep.POOL, Then.FINISH), (Keep.NONE, Then.REQUEUE)]
)
def test_an_image_whose_export_fails_is_released_if_nobody_wants_it_any_more(keep: Keep, then: Then) -> None:
    scene = demoting(worker_count=1)
    scene.abort(keep=keep, then=then)
    assert [c for c in scene.handle(export_failed()) if isinstance(c, Release | KeepThere)] == [release()]
    assert home(scene) is None


def test_an_image_whose_export_fails_goes_where_the_last_abort_wants_it() -> None:
    scene = demoting(Keep.DEVICE)
    scene.abort(keep=Keep.HOST)
    assert scene.handle(export_failed()) == [keep_there(Keep.HOST)]
    assert scene.report(W1, moved(where=Keep.HOST)) == [retain()], "whatever the pool stored all the same"
    assert home(scene) == (Keep.HOST, 1)


def test_what_is_resumed_though_its_export_fails_goes_home() -> None:
    scene = demoting()
    scene.resume()
    assert scene.handle(export_failed()) == [keep_there(Keep.HOST)]
    assert starts(scene.report(W1, moved(where=Keep.HOST))) == [(W1, T, 2)]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_failed_export_from_a_worker_that_was_lost_meanwhile_keeps_nothing_there(restarted: bool) -> None:
    """Nobody would answer."""
    scene = demoting()
    if restarted:
        scene.up(W1, "b")
    else:
        scene.down(W1)
    assert scene.phase() is Phase.SUSPENDING
    assert scene.handle(export_failed()) == [release()]
    assert held(scene)


def test_an_older_image_outlives_the_failed_export_of_what_was_kept() -> None:
    scene = resumed()
    scene.report(W1, admitted(epoch=2, restored=7), sampled(epoch=2, offset=3))
    scene.abort(keep=Keep.HOST)
    scene.report(W1, parked(epoch=2, kv=8), moved(epoch=2, where=Keep.DEVICE, kv=8, error="no room"))
    scene.abort(keep=Keep.POOL)
    assert only_export(scene.report(W1, recalled(epoch=2, kv=8))).base == image(7, "a", "b")
    assert scene.handle(export_failed(epoch=2)) == [keep_there(Keep.DEVICE, epoch=2)]
    assert scene.report(W1, moved(epoch=2, where=Keep.DEVICE, kv=8)) == []
    assert scene.record().pooled.image == image(7, "a", "b")
    assert home(scene) == (Keep.DEVICE, 2)


def test_what_was_exported_too_late_is_let_go_of_though_another_move_is_under_way() -> None:
    scene = demoting()
    scene.handle(export_failed())
    assert scene.handle(exported(image(7, "a"))) == [retain()]
    scene.report(W1, moved(where=Keep.HOST))
    scene.abort(keep=Keep.DEVICE)
    assert scene.handle(exported(image(7, "a"))) == [retain()]
    assert scene.retained == {}


def test_an_export_is_not_cost_what_it_builds_on_by_a_displacement_on_another_node() -> None:
    """It may have stored the image already: what is left of the old one is let go of when the pool has answered."""
    for answer in (True, False):
        scene = suspended()
        scene.down(W1)
        scene.resume()
        scene.report(W2, admitted(epoch=2, restored=7), sampled(epoch=2, offset=3))
        scene.abort()
        scene.report(W2, parked(epoch=2, kv=8))
        scene.handle(
            exported(
                Image(runs=image(7, "a").runs + image(8, "c", node="n2").runs, kv_tokens=8, written=written(8)), epoch=2
            )
        )
        scene.resume()
        scene.report(W2, admitted(epoch=3, restored=8), sampled(epoch=3, offset=4))
        scene.abort()
        scene.report(W2, parked(epoch=3, kv=9))
        assert scene.handle(export_failed(U, 9, displaced=[displaced(T, "c")])) == []
        assert scene.record().pooled.image is None
        made = Image(runs=image(7, "a").runs + image(9, "d", node="n2").runs, kv_tokens=9, written=written(9))
        commands = scene.handle(exported(made, epoch=3) if answer else export_failed(epoch=3))
        kept = [retain("a"), retain("d", node="n2")] if answer else [retain(), retain(node="n2")]
        assert commands == [release(W2, epoch=3), *kept]
        assert scene.record().pooled.image == (made if answer else None)


# Lost workers -------------------------------------------------------------------------------------


@ON_WORKER
@pytest.mark.parametrize("restarted", [False, True])
def test_a_worker_that_is_lost_during_a_recall_leaves_it_held_without(where: Keep, restarted: bool) -> None:
    scene = recalling(where, Keep.POOL)
    assert (scene.up(W1, "b") if restarted else scene.down(W1)) == []
    assert held(scene)
    assert home(scene) is None
    assert scene.report(W1, recalled(kv=7), incarnation="b" if restarted else "a") == []


def test_a_worker_that_is_lost_during_a_promotion_costs_nothing_but_the_promotion() -> None:
    scene = promoting()
    scene.report(W1, admitted(epoch=2, restored=7))
    scene.up(W2)
    assert scene.down(W1) == [], "one try"
    assert held(scene)
    assert scene.record().pooled.image == image(7, "a", "b")
    counters = scene.controller.counters
    assert (counters.restarts, counters.resumes) == (0, 0)
    assert starts(scene.resume()) == [(W2, T, 3)]
    assert scene.controller.counters.resumes == 1


def test_a_worker_that_is_lost_after_a_promotion_parked_leaves_it_to_the_pool() -> None:
    scene = promoting()
    scene.report(W1, parked(epoch=2, kv=7))
    assert scene.down(W1) == []
    assert held(scene)
    assert scene.record().pooled.image == image(7, "a", "b")


def test_a_running_one_whose_worker_is_lost_before_it_parks_is_brought_to_another_from_its_image() -> None:
    scene = resumed()
    scene.report(W1, admitted(epoch=2, restored=7), sampled(epoch=2, offset=3))
    scene.up(W2)
    scene.abort(keep=Keep.HOST)
    start = only_start(scene.down(W1))
    assert (start.worker, start.assignment.watch.only_loads, start.assignment.image) == (W2, True, image(7, "a", "b"))
    assert scene.report(W2, parked(epoch=3, kv=7)) == [keep_there(Keep.HOST, W2, epoch=3)]


def test_when_the_last_worker_is_lost_a_promotion_is_given_up_and_what_was_held_is_held_still() -> None:
    scene = promotion_queued()
    ticket, _ = scene.open_abort(keep=Keep.DEVICE)
    scene.down(W1, final=True)
    assert ticket.done
    assert scene.phase() is Phase.SUSPENDED
    assert scene.record().pooled.image == image(7, "a", "b")
    assert scene.abort(keep=Keep.HOST) == []
    assert scene.phase() is Phase.SUSPENDED


def test_when_the_last_worker_is_lost_during_a_promotion_it_is_held_still() -> None:
    scene = promoting()
    scene.abort(keep=Keep.DEVICE)
    scene.down(W1, final=True)
    assert held(scene)
    assert scene.record().pooled.image == image(7, "a", "b")


# What is told late or twice -----------------------------------------------------------------------


def test_a_recall_is_answered_once() -> None:
    scene = recalling(Keep.DEVICE, Keep.HOST)
    scene.report(W1, recalled(kv=7))
    assert scene.report(W1, recalled(kv=7)) == []
    scene.report(W1, moved(where=Keep.HOST))
    assert scene.report(W1, recalled(kv=7), moved(where=Keep.HOST)) == []
    assert held(scene)


def test_answers_of_older_epochs_do_not_end_a_move() -> None:
    scene = at_home(Keep.HOST)
    scene.resume()
    scene.report(W1, admitted(epoch=2, cached=7), sampled(epoch=2, offset=3))
    scene.abort(keep=Keep.DEVICE)
    scene.report(W1, parked(epoch=2, kv=8), moved(epoch=2, where=Keep.DEVICE, kv=8))
    assert scene.abort(keep=Keep.HOST) == [recall(epoch=2)]
    late = (recalled(epoch=1, kv=7), moved(epoch=1, where=Keep.HOST), parked(epoch=2, kv=8))
    assert scene.report(W1, *late, moved(epoch=2, where=Keep.DEVICE)) == []
    assert scene.handle(export_failed(epoch=1)) == []
    assert scene.phase() is Phase.SUSPENDING
    assert scene.report(W1, recalled(epoch=2, kv=8)) == [keep_there(Keep.HOST, epoch=2)]


@pytest.mark.parametrize("answer", [exported(image(7, "a")), export_failed()], ids=["exported", "failed"])
def test_an_answer_to_a_demotion_that_comes_twice_changes_nothing(answer: object) -> None:
    scene = demoting()
    scene.handle(answer)  # type: ignore[arg-type]
    before = (scene.phase(), home(scene), scene.record().pooled.image, scene.record().transfer)
    assert scene.handle(answer) == []  # type: ignore[arg-type]
    assert (scene.phase(), home(scene), scene.record().pooled.image, scene.record().transfer) == before
    assert isinstance(answer, ExportFailed) == (scene.controller.counters.export_failures == 1)


def test_a_recall_of_what_was_displaced_in_the_pool_meanwhile_needs_no_pool() -> None:
    scene = resumed()
    scene.report(W1, admitted(epoch=2, restored=7), sampled(epoch=2, offset=3))
    scene.abort(keep=Keep.HOST)
    scene.report(W1, parked(epoch=2, kv=8), moved(epoch=2, where=Keep.DEVICE, kv=8, error="no room"))
    scene.abort(keep=Keep.POOL)
    assert scene.handle(export_failed(U, 9, displaced=[displaced(T, "b")])) == [retain()]
    export = only_export(scene.report(W1, recalled(epoch=2, kv=8)))
    assert (export.base, export.kv_tokens) == (None, 8)


@ON_WORKER
def test_of_what_never_ran_there_is_nothing_to_move(where: Keep) -> None:
    scene = Scene(size=1)
    scene.submit()
    assert scene.abort(keep=where) == scene.abort(keep=other(where)) == []
    assert held(scene)
