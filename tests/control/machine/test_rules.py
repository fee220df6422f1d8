"""Whatever workers, pools and drivers do in whatever order, the controller keeps its invariants and delivers all."""

import sys
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout.config import AbortConfig, GroupsConfig, ResumeConfig, WeightsConfig
from rollout.types import Keep, Priority, Then, TrajectoryId, UpdateMode, WorkerId
from tests.control.machine.world import NODES, WORKERS, World

workers = st.sampled_from(sorted(NODES))
keeps = st.sampled_from([Keep.AUTO, Keep.POOL, Keep.HOST, Keep.DEVICE, Keep.NONE])
numbers = st.integers(0, 99)
sometimes = st.integers(0, 4).map(lambda number: number == 4)
seldom = st.integers(0, 15).map(lambda number: number == 15)
subsets = st.lists(st.booleans(), max_size=8)


def policy(kind: str, *thens: Then, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Of a kind, with every answer but those that would have it never end."""
    return st.fixed_dictionaries(
        {
            "kind": st.just(kind),
            "keep": keeps.map(str),
            "then": st.sampled_from(thens or [*Then]).map(str),
            **fields,
        }
    )


policies = st.lists(
    st.one_of(
        policy("slice_budget", Then.REQUEUE, tokens=st.sampled_from([1, 3, 5])),
        policy("slice_budget", Then.HOLD, Then.FINISH, Then.DROP, tokens=st.just(5)),
        policy("over_long", tokens=st.integers(2, 12)),
        policy(
            "over_long",
            factor=st.sampled_from([1.1, 2.0]),
            of=st.sampled_from(["group", "batch"]),
            min_finished=st.integers(1, 2),
        ),
        policy("deadline", seconds=st.sampled_from([5.0, 60.0, 400.0])),
        policy("stale", behind=st.integers(1, 2)),
        policy("stale", share=st.sampled_from([0.3, 1.0]), age=st.integers(1, 2)),
        policy("quota", Then.HOLD),
        policy("tail", share=st.sampled_from([0.3, 0.6])),
        policy("memory", Then.REQUEUE, Then.HOLD, Then.FINISH),
        policy("repetition"),
    ),
    max_size=3,
    unique_by=lambda policy: policy["kind"],
)
resumes = st.builds(
    ResumeConfig,
    prefer=st.sampled_from(["cheapest", "most_room", "other"]),
    order=st.sampled_from(["oldest", "longest"]),
    max_resumes=st.sampled_from([1, 3, 64, None]),
)
rules = st.builds(
    GroupsConfig,
    failed_member=st.sampled_from(["keep", "retry", "replace", "fail"]),
    max_retries=st.integers(1, 2),
    rest=st.sampled_from(["abort", "withhold"]),
)
versions = st.builds(
    lambda reuse, timeout_s: WeightsConfig.model_validate({"kv_reuse": reuse, "version_timeout_s": timeout_s}),
    reuse=st.sampled_from([{"kind": "same_weights"}, *({"kind": "stale", "max_lag": lag} for lag in (1, 2))]),
    timeout_s=st.sampled_from([15.0, 100.0]),
)
modes = st.sampled_from(UpdateMode)
ahead = st.sampled_from([1, 1, 1, 2, 0, -1])


class ControllerInTheWorld(RuleBasedStateMachine):
    world: World

    @initialize(
        keep=keeps,
        policies=policies,
        resume=resumes,
        groups=rules,
        versions=versions,
        room=st.integers(1, 3),
        up=st.lists(st.sampled_from(sorted(WORKERS)), unique=True),
        collecting=st.booleans(),
    )
    def begin(
        self,
        keep: Keep,
        policies: list[dict[str, Any]],
        resume: ResumeConfig,
        groups: GroupsConfig,
        versions: WeightsConfig,
        room: int,
        up: list[WorkerId],
        collecting: bool,
    ) -> None:
        abort = AbortConfig.model_validate({"keep": str(keep), "policies": policies})
        self.world = World(room=room, abort=abort, resume=resume, groups=groups, versions=versions)
        self.collecting = collecting
        for worker in WORKERS:
            self.world.boot(worker)
            if worker in up:
                self.world.notice(worker)

    def some(self, subset: list[bool]) -> list[TrajectoryId]:
        return [r.trajectory_id for r, chosen in zip(self.world.records, subset, strict=False) if chosen]

    # Drivers ------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.world.records) < 8)
    @rule(
        n=st.integers(1, 3),
        budget=st.integers(0, 20),
        groups=st.integers(1, 2),
        twice=sometimes,
        priority=st.sampled_from([Priority.TRAIN, Priority.TRAIN, Priority.EVAL]),
        max_group_tokens=st.sampled_from([None, None, 1, 7, 25]),
        deadline_s=st.sampled_from([None, None, None, 30.0]),
        multi_turn=st.booleans(),
        partial=st.booleans(),
        caller=st.sampled_from(["", "tool"]),
        min_behind=st.sampled_from([*[None] * 12, 1, 0, -1]),
        exact_behind=st.sampled_from([*[None] * 12, 1, 0, 0, -1]),
    )
    def submit(self, n: int, budget: int, groups: int, twice: bool, **options: Any) -> None:
        self.world.submit(n=n, budget=budget, groups=groups, twice=twice, **options)

    @precondition(lambda self: self.world.records)
    @rule(subset=subsets, keep=keeps, then=st.sampled_from(Then))
    def abort(self, subset: list[bool], keep: Keep, then: Then) -> None:
        self.world.abort(self.some(subset), keep, then)

    @precondition(lambda self: self.world.records)
    @rule(subset=subsets)
    def resume(self, subset: list[bool]) -> None:
        self.world.resume(self.some(subset))

    @precondition(lambda self: self.world.records)
    @rule(number=numbers)
    def discard(self, number: int) -> None:
        self.world.discard([self.world.records[number % len(self.world.records)].trajectory_id])

    @precondition(lambda self: self.world.records)
    @rule(number=numbers, count=st.integers(1, 4))
    def extend(self, number: int, count: int) -> None:
        able = [r for r in self.world.records if r.ended_turn] or self.world.records
        self.world.extend(able[number % len(able)].trajectory_id, count)

    @precondition(lambda self: self.world.extensions)
    @rule(number=numbers)
    def extend_again(self, number: int) -> None:
        self.world.extend_again(number)

    @rule(count=st.integers(0, 3), arrives=st.booleans())
    def take(self, count: int, arrives: bool) -> None:
        self.world.take(count, arrives=arrives)

    @rule(count=st.integers(1, 3), told_first=st.booleans())
    def take_in_vain(self, count: int, told_first: bool) -> None:
        self.world.take_in_vain(count, told_first=told_first)

    @rule(wanted=st.integers(1, 3), over_sample=st.sampled_from([0.0, 0.5]), stop_when_met=st.booleans())
    def begin_collection(self, wanted: int, over_sample: float, stop_when_met: bool) -> None:
        self.world.begin_collection(wanted, over_sample, stop_when_met=stop_when_met)

    @rule()
    def reject(self) -> None:
        self.world.reject()

    @rule()
    def end_collection(self) -> None:
        self.world.end_collection()

    @rule()
    def pause_or_unpause(self) -> None:
        if self.world.driver_paused:
            self.world.unpause()
        else:
            self.world.pause()

    @rule(worker=workers, really=sometimes)
    def drain(self, worker: WorkerId, really: bool) -> None:
        if really and worker in self.world.sites:
            self.world.drain(worker)

    @rule(really=sometimes)
    def add_worker(self, really: bool) -> None:
        if really:
            self.world.add_worker()

    # Everything else ----------------------------------------------------------------------------------

    @rule(seed=st.integers(0, 2**32), rounds=st.integers(1, 20))
    def live(self, seed: int, rounds: int) -> None:
        luck = Random(seed)
        for _ in range(rounds):
            self.world.live(luck)
            self.world.check()

    @rule(seconds=st.integers(0, 40))
    def wait(self, seconds: int) -> None:
        self.world.wait(seconds)

    @rule(mode=modes, ahead=ahead)
    def update(self, mode: UpdateMode, ahead: int) -> None:
        self.world.update(mode, ahead)

    @precondition(lambda self: self.world.under_update)
    @rule(steps=st.integers(1, 3), give_up=seldom)
    def go_on_with_update(self, steps: int, give_up: bool) -> None:
        for _ in range(steps):
            self.world.go_on_with_update(give_up=give_up)
            self.world.check()

    @rule(worker=workers, twice=sometimes)
    def relay(self, worker: WorkerId, twice: bool) -> None:
        if worker in self.world.sites:
            self.world.post(worker)
            self.world.relay(worker, twice=twice)

    @precondition(lambda self: self.world.exports)
    @rule(number=numbers, fail=sometimes, displacing=st.integers(0, 2))
    def export(self, number: int, fail: bool, displacing: int) -> None:
        self.world.export(number, fail=fail, displacing=displacing)

    @precondition(lambda self: self.world.answers)
    @rule(number=numbers, twice=sometimes, timed_out=sometimes, lost=st.booleans())
    def answer(self, number: int, twice: bool, timed_out: bool, lost: bool) -> None:
        self.world.answer(number, twice=twice, timed_out=timed_out, lost=lost)

    @rule(worker=workers, really=sometimes, silent=st.booleans(), final=seldom, last_words=st.booleans())
    def kill(self, worker: WorkerId, really: bool, silent: bool, final: bool, last_words: bool) -> None:
        if worker in self.world.sites and (really or final):
            self.world.kill(worker, silent=silent, final=final, last_words=last_words)

    @rule(worker=workers, twice=sometimes)
    def notice(self, worker: WorkerId, twice: bool) -> None:
        if worker in self.world.sites:
            self.world.notice(worker, twice=twice)

    @rule(
        really=sometimes,
        after_s=st.sampled_from([0.0, 1000.0]),
        ahead=st.sampled_from([0, 0, 0, 1, -1]),
        up=st.lists(st.sampled_from(sorted(WORKERS)), unique=True),
        busy=st.booleans(),
    )
    def begin_again(self, really: bool, **how: Any) -> None:
        if really:
            self.world.begin_again(**how)

    @precondition(lambda self: self.world.history)
    @rule(number=numbers)
    def repeat_what_is_over(self, number: int) -> None:
        self.world.repeat(number)

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        failed = sys.exception() is not None  # the end would only hide why
        if hasattr(self, "world") and not failed:
            self.world.finish(collecting=self.collecting)


TestControllerInTheWorld = ControllerInTheWorld.TestCase
TestControllerInTheWorld.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
