"""The pool actor of one node: owns KV segments in Ray's object store, for as long as a trajectory needs them.

It calls the workers' export task, so it owns what they return and the bytes outlive their process. It
awaits manifests only and never looks at data. An export is charged as a whole, once it is known what the
pool lacks of it. One event loop, no locks but one per prompt that is being stored, so that a group's prompt
is sent once. Each call of a worker is a round trip: what is little is sent with what it follows.
"""

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout.cluster.calls import one_line
from rollout.cluster.description import NAMESPACE, WorkerDescription, pool_name
from rollout.cluster.jobs import Job, Part, as_runs
from rollout.cluster.spilling import SpillWatch, find_spill_parent
from rollout.cluster.warmth import Warmth
from rollout.config import Config, PoolConfig
from rollout.control.commands import Export
from rollout.control.messages import Displaced, Exported, ExportFailed
from rollout.errors import KVError, PoolFullError, SegmentDamagedError, SupersededError
from rollout.kv.image import Manifest
from rollout.kv.keys import Fingerprint, PageKey
from rollout.kv.ledger import DropReason, PoolLedger
from rollout.metrics import PoolStats
from rollout.types import Image, NodeId, SegmentId, SegmentRun, TrajectoryId, Turn

LOOK_S = 2.0
"""Spilling is not looked for more often."""
COPY_WAIT_S = 0.5
"""Who waits for room looks again after this, since readers that died say nothing."""


class Pool:
    """Segments by id, with the ledger that accounts for them."""

    def __init__(
        self,
        node: NodeId,
        config: PoolConfig,
        page_tokens: int,
        token_bytes: int,
        fingerprint: Fingerprint,
        copy_room: int = 0,
    ) -> None:
        """`copy_room` is what readers on this node may copy from other nodes beside the budget, in bytes."""
        self._node = node
        self._timeout_s = config.export_timeout_s
        self._page_tokens = page_tokens
        self._token_bytes = token_bytes
        self._fingerprint = fingerprint
        self._object_pages = max(1, int(config.max_object_bytes) // (page_tokens * token_bytes))
        self._name = uuid.uuid4().hex[:8]
        """Of this process: the names that it gives are never given again after a restart."""
        assert config.budget_bytes is not None, "placement gives it one"
        self._ledger = PoolLedger(int(config.budget_bytes), copy_room=copy_room, first_lease=time.time_ns())
        self._segments: dict[SegmentId, tuple[Manifest, Any]] = {}
        """Manifest and reference of every live or still read segment."""
        self._prompt_locks: WeakValueDictionary[PageKey, asyncio.Lock] = WeakValueDictionary()
        self._spills = SpillWatch(node, find_spill_parent())
        self._spilled = self._spills.look()
        self._looked = time.monotonic()
        self._warmth = Warmth()
        self._written_by: dict[SegmentId, str] = {}
        """The incarnation of the worker that sent each segment."""
        self._jobs: set[Job] = set()
        self._late: set[asyncio.Task[None]] = set()
        self._credited = asyncio.Event()
        self._named = 0
        self._counts: Counter[str] = Counter()
        """Fields of `PoolStats`."""

    async def export(self, worker: Any, incarnation: str, order: Export) -> Exported | ExportFailed:
        """Store what is missing of a parked sequence's KV, then have the worker free it if that is ordered.

        If that fails, the pool holds for the trajectory what it held before; others may have been displaced.
        """
        self._expire()
        claim = self._ledger.open_claim(order.trajectory_id)
        job = Job(
            worker=worker,
            incarnation=incarnation,
            order=order,
            page_tokens=self._page_tokens,
            token_bytes=self._token_bytes,
            claim=claim,
            turn=order.turn,
        )
        self._jobs.add(job)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._export(job)
            self._complete(job)
            if order.release:
                worker.release.remote(incarnation, (order.trajectory_id, order.epoch))
        except (KVError, RayError, TimeoutError) as error:
            late = isinstance(error, TimeoutError)
            text = f"the worker did not answer within {self._timeout_s:g} s" if late else one_line(error)
            return ExportFailed(
                trajectory_id=order.trajectory_id, epoch=order.epoch, error=text, displaced=tuple(job.displaced)
            )
        finally:
            self._jobs.discard(job)
            self._ledger.end_claim(claim, still_written=job.late_nbytes)
            if job.late is not None:
                self._late.add(task := asyncio.create_task(self._outlast(job)))
                task.add_done_callback(self._late.discard)
            self._let_go()
        return Exported(
            trajectory_id=order.trajectory_id,
            epoch=order.epoch,
            image=Image(runs=tuple(job.runs), kv_tokens=order.kv_tokens, written=order.written),
            sent_bytes=job.sent,
            displaced=tuple(job.displaced),
        )

    async def expect(self, trajectory: TrajectoryId, turn: Turn) -> None:
        """This is when the trajectory's image, or the one that is being exported, will be needed."""
        self._ledger.expect(trajectory, turn)
        for job in self._jobs:
            if job.order.trajectory_id == trajectory:
                job.turn = turn

    async def retain(self, trajectory: TrajectoryId, segments: frozenset[SegmentId]) -> None:
        """From now on the trajectory needs exactly these."""
        self._ledger.retain(trajectory, segments)
        self._let_go()

    async def drop(self, segment: SegmentId) -> None:
        """Forget a segment, whoever needs it: they will recompute."""
        self._ledger.drop(segment)
        self._let_go()

    async def lease(
        self, segments: Sequence[SegmentId], ttl_s: float, reader: NodeId
    ) -> tuple[int, list[tuple[Manifest, Any]]]:
        """Manifests and references of `segments`, readable for `ttl_s` seconds or until `close_lease`.

        `reader` is the node that they are read on. Raises `SegmentMissingError` if one is not stored.
        """
        self._expire()
        lease = self._ledger.lease(segments, time.monotonic() + ttl_s)
        direction = "read_here" if reader == self._node else "read_elsewhere"
        self._counts[direction] += self._ledger.nbytes(segments)
        return lease, [self._segments[segment] for segment in segments]

    async def lease_copy(self, nbytes: int, ttl_s: float) -> int:
        """Room on this node for a copy of what another node's pool holds, for `ttl_s` seconds or until `close_lease`.

        Waits for copies that are there now to end. Raises `PoolFullError` if that does not make room.
        """
        deadline = time.monotonic() + ttl_s
        while True:
            self._expire()
            try:
                return self._ledger.lease_copy(nbytes, deadline)
            except PoolFullError:
                if not self._ledger.copied or time.monotonic() >= deadline:
                    raise
            self._credited.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(COPY_WAIT_S, deadline - time.monotonic())):
                    await self._credited.wait()

    async def close_lease(self, lease: int) -> None:
        self._ledger.close_lease(lease)
        self._let_go()

    async def warmed(self, incarnation: str, nbytes: int) -> None:
        """This process of a worker has touched so much shared memory at start."""
        self._warmth.touched(incarnation, nbytes)

    async def room(self) -> int:
        """Bytes that may be stored without giving anything up."""
        return self._ledger.free

    async def stored(self) -> int:
        """Bytes of KV that it holds."""
        return self._ledger.stored

    async def spilled(self) -> int | None:
        """Bytes that Ray has moved from this node's store to disk, as far as seen; None if that is not known."""
        if time.monotonic() >= self._looked + LOOK_S:
            self._spilled = self._spills.look()
            self._looked = time.monotonic()
        return self._spilled

    async def stats(self) -> PoolStats:
        self._expire()
        ledger = self._ledger
        return PoolStats(
            node=self._node,
            budget=ledger.budget,
            stored=ledger.stored,
            reserved=ledger.reserved,
            still_read=ledger.still_read,
            copied=ledger.copied,
            segments=ledger.segments,
            images=ledger.images,
            refused=ledger.refused,
            refused_copies=ledger.refused_copies,
            displaced_images=ledger.displaced,
            dropped={str(reason): ledger.dropped[reason] for reason in DropReason},
            spilled=await self.spilled(),
            **self._counts,
        )

    async def audit(self) -> str | None:
        """What is wrong with the books, all of it counted anew; None if nothing is."""
        self._expire()
        try:
            self._ledger.audit()
            known = self._ledger.known
            assert set(self._segments) == known, f"objects and books differ: {set(self._segments) ^ known}"
            assert set(self._written_by) == known, f"writers and books differ: {set(self._written_by) ^ known}"
        except AssertionError as violation:
            return f"pool of node {self._node}: {violation}"
        return None

    async def _export(self, job: Job) -> None:
        """Complete the runs of `job`: what others stored, then what the worker sends, prompt and private apart."""
        order = job.order
        job.runs = self._usable(order.base)
        self._ledger.hold(job.claim, {run.segment for run in job.runs if run.node == self._node})
        if order.prompt_pages > job.pages:
            prompt = PageKey(order.page_keys[order.prompt_pages - 1])
            async with self._prompt_locks.setdefault(prompt, asyncio.Lock()):
                self._find(job)
                await self._send(job, order.prompt_pages)
        self._find(job)
        await self._send(job, job.all_pages)

    def _complete(self, job: Job) -> None:
        order = job.order
        if self._ledger.superseded(job.claim, order.epoch):
            raise SupersededError(f"{order.trajectory_id}: a later export than that of epoch {order.epoch} is stored")
        # The pool gives images up by what recomputing them costs: the tokens of the whole image.
        self._ledger.complete(job.claim, epoch=order.epoch, turn=job.turn, kv_tokens=order.kv_tokens)
        self._counts.update(exports=1, sent=job.sent, shared=job.shared)
        if job.sent:
            self._counts["warm_exports" if job.warm else "cold_exports"] += 1

    def _usable(self, base: Image | None) -> list[SegmentRun]:
        """The whole pages of an earlier image, up to the first segment that is gone."""
        runs: list[SegmentRun] = []
        left = base.kv_tokens // self._page_tokens if base is not None else 0
        for run in base.runs if base is not None else ():
            if not left or (run.node == self._node and not self._ledger.holds(run.segment)):
                break
            pages = min(run.pages, left)
            runs.append(SegmentRun(node=run.node, segment=run.segment, first=run.first, pages=pages))
            left -= pages
        return runs

    def _find(self, job: Job) -> None:
        """Continue the runs with pages that are stored already."""
        places = self._ledger.find([PageKey(key) for key in job.order.page_keys[job.pages :]])
        self._ledger.hold(job.claim, {place.segment for place in places})
        job.shared += len(places) * self._page_tokens * self._token_bytes
        job.runs += as_runs(self._node, places)

    def _reserve(self, job: Job) -> None:
        """Charge all that the pool still lacks of the image."""
        lacking = (job.order.kv_tokens - job.pages * self._page_tokens) * self._token_bytes
        displaced = self._ledger.reserve(job.claim, lacking, job.turn)
        job.displaced += [Displaced(trajectory_id=t, segments=segments) for t, segments in displaced.items()]
        self._let_go()

    async def _send(self, job: Job, end: int) -> None:
        """Continue the runs up to page `end` with segments that the worker sends, and with what follows if that is
        little and not stored already."""
        if job.pages < end:
            self._reserve(job)
        while job.pages < end:
            parts = job.next_parts(end, self._object_pages)
            if len(parts) > 1 and self._ledger.find([PageKey(key) for key in job.order.page_keys[end : end + 1]]):
                parts.pop()
            await self._call(job, parts)

    async def _call(self, job: Job, parts: Sequence[Part]) -> None:
        """Have the worker send an object for each part. All of them are stored, or none."""
        key = (job.order.trajectory_id, job.order.epoch)
        nbytes = sum(part.nbytes for part in parts)
        job.warm &= self._warmth.born(job.incarnation, nbytes)
        export = job.worker.export.options(num_returns=1 + len(parts))
        answer, *objects = export.remote(job.incarnation, key, [(part.first, part.stop) for part in parts])
        try:
            manifests: list[Manifest] = await answer
            for part, manifest in zip(parts, manifests, strict=True):
                if manifest.nbytes != part.nbytes:
                    raise SegmentDamagedError(f"{key}: {manifest.nbytes} bytes were sent, {part.nbytes} expected")
                if manifest.fingerprint != self._fingerprint:
                    raise SegmentDamagedError(f"{key}: computed by other kernels than those of this pool's KV")
        except BaseException as error:
            self._warmth.died(job.incarnation, nbytes)
            if isinstance(error, asyncio.CancelledError):
                job.late, job.late_nbytes = answer, nbytes
            raise
        for part, manifest, data in zip(parts, manifests, objects, strict=True):
            self._store(job, part, manifest, data)

    def _store(self, job: Job, part: Part, manifest: Manifest, data: Any) -> None:
        """Continue the runs with an object that was sent."""
        self._named += 1
        segment = SegmentId(f"{self._name}-{self._named}")
        self._segments[segment] = (manifest, data)
        self._written_by[segment] = job.incarnation
        names = [PageKey(page) for page in job.order.page_keys[part.first : part.stop]]
        self._ledger.commit(job.claim, segment, part.nbytes, names)
        job.sent += part.nbytes
        job.runs.append(SegmentRun(node=self._node, segment=segment, first=0, pages=part.stop - part.first))

    async def _outlast(self, job: Job) -> None:
        """Credit an export that nobody waits for any more, once it cannot write any more."""
        with contextlib.suppress(RayError, KVError):
            await job.late
        self._ledger.end_claim(job.claim)
        self._let_go()

    def _expire(self) -> None:
        """Credit what readers that died, or took too long, had open."""
        self._ledger.expire(time.monotonic())
        self._let_go()

    def _let_go(self) -> None:
        """Drop the references that the ledger needs no more; who waits for room may look again."""
        for segment in self._ledger.take_gone():
            manifest, _ = self._segments.pop(segment)
            self._warmth.died(self._written_by.pop(segment), manifest.nbytes)
        self._credited.set()


def start_pool(config: Config, worker: WorkerDescription) -> Any:
    """The pool actor of the node on which `worker` is. After a restart it is empty: what it held is recomputed."""
    return (
        ray.remote(Pool)
        .options(
            name=pool_name(config.cluster.name, worker.node),
            namespace=NAMESPACE,
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(worker.node, soft=False),
        )
        .remote(
            worker.node,
            config.pool,
            worker.page_tokens,
            worker.token_bytes,
            worker.fingerprint,
            worker.max_context * worker.token_bytes,
        )
    )
