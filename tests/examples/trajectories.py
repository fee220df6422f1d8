"""Trajectories made by hand, of any shape, with random tokens, log-probabilities and versions."""

import random
from collections.abc import Sequence

from rollout.types import FinishReason, GroupId, Trajectory, TrajectoryId, Version, VersionRun
from tests.tiny_models import VOCAB_SIZE

Runs = Sequence[tuple[int | None, int]]
"""(version, tokens); version None: appended."""


def trajectory(draw: random.Random, name: str, prompt_ids: Sequence[int], runs: Runs) -> Trajectory:
    """`prompt_ids`, and an output of `runs`."""
    versions = tuple(VersionRun(version=None if v is None else Version(v), tokens=count) for v, count in runs)
    logprobs = [0.0 if run.version is None else -3 * draw.random() for run in versions for _ in range(run.tokens)]
    return Trajectory(
        trajectory_id=TrajectoryId(name),
        group_id=GroupId(name.split("/")[0]),
        sample_index=int(name.split("/")[1]),
        seed=0,
        prompt_ids=tuple(prompt_ids),
        output_ids=tuple(tokens(draw, len(logprobs))),
        logprobs=tuple(logprobs),
        versions=versions,
        finish_reason=FinishReason.STOP,
    )


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(VOCAB_SIZE) for _ in range(count)]


def random_trajectories(seed: int, groups: Sequence[int]) -> list[Trajectory]:
    """Groups of so many members, of a prompt each; outputs are up to five runs of versions 0 … 3 or appended tokens."""
    draw = random.Random(seed)
    made = []
    for group, members in enumerate(groups):
        prompt = tokens(draw, draw.randint(1, 9))
        for member in range(members):
            kinds = [draw.choice([0, 1, 2, 3, None]) for _ in range(draw.randint(0, 4))]
            runs = [(kind, draw.randint(1, 5)) for kind in [*kinds, draw.randint(0, 3)]]
            made.append(trajectory(draw, f"{group}/{member}", prompt, runs))
    return made
