"""Case E1: where everything is that was ever submitted, at each moment of a life. The stage checks the sum at every
step of every test; here it is said what the parts are."""

from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.metrics import Accounts
from rollout.types import AbortReason, FinishReason, Keep, Priority, Then
from tests.control.stage import W1, W2, Stage, member

A = member("a")


def where(stage: Stage) -> dict[str, int]:
    """The parts that are not 0."""
    accounts = stage.controller.accounts()
    parts = {name: getattr(accounts, name) for name in Accounts.__dataclass_fields__ if name not in ("dropped",)}
    return {name: count for name, count in parts.items() if count} | {str(k): n for k, n in accounts.dropped.items()}


def test_a_life_from_part_to_part() -> None:
    stage = Stage(size=1)
    assert where(stage) == {}
    stage.submit("a")
    assert where(stage) == {"submitted": 1, "queued": 1}
    stage.up(W1)
    assert where(stage) == {"submitted": 1, "active": 1}
    stage.admit(A)
    stage.preempt(A)
    assert where(stage) == {"submitted": 1, "active": 1}
    stage.admit(A)
    stage.sample(A, 3)
    stage.abort(A)
    stage.park(A)
    assert where(stage) == {"submitted": 1, "active": 1}, "its KV is on its way"
    stage.answer_all()
    assert where(stage) == {"submitted": 1, "suspended": 1}
    stage.resume(A)
    stage.controller.pause(stage.now)
    assert where(stage) == {"submitted": 1, "active": 1}
    stage.take_note(stage.controller.unpause(stage.now))
    stage.finish(A, 1)
    assert where(stage) == {"submitted": 1, "buffered": 1}
    stage.take()
    assert where(stage) == {"submitted": 1, "delivered": 1}
    stage.arrived()
    assert where(stage) == {"submitted": 1, "acknowledged": 1}
    stage.arrived()
    assert where(stage) == {"submitted": 1, "acknowledged": 1}


def test_what_fails_is_buffered_and_what_is_dropped_or_discarded_is_told_by_reason() -> None:
    stage = Stage(W1)
    stage.submit("a", 4)
    stage.fail(A)
    stage.abort(member("a", 1), then=Then.DROP)
    stage.discard(member("a", 2))
    stage.answer_all()
    expected = {"submitted": 4, "active": 1, "buffered": 1, "driver": 1, "discard": 1}
    assert where(stage) == expected
    stage.finish(member("a", 3))
    stage.take()
    assert where(stage) == {"submitted": 4, "delivered": 2, "driver": 1, "discard": 1}


def test_what_got_lost_is_buffered_again_and_counted_once() -> None:
    stage = Stage(W1)
    stage.submit("a", 2)
    for i in range(2):
        stage.finish(member("a", i), 1)
    stage.controller.take(9, "lost")
    stage.controller.settle_calls(arrived=(), abandoned=["lost"])
    assert where(stage) == {"submitted": 2, "buffered": 2}
    stage.controller.settle_calls(arrived=["lost"], abandoned=())
    assert where(stage) == {"submitted": 2, "buffered": 2}, "it is too late for that"
    stage.take()
    assert where(stage) == {"submitted": 2, "delivered": 2}


def test_what_is_handed_out_in_parts_is_delivered_part_by_part() -> None:
    stage = Stage(W1)
    stage.submit("a", 3, partial=True)
    stage.finish(A, 1)
    assert where(stage) == {"submitted": 3, "active": 2, "buffered": 1}
    stage.take()
    assert where(stage) == {"submitted": 3, "active": 2, "delivered": 1}
    stage.arrived()
    stage.discard(member("a", 1))
    stage.answer_all()
    stage.finish(member("a", 2), 1)
    stage.take()
    assert where(stage) == {"submitted": 3, "delivered": 1, "acknowledged": 1, "discard": 1}


def test_what_is_submitted_twice_counts_once() -> None:
    stage = Stage(W1)
    stage.submit("a", 2)
    stage.submit("a", 2)
    assert where(stage) == {"submitted": 2, "active": 2}


POLICIES: list[dict[str, Any]] = [
    {"kind": "slice_budget", "tokens": 3},
    {"kind": "over_long", "factor": 1.5, "min_finished": 1},
    {"kind": "deadline", "seconds": 40.0, "then": "drop"},
    {"kind": "stale", "behind": 2},
    {"kind": "tail", "share": 0.2},
    {"kind": "repetition"},
]


@given(
    seed=st.integers(0, 2**32),
    rule=st.sampled_from(["keep", "retry", "replace", "fail"]),
    keep=st.sampled_from(["auto", "device", "host", "pool", "none"]),
    rest=st.sampled_from(["abort", "withhold"]),
)
@settings(max_examples=80, deadline=None)
def test_whatever_happens_the_sum_is_what_was_submitted_and_everything_can_be_handed_out(
    seed: int, rule: str, keep: str, rest: str
) -> None:
    """All policies at once, collections, turns, updates, drops and lost workers. The stage looks at every step; in the
    end all is handed out or dropped, each once."""
    luck = Random(seed)
    stage = Stage(
        W1, W2, room=2, keep=keep, policies=POLICIES, groups={"failed_member": rule, "rest": rest}, context=60
    )
    submitted: set[str] = set()
    handed: list[str] = []
    for _ in range(120):
        act(stage, luck, submitted)
        if luck.random() < 0.2:
            handed += [t.trajectory_id for each in stage.take(luck.randint(1, 3)) for t in each.trajectories]
    stage.end_collection()
    stage.take_note(stage.controller.unpause(stage.now))
    for _ in range(100):
        stage.answer_all()
        stage.abort(*(record.trajectory_id for record in stage.controller.resolve(None)[0]), then=Then.FINISH)
        stage.answer_all()
        taken = stage.take()
        handed += [t.trajectory_id for each in taken for t in each.trajectories]
        if not stage.controller.outstanding:
            break
    accounts = stage.controller.accounts()
    assert len(handed) == len(set(handed)) == accounts.delivered
    assert accounts.submitted == len(submitted) == len(handed) + sum(accounts.dropped.values())
    assert stage.controller.counters.tokens == stage.tokens


def act(stage: Stage, luck: Random, submitted: set[str]) -> None:
    names = [record.trajectory_id for record in stage.controller.resolve(None)[0]]
    running = sorted(t for t in stage.running if not stage.record(t).promoting)
    some = luck.choice(names) if names else A
    match luck.randrange(16):
        case 0 | 1 if len(names) < 12:
            n, group = luck.randint(1, 3), f"g{len(submitted)}"
            parts, turns, first = (luck.random() < 0.3 for _ in range(3))
            priority = Priority.EVAL if first else Priority.TRAIN
            stage.submit(group, n, partial=parts, multi_turn=turns, priority=priority, budget=12)
            submitted |= {member(group, i) for i in range(n)}
        case 2 | 3 | 4 | 5 if running:
            t = luck.choice(running)
            if stage.record(t).sampled_tokens < 12 and stage.record(t).tokens < 60:
                stage.sample(t, version=luck.randint(0, 1))
            else:
                stage.finish(t, reason=FinishReason.LENGTH)
        case 6 if running:
            stage.finish(luck.choice(running))
        case 7 if running:
            t = luck.choice(running)
            reasons = [AbortReason.SLICE_BUDGET, AbortReason.MEMORY, AbortReason.REPETITION, AbortReason.TURN, None]
            reason = luck.choice(reasons)
            if reason is AbortReason.TURN and not stage.record(t).group.submission.multi_turn:
                reason = AbortReason.SLICE_BUDGET
            if reason is not None or stage.record(t).intent is not None:
                stage.park(t, reason)
        case 8 if running:
            stage.fail(luck.choice(running))
        case 9:
            stage.abort(some, keep=luck.choice(list(Keep)), then=luck.choice(list(Then)))
        case 10:
            stage.resume(some)
        case 11:
            stage.collect(luck.randint(1, 3), luck.choice([0.0, 0.5]), stop_when_met=luck.random() < 0.5)
        case 12:
            stage.end_collection()
            pause = stage.controller.pause if luck.random() < 0.3 else stage.controller.unpause
            stage.take_note(pause(stage.now))
        case 13:
            stage.wait(luck.choice([1.0, 10.0]))
            stage.live(luck.randint(0, 3))
        case 14:
            worker = luck.choice([W1, W2])
            stage.down(worker)
            stage.up(worker, room=2)
            for t in (each.trajectory_id for each in stage.controller.turns({}, 999)):
                if luck.random() < 0.5 and stage.record(t).tokens < 50:
                    stage.extend(t, [7, 8])
        case _:
            if luck.random() < 0.3:
                stage.discard(some)
            stage.answer_all(pool_is_full=luck.random() < 0.3)
