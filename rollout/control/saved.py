"""What a controller knows of everything that was not handed out, as values that outlive its service.

Tokens are in it, KV is not: a trajectory that is taken up again computes its KV, and draws what it would have drawn.
"""

from dataclasses import dataclass

from rollout.control.lengths import Lengths
from rollout.control.pooled import Pooled
from rollout.control.records import Batch, Group, Record
from rollout.control.spans import Spans
from rollout.control.submission import Submission
from rollout.types import AbortReason, Columns, Delivery, FinishReason, Phase, Then, Trajectory, TrajectoryId, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedMember:
    """One trajectory."""

    trajectory: Trajectory
    then: Then | None
    """What it does next: it waits for a worker (requeue) or a command (hold), or what an abort that was under way said.
    None: it is over."""
    reason: AbortReason | None
    """What stopped it, or is about to."""
    dropped: bool
    """It left its group."""
    ended_turn: bool
    failures: int
    fired: tuple[AbortReason, ...]
    """Policies that stop a trajectory once and have."""

    def __post_init__(self) -> None:
        was = self.trajectory
        over = was.finish_reason is not None
        if over == (self.then is not None) or (self.dropped and not over):
            raise ValueError(
                f"{was.trajectory_id}: then {self.then}, dropped {self.dropped}, but finish_reason {was.finish_reason}"
            )
        if min(was.output_ids, default=0) < 0:
            raise ValueError(f"{was.trajectory_id}: token id {min(was.output_ids)}")
        if any(run.tokens < 1 for run in was.versions):
            raise ValueError(f"{was.trajectory_id}: a run of versions without tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroup:
    """All trajectories of one prompt."""

    submission: Submission
    batch: int
    """Which of the batches it was submitted with."""
    age_s: float
    """Since it was submitted."""
    members: tuple[SavedMember, ...]
    handed: tuple[TrajectoryId, ...]
    """Members that have arrived at a driver before the rest."""
    error: str | None

    def __post_init__(self) -> None:
        group = self.submission.group_id
        if min(self.submission.prompt_ids, default=-1) < 0:
            raise ValueError(f"{group}: a prompt of no tokens, or of ids < 0")
        ids = [(f"{group}/{index}", index) for index in range(len(self.submission.seeds))]
        found = [(each.trajectory.trajectory_id, each.trajectory.sample_index) for each in self.members]
        if found != ids:
            raise ValueError(f"{group}: got members {found}, allowed: {ids}")
        over = {each.trajectory.trajectory_id for each in self.members if each.then is None and not each.dropped}
        if not over >= set(self.handed):
            raise ValueError(f"{group}: handed {self.handed}, of which these are over: {sorted(over)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBatch:
    """What policies know of the trajectories of one call of `submit`."""

    size: int
    tailed: bool
    lengths: tuple[int, ...]
    """Sampled tokens of finished ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Everything."""

    version: Version
    """That was live."""
    batches: tuple[SavedBatch, ...]
    groups: tuple[SavedGroup, ...]
    """In the order in which they were submitted."""
    deliveries: tuple[Delivery, ...]
    """Handed out, and not known to have arrived."""

    def __post_init__(self) -> None:
        ids = [group.submission.group_id for group in self.groups]
        if len(set(ids)) != len(ids):
            raise ValueError("two groups of one key")
        for group in self.groups:
            if not 0 <= group.batch < len(self.batches):
                raise ValueError(f"{group.submission.group_id}: batch {group.batch} of {len(self.batches)}")


def saved_member(record: Record) -> SavedMember:
    then = None
    if not record.over:
        then = record.intent.then if record.intent is not None else Then.HOLD if record.held else Then.REQUEUE
    return SavedMember(
        trajectory=record.snapshot(),
        then=then,
        reason=record.intent.reason if record.intent is not None else record.abort_reason,
        dropped=record.phase is Phase.DROPPED,
        ended_turn=record.ended_turn,
        failures=record.failures,
        fired=tuple(sorted(record.fired)),
    )


def saved_batch(batch: Batch) -> SavedBatch:
    return SavedBatch(size=batch.size, tailed=batch.tailed, lengths=tuple(batch.lengths))


def restored_batch(saved: SavedBatch) -> Batch:
    return Batch(size=saved.size, tailed=saved.tailed, lengths=Lengths(saved.lengths))


def restored_member(saved: SavedMember, group: Group, *, order: int, epoch: int) -> Record:
    """One that is over, or is queued and in no queue yet. The time between counts neither in its age nor in the time
    that it took."""
    was = saved.trajectory
    versions = [run.version for run in was.versions for _ in range(run.tokens)]
    last = max((index for index, version in enumerate(versions) if version is not None), default=None)
    between_s = group.submitted_at - was.submitted_at
    record = Record(
        trajectory_id=was.trajectory_id,
        group=group,
        sample_index=was.sample_index,
        order=order,
        seed=was.seed,
        pooled=Pooled(was.trajectory_id),
        columns=Columns(was.output_ids, was.logprobs, versions),
        spans=Spans.told(was.kv_spans),
        epoch=epoch,
        suspensions=was.suspensions,
        abort_reason=saved.reason,
        fired=set(saved.fired),
        ended_turn=saved.ended_turn,
        attempts=list(was.attempts),
        failures=saved.failures,
        workers=list(was.workers),
        resumes=list(was.resumes),
        # The last token that was sampled, and what was appended since, never had KV.
        kv_tokens=len(was.prompt_ids) + last if last is not None else 0,
        starts=int(last is not None),
        began=last is not None,
        finish_reason=was.finish_reason,
        error=was.error,
        finished_at=was.finished_at + between_s if was.finished_at is not None else None,
    )
    if saved.then is None:
        failed = was.finish_reason is FinishReason.ERROR
        record.phase = Phase.DROPPED if saved.dropped else Phase.FAILED if failed else Phase.FINISHED
    return record
