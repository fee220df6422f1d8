"""A replay that differs in one bit is a mismatch, and is placed."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout.cli.verify import Mismatch, MismatchKind, compare, compare_all, replays, resumed, uninterrupted
from rollout.config import Config, load_config
from rollout.types import FinishReason, GroupId, Trajectory, TrajectoryId, Version, VersionRun, WorkerId

LOGPROBS = tuple(float(np.float32(-0.1 * position)) for position in range(4))


def trajectory(name: str = "g/0", **changes: object) -> Trajectory:
    group, _, index = name.partition("/")
    whole = Trajectory(
        trajectory_id=TrajectoryId(name),
        group_id=GroupId(group),
        sample_index=int(index),
        seed=7,
        prompt_ids=(1, 2),
        output_ids=(5, 6, 7, 8),
        logprobs=LOGPROBS,
        versions=(VersionRun(version=Version(0), tokens=4),),
        finish_reason=FinishReason.LENGTH,
        workers=(WorkerId("a"), WorkerId("b")),
    )
    return replace(whole, **changes)


def found(replay: Trajectory) -> tuple[MismatchKind, int | None] | None:
    mismatch = compare(trajectory(), replay)
    return None if mismatch is None else (mismatch.kind, mismatch.index)


def test_equal_columns_and_end_are_no_mismatch() -> None:
    assert found(trajectory(workers=(WorkerId("c"),), suspensions=3)) is None
    assert (
        compare(
            trajectory(output_ids=(), logprobs=(), versions=()), trajectory(output_ids=(), logprobs=(), versions=())
        )
        is None
    )


def test_another_id_is_found_first_and_at_its_place() -> None:
    changed = trajectory(output_ids=(5, 6, 9, 8), logprobs=(1.0, *LOGPROBS[1:]), finish_reason=FinishReason.STOP)
    assert found(changed) == (MismatchKind.IDS, 2)


def test_a_shorter_or_longer_replay_differs_where_the_shorter_ends() -> None:
    shorter = trajectory(output_ids=(5, 6), logprobs=LOGPROBS[:2], versions=(VersionRun(version=Version(0), tokens=2),))
    assert found(shorter) == (MismatchKind.IDS, 2)
    longer = compare(shorter, trajectory())
    assert longer == Mismatch(trajectory_id=TrajectoryId("g/0"), kind=MismatchKind.IDS, index=2)


@pytest.mark.parametrize("index", range(4))
def test_one_bit_of_one_log_probability_is_a_mismatch(index: int) -> None:
    off = float(np.nextafter(np.float32(LOGPROBS[index]), np.float32(-9)))
    changed = trajectory(logprobs=(*LOGPROBS[:index], off, *LOGPROBS[index + 1 :]))
    assert found(changed) == (MismatchKind.LOGPROBS, index)


def test_the_sign_of_zero_is_a_bit_and_nan_equals_itself() -> None:
    assert LOGPROBS[0] == 0.0
    original = trajectory(logprobs=(0.0, math.nan, *LOGPROBS[2:]))
    assert compare(original, original) is None
    negative = compare(original, replace(original, logprobs=(-0.0, math.nan, *LOGPROBS[2:])))
    assert negative is not None
    assert (negative.kind, negative.index) == (MismatchKind.LOGPROBS, 0)


def test_another_end_is_a_mismatch() -> None:
    assert found(trajectory(finish_reason=FinishReason.STOP)) == (MismatchKind.FINISH_REASON, None)


def test_what_is_replayed_was_started_twice_and_ended_by_itself() -> None:
    rows = [
        trajectory("a/0"),
        trajectory("a/1", workers=(WorkerId("a"),)),
        trajectory("b/0", finish_reason=FinishReason.ABORT),
        trajectory("c/1", finish_reason=FinishReason.STOP, prompt_ids=(3,)),
    ]
    originals = resumed(rows)
    assert list(originals) == ["a/0", "c/1"]
    assert [(row.key, row.prompt) for row in replays(originals.values())] == [("a", (1, 2)), ("c", (3,))]


def test_each_original_is_compared_with_its_own_replay() -> None:
    originals = resumed([trajectory("a/0"), trajectory("a/1"), trajectory("b/0")])
    replayed = [trajectory("b/0", output_ids=(0, 6, 7, 8)), trajectory("a/1"), trajectory("a/0")]
    assert [(each.trajectory_id, each.kind) for each in compare_all(originals, replayed)] == [("b/0", MismatchKind.IDS)]


def test_a_replay_has_the_same_configuration_but_for_slices() -> None:
    config: Config = load_config(
        {
            "model": {"path": Path("m")},
            "abort": {"policies": [{"kind": "slice_budget", "tokens": 4}], "keep": "none"},
            "run": {"seed": 3},
        }
    )
    replay = uninterrupted(config)
    assert replay.abort.policies == ()
    assert replay.abort.keep == "none"
    assert replay.run.seed == 3
