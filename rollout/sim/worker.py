"""A worker on the virtual clock: the real engine, scheduler and cache, stepped as `cluster.host` steps them.

Commands take effect at step boundaries, and what happens in a step is told when its time is over. The engine is ahead
of the clock from the beginning of a step to its end; nobody looks at it then.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence

from rollout.config import EngineConfig, HostConfig, Memory
from rollout.control.commands import Assignment
from rollout.control.messages import Failed, Parked, WorkerEvent, WorkerReport
from rollout.engine.engine import IDLE_S, Engine
from rollout.engine.images import Images
from rollout.engine.live import LiveWeights
from rollout.engine.rates import Rates
from rollout.engine.scheduler import CHUNK_TOKENS, Limits, Scheduler
from rollout.errors import RequestError
from rollout.kv.cache import KVCache
from rollout.kv.keys import Fingerprint, root_key
from rollout.metrics import EngineStats
from rollout.sim.clock import Clock, Lane, Process
from rollout.sim.load import Load
from rollout.sim.machine import MachineRates
from rollout.sim.outbox import Outbox
from rollout.sim.parked import ParkedSequences
from rollout.sim.runner import VOCAB_SIZE, PacedRunner
from rollout.sim.transfers import Lender, PacedCopier, PacedRestorer
from rollout.types import Keep, SequenceKey, Version, Weights, WeightsId, WorkerId

ROOT = root_key(Fingerprint("simulated"))
WEIGHTS = Weights(WeightsId("simulated"), Version(0))


class SimWorker:
    """One worker process; its methods are what reaches it, when it does."""

    def __init__(
        self,
        worker: WorkerId,
        rates: MachineRates,
        engine: EngineConfig,
        host: HostConfig,
        *,
        memory: Memory | None,
        clock: Clock,
        pool: Lender,
        restore_timeout_s: float,
        arrive: Callable[[WorkerReport], None],
        check: bool,
    ) -> None:
        """`memory` is the policy that the worker itself carries out, if there is one. `arrive` is called when a report
        reaches the controller. With `check` the page accounting is recomputed after every step."""
        self.worker = worker
        self.max_running = engine.max_running
        self.busy_s = 0.0
        """Of all steps that ran something."""
        self._clock = clock
        self._rates = rates
        self._check = check
        self._load = Load(rates.slowdown)
        self._lane = Lane(clock, rates.export_lanes)
        self._parked = ParkedSequences(self._send)
        self._stepping = False
        self._idle_look = False
        """One is scheduled."""
        self._inbox: deque[Callable[[], None] | None] = deque()
        self._outbox = Outbox(worker, clock, latency_s=rates.latency_s, arrive=arrive)
        self._runner = PacedRunner(rates, self._load, self._now)
        self._engine = self._assemble(engine, host, memory, pool, restore_timeout_s)

    # Commands, on arrival -----------------------------------------------------------------------------

    def start(self, assignment: Assignment) -> None:
        self._send(lambda: self._submit(assignment))

    def stop(self, key: SequenceKey) -> None:
        self._send(lambda: self._engine.abort(key))

    def release(self, key: SequenceKey) -> None:
        """Free what the sequence left here, once no export reads it."""
        self._parked.close(key, lambda: self._engine.release(key))

    def keep(self, key: SequenceKey, where: Keep) -> None:
        """Leave a parked sequence's pages on this worker, once no export reads them."""
        self._parked.close(key, lambda: self._engine.keep(key, where))

    def recall(self, key: SequenceKey) -> None:
        self._send(lambda: self._engine.recall(key))

    def pause(self) -> None:
        self._send(self._engine.pause)

    def unpause(self) -> None:
        self._send(self._engine.unpause)

    def export(self, key: SequenceKey, nbytes: int) -> Process:
        """The pool has so many bytes of a parked sequence when this is over.

        Raises `SegmentMissingError` if it is not parked here.
        """
        yield self._lane
        try:
            self._parked.begin(key)
            seconds = self._rates.export.seconds(nbytes)
            self._load.moves(self._clock.now, self._clock.now + seconds)
            yield seconds
            self._parked.end(key)
        finally:
            self._lane.leave()

    # For the simulation -------------------------------------------------------------------------------

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    def audit(self) -> None:
        self._engine.audit()

    def _assemble(
        self, config: EngineConfig, host: HostConfig, memory: Memory | None, pool: Lender, restore_timeout_s: float
    ) -> Engine:
        """As `engine.assembly`, around what takes virtual time."""
        rates = self._rates
        cache = KVCache(
            rates.device_pages,
            rates.page_tokens,
            host_pages=rates.host_pages,
            write=host.write,
            prefer_shared=config.eviction == "shared_first",
        )
        limits = Limits(
            max_running=config.max_running,
            chunk_tokens=config.chunk_tokens or max(CHUNK_TOKENS, rates.page_tokens),
            prefill_tokens=config.prefill_tokens,
            replays=False,
            spare_pages=math.ceil(memory.free_share * rates.device_pages) if memory is not None else 0,
        )
        live = LiveWeights(WEIGHTS)
        images = Images(cache, live, tail_hold_s=config.tail_hold_s)
        measured = Rates(rates.token_bytes, host.load_back_tokens)
        return Engine(
            runner=self._runner,
            scheduler=Scheduler(cache, images, measured, live, limits),
            cache=cache,
            images=images,
            copier=PacedCopier(rates, self._clock, self._load, self._now, self._wake),
            restorer=PacedRestorer(rates, self._clock, self._load, pool, timeout_s=restore_timeout_s, wake=self._wake),
            rates=measured,
            root=ROOT,
            vocab_size=VOCAB_SIZE,
            eos_ids=(),
            max_context=min(rates.max_context, rates.device_pages * rates.page_tokens),
            replays=False,
            live=live,
            clock=self._now,
        )

    # The engine's thread ------------------------------------------------------------------------------

    def _now(self) -> float:
        """The engine's time: in a step, after its forward, ahead of the clock."""
        return self._clock.now + (self._runner.elapsed_s if self._stepping else 0.0)

    def _send(self, message: Callable[[], None] | None) -> None:
        self._inbox.append(message)
        self._go()

    def _wake(self) -> None:
        self._send(None)

    def _go(self) -> None:
        """What the thread does until it steps, or sleeps."""
        if self._stepping:
            return
        while self._inbox:
            message = self._inbox.popleft()
            if message is not None:
                message()
        self._engine.expire()
        if self._check:
            self._engine.audit()
        if self._engine.idle:
            return
        self._runner.elapsed_s = 0.0
        self._stepping = True
        events = self._engine.step()
        self.busy_s += self._runner.elapsed_s
        if self._check:
            self._engine.audit()
        self._clock.after(self._runner.elapsed_s, lambda: self._end_step(events))

    def _end_step(self, events: list[WorkerEvent]) -> None:
        self._stepping = False
        self._tell(events)
        if self._inbox or not self._engine.blocked:
            self._go()
        elif not self._idle_look:
            self._idle_look = True
            self._clock.after(IDLE_S, self._look, chore=True)

    def _look(self) -> None:
        self._idle_look = False
        self._go()

    def _submit(self, assignment: Assignment) -> None:
        try:
            self._engine.submit(assignment)
        except RequestError as error:
            text = f"{type(error).__name__}: {error}"
            self._tell([Failed(trajectory_id=assignment.trajectory_id, epoch=assignment.epoch, error=text)])

    def _tell(self, events: Sequence[WorkerEvent]) -> None:
        for event in events:
            if isinstance(event, Parked):
                self._parked.open((event.trajectory_id, event.epoch))
        if events:
            self._outbox.put(events, self._engine.facts())
