"""Whatever sequences, images, copies and the pool do in whatever order, no page is lost, and none is what it is not."""

from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout.config import NoWrites, WriteBack, WritePolicy, WriteThrough, WriteThroughSelective
from rollout.kv.tiers import Tier
from tests.kv.tier_world import PAGE, TierWorld
from tests.kv.trajectories import Trajectory

Thing = TypeVar("Thing")
PROMPTS = [(1,) * 7, (1,) * 4 + (2,) * 5, (1,) * 6 + (2,), (2, 2, 1)]
POLICIES: list[WritePolicy] = [
    NoWrites(kind="none"),
    WriteThrough(kind="write_through"),
    WriteThrough(kind="write_through"),
    WriteThroughSelective(kind="write_through_selective", hits=1),
    WriteThroughSelective(kind="write_through_selective", hits=2),
    WriteBack(kind="write_back"),
    WriteBack(kind="write_back"),
]
MOST_TOKENS = 16
MOST_TRAJECTORIES = 5

numbers = st.integers(0, 99)
often = st.integers(0, 4).map(bool)
seldom = st.integers(0, 4).map(lambda number: number == 4)
tokens = st.sampled_from([1, 1, 2])
tiers = st.sampled_from(Tier)


class TieredCacheInTheWorld(RuleBasedStateMachine):
    world: TierWorld
    weights_since: int
    rules_per_weights: int
    executions = 0
    """Of rules, over all histories in this process."""

    @initialize(
        write=st.sampled_from(POLICIES),
        device_pages=st.sampled_from([9, 12, 18]),
        host_pages=st.sampled_from([0, 1, 5, 12, 20, 24]),
        prefer_shared=st.booleans(),
        rules_per_weights=st.sampled_from([4, 15, 60]),
        max_lag=st.sampled_from([4, 4, 1, 0]),
    )
    def begin(
        self,
        write: WritePolicy,
        device_pages: int,
        host_pages: int,
        prefer_shared: bool,
        rules_per_weights: int,
        max_lag: int,
    ) -> None:
        self.rules_per_weights = rules_per_weights
        self.weights_since = self.executions
        self.world = TierWorld(
            device_pages=device_pages,
            host_pages=host_pages,
            write=write,
            prefer_shared=prefer_shared,
            max_lag=max_lag,
        )
        for prompt in PROMPTS:
            self.world.submit(prompt)

    def running(self) -> list[Trajectory]:
        return [trajectory for trajectory in self.world.trajectories if trajectory.run is not None]

    def ready(self) -> list[Trajectory]:
        """Those that a forward may compute for."""
        return [
            trajectory
            for trajectory in self.world.trajectories
            if trajectory.run is not None and not trajectory.run.busy and len(trajectory.tokens) < MOST_TOKENS
        ]

    def shareable(self) -> list[Trajectory]:
        """Those that have whole pages of their own."""
        return [
            trajectory
            for trajectory in self.ready()
            if trajectory.run is not None
            and trajectory.run.written.pure(trajectory.run.kv) // PAGE > trajectory.run.holding.shared
        ]

    def over(self) -> list[Trajectory]:
        return [trajectory for trajectory in self.world.trajectories if len(trajectory.tokens) >= MOST_TOKENS]

    def stopped(self) -> list[Trajectory]:
        trajectories = self.world.trajectories
        return [
            trajectory for trajectory in trajectories if trajectory.run is None and len(trajectory.tokens) < MOST_TOKENS
        ]

    @precondition(lambda self: len(self.world.trajectories) < MOST_TRAJECTORIES)
    @rule(prompt=st.sampled_from(PROMPTS), more=st.lists(tokens, max_size=2))
    def submit(self, prompt: tuple[int, ...], more: list[int]) -> None:
        self.world.submit((*prompt, *more))

    @precondition(lambda self: self.stopped())
    @rule(number=numbers, most=st.integers(1, 4), from_host=st.booleans(), from_pool=often)
    def admit(self, number: int, most: int, from_host: bool, from_pool: bool) -> None:
        for _ in range(min(most, len(self.stopped()))):
            self.world.admit(pick(self.stopped(), number), from_host=from_host, from_pool=from_pool)

    @precondition(lambda self: any(missing(trajectory) > 1 for trajectory in self.ready()))
    @rule(chunk=st.sampled_from([3, 16]), commit=st.booleans(), write=often)
    def prefill(self, chunk: int, commit: bool, write: bool) -> None:
        for trajectory in self.ready():
            if missing(trajectory) > 1:
                self.world.step(trajectory, count=chunk, sampled=1, commit=commit, write=write)

    @precondition(lambda self: any(missing(trajectory) == 1 for trajectory in self.ready()))
    @rule(steps=st.integers(1, 3), sampled=tokens, commit=often, write=often)
    def decode(self, steps: int, sampled: int, commit: bool, write: bool) -> None:
        for _ in range(steps):
            for trajectory in self.ready():
                if missing(trajectory) == 1:
                    self.world.step(trajectory, count=1, sampled=sampled, commit=commit, write=write)

    @precondition(lambda self: self.shareable())
    @rule(number=numbers, write=st.booleans())
    def commit(self, number: int, write: bool) -> None:
        self.world.commit(pick(self.shareable(), number), write=write)

    @precondition(lambda self: self.running())
    @rule(number=numbers, most=st.integers(1, 4), where=st.sampled_from(["device", "host", "host", "pool", "none"]))
    def abort(self, number: int, most: int, where: str) -> None:
        for _ in range(min(most, len(self.running()))):
            self.world.keep(pick(self.running(), number), where)

    @precondition(lambda self: self.over())
    @rule(number=numbers)
    def finish(self, number: int) -> None:
        self.world.finish(pick(self.over(), number))

    @precondition(lambda self: len(self.world.trajectories) == MOST_TRAJECTORIES)
    @rule(number=numbers, really=seldom)
    def cancel(self, number: int, really: bool) -> None:
        if really:
            self.world.finish(pick(self.world.trajectories, number))

    @precondition(lambda self: self.world.idle_images())
    @rule(number=numbers, to=tiers)
    def move(self, number: int, to: Tier) -> None:
        self.world.move(pick(self.world.idle_images(), number), to)

    @precondition(lambda self: self.world.cache.stats(Tier.DEVICE).tree)
    @rule(count=st.integers(1, 9))
    def evict(self, count: int) -> None:
        self.world.evict(count)

    @precondition(lambda self: self.world.cache.stats(Tier.HOST).tree)
    @rule(count=st.integers(1, 9), really=seldom)
    def evict_from_host(self, count: int, really: bool) -> None:
        if really:
            self.world.evict_from_host(count)

    @precondition(lambda self: self.world.cache.stats(Tier.DEVICE).tree)
    @rule(number=numbers, pages=st.integers(1, 6))
    def split(self, number: int, pages: int) -> None:
        if self.world.trajectories:
            self.world.peek(pick(self.world.trajectories, number), pages)

    @precondition(lambda self: self.executions - self.weights_since > self.rules_per_weights)
    @rule(parked=st.booleans(), purge=st.booleans())
    def new_weights(self, parked: bool, purge: bool) -> None:
        self.change_weights(in_place=False, parked=parked, purge=purge)

    @precondition(lambda self: self.executions - self.weights_since > self.rules_per_weights)
    @precondition(lambda self: self.world.max_lag and any(run.known for run in self.world.runs))
    @rule(most=st.integers(1, 3), sampled=tokens, parked=st.booleans(), purge=st.booleans())
    def new_weights_in_place(self, most: int, sampled: int, parked: bool, purge: bool) -> None:
        """They go on for some tokens."""
        self.change_weights(in_place=True, parked=parked, purge=purge)
        for trajectory in self.ready():
            self.world.step(trajectory, count=most, sampled=sampled, commit=True, write=True)

    def change_weights(self, *, in_place: bool, parked: bool, purge: bool) -> None:
        self.weights_since = self.executions
        self.world.change_weights(in_place=in_place, parked=parked)
        if purge:
            self.world.purge()
        self.world.settle()

    @precondition(lambda self: not set(self.world.cache._tree._roots) <= self.world.reusable)
    @rule()
    def purge(self) -> None:
        self.world.purge()

    @precondition(lambda self: self.world.cache.kept.spare)
    @rule(seconds=st.sampled_from([1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @precondition(lambda self: self.world.flights.waiting)
    @rule(number=numbers)
    def copy_runs(self, number: int) -> None:
        self.world.flights.execute(pick(self.world.flights.waiting, number))

    @precondition(lambda self: self.world.flights.all)
    @rule(number=numbers, ok=often)
    def copy_ends(self, number: int, ok: bool) -> None:
        self.world.flights.complete(pick(self.world.flights.all, number), ok=ok)

    @precondition(lambda self: self.world.exports)
    @rule(number=numbers, refused=seldom)
    def export_ends(self, number: int, refused: bool) -> None:
        self.world.exported(pick(self.world.exports, number), refused=refused)

    @precondition(lambda self: any(run.restoring for run in self.world.runs))
    @rule(number=numbers, ok=often)
    def restore_ends(self, number: int, ok: bool) -> None:
        self.world.restored(pick([run for run in self.world.runs if run.restoring], number), ok=ok)

    @precondition(lambda self: self.world.busy)
    @rule()
    def everything_ends(self) -> None:
        self.world.drain()

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "world"):
            TieredCacheInTheWorld.executions += 1
            self.world.settle()
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


def pick(things: list[Thing], number: int) -> Thing:
    return things[number % len(things)]


def missing(trajectory: Trajectory) -> int:
    """Positions of a running one that have no KV."""
    assert trajectory.run is not None
    return len(trajectory.tokens) - trajectory.run.kv
