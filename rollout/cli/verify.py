"""Is resumed equal to uninterrupted? What to replay of a written file, and how a replay is compared with it.

Equal means: the same ids, the same log-probabilities bit for bit, and the same end.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from rollout.cli.prompts import PromptRow
from rollout.config import Config
from rollout.types import FinishReason, GroupId, Trajectory, TrajectoryId

_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


class MismatchKind(StrEnum):
    """The first thing that differs."""

    IDS = "ids"
    LOGPROBS = "logprobs"
    FINISH_REASON = "finish_reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A trajectory whose replay differs."""

    trajectory_id: TrajectoryId
    kind: MismatchKind
    index: int | None
    """Of the first output token that differs; None for the finish reason."""


def uninterrupted(config: Config) -> Config:
    """The same service, in which nothing is ever suspended."""
    return config.model_copy(update={"abort": config.abort.model_copy(update={"policies": ()})})


def resumed(trajectories: Iterable[Trajectory]) -> dict[TrajectoryId, Trajectory]:
    """Those that ended by themselves and were started more than once: what a replay can confirm."""
    return {
        trajectory.trajectory_id: trajectory
        for trajectory in trajectories
        if len(trajectory.workers) > 1 and trajectory.finish_reason in _WHOLE
    }


def replays(trajectories: Iterable[Trajectory]) -> list[PromptRow]:
    """The prompts, by ids, of all groups that have one of `trajectories`; equal keys draw equal tokens."""
    prompts: dict[GroupId, Sequence[int]] = {each.group_id: each.prompt_ids for each in trajectories}
    return [PromptRow(key=group_id, prompt=prompt_ids) for group_id, prompt_ids in prompts.items()]


def compare_all(originals: Mapping[TrajectoryId, Trajectory], replayed: Iterable[Trajectory]) -> tuple[Mismatch, ...]:
    """Every mismatch, in the order of `originals`, each of which must be among `replayed`."""
    by_id = {trajectory.trajectory_id: trajectory for trajectory in replayed}
    found = (compare(original, by_id[trajectory_id]) for trajectory_id, original in originals.items())
    return tuple(mismatch for mismatch in found if mismatch is not None)


def compare(original: Trajectory, replay: Trajectory) -> Mismatch | None:
    """What differs first, if anything does."""

    def mismatch(kind: MismatchKind, index: int | None) -> Mismatch:
        return Mismatch(trajectory_id=original.trajectory_id, kind=kind, index=index)

    if (index := _first_difference(original.output_ids, replay.output_ids, np.int64)) is not None:
        return mismatch(MismatchKind.IDS, index)
    if (index := _first_difference(original.logprobs, replay.logprobs, np.float32)) is not None:
        return mismatch(MismatchKind.LOGPROBS, index)
    if original.finish_reason is not replay.finish_reason:
        return mismatch(MismatchKind.FINISH_REASON, None)
    return None


def _first_difference(left: Sequence[float], right: Sequence[float], dtype: type[np.generic]) -> int | None:
    """Index of the first value whose bits differ, or at which one column has ended."""
    shorter = min(len(left), len(right))
    left_bytes, right_bytes = (
        np.array(column[:shorter], dtype=dtype).view(np.uint8).reshape(shorter, np.dtype(dtype).itemsize)
        for column in (left, right)
    )
    differing = np.flatnonzero((left_bytes != right_bytes).any(axis=1))
    if differing.size:
        return int(differing[0])
    return shorter if len(left) != len(right) else None
