"""What is damaged is dropped once, what kills its workers ends, and what went wrong is told."""

import pytest

from rollout.control.commands import Drop
from rollout.control.membership import MOST_LOSSES
from rollout.control.messages import WorkerDown
from rollout.control.roster import TROUBLES
from rollout.types import FinishReason, Image, NodeId, Phase, SegmentId, TrajectoryId
from tests.control.scene import (
    NODES,
    W1,
    W2,
    Scene,
    T,
    U,
    admitted,
    decoding,
    export_failed,
    exported,
    finished,
    image,
    only_trajectory,
    parked,
    restore_failed,
    resumed,
    retain,
    sampled,
    starts,
    suspending,
)
from tests.weights import written

# Damaged segments ---------------------------------------------------------------------------------


def test_a_segment_that_is_to_blame_is_dropped_once_and_retained_no_more() -> None:
    scene = resumed()
    commands = scene.report(W1, restore_failed(epoch=2, segment="b"))
    assert commands == [retain(), Drop(node=NodeId("n1"), segment=SegmentId("b"))]
    assert scene.retained == {}
    scene.report(W1, admitted(epoch=2, again=7), sampled(epoch=2, offset=3))
    scene.abort()
    scene.report(W1, parked(epoch=2, kv=8))
    assert not [c for c in scene.handle(exported(image(8, "c"), epoch=2)) if isinstance(c, Drop)]


def test_a_segment_on_another_node_is_dropped_there_and_all_nodes_let_go() -> None:
    scene = resumed()
    scene.report(W1, admitted(epoch=2, restored=7), sampled(epoch=2, offset=3, count=2))
    scene.abort()
    scene.report(W1, parked(epoch=2, kv=9))
    runs = image(7, "a").runs + image(9, "c", node="n2").runs
    scene.handle(exported(Image(runs=runs, kv_tokens=9, written=written(9)), epoch=2))
    scene.resume()
    commands = scene.report(W1, restore_failed(epoch=3, segment="c", node="n2"))
    assert commands == [retain(), retain(node="n2"), Drop(node=NODES[W2], segment=SegmentId("c"))]


def test_a_failed_restore_that_blames_no_segment_drops_none() -> None:
    scene = resumed()
    assert scene.report(W1, restore_failed(epoch=2)) == [retain()]


def test_a_failed_restore_that_is_told_twice_drops_and_counts_once() -> None:
    scene = resumed()
    scene.report(W1, restore_failed(epoch=2, segment="b"))
    troubles = scene.controller.troubles
    assert scene.report(W1, restore_failed(epoch=2, segment="b")) == []
    assert scene.controller.counters.restore_failures == 1
    assert scene.controller.troubles == troubles


# What kills its workers ---------------------------------------------------------------------------


def kill(scene: Scene, times: int, *, first: int = 0) -> None:
    """Lose the only worker and have another process in its place, `times` times."""
    for number in range(first, first + times):
        scene.down(W1, f"process {number}")
        scene.up(W1, f"process {number + 1}")


def scene_of_one() -> Scene:
    scene = Scene(size=1)
    scene.up(W1, "process 0")
    scene.submit(n=2)
    return scene


def test_what_loses_its_workers_without_a_new_token_fails_and_others_go_on() -> None:
    scene = scene_of_one()
    kill(scene, MOST_LOSSES - 1)
    assert scene.phase(T) is scene.phase(U) is Phase.PREFILLING
    last = MOST_LOSSES - 1
    scene.report(W1, sampled(U, MOST_LOSSES), incarnation=f"process {last}")
    assert scene.down(W1, f"process {last}") == []
    assert (scene.phase(T), scene.phase(U)) == (Phase.FAILED, Phase.QUEUED)
    assert scene.record(T).error == f"{MOST_LOSSES} workers were lost under it; the last: w1 was killed"
    assert starts(scene.up(W1, "new")) == [(W1, U, MOST_LOSSES + 1)]
    scene.report(W1, sampled(U, MOST_LOSSES + 1, offset=1), finished(U, MOST_LOSSES + 1), incarnation="new")
    (delivery,) = scene.take(1)
    assert [t.finish_reason for t in delivery.trajectories] == [FinishReason.ERROR, FinishReason.STOP]


def test_a_new_token_in_between_starts_the_count_again() -> None:
    scene = scene_of_one()
    kill(scene, MOST_LOSSES - 1)
    news = sampled(T, MOST_LOSSES), sampled(U, MOST_LOSSES)
    scene.report(W1, *news, incarnation=f"process {MOST_LOSSES - 1}")
    kill(scene, MOST_LOSSES - 1, first=MOST_LOSSES - 1)
    assert scene.phase(T) is Phase.PREFILLING
    kill(scene, 1, first=2 * MOST_LOSSES - 2)
    assert scene.phase(T) is Phase.FAILED
    assert only_tokens(scene) == [(100,), (100,)], "what it sampled is delivered all the same"


def only_tokens(scene: Scene) -> list[tuple[int, ...]]:
    (delivery,) = scene.take(1)
    return [trajectory.output_ids for trajectory in delivery.trajectories]


def test_tokens_that_were_told_before_are_no_progress() -> None:
    scene = scene_of_one()
    scene.report(W1, sampled(T), incarnation="process 0")
    kill(scene, MOST_LOSSES - 1)
    scene.report(W1, sampled(T, MOST_LOSSES), incarnation=f"process {MOST_LOSSES - 1}")
    kill(scene, 1, first=MOST_LOSSES - 1)
    assert scene.phase(T) is Phase.FAILED


def test_what_waits_or_is_held_loses_nothing_with_a_worker() -> None:
    scene = Scene(size=1)
    scene.up(W1, "process 0", room=1)
    scene.submit(n=2)
    third = TrajectoryId("h/0")
    scene.submit("h")
    scene.abort(third)
    for number in range(MOST_LOSSES):
        scene.down(W1, f"process {number}")
        scene.up(W1, f"process {number + 1}", room=1)
    assert scene.phase(T) is Phase.FAILED
    assert (scene.phase(U), scene.phase(third)) == (Phase.PREFILLING, Phase.SUSPENDED)
    assert scene.record(U).losses == 0


@pytest.mark.parametrize("aborted", [False, True])
def test_what_ends_so_while_it_has_an_image_lets_go_of_it(aborted: bool) -> None:
    scene = resumed()
    for number in range(MOST_LOSSES):
        if aborted and number == MOST_LOSSES - 1:
            scene.abort()
        scene.down(W1, "a" if number == 0 else f"process {number}")
        scene.up(W1, f"process {number + 1}")
    assert only_trajectory(scene).finish_reason is FinishReason.ERROR
    assert scene.retained == {}


# What is told -------------------------------------------------------------------------------------


def test_troubles_name_who_what_and_why() -> None:
    scene = suspending()
    scene.handle(export_failed())
    scene.down(W2)
    scene.up(W1, "b")
    assert scene.controller.troubles == (
        "g/0: export: the pool is full",
        "w2: lost: w2 was killed",
        "w1: lost: its process was restarted",
    )
    scene = resumed()
    scene.report(W1, restore_failed(epoch=2))
    assert scene.controller.troubles == ("g/0: restore: damaged",)


def test_only_the_last_troubles_are_remembered() -> None:
    scene = Scene(size=1)
    for number in range(TROUBLES + 5):
        scene.up(W1, str(number))
        scene.handle(WorkerDown(worker=W1, incarnation=str(number), error=f"reason {number}", final=False))
    assert scene.controller.troubles == tuple(f"w1: lost: reason {number}" for number in range(5, TROUBLES + 5))


def test_what_goes_well_is_no_trouble() -> None:
    scene = decoding()
    scene.report(W1, finished())
    scene.up(W2)
    assert scene.controller.troubles == ()
