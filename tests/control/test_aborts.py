"""Tickets of aborts: when one is done, and what it reports of each trajectory."""

import itertools

import pytest

from rollout.control.aborts import AbortTicket
from rollout.reports import AbortReport
from rollout.types import Keep, Then, TrajectoryId
from tests.control.scene import (
    W1,
    W2,
    Scene,
    T,
    U,
    admitted,
    decoding,
    export_failed,
    exported,
    failed,
    finished,
    image,
    parked,
    sampled,
    starts,
    suspended,
)


def only_kind(ticket: AbortTicket) -> str:
    """What is reported of the one trajectory that was asked for, which is known."""
    report = ticket.report()
    kinds = {"found": report.found, "finished": report.finished, "unreached": report.unreached}
    ((kind, (name,)),) = ((kind, names) for kind, names in kinds.items() if names)
    assert (report.unknown, [partial.trajectory_id for partial in report.partials]) == ((), [name])
    return kind


def test_every_id_is_reported_as_exactly_one_kind_and_partials_are_of_all_that_is_known() -> None:
    scene = Scene(W1)
    names = [TrajectoryId(f"{group}/0") for group in ("over", "ends", "stops", "runs")]
    over, ends, stops, runs = names
    for group in ("over", "ends", "stops", "runs"):
        scene.submit(group)
    scene.report(W1, sampled(over, count=2), finished(over), sampled(runs, count=3))
    ticket, _ = scene.open_abort(*names, "gone/0")
    scene.report(W1, sampled(ends), finished(ends), parked(stops, kv=0))
    assert not ticket.done
    report = ticket.report()
    assert report == AbortReport(
        found=(stops,),
        unknown=(TrajectoryId("gone/0"),),
        finished=(over, ends),
        unreached=(runs,),
        partials=report.partials,
    )
    tokens = {partial.trajectory_id: len(partial.output_ids) for partial in report.partials}
    assert tokens == {over: 2, ends: 1, stops: 0, runs: 3}
    scene.report(W1, parked(runs, kv=0))
    assert ticket.done
    assert (ticket.report().found, ticket.report().unreached) == ((stops, runs), ())


def test_a_groups_id_stands_for_its_members_and_none_for_all() -> None:
    scene = Scene(W1)
    scene.submit(n=2)
    scene.submit("h")
    for ids, asked in ((("g", T), [T, U]), (("h", "g"), ["h/0", T, U])):
        assert [record.trajectory_id for record in scene.open_abort(*ids)[0].asked] == asked
    everything, _ = scene.controller.abort(None, Keep.POOL, Then.HOLD, scene.now)
    assert [record.trajectory_id for record in everything.asked] == [T, U, "h/0"]


def test_an_abort_of_nothing_that_is_known_is_done() -> None:
    ticket, commands = Scene(W1).open_abort("gone/0")
    assert (ticket.done, commands) == (True, [])
    assert ticket.report() == AbortReport(unknown=(TrajectoryId("gone/0"),))


@pytest.mark.parametrize("then", Then)
def test_what_waits_for_a_worker_is_stopped_at_once(then: Then) -> None:
    scene = Scene(size=1)
    scene.submit()
    ticket, _ = scene.open_abort(then=then)
    assert (ticket.done, only_kind(ticket)) == (True, "found")


def test_what_is_suspended_already_is_found_at_once() -> None:
    ticket, _ = suspended().open_abort()
    assert (ticket.done, only_kind(ticket)) == (True, "found")


@pytest.mark.parametrize("then", Then)
@pytest.mark.parametrize("answer", [exported(image(7, "a")), export_failed()], ids=["exported", "failed"])
def test_an_abort_is_done_when_the_export_was_answered(then: Then, answer: object) -> None:
    scene = decoding()
    ticket, _ = scene.open_abort(then=then)
    assert not ticket.done
    scene.report(W1, parked(kv=7))
    assert ticket.done == (then not in (Then.HOLD, Then.REQUEUE)), "what does not go on with it is not exported"
    scene.handle(answer)  # type: ignore[arg-type]
    assert (ticket.done, only_kind(ticket)) == (True, "found")


def test_an_abort_is_done_though_what_it_requeued_was_started_and_stopped_again() -> None:
    """Asked about only then, as when events come in faster than the one who waits is scheduled."""
    scene = decoding(worker_count=1)
    ticket, _ = scene.open_abort(then=Then.REQUEUE)
    scene.report(W1, parked(kv=7))
    assert starts(scene.handle(exported(image(7, "a")))) == [(W1, T, 2)]
    second, _ = scene.open_abort()
    assert ticket.done
    assert (only_kind(ticket), only_kind(second)) == ("found", "unreached")
    assert not second.done
    scene.report(W1, parked(epoch=2, kv=0))
    assert second.done


def test_an_abort_is_done_though_its_end_was_changed_by_another_one() -> None:
    scene = decoding()
    tickets = [scene.open_abort(then=then)[0] for then in (Then.HOLD, Then.FINISH)]
    scene.report(W1, parked(kv=7))
    assert [(ticket.done, only_kind(ticket)) for ticket in tickets] == [(True, "found")] * 2


@pytest.mark.parametrize("then", Then)
def test_what_ends_by_itself_before_it_stops_is_reported_as_finished(then: Then) -> None:
    for end in (finished(), failed()):
        scene = decoding()
        ticket, _ = scene.open_abort(then=then)
        scene.report(W1, end)
        assert (ticket.done, only_kind(ticket)) == (True, "finished")


def test_what_was_over_before_is_finished_even_if_an_earlier_abort_ended_it() -> None:
    scene = suspended()
    first, _ = scene.open_abort(then=Then.FINISH)
    second, _ = scene.open_abort(then=Then.FINISH)
    assert (only_kind(first), only_kind(second)) == ("found", "finished")
    assert second.done


@pytest.mark.parametrize("then", Then)
def test_an_abort_is_done_when_the_worker_is_lost_that_was_to_stop(then: Then) -> None:
    scene = decoding()
    ticket, _ = scene.open_abort(then=then)
    scene.down(W1)
    assert (ticket.done, only_kind(ticket)) == (True, "found")


def test_a_partial_has_the_tokens_that_came_after_the_abort_was_asked_for() -> None:
    scene = decoding(tokens=3)
    ticket, _ = scene.open_abort()
    scene.report(W1, sampled(offset=3, count=2), parked(kv=0))
    (partial,) = ticket.report().partials
    assert partial.output_ids == tuple(range(100, 105))


def test_a_report_outlives_the_delivery_of_what_it_is_about() -> None:
    scene = decoding()
    ticket, _ = scene.open_abort(then=Then.FINISH)
    scene.report(W1, parked(kv=7))
    assert [delivery.group_id for delivery in scene.take(1)] == ["g"]
    assert (ticket.done, only_kind(ticket)) == (True, "found")


def test_a_resume_reports_what_goes_on_and_what_it_does_not_know_or_is_over() -> None:
    scene = Scene(W1, W2)
    scene.submit(n=3)
    third = TrajectoryId("g/2")
    workers = {record.trajectory_id: record.worker for record in scene.controller.resolve(None)[0]}
    for t, event in itertools.chain([(T, finished()), (U, admitted(U))]):
        assert workers[t] is not None
        scene.report(workers[t], event)  # type: ignore[arg-type]
    scene.abort(third)
    report, _ = scene.controller.resume([T, U, third, "gone/0"], scene.now)
    assert (report.resumed, report.unknown) == ((U, third), (TrajectoryId("gone/0"), T))
