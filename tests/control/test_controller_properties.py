"""Whatever workers, pools and drivers do in whatever order, the controller keeps its invariants and delivers all."""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout.types import Keep, Then, TrajectoryId, WorkerId
from tests.control.world import WORKERS, World

workers = st.sampled_from(sorted(WORKERS))
kept = st.sampled_from([Keep.POOL, Keep.HOST, Keep.DEVICE, Keep.NONE, Keep.AUTO])
keeps = st.sampled_from([Keep.POOL, Keep.HOST, Keep.DEVICE, Keep.AUTO, Keep.NONE])
numbers = st.integers(0, 99)
sometimes = st.integers(0, 4).map(lambda number: number == 4)
seldom = st.integers(0, 15).map(lambda number: number == 15)
subsets = st.lists(st.booleans(), max_size=8)


class ControllerInTheWorld(RuleBasedStateMachine):
    world: World

    @initialize(
        slice_tokens=st.sampled_from([None, 1, 3]),
        keep=kept,
        prefer_other=st.booleans(),
        room=st.integers(1, 3),
        up=st.lists(workers, unique=True),
    )
    def begin(self, slice_tokens: int | None, keep: Keep, prefer_other: bool, room: int, up: list[WorkerId]) -> None:
        self.world = World(slice_tokens=slice_tokens, keep=keep, prefer_other=prefer_other, room=room)
        for worker in WORKERS:
            self.world.boot(worker)
            if worker in up:
                self.world.notice(worker)

    def some(self, subset: list[bool]) -> list[TrajectoryId]:
        return [r.trajectory_id for r, chosen in zip(self.world.records, subset, strict=False) if chosen]

    @precondition(lambda self: len(self.world.records) < 8)
    @rule(n=st.integers(1, 3), budget=st.integers(0, 20))
    def submit(self, n: int, budget: int) -> None:
        self.world.submit(n=n, budget=budget)

    @precondition(lambda self: self.world.records)
    @rule(subset=subsets, keep=keeps, then=st.sampled_from(Then))
    def abort(self, subset: list[bool], keep: Keep, then: Then) -> None:
        self.world.abort(self.some(subset), keep, then)

    @precondition(lambda self: self.world.records)
    @rule(subset=subsets)
    def resume(self, subset: list[bool]) -> None:
        self.world.resume(self.some(subset))

    @rule(count=st.integers(0, 3))
    def take(self, count: int) -> None:
        self.world.take(count)

    @rule(count=st.integers(1, 3), told_first=st.booleans())
    def take_in_vain(self, count: int, told_first: bool) -> None:
        self.world.take_in_vain(count, told_first=told_first)

    @rule(seed=st.integers(0, 2**32), rounds=st.integers(1, 20))
    def live(self, seed: int, rounds: int) -> None:
        luck = Random(seed)
        for _ in range(rounds):
            self.world.live(luck)

    @rule(worker=workers, twice=sometimes)
    def relay(self, worker: WorkerId, twice: bool) -> None:
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
        if really or final:
            self.world.kill(worker, silent=silent, final=final, last_words=last_words)

    @rule(worker=workers, twice=sometimes)
    def notice(self, worker: WorkerId, twice: bool) -> None:
        self.world.notice(worker, twice=twice)

    @precondition(lambda self: self.world.history)
    @rule(number=numbers)
    def repeat_what_is_over(self, number: int) -> None:
        self.world.repeat(number)

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


TestControllerInTheWorld = ControllerInTheWorld.TestCase
TestControllerInTheWorld.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
