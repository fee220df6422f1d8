"""What the controller commands workers and pools to do. Frozen values.

A command about a trajectory on a worker carries the epoch of its assignment (see `messages`).
"""

from dataclasses import dataclass

from rollout.types import (
    Columns,
    Image,
    Keep,
    KVRun,
    NodeId,
    SamplingParams,
    SegmentId,
    TrajectoryId,
    Turn,
    WorkerId,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionWatch:
    """When output repeats itself: its end is one piece of up to `ngram` tokens, `times` times in a row or more,
    `min_tokens` long altogether or more."""

    ngram: int
    times: int
    min_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What a worker looks for after every step of a sequence, since it has all the facts: then it parks it."""

    slice_tokens: int | None = None
    """Sampled in this assignment."""
    most_tokens: int | None = None
    """Sampled tokens of the trajectory."""
    repetition: RepetitionWatch | None = None
    turns: bool = False
    """A stop ends a turn: the sequence is parked, not finished."""
    only_loads: bool = False
    """Nothing is sampled: it is parked as soon as it has its KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """All that a worker needs to start or continue a trajectory."""

    trajectory_id: TrajectoryId
    epoch: int
    prompt_ids: tuple[int, ...]
    output: Columns
    """Everything after the prompt: sampled before, or appended by `extend`."""
    sampling: SamplingParams
    seed: int
    watch: Watch
    max_context: int
    """Most tokens, prompt included, on any worker of the service."""
    image: Image | None
    kv_tokens: int
    """Positions that had KV before; what of it is neither cached nor restored counts as recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    worker: WorkerId
    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Park the sequence at the next step boundary."""

    worker: WorkerId
    trajectory_id: TrajectoryId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Run no step until `Unpause`; commands are obeyed all the same."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpause:
    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire:
    """Nothing is left on the worker, and nothing will come: its process may end."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Have the pool of `node` take the parked sequence's KV from `worker`."""

    worker: WorkerId
    node: NodeId
    trajectory_id: TrajectoryId
    epoch: int
    kv_tokens: int
    prompt_pages: int
    page_keys: tuple[bytes, ...]
    written: tuple[KVRun, ...]
    base: Image | None
    """An earlier image, whose whole pages need not be sent again."""
    turn: Turn
    """When the trajectory is expected to need the image, as far as is known now; see `Expect`."""
    release: bool
    """Nothing but a `Release` will follow on the worker, whatever comes of the export. So the pool, once it holds the
    image, has the worker free the pages there and then; the controller, when it hears of that, says so again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Free the pages of a sequence that stopped, wherever they are on the worker; nothing happens to one that left
    nothing there."""

    worker: WorkerId
    trajectory_id: TrajectoryId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepThere:
    """Leave a parked or recalled sequence's KV on its worker, in this tier (DEVICE or HOST); answered by `Moved`."""

    worker: WorkerId
    trajectory_id: TrajectoryId
    epoch: int
    where: Keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Pin what is left of kept KV, so that it can be exported or moved; answered by `Recalled`."""

    worker: WorkerId
    trajectory_id: TrajectoryId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Retain:
    """From now on the trajectory needs exactly these segments of the pool of `node`."""

    node: NodeId
    trajectory_id: TrajectoryId
    segments: frozenset[SegmentId]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """From now on this is when the trajectory is expected to need what the pool of `node` holds of it."""

    node: NodeId
    trajectory_id: TrajectoryId
    turn: Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """The pool of `node` forgets a segment that turned out to be damaged or lost."""

    node: NodeId
    segment: SegmentId


Command = Start | Stop | Pause | Unpause | Retire | Export | Release | KeepThere | Recall | Retain | Expect | Drop
