"""The words of the service as values: ids, sampling parameters, token columns, trajectories.

Everything here is plain data without torch or Ray; what crosses a process boundary is frozen.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import groupby
from typing import Any, NamedTuple, NewType, Self

from rollout.errors import GroupFailedError, InvalidSamplingError

TrajectoryId = NewType("TrajectoryId", str)
GroupId = NewType("GroupId", str)
WorkerId = NewType("WorkerId", str)
NodeId = NewType("NodeId", str)
SegmentId = NewType("SegmentId", str)
Version = NewType("Version", int)
"""The user's label on the weights."""
WeightsId = NewType("WeightsId", str)
"""Ours: fresh for every load of weights into a service, and never used again."""
SequenceKey = tuple[TrajectoryId, int]
"""A trajectory and the epoch of its assignment to a worker."""


class Weights(NamedTuple):
    """One load of weights into a service. Two with the same version may differ."""

    weights_id: WeightsId
    version: Version


class KVRun(NamedTuple):
    """Consecutive positions whose KV was written by the same weights."""

    weights: Weights
    tokens: int


def first_tokens(runs: Sequence[KVRun], tokens: int) -> tuple[KVRun, ...]:
    """The runs of the first `tokens` positions of those that `runs` are of."""
    taken: list[KVRun] = []
    for run in runs:
        if tokens <= 0:
            break
        taken.append(KVRun(run.weights, min(run.tokens, tokens)))
        tokens -= run.tokens
    return tuple(taken)


class Phase(StrEnum):
    """Where a trajectory is in its life (legal moves: `control.lifecycle`)."""

    QUEUED = "queued"
    RESTORING = "restoring"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    PAUSED = "paused"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    FINISHED = "finished"
    FAILED = "failed"
    DROPPED = "dropped"


class FinishReason(StrEnum):
    """Why a trajectory ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Keep(StrEnum):
    """Where an abort puts the KV."""

    AUTO = "auto"
    DEVICE = "device"
    """On the worker, until its pages are needed for something else."""
    HOST = "host"
    """In host memory of the worker."""
    POOL = "pool"
    """In the object store, for any worker."""
    NONE = "none"
    """Nowhere: it is computed again."""


class UpdateMode(StrEnum):
    """What an update of the weights does to running trajectories."""

    RECOMPUTE = "recompute"
    """Their KV is computed again, with the new weights."""
    IN_PLACE = "in_place"
    """They go on with the KV they have."""
    SUSPEND = "suspend"
    """They are suspended before, and resumed after."""
    FINISH = "finish"
    """They end before; nothing starts until then."""


class MemoryOf(StrEnum):
    """What memory of a worker can be given back."""

    KV = "kv"
    """The pages, on the device and in host memory."""
    WEIGHTS = "weights"


class PausedBy(StrEnum):
    """Who has the workers run no step; they run again when nobody does."""

    DRIVER = "driver"
    UPDATE = "update"


class Then(StrEnum):
    """What an abort does with the trajectory."""

    HOLD = "hold"
    """It waits for a command."""
    REQUEUE = "requeue"
    """It waits for a worker."""
    FINISH = "finish"
    """It is over, with the tokens it has."""
    RETRY = "retry"
    """It begins again from its prompt, with other draws; what it had stays on its result as an attempt."""
    DROP = "drop"
    """It leaves its group, which is handed out without it; its tokens come beside the group."""


class AbortReason(StrEnum):
    """What stopped a trajectory."""

    DRIVER = "driver"
    """A call of `abort`."""
    DISCARD = "discard"
    """A call of `discard`."""
    SLICE_BUDGET = "slice_budget"
    BUDGET = "budget"
    """It has sampled its part of what its group may, and comes back for more (`max_group_tokens`)."""
    OVER_LONG = "over_long"
    DEADLINE = "deadline"
    STALE = "stale"
    QUOTA = "quota"
    """Enough groups are finished."""
    TAIL = "tail"
    MEMORY = "memory"
    REPETITION = "repetition"
    TURN = "turn"
    """It ended a turn and waits for `extend`."""
    PRIORITY = "priority"
    """It gave its place to one that goes first."""
    DRAIN = "drain"
    """Its worker is being taken out of service."""
    GROUP_FAILED = "group_failed"
    """Another member failed."""
    VERSION = "version"
    """The version that it asked for is not live any more."""
    WEIGHTS = "weights"
    """Other weights are being loaded (mode `suspend`)."""
    RELEASE = "release"
    """Its worker gives memory back."""


class Priority(StrEnum):
    """Who goes first; the least is first."""

    EVAL = "eval"
    """Takes the place of training trajectories, youngest first, which are suspended."""
    TRAIN = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one trajectory are drawn.

    The reported log-probability is under the distribution that was sampled from: after
    temperature, top-k and top-p. At temperature 0 (greedy) it is that of temperature 1 without
    truncation, since the greedy distribution itself would say 0 for every token.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most probable tokens; ties go to the lower id. 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set, by (probability descending, id ascending), that reaches this mass."""
    max_new_tokens: int = 128
    """Cumulative over all suspensions."""
    min_new_tokens: int = 0
    """Stop ids cannot be drawn before this many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence ids (`stop_token_ids` still stop)."""
    seed: int | None = None
    """Makes a submission's draws independent of the run seed and the submit key."""

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise InvalidSamplingError(f"{name}: got {getattr(self, name)!r}, allowed: {allowed}")

        number, whole = _is_number, _is_whole
        require(number(self.temperature) and 0.0 <= self.temperature < float("inf"), "temperature", "finite, >= 0")
        require(whole(self.top_k) and self.top_k >= 0, "top_k", "an integer >= 0 (0 keeps all)")
        require(number(self.top_p) and 0.0 < self.top_p <= 1.0, "top_p", "0 < top_p <= 1")
        require(whole(self.max_new_tokens) and self.max_new_tokens >= 0, "max_new_tokens", "an integer >= 0")
        require(
            whole(self.min_new_tokens) and 0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            f"an integer, 0 … {self.max_new_tokens}",
        )
        require(
            isinstance(self.stop_token_ids, tuple) and all(whole(i) and i >= 0 for i in self.stop_token_ids),
            "stop_token_ids",
            "a tuple of ids >= 0",
        )
        require(isinstance(self.ignore_eos, bool), "ignore_eos", "true or false")
        require(self.seed is None or (whole(self.seed) and 0 <= self.seed < 2**64), "seed", "0 … 2**64 - 1, or null")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_whole(value) or isinstance(value, float)


def trajectory_seed(*, request_seed: int | None, run_seed: int, key: str, sample_index: int) -> int:
    """Seed of one sample, 64 bits: H(request seed, or run seed + submit key; sample index)."""
    source = f"request:{request_seed}" if request_seed is not None else f"run:{run_seed}:{key}"
    digest = hashlib.blake2b(f"{source}\n{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class Columns:
    """The tokens after the prompt, aligned: ids, log-probabilities and the version that sampled each.

    A token that was not sampled but appended by `extend` has no version, and 0.0 for its log-probability, which it
    has not. The three columns only ever grow or shrink together.
    """

    __slots__ = ("_given", "_ids", "_logprobs", "_versions")

    def __init__(
        self, ids: Iterable[int] = (), logprobs: Iterable[float] = (), versions: Iterable[Version | None] = ()
    ) -> None:
        self._ids = list(ids)
        self._logprobs = list(logprobs)
        self._versions = list(versions)
        sizes = (len(self._ids), len(self._logprobs), len(self._versions))
        if len(set(sizes)) != 1:
            raise ValueError(f"columns of unequal length: {sizes[0]} ids, {sizes[1]} logprobs, {sizes[2]} versions")
        self._given = self._versions.count(None)

    @classmethod
    def single(cls, token: int, logprob: float, version: Version) -> Self:
        """Of one token."""
        columns = cls.__new__(cls)
        columns._ids = [token]
        columns._logprobs = [logprob]
        columns._versions = [version]
        columns._given = 0
        return columns

    @classmethod
    def given(cls, ids: Sequence[int]) -> Self:
        """Of tokens that were not sampled."""
        return cls(ids, [0.0] * len(ids), [None] * len(ids))

    def append(self, token: int, logprob: float, version: Version) -> None:
        self._ids.append(token)
        self._logprobs.append(logprob)
        self._versions.append(version)

    def extend(self, other: "Columns") -> None:
        self._ids += other._ids
        self._logprobs += other._logprobs
        self._versions += other._versions
        self._given += other._given

    def since(self, start: int) -> "Columns":
        """A copy of the tokens from index `start` on."""
        return Columns(self._ids[start:], self._logprobs[start:], self._versions[start:])

    @property
    def ids(self) -> Sequence[int]:
        return self._ids

    @property
    def logprobs(self) -> Sequence[float]:
        return self._logprobs

    @property
    def versions(self) -> Sequence[Version | None]:
        return self._versions

    @property
    def sampled(self) -> int:
        """How many of the tokens were sampled."""
        return len(self._versions) - self._given

    def __len__(self) -> int:
        return len(self._ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Columns):
            return NotImplemented
        return (self._ids, self._logprobs, self._versions) == (other._ids, other._logprobs, other._versions)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Columns({len(self)} tokens)"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRun:
    """`tokens` consecutive tokens that were sampled by `version`, or appended if that is None."""

    version: Version | None
    tokens: int


def version_runs(versions: Sequence[Version | None]) -> tuple[VersionRun, ...]:
    """Run-length form of a per-token column."""
    return tuple(VersionRun(version=version, tokens=len(list(run))) for version, run in groupby(versions))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpan:
    """Tokens that were sampled while the same versions had written the KV before them. Positions count the prompt."""

    first: int
    stop: int
    """Tokens [first, stop). Appended ones among them came after sampled ones, but for those that were appended before
    anything was sampled, which have a span of their own."""
    kv: tuple[tuple[int, int, Version], ...]
    """(start, stop, version): the KV of positions [start, stop). They cover [0, first); what follows was written by the
    version that sampled these tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRun:
    """Consecutive pages of one segment, as part of an image."""

    node: NodeId
    """Whose pool holds the segment."""
    segment: SegmentId
    first: int
    """Index of the first page within the segment."""
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The KV that a suspended trajectory left in the pool: positions [0, kv_tokens), in order.

    The last page holds `kv_tokens % page_tokens` tokens if that is not 0.
    """

    runs: tuple[SegmentRun, ...]
    kv_tokens: int
    written: tuple[KVRun, ...]
    """By which weights, for all of its positions."""

    @property
    def pages(self) -> int:
        return sum(run.pages for run in self.runs)


class Wait(IntEnum):
    """What a trajectory that left an image waits for, soonest to need it first."""

    STARTING = 0
    """A worker is about to read it."""
    QUEUED = 1
    """For a worker; or it is being suspended and will be."""
    HELD = 2
    """For somebody to resume it."""
    RUNNING = 3
    """For nothing: it has its KV. The image spares bytes if it is suspended again, and tokens if its worker is lost."""


class Turn(NamedTuple):
    """When an image is expected to be needed, as an order among images: less is sooner."""

    wait: Wait
    order: int
    """Of the trajectory: its position in submission order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A trajectory went on on a worker: where its KV came from, in tokens.

    A start that was stopped before it got pages leaves none, so there may be fewer than starts.
    """

    worker: WorkerId
    cached_tokens: int
    """Found in the device memory of the worker."""
    loaded_tokens: int = 0
    """Copied from the worker's host memory."""
    restored_tokens: int
    """Read from the pool."""
    recomputed_tokens: int
    """Had KV once, and was computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a trajectory had when it was begun again from its prompt."""

    seed: int
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionRun, ...]
    reason: AbortReason | None
    """Why it was given up; None: it failed."""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sample of one prompt, as the driver sees it when it is over (or handed out partial)."""

    trajectory_id: TrajectoryId
    group_id: GroupId
    sample_index: int
    seed: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionRun, ...]
    kv_spans: tuple[KVSpan, ...] = ()
    """Which versions wrote the KV that each output token was sampled on."""
    finish_reason: FinishReason | None
    """None while the trajectory is still resumable (a partial)."""
    abort_reason: AbortReason | None = None
    """What stopped it last; None if nothing did, or it went on since."""
    error: str | None = None
    """What went wrong, when `finish_reason` is `error`."""
    attempts: tuple[Attempt, ...] = ()
    """Earlier ones, which `then: retry` or a failure ended."""
    suspensions: int = 0
    workers: tuple[WorkerId, ...] = ()
    """The worker of each start, in order."""
    resumes: tuple[Resume, ...] = ()
    submitted_at: float = 0.0
    """Unix time, seconds."""
    finished_at: float | None = None
    """Unix time, seconds."""
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = (len(self.output_ids), len(self.logprobs), sum(run.tokens for run in self.versions))
        if len(set(sizes)) != 1:
            raise ValueError(
                f"{self.trajectory_id}: unequal columns: {sizes[0]} ids, {sizes[1]} logprobs, {sizes[2]} versions"
            )

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 for each output token that was sampled, 0 for one that `extend` appended."""
        return tuple(int(run.version is not None) for run in self.versions for _ in range(run.tokens))

    @property
    def sampled_tokens(self) -> int:
        return sum(run.tokens for run in self.versions if run.version is not None)


TurnMark = tuple[float, int]
"""Tells the turns of all trajectories that ever had one id apart."""


def turn_mark(trajectory: Trajectory) -> TurnMark:
    """Of the turn that it ended last."""
    return trajectory.submitted_at, trajectory.suspensions


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A finished group: all its trajectories, in sample order; of one that was submitted with `partial`, those that
    ended since the last delivery."""

    group_id: GroupId
    trajectories: tuple[Trajectory, ...]
    dropped: tuple[Trajectory, ...] = ()
    """Members that left the group (`then: drop`), with their tokens."""
    complete: bool = True
    """Nothing of the group is to come."""
    priority: Priority = Priority.TRAIN
    """With which it was submitted."""
    error: str | None = None
    """Why the group failed as a whole (`groups.failed_member`)."""
    version: Version = Version(0)
    """That was live when it was handed out first."""

    def raise_for_failure(self) -> Self:
        """Itself, unless the group failed: then `GroupFailedError` is raised."""
        if self.error is not None:
            raise GroupFailedError(f"group {self.group_id}: {self.error}")
        return self
