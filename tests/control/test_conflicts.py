"""What is said of a trajectory later does not undo what may not be undone."""

import pytest

from rollout.config import GroupsConfig
from rollout.control.commands import KeepThere
from rollout.types import AbortReason, Keep, Phase, Then
from tests.control.scene import (
    W1,
    Scene,
    T,
    admitted,
    exported,
    failed,
    finished,
    image,
    moved,
    only_start,
    only_trajectory,
    parked,
    release,
    sampled,
    starts,
    stop,
    submission,
)


def at_turns_end(*, during_export: bool = False) -> Scene:
    """A scene in which `T` ended a turn after three tokens, and waits with its image in a pool, or on its way there."""
    scene = Scene(W1)
    scene.submit_all(submission(multi_turn=True))
    scene.report(W1, admitted(), sampled(count=3), parked(kv=7, reason=AbortReason.TURN))
    if not during_export:
        scene.handle(exported(image(7, "a")))
    return scene


def extend(scene: Scene, *ids: int) -> list[object]:
    scene.now += 1.0
    return [*scene.controller.extend(T, ids, "call", scene.now)]


@pytest.mark.parametrize("during_export", [False, True])
def test_what_waits_for_an_extend_is_not_set_going_by_an_abort_that_requeues(during_export: bool) -> None:
    """It would go on after its stop as if that had not been."""
    scene = at_turns_end(during_export=during_export)
    ticket, commands = scene.open_abort(then=Then.REQUEUE)
    commands += scene.handle(exported(image(7, "a"))) if during_export else []
    assert starts(commands) == []
    assert (ticket.done, scene.phase(), scene.controller.coming_groups) == (True, Phase.SUSPENDED, 0)
    assert [trajectory.trajectory_id for trajectory in scene.controller.turns({}, 999)] == [T]


@pytest.mark.parametrize("reason", [None, AbortReason.TURN])
def test_a_turn_that_ends_as_it_is_requeued_waits_all_the_same(reason: AbortReason | None) -> None:
    scene = Scene(W1)
    scene.submit_all(submission(multi_turn=True))
    scene.report(W1, admitted(), sampled(count=3))
    scene.abort(then=Then.REQUEUE)
    scene.report(W1, parked(kv=7, reason=reason))
    commands = scene.handle(exported(image(7, "a")))
    assert bool(starts(commands)) == (reason is None)
    assert (scene.phase() is Phase.SUSPENDED) == (reason is AbortReason.TURN)


def test_who_waits_for_an_extend_waits_on_when_its_kv_was_brought_to_a_worker() -> None:
    scene = at_turns_end()
    assert only_start(scene.abort(keep=Keep.HOST)).assignment.watch.only_loads
    commands = scene.report(W1, admitted(epoch=2, restored=7), parked(epoch=2, kv=7))
    assert [command.where for command in commands if isinstance(command, KeepThere)] == [Keep.HOST]
    scene.report(W1, moved(epoch=2, where=Keep.HOST))
    report, commands = scene.controller.resume([T], scene.now)
    assert (report.resumed, report.unknown, commands) == ((), (T,), [])
    assert list(only_start(extend(scene, 7, 8)).assignment.output.ids) == [100, 101, 102, 7, 8]  # type: ignore[arg-type]


@pytest.mark.parametrize("then", Then)
@pytest.mark.parametrize("keep", [Keep.POOL, Keep.HOST, Keep.NONE])
def test_what_was_discarded_stays_so_whatever_is_said_of_it_later(then: Then, keep: Keep) -> None:
    """The driver was told that its tokens are gone."""
    scene = Scene(W1)
    scene.submit()
    scene.report(W1, admitted(), sampled(count=3))
    report, commands = scene.controller.discard([T], scene.now)
    assert (report.discarded, commands) == ((T,), [stop()])
    ticket, commands = scene.open_abort(keep=keep, then=then)
    assert commands == []
    assert scene.resume() == []
    assert scene.report(W1, parked(kv=7)) == [release()]
    assert ticket.done
    assert scene.trajectories == []
    assert scene.take(9) == []
    assert scene.controller.accounts().dropped == {AbortReason.DISCARD: 1}


def test_what_ends_by_itself_before_its_discard_takes_effect_is_delivered_whole() -> None:
    """Case A5."""
    scene = Scene(W1)
    scene.submit()
    scene.report(W1, admitted(), sampled(count=3))
    scene.controller.discard([T], scene.now)
    scene.report(W1, finished(), parked(kv=7))
    assert only_trajectory(scene).output_ids == (100, 101, 102)
    assert scene.controller.accounts().dropped == {}


def test_what_was_discarded_and_fails_is_not_tried_again() -> None:
    scene = Scene(W1, groups=GroupsConfig(failed_member="retry"))
    scene.submit()
    scene.report(W1, admitted(), sampled(count=3))
    scene.controller.discard([T], scene.now)
    assert starts(scene.report(W1, failed())) == []
    assert scene.trajectories == []
