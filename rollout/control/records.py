"""What the controller knows of a trajectory, and of the groups they form. Mutated by the controller only."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.control.lifecycle import ON_WORKER, OVER, move
from rollout.control.messages import Assignment
from rollout.errors import DuplicateKeyError
from rollout.types import (
    Columns,
    Delivery,
    FinishReason,
    GroupId,
    Image,
    Keep,
    NodeId,
    Phase,
    Resume,
    SamplingParams,
    Then,
    Trajectory,
    TrajectoryId,
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


@dataclass(slots=True, kw_only=True)
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
    phase: Phase = Phase.QUEUED
    columns: Columns = field(default_factory=Columns)
    epoch: int = 0
    image: Image | None = None
    nodes: set[NodeId] = field(default_factory=set)
    """Whose pools may hold KV of it: those of the image and of exports since, whatever was told of these."""
    kv_tokens: int = 0
    """Positions that had KV on some worker, as far as known."""
    intent: Intent | None = None
    """Of an abort or slice that is under way."""
    suspensions: int = 0
    workers: list[WorkerId] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    lost: bool = False
    """It was on a worker that was lost, and did not start since."""
    admitted_epoch: int = 0
    """The last epoch in which it was admitted."""
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
    def budget_spent(self) -> bool:
        return len(self.columns) >= self.sampling.max_new_tokens

    @property
    def over(self) -> bool:
        return self.phase in OVER

    def assignment(self, slice_tokens: int | None) -> Assignment:
        return Assignment(
            trajectory_id=self.trajectory_id,
            epoch=self.epoch,
            prompt_ids=self.prompt_ids,
            output=self.columns.since(0),
            sampling=self.sampling,
            seed=self.seed,
            slice_tokens=slice_tokens,
            image=self.image,
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


class Groups:
    """Every trajectory from submission until its whole group is over and handed out."""

    def __init__(self) -> None:
        self._records: dict[TrajectoryId, Record] = {}
        self._groups: dict[GroupId, list[Record]] = {}
        self._complete: deque[GroupId] = deque()
        self._submitted = 0

    def add(self, submission: Submission, now: float) -> list[Record]:
        """New records for a group.

        Raises `DuplicateKeyError` if a group of that id was not handed out yet.
        """
        if submission.group_id in self._groups:
            raise DuplicateKeyError(f"key {submission.group_id!r} is in use by a group that was not handed out yet")
        group = [
            Record(
                trajectory_id=TrajectoryId(f"{submission.group_id}/{index}"),
                group_id=submission.group_id,
                sample_index=index,
                order=self._submitted + index,
                prompt_ids=submission.prompt_ids,
                sampling=submission.sampling,
                seed=seed,
                submitted_at=now,
                metadata=submission.metadata,
            )
            for index, seed in enumerate(submission.seeds)
        ]
        self._submitted += len(group)
        self._records.update((record.trajectory_id, record) for record in group)
        self._groups[submission.group_id] = group
        return group

    def get(self, trajectory_id: TrajectoryId) -> Record | None:
        return self._records.get(trajectory_id)

    def records(self) -> tuple[Record, ...]:
        return tuple(self._records.values())

    def resolve(self, ids: Sequence[str] | None) -> tuple[list[Record], tuple[TrajectoryId, ...]]:
        """The records that `ids` name, each once, and the ids that name none; a group's id names its members."""
        if ids is None:
            return list(self._records.values()), ()
        known: dict[TrajectoryId, Record] = {}
        unknown: list[TrajectoryId] = []
        for name in ids:
            record = self._records.get(TrajectoryId(name))
            members = [record] if record is not None else self._groups.get(GroupId(name), [])
            known.update((member.trajectory_id, member) for member in members)
            if not members:
                unknown.append(TrajectoryId(name))
        return list(known.values()), tuple(unknown)

    @property
    def live(self) -> int:
        """Groups that were not handed out."""
        return len(self._groups)

    @property
    def complete(self) -> int:
        """Groups that are over and were not handed out."""
        return len(self._complete)

    def ended(self, record: Record) -> None:
        """`record` is over; with the last of its group the group is complete."""
        if all(member.over for member in self._groups[record.group_id]):
            self._complete.append(record.group_id)

    def take(self, count: int) -> list[Delivery]:
        """Up to `count` complete groups, first completed first; they are forgotten here."""
        taken: list[Delivery] = []
        while self._complete and len(taken) < count:
            group_id = self._complete.popleft()
            group = self._groups.pop(group_id)
            for record in group:
                del self._records[record.trajectory_id]
            taken.append(Delivery(group_id=group_id, trajectories=tuple(record.snapshot() for record in group)))
        return taken
