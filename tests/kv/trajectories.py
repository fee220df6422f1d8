"""What a worker has of trajectories: running, stopped with an image, exported to the pool."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.kv.holding import Holding
from rollout.kv.kept import Kept
from rollout.kv.tiers import PageRef
from rollout.kv.written import Written
from rollout.types import KVRun, TrajectoryId


@dataclass(slots=True, kw_only=True, eq=False)
class Pooled:
    """An image in the pool: one buffer and one part of the shadow for each page."""

    runs: tuple[KVRun, ...]
    """By which weights its tokens were written."""
    tokens: int
    buffers: list[NDArray[np.uint8]]
    shadow: bytes


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """A sequence on the worker."""

    holding: Holding
    kv: int
    """Positions that have KV, once nothing is on its way."""
    written: Written
    """By which weights they were, and what follows will be."""
    restoring: tuple[Pooled, int, list[int]] | None = None
    """What is being read from the pool, from which page on, and where to."""
    given_up: bool = False

    @property
    def known(self) -> int:
        """Positions that have KV, once that is there which is on its way."""
        return self.restoring[0].tokens if self.restoring is not None else self.kv

    @property
    def busy(self) -> bool:
        return bool(self.holding.loads) or self.restoring is not None


@dataclass(slots=True, kw_only=True, eq=False)
class Trajectory:
    name: TrajectoryId
    tokens: list[int]
    """The last one has no KV."""
    run: Run | None = None
    image: Kept | None = None
    pooled: Pooled | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Export:
    trajectory: Trajectory
    image: Kept
    refs: tuple[PageRef, ...]
    pooled: Pooled
    """Its whole pages are views of the worker's memory."""
