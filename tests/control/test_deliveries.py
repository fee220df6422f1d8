"""Groups are handed out to calls: once to one that arrives, again if nobody got the answer."""

import pytest

from rollout.control.commands import KeepThere
from rollout.control.controller import Controller
from rollout.types import Keep, Then
from tests.control.scene import W1, W2, Scene, T, U, decoding, exported, finished, image, parked, suspended


def with_finished(*groups: str) -> Scene:
    """A scene in which `groups` finished, in this order."""
    scene = Scene(W1, room=9)
    for group in groups:
        scene.submit(group)
    for group in groups:
        scene.report(W1, finished(scene.controller.resolve([group])[0][0].trajectory_id))
    return scene


def take(controller: Controller, count: int, call: str) -> list[str]:
    return [delivery.group_id for delivery in controller.take(count, call)]


def arrived(controller: Controller, *calls: str) -> None:
    controller.settle_calls(arrived=calls, abandoned=())


def abandoned(controller: Controller, *calls: str) -> None:
    controller.settle_calls(arrived=(), abandoned=calls)


def test_what_was_handed_out_to_a_lost_call_is_handed_out_again_whole_and_before_others() -> None:
    controller = with_finished("a", "b", "c").controller
    first = controller.take(2, "one")
    abandoned(controller, "one")
    assert (controller.complete_groups, controller.coming_groups) == (3, 3)
    assert controller.take(2, "two") == first
    assert take(controller, 9, "three") == ["c"]


def test_a_call_that_is_given_up_before_it_is_answered_takes_nothing() -> None:
    controller = with_finished("a", "b").controller
    abandoned(controller, "one")
    assert take(controller, 9, "one") == []
    assert take(controller, 9, "two") == ["a", "b"]


def test_nothing_is_handed_out_twice_though_its_call_is_given_up_twice() -> None:
    """Whoever tells it does not know whether it was heard."""
    controller = with_finished("a").controller
    take(controller, 9, "one")
    abandoned(controller, "one")
    abandoned(controller, "one")
    assert take(controller, 9, "two") == ["a"]
    abandoned(controller, "one")
    assert take(controller, 9, "three") == []


def test_what_was_returned_and_lost_again_is_returned_again() -> None:
    controller = with_finished("a", "b").controller
    for call in ("one", "two", "three"):
        assert take(controller, 1, call) == ["a"]
        abandoned(controller, call)
    assert take(controller, 9, "four") == ["a", "b"]


def test_what_arrived_is_never_handed_out_again() -> None:
    controller = with_finished("a", "b").controller
    take(controller, 1, "one")
    take(controller, 1, "two")
    arrived(controller, "one")
    arrived(controller, "one")
    abandoned(controller, "one")
    assert take(controller, 9, "three") == []
    abandoned(controller, "two")
    assert take(controller, 9, "four") == ["b"]


def test_what_was_handed_out_is_not_complete_nor_coming_while_its_call_may_arrive() -> None:
    controller = with_finished("a").controller
    take(controller, 9, "one")
    assert (controller.complete_groups, controller.coming_groups) == (0, 0)
    assert take(controller, 9, "two") == []


def test_an_unknown_call_changes_nothing() -> None:
    controller = with_finished("a").controller
    arrived(controller, "never")
    abandoned(controller, "never")
    assert controller.complete_groups == 1
    assert take(controller, 9, "one") == ["a"]


def test_a_group_with_a_held_member_is_not_coming_until_that_is_resumed() -> None:
    scene = Scene(W1)
    scene.submit(n=2)
    scene.submit("h")
    scene.abort(T, U)
    assert scene.controller.coming_groups == 2, "they are not held yet"
    scene.report(W1, parked(kv=0), parked(U, kv=0))
    assert scene.controller.coming_groups == 1
    scene.resume(T)
    assert scene.controller.coming_groups == 1, "the other member is held still"
    scene.resume(U)
    assert scene.controller.coming_groups == 2


def test_aborting_a_held_one_to_the_end_or_into_the_queue_makes_its_group_come() -> None:
    for then in (Then.FINISH, Then.REQUEUE):
        scene = suspended()
        assert scene.controller.coming_groups == 0
        scene.abort(then=Then.HOLD)
        assert scene.controller.coming_groups == 0
        scene.abort(then=then)
        assert scene.controller.coming_groups == 1


def test_a_queued_one_that_is_held_is_not_coming() -> None:
    scene = Scene(size=1)
    scene.submit()
    assert scene.controller.coming_groups == 1
    scene.abort()
    assert scene.controller.coming_groups == 0
    scene.resume()
    assert scene.controller.coming_groups == 1


@pytest.mark.parametrize("hold_first", [False, True])
def test_a_hold_that_is_taken_back_during_the_export_leaves_the_group_coming(hold_first: bool) -> None:
    scene = decoding()
    scene.abort(then=Then.HOLD if hold_first else Then.REQUEUE)
    scene.report(W1, parked(kv=7))
    if hold_first:
        scene.resume()
    scene.handle(exported(image(7, "a")))
    assert scene.controller.coming_groups == 1


def test_a_held_one_that_can_never_run_again_comes_when_it_is_resumed() -> None:
    scene = suspended(worker_count=1)
    scene.down(W1, final=True)
    assert (scene.controller.coming_groups, scene.controller.complete_groups) == (0, 0)
    scene.resume()
    assert (scene.controller.coming_groups, scene.controller.complete_groups) == (1, 1)


def test_what_was_given_back_counts_as_coming_beside_what_runs() -> None:
    scene = Scene(W1, W2)
    scene.submit("a")
    scene.submit("b")
    (a,), _ = scene.controller.resolve(["a"])
    assert a.worker is not None
    scene.report(a.worker, finished(a.trajectory_id))
    scene.controller.take(1, "one")
    assert scene.controller.coming_groups == 1
    abandoned(scene.controller, "one")
    assert (scene.controller.coming_groups, scene.controller.complete_groups) == (2, 1)


PUT_AWAY = {Keep.DEVICE: "KeepThere", Keep.HOST: "KeepThere", Keep.POOL: "Export", Keep.NONE: "Release"}


@pytest.mark.parametrize("configured", Keep)
@pytest.mark.parametrize("asked", Keep)
def test_an_abort_keeps_what_it_says_and_if_it_does_not_say_what_is_configured(configured: Keep, asked: Keep) -> None:
    scene = decoding(keep=configured)
    scene.abort(keep=asked)
    commands = scene.report(W1, parked(kv=7))
    kept = next((keep for keep in (asked, configured) if keep is not Keep.AUTO), Keep.DEVICE)
    assert [type(command).__name__ for command in commands] == [PUT_AWAY[kept]]
    assert [command.where for command in commands if isinstance(command, KeepThere)] == [kept] * (
        kept in (Keep.DEVICE, Keep.HOST)
    )
