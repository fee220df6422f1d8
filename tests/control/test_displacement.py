"""Pools are told when an image is needed next, and what they give up for one that is needed sooner is let go of."""

import pytest

from rollout.control.commands import Drop, Export
from rollout.control.messages import Displaced, Exported, ExportFailed, Spilled
from rollout.types import Image, Keep, NodeId, Phase, SegmentId, Then, TrajectoryId, Turn, Wait
from tests.control.scene import (
    W1,
    W2,
    Scene,
    T,
    U,
    admitted,
    decoding,
    displaced,
    export_failed,
    exported,
    finished,
    image,
    only_start,
    only_trajectory,
    parked,
    preempted,
    release,
    restore_failed,
    resumed,
    retain,
    sampled,
    starts,
    suspended,
    suspending,
)
from tests.weights import written

HERE, THERE = NodeId("n1"), NodeId("n2")


def turn(scene: Scene, t: TrajectoryId = T, node: NodeId = HERE) -> Wait:
    told = scene.turns[node, t]
    assert told.order == scene.record(t).order
    return told.wait


# What pools are told to expect --------------------------------------------------------------------


def test_turns_are_ordered_by_what_is_waited_for_and_then_by_age() -> None:
    turns = [
        Turn(Wait.STARTING, 9),
        Turn(Wait.QUEUED, 3),
        Turn(Wait.QUEUED, 4),
        Turn(Wait.HELD, 0),
        Turn(Wait.RUNNING, 0),
    ]
    assert sorted(turns, reverse=True) == turns[::-1]


def test_an_image_is_expected_by_what_its_trajectory_waits_for_through_its_life() -> None:
    scene = suspending(worker_count=1, room=1)
    assert (turn(scene), scene.expects) == (Wait.HELD, 0)
    scene.handle(exported(image(7, "a", "b")))
    assert (turn(scene), scene.expects) == (Wait.HELD, 0)
    scene.submit("other", n=2)
    scene.resume()
    assert (scene.phase(), turn(scene)) == (Phase.QUEUED, Wait.QUEUED)
    scene.report(W1, finished(TrajectoryId("other/0")))
    assert (scene.phase(), turn(scene)) == (Phase.RESTORING, Wait.STARTING)
    scene.report(W1, admitted(epoch=2, restored=7))
    assert turn(scene) is Wait.RUNNING
    scene.report(W1, preempted(epoch=2))
    assert turn(scene) is Wait.STARTING
    scene.report(W1, admitted(epoch=2, restored=7), sampled(epoch=2, offset=3, count=2))
    assert turn(scene) is Wait.RUNNING
    scene.abort(then=Then.REQUEUE)
    order, *_ = scene.report(W1, parked(epoch=2, kv=9))
    assert isinstance(order, Export)
    assert order.turn == Turn(Wait.QUEUED, 0)


def test_what_is_told_twice_is_not_told_to_the_pools_again() -> None:
    scene = resumed()
    scene.report(W1, admitted(epoch=2, restored=7))
    told = scene.expects
    scene.report(W1, admitted(epoch=2, restored=7))
    scene.report(W1, sampled(epoch=2, offset=3))
    assert scene.expects == told


@pytest.mark.parametrize("how", ["abort", "resume"])
def test_a_change_of_mind_during_the_export_is_told(how: str) -> None:
    if how == "resume":
        scene = suspending()
        scene.resume()
        assert turn(scene) is Wait.QUEUED
    else:
        scene = decoding(worker_count=1, slice_tokens=3)
        scene.report(W1, parked(kv=7))
        assert turn(scene) is Wait.QUEUED
        scene.abort()
        assert turn(scene) is Wait.HELD


def test_every_pool_that_has_a_part_of_the_image_is_told() -> None:
    scene = on_two_nodes()
    assert turn(scene) is turn(scene, node=THERE) is Wait.HELD
    scene.resume()
    assert turn(scene) is turn(scene, node=THERE) is Wait.STARTING


def test_a_lost_worker_makes_the_image_needed_again() -> None:
    scene = resumed()
    scene.report(W1, admitted(epoch=2, restored=7))
    scene.down(W1)
    assert (scene.phase(), turn(scene)) == (Phase.QUEUED, Wait.QUEUED)


def test_nothing_is_told_of_what_has_no_image() -> None:
    scene = decoding(worker_count=1, slice_tokens=3)
    scene.report(W1, parked(kv=7))
    scene.handle(export_failed())
    assert (scene.phase(), scene.expects) == (Phase.PREFILLING, 0)
    scene = decoding(worker_count=1)
    scene.abort(keep=Keep.NONE, then=Then.REQUEUE)
    scene.report(W1, parked(kv=7))
    scene.report(W1, admitted(epoch=2, again=7), preempted(epoch=2))
    assert scene.expects == 0


# What pools displace ------------------------------------------------------------------------------


def on_two_nodes() -> Scene:
    """`T` is held with an image of two runs, a on n1 and c on n2."""
    scene = resumed(room=4)
    scene.up(W2)
    scene.report(W1, admitted(epoch=2, restored=7))
    scene.down(W1)
    scene.report(W2, admitted(epoch=3, restored=7), sampled(epoch=3, offset=3, count=2))
    scene.abort()
    scene.report(W2, parked(epoch=3, kv=9))
    runs = image(7, "a").runs + image(9, "c", node="n2").runs
    scene.handle(exported(Image(runs=runs, kv_tokens=9, written=written(9)), epoch=3))
    return scene


def pair() -> Scene:
    """`T` is held with an image in a and b; the export of `U`, which will be queued again, is under way."""
    scene = Scene(W1)
    scene.submit(n=2)
    scene.report(W1, admitted(), sampled(count=3), admitted(U), sampled(U, count=3))
    scene.abort(T)
    scene.report(W1, parked(kv=7))
    scene.handle(exported(image(7, "a", "b")))
    scene.abort(U, then=Then.REQUEUE)
    scene.report(W1, parked(U, kv=7))
    return scene


@pytest.mark.parametrize("answer", [exported(image(7, "c"), U), export_failed(U)])
def test_a_displaced_image_is_let_go_of_counted_and_told(answer: Exported | ExportFailed) -> None:
    scene = pair()
    lost = [displaced(T, "b")]
    event = (
        exported(answer.image, U, displaced=lost) if isinstance(answer, Exported) else export_failed(U, displaced=lost)
    )
    assert scene.handle(event)[0] == retain()
    assert scene.record(T).pooled.image is None
    assert scene.controller.counters.displaced_images == 1
    assert scene.controller.troubles[0] == "g/1: its image displaced 1 needed later: g/0"
    assert only_start(scene.resume(T)).assignment.image is None
    scene.report(W1, admitted(epoch=2, again=7))
    assert scene.controller.counters.recomputed_tokens == 7


def test_a_displacement_that_is_told_twice_counts_once_and_spares_a_newer_image() -> None:
    scene = pair()
    event = exported(image(7, "c"), U, displaced=[displaced(T, "b")])
    scene.handle(event)
    scene.resume(T)
    scene.report(W1, admitted(epoch=2, again=7), sampled(epoch=2, offset=3))
    scene.abort(T)
    scene.report(W1, parked(epoch=2, kv=8))
    scene.handle(exported(image(8, "a", "d"), epoch=2))
    assert scene.handle(event) == []
    assert scene.record(T).pooled.image == image(8, "a", "d")
    assert scene.controller.counters.displaced_images == 1


def test_a_displacement_is_heard_even_if_its_export_is_over_or_its_trajectory_gone() -> None:
    scene = pair()
    scene.handle(export_failed(U))
    gone = Displaced(trajectory_id=TrajectoryId("never"), segments=frozenset({SegmentId("x")}))
    late = export_failed(U, displaced=[displaced(T, "a", "b"), gone])
    assert scene.handle(late) == [retain()]
    assert scene.controller.counters.export_failures == 1
    assert scene.controller.counters.displaced_images == 1


def test_a_part_that_is_displaced_on_one_node_ends_the_image_on_all() -> None:
    scene = on_two_nodes()
    event = export_failed(U, 9, displaced=[displaced(T, "a")])
    assert scene.handle(event) == [retain(), retain(node="n2")]
    assert scene.retained == {}


def test_an_export_that_builds_on_what_is_displaced_meanwhile_stores_nothing_of_use() -> None:
    scene = resumed()
    scene.up(W2)
    scene.report(W1, admitted(epoch=2, restored=7))
    scene.down(W1)
    scene.report(W2, admitted(epoch=3, restored=7), sampled(epoch=3, offset=3, count=2))
    scene.abort()
    scene.report(W2, parked(epoch=3, kv=9))
    scene.handle(export_failed(U, 9, displaced=[displaced(T, "a")]))
    runs = image(7, "a").runs + image(9, "c", node="n2").runs
    commands = scene.handle(exported(Image(runs=runs, kv_tokens=9, written=written(9)), epoch=3))
    assert commands == [release(W2, epoch=3), retain(), retain(node="n2")]
    assert scene.record().pooled.image is None
    assert scene.phase() is Phase.SUSPENDED
    assert scene.retained == {}


def test_a_restore_of_what_was_displaced_fails_and_is_no_second_loss() -> None:
    scene = suspended(worker_count=1)
    assert starts(scene.resume()) == [(W1, T, 2)]
    scene.handle(export_failed(U, 9, displaced=[displaced(T, "a", "b")]))
    assert not [c for c in scene.report(W1, restore_failed(epoch=2)) if isinstance(c, Drop)]
    scene.report(W1, admitted(epoch=2, again=7), finished(epoch=2))
    assert (scene.controller.counters.restore_failures, scene.controller.counters.displaced_images) == (0, 1)
    assert only_trajectory(scene).output_ids == (100, 101, 102)


# Spilling -----------------------------------------------------------------------------------------


def test_a_node_that_spills_is_a_trouble_told_once() -> None:
    scene = Scene(W1)
    for nbytes in (100, 200):
        assert scene.handle(Spilled(node=HERE, nbytes=nbytes)) == []
    scene.handle(Spilled(node=THERE, nbytes=5))
    assert scene.controller.troubles == (
        "node n1: its object store spilled 100 bytes to disk",
        "node n2: its object store spilled 5 bytes to disk",
    )
