"""What an update of the weights does to trajectories, from its announcement to its end, in every mode.

What becomes of KV that other weights wrote is in `test_versions.py`, what a result says of it in `test_spans.py`.
"""

from itertools import permutations

import pytest

from rollout.control.commands import Export, Pause, Unpause
from rollout.control.messages import Parked, Tick
from rollout.types import AbortReason, Keep, KVSpan, Phase, Then, UpdateMode, Version
from tests.control.stage import PROMPT, W1, W2, Stage, member, start_of, started, stopped
from tests.weights import WEIGHTS, loaded, written

A, B, C = member("a"), member("b"), member("c")
PAUSING = pytest.mark.parametrize("mode", [UpdateMode.RECOMPUTE, UpdateMode.IN_PLACE])
EMPTYING = pytest.mark.parametrize("mode", [UpdateMode.SUSPEND, UpdateMode.FINISH])
ANY = pytest.mark.parametrize("mode", list(UpdateMode))
STALE = {"kv_reuse": {"kind": "stale", "max_lag": 1}}


def decoding(**options: object) -> Stage:
    """A stage on which `A` decodes on w1 and has sampled three tokens."""
    stage = Stage(W1, **options)  # type: ignore[arg-type]
    stage.submit("a")
    stage.admit(A)
    stage.sample(A, 3)
    return stage


def clear(stage: Stage, mode: UpdateMode) -> bool:
    return stage.controller.clear_for_update(mode)


# Paused for it ------------------------------------------------------------------------------------


@PAUSING
def test_workers_are_paused_while_weights_are_replaced_and_run_again_after(mode: UpdateMode) -> None:
    stage = decoding(weights=STALE)
    stage.up(W2)
    assert stage.announce(1) == []
    assert stage.phase(A) is Phase.DECODING
    assert stage.begin_update(mode) == [Pause(worker=W1), Pause(worker=W2)]
    assert (stage.phase(A), clear(stage, mode)) == (Phase.PAUSED, True)
    assert started(stage.submit("b")) == []
    assert stage.live(1) == []
    assert stage.controller.weights == loaded(1)
    after = stage.end_update()
    assert after[:2] == [Unpause(worker=W1), Unpause(worker=W2)]
    assert [t for _, t in started(after)] == [B]
    assert stage.phase(A) is Phase.DECODING


def test_what_is_recomputed_stays_on_its_worker_and_does_not_count_as_preempted() -> None:
    stage = decoding()
    stage.begin_update(UpdateMode.RECOMPUTE)
    assert stage.preempt(A, outdated=True) == []
    assert stage.phase(A) is Phase.PAUSED
    stage.live(1)
    stage.end_update()
    assert stage.phase(A) is Phase.PREEMPTED
    stage.admit(A)
    stage.sample(A, 2, version=1)
    stage.finish(A)
    result = stage.take_one()
    assert [(run.version, run.tokens) for run in result.versions] == [(0, 3), (1, 2)]
    assert (result.suspensions, result.resumes, result.workers) == (0, (), (W1,))
    assert stage.controller.counters.preemptions == 0


def test_pages_that_run_out_count_as_a_preemption_and_weights_that_change_do_not() -> None:
    stage = decoding()
    stage.preempt(A)
    stage.admit(A)
    stage.preempt(A, outdated=True)
    stage.admit(A)
    stage.preempt(A, outdated=True)
    assert stage.controller.counters.preemptions == 1


def test_in_place_all_go_on_where_they_were() -> None:
    stage = decoding(weights=STALE)
    commands = [*stage.begin_update(UpdateMode.IN_PLACE), *stage.live(1), *stage.end_update()]
    assert commands == [Pause(worker=W1), Unpause(worker=W1)]
    before = stage.controller.counters
    stage.sample(A, 2, version=1)
    stage.finish(A)
    result = stage.take_one()
    assert [(run.version, run.tokens) for run in result.versions] == [(0, 3), (1, 2)]
    assert result.suspensions == 0
    assert stage.controller.counters.recomputed_tokens == before.recomputed_tokens == 0


# Emptied for it -----------------------------------------------------------------------------------


def test_what_runs_is_suspended_first_and_goes_on_after() -> None:
    stage = decoding()
    stage.submit("b")
    commands = stage.begin_update(UpdateMode.SUSPEND)
    assert sorted(stopped(commands)) == [A, B]
    assert len(commands) == 2
    assert not clear(stage, UpdateMode.SUSPEND)
    stage.answer_all()
    assert stage.phases("a", "b") == [Phase.QUEUED, Phase.QUEUED]
    assert clear(stage, UpdateMode.SUSPEND)
    assert stage.record(A).abort_reason is AbortReason.WEIGHTS
    stage.live(1)
    assert [t for _, t in started(stage.end_update())] == [A, B]
    assert (stage.record(A).suspensions, stage.record(A).abort_reason) == (1, None)


def test_suspending_waits_for_transfers_and_not_only_for_an_empty_batch() -> None:
    stage = decoding()
    stage.begin_update(UpdateMode.SUSPEND)
    (order,) = stage.park(A)
    assert isinstance(order, Export)
    assert (stage.running, clear(stage, UpdateMode.SUSPEND)) == (set(), False)
    stage.handle(stage.exported(order))
    assert clear(stage, UpdateMode.SUSPEND)


def test_suspending_waits_for_what_an_abort_has_on_the_move_already() -> None:
    stage = decoding(keep="host")
    stage.abort(A, then=Then.HOLD)
    stage.park(A)
    assert stage.begin_update(UpdateMode.SUSPEND) == []
    assert not clear(stage, UpdateMode.SUSPEND)
    stage.answer_all()
    assert clear(stage, UpdateMode.SUSPEND)
    stage.live(1)
    assert stage.end_update() == []
    assert stage.phase(A) is Phase.SUSPENDED


def test_a_lost_worker_leaves_nothing_to_wait_for() -> None:
    stage = decoding()
    stage.begin_update(UpdateMode.SUSPEND)
    assert not clear(stage, UpdateMode.SUSPEND)
    stage.down(W1)
    assert (stage.phase(A), clear(stage, UpdateMode.SUSPEND)) == (Phase.QUEUED, True)


def test_what_runs_ends_first_and_nothing_starts_until_then() -> None:
    stage = decoding(room=2)
    stage.submit("b")
    assert stage.begin_update(UpdateMode.FINISH) == []
    assert stage.submit("c") == []
    assert stage.finish(A, 2) == []
    assert not clear(stage, UpdateMode.FINISH)
    assert stage.finish(B, 2) == []
    assert clear(stage, UpdateMode.FINISH)
    assert stage.live(1) == []
    assert started(stage.end_update()) == [(W1, C)]


def test_what_is_sliced_while_others_end_waits_with_its_kv() -> None:
    stage = decoding(policies=[{"kind": "slice_budget", "tokens": 3}])
    stage.begin_update(UpdateMode.FINISH)
    stage.park(A, AbortReason.SLICE_BUDGET)
    stage.answer_all()
    assert (stage.phase(A), clear(stage, UpdateMode.FINISH)) == (Phase.QUEUED, True)
    assert start_of(stage.end_update(), A).assignment.image is not None


@EMPTYING
def test_kv_is_not_brought_to_a_worker_during_an_update_that_empties_it(mode: UpdateMode) -> None:
    stage = decoding()
    stage.hold(A)
    stage.begin_update(mode)
    stage.abort(A, keep=Keep.HOST)
    assert (stage.phase(A), clear(stage, mode)) == (Phase.QUEUED, True)
    assert start_of(stage.end_update(), A).assignment.watch.only_loads


def test_evaluation_takes_nobodys_place_during_an_update() -> None:
    stage = decoding(room=1)
    stage.begin_update(UpdateMode.FINISH)
    assert stage.evaluate("e") == []
    assert stopped(stage.end_update()) == [A]


@EMPTYING
def test_time_in_which_an_update_lets_nothing_start_is_no_stall(mode: UpdateMode) -> None:
    stage = Stage(W1)
    stage.begin_update(mode)
    stage.submit("a")
    stage.wait(100.0)
    assert (stage.controller.busy, stage.controller.stalled_s(stage.now)) == (True, 0.0)
    stage.end_update()
    stage.wait(7.0)
    assert stage.controller.stalled_s(stage.now) == 7.0


# Before, during and in spite of it ----------------------------------------------------------------


def test_what_would_be_too_stale_is_stopped_when_an_update_is_announced() -> None:
    stage = decoding(policies=[{"kind": "stale", "behind": 2, "then": "finish"}], weights=STALE)
    assert stage.announce(1) == []
    assert stopped(stage.announce(2)) == [A]
    assert stage.controller.weights == WEIGHTS
    stage.answer_all()
    assert stage.take_one().abort_reason is AbortReason.STALE


@ANY
def test_an_update_alone_aborts_nothing(mode: UpdateMode) -> None:
    """Case D4. What waits for the mode to be over is stopped for that only, and goes on."""
    stage = decoding(weights=STALE, keep="device")
    stage.submit("b", 2)
    stage.hold(member("b", 0))
    stage.hold(member("b", 1), keep=Keep.POOL)
    held = stage.phases("b")
    commands = [*stage.announce(1), *stage.live(1), *stage.announce(2)]
    assert commands == []
    commands = stage.begin_update(mode)
    assert all(isinstance(each, Pause) for each in commands) or stopped(commands) == [A]
    assert stage.phases("b") == held
    stage.end_update()
    stage.answer_all()
    stage.handle(Tick())
    assert A in stage.running
    assert stage.controller.accounts().dropped == {}


def test_a_pause_without_an_update_computes_nothing_again() -> None:
    """Case D3."""
    stage, never = decoding(), decoding()
    assert stage.pause() == [Pause(worker=W1)]
    assert stage.unpause() == [Unpause(worker=W1)]
    for each in (stage, never):
        each.sample(A, 3)
        each.finish(A)
    assert stage.controller.counters == never.controller.counters
    result, same = stage.take_one(), never.take_one()
    assert result == same
    assert result.kv_spans == (KVSpan(first=len(PROMPT), stop=len(PROMPT) + 6, kv=((0, len(PROMPT), Version(0)),)),)


@pytest.mark.parametrize("mode", [None, *UpdateMode])
@pytest.mark.parametrize("order", sorted(set(permutations(["pause", "unpause", "begin", "end"]))))
def test_workers_run_when_neither_a_driver_nor_an_update_has_them_paused(
    order: tuple[str, ...], mode: UpdateMode | None
) -> None:
    """Case D5: what a driver asks for during an update is obeyed after it."""
    stage = decoding(keep="none")
    by: set[str] = set()
    for call in order:
        before = bool(by)
        match call:
            case "pause":
                commands = stage.pause()
                by.add("driver")
            case "unpause":
                commands = stage.unpause()
                by.discard("driver")
            case "begin":
                commands = stage.begin_update(mode) if mode is not None else []
                by |= {"update"} if mode in (UpdateMode.RECOMPUTE, UpdateMode.IN_PLACE) else set()
            case _:
                commands = stage.end_update() if mode is not None else []
                by.discard("update")
        told = [each for each in commands if isinstance(each, Pause | Unpause)]
        changed = [Pause(worker=W1) if by else Unpause(worker=W1)] if bool(by) != before else []
        assert told == changed
        assert (stage.phase(A) is Phase.PAUSED) == bool(by)


def test_aborts_take_effect_during_an_update() -> None:
    stage = decoding(weights=STALE)
    stage.begin_update(UpdateMode.IN_PLACE)
    ticket = stage.abort(A)
    stage.answer_all()
    assert (ticket.done, stage.phase(A)) == (True, Phase.SUSPENDED)
    stage.live(1)
    assert stage.end_update() == [Unpause(worker=W1)]


@PAUSING
def test_a_worker_that_comes_up_during_an_update_runs_no_step_until_it_is_over(mode: UpdateMode) -> None:
    """Case D6, the controller's part: it has the weights when it comes up."""
    stage = Stage(W1, size=2)
    stage.begin_update(mode)
    assert stage.up(W2) == [Pause(worker=W2)]
    stage.live(1)
    assert stage.end_update() == [Unpause(worker=W1), Unpause(worker=W2)]


@EMPTYING
def test_nothing_starts_on_a_worker_that_comes_up_during_an_update(mode: UpdateMode) -> None:
    stage = Stage(W1, size=2, room=1)
    stage.begin_update(mode)
    stage.submit("a", 2)
    assert stage.up(W2) == []
    assert len(started(stage.end_update())) == 2


@ANY
def test_a_worker_that_is_lost_during_an_update_loses_no_token(mode: UpdateMode) -> None:
    stage = decoding()
    stage.begin_update(mode)
    assert stage.down(W1) == []
    assert stage.phase(A) is Phase.QUEUED
    stage.live(1)
    stage.end_update()
    start = start_of(stage.up(W1, "b"), A)
    assert (len(start.assignment.output), start.assignment.image) == (3, None)


@ANY
def test_an_update_that_fails_leaves_everything_as_it_was(mode: UpdateMode) -> None:
    stage = decoding()
    stage.submit("b")
    stage.hold(B)
    image = stage.record(B).pooled.image
    stage.announce(1)
    stage.begin_update(mode)
    stage.end_update()
    stage.answer_all()
    assert stage.controller.weights == WEIGHTS
    assert stage.record(B).pooled.image == image is not None
    stage.sample(A, 1) if stage.phase(A) is Phase.DECODING else stage.admit(A, restored=6)
    stage.finish(A, 1)
    assert {run.version for run in stage.take_one().versions} == {0}


def test_weights_that_are_live_may_be_told_of_twice() -> None:
    stage = decoding(policies=[{"kind": "stale", "behind": 1, "then": "finish"}])
    assert stopped(stage.live(1)) == [A]
    assert stage.live(1) == []


def test_tokens_that_are_told_after_an_update_are_too_stale_at_once() -> None:
    stage = Stage(W1, policies=[{"kind": "stale", "behind": 1, "then": "finish"}])
    stage.submit("a")
    stage.admit(A)
    assert stage.live(1) == []
    assert stopped(stage.sample(A, 1, version=0)) == [A]


def test_one_that_is_being_stopped_for_an_update_may_be_aborted_for_good() -> None:
    stage = decoding()
    stage.begin_update(UpdateMode.SUSPEND)
    stage.abort(A, then=Then.FINISH)
    stage.answer_all()
    result = stage.take_one()
    assert (result.abort_reason, result.output_ids) == (AbortReason.DRIVER, (100, 101, 102))


def test_what_stopped_for_an_update_is_kept_where_the_configuration_says() -> None:
    stage = decoding(keep="host")
    stage.begin_update(UpdateMode.SUSPEND)
    stage.answer_all()
    assert stage.record(A).kept is Keep.HOST


def test_drained_workers_are_emptied_during_an_update_too() -> None:
    stage = decoding(size=2)
    stage.up(W2)
    stage.begin_update(UpdateMode.RECOMPUTE)
    assert stopped(stage.drain(W1)) == [A]
    stage.answer_all()
    assert stage.controller.is_retired(W1)
    assert started(stage.end_update()) == [(W2, A)]


def test_kv_of_newer_weights_takes_the_place_of_a_longer_image_of_older_ones() -> None:
    stage = Stage(W1, weights={"kv_reuse": {"kind": "stale", "max_lag": 1}})
    stage.submit("a")
    stage.admit(A)
    stage.sample(A, 20)
    stage.hold(A, keep=Keep.POOL)
    old = stage.record(A).pooled.image
    assert old is not None
    stage.live(1)
    stage.resume("a")
    stage.admit(A)
    new = written(old.kv_tokens, loaded(1))
    stage.abort("a", keep=Keep.POOL)
    stage.tell(A, Parked, kv_tokens=old.kv_tokens, prompt_pages=1, page_keys=(), written=new)
    stage.answer_all()
    image = stage.record(A).pooled.image
    assert image is not None
    assert image.written == new
