"""The real controller and engines on a virtual clock, driven by a script.

Calls between controller, workers and the pool take the machine's latency; the driver sits at the controller, and
its calls take none. The time of the controller itself is not modelled.
"""

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Sequence

from rollout.config import AbortConfig, EngineConfig, GroupsConfig, HostConfig, Memory, ResumeConfig, WeightsConfig
from rollout.control.aborts import AbortTicket
from rollout.control.collection import Collection
from rollout.control.commands import (
    Command,
    Drop,
    Expect,
    Export,
    KeepThere,
    Pause,
    Recall,
    Release,
    Retain,
    Retire,
    Start,
    Stop,
    Unpause,
)
from rollout.control.controller import Controller
from rollout.control.messages import Event, Tick, WorkerUp
from rollout.control.submission import Submission
from rollout.errors import StalledError
from rollout.sim.clock import Clock
from rollout.sim.machine import MachineRates
from rollout.sim.outcome import Outcome
from rollout.sim.pool import SimPool
from rollout.sim.worker import WEIGHTS, SimWorker
from rollout.types import Delivery, GroupId, Keep, NodeId, SamplingParams, Then, WorkerId, trajectory_seed

NODE = NodeId("node")
ENGINE, HOST, ABORT, RESUME, GROUPS = EngineConfig(), HostConfig(), AbortConfig(), ResumeConfig(), GroupsConfig()
TICK_S = 0.25
"""Between two `Tick`s."""
STALL_S = 3600.0
"""In which nothing but ticks happens, and the driver waits for something: the simulation is stuck."""
RESTORE_TIMEOUT_S = 30.0

Wait = float | Callable[[], bool]
Collecting = Generator[Wait, None, list[Delivery]]
Driver = Generator[Wait, None, None]
"""What a driver does: it calls the simulation, and yields seconds to wait for, or what must be true before it goes
on, which is looked at after every event."""


class Simulation:
    """One service. `run` may be called once."""

    def __init__(
        self,
        rates: MachineRates,
        *,
        workers: int = 1,
        engine: EngineConfig = ENGINE,
        host: HostConfig = HOST,
        abort: AbortConfig = ABORT,
        resume: ResumeConfig = RESUME,
        groups: GroupsConfig = GROUPS,
        check: bool = False,
    ) -> None:
        """Sizes come from `rates`, not from the sections. With `check` all accounting is recomputed at every step."""
        self.rates = rates
        self.clock = Clock()
        self.controller = Controller(
            workers=workers,
            max_context=rates.max_context,
            weights=WEIGHTS,
            abort=abort,
            resume=resume,
            groups=groups,
            versions=WeightsConfig(),
        )
        self.pool = SimPool(NODE, rates, self.clock, answer=self.tell, check=check)
        self.workers = {
            name: SimWorker(
                name,
                rates,
                engine,
                host,
                memory=abort.policy(Memory),
                clock=self.clock,
                pool=self.pool,
                restore_timeout_s=RESTORE_TIMEOUT_S,
                arrive=self.tell,
                check=check,
            )
            for name in (WorkerId(f"w{index}") for index in range(workers))
        }
        self._calls = itertools.count()
        self._driver: Driver | None = None
        self._waits: Callable[[], bool] | None = None
        self._done = False
        for worker in self.workers.values():
            self.tell(
                WorkerUp(worker=worker.worker, node=NODE, incarnation=worker.worker, max_running=worker.max_running)
            )

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self.clock.now

    # What drivers call --------------------------------------------------------------------------------

    def submit(self, submissions: Sequence[Submission]) -> None:
        self.carry_out(self.controller.submit(submissions, self.now))

    def abort(self, ids: Sequence[str] | None = None, *, keep: Keep = Keep.AUTO, then: Then = Then.HOLD) -> AbortTicket:
        """Stop trajectories, all for None; yield `lambda: ticket.done` to wait until they are."""
        ticket, commands = self.controller.abort(ids, keep, then, self.now)
        self.carry_out(commands)
        return ticket

    def resume(self, ids: Sequence[str] | None = None) -> None:
        _, commands = self.controller.resume(ids, self.now)
        self.carry_out(commands)

    def take(self, count: int) -> list[Delivery]:
        """Up to `count` groups that are finished now."""
        call = f"call {next(self._calls)}"
        taken = self.controller.take(count, call)
        self.controller.settle_calls(arrived=[call], abandoned=[])
        return taken

    def collect(self, count: int, *, over_sample: float = 0.0) -> Collecting:
        """`yield from` it for the next `count` groups, or as many as there are; what is not finished then is held for
        the next call, or goes on (`groups.rest`)."""
        call = f"call {next(self._calls)}"
        begin = Collection(call=call, wanted=count, over_sample=over_sample, stop_when_met=True, ends_at=math.inf)
        self.carry_out(self.controller.begin_collection(begin, self.now))
        yield lambda: self.controller.complete_groups >= min(count, self.controller.coming_groups)
        self.carry_out(self.controller.end_collection(call, self.now))
        return self.take(count)

    def carry_out(self, commands: Iterable[Command]) -> None:
        """Send what the controller commands; for drivers that ask it for what has no method here."""
        for command in commands:
            self.clock.after(self.rates.latency_s, self._action(command))

    def tell(self, event: Event) -> None:
        """The controller hears of this now."""
        self.carry_out(self.controller.handle(event, self.now))
        if self._waits is not None and self._waits():
            self._drive()

    # The run ------------------------------------------------------------------------------------------

    def run(self, driver: Driver) -> Outcome:
        """Until the driver is done. Raises `StalledError` if it waits for what never comes."""
        self._driver = driver
        self.clock.after(0.0, self._drive)
        self.clock.after(TICK_S, self._tick, chore=True)
        stuck_since: float | None = None
        while not self._done:
            self.clock.advance()
            if not self.clock.stuck:
                stuck_since = None
            elif stuck_since is None:
                stuck_since = self.now
            elif self.now > stuck_since + STALL_S:
                phases = {str(phase): count for phase, count in self.controller.phases.items()}
                raise StalledError(f"nothing happens any more after {stuck_since:.3f} s: {phases}")
        return self.outcome()

    def outcome(self) -> Outcome:
        """So far. A driver may take one in between, and what comes `since` then."""
        engines = [worker.stats for worker in self.workers.values()]
        return Outcome(
            seconds=self.now,
            counters=self.controller.counters,
            busy_s=tuple(worker.busy_s for worker in self.workers.values()),
            steps=sum(engine.steps for engine in engines),
            prefilled_tokens=sum(engine.prefilled_tokens for engine in engines),
            sent_bytes=self.pool.sent_bytes,
            shared_bytes=self.pool.shared_bytes,
            restored_bytes=sum(engine.restored_bytes for engine in engines),
            saved_bytes=sum(engine.written_bytes for engine in engines),
            loaded_bytes=sum(engine.loaded_bytes for engine in engines),
            decisions=self.controller.keeping.counts,
        )

    def audit(self) -> None:
        """Recompute all accounting; asserts if something is wrong."""
        self.pool.ledger.audit()
        for worker in self.workers.values():
            worker.audit()

    def _drive(self) -> None:
        """Let the driver go on until it waits again."""
        assert self._driver is not None
        self._waits = None
        while True:
            try:
                wait = next(self._driver)
            except StopIteration:
                self._done = True
                return
            if not callable(wait):
                self.clock.after(wait, self._drive)
                return
            if not wait():
                self._waits = wait
                return

    def _tick(self) -> None:
        self.tell(Tick())
        self.clock.after(TICK_S, self._tick, chore=True)

    def _action(self, command: Command) -> Callable[[], None]:
        """What a command does when it arrives."""
        match command:
            case Start(worker=name, assignment=assignment):
                return lambda: self.workers[name].start(assignment)
            case Stop(worker=name, trajectory_id=trajectory, epoch=epoch):
                return lambda: self.workers[name].stop((trajectory, epoch))
            case Release(worker=name, trajectory_id=trajectory, epoch=epoch):
                return lambda: self.workers[name].release((trajectory, epoch))
            case KeepThere(worker=name, trajectory_id=trajectory, epoch=epoch, where=where):
                return lambda: self.workers[name].keep((trajectory, epoch), where)
            case Recall(worker=name, trajectory_id=trajectory, epoch=epoch):
                return lambda: self.workers[name].recall((trajectory, epoch))
            case Pause(worker=name):
                return self.workers[name].pause
            case Unpause(worker=name):
                return self.workers[name].unpause
            case Retire():
                return lambda: None
            case Export(worker=name):
                return lambda: self.pool.export(self.workers[name], command)
            case Retain(trajectory_id=trajectory, segments=segments):
                return lambda: self.pool.retain(trajectory, segments)
            case Expect(trajectory_id=trajectory, turn=turn):
                return lambda: self.pool.expect(trajectory, turn)
            case Drop(segment=segment):
                return lambda: self.pool.drop(segment)


def forced_group(key: str, prompt_ids: Sequence[int], lengths: Sequence[int], *, seed: int = 0) -> Submission:
    """A group with one sample for each of `lengths`, which is how many tokens it is made to have."""
    return Submission(
        group_id=GroupId(key),
        prompt_ids=tuple(prompt_ids),
        sampling=tuple(SamplingParams(max_new_tokens=length, ignore_eos=True) for length in lengths),
        seeds=tuple(
            trajectory_seed(request_seed=None, run_seed=seed, key=key, sample_index=index)
            for index in range(len(lengths))
        ),
    )
