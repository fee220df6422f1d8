"""Reads segments from the pools, for a worker's copy thread.

The pool leases the segments and hands out their references, nested in lists; the bytes are then views of
shared memory. Every wait ends at the restore deadline.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from rollout.cluster.description import NAMESPACE, pool_name
from rollout.errors import DeadlineError, KVError, SegmentDamagedError, SegmentMissingError
from rollout.kv.image import Buffer
from rollout.kv.restore import Segment
from rollout.types import NodeId, SegmentId, SegmentRun


class PoolReader:
    """An `ImageReader` on the pool actors of a service."""

    def __init__(self, service: str) -> None:
        self._service = service

    @contextlib.contextmanager
    def open(self, runs: Sequence[SegmentRun], deadline: float) -> Iterator[Sequence[Segment]]:
        wanted: dict[NodeId, list[SegmentId]] = {}
        for run in runs:
            wanted.setdefault(run.node, []).append(run.segment)
        segments: dict[SegmentId, Segment] = {}
        with contextlib.ExitStack() as leases:
            for node, ids in wanted.items():
                segments |= self._lease(node, list(dict.fromkeys(ids)), deadline, leases)
            yield [segments[run.segment] for run in runs]

    def _lease(
        self, node: NodeId, ids: list[SegmentId], deadline: float, leases: contextlib.ExitStack
    ) -> dict[SegmentId, Segment]:
        try:
            pool = ray.get_actor(pool_name(self._service, node), namespace=NAMESPACE)
            lease, leased = ray.get(pool.lease.remote(ids, _left(deadline)), timeout=_left(deadline))
        except ValueError:
            raise SegmentMissingError(f"node {node} has no pool any more") from None
        except GetTimeoutError:
            raise DeadlineError(f"the pool of node {node} did not answer in time") from None
        except KVError:
            raise SegmentMissingError(f"segments {ids}: not all are in the pool of node {node}") from None
        except RayError as error:
            raise SegmentMissingError(f"the pool of node {node}: {type(error).__name__}") from error
        leases.callback(pool.close_lease.remote, lease)
        return {
            segment: Segment(manifest=manifest, buffers=_read(ref, node, segment, deadline))
            for segment, (manifest, ref) in zip(ids, leased, strict=True)
        }


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
