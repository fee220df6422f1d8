"""What a controller knows of everything that was not handed out, as values that outlive its service.

Tokens are in it, KV is not: a trajectory that is taken up again computes its KV, and draws what it would have drawn.
"""

from dataclasses import dataclass

from rollout.control.submission import Submission
from rollout.types import AbortReason, Delivery, Then, Trajectory, TrajectoryId, Version


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
