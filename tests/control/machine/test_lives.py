"""Long lives of a whole service, drawn from one seed each: more happens at once than a machine of rules comes to."""

from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.config import AbortConfig, GroupsConfig, ResumeConfig, WeightsConfig
from rollout.types import Keep, Priority, Then, UpdateMode
from tests.control.machine.world import WORKERS, World

KEEPS = [Keep.AUTO, *Keep]
REUSES = [{"kind": "same_weights"}, {"kind": "stale", "max_lag": 1}, {"kind": "stale", "max_lag": 2}]
THENS = {
    "slice_budget": [Then.REQUEUE],
    "quota": [Then.HOLD],
    "memory": [Then.REQUEUE, Then.HOLD, Then.FINISH],
}
"""Of the others any: these would have no end otherwise, or are not asked."""


def policies(luck: Random) -> list[dict[str, Any]]:
    every: list[dict[str, Any]] = [
        {"kind": "slice_budget", "tokens": luck.choice([1, 3, 5])},
        {"kind": "over_long", "tokens": luck.randint(2, 12)}
        if luck.random() < 0.5
        else {"kind": "over_long", "factor": luck.choice([1.1, 2.0]), "of": luck.choice(["group", "batch"])},
        {"kind": "deadline", "seconds": luck.choice([5.0, 60.0, 400.0])},
        {"kind": "stale", "behind": luck.randint(1, 2)}
        if luck.random() < 0.5
        else {"kind": "stale", "share": luck.choice([0.3, 1.0]), "age": luck.randint(1, 2)},
        {"kind": "quota"},
        {"kind": "tail", "share": luck.choice([0.3, 0.6])},
        {"kind": "memory"},
        {"kind": "repetition"},
    ]
    chosen = luck.sample(every, luck.randint(0, 4))
    return [
        policy | {"keep": str(luck.choice(KEEPS)), "then": str(luck.choice(THENS.get(policy["kind"], [*Then])))}
        for policy in chosen
    ]


def world(luck: Random) -> World:
    world = World(
        room=luck.randint(1, 3),
        abort=AbortConfig.model_validate({"keep": str(luck.choice(KEEPS)), "policies": policies(luck)}),
        resume=ResumeConfig(
            prefer=luck.choice(["cheapest", "most_room", "other"]),  # type: ignore[arg-type]
            order=luck.choice(["oldest", "longest"]),  # type: ignore[arg-type]
            max_resumes=luck.choice([1, 3, 64, None]),
        ),
        groups=GroupsConfig(
            failed_member=luck.choice(["keep", "retry", "replace", "fail"]),  # type: ignore[arg-type]
            max_retries=luck.randint(1, 2),
            rest=luck.choice(["abort", "withhold"]),  # type: ignore[arg-type]
        ),
        versions=WeightsConfig.model_validate(
            {"kv_reuse": luck.choice(REUSES), "version_timeout_s": luck.choice([15.0, 100.0])}
        ),
    )
    for worker in WORKERS:
        world.boot(worker)
        if luck.random() < 0.8:
            world.notice(worker)
    return world


def drive(world: World, luck: Random) -> None:
    """One thing that a driver asks for."""
    records = world.records
    some = [record.trajectory_id for record in records if luck.random() < 0.3]
    match luck.randrange(20):
        case 0 | 1 | 2 | 3 if len(records) < 14:
            world.submit(
                n=luck.randint(1, 3),
                budget=luck.randint(0, 20),
                groups=luck.randint(1, 2),
                twice=luck.random() < 0.1,
                priority=luck.choice([Priority.TRAIN, Priority.TRAIN, Priority.EVAL]),
                max_group_tokens=luck.choice([None, None, 1, 7, 25]),
                deadline_s=luck.choice([None, None, 30.0]),
                multi_turn=luck.random() < 0.5,
                partial=luck.random() < 0.3,
                caller=luck.choice(["", "tool"]),
                min_behind=luck.choice([1, 0, -1]) if luck.random() < 0.1 else None,
                exact_behind=luck.choice([1, 0, 0, -1]) if luck.random() < 0.1 else None,
            )
        case 4 | 5:
            world.abort(some, luck.choice([*Keep]), luck.choice([*Then]))
        case 6 | 7:
            world.resume(some)
        case 8:
            world.discard(some[:1])
        case 9 | 10 if records:
            able = [record for record in records if record.ended_turn] or records
            world.extend(luck.choice(able).trajectory_id, luck.randint(1, 4))
        case 11 if world.extensions:
            world.extend_again(luck.randrange(99))
        case 12:
            world.take(luck.randint(0, 3), arrives=luck.random() < 0.5)
        case 13:
            world.take_in_vain(luck.randint(1, 3), told_first=luck.random() < 0.5)
        case 14:
            world.begin_collection(luck.randint(1, 3), luck.choice([0.0, 0.5]), stop_when_met=luck.random() < 0.5)
        case 15:
            for _ in range(luck.randint(0, 2)):
                world.reject()
        case 16:
            world.end_collection()
        case 17:
            (world.unpause if world.driver_paused else world.pause)()
        case 18:
            world.drain(luck.choice([*world.sites]))
        case 19:
            world.add_worker()


def disturb(world: World, luck: Random, *, calm: bool) -> None:
    """One thing that happens outside."""
    match luck.randrange(6):
        case 0:
            world.wait(luck.randrange(40))
        case 1:
            replace_weights(world, luck)
        case 2 if world.history:
            world.repeat(luck.randrange(99))
        case 3 if not calm:
            worker, final, silent = luck.choice([*world.sites]), luck.random() < 0.1, luck.random() < 0.5
            world.kill(worker, silent=silent, final=final, last_words=luck.random() < 0.5)
        case 4:
            world.export(luck.randrange(99), fail=luck.random() < 0.2, displacing=luck.choice([0, 1, 2]))
        case _:
            twice, late, lost = luck.random() < 0.2, luck.random() < 0.2, luck.random() < 0.5
            world.answer(luck.randrange(99), twice=twice, timed_out=late, lost=lost)


def replace_weights(world: World, luck: Random) -> None:
    """An update begins, and goes on at once as far as luck and its mode let it."""
    world.update(luck.choice([*UpdateMode]), luck.choice([1, 1, 1, 2, 0, -1]))
    while luck.random() < 0.6 and world.go_on_with_update():
        world.check()


def begin_again(world: World, luck: Random) -> None:
    """The service ends; another one goes on with what was saved."""
    up = [worker for worker in WORKERS if luck.random() < 0.5]
    ahead = luck.choice([0, 0, 0, 1, -1])
    world.begin_again(after_s=luck.choice([0.0, 1000.0]), ahead=ahead, up=up, busy=luck.random() < 0.3)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_long_life_keeps_every_invariant_and_delivers_all(seed: int) -> None:
    luck = Random(seed)
    service, calm = world(luck), luck.random() < 0.5
    update_rate, end_rate = luck.choice([0.0, 0.05, 0.2]), luck.choice([0.0, 0.0, 0.02, 0.1])
    for _ in range(luck.randint(10, 120)):
        part = luck.random()
        if part < 0.4:
            for _ in range(luck.randint(1, 8)):
                service.live(luck)
                service.check()
        elif part < 0.85:
            drive(service, luck)
        else:
            disturb(service, luck, calm=calm)
        if luck.random() < update_rate:
            replace_weights(service, luck)
        if luck.random() < 0.3:
            service.go_on_with_update(give_up=luck.random() < 0.05)
        if luck.random() < end_rate:
            begin_again(service, luck)
        service.check()
    service.finish(collecting=luck.random() < 0.5)
