"""Snapshots of a running service: frozen values, each counter since start unless its docstring says otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rollout.types import AbortReason, Keep, NodeId, Phase, Then, TrajectoryId, Weights, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """One tier of a worker's KV cache, in pages. `free + tree + private + reserved = total`, now."""

    total: int
    free: int
    tree: int
    """In the prefix tree."""
    private: int
    """Of one sequence or suspended trajectory alone."""
    reserved: int
    """Destinations of copies that are not complete."""
    hits: int
    """Found here when a sequence was admitted."""
    misses: int
    """Looked for when a sequence was admitted, and found neither here nor, for the host, on the device."""
    evicted: int
    arrived: int
    """Copied in from the other tier."""
    failed: int
    """Of copies from the other tier that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """One engine."""

    steps: int
    busy_s: float
    """In steps that ran, admitted or preempted something."""
    waiting: int
    """Sequences without pages, now."""
    running: int
    """Sequences in the batch or restoring, now."""
    parked: int
    """Sequences whose pages wait to be exported or released, now."""
    prefilled_tokens: int
    """Positions written by prefill."""
    decoded_tokens: int
    """Positions written by decode steps, replayed ones included."""
    sampled_tokens: int
    cached_tokens: int
    """Positions taken from the prefix tree at admission."""
    restored_bytes: int
    preemptions: int
    load_back_tokens: float | None
    """Least length of a prefix on the host that is loaded rather than computed again, now; None: none is."""
    written_bytes: int
    """Copied from the device to the host."""
    loaded_bytes: int
    """Copied from the host to the device."""
    device: TierStats
    host: TierStats
    page_bytes: int
    """Of the pages that these count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """One worker process."""

    worker: WorkerId
    node: NodeId
    pid: int
    incarnation: str
    engine: EngineStats
    weights: Weights
    exported_bytes: int
    """Sent to pools."""
    exporting: int
    """Exports whose buffers are still in use, now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """The pool of one node, in bytes unless said otherwise.

    `stored + reserved + still_read` and what of `copied` is more than one longest image are at most `budget`.
    """

    node: NodeId
    budget: int
    stored: int
    """In segments that a trajectory, or an export under way, needs, now."""
    reserved: int
    """Charged for exports under way, now."""
    still_read: int
    """In segments that nobody needs but a reader holds, now."""
    copied: int
    """Charged for what readers of this node have open from other nodes, now."""
    segments: int
    """Number, now."""
    images: int
    """Trajectories that have something here, number, now."""
    exports: int = 0
    """Completed, number."""
    warm_exports: int = 0
    """Of these, into memory that the worker's process had touched before, as far as can be told; number."""
    cold_exports: int = 0
    """Number. Exports of which nothing was sent are neither."""
    sent: int = 0
    """Bytes that workers sent."""
    shared: int = 0
    """Bytes that were not sent since the pool had them."""
    read_here: int = 0
    """Bytes handed out to readers of this node."""
    read_elsewhere: int = 0
    """Bytes handed out to readers of other nodes."""
    refused: int
    """Exports refused for lack of budget, number."""
    refused_copies: int
    """Copies from other nodes refused for lack of budget, number; more than once for one that waited."""
    displaced_images: int
    """Given up for ones that are needed sooner, number."""
    dropped: Mapping[str, int]
    """Segments that are gone, by reason (`kv.ledger.DropReason`), number."""
    spilled: int | None
    """Bytes of anything that Ray moved from this node's store to disk, as far as seen; None if that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCheck:
    """Accounting of one worker or pool, recomputed from its structures while it runs."""

    part: str
    """The worker's id, or `pool of` the node's."""
    violation: str | None
    """What is wrong, with the numbers, or why it is not known; None: every counter is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """Where every trajectory is that was ever submitted, number of each."""

    submitted: int
    queued: int
    active: int
    """On a worker, or leaving one."""
    suspended: int
    buffered: int
    """Over, and not handed out."""
    delivered: int
    """Handed out, and not known to have arrived."""
    acknowledged: int
    """Known to have arrived."""
    dropped: Mapping[AbortReason, int]
    """By reason: those that left their group, or were discarded."""

    @property
    def accounted(self) -> int:
        """Equal to `submitted` if nothing was lost."""
        kept = self.queued + self.active + self.suspended + self.buffered + self.delivered + self.acknowledged
        return kept + sum(self.dropped.values())


class Choice(StrEnum):
    """Who chose where KV goes."""

    TOLD = "told"
    """A call, a policy or the configuration."""
    MODEL = "model"
    """It is expected to cost least."""
    PROBE = "probe"
    """It is not, but what it costs was not seen for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where the KV of a stopped trajectory went, and why."""

    trajectory_id: TrajectoryId
    reason: AbortReason
    then: Then
    keep: Keep
    by: Choice
    costs_s: Mapping[Keep, float]
    """What each place was expected to cost, in seconds of a worker; infinite where it cannot go. Empty where nobody
    had to choose."""
    kv_tokens: int
    likely: float
    """Chance that it resumes under the same weights."""
    wait_s: float
    """Expected until then."""

    def __str__(self) -> str:
        costs = ", ".join(f"{keep} {1e3 * cost:.1f} ms" for keep, cost in self.costs_s.items())
        why = f"{self.by}: {costs}" if costs else str(self.by)
        return (
            f"{self.trajectory_id}: {self.reason}, then {self.then}: {self.kv_tokens} tokens of KV to {self.keep} "
            f"({why}; resumes with {self.likely:.0%} after {self.wait_s:.2f} s)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCounters:
    """What the controller counted over all trajectories."""

    trajectories: int = 0
    tokens: int = 0
    """Sampled."""
    suspensions: int = 0
    resumes: int = 0
    """Starts of a suspended trajectory."""
    resumed_elsewhere: int = 0
    """Of these, on another worker than it left."""
    restarts: int = 0
    """Starts after a lost worker."""
    retries: int = 0
    """Failed members that were tried again (`groups.failed_member`)."""
    exported_bytes: int = 0
    written_bytes: int = 0
    """Of suspended trajectories: exported, or moved to a worker's host memory."""
    read_bytes: int = 0
    """Of resumed trajectories: restored, or loaded from a worker's host memory."""
    restored_tokens: int = 0
    cached_tokens: int = 0
    """Found in a worker's prefix tree by a trajectory that had KV before."""
    loaded_tokens: int = 0
    """Copied from a worker's host memory, whatever had put it there."""
    recomputed_tokens: int = 0
    """Had KV once and were computed again."""
    preemptions: int = 0
    export_failures: int = 0
    restore_failures: int = 0
    keep_failures: int = 0
    """Trajectories whose KV could not be moved to where it was to be kept on its worker, and stayed where it was."""
    displaced_images: int = 0
    """Images that a pool gave up for ones that are needed sooner."""
    exclusive_pages: int = 0
    """Pages that only the suspended trajectory used, over all suspensions."""
    freed_pages: int = 0
    """Pages freed by suspensions."""
    releases: int = 0
    """Suspensions whose pages were released."""
    workers_lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """How far sampled tokens were behind the version that was live when they were handed out, in versions."""

    tokens: Mapping[int, int] = field(default_factory=dict)
    """By how far; negative where the live version is an older one."""

    @property
    def mean(self) -> float | None:
        """Of all tokens; None if there are none."""
        count = sum(self.tokens.values())
        return sum(behind * tokens for behind, tokens in self.tokens.items()) / count if count else None

    @property
    def max(self) -> int | None:
        return max(self.tokens, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStats:
    """The whole service."""

    phases: dict[Phase, int]
    """Trajectories by phase, now; delivered ones are no longer counted."""
    suspended: Mapping[str, int] = field(default_factory=dict)
    """Suspended ones, now, by where their KV is: device, host, pool or none; or `waiting` for an `extend`."""
    coming_groups: int = 0
    """Groups that were not handed out and are finished, or will be without another command, now."""
    accounts: Accounts | None = None
    decisions: Mapping[AbortReason, Mapping[Keep, int]] = field(default_factory=dict)
    """Where KV went, by what stopped the trajectory, number."""
    last_decisions: tuple[Decision, ...] = ()
    counters: RolloutCounters
    weights: Weights
    """Those that are live."""
    staleness: Staleness = Staleness()
    """Of all that was handed out."""
    troubles: tuple[str, ...] = ()
    """The last workers lost, exports and restores failed, images displaced and nodes that spilled, with the reasons."""
    workers: tuple[WorkerStats, ...] = ()
    """Those that answered."""
    pools: tuple[PoolStats, ...] = field(default=())

    @property
    def useful_reload_ratio(self) -> float | None:
        """Bytes of KV read back for each byte written; None if nothing was written."""
        written = self.counters.written_bytes
        return self.counters.read_bytes / written if written else None
