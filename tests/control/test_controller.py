"""The controller by lists of events: what it commands, what it counts, and what it hands out in the end."""

import dataclasses

import pytest

from rollout.control.commands import Assignment, Export, Release, Start, Watch
from rollout.control.messages import Exported, ExportFailed, WorkerEvent
from rollout.errors import DuplicateKeyError
from rollout.metrics import RolloutCounters
from rollout.types import (
    Columns,
    FinishReason,
    Image,
    Keep,
    KVSpan,
    Phase,
    Resume,
    SamplingParams,
    Then,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
    Wait,
)
from tests.control.scene import (
    CONTEXT,
    NODES,
    PROMPT,
    W1,
    W2,
    Scene,
    T,
    U,
    admitted,
    columns,
    decoding,
    export_failed,
    exported,
    failed,
    finished,
    freed,
    image,
    only_export,
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
    stop,
    suspended,
    suspending,
)
from tests.weights import written

# A whole life -------------------------------------------------------------------------------------


def test_a_whole_life_with_one_slice_on_each_worker() -> None:
    scene = Scene(W1, slice_tokens=3, prefer_other=True, size=2)

    assert scene.submit() == [
        Start(
            worker=W1,
            assignment=Assignment(
                trajectory_id=T,
                epoch=1,
                prompt_ids=PROMPT,
                output=Columns(),
                sampling=SamplingParams(max_new_tokens=8),
                seed=0,
                watch=Watch(slice_tokens=3),
                max_context=CONTEXT,
                image=None,
                kv_tokens=0,
            ),
        )
    ]
    assert scene.phase() is Phase.PREFILLING
    scene.up(W2)
    assert scene.report(W1, admitted()) == []
    assert scene.phase() is Phase.PREFILLING
    assert scene.report(W1, sampled(count=2)) == []
    assert scene.phase() is Phase.DECODING

    slice_over = parked(kv=7)
    assert scene.report(W1, sampled(offset=2), slice_over) == [
        Export(
            worker=W1,
            node=NODES[W1],
            trajectory_id=T,
            epoch=1,
            kv_tokens=7,
            prompt_pages=1,
            page_keys=slice_over.page_keys,
            written=slice_over.written,
            base=None,
            turn=Turn(Wait.QUEUED, 0),
            release=True,
        )
    ]
    assert scene.phase() is Phase.SUSPENDING

    first_image = image(7, "a", "b")
    assert scene.handle(exported(first_image, sent=700)) == [
        release(),
        retain("a", "b"),
        Start(
            worker=W2,
            assignment=Assignment(
                trajectory_id=T,
                epoch=2,
                prompt_ids=PROMPT,
                output=columns(0, 3),
                sampling=SamplingParams(max_new_tokens=8),
                seed=0,
                watch=Watch(slice_tokens=3),
                max_context=CONTEXT,
                image=first_image,
                kv_tokens=7,
            ),
        ),
    ]
    assert scene.phase() is Phase.RESTORING
    assert scene.report(W1, freed(exclusive=2, freed=2)) == []

    assert scene.report(W2, admitted(epoch=2, cached=4, restored=3)) == []
    assert scene.phase() is Phase.DECODING
    end = finished(epoch=2, reason=FinishReason.LENGTH)
    assert scene.report(W2, sampled(epoch=2, offset=3, count=5), end) == [retain()]
    assert scene.phase() is Phase.FINISHED
    assert scene.retained == {}

    (delivery,) = scene.take(1)
    assert delivery.group_id == "g"
    assert delivery.trajectories == (
        Trajectory(
            trajectory_id=T,
            group_id=delivery.group_id,
            sample_index=0,
            seed=0,
            prompt_ids=PROMPT,
            output_ids=tuple(range(100, 108)),
            logprobs=tuple(-i / 8 for i in range(8)),
            versions=delivery.trajectories[0].versions,
            kv_spans=(KVSpan(first=5, stop=13, kv=((0, 5, Version(0)),)),),
            finish_reason=FinishReason.LENGTH,
            suspensions=1,
            workers=(W1, W2),
            resumes=(Resume(worker=W2, cached_tokens=4, restored_tokens=3, recomputed_tokens=0),),
            submitted_at=2.0,
            finished_at=scene.now,
            metadata={"key": "g"},
        ),
    )
    assert scene.controller.counters == RolloutCounters(
        trajectories=1,
        tokens=8,
        suspensions=1,
        resumes=1,
        resumed_elsewhere=1,
        exported_bytes=700,
        written_bytes=700,
        restored_tokens=3,
        cached_tokens=4,
        exclusive_pages=2,
        freed_pages=2,
        releases=1,
    )


def test_a_second_export_names_the_image_it_extends() -> None:
    scene = resumed()
    scene.report(W1, admitted(epoch=2, restored=7), sampled(epoch=2, offset=3, count=2))
    scene.abort()
    export = only_export(scene.report(W1, parked(epoch=2, kv=9)))
    assert (export.base, export.kv_tokens, export.epoch) == (image(7, "a", "b"), 9, 2)
    assert scene.handle(exported(image(9, "a", "c"), epoch=2)) == [release(epoch=2), retain("a", "c")]


def test_an_image_on_two_nodes_is_retained_on_both_and_dropped_from_both() -> None:
    scene = resumed()
    scene.report(W1, admitted(epoch=2, restored=7), sampled(epoch=2, offset=3, count=2))
    scene.abort()
    scene.report(W1, parked(epoch=2, kv=9))
    there = image(9, "c", node="n2").runs
    commands = scene.handle(exported(Image(runs=image(7, "a").runs + there, kv_tokens=9, written=written(9)), epoch=2))
    assert commands == [release(epoch=2), retain("a"), retain("c", node="n2")]
    assert scene.abort(then=Then.FINISH) == [retain(), retain(node="n2")]


def test_segments_on_a_node_that_the_next_image_does_not_use_are_dropped() -> None:
    scene = resumed()
    scene.report(W1, admitted(epoch=2, restored=7), sampled(epoch=2, offset=3, count=2))
    scene.abort()
    scene.report(W1, parked(epoch=2, kv=9))
    assert scene.handle(exported(image(9, "c", node="n2"), epoch=2))[1:] == [retain(), retain("c", node="n2")]


# Tokens and budgets -------------------------------------------------------------------------------


def test_without_a_budget_a_trajectory_finishes_as_length_without_a_worker() -> None:
    """Case B1."""
    scene = Scene(W1)
    assert scene.submit(n=2, budget=0) == []
    (delivery,) = scene.take(1)
    assert [t.finish_reason for t in delivery.trajectories] == [FinishReason.LENGTH] * 2
    assert [(t.output_ids, t.workers) for t in delivery.trajectories] == [((), ())] * 2


@pytest.mark.parametrize("then", [Then.HOLD, Then.REQUEUE])
def test_a_spent_budget_ends_as_length_instead_of_another_start(then: Then) -> None:
    """Case B1: the worker is lost after the last token was reported, and before the end was."""
    scene = decoding(tokens=8)
    if then is Then.REQUEUE:
        assert scene.down(W1) == []
    else:
        scene.abort()
        assert scene.down(W1) == []
        assert scene.phase() is Phase.SUSPENDED
        assert scene.resume() == []
    trajectory = only_trajectory(scene)
    assert (trajectory.finish_reason, len(trajectory.output_ids)) == (FinishReason.LENGTH, 8)


def test_tokens_that_are_told_again_are_taken_once() -> None:
    scene = decoding(tokens=3)
    scene.report(W1, sampled(offset=1, count=2))
    scene.report(W1, sampled(offset=1, count=4))
    assert scene.record().columns == columns(0, 5)
    assert scene.controller.counters.tokens == 5


def test_tokens_with_a_gap_before_them_assert() -> None:
    scene = decoding(tokens=3)
    with pytest.raises(AssertionError, match="g/0: tokens from 4 on, but only 3 known"):
        scene.report(W1, sampled(offset=4))


def test_a_prompt_of_which_all_but_the_last_token_is_cached_decodes_at_once() -> None:
    scene = Scene(W1)
    scene.submit()
    scene.report(W1, admitted(cached=4))
    assert scene.phase() is Phase.DECODING
    assert scene.record().resumes == []
    assert scene.controller.counters.cached_tokens == 0, "cached, but it never had KV before"


# Aborts -------------------------------------------------------------------------------------------


def test_aborting_one_job_leaves_another_whose_name_begins_alike() -> None:
    """Case A3."""
    scene = Scene(W1)
    scene.submit("job-1")
    scene.submit("job-10")
    one, ten = TrajectoryId("job-1/0"), TrajectoryId("job-10/0")
    assert scene.abort(one) == [stop(t=one)]
    scene.report(W1, parked(one, kv=0), sampled(ten, count=8), finished(ten, reason=FinishReason.LENGTH))
    assert (scene.phase(one), scene.phase(ten)) == (Phase.SUSPENDED, Phase.FINISHED)
    assert only_trajectory(scene).output_ids == tuple(range(100, 108))


def test_an_abort_right_after_the_start_stops_it() -> None:
    """Case A4: the stop follows the start to the same worker."""
    scene = Scene(W1)
    assert starts(scene.submit()) == [(W1, T, 1)]
    assert scene.abort() == [stop()]
    assert scene.report(W1, parked(kv=0)) == [release()]
    assert (scene.phase(), scene.record().columns) == (Phase.SUSPENDED, Columns())


@pytest.mark.parametrize(
    ("then", "phase"), [(Then.HOLD, Phase.SUSPENDED), (Then.FINISH, Phase.FINISHED), (Then.REQUEUE, Phase.QUEUED)]
)
def test_an_abort_before_the_start_takes_effect_at_once(then: Then, phase: Phase) -> None:
    """Case A4: no worker is up yet."""
    scene = Scene(size=1)
    scene.submit()
    assert scene.abort(then=then) == []
    assert scene.phase() is phase
    assert starts(scene.up(W1)) == [(W1, T, 1)] * (then is Then.REQUEUE)


def test_aborting_with_zero_tokens_gives_a_clean_empty_result() -> None:
    """Case A2."""
    scene = Scene(W1)
    scene.submit()
    scene.abort(then=Then.FINISH)
    scene.report(W1, parked(kv=4))
    trajectory = only_trajectory(scene)
    assert (trajectory.finish_reason, trajectory.output_ids, trajectory.logprobs) == (FinishReason.ABORT, (), ())


@pytest.mark.parametrize("then", Then)
@pytest.mark.parametrize("abort_first", [False, True])
def test_finish_and_abort_in_both_orders_each_twice_report_it_as_completed(abort_first: bool, then: Then) -> None:
    """Case A5: it finished in the step before the abort took effect."""
    scene = decoding()
    if abort_first:
        assert scene.abort(then=then) == [stop()]
        assert scene.abort(then=then) == []
    assert scene.report(W1, finished(), finished()) == []
    assert scene.record().intent is None, "an abort waits for this"
    assert scene.abort(then=then) == []
    assert scene.abort(then=then) == []
    trajectory = only_trajectory(scene)
    assert (trajectory.finish_reason, len(trajectory.output_ids)) == (FinishReason.STOP, 3)
    assert scene.controller.counters.suspensions == 0
    assert scene.take(1) == []


def test_a_finish_that_is_told_after_the_park_changes_nothing() -> None:
    """Case A5: an epoch ends once, whatever a worker says later."""
    scene = suspending()
    assert scene.report(W1, finished(), parked(kv=7), sampled(offset=3)) == []
    assert scene.phase() is Phase.SUSPENDING
    assert len(scene.record().columns) == 3


def test_unknown_ids_are_neither_aborted_nor_resumed_nor_known() -> None:
    """Case A6."""
    scene = decoding()
    unknown = TrajectoryId("gone/0")
    assert scene.abort(unknown, then=Then.FINISH) == []
    assert scene.resume(unknown) == []
    assert scene.report(W1, sampled(unknown), finished(unknown), parked(unknown, kv=3)) == []
    assert scene.handle(export_failed(unknown)) == []
    assert scene.controller.resolve([unknown]) == ([], (unknown,))
    assert scene.trajectories == [T]
    assert scene.phase() is Phase.DECODING


def test_what_an_unknown_trajectory_exported_is_dropped_from_the_pool() -> None:
    scene = decoding()
    unknown = TrajectoryId("gone/0")
    assert scene.handle(exported(image(7, "x"), unknown)) == [retain(t=unknown)]


@pytest.mark.parametrize("second", [Then.HOLD, Then.FINISH, Then.REQUEUE])
@pytest.mark.parametrize("first", [Then.HOLD, Then.FINISH, Then.REQUEUE])
def test_a_second_abort_before_the_park_changes_only_the_outcome(first: Then, second: Then) -> None:
    scene = decoding(worker_count=1)
    assert scene.abort(then=first) == [stop()]
    assert scene.abort(then=second) == []
    commands = scene.report(W1, parked(kv=7))
    if second is Then.FINISH:
        assert commands == [release()]
        assert scene.phase() is Phase.FINISHED
    else:
        only_export(commands)
        assert scene.phase() is Phase.SUSPENDING


@pytest.mark.parametrize(
    ("then", "phase"), [(Then.HOLD, Phase.SUSPENDED), (Then.FINISH, Phase.FINISHED), (Then.REQUEUE, Phase.RESTORING)]
)
def test_a_second_abort_during_the_export_changes_only_the_outcome(then: Then, phase: Phase) -> None:
    """Case A7: the pages are released once, after the export was answered."""
    scene = suspending()
    assert scene.abort(then=then) == []
    assert scene.phase() is Phase.SUSPENDING
    commands = scene.handle(exported(image(7, "a", "b")))
    assert [command for command in commands if isinstance(command, Release)] == [release()]
    assert scene.phase() is phase
    assert set(scene.retained.values()) == (set() if then is Then.FINISH else {retain("a", "b").segments})


def test_an_abort_that_keeps_nothing_during_the_export_drops_what_was_exported() -> None:
    scene = suspending()
    assert scene.abort(keep=Keep.NONE) == []
    assert scene.handle(exported(image(7, "a"))) == [release(), retain("a"), retain()]
    assert scene.record().pooled.image is None


def test_an_abort_that_keeps_nothing_releases_at_once_and_drops_the_image() -> None:
    scene = resumed()
    scene.report(W1, admitted(epoch=2, restored=7), sampled(epoch=2, offset=3))
    scene.abort(keep=Keep.NONE)
    assert scene.report(W1, parked(epoch=2, kv=8)) == [release(epoch=2), retain()]
    assert (scene.phase(), scene.record().pooled.image) == (Phase.SUSPENDED, None)
    again = only_start(scene.resume()).assignment
    assert (again.image, again.kv_tokens, again.output, again.epoch) == (None, 8, columns(0, 4), 3)
    assert scene.phase() is Phase.PREFILLING


def test_an_abort_that_keeps_nothing_drops_the_image_of_a_suspended_one() -> None:
    scene = suspended()
    assert scene.abort(keep=Keep.NONE) == [retain()]
    assert (scene.phase(), scene.record().pooled.image) == (Phase.SUSPENDED, None)


def test_an_abort_that_keeps_nothing_drops_the_image_of_a_queued_one() -> None:
    scene = suspended(worker_count=1)
    scene.down(W1)
    scene.resume()
    assert scene.phase() is Phase.QUEUED
    assert scene.abort(keep=Keep.NONE) == [retain()]
    assert (scene.phase(), scene.record().pooled.image) == (Phase.SUSPENDED, None)


def test_an_abort_that_keeps_nothing_drops_the_image_though_the_export_failed() -> None:
    scene = resumed()
    scene.report(W1, admitted(epoch=2, restored=7), sampled(epoch=2, offset=3))
    scene.abort()
    scene.report(W1, parked(epoch=2, kv=8))
    scene.abort(keep=Keep.NONE)
    assert scene.handle(export_failed(epoch=2)) == [release(epoch=2), retain()]
    assert scene.record().pooled.image is None


def test_an_abort_that_keeps_nothing_drops_the_image_though_the_worker_was_lost() -> None:
    scene = resumed()
    scene.abort(keep=Keep.NONE)
    assert scene.down(W1) == [retain()]
    assert (scene.phase(), scene.record().pooled.image) == (Phase.SUSPENDED, None)


def test_aborting_a_suspended_one_again_holds_it_still() -> None:
    scene = suspended()
    assert scene.abort() == []
    assert (scene.phase(), scene.record().suspensions) == (Phase.SUSPENDED, 1)
    assert scene.record().pooled.image == image(7, "a", "b")


def test_aborting_a_suspended_one_to_the_end_delivers_it_with_its_tokens() -> None:
    scene = suspended()
    assert scene.abort(then=Then.FINISH) == [retain()]
    trajectory = only_trajectory(scene)
    assert (trajectory.finish_reason, trajectory.output_ids) == (FinishReason.ABORT, (100, 101, 102))
    assert trajectory.finished_at == scene.now


def test_an_abort_to_the_end_releases_without_an_export() -> None:
    scene = decoding()
    assert scene.abort(then=Then.FINISH) == [stop()]
    assert scene.report(W1, sampled(offset=3), parked(kv=8)) == [release()]
    trajectory = only_trajectory(scene)
    assert (trajectory.finish_reason, trajectory.output_ids) == (FinishReason.ABORT, (100, 101, 102, 103))


def test_an_abort_that_requeues_exports_and_starts_again() -> None:
    scene = decoding(worker_count=1)
    scene.abort(then=Then.REQUEUE)
    scene.report(W1, parked(kv=7))
    assert starts(scene.handle(exported(image(7, "a")))) == [(W1, T, 2)]


def test_aborting_many_at_once_treats_each_by_its_own_phase() -> None:
    scene = Scene(W1, room=1)
    scene.submit(n=3)
    gone = TrajectoryId("g/9")
    third = TrajectoryId("g/2")
    assert scene.abort(T, gone, U, U, third, then=Then.FINISH) == [stop()]
    assert [scene.phase(t) for t in (T, U, third)] == [Phase.PREFILLING, Phase.FINISHED, Phase.FINISHED]
    scene.report(W1, parked(kv=0))
    (delivery,) = scene.take(1)
    assert [t.finish_reason for t in delivery.trajectories] == [FinishReason.ABORT] * 3


def test_an_abort_makes_room_for_who_waits() -> None:
    scene = Scene(W1, room=1)
    scene.submit(n=2)
    scene.abort()
    assert starts(scene.report(W1, parked(kv=0))) == [(W1, U, 1)]


# Resumes ------------------------------------------------------------------------------------------


def test_a_resume_during_the_export_starts_it_as_soon_as_that_is_answered() -> None:
    """Case C6."""
    scene = suspending()
    assert scene.resume() == []
    assert scene.phase() is Phase.SUSPENDING
    commands = scene.handle(exported(image(7, "a")))
    assert commands[:2] == [release(), retain("a")]
    assert only_start(commands).assignment.image == image(7, "a")


def test_a_resume_before_the_park_takes_the_abort_back() -> None:
    scene = decoding(worker_count=1)
    scene.abort()
    assert scene.resume() == []
    scene.report(W1, parked(kv=7))
    assert starts(scene.handle(exported(image(7, "a")))) == [(W1, T, 2)]


def test_a_resume_does_not_save_what_was_aborted_to_the_end() -> None:
    scene = decoding()
    scene.abort(then=Then.FINISH)
    assert scene.resume() == []
    scene.report(W1, parked(kv=7))
    assert only_trajectory(scene).finish_reason is FinishReason.ABORT


def test_resuming_what_is_not_suspended_changes_nothing() -> None:
    scene = Scene(W1, room=1)
    scene.submit(n=2)
    assert scene.resume(T, U) == []
    assert (scene.phase(T), scene.phase(U)) == (Phase.PREFILLING, Phase.QUEUED)
    scene.report(W1, finished())
    assert scene.resume(T) == []
    assert scene.phase(T) is Phase.FINISHED


def test_a_resume_is_recorded_once_with_where_its_kv_came_from() -> None:
    scene = resumed()
    scene.report(W1, admitted(epoch=2, cached=4, restored=2, again=1))
    assert scene.phase() is Phase.PREFILLING
    scene.report(W1, sampled(epoch=2, offset=3), preempted(epoch=2), admitted(epoch=2, cached=4, again=4))
    assert scene.record().resumes == [Resume(worker=W1, cached_tokens=4, restored_tokens=2, recomputed_tokens=1)]
    counters = scene.controller.counters
    assert (counters.cached_tokens, counters.restored_tokens, counters.recomputed_tokens) == (4, 2, 5)
    assert (counters.resumes, counters.resumed_elsewhere, counters.preemptions) == (1, 0, 1)


def test_what_never_ran_starts_after_a_hold_as_if_new() -> None:
    scene = Scene(size=1)
    scene.submit()
    scene.abort()
    scene.up(W1)
    assert starts(scene.resume()) == [(W1, T, 1)]
    counters = scene.controller.counters
    assert (counters.suspensions, counters.resumes, counters.restarts) == (0, 0, 0)


# Preemption, failing restores and exports ---------------------------------------------------------


def test_a_preempted_trajectory_decodes_again_on_the_same_worker() -> None:
    scene = decoding()
    assert scene.report(W1, preempted()) == []
    assert scene.phase() is Phase.PREEMPTED
    scene.report(W1, admitted(again=7))
    assert scene.phase() is Phase.PREFILLING
    scene.report(W1, sampled(offset=3))
    assert scene.phase() is Phase.DECODING
    counters = scene.controller.counters
    assert (counters.preemptions, counters.recomputed_tokens, counters.suspensions) == (1, 7, 0)
    assert scene.record().resumes == []


def test_a_preempted_trajectory_can_be_parked() -> None:
    scene = decoding()
    scene.report(W1, preempted())
    assert scene.abort() == [stop()]
    assert scene.report(W1, parked(kv=0)) == [release()]
    assert scene.phase() is Phase.SUSPENDED


def test_an_image_that_cannot_be_restored_is_dropped_and_recomputed() -> None:
    scene = resumed()
    assert scene.report(W1, restore_failed(epoch=2)) == [retain()]
    assert (scene.phase(), scene.record().pooled.image) == (Phase.RESTORING, None)
    scene.report(W1, admitted(epoch=2, again=7))
    assert scene.phase() is Phase.PREFILLING
    assert scene.controller.counters.restore_failures == 1
    assert scene.controller.counters.recomputed_tokens == 7


def test_a_failed_export_is_requeued_without_an_image() -> None:
    scene = suspending(worker_count=1)
    scene.resume()
    commands = scene.handle(export_failed())
    assert commands[0] == release()
    again = only_start(commands).assignment
    assert (again.image, again.output, again.kv_tokens, again.epoch) == (None, columns(0, 3), 7, 2)
    assert scene.controller.counters.export_failures == 1


def test_a_failed_export_is_requeued_with_the_image_it_had() -> None:
    scene = resumed()
    scene.report(W1, admitted(epoch=2, restored=7), sampled(epoch=2, offset=3, count=2))
    scene.abort(then=Then.REQUEUE)
    scene.report(W1, parked(epoch=2, kv=9))
    commands = scene.handle(export_failed(epoch=2))
    assert commands[0] == release(epoch=2)
    again = only_start(commands).assignment
    assert (again.image, again.kv_tokens) == (image(7, "a", "b"), 9)
    assert set(scene.retained.values()) == {retain("a", "b").segments}


@pytest.mark.parametrize("kv", [0, 4, 7])
def test_what_is_parked_with_no_more_than_its_image_holds_keeps_that_and_is_not_exported(kv: int) -> None:
    """An abort while it waits on the worker, or is being restored."""
    scene = resumed()
    scene.abort()
    assert scene.report(W1, parked(epoch=2, kv=kv)) == [release(epoch=2)]
    assert (scene.phase(), scene.record().pooled.image) == (Phase.SUSPENDED, image(7, "a", "b"))
    assert set(scene.retained.values()) == {retain("a", "b").segments}


def test_positions_that_once_had_kv_are_not_forgotten_by_a_park_without_pages() -> None:
    """Else recomputing them would not be counted: it is aborted while it waits, and then its image is damaged."""
    scene = resumed()
    scene.abort()
    scene.report(W1, parked(epoch=2, kv=0))
    assert only_start(scene.resume()).assignment.kv_tokens == 7


# Slices -------------------------------------------------------------------------------------------


def test_a_slice_is_exported_and_requeued() -> None:
    scene = decoding(worker_count=1, slice_tokens=3)
    only_export(scene.report(W1, parked(kv=7)))
    assert starts(scene.handle(exported(image(7, "a")))) == [(W1, T, 2)]


def test_a_slice_that_keeps_nothing_is_requeued_at_once() -> None:
    scene = decoding(worker_count=1, slice_tokens=3, keep=Keep.NONE)
    commands = scene.report(W1, parked(kv=7))
    assert commands[0] == release()
    again = only_start(commands).assignment
    assert (again.image, again.kv_tokens, again.watch.slice_tokens) == (None, 7, 3)


def test_an_abort_decides_even_if_the_slice_ends_first() -> None:
    scene = decoding(worker_count=1, slice_tokens=3)
    assert scene.abort() == [stop()]
    only_export(scene.report(W1, parked(kv=7)))
    scene.handle(exported(image(7, "a")))
    assert scene.phase() is Phase.SUSPENDED


def test_an_abort_during_the_export_of_a_slice_holds_it() -> None:
    scene = decoding(worker_count=1, slice_tokens=3)
    only_export(scene.report(W1, parked(kv=7)))
    assert scene.abort() == []
    assert scene.handle(exported(image(7, "a"))) == [release(), retain("a")]
    assert scene.phase() is Phase.SUSPENDED


# What is told late or twice -----------------------------------------------------------------------


EVENTS: list[WorkerEvent] = [
    sampled(offset=3),
    admitted(restored=7),
    preempted(),
    restore_failed(),
    finished(),
    failed(),
    parked(kv=9),
]


def state(scene: Scene, t: TrajectoryId = T) -> tuple[object, ...]:
    record = scene.record(t)
    values = [getattr(record, field.name) for field in dataclasses.fields(record)]
    pooled = (record.pooled.image, frozenset(record.pooled._nodes))
    return (*(repr(value) if isinstance(value, list) else value for value in values), len(record.columns), pooled)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("later", [suspending, suspended, resumed])
def test_an_event_of_an_epoch_that_is_over_changes_nothing(later: object, event: WorkerEvent) -> None:
    scene = later()  # type: ignore[operator]
    before, counters = state(scene), scene.controller.counters
    assert scene.report(W1, event) == []
    assert (state(scene), scene.controller.counters) == (before, counters)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_of_another_incarnation_or_of_no_worker_changes_nothing(event: WorkerEvent) -> None:
    scene = decoding()
    before, counters = state(scene), scene.controller.counters
    assert scene.report(W1, event, incarnation="b") == []
    scene.down(W2)
    assert scene.report(W2, event) == []
    assert (state(scene), scene.controller.counters.tokens) == (before, counters.tokens)


@pytest.mark.parametrize(
    "events",
    [
        (admitted(cached=2),),
        (admitted(cached=2), sampled(count=3)),
        (admitted(), sampled(count=8), finished(reason=FinishReason.LENGTH)),
        (admitted(), sampled(count=3), parked(kv=7)),
        (failed(),),
    ],
    ids=lambda events: "-".join(type(event).__name__ for event in events),
)
def test_a_report_that_arrives_twice_changes_nothing(events: tuple[WorkerEvent, ...]) -> None:
    scene = Scene(W1, W2, slice_tokens=3)
    scene.submit()
    scene.report(W1, *events)
    before, counters = state(scene), scene.controller.counters
    assert scene.report(W1, *events) == []
    assert (state(scene), scene.controller.counters) == (before, counters)


def test_a_preemption_that_is_told_twice_changes_nothing() -> None:
    scene = decoding()
    assert scene.report(W1, preempted(), preempted()) == []
    assert (scene.phase(), scene.controller.counters.preemptions) == (Phase.PREEMPTED, 1)


def test_a_failed_restore_and_an_admission_that_are_told_twice_change_nothing() -> None:
    scene = resumed()
    events = (restore_failed(epoch=2), admitted(epoch=2, again=7))
    scene.report(W1, *events)
    before = state(scene)
    assert scene.report(W1, *events) == []
    assert state(scene) == before
    assert scene.controller.counters.recomputed_tokens == 7


@pytest.mark.parametrize("answer", [exported(image(7, "a", "b")), export_failed()])
def test_an_answer_to_an_export_that_arrives_twice_changes_nothing(answer: Exported | ExportFailed) -> None:
    scene = suspending()
    scene.handle(answer)
    before, counters = state(scene), scene.controller.counters
    assert scene.handle(answer) == []
    assert (state(scene), scene.controller.counters) == (before, counters)


def test_an_answer_to_an_older_export_does_not_end_the_next_one() -> None:
    scene = resumed()
    scene.report(W1, admitted(epoch=2, restored=7), sampled(epoch=2, offset=3))
    scene.abort()
    only_export(scene.report(W1, parked(epoch=2, kv=8)))
    assert scene.handle(export_failed(epoch=1)) == []
    assert scene.handle(exported(image(7, "a", "b"), epoch=1)) == []
    assert scene.phase() is Phase.SUSPENDING
    assert scene.handle(exported(image(8, "a", "c"), epoch=2)) == [release(epoch=2), retain("a", "c")]


def test_what_was_exported_too_late_does_not_cost_the_next_export_what_it_stored() -> None:
    """The pool may have stored the next image already: its answer says what to retain, on the first node too."""
    scene = suspending()
    scene.resume()
    scene.up(W1, "b", room=0)
    assert starts(scene.handle(export_failed())) == [(W2, T, 2)]
    scene.report(W2, admitted(epoch=2), sampled(epoch=2, offset=3))
    scene.abort()
    assert only_export(scene.report(W2, parked(epoch=2, kv=8))).node == NODES[W2]
    assert scene.handle(exported(image(7, "late"))) == []
    commands = scene.handle(exported(image(8, "c", node="n2"), epoch=2))
    assert commands == [release(W2, epoch=2), retain(), retain("c", node="n2")]


def test_what_was_exported_too_late_is_dropped_on_a_node_that_is_in_use_no_more() -> None:
    scene = suspending()
    scene.resume()
    scene.up(W1, "b", room=0)
    scene.handle(export_failed())
    scene.report(W2, admitted(epoch=2), sampled(epoch=2, offset=3))
    scene.abort()
    scene.report(W2, parked(epoch=2, kv=8))
    scene.handle(exported(image(8, "c", node="n2"), epoch=2))
    assert scene.handle(exported(image(7, "late"))) == [retain(), retain("c", node="n2")]


def test_what_was_stored_though_its_export_was_said_to_fail_is_dropped_in_the_end() -> None:
    """The answer of a pool may get lost."""
    scene = suspending()
    scene.handle(export_failed())
    assert scene.abort(then=Then.FINISH) == [retain()]


def test_what_was_exported_too_late_is_dropped_from_the_pool() -> None:
    scene = suspending()
    scene.handle(export_failed())
    assert scene.handle(exported(image(7, "a", "b"))) == [retain()]
    assert scene.record().pooled.image is None


def test_what_was_exported_too_late_does_not_cost_the_image_in_use() -> None:
    scene = resumed()
    scene.report(W1, admitted(epoch=2, restored=7), sampled(epoch=2, offset=3))
    scene.abort()
    scene.report(W1, parked(epoch=2, kv=8))
    scene.handle(export_failed(epoch=2))
    assert scene.handle(exported(image(8, "a", "late"), epoch=2)) == [retain("a", "b")]
    assert scene.record().pooled.image == image(7, "a", "b")


# Workers ------------------------------------------------------------------------------------------


def test_nothing_starts_before_a_worker_is_up() -> None:
    scene = Scene(size=1)
    assert scene.submit(n=2) == []
    assert scene.controller.phases == {Phase.QUEUED: 2}
    assert starts(scene.up(W1, room=1)) == [(W1, T, 1)]
    assert scene.controller.phases == {Phase.PREFILLING: 1, Phase.QUEUED: 1}


@pytest.mark.parametrize(
    "events",
    [
        (),
        (admitted(),),
        (admitted(), sampled(count=3)),
        (admitted(), sampled(count=3), preempted()),
    ],
    ids=["started", "prefilling", "decoding", "preempted"],
)
def test_a_lost_worker_costs_no_token_and_the_work_continues_elsewhere(events: tuple[WorkerEvent, ...]) -> None:
    """Case F2."""
    scene = Scene(W1)
    scene.submit()
    scene.report(W1, *events)
    scene.up(W2)
    again = only_start(scene.down(W1))
    known = len(scene.record().columns)
    assert (again.worker, again.assignment.epoch) == (W2, 2)
    assert (again.assignment.output, again.assignment.image) == (columns(0, known), None)
    assert again.assignment.kv_tokens == (len(PROMPT) + known - 1 if known else 0)
    scene.report(W2, admitted(epoch=2), sampled(epoch=2, offset=known, count=8 - known), finished(epoch=2))
    trajectory = only_trajectory(scene)
    assert (trajectory.output_ids, trajectory.workers) == (tuple(range(100, 108)), (W1, W2))
    counters = scene.controller.counters
    assert (counters.workers_lost, counters.restarts, counters.resumes) == (1, 1, 0)
    assert (counters.suspensions, trajectory.suspensions) == (0, 0)


@pytest.mark.parametrize("restored", [False, True])
def test_a_worker_lost_after_a_resume_is_continued_from_the_last_image(restored: bool) -> None:
    """Case F2, mid-restore and mid-decode."""
    scene = resumed()
    if restored:
        scene.report(W1, admitted(epoch=2, restored=7), sampled(epoch=2, offset=3, count=2))
    scene.up(W2)
    again = only_start(scene.down(W1)).assignment
    assert (again.epoch, again.image) == (3, image(7, "a", "b"))
    assert again.output == columns(0, 5 if restored else 3)
    assert again.kv_tokens == (9 if restored else 7)
    assert scene.phase() is Phase.RESTORING
    counters = scene.controller.counters
    assert (counters.resumes, counters.restarts) == (1, 1)


def test_a_worker_lost_during_the_export_waits_for_the_pools_answer() -> None:
    """Case F2, mid-export."""
    scene = suspending()
    assert scene.down(W1) == []
    assert scene.phase() is Phase.SUSPENDING
    scene.resume()
    commands = scene.handle(export_failed())
    assert commands[0] == release()
    assert starts(commands) == [(W2, T, 2)]
    counters = scene.controller.counters
    assert (counters.resumes, counters.restarts) == (1, 0)


@pytest.mark.parametrize(
    ("then", "phase"), [(Then.HOLD, Phase.SUSPENDED), (Then.FINISH, Phase.FINISHED), (Then.REQUEUE, Phase.PREFILLING)]
)
def test_an_abort_takes_effect_though_the_worker_was_lost_before_the_park(then: Then, phase: Phase) -> None:
    scene = decoding()
    scene.abort(then=then)
    scene.down(W1)
    assert scene.phase() is phase
    assert scene.record().columns == columns(0, 3)
    if then is Then.FINISH:
        assert only_trajectory(scene).finish_reason is FinishReason.ABORT


def test_what_is_held_is_not_touched_by_a_lost_worker() -> None:
    scene = suspended()
    assert scene.down(W1) == []
    assert scene.phase() is Phase.SUSPENDED
    again = only_start(scene.resume())
    assert (again.worker, again.assignment.image) == (W2, image(7, "a", "b"))
    assert scene.controller.counters.restarts == 0


def test_a_resume_after_a_restart_is_a_resume_again() -> None:
    scene = decoding()
    assert starts(scene.down(W1)) == [(W2, T, 2)]
    scene.report(W2, admitted(epoch=2), sampled(epoch=2, offset=3))
    scene.abort(then=Then.REQUEUE)
    scene.report(W2, parked(epoch=2, kv=8))
    assert starts(scene.handle(exported(image(8, "a"), epoch=2))) == [(W2, T, 3)]
    counters = scene.controller.counters
    assert (counters.restarts, counters.resumes, counters.resumed_elsewhere) == (1, 1, 0)


def test_a_worker_that_says_it_is_up_twice_is_the_same_worker() -> None:
    scene = decoding()
    before = state(scene)
    assert scene.up(W1) == []
    assert state(scene) == before
    assert scene.controller.counters.workers_lost == 0


def test_a_worker_that_is_up_again_as_another_process_has_lost_what_it_ran() -> None:
    scene = decoding(worker_count=1)
    assert starts(scene.up(W1, "b")) == [(W1, T, 2)]
    assert scene.controller.counters.workers_lost == 1
    assert scene.report(W1, sampled(offset=3), finished()) == []
    assert scene.report(W1, sampled(epoch=2, offset=3), finished(epoch=2), incarnation="a") == []
    scene.report(W1, admitted(epoch=2), sampled(epoch=2, offset=3), finished(epoch=2), incarnation="b")
    assert only_trajectory(scene).output_ids == (100, 101, 102, 103)


def test_a_loss_that_is_told_twice_or_late_changes_nothing() -> None:
    scene = decoding()
    assert starts(scene.down(W1)) == [(W2, T, 2)]
    assert scene.down(W1) == []
    scene.up(W1, "b")
    assert scene.down(W1, "a") == []
    scene.submit("other")
    assert scene.record(TrajectoryId("other/0")).worker == W1
    assert scene.controller.counters.workers_lost == 1


def test_a_final_loss_that_is_told_late_does_not_give_up_the_process_that_followed() -> None:
    scene = decoding(worker_count=1)
    scene.down(W1)
    scene.up(W1, "b")
    assert scene.down(W1, "a", final=True) == []
    scene.submit("other")
    assert scene.phase(TrajectoryId("other/0")) is Phase.PREFILLING


def test_a_worker_that_never_came_up_can_be_given_up() -> None:
    scene = Scene(size=1)
    scene.submit()
    scene.down(W1, "never", final=True)
    trajectory = only_trajectory(scene)
    assert (trajectory.finish_reason, trajectory.error) == (
        FinishReason.ERROR,
        "no worker is left: w1: w1 was killed",
    )


def test_when_the_last_worker_is_lost_for_good_all_that_waits_fails_and_is_delivered() -> None:
    """Case E2."""
    scene = Scene(W1, W2, room=1)
    scene.submit(n=3)
    scene.submit("h")
    assert scene.down(W2, final=True) == []
    assert scene.controller.complete_groups == 0
    scene.report(W1, sampled(count=2))
    scene.down(W1, final=True)
    deliveries = scene.take(9)
    assert [delivery.group_id for delivery in deliveries] == ["g", "h"]
    everyone = [trajectory for delivery in deliveries for trajectory in delivery.trajectories]
    assert [t.finish_reason for t in everyone] == [FinishReason.ERROR] * 4
    assert {t.error for t in everyone} == {"no worker is left: w2: w2 was killed; w1: w1 was killed"}
    assert everyone[0].output_ids == (100, 101)
    assert scene.controller.phases == {}


def test_what_comes_or_is_resumed_after_the_last_worker_is_lost_fails_at_once() -> None:
    scene = suspended(worker_count=1)
    scene.down(W1, final=True)
    assert scene.phase() is Phase.SUSPENDED
    assert scene.resume() == [retain()]
    assert only_trajectory(scene).finish_reason is FinishReason.ERROR
    assert scene.submit("late") == []
    assert only_trajectory(scene).error == "no worker is left: w1: w1 was killed"


def test_an_export_that_ends_after_the_last_worker_is_lost_fails_what_it_would_requeue() -> None:
    scene = suspending(worker_count=1)
    scene.resume()
    scene.down(W1, final=True)
    scene.handle(exported(image(7, "a")))
    assert only_trajectory(scene).output_ids == (100, 101, 102)
    assert scene.retained == {}


def test_a_worker_that_cannot_run_a_trajectory_fails_that_one_only() -> None:
    scene = Scene(W1, room=2)
    scene.submit(n=3)
    third = TrajectoryId("g/2")
    assert starts(scene.report(W1, failed(), sampled(U))) == [(W1, third, 1)]
    assert (scene.phase(T), scene.phase(U)) == (Phase.FAILED, Phase.DECODING)
    scene.report(W1, finished(U), finished(third))
    (delivery,) = scene.take(1)
    assert [(t.finish_reason, t.error) for t in delivery.trajectories] == [
        (FinishReason.ERROR, "PromptTooLongError: 5 tokens"),
        (FinishReason.STOP, None),
        (FinishReason.STOP, None),
    ]


# Groups -------------------------------------------------------------------------------------------


def test_a_key_in_use_is_refused_and_starts_nothing() -> None:
    scene = Scene(W1)
    scene.submit()
    with pytest.raises(DuplicateKeyError):
        scene.submit(n=2)
    assert scene.trajectories == [T]
    assert scene.controller.counters.trajectories == 1


def test_finished_groups_are_taken_in_the_order_they_finished_and_forgotten() -> None:
    scene = Scene(W1)
    for group in ("a", "b", "c"):
        scene.submit(group)
    for group in ("c", "a"):
        scene.report(W1, finished(TrajectoryId(f"{group}/0")))
    assert (scene.controller.complete_groups, scene.controller.coming_groups) == (2, 3)
    assert [delivery.group_id for delivery in scene.take(1)] == ["c"]
    assert (scene.controller.complete_groups, scene.controller.coming_groups) == (1, 2)
    assert [delivery.group_id for delivery in scene.take(9)] == ["a"]
    assert scene.controller.resolve(["c/0"]) == ([], (TrajectoryId("c/0"),))
    assert scene.trajectories == [TrajectoryId("b/0")]
    assert scene.controller.phases == {Phase.PREFILLING: 1}


def test_pages_freed_for_a_trajectory_that_was_handed_out_already_are_counted() -> None:
    scene = decoding()
    scene.abort(then=Then.FINISH)
    scene.report(W1, parked(kv=7))
    only_trajectory(scene)
    scene.report(W1, freed(exclusive=3, freed=2))
    counters = scene.controller.counters
    assert (counters.releases, counters.exclusive_pages, counters.freed_pages) == (1, 3, 2)
