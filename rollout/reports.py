"""What calls of a driver came to. Frozen values."""

from dataclasses import dataclass

from rollout.types import Delivery, Trajectory, TrajectoryId, UpdateMode, Version, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What one `collect` came to."""

    groups: tuple[Delivery, ...]
    rejected: tuple[Delivery, ...] = ()
    """Finished groups that `accept` refused; each was made up for by another."""
    held: int = 0
    """Groups that are not finished, number: held for the next call, unless `groups.rest` lets them run on."""
    timed_out: bool = False
    """Fewer groups than asked for although more were coming: the time was up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortReport:
    """What an abort met. Every id asked for is in exactly one of the first four."""

    found: tuple[TrajectoryId, ...] = ()
    """Stopped by this call (or already suspended)."""
    unknown: tuple[TrajectoryId, ...] = ()
    """No such trajectory."""
    finished: tuple[TrajectoryId, ...] = ()
    """Had completed before the abort took effect."""
    unreached: tuple[TrajectoryId, ...] = ()
    """Not stopped before `timeout_s`; the abort stays in force."""
    partials: tuple[Trajectory, ...] = ()
    """The tokens so far of every trajectory asked for that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardReport:
    """What a discard met. Every id asked for is in exactly one of the two."""

    discarded: tuple[TrajectoryId, ...] = ()
    """Gone with their tokens, or about to be."""
    unknown: tuple[TrajectoryId, ...] = ()
    """No such trajectory, or over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """What taking a worker out of service came to."""

    worker: WorkerId
    moved: tuple[TrajectoryId, ...] = ()
    """Trajectories that were on it, or had KV on it, when it was asked for."""
    empty: bool = True
    """Nothing is left on it, and its process was ended; otherwise the drain goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushReport:
    """KV that was dropped, in bytes; what running trajectories use stays.

    What is just being moved to a pool is dropped when it is there, and not counted.
    """

    device_bytes: int = 0
    host_bytes: int = 0
    pool_bytes: int = 0

    def __add__(self, other: "FlushReport") -> "FlushReport":
        return FlushReport(
            device_bytes=self.device_bytes + other.device_bytes,
            host_bytes=self.host_bytes + other.host_bytes,
            pool_bytes=self.pool_bytes + other.pool_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseReport:
    """Memory that workers gave back."""

    nbytes: dict[WorkerId, int]
    """Bytes, by worker."""
    suspended: tuple[TrajectoryId, ...] = ()
    """Trajectories that ran there, or had KV there: it is in the pool now, or is computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What an update of the weights came to."""

    version: Version
    previous: Version
    """That was live before."""
    mode: UpdateMode
    workers: tuple[WorkerId, ...]
    """That have the new weights."""
    fenced: dict[WorkerId, str]
    """Workers that failed to load them, and why: their processes were ended, and serve again when they have."""
    nbytes: int
    """Of the tensors, read by each worker."""
    prepare_s: float
    """In which workers checked the new weights while they decoded."""
    pause_s: float
    """From then on, until trajectories could go on."""
    commit_s: float
    """Of these, in which the weights were replaced."""

    @property
    def rolled_back(self) -> bool:
        """The version is older than the one before."""
        return self.version < self.previous


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """What a resume met."""

    resumed: tuple[TrajectoryId, ...] = ()
    """Queued, or running already."""
    unknown: tuple[TrajectoryId, ...] = ()
    """No such trajectory, over, or waiting for `extend`."""
