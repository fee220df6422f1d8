"""What workers tell the controller, and what it is told from outside. Frozen values; `commands` has its answers.

Every message about a trajectory on a worker carries the epoch of its assignment. An epoch ends with
`Finished`, `Parked` or `Failed`, or with its worker; whatever arrives of an older epoch is ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout.control.paces import Pace, PrefillTimes
from rollout.types import (
    AbortReason,
    Columns,
    FinishReason,
    Image,
    Keep,
    KVRun,
    NodeId,
    SegmentId,
    SequenceKey,
    TrajectoryId,
    Version,
    Weights,
    WorkerId,
)

TELL_S = 0.1
"""A worker tells tokens at most once in this time, unless something else is to be told: each time costs it and the
controller a call, and a token is of use to nobody before its trajectory stops."""

# From a worker ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    trajectory_id: TrajectoryId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted(WorkerEvent):
    """The sequence got its pages (again, after a preemption); its KV came from here, in tokens."""

    cached_tokens: int
    loaded_tokens: int = 0
    restored_tokens: int
    recomputed_tokens: int
    written: tuple[KVRun, ...]
    """By which weights, of those that are not computed now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFailed(WorkerEvent):
    """The image could not be used; the sequence recomputes. `Admitted` was, or will be, told again."""

    error: str
    node: NodeId | None = None
    segment: SegmentId | None = None
    """What is of no use to anybody, where that is known, and whose pool holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled(WorkerEvent):
    """New tokens; `offset` is the index of the first one in the trajectory's output."""

    offset: int
    columns: Columns

    def __reduce__(self) -> tuple[Any, ...]:
        """What most reports are full of, in a form that costs a fraction of the usual one."""
        columns = self.columns
        ids, logprobs, versions = columns.ids, columns.logprobs, columns.versions
        return _sampled, (self.trajectory_id, self.epoch, self.offset, ids, logprobs, versions)


def _sampled(
    trajectory_id: TrajectoryId,
    epoch: int,
    offset: int,
    ids: list[int],
    logprobs: list[float],
    versions: list[Version | None],
) -> Sampled:
    columns = Columns(ids, logprobs, versions)
    return Sampled(trajectory_id=trajectory_id, epoch=epoch, offset=offset, columns=columns)


def merge_sampled(events: Sequence[WorkerEvent]) -> tuple[WorkerEvent, ...]:
    """The same events, with a trajectory's consecutive `Sampled` joined to one: the first takes in the others."""
    merged: list[WorkerEvent] = []
    last: dict[SequenceKey, Sampled] = {}
    for event in events:
        key = (event.trajectory_id, event.epoch)
        if not isinstance(event, Sampled):
            last.pop(key, None)
            merged.append(event)
        elif key in last:
            last[key].columns.extend(event.columns)
        else:
            last[key] = event
            merged.append(event)
    return tuple(merged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted(WorkerEvent):
    """The sequence's KV was dropped, it waits on the worker."""

    outdated: bool = False
    """For other weights were loaded; otherwise pages ran out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reweighed(WorkerEvent):
    """The weights were replaced in the middle of its prefill, with which it goes on: what is computed from now on is
    written by others than this. Of a sequence that decodes its tokens tell as much."""

    written: tuple[KVRun, ...]
    """Of all positions with KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(WorkerEvent):
    reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(WorkerEvent):
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked(WorkerEvent):
    """Out of the batch; its pages stay until `Release`."""

    kv_tokens: int
    """Positions with KV."""
    prompt_pages: int
    """Whole pages of the prompt among them: what a group can share."""
    page_keys: tuple[bytes, ...]
    """Names of the whole pages."""
    written: tuple[KVRun, ...]
    """By which weights, for all positions with KV."""
    reason: AbortReason | None = None
    """What the worker saw; None: it was told to stop it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled(Parked):
    """What is left of a kept image is pinned again, as that of a parked sequence is; of one that is gone, nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(WorkerEvent):
    """A parked or recalled image is now where it is kept, if not where it was told to be; `error` says why not."""

    where: Keep
    """DEVICE or HOST."""
    kv_tokens: int
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed(WorkerEvent):
    """Device pages of a sequence that stopped were given back."""

    exclusive_pages: int
    freed_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a worker measured of itself, and the room it has. None is what it has not seen yet."""

    free_tokens: int
    """KV that fits on the device without taking it from a sequence: free pages, and those that can be evicted."""
    host_free_tokens: int
    """KV that fits into host memory without giving up kept images."""
    token_bytes: int
    """KV of one token."""
    computed_tokens: int = 0
    """Positions prefilled or decoded since it was started."""
    prefill: PrefillTimes = PrefillTimes()
    """Measured while the worker decodes."""
    step: Pace | None = None
    """A decode step, by sequences in the batch."""
    restore: Pace | None = None
    """From the pool, by bytes: until the sequence can run."""
    load: Pace | None = None
    """From host memory to the device, by bytes: until the sequence can run."""
    save: Pace | None = None
    """From the device to host memory, by bytes."""
    moving_share: float | None = None
    """Of its decoding speed, that it loses while KV is moved to, from or within it."""


# From outside -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUp:
    worker: WorkerId
    node: NodeId
    incarnation: str
    """Fresh for every process."""
    max_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDown:
    worker: WorkerId
    incarnation: str
    error: str
    final: bool
    """It will not come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    worker: WorkerId
    incarnation: str
    events: tuple[WorkerEvent, ...]
    facts: WorkerFacts | None = None
    """As of the last event; None: as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRoom:
    """What the pool of a node has room for, beside what is in it."""

    node: NodeId
    free_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLive:
    """All workers have these weights: from now on nothing is sampled with others."""

    weights: Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed: deadlines are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Displaced:
    """A pool gave up the image of a trajectory for one that is needed sooner."""

    trajectory_id: TrajectoryId
    segments: frozenset[SegmentId]
    """What of it is gone: at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The pool holds the whole image."""

    trajectory_id: TrajectoryId
    epoch: int
    image: Image
    sent_bytes: int
    seconds: float = 0.0
    """From the order until the pool had all of it."""
    displaced: tuple[Displaced, ...] = ()
    """To make room for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFailed:
    trajectory_id: TrajectoryId
    epoch: int
    error: str
    displaced: tuple[Displaced, ...] = ()
    """Room was made for it, in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spilled:
    """Ray has moved objects of a node from its store to disk: what the pools are there to prevent."""

    node: NodeId
    nbytes: int
    """Since the pool of the node was started."""


Event = WorkerUp | WorkerDown | WorkerReport | Exported | ExportFailed | Spilled | PoolRoom | WeightsLive | Tick
