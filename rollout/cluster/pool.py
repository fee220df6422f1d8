"""The pool actor of one node: owns KV segments in Ray's object store, for as long as a trajectory needs them.

It calls the workers' export task, so it owns what they return and the bytes outlive their process. It
awaits manifests only and never looks at data. One event loop, no locks but one per prompt that is
being stored, so that a group's prompt is sent once.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout.cluster.description import NAMESPACE, WorkerDescription, pool_name
from rollout.config import Config, PoolConfig
from rollout.control.messages import Export
from rollout.errors import KVError, SegmentDamagedError
from rollout.kv.image import Manifest
from rollout.kv.keys import Fingerprint, PageKey
from rollout.kv.ledger import Place, PoolLedger
from rollout.metrics import PoolStats
from rollout.types import Image, NodeId, SegmentId, SegmentRun, TrajectoryId


@dataclass(slots=True, kw_only=True)
class _Job:
    """An export under way."""

    worker: Any
    incarnation: str
    order: Export
    runs: list[SegmentRun]
    """The image so far."""
    sent: int = 0
    shared: int = 0

    @property
    def pages(self) -> int:
        return sum(run.pages for run in self.runs)


class Pool:
    """Segments by id, with the ledger that accounts for them."""

    def __init__(
        self, node: NodeId, config: PoolConfig, page_tokens: int, token_bytes: int, fingerprint: Fingerprint
    ) -> None:
        self._node = node
        self._timeout_s = config.export_timeout_s
        self._page_tokens = page_tokens
        self._token_bytes = token_bytes
        self._fingerprint = fingerprint
        self._object_pages = max(1, int(config.max_object_bytes) // (page_tokens * token_bytes))
        self._name = uuid.uuid4().hex[:8]
        """Of this process: the names that it gives are never given again after a restart."""
        self._ledger = PoolLedger(int(config.budget_bytes), first_lease=time.time_ns())
        self._segments: dict[SegmentId, tuple[Manifest, Any]] = {}
        """Manifest and reference of every live or still read segment."""
        self._prompt_locks: WeakValueDictionary[PageKey, asyncio.Lock] = WeakValueDictionary()
        self._refunds: set[asyncio.Task[None]] = set()
        self._named = 0
        self._exports = 0
        self._sent = 0
        self._shared = 0

    async def export(self, worker: Any, incarnation: str, order: Export) -> tuple[Image, int]:
        """Store what is missing of a parked sequence's KV; returns its image and the bytes sent for it.

        Raises `PoolFullError`, `SegmentMissingError` (the worker has it no more), `TimeoutError`, or Ray's
        error if the worker is lost; the pool then holds for the trajectory what it held before.
        """
        self._expire()
        held = self._ledger.held_by(order.trajectory_id)
        job = _Job(worker=worker, incarnation=incarnation, order=order, runs=self._usable(order.base))
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._export(job)
        except BaseException:
            self._let_go(self._ledger.retain(order.trajectory_id, held))
            raise
        self._exports += 1
        self._sent += job.sent
        self._shared += job.shared
        return Image(runs=tuple(job.runs), kv_tokens=order.kv_tokens), job.sent

    async def retain(self, trajectory: TrajectoryId, segments: frozenset[SegmentId]) -> None:
        """From now on the trajectory needs exactly these."""
        self._let_go(self._ledger.retain(trajectory, segments))

    async def drop(self, segment: SegmentId) -> None:
        """Forget a segment, whoever needs it: they will recompute."""
        self._let_go(self._ledger.drop(segment))

    async def lease(self, segments: Sequence[SegmentId], ttl_s: float) -> tuple[int, list[tuple[Manifest, Any]]]:
        """Manifests and references of `segments`, readable for `ttl_s` seconds or until `close_lease`.

        Raises `SegmentMissingError` if one is not stored.
        """
        self._expire()
        lease = self._ledger.lease(segments, time.monotonic() + ttl_s)
        return lease, [self._segments[segment] for segment in segments]

    async def close_lease(self, lease: int) -> None:
        self._let_go(self._ledger.close_lease(lease))

    async def stats(self) -> PoolStats:
        self._expire()
        return PoolStats(
            node=self._node,
            budget=self._ledger.budget,
            stored=self._ledger.stored,
            reserved=self._ledger.reserved,
            still_read=self._ledger.still_read,
            segments=self._ledger.segments,
            exports=self._exports,
            sent=self._sent,
            shared=self._shared,
            refused=self._ledger.refused,
        )

    async def _export(self, job: "_Job") -> None:
        """Complete the runs of `job`: what others stored, then what the worker sends, prompt and private apart."""
        order = job.order
        if order.prompt_pages > job.pages:
            prompt = PageKey(order.page_keys[order.prompt_pages - 1])
            async with self._prompt_locks.setdefault(prompt, asyncio.Lock()):
                self._find(job)
                await self._send(job, order.prompt_pages)
        self._find(job)
        await self._send(job, -(-order.kv_tokens // self._page_tokens))

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

    def _find(self, job: "_Job") -> None:
        """Continue the runs with pages that are stored already."""
        places = self._ledger.find([PageKey(key) for key in job.order.page_keys[job.pages :]])
        self._ledger.hold(job.order.trajectory_id, {place.segment for place in places})
        job.shared += len(places) * self._page_tokens * self._token_bytes
        job.runs += _as_runs(self._node, places)

    async def _send(self, job: "_Job", end: int) -> None:
        """Continue the runs up to page `end` with segments that the worker sends."""
        order = job.order
        while (first := job.pages) < end:
            stop = min(end, first + self._object_pages)
            tokens = min(stop * self._page_tokens, order.kv_tokens) - first * self._page_tokens
            nbytes = tokens * self._token_bytes
            self._ledger.charge(nbytes)
            key = (order.trajectory_id, order.epoch)
            manifest_ref, data_ref = job.worker.export.remote(job.incarnation, key, first, stop)
            try:
                manifest: Manifest = await manifest_ref
                if manifest.nbytes != nbytes or manifest.fingerprint != self._fingerprint:
                    raise SegmentDamagedError(f"{key}: {manifest.nbytes} bytes were sent, {nbytes} expected")
            except asyncio.CancelledError:
                self._refunds.add(refund := asyncio.create_task(self._refund(manifest_ref, nbytes)))
                refund.add_done_callback(self._refunds.discard)
                raise
            except BaseException:
                self._ledger.refund(nbytes)
                raise
            self._named += 1
            segment = SegmentId(f"{self._name}-{self._named}")
            self._segments[segment] = (manifest, data_ref)
            names = [PageKey(page) for page in order.page_keys[first:stop]]
            self._ledger.commit(segment, nbytes, names, order.trajectory_id)
            job.sent += nbytes
            job.runs.append(SegmentRun(node=self._node, segment=segment, first=0, pages=stop - first))

    async def _refund(self, manifest_ref: Any, nbytes: int) -> None:
        """Credit an export that nobody waits for any more, once it cannot write any more."""
        with contextlib.suppress(RayError, KVError):
            await manifest_ref
        self._ledger.refund(nbytes)

    def _expire(self) -> None:
        """Credit what readers that died, or took too long, had open."""
        self._let_go(self._ledger.expire(time.monotonic()))

    def _let_go(self, segments: Sequence[SegmentId]) -> None:
        for segment in segments:
            del self._segments[segment]


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
        .remote(worker.node, config.pool, worker.page_tokens, worker.token_bytes, worker.fingerprint)
    )


def _as_runs(node: NodeId, places: Sequence[Place]) -> list[SegmentRun]:
    """Consecutive places joined to runs."""
    runs: list[SegmentRun] = []
    for place in places:
        last = runs[-1] if runs else None
        if last is not None and last.segment == place.segment and last.first + last.pages == place.index:
            runs[-1] = SegmentRun(node=node, segment=last.segment, first=last.first, pages=last.pages + 1)
        else:
            runs.append(SegmentRun(node=node, segment=place.segment, first=place.index, pages=1))
    return runs
