"""A traced service whose weights are replaced, and what each part of that takes: of the trainer, and of every worker.

Times are read from the monotonic clock, which all processes of a machine share. Of a worker:

- prepare: it opens what was announced, sees that it fits, and reads all of it once for the checksums. With a staged
  broadcast that is receiving it, and so waiting for whoever packs and sends.
- commit: from the command until the weights are replaced: reading again, copying and packing into the layout of the
  kernels; the rest of a step that is under way (`step_wait`) comes before. With a broadcast that is not staged,
  receiving is here, and decoding waits meanwhile.

Of the trainer, which is this process: packing into buckets with checksums; `ship` is packing and putting them into the
object store; `send` is a whole broadcast, until every worker has all of it.
"""

import contextlib
import itertools
import statistics
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self
from unittest import mock

import numpy as np
import ray
import torch
from torch import Tensor

from benchmarks.measure import MeasurementError, timed
from benchmarks.moves import POLL_S, TIMEOUT_S, Scene
from benchmarks.services import settle
from benchmarks.tracing import TRACED, Mark, Trace, Traced, TracedWorker
from rollout.client import AsyncRollout, Rollout, asynchronous
from rollout.cluster import host, shipment, weights
from rollout.cluster.host import Host
from rollout.config import Collective, Disk, ObjectStore
from rollout.engine.engine import Engine
from rollout.errors import DeadlineError
from rollout.reports import UpdateReport
from rollout.transport import buckets, collective, disk
from rollout.transport.buckets import ALIGNMENT, Bucket, pack
from rollout.transport.shards import Shard
from rollout.types import SamplingParams

Source = Path | Mapping[str, Tensor]
Steps = list[tuple[float, float]]
"""When decode steps of a whole batch began and ended."""


class UpdatedWorker(TracedWorker):
    """A worker that can say how it came to its weights, and copies as many bytes plainly."""

    traced: ClassVar[Traced] = {
        "step": TRACED["step"],
        "sampled": TRACED["sampled"],
        "open": (weights, "open_parcel"),
        "verify": (Host, "prepare_weights"),
        "commit": (Host, "commit_weights"),
        "write": (host, "write_weights"),
        "change": (Engine, "replace_weights"),
        "fetch": (weights, "_fetch"),
        "read": (Shard, "read"),
        "check": (buckets, "check"),
        "check_file": (disk, "check"),
    }
    _buffers: Sequence[tuple[Any, Any]] = ()

    @ray.method(concurrency_group="data")
    def hold_buffers(self, sizes: Sequence[int]) -> None:
        """Two of each size, touched and copied once; in the place of those before.

        They lie in two large ones, of torch, as weights are: many small ones would not all be given back.
        """
        self._buffers = ()
        starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        source, target = (torch.ones(starts[-1], dtype=torch.uint8).numpy() for _ in range(2))
        self._buffers = [
            (source[start : start + size], target[start : start + size])
            for start, size in zip(starts, sizes, strict=False)
        ]
        self.copy_buffers()

    @ray.method(concurrency_group="data")
    def copy_buffers(self) -> float:
        """Seconds of one copy of each, one after the other, on one thread."""

        def copy() -> None:
            for source, target in self._buffers:
                np.copyto(target, source)

        return timed(copy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worked:
    """What one worker did in one update, in seconds."""

    prepare: float
    commit: float
    phases: Mapping[str, float]
    """`open` and `verify` are prepare, `step_wait` and `write` are commit. In these: `fetch` of buckets from the object
    store, `read` of files, `check` of checksums."""
    gap: float | None
    """The longest time from the end of one decode step of the whole batch to that of the next one, around it."""
    around_write: Mapping[str, float]
    """From the end of the step before weights were written to that of the next: `to_write`, `writing`, `to_next`."""
    step: float | None
    """From one to the next by median, before it began."""
    step_preparing: float | None
    """From one to the next by median, from when it began until weights were written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One that succeeded on all workers."""

    seconds: float
    """From the driver's call until its report."""
    report: UpdateReport
    trainer: Mapping[str, float]
    """`pack`, `ship`, `send`."""
    workers: Sequence[Worked]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Trajectories that decode while weights are replaced."""

    prompts: list[list[int]]
    """One for each worker."""
    batch: int
    """Trajectories of each."""
    before: int
    """Decode steps of every worker before an update begins."""
    after: int
    """And after it is reported."""


class Updates:
    """A service, with a client for each transport. Ends with its context."""

    def __init__(
        self, config: Mapping[str, Any], transports: Mapping[str, ObjectStore | Disk | Collective], nbytes: int
    ) -> None:
        """`nbytes` are those of the tensors that every update is to bring."""
        self._scene = Scene(config, UpdatedWorker)
        self._nbytes = nbytes
        self._version = 0
        description = self._scene.service.description
        self._clients = {}
        for name, transport in transports.items():
            section = description.config.weights.model_copy(update={"transport": transport})
            changed = replace(description, config=description.config.model_copy(update={"weights": section}))
            client = AsyncRollout(self._scene.service.controller, changed, key_prefix=f"{name}-", on_close=None)
            self._clients[name] = Rollout(client)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients.values():
            client.close()
        self._scene.client.close()

    def hold_buffers(self, sizes: Sequence[int]) -> None:
        """In every worker: what `copy` copies; none to let go of them."""
        ray.get([actor.hold_buffers.remote(sizes) for actor in self._scene.workers], timeout=TIMEOUT_S)

    def copy(self, workers: int) -> float:
        """Seconds of a plain copy of the buffers in so many workers at once; of the slowest."""
        each = [actor.copy_buffers.remote() for actor in self._scene.workers[:workers]]
        return float(max(ray.get(each, timeout=TIMEOUT_S)))

    def update(self, transport: str, source: Source, mode: str, load: Load | None = None) -> Update:
        """Replace the weights, while nothing runs, or in the middle of a load."""
        client = self._clients[transport]
        watch = _Watch(self._scene, load.batch if load else 0)
        groups: list[Any] = []
        if load is not None:
            sampling = SamplingParams(max_new_tokens=1 << 15, ignore_eos=True)
            groups = client.submit(load.prompts, n=load.batch, sampling=sampling)
            watch.until(load.before + 1, after=0.0)
        self._version += 1
        with trainer_clock() as trainer:
            begin = time.monotonic()
            report = client.update_weights(source, self._version, mode=mode, timeout_s=TIMEOUT_S)
            end = time.monotonic()
        if load is not None:
            watch.until(load.after, after=end)
            client.abort(keep="none", then="finish", timeout_s=TIMEOUT_S)
            if len(client.next_groups(len(groups), TIMEOUT_S)) < len(groups):
                raise DeadlineError(f"{len(groups)} groups were stopped and did not end within {TIMEOUT_S:g} s")
            settle(client)
        watch.look()
        expected = len(self._scene.workers)
        if report.fenced or len(report.workers) != expected or report.nbytes != self._nbytes:
            raise MeasurementError(f"an update of {self._nbytes} bytes on {expected} workers came to {report}")
        workers = [worked(marks, watch.steps(marks), begin) for marks in watch.marks]
        return Update(seconds=end - begin, report=report, trainer=trainer, workers=workers)


@contextlib.contextmanager
def trainer_clock() -> Iterator[Mapping[str, float]]:
    """What updates within take of this process, in seconds: `pack`, `ship` and `send`."""
    seconds = {"pack": 0.0, "ship": 0.0, "send": 0.0}

    class TimedShipment(shipment.Shipment):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            seconds["ship"] += timed(lambda: super(TimedShipment, self).__init__(*args, **kwargs))

        def send(self) -> None:
            seconds["send"] += timed(super().send)

    def timed_pack(named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
        packed = pack(named_tensors, bucket_bytes)
        while True:
            begin = time.monotonic()
            bucket = next(packed, None)
            seconds["pack"] += time.monotonic() - begin
            if bucket is None:
                return
            yield bucket
            del bucket

    with (
        mock.patch.object(asynchronous, "Shipment", TimedShipment),
        mock.patch.object(weights, "pack", timed_pack),
        mock.patch.object(collective, "pack", timed_pack),
    ):
        yield seconds


class _Watch:
    """What every worker does from now on."""

    def __init__(self, scene: Scene, batch: int) -> None:
        self._scene = scene
        self._batch = batch
        self.marks: list[list[Mark]] = [[] for _ in scene.workers]
        self.look()
        for each in self.marks:
            each.clear()

    def look(self) -> None:
        answers = ray.get([actor.marks.remote() for actor in self._scene.workers], timeout=TIMEOUT_S)
        for known, fresh in zip(self.marks, answers, strict=True):
            known.extend(fresh)

    def until(self, steps: int, *, after: float) -> None:
        """So many decode steps of a whole batch were made on every worker. Raises `DeadlineError`."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            self.look()
            made = [sum(begin >= after for begin, _ in self.steps(marks)) for marks in self.marks]
            if min(made) >= steps:
                return
            if time.monotonic() > deadline:
                raise DeadlineError(f"decode steps of {self._batch} sequences within {TIMEOUT_S:g} s: {made}")
            time.sleep(POLL_S)

    def steps(self, marks: Sequence[Mark]) -> Steps:
        """Those that sampled a token of every trajectory of a batch."""
        if not self._batch:
            return []
        sampled = sorted(mark.begin for mark in marks if mark.name == "sampled")
        return [
            (mark.begin, mark.end)
            for mark in sorted((mark for mark in marks if mark.name == "step"), key=lambda mark: mark.begin)
            if bisect_right(sampled, mark.end) - bisect_left(sampled, mark.begin) == self._batch
        ]


def worked(marks: Sequence[Mark], steps: Steps, begin: float) -> Worked:
    """In an update that began then."""
    trace = Trace(mark for mark in marks if mark.begin >= begin)
    opened, verified, commit, write = (trace.first(name) for name in ("open", "verify", "commit", "write"))
    ends = [end for _, end in steps]
    pairs = list(itertools.pairwise(ends))
    before = [after - first for first, after in pairs if after <= begin]
    preparing = [after - first for first, after in pairs if first >= begin and after <= write.begin]
    around = [after - first for first, after in pairs if after > begin]
    written = [(first, after) for first, after in pairs if first <= write.begin and write.end <= after]
    return Worked(
        prepare=opened.seconds + verified.seconds,
        commit=commit.seconds,
        phases={
            "open": opened.seconds,
            "verify": verified.seconds,
            "step_wait": write.begin - commit.begin,
            "write": write.seconds,
            "fetch": trace.seconds("fetch"),
            "read": trace.seconds("read"),
            "check": trace.seconds("check") + trace.seconds("check_file"),
        },
        gap=max(around) if around else None,
        around_write={
            "to_write": write.begin - written[0][0],
            "writing": write.seconds,
            "to_next": written[0][1] - write.end,
        }
        if written
        else {},
        step=statistics.median(before) if before else None,
        step_preparing=statistics.median(preparing) if preparing else None,
    )
