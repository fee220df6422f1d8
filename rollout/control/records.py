"""What the controller knows of a trajectory. Mutated by the controller only."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rollout.control.lifecycle import ON_WORKER, OVER, move
from rollout.control.messages import Admitted, Assignment, Sampled
from rollout.control.pooled import Pooled
from rollout.types import (
    Columns,
    FinishReason,
    GroupId,
    Keep,
    Phase,
    Resume,
    SamplingParams,
    Then,
    Trajectory,
    TrajectoryId,
    Turn,
    Wait,
    WorkerId,
    version_runs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A group to roll out."""

    group_id: GroupId
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seeds: tuple[int, ...]
    """One for each sample."""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What is to become of a trajectory once it is out of the batch."""

    keep: Keep
    then: Then

    @property
    def keeps(self) -> bool:
        """Whether the KV is of any use then."""
        return self.keep is not Keep.NONE and self.then is not Then.FINISH


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """KV that a suspended trajectory has on a worker."""

    worker: WorkerId
    epoch: int
    """In which it was left there."""
    where: Keep
    """DEVICE or HOST."""
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What was commanded for the KV of a trajectory that is being suspended, and is to be answered."""

    class Kind(StrEnum):
        EXPORT = "export"
        KEEP = "keep"
        RECALL = "recall"

    kind: Kind
    worker: WorkerId
    epoch: int
    back: Keep | None = None
    """Of an export: where on the worker it was kept before, and is kept again if that fails. It is then this, again."""
    displaced: bool = False
    """Of an export: the image that was there before is gone; what is left of it is let go of when this is answered."""


@dataclass(slots=True, kw_only=True, eq=False)
class Record:
    """One trajectory. `columns` is the truth; everything about KV is a cache of it."""

    trajectory_id: TrajectoryId
    group_id: GroupId
    sample_index: int
    order: int
    """Position in submission order: older ones go first."""
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    submitted_at: float
    metadata: dict[str, Any]
    pooled: Pooled
    phase: Phase = Phase.QUEUED
    columns: Columns = field(default_factory=Columns)
    epoch: int = 0
    kv_tokens: int = 0
    """Positions that had KV on some worker, as far as known."""
    intent: Intent | None = None
    """Of an abort or slice that is under way."""
    attempted: Intent | None = None
    """The last one for which KV was sent somewhere: it is tried once."""
    transfer: Transfer | None = None
    home: Home | None = None
    promoting: bool = False
    """It is on a worker, or about to be, for its KV only."""
    suspensions: int = 0
    workers: list[WorkerId] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    lost: bool = False
    """It was on a worker that was lost, and did not start since."""
    losses: int = 0
    """Workers lost under it, one after the other, without a new token."""
    admitted_epoch: int = -1
    """The last epoch in which it was admitted."""
    began: bool = False
    """It was admitted once."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    finished_at: float | None = None

    def enter(self, phase: Phase) -> None:
        self.phase = move(self.phase, phase)

    @property
    def worker(self) -> WorkerId | None:
        """The worker it runs, or ran last, on."""
        return self.workers[-1] if self.workers else None

    @property
    def on_worker(self) -> bool:
        return self.phase in ON_WORKER

    @property
    def export(self) -> Transfer | None:
        """The export that is under way."""
        return self.transfer if self.transfer is not None and self.transfer.kind is Transfer.Kind.EXPORT else None

    @property
    def turn(self) -> Turn:
        """When it is expected to need its image: in the order in which the fleet would start it."""
        match self.phase:
            case Phase.RESTORING | Phase.PREEMPTED:
                wait = Wait.STARTING
            case Phase.PREFILLING | Phase.DECODING:
                wait = Wait.RUNNING
            case Phase.QUEUED:
                wait = Wait.QUEUED
            case _:
                again = self.intent is not None and self.intent.then is Then.REQUEUE
                wait = Wait.QUEUED if again else Wait.HELD
        return Turn(wait, self.order)

    @property
    def budget_spent(self) -> bool:
        return len(self.columns) >= self.sampling.max_new_tokens

    @property
    def over(self) -> bool:
        return self.phase in OVER

    def sampled(self, event: Sampled) -> int:
        """Take new tokens in; returns how many were not told before."""
        known = len(self.columns) - event.offset
        assert known >= 0, f"{self.trajectory_id}: tokens from {event.offset} on, but only {len(self.columns)} known"
        news = event.columns.since(known)
        if news:
            self.columns.extend(news)
            self.losses = 0
            if self.phase is not Phase.DECODING:
                self.enter(Phase.DECODING)
        return len(news)

    def preempted(self) -> bool:
        """Whether this was not told before."""
        if self.phase is Phase.PREEMPTED:
            return False
        self.enter(Phase.PREEMPTED)
        return True

    def admitted(self, event: Admitted) -> dict[str, int]:
        """The worker gave it pages; returns what counts of it, which is nothing if it was told before."""
        first = self.admitted_epoch != self.epoch
        if not first and self.phase is not Phase.PREEMPTED:
            return {}
        self.admitted_epoch = self.epoch
        known = len(self.prompt_ids) + len(self.columns)
        whole = event.cached_tokens + event.loaded_tokens + event.restored_tokens >= known - 1 > 0
        phase = Phase.DECODING if whole else Phase.PREFILLING
        if self.phase is not phase:
            self.enter(phase)
        if self.promoting:
            return {"loaded_tokens": event.loaded_tokens}  # what it lacks is not computed
        counts = {"recomputed_tokens": event.recomputed_tokens, "loaded_tokens": event.loaded_tokens}
        again, self.began = self.began, True
        if first and again:
            counts |= {"restored_tokens": event.restored_tokens, "cached_tokens": event.cached_tokens}
            self.resumes.append(Resume(worker=self.workers[-1], **counts))
        return counts

    def assignment(self, *, slice_tokens: int | None, max_context: int) -> Assignment:
        return Assignment(
            trajectory_id=self.trajectory_id,
            epoch=self.epoch,
            prompt_ids=self.prompt_ids,
            output=self.columns.since(0),
            sampling=self.sampling,
            seed=self.seed,
            slice_tokens=slice_tokens,
            max_context=max_context,
            image=self.pooled.image,
            kv_tokens=self.kv_tokens,
        )

    def snapshot(self) -> Trajectory:
        """The trajectory as the driver sees it now."""
        return Trajectory(
            trajectory_id=self.trajectory_id,
            group_id=self.group_id,
            sample_index=self.sample_index,
            seed=self.seed,
            prompt_ids=self.prompt_ids,
            output_ids=tuple(self.columns.ids),
            logprobs=tuple(self.columns.logprobs),
            versions=version_runs(self.columns.versions),
            finish_reason=self.finish_reason,
            error=self.error,
            suspensions=self.suspensions,
            workers=tuple(self.workers),
            resumes=tuple(self.resumes),
            submitted_at=self.submitted_at,
            finished_at=self.finished_at,
            metadata=self.metadata,
        )
