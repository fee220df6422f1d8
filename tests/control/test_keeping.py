"""Decisions on the running controller: what it does with the KV of what stops, by what was told to it, and why."""

import math

import pytest

from rollout.control.commands import Command, Export, KeepThere, Release
from rollout.control.keeping import PROBE_EVERY, REMEMBERED
from rollout.control.messages import Parked, WorkerFacts
from rollout.metrics import Choice, Decision, ServiceStats
from rollout.types import AbortReason, Keep, Then, TrajectoryId
from tests.control.stage import W1, W2, Stage, facts, member, pace
from tests.weights import WEIGHTS, written

A = member("a")
FAST = facts(save=pace(0.001), load=pace(0.001), restore=pace(0.01))
"""A millisecond for each copy on the worker, and for each token of prefill; ten for one from the pool."""
FULL = facts(free=0, save=pace(0.001), load=pace(0.001), restore=pace(0.01))
"""Likewise, with no page free."""


def stage_with(known: WorkerFacts | None, tokens: int = 100, **options: object) -> Stage:
    """A stage on which a decodes on w1, and the cost model decides."""
    stage = Stage(W1, keep="auto", **options)  # type: ignore[arg-type]
    run(stage, A, tokens)
    stage.report(W1, facts=known)
    return stage


def run(stage: Stage, t: TrajectoryId, tokens: int = 100) -> None:
    stage.submit(t.partition("/")[0], budget=4000)
    stage.admit(t)
    stage.sample(t, tokens)


def kept(stage: Stage, t: TrajectoryId = A, **fields: object) -> Keep:
    """Where its KV is sent when it is aborted."""
    before = len(stage.commands)
    stage.abort(t)
    stage.park(t, **fields)  # type: ignore[arg-type]
    return where(stage.commands[before + 1 :])


def where(commands: list[Command]) -> Keep:
    for command in commands:
        match command:
            case KeepThere():
                return command.where
            case Export():
                return Keep.POOL
            case Release():
                return Keep.NONE
    raise AssertionError(commands)


def last(stage: Stage) -> Decision:
    return stage.controller.keeping.last[-1]


def given_up(stage: Stage, count: int) -> None:
    """So many are held and then discarded."""
    for number in range(count):
        t = member(f"vain{number}")
        run(stage, t, 1)
        stage.hold(t, keep=Keep.NONE)
        stage.discard(t)


# The choice ---------------------------------------------------------------------------------------


def test_with_pages_free_it_stays_on_the_device() -> None:
    assert kept(stage_with(FAST)) is Keep.DEVICE


def test_with_no_page_free_it_goes_where_a_copy_is_cheaper_than_computing() -> None:
    assert kept(stage_with(FULL)) is Keep.HOST


def test_with_no_room_on_the_host_it_goes_to_the_pool() -> None:
    assert kept(stage_with(facts(free=0, host_free=50, restore=pace(0.001)))) is Keep.POOL


def test_with_no_room_anywhere_nothing_is_saved() -> None:
    stage = stage_with(facts(free=0, host_free=50))
    stage.room(W1, free=0, budget=1000)
    assert kept(stage) is Keep.NONE
    assert last(stage).costs_s[Keep.POOL] == math.inf


def test_a_short_context_is_not_saved() -> None:
    slow = facts(free=0, save=pace(0.02), load=pace(0.02), restore=pace(0.2))
    assert kept(stage_with(slow, tokens=5)) is Keep.NONE, "8 ms against 40"
    assert kept(stage_with(slow, tokens=100)) is Keep.HOST, "103 ms against 40"


def test_what_is_unlikely_to_return_is_not_saved() -> None:
    """Computing takes 103 ms; saving 2 on the host, and as much to bring it back: it pays above 2 %."""
    slow = facts(free=0, save=pace(0.05), load=pace(0.001), restore=pace(1.0))
    likely, unlikely = stage_with(slow), stage_with(slow)
    given_up(likely, 5)
    given_up(unlikely, 8)
    assert 0.9**5 * 0.103 > 0.05 + 0.9**5 * 0.001
    assert 0.9**8 * 0.103 < 0.05 + 0.9**8 * 0.001
    assert kept(likely) is Keep.HOST
    assert kept(unlikely) is Keep.NONE


def test_what_returns_after_the_next_update_is_not_saved() -> None:
    def stage_after(seconds: float) -> Stage:
        """With an update every 10 s, the last `seconds` ago, and holds of 4 s."""
        stage = stage_with(FULL)
        stage.live(1)
        stage.wait(6.0)
        stage.hold(A, keep=Keep.NONE)
        stage.wait(4.0)
        stage.resume(A)
        stage.live(2)
        stage.wait(seconds)
        return stage

    assert kept(stage_after(5.0)) is Keep.HOST
    stage = stage_after(7.0)
    assert kept(stage) is Keep.NONE
    assert (last(stage).likely, last(stage).wait_s) == (0.0, 4.0)


def test_what_siblings_still_keep_in_the_prefix_tree_is_not_counted() -> None:
    def cost_of_nothing(n: int) -> float:
        stage = Stage(W1, keep="auto")
        stage.submit("a", n, prompt=range(60), budget=4000)
        stage.report(W1, facts=FULL)
        stage.sample(A, 11)
        kept(stage)
        return last(stage).costs_s[Keep.NONE]

    assert cost_of_nothing(1) == pytest.approx(0.070)
    assert cost_of_nothing(2) == pytest.approx(0.010)


def test_a_pool_that_was_measured_slow_is_used_no_more() -> None:
    """It was never measured, and so it is tried first."""
    stage = stage_with(facts(free=0, host_free=0))
    assert kept(stage) is Keep.POOL
    stage.answer_all(sent=103_000, seconds=9.0)
    stage.resume(A)
    assert kept(stage) is Keep.NONE


def test_facts_of_the_report_that_tells_of_the_park_count() -> None:
    stage = stage_with(FAST)
    stage.abort(A)
    parked = Parked(trajectory_id=A, epoch=1, kv_tokens=103, prompt_pages=1, page_keys=(), written=written(103))
    assert where(stage.report(W1, parked, facts=FULL)) is Keep.HOST


def test_what_is_stopped_before_its_image_was_read_keeps_that() -> None:
    """Case A1: it left the batch without KV of its own."""
    stage = stage_with(facts(free=0, host_free=0))
    assert kept(stage) is Keep.POOL
    stage.answer_all()
    image = stage.record(A).pooled.image
    assert image is not None
    stage.resume(A)
    assert kept(stage, kv=0) is Keep.NONE, "there is nothing to move"
    assert stage.record(A).pooled.image == image
    assert (last(stage).keep, last(stage).by) == (Keep.POOL, Choice.TOLD)


def test_of_what_never_had_kv_nothing_is_decided() -> None:
    stage = Stage(W1, keep="auto")
    stage.submit("a")
    assert kept(stage, kv=0) is Keep.NONE
    assert last(stage).costs_s == {}


@pytest.mark.parametrize("then", [Then.FINISH, Then.DROP, Then.RETRY])
@pytest.mark.parametrize("keep", Keep)
def test_the_kv_of_what_does_not_go_on_with_it_is_kept_nowhere_and_so_it_is_told(keep: Keep, then: Then) -> None:
    stage = stage_with(FAST)
    stage.abort(A, keep=keep, then=then)
    assert where(stage.park(A)) is Keep.NONE
    assert (last(stage).keep, last(stage).then) == (Keep.NONE, then)


# What is remembered -------------------------------------------------------------------------------


def test_a_decision_is_remembered_with_what_the_others_would_have_cost() -> None:
    stage = stage_with(facts(free=0, save=pace(0.02), load=pace(0.03), restore=pace(0.04)))
    stage.room(W1, free=1_000_000, budget=1_000_000)
    assert kept(stage) is Keep.POOL
    assert last(stage) == Decision(
        trajectory_id=A,
        reason=AbortReason.DRIVER,
        then=Then.HOLD,
        keep=Keep.POOL,
        by=Choice.MODEL,
        costs_s={
            Keep.DEVICE: math.inf,
            Keep.HOST: pytest.approx(0.05),  # type: ignore[dict-item]
            Keep.POOL: pytest.approx(0.04),  # type: ignore[dict-item]
            Keep.NONE: pytest.approx(0.103),  # type: ignore[dict-item]
        },
        kv_tokens=103,
        likely=1.0,
        wait_s=0.0,
    )
    told = str(last(stage))
    for part in ("a/0", "driver", "hold", "103 tokens", "pool", "model", "host 50.0 ms", "none 103.0 ms"):
        assert part in told


def test_who_was_told_where_to_keep_it_has_no_alternatives() -> None:
    stage = stage_with(FAST)
    stage.abort(A, keep=Keep.HOST)
    stage.park(A)
    assert (last(stage).keep, last(stage).by, last(stage).costs_s) == (Keep.HOST, Choice.TOLD, {})


def test_decisions_are_counted_by_reason_and_the_last_are_remembered() -> None:
    stage = stage_with(FAST, policies=[{"kind": "slice_budget", "tokens": 1, "keep": "none"}])
    for _ in range(REMEMBERED + 5):
        stage.sample(A)
        stage.park(A, AbortReason.SLICE_BUDGET)
    stage.abort(A, keep=Keep.HOST)
    stage.park(A)
    keeping = stage.controller.keeping
    assert keeping.counts == {
        AbortReason.DRIVER: {Keep.HOST: 1},
        AbortReason.SLICE_BUDGET: {Keep.NONE: REMEMBERED + 5},
    }
    assert (keeping.made, len(keeping.last)) == (REMEMBERED + 6, REMEMBERED)
    assert keeping.last[-1].reason is AbortReason.DRIVER


# Probes -------------------------------------------------------------------------------------------


def decisions(stage: Stage, count: int) -> list[tuple[Keep, Choice]]:
    """Of so many suspensions of a, each without a new token."""
    made: list[tuple[Keep, Choice]] = []
    for _ in range(count):
        kept(stage)
        made.append((last(stage).keep, last(stage).by))
        stage.answer_all()
        stage.resume(A)
        stage.admit(A)
    return made


def test_a_place_that_costs_a_little_more_is_tried_now_and_then() -> None:
    """The pool costs 3 ms and the host 2; computing 103."""
    stage = stage_with(facts(free=0, save=pace(0.001), load=pace(0.001), restore=pace(0.003)))
    made = decisions(stage, 2 * PROBE_EVERY)
    probes = [index for index, choice in enumerate(made) if choice == (Keep.POOL, Choice.PROBE)]
    assert probes == [PROBE_EVERY - 1, 2 * PROBE_EVERY - 1]
    assert all(choice == (Keep.HOST, Choice.MODEL) for index, choice in enumerate(made) if index not in probes)


def test_a_place_that_costs_more_than_twice_as_much_is_never_tried() -> None:
    stage = stage_with(facts(free=0, save=pace(0.001), load=pace(0.001), restore=pace(0.005)))
    assert set(decisions(stage, 3 * PROBE_EVERY)) == {(Keep.HOST, Choice.MODEL)}


# Bytes --------------------------------------------------------------------------------------------


def ratio(stage: Stage) -> float | None:
    return ServiceStats(weights=WEIGHTS, phases={}, counters=stage.controller.counters).useful_reload_ratio


def test_where_nothing_was_written_there_is_no_ratio() -> None:
    assert ratio(stage_with(FAST)) is None


def test_the_ratio_is_of_bytes_read_back_to_bytes_written() -> None:
    """Of two images of 103 tokens and kB, one is restored whole, the other discarded."""
    stage = stage_with(FAST)
    run(stage, member("b"))
    stage.hold(member("b"), keep=Keep.HOST)
    stage.abort(A, keep=Keep.POOL)
    stage.answer_all(sent=103_000)
    assert (stage.controller.counters.written_bytes, ratio(stage)) == (206_000, 0.0)
    stage.resume(A)
    stage.admit(A, restored=103)
    stage.discard(member("b"))
    assert (stage.controller.counters.read_bytes, ratio(stage)) == (103_000, 0.5)


def test_what_is_loaded_from_the_host_is_read_back() -> None:
    stage = stage_with(FAST)
    stage.hold(A, keep=Keep.HOST)
    stage.resume(A)
    stage.admit(A, loaded=103)
    assert ratio(stage) == 1.0


def test_what_a_prompt_finds_on_the_host_was_not_written_by_a_suspension_and_is_not_read_back() -> None:
    stage = stage_with(FAST)
    stage.hold(A, keep=Keep.HOST)
    stage.submit("b")
    stage.admit(member("b"), loaded=4)
    assert ratio(stage) == 0.0


def test_what_stays_on_the_host_is_not_written_again() -> None:
    """The pool is full: it is kept where it was."""
    stage = stage_with(FAST)
    stage.hold(A, keep=Keep.HOST)
    before = stage.controller.counters.written_bytes
    stage.abort(A, keep=Keep.POOL)
    stage.answer_all(pool_is_full=True)
    assert stage.controller.suspended == {"host": 1}
    assert stage.controller.counters.written_bytes == before


def test_two_workers_have_facts_of_their_own() -> None:
    stage = Stage(W1, W2, keep="auto")
    for group in ("a", "b"):
        run(stage, member(group))
    places = {}
    for worker, known in ((W1, FAST), (W2, FULL)):
        stage.report(worker, facts=known)
    for group in ("a", "b"):
        places[stage.record(member(group)).worker] = kept(stage, member(group))
    assert places == {W1: Keep.DEVICE, W2: Keep.HOST}
