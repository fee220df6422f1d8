"""Reads segments from the pools, for a worker's copy thread.

The pools lease the segments and hand out their references, nested in lists; the bytes are then views of
shared memory. Ray copies what is on another node into this node's store, so this node's pool makes room for
that first, and all of it is asked for before any of it is waited for. Every wait ends at the restore deadline.
Leases are closed by a thread of their own, since the call costs a restore about 1 ms of which it needs nothing.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from rollout.cluster.description import NAMESPACE, pool_name
from rollout.errors import DeadlineError, KVError, PoolFullError, SegmentDamagedError, SegmentMissingError
from rollout.kv.image import Buffer, Manifest
from rollout.kv.restore import Segment
from rollout.types import NodeId, SegmentId, SegmentRun


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leased:
    """A segment that its pool keeps for us."""

    node: NodeId
    manifest: Manifest
    ref: Any


class PoolReader:
    """An `ImageReader` on the pool actors of a service."""

    def __init__(self, service: str, node: NodeId) -> None:
        """`node` is where it reads."""
        self._service = service
        self._node = node
        self._pools: dict[NodeId, Any] = {}
        """Actors that answered, or were not asked yet: to look one up is a question to the head node."""
        self._closing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="leases")

    @contextlib.contextmanager
    def open(self, runs: Sequence[SegmentRun], deadline: float) -> Iterator[Sequence[Segment]]:
        wanted: dict[NodeId, list[SegmentId]] = {}
        for run in runs:
            wanted.setdefault(run.node, []).append(run.segment)
        with contextlib.ExitStack() as leases:
            leased = self._lease({node: list(dict.fromkeys(ids)) for node, ids in wanted.items()}, deadline, leases)
            self._make_room(leased, deadline, leases)
            if far := [one.ref for one in leased.values() if one.node != self._node]:
                ray.wait(far, num_returns=len(far), timeout=_left(deadline))
            segments = {
                segment: Segment(manifest=one.manifest, buffers=_read(one.ref, one.node, segment, deadline))
                for segment, one in leased.items()
            }
            yield [segments[run.segment] for run in runs]

    def _lease(
        self, wanted: Mapping[NodeId, list[SegmentId]], deadline: float, leases: contextlib.ExitStack
    ) -> dict[SegmentId, _Leased]:
        asked = [
            (node, pool, pool.lease.remote(ids, _left(deadline), self._node))
            for node, ids in wanted.items()
            for pool in [self._pool(node)]
        ]
        leased: dict[SegmentId, _Leased] = {}
        for node, pool, answer in asked:
            ids = wanted[node]
            with self._pool_errors(node, f"segments {ids} are not all there"):
                lease, found = ray.get(answer, timeout=_left(deadline))
            leases.callback(self._closing.submit, pool.close_lease.remote, lease)
            leased |= {
                segment: _Leased(node=node, manifest=manifest, ref=ref)
                for segment, (manifest, ref) in zip(ids, found, strict=True)
            }
        return leased

    def _make_room(self, leased: Mapping[SegmentId, _Leased], deadline: float, leases: contextlib.ExitStack) -> None:
        """Have this node's pool account for the copies that Ray will make here, until they are read."""
        nbytes = sum(one.manifest.nbytes for one in leased.values() if one.node != self._node)
        if not nbytes:
            return
        pool = self._pool(self._node)
        with self._pool_errors(self._node, "no room for a copy"):
            lease = ray.get(pool.lease_copy.remote(nbytes, _left(deadline)), timeout=_left(deadline))
        leases.callback(self._closing.submit, pool.close_lease.remote, lease)

    def _pool(self, node: NodeId) -> Any:
        if node not in self._pools:
            try:
                self._pools[node] = ray.get_actor(pool_name(self._service, node), namespace=NAMESPACE)
            except ValueError:
                raise SegmentMissingError(f"node {node} has no pool any more") from None
        return self._pools[node]

    @contextlib.contextmanager
    def _pool_errors(self, node: NodeId, refusal: str) -> Iterator[None]:
        """What a pool answers, or that it does not, as an error of ours. One that died is looked up again."""
        try:
            yield
        except GetTimeoutError:
            raise DeadlineError(f"the pool of node {node} did not answer in time") from None
        except PoolFullError as error:
            raise PoolFullError(f"the pool of node {node}: {getattr(error, 'cause', error)}") from None
        except KVError:
            raise SegmentMissingError(f"the pool of node {node}: {refusal}") from None
        except RayError as error:
            if isinstance(error, RayActorError):
                self._pools.pop(node, None)
            raise SegmentMissingError(f"the pool of node {node}: {type(error).__name__}") from error


def _read(ref: Any, node: NodeId, segment: SegmentId, deadline: float) -> list[Buffer]:
    """The page buffers of one segment: views of shared memory."""
    try:
        pages = ray.get(ref, timeout=_left(deadline))
    except GetTimeoutError:
        raise DeadlineError(f"segment {segment}: not read in time") from None
    except RayError as error:
        raise SegmentMissingError(f"segment {segment}: {type(error).__name__}", node=node, segment=segment) from error
    if not isinstance(pages, list) or not all(map(_is_buffer, pages)):
        raise SegmentDamagedError(f"segment {segment} is not a list of page buffers", node=node, segment=segment)
    return pages


def _is_buffer(page: object) -> bool:
    return isinstance(page, np.ndarray) and page.dtype == np.uint8 and page.ndim == 1 and page.flags.c_contiguous


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
