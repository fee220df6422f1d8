"""Snapshots of a running service: frozen values, each counter since start unless its docstring says otherwise."""

from dataclasses import dataclass, field

from rollout.types import NodeId, Phase, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCounts:
    """Device pages of one worker by what they are for; the four last add up to `total`."""

    total: int
    free: int
    tree: int
    private: int
    reserved: int
    """Destinations of copies that are not complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """One engine."""

    steps: int
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
    evicted_pages: int
    pages: PageCounts
    """Now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """One worker process."""

    worker: WorkerId
    node: NodeId
    pid: int
    incarnation: str
    engine: EngineStats
    weights_id: str
    exporting: int
    """Exports whose buffers are still in use, now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """The pool of one node, in bytes unless said otherwise."""

    node: NodeId
    budget: int
    stored: int
    """In segments that a trajectory needs, now."""
    reserved: int
    """Charged for exports under way, now."""
    still_read: int
    """In segments that nobody needs but a reader holds, now."""
    segments: int
    """Number, now."""
    exports: int
    """Number."""
    sent: int
    """Bytes that workers sent."""
    shared: int
    """Bytes that were not sent since the pool had them."""
    refused: int
    """Exports refused for lack of budget, number."""


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
    exported_bytes: int = 0
    restored_tokens: int = 0
    cached_tokens: int = 0
    """Found in a worker's prefix tree by a trajectory that had KV before."""
    recomputed_tokens: int = 0
    """Had KV once and were computed again."""
    preemptions: int = 0
    export_failures: int = 0
    restore_failures: int = 0
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
class ServiceStats:
    """The whole service."""

    phases: dict[Phase, int]
    """Trajectories by phase, now; delivered ones are no longer counted."""
    counters: RolloutCounters
    troubles: tuple[str, ...] = ()
    """The last workers lost, exports and restores failed, images displaced and nodes that spilled, with the reasons."""
    workers: tuple[WorkerStats, ...] = ()
    """Those that answered."""
    pools: tuple[PoolStats, ...] = field(default=())
