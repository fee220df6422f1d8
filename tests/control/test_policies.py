"""Every policy: fires when it should, not before, once; what it keeps and what comes then, by default and as told."""

import statistics
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.config import AbortConfig, Memory, SliceBudget
from rollout.control.commands import Command, Export, KeepThere, Release, RepetitionWatch, Stop, Watch
from rollout.types import AbortReason, FinishReason, Phase, Then, TrajectoryId
from tests.control.stage import W1, W2, Stage, member, start_of, started, stopped, submission

A, B = member("a"), member("b")
Policy = dict[str, Any]


def watch_of(stage: Stage, t: TrajectoryId = A) -> Watch:
    """As of its last start."""
    return start_of(stage.commands, t).assignment.watch


def decoding(*policies: Policy, tokens: int = 10, **options: Any) -> Stage:
    stage = Stage(W1, policies=policies, **options)
    stage.submit("a")
    stage.admit(A)
    stage.sample(A, tokens)
    return stage


# What is kept, and what comes then ------------------------------------------------------------------
#
# Each of these brings a, which decodes and has ten tokens, to the point where it is stopped.


def by_slice(policy: Policy) -> Stage:
    stage = decoding({"tokens": 10} | policy)
    assert watch_of(stage).slice_tokens == 10
    return stage


def by_length(policy: Policy) -> Stage:
    stage = decoding({"tokens": 10} | policy)
    assert watch_of(stage).most_tokens == 10
    return stage


def by_deadline(policy: Policy) -> Stage:
    stage = decoding({"seconds": 30.0} | policy)
    assert stopped(stage.wait(30.0)) == [A]
    return stage


def by_age(policy: Policy) -> Stage:
    stage = decoding({"behind": 1} | policy)
    assert stopped(stage.live(1)) == [A]
    return stage


def by_quota(policy: Policy) -> Stage:
    stage = decoding(policy)
    stage.submit("b")
    stage.collect(1, 1.0)
    assert stopped(stage.finish(B, 1)) == [A]
    return stage


def by_tail(policy: Policy) -> Stage:
    stage = Stage(W1, policies=[{"share": 0.5} | policy])
    stage.submit("a", 2)
    stage.sample(A, 10)
    assert stopped(stage.finish(member("a", 1), 1)) == [A]
    return stage


def by_memory(policy: Policy) -> Stage:
    return decoding(policy)


def by_loop(policy: Policy) -> Stage:
    stage = decoding(policy)
    assert watch_of(stage).repetition is not None
    return stage


BEGIN: dict[str, Callable[[Policy], Stage]] = {
    "slice_budget": by_slice,
    "over_long": by_length,
    "deadline": by_deadline,
    "stale": by_age,
    "quota": by_quota,
    "tail": by_tail,
    "memory": by_memory,
    "repetition": by_loop,
}
BY_WORKER = ("slice_budget", "over_long", "memory", "repetition")
DEFAULTS = {
    "slice_budget": ("auto", "requeue"),
    "over_long": ("auto", "hold"),
    "deadline": ("none", "finish"),
    "stale": ("none", "retry"),
    "quota": ("auto", "hold"),
    "tail": ("auto", "hold"),
    "memory": ("auto", "requeue"),
    "repetition": ("none", "finish"),
}


def end(stage: Stage, kind: str) -> list[Command]:
    return stage.park(A, AbortReason(kind) if kind in BY_WORKER else None)


def assert_kept(commands: list[Command], keep: str) -> None:
    put_away = [type(each) for each in commands if isinstance(each, Export | KeepThere | Release)]
    kinds = {"pool": Export, "device": KeepThere, "host": KeepThere, "none": Release}
    assert put_away == [kinds[keep]]
    assert [each.where for each in commands if isinstance(each, KeepThere)] == [keep] * (keep in ("device", "host"))


def assert_outcome(stage: Stage, then: str, kind: str) -> None:
    """Once workers and pools have done as they were told."""
    stage.answer_all()
    trajectory = stage.record(A).snapshot()
    phases = {"hold": Phase.SUSPENDED, "finish": Phase.FINISHED, "drop": Phase.DROPPED}
    again = (Phase.RESTORING, Phase.PREFILLING)
    assert stage.phase(A) is phases.get(then) or (then in ("requeue", "retry") and stage.phase(A) in again)
    assert len(trajectory.output_ids) == (0 if then == "retry" else 10)
    assert [(len(each.output_ids), each.reason) for each in trajectory.attempts] == [(10, kind)] * (then == "retry")
    ended = then in ("finish", "drop")
    assert trajectory.finish_reason is (FinishReason.ABORT if ended else None)
    assert trajectory.abort_reason == (None if then in ("requeue", "retry") else kind)


@pytest.mark.parametrize("kind", BEGIN)
def test_by_default(kind: str) -> None:
    keep, then = DEFAULTS[kind]
    stage = BEGIN[kind]({"kind": kind})
    assert_kept(end(stage, kind), "pool" if keep == "auto" else keep)  # the stage's own default
    decision = stage.controller.keeping.last[-1]
    assert (decision.reason, decision.then) == (kind, then)
    assert_outcome(stage, then, kind)


@pytest.mark.parametrize("keep", ["device", "host", "pool", "none"])
@pytest.mark.parametrize(
    ("kind", "then"),
    [(kind, then) for kind in BEGIN for then in Then if kind != "quota" or then is Then.HOLD],
)
def test_as_configured(kind: str, then: Then, keep: str) -> None:
    stage = BEGIN[kind]({"kind": kind, "keep": keep, "then": str(then)})
    assert_kept(end(stage, kind), keep if then in (Then.HOLD, Then.REQUEUE) else "none")
    assert_outcome(stage, then, kind)


def test_without_policies_nothing_is_watched_and_nothing_stops() -> None:
    stage = decoding(tokens=50)
    assert watch_of(stage) == Watch()
    stage.submit("b")
    stage.finish(B, 1)
    stage.live(9)
    stage.wait(1e9)
    assert stopped(stage.commands) == []


# Slices and what else a worker looks for ------------------------------------------------------------


def test_every_slice_is_as_long_as_the_first() -> None:
    stage = decoding({"kind": "slice_budget", "tokens": 10})
    for _ in range(3):
        stage.park(A, AbortReason.SLICE_BUDGET)
        stage.answer_all()
        assert watch_of(stage).slice_tokens == 10
        stage.sample(A, 10)
    assert stage.record(A).suspensions == 3


def test_what_workers_are_to_look_for_is_all_in_one_watch() -> None:
    stage = decoding(
        {"kind": "slice_budget", "tokens": 7},
        {"kind": "over_long", "tokens": 50},
        {"kind": "repetition", "ngram": 8, "times": 3, "min_tokens": 12},
        {"kind": "memory"},
        {"kind": "deadline", "seconds": 5.0},
    )
    loop = RepetitionWatch(ngram=8, times=3, min_tokens=12)
    assert watch_of(stage) == Watch(slice_tokens=7, most_tokens=50, repetition=loop)


@pytest.mark.parametrize(("kind", "field"), [("over_long", "most_tokens"), ("repetition", "repetition")])
def test_what_a_worker_saw_once_it_looks_for_no_more(kind: str, field: str) -> None:
    """Otherwise it would be stopped after every step."""
    stage = BEGIN[kind]({"kind": kind, "then": "requeue"})
    end(stage, kind)
    stage.answer_all()
    assert getattr(watch_of(stage), field) is None


def test_what_a_worker_saw_while_it_was_stopped_for_something_else_is_looked_for_again() -> None:
    stage = by_length({"kind": "over_long"})
    stage.abort(A, then=Then.REQUEUE)
    stage.park(A, AbortReason.OVER_LONG)
    stage.answer_all()
    assert watch_of(stage).most_tokens == 10


def test_a_configuration_has_one_policy_of_a_kind_or_none() -> None:
    config = AbortConfig.model_validate({"policies": ({"kind": "memory", "free_share": 0.2}, {"kind": "tail"})})
    policy = config.policy(Memory)
    assert policy is not None
    assert policy.free_share == 0.2
    assert config.policy(SliceBudget) is None


def test_memory_pressure_needs_no_policy_to_be_understood() -> None:
    stage = decoding()
    stage.park(A, AbortReason.MEMORY)
    assert_outcome(stage, "requeue", "memory")


# Over-long, by the others ---------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["group", "batch"])
@given(
    steps=st.lists(
        st.one_of(st.tuples(st.just("survivor"), st.integers(1, 9)), st.tuples(st.just("other"), st.integers(1, 20))),
        min_size=1,
        max_size=14,
    ),
    factor=st.sampled_from([1.5, 2.0, 3.0]),
    least=st.integers(1, 4),
)
@settings(deadline=None)
def test_it_is_stopped_at_the_first_token_or_end_that_makes_it_longer_than_allowed(
    of: str, steps: list[tuple[str, int]], factor: float, least: int
) -> None:
    """Against the median of a list."""
    policy = {"kind": "over_long", "factor": factor, "of": of, "min_finished": least}
    stage = Stage(W1, policies=[policy], room=99)
    count = sum(who == "other" for who, _ in steps)
    if of == "group":
        others = [member("a", i + 1) for i in range(count)]
        stage.submit("a", 1 + count, budget=1000)
    else:
        others = [member(f"g{i}") for i in range(count)]
        stage.submit_all(*(submission(name, budget=1000) for name in ("a", *(f"g{i}" for i in range(count)))))
    finished: list[int] = []
    length, fired = 0, False
    for who, tokens in steps:
        if who == "survivor":
            commands, length = stage.sample(A, tokens), length + tokens
        else:
            commands = stage.finish(others[len(finished)], tokens)
            finished.append(tokens)
        too_long = len(finished) >= least and length > factor * statistics.median(finished)
        assert (A in stopped(commands)) == (too_long and not fired)
        fired = fired or too_long


def test_members_of_other_batches_are_no_measure() -> None:
    stage = decoding({"kind": "over_long", "factor": 2.0, "of": "batch", "min_finished": 1}, tokens=50)
    stage.submit("b")
    stage.finish(B, 1)
    assert stopped(stage.commands) == []


def test_those_that_were_stopped_are_no_measure() -> None:
    """Neither those that were aborted nor those that failed had their length."""
    stage = Stage(W1, policies=[{"kind": "over_long", "factor": 2.0, "min_finished": 1}])
    stage.submit("a", 3)
    stage.sample(A, 50)
    stage.abort(member("a", 1), then=Then.FINISH)
    stage.answer_all()
    stage.fail(member("a", 2))
    assert A not in stopped(stage.commands)


def test_over_long_stops_once_however_long_it_becomes() -> None:
    stage = Stage(W1, policies=[{"kind": "over_long", "factor": 2.0, "min_finished": 1, "then": "requeue"}])
    stage.submit("a", 2)
    stage.finish(member("a", 1), 3)
    assert stopped(stage.sample(A, 6)) == []
    assert stopped(stage.sample(A)) == [A]
    assert stopped(stage.sample(A)) == [], "it is stopping"
    stage.answer_all()
    assert stage.running == {A}
    assert stopped(stage.sample(A, 50)) == []


# Deadlines ------------------------------------------------------------------------------------------


def test_a_deadline_passes_when_it_is_reached_and_once() -> None:
    stage = decoding({"kind": "deadline", "seconds": 10.0, "then": "requeue"})
    assert stage.wait(9.9) == []
    assert stopped(stage.wait(0.1)) == [A]
    stage.answer_all()
    assert stage.wait(100.0) == []


def test_a_submission_has_its_own_deadline_with_or_without_a_policy() -> None:
    for policies in ([], [{"kind": "deadline", "seconds": 10.0}]):
        stage = Stage(W1, policies=policies)
        stage.submit("a", deadline_s=3.0)
        stage.sample(A, 2)
        stage.wait(2.9)
        assert stopped(stage.commands) == []
        stage.wait(0.1)
        stage.answer_all()
        trajectory = stage.take_one()
        assert (trajectory.finish_reason, trajectory.abort_reason) == (FinishReason.ABORT, AbortReason.DEADLINE)
        assert len(trajectory.output_ids) == 2


def test_deadlines_pass_in_their_own_order_and_not_in_that_of_submission() -> None:
    stage = Stage(W1)
    stage.submit("a", deadline_s=9.0)
    stage.submit("b", deadline_s=4.0)
    assert stopped(stage.wait(5.0)) == [B]
    assert stopped(stage.wait(5.0)) == [A]


def test_a_deadline_counts_from_submission_and_ends_what_never_ran() -> None:
    stage = Stage(size=1, policies=[{"kind": "deadline", "seconds": 10.0}])
    stage.submit("a")
    stage.wait(10.0)
    assert (stage.take_one().abort_reason, started(stage.commands)) == (AbortReason.DEADLINE, [])


@pytest.mark.parametrize("stage_of_life", ["suspended", "stopping", "exporting", "slice", "waiting for a turn"])
def test_a_deadline_passes_whatever_it_is_doing(stage_of_life: str) -> None:
    stage = Stage(W1, policies=[{"kind": "deadline", "seconds": 10.0}, {"kind": "slice_budget", "tokens": 3}])
    stage.submit("a", multi_turn=True)
    stage.sample(A, 3)
    match stage_of_life:
        case "suspended":
            stage.hold(A)
        case "stopping":
            stage.abort(A)
        case "exporting":
            stage.abort(A)
            stage.park(A)
        case "slice":
            stage.park(A, AbortReason.SLICE_BUDGET)
        case _:
            stage.park(A, AbortReason.TURN)
            stage.answer_all()
    stage.wait(10.0)
    stage.answer_all()
    trajectory = stage.take_one()
    assert len(trajectory.output_ids) == 3
    assert trajectory.abort_reason is AbortReason.DEADLINE or stage_of_life == "waiting for a turn"
    ended = FinishReason.STOP if stage_of_life == "waiting for a turn" else FinishReason.ABORT
    assert trajectory.finish_reason is ended


def test_a_deadline_during_a_pause_takes_effect() -> None:
    stage = decoding({"kind": "deadline", "seconds": 10.0})
    stage.take_note(stage.controller.pause(stage.now))
    assert stopped(stage.wait(10.0)) == [A]
    stage.answer_all()
    assert stage.take_one().abort_reason is AbortReason.DEADLINE


# Age ------------------------------------------------------------------------------------------------


def test_a_version_bump_alone_aborts_nothing() -> None:
    """Case D4."""
    stage = decoding({"kind": "stale", "behind": 2})
    stage.submit("b")
    stage.live(1)
    assert stopped(stage.commands) == []
    assert stopped(stage.live(2)) == [A], "what has no token cannot be old"


@given(
    steps=st.lists(st.one_of(st.just("update"), st.integers(1, 5)), max_size=16),
    rule=st.sampled_from([{"behind": 1}, {"behind": 3}, {"share": 0.5}, {"share": 0.2, "age": 2}, {"share": 1.0}]),
)
@settings(deadline=None)
def test_staleness_under_scripted_updates_is_exact(steps: list[Any], rule: Policy) -> None:
    """Case E5: against all versions, counted again after every step."""
    stage = decoding({"kind": "stale"} | rule, tokens=1)
    versions, live = [0], 0
    for step in steps:
        if step == "update":
            live += 1
            commands = stage.live(live)
        else:
            commands = stage.sample(A, step, version=live)
            versions += [live] * step
        old = sum(live - version >= rule.get("age", 1) for version in versions)
        stale = live - min(versions) >= rule.get("behind", 99) or old / len(versions) > rule.get("share", 1.0)
        assert stopped(commands) == [A] * stale
        if stale:
            break


def test_tokens_that_are_told_after_the_update_that_made_them_old_are_old() -> None:
    """Case E5: they were sampled before it."""
    stage = decoding({"kind": "stale", "behind": 2}, tokens=0)
    stage.live(5)
    assert stopped(stage.sample(A, version=4)) == []
    assert stopped(stage.sample(A, version=3)) == [A]


def test_what_became_old_while_it_was_held_begins_again_when_it_is_resumed() -> None:
    stage = decoding({"kind": "stale", "behind": 1})
    stage.hold(A)
    stage.live(1)
    assert stage.running == set()
    attempt = stage.record(A).snapshot()
    assert (attempt.output_ids, [each.reason for each in attempt.attempts]) == ((), [AbortReason.STALE])
    stage.resume(A)
    assert stage.running == {A}


def test_what_becomes_old_while_a_slice_is_put_away_begins_again() -> None:
    stage = decoding({"kind": "stale", "behind": 1}, {"kind": "slice_budget", "tokens": 10})
    stage.park(A, AbortReason.SLICE_BUDGET)
    stage.live(1)
    assert_outcome(stage, "retry", "stale")


def test_a_stale_one_that_began_again_has_one_version_a_fresh_seed_and_its_old_tokens_beside() -> None:
    """Case E6."""
    stage = by_age({"kind": "stale"})
    end(stage, "stale")
    before = stage.record(A).attempts[0]
    stage.sample(A, 4, version=1)
    stage.finish(A)
    trajectory = stage.take_one()
    assert [(run.version, run.tokens) for run in trajectory.versions] == [(1, 4)]
    assert trajectory.output_ids == (100, 101, 102, 103)
    assert trajectory.attempts == (before,)
    assert (before.output_ids, before.seed) == (tuple(range(100, 110)), 0)
    assert trajectory.seed != before.seed
    assert start_of(stage.commands, A).assignment.seed == trajectory.seed
    assert start_of(stage.commands, A).assignment.image is None


# The tail -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "share", "last"), [(10, 0.2, 2), (10, 0.29, 2), (10, 0.3, 3), (4, 0.5, 2)])
def test_the_last_share_of_a_batch_is_stopped_when_all_others_are_over_and_once(
    size: int, share: float, last: int
) -> None:
    stage = Stage(W1, room=99, policies=[{"kind": "tail", "share": share, "then": "requeue"}])
    stage.submit_all(*(submission(f"g{i}") for i in range(size)))
    for i in range(size - last - 1):
        assert stopped(stage.finish(member(f"g{i}"), 1)) == []
    tail = [member(f"g{i}") for i in range(size - last, size)]
    assert stopped(stage.finish(member(f"g{size - last - 1}"), 1)) == tail
    stage.answer_all()
    assert stage.running == set(tail)
    assert stopped(stage.finish(tail[0], 1)) == []


def test_a_batch_that_is_smaller_than_its_tail_would_be_is_left_alone() -> None:
    stage = Stage(W1, policies=[{"kind": "tail", "share": 0.3}])
    stage.submit("a", 3)
    stage.finish(member("a", 1), 1)
    stage.finish(member("a", 2), 1)
    assert stopped(stage.commands) == []


def test_a_batch_is_what_one_call_submitted() -> None:
    stage = Stage(W1, policies=[{"kind": "tail", "share": 0.5}])
    stage.submit("a")
    stage.submit("b")
    stage.finish(B, 1)
    assert stopped(stage.commands) == []


def test_what_waits_for_a_worker_is_held_with_the_tail() -> None:
    stage = Stage(W1, room=1, policies=[{"kind": "tail", "share": 0.5}])
    stage.submit_all(submission("a"), submission("b"))
    assert stage.finish(A, 1) == []
    assert stage.record(B).snapshot().abort_reason is AbortReason.TAIL
    assert stage.phase(B) is Phase.SUSPENDED


# Several at once ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "then", "outcome"),
    [
        ("requeue", "requeue", "requeue"),
        ("requeue", "hold", "hold"),
        ("requeue", "finish", "finish"),
        ("requeue", "retry", "retry"),
        ("requeue", "drop", "drop"),
        ("hold", "requeue", "hold"),
        ("hold", "hold", "hold"),
        ("hold", "drop", "drop"),
        ("finish", "requeue", "finish"),
        ("finish", "hold", "finish"),
        ("finish", "drop", "finish"),
        ("drop", "finish", "drop"),
        ("retry", "hold", "retry"),
    ],
)
@pytest.mark.parametrize("parked", [False, True])
def test_of_two_policies_the_one_that_goes_further_decides_and_the_first_among_equals(
    first: str, then: str, outcome: str, parked: bool
) -> None:
    stage = decoding({"kind": "stale", "behind": 1, "then": first}, {"kind": "deadline", "seconds": 5.0, "then": then})
    assert stopped(stage.live(1)) == [A]
    if parked:
        stage.park(A)
        if first in ("finish", "drop", "retry"):
            return  # it was over before the second
    assert stage.wait(5.0) == [] or parked, "it is stopped already"
    assert_outcome(stage, outcome, "stale" if outcome == first else "deadline")


def test_a_hold_by_a_driver_outlasts_policies_that_would_only_make_it_wait() -> None:
    stage = Stage(W1, policies=[{"kind": "tail", "share": 0.5, "then": "requeue"}])
    stage.submit("a", 2)
    stage.hold(A)
    stage.finish(member("a", 1), 1)
    assert stage.phase(A) is Phase.SUSPENDED
    assert stage.record(A).abort_reason is AbortReason.DRIVER


def test_what_is_over_is_stopped_by_nothing() -> None:
    stage = decoding({"kind": "deadline", "seconds": 5.0}, {"kind": "stale", "behind": 1})
    stage.finish(A)
    stage.live(9)
    stage.wait(9.0)
    trajectory = stage.take_one()
    assert (stopped(stage.commands), trajectory.finish_reason) == ([], FinishReason.STOP)


@pytest.mark.parametrize("kind", [kind for kind in BEGIN if kind not in BY_WORKER])
def test_what_finishes_in_the_step_in_which_a_policy_fires_has_finished(kind: str) -> None:
    """Case A5: the worker tells both, the end first, each twice."""
    stage = BEGIN[kind]({"kind": kind})
    for _ in range(2):
        stage.finish(A)
    for _ in range(2):
        assert stage.park(A) == []
    trajectory = stage.record(A).snapshot()
    assert (trajectory.finish_reason, trajectory.abort_reason) == (FinishReason.STOP, None)
    assert (len(trajectory.output_ids), trajectory.suspensions) == (10, 0)


# Bounded resumes ------------------------------------------------------------------------------------


def resumed(stage: Stage, times: int) -> None:
    for _ in range(times):
        stage.hold(A)
        stage.resume(A)
        stage.admit(A)


@pytest.mark.parametrize("then", ["requeue", "hold", "retry"])
def test_policies_leave_alone_what_was_resumed_often_enough(then: str) -> None:
    """Case E4."""
    policies: list[Policy] = [
        {"kind": "slice_budget", "tokens": 5, "then": then},
        {"kind": "over_long", "tokens": 5, "then": then},
        {"kind": "repetition", "then": then},
        {"kind": "stale", "behind": 1, "then": then},
        {"kind": "deadline", "seconds": 5.0, "then": then},
    ]
    stage = decoding(*policies, resume={"max_resumes": 2})
    resumed(stage, 1)
    assert watch_of(stage) != Watch()
    resumed(stage, 1)
    stage.hold(A)
    stage.resume(A)
    assert watch_of(stage) == Watch()
    before = len(stage.commands)
    stage.live(1)
    stage.wait(9.0)
    assert [each for each in stage.commands[before:] if isinstance(each, Stop)] == []


def test_what_would_end_it_still_may() -> None:
    stage = decoding({"kind": "repetition"}, {"kind": "deadline", "seconds": 5.0}, resume={"max_resumes": 1})
    resumed(stage, 3)
    assert watch_of(stage).repetition is not None
    assert stopped(stage.wait(5.0)) == [A]


def test_a_retry_is_held_to_the_same_bound() -> None:
    """Otherwise updates that come faster than it ends would have it begin again for ever."""
    stage = decoding({"kind": "stale", "behind": 1}, resume={"max_resumes": 3})
    for version in range(1, 10):
        stage.live(version)
        stage.answer_all()
        if not stage.record(A).columns:
            stage.admit(A)
            stage.sample(A, 2, version=version)
    assert len(stage.record(A).attempts) == 3


def test_on_two_workers_each_is_stopped_where_it_runs() -> None:
    stage = Stage(W1, W2, policies=[{"kind": "deadline", "seconds": 5.0}])
    stage.submit("a")
    stage.submit("b")
    stops = {each.worker: each.trajectory_id for each in stage.wait(5.0) if isinstance(each, Stop)}
    assert stops == {stage.record(t).worker: t for t in (A, B)}
