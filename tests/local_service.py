"""The whole service in one thread, without Ray: the real controller and engines around a pool of plain bytes.

Commands are carried out at once and every step is followed by an audit of the page accounting, so a
test can stop the world at any step. Time is a step counter.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rollout.config import (
    AbortConfig,
    EngineConfig,
    GroupsConfig,
    HostConfig,
    ModelConfig,
    ResumeConfig,
    WeightsConfig,
)
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
from rollout.control.messages import Event, Exported, WeightsLive, WorkerDown, WorkerEvent, WorkerReport, WorkerUp
from rollout.control.records import Record
from rollout.control.submission import Submission
from rollout.engine.assembly import Assembled, assemble
from rollout.errors import SegmentMissingError
from rollout.kv.fence import Fence
from rollout.kv.image import describe
from rollout.kv.restore import Segment
from rollout.kv.tiers import PageRef
from rollout.model.spec import read_spec
from rollout.model.weights import load_weights, stream_safetensors
from rollout.types import (
    Delivery,
    GroupId,
    Image,
    Keep,
    KVRun,
    NodeId,
    Phase,
    SamplingParams,
    SegmentId,
    SegmentRun,
    Then,
    Trajectory,
    TrajectoryId,
    Version,
    Weights,
    WeightsId,
    WorkerId,
    trajectory_seed,
)
from tests.weights import WEIGHTS

NODE = NodeId("node")
MAX_STEPS = 5000


class LocalPool:
    """Segments as copies of the bytes; one whole image per export."""

    def __init__(self) -> None:
        self.segments: dict[SegmentId, Segment] = {}
        self.restores = 0
        self.gate = threading.Event()
        """Readers wait for it."""
        self.gate.set()

    def store(
        self, source: Assembled, pages: Sequence[PageRef], tokens: int, fence: Fence, written: tuple[KVRun, ...]
    ) -> Image:
        buffers = [buffer.copy() for buffer in source.storage.gather(pages, tokens, fence)]
        for buffer in buffers:
            buffer.flags.writeable = False
        manifest = describe(
            buffers,
            fingerprint=source.fingerprint,
            page_tokens=source.storage.page_tokens,
            token_bytes=source.storage.token_bytes,
            tokens=tokens,
            canary=source.storage.shadow(pages, tokens),
        )
        segment = SegmentId(f"s{len(self.segments)}")
        self.segments[segment] = Segment(manifest=manifest, buffers=buffers)
        run = SegmentRun(node=NODE, segment=segment, first=0, pages=len(pages))
        return Image(runs=(run,), kv_tokens=tokens, written=written)

    @contextlib.contextmanager
    def open(self, runs: Sequence[SegmentRun], deadline: float) -> Iterator[Sequence[Segment]]:
        if missing := [run.segment for run in runs if run.segment not in self.segments]:
            raise SegmentMissingError(f"{missing} are not in the pool")
        self.restores += 1
        assert self.gate.wait(timeout=60), "nobody opened the gate"
        yield [self.segments[run.segment] for run in runs]


class LocalService:
    """Workers that all load the model at `path`."""

    def __init__(
        self,
        path: Path,
        *,
        workers: int = 2,
        slice_tokens: int | None = None,
        keep: Keep = Keep.POOL,
        dtype: str = "float32",
        host: dict[str, Any] | None = None,
        kv_reuse: dict[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        self.pool = LocalPool()
        self.now = 0.0
        self.model = ModelConfig.model_validate({"path": path, "dtype": dtype})
        self.host = HostConfig.model_validate(host or {})
        self.config = EngineConfig.model_validate({"kv_bytes": 8 << 20, "max_running": 4} | engine)
        policies = [{"kind": "slice_budget", "tokens": slice_tokens}] if slice_tokens is not None else []
        self.core = Controller(
            workers=workers,
            max_context=2048,
            weights=WEIGHTS,
            abort=AbortConfig.model_validate({"keep": keep, "policies": policies}),
            resume=ResumeConfig(prefer="other"),
            groups=GroupsConfig(),
            versions=WeightsConfig.model_validate({"kv_reuse": kv_reuse or {"kind": "same_weights"}}),
        )
        self.calls = itertools.count()
        self.workers: dict[WorkerId, Assembled] = {}
        self.woken = threading.Event()
        """A copy of some worker is over."""
        self.log: list[WorkerEvent] = []
        self.exports: list[Export] | None = None
        """Exports asked for and not carried out, once a test has made this a list."""
        for index in range(workers):
            self.add_worker(WorkerId(f"w{index}"))

    def add_worker(self, worker: WorkerId) -> None:
        self.workers[worker] = assemble(
            self.model,
            self.config,
            self.host,
            read_spec(self.model.path),
            reader=self.pool,
            restore_timeout_s=60.0,
            wake=self.woken.set,
            weights=self.core.weights,
        )
        self.handle(WorkerUp(worker=worker, node=NODE, incarnation=worker, max_running=self.config.max_running))

    def update(self, path: Path, version: int, *, in_place: bool = False) -> None:
        """Replace all weights by those of another directory, between two steps."""
        weights = Weights(WeightsId(f"load {next(self.calls)}"), Version(version))
        for worker in self.workers.values():
            load_weights(worker.decoder, stream_safetensors(path))
            worker.engine.replace_weights(weights, reusable=self.core.reusable_with(weights), in_place=in_place)
        self.handle(WeightsLive(weights=weights))

    def lose(self, worker: WorkerId) -> None:
        """Its process is gone; another takes its place."""
        self.workers.pop(worker).engine.close()
        self.handle(WorkerDown(worker=worker, incarnation=worker, error="killed", final=True))

    def submit(self, key: str, prompt_ids: Sequence[int], sampling: SamplingParams, n: int = 1) -> list[TrajectoryId]:
        seeds = tuple(
            trajectory_seed(request_seed=sampling.seed, run_seed=0, key=key, sample_index=index) for index in range(n)
        )
        submission = Submission(
            group_id=GroupId(key), prompt_ids=tuple(prompt_ids), sampling=(sampling,) * n, seeds=seeds
        )
        self._carry_out(self.core.submit([submission], self.now))
        return [TrajectoryId(f"{key}/{index}") for index in range(n)]

    def abort(self, *ids: TrajectoryId, keep: Keep = Keep.POOL, then: Then = Then.HOLD) -> None:
        _, commands = self.core.abort(ids, keep, then, self.now)
        self._carry_out(commands)

    def resume(self, *ids: TrajectoryId) -> None:
        _, commands = self.core.resume(ids, self.now)
        self._carry_out(commands)

    def snapshot(self, trajectory: TrajectoryId) -> Trajectory:
        return self.record(trajectory).snapshot()

    def phase(self, trajectory: TrajectoryId) -> Phase:
        return self.record(trajectory).phase

    def record(self, trajectory: TrajectoryId) -> Record:
        (record,), _ = self.core.resolve([trajectory])
        return record

    def step(self) -> None:
        """One step of every worker that has something to do."""
        self.now += 1.0
        for worker, assembled in self.workers.items():
            if assembled.engine.idle:
                continue
            self.woken.clear()
            events = assembled.engine.step()
            if assembled.engine.blocked and assembled.engine.copying:
                self.woken.wait(0.02)  # not all steps there may be while a thread copies
            assembled.engine.audit()
            self.log += events
            self.handle(WorkerReport(worker=worker, incarnation=worker, events=tuple(events)))
            assembled.engine.audit()

    def step_until(self, done: Callable[[], bool]) -> None:
        for _ in range(MAX_STEPS):
            if done():
                return
            self.step()
        raise AssertionError(f"not done after {MAX_STEPS} steps: {self.core.phases}")

    def free_pages(self) -> list[int]:
        """Of each worker, pages that nobody holds: free ones and what the tree may give up."""
        counts = [assembled.engine.stats.device for assembled in self.workers.values()]
        assert all(count.private == count.reserved == 0 for count in counts), counts
        return [count.free + count.tree for count in counts]

    def run(self, groups: int) -> dict[TrajectoryId, Trajectory]:
        """Step until `groups` groups are finished; returns their trajectories."""
        self.step_until(lambda: self.core.complete_groups >= groups)
        self.step_until(lambda: all(assembled.engine.idle for assembled in self.workers.values()))
        return {t.trajectory_id: t for delivery in self.take(groups) for t in delivery.trajectories}

    def take(self, groups: int) -> list[Delivery]:
        return self.core.take(groups, f"call {next(self.calls)}")

    def handle(self, event: Event) -> None:
        self._carry_out(self.core.handle(event, self.now))

    def close(self) -> None:
        for assembled in self.workers.values():
            assembled.engine.close()

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Start():
                    self.workers[command.worker].engine.submit(command.assignment)
                case Stop():
                    self.workers[command.worker].engine.abort((command.trajectory_id, command.epoch))
                case Release():
                    self.workers[command.worker].engine.release((command.trajectory_id, command.epoch))
                case KeepThere():
                    self.workers[command.worker].engine.keep((command.trajectory_id, command.epoch), command.where)
                case Recall():
                    self.workers[command.worker].engine.recall((command.trajectory_id, command.epoch))
                case Export() if self.exports is not None:
                    self.exports.append(command)
                case Export():
                    self.export(command)
                case Pause():
                    self.workers[command.worker].engine.pause()
                case Unpause():
                    self.workers[command.worker].engine.unpause()
                case Retain() | Expect() | Drop() | Retire():
                    pass

    def export(self, order: Export) -> None:
        source = self.workers[order.worker]
        pages, fence = source.engine.sources((order.trajectory_id, order.epoch))
        image = self.pool.store(source, pages, order.kv_tokens, fence, order.written)
        sent = order.kv_tokens * source.storage.token_bytes
        self.handle(Exported(trajectory_id=order.trajectory_id, epoch=order.epoch, image=image, sent_bytes=sent))
