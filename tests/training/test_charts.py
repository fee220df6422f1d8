"""What a step of rollouts comes to in numbers, by hand."""

from collections.abc import Sequence
from typing import Any

import pytest

from rollout.errors import InvalidArgumentError
from rollout.metrics import RolloutCounters, ServiceStats
from rollout.training.charts import rollout_metrics
from rollout.types import (
    Delivery,
    FinishReason,
    GroupId,
    Resume,
    Trajectory,
    TrajectoryId,
    Version,
    VersionRun,
    Weights,
    WeightsId,
    WorkerId,
)

RESUME = Resume(worker=WorkerId("w0"), cached_tokens=0, restored_tokens=3, recomputed_tokens=0)


def trajectory(
    name: str,
    *runs: tuple[int | None, int],
    finish: FinishReason = FinishReason.STOP,
    resumes: tuple[Resume, ...] = (),
) -> Trajectory:
    """Of runs of (version, tokens)."""
    tokens = sum(count for _, count in runs)
    return Trajectory(
        trajectory_id=TrajectoryId(name),
        group_id=GroupId(name.split("/")[0]),
        sample_index=int(name.split("/")[1]),
        seed=0,
        prompt_ids=(1, 2, 3),
        output_ids=(7,) * tokens,
        logprobs=(-0.5,) * tokens,
        versions=tuple(VersionRun(version=None if v is None else Version(v), tokens=count) for v, count in runs),
        finish_reason=finish,
        resumes=resumes,
    )


def delivery(*trajectories: Trajectory, **fields: Any) -> Delivery:
    return Delivery(group_id=trajectories[0].group_id, trajectories=trajectories, **fields)


def stats(**counters: int) -> ServiceStats:
    return ServiceStats(phases={}, counters=RolloutCounters(**counters), weights=Weights(WeightsId("x"), Version(0)))


def metrics(deliveries: Sequence[Delivery], **how: Any) -> dict[str, float]:
    usual: dict[str, Any] = {"rewards": None, "live": 5, "seconds": 2.0, "before": None, "after": None}
    return rollout_metrics(deliveries, **(usual | how))


DELIVERIES = [
    delivery(
        trajectory("a/0", (5, 4)),
        trajectory("a/1", (3, 2), (None, 10), (4, 6), finish=FinishReason.LENGTH),
        dropped=(trajectory("a/2", (0, 100)),),
    ),
    delivery(
        trajectory("b/0", (5, 2), resumes=(RESUME,), finish=FinishReason.LENGTH),
        trajectory("b/1", finish=FinishReason.ERROR),
        error="b/1 failed",
    ),
]


def test_lengths_and_how_trajectories_ended() -> None:
    got = metrics(DELIVERIES)
    assert got["rollout/trajectories"] == 4
    assert got["rollout/tokens"] == 4 + 8 + 2
    assert {name.rsplit("/", 1)[1]: got[name] for name in got if name.startswith("rollout/response_len/")} == {
        "mean": 3.5,
        "min": 0,
        "max": 8,
        "p50": 2,
        "p90": 8,
    }
    assert got["rollout/truncated_ratio"] == 0.5
    assert got["rollout/aborted_ratio"] == 0.0
    assert got["rollout/failed_ratio"] == 0.25


def test_staleness_is_of_sampled_tokens_and_partial_of_whoever_went_on() -> None:
    got = metrics(DELIVERIES)
    assert got["async/staleness_mean"] == pytest.approx((2 * 2 + 1 * 6) / 14)
    assert got["async/staleness_max"] == 2
    assert got["partial/partial_ratio"] == 0.5, "one of two versions, one that resumed under the same"
    assert got["partial/max_partial_span"] == 1


def test_rewards_are_those_of_the_trajectories_that_have_one() -> None:
    rewards = {TrajectoryId("a/0"): 1.0, TrajectoryId("a/1"): 0.0, TrajectoryId("b/0"): 0.5, TrajectoryId("z/9"): 99.0}
    got = metrics(DELIVERIES, rewards=rewards)
    assert got["rollout/reward/mean"] == 0.5
    assert got["rollout/reward/std"] == pytest.approx((0.5 / 3) ** 0.5)
    assert (got["rollout/reward/min"], got["rollout/reward/max"]) == (0.0, 1.0)
    assert got["rollout/zero_std_ratio"] == 0.0, "a group of one reward has nothing to compare"
    same = metrics(DELIVERIES, rewards=dict.fromkeys(map(TrajectoryId, ["a/0", "a/1"]), 1.0))
    assert same["rollout/zero_std_ratio"] == 1.0


def test_the_service_is_told_by_the_difference_of_two_snapshots() -> None:
    first = {"tokens": 100, "suspensions": 2, "resumes": 1, "written_bytes": 1000, "read_bytes": 900}
    first |= {"restored_tokens": 10, "loaded_tokens": 20, "recomputed_tokens": 30}
    second = {"tokens": 160, "suspensions": 5, "resumes": 4, "written_bytes": 1400, "read_bytes": 1000}
    second |= {"restored_tokens": 11, "loaded_tokens": 22, "recomputed_tokens": 33}
    got = metrics([], seconds=4.0, before=stats(**first), after=stats(**second))
    assert got == {
        "rollout/trajectories": 0,
        "perf/rollout_time": 4.0,
        "perf/tokens_per_s": 15.0,
        "rollout/suspensions": 3,
        "rollout/resumed": 3,
        "rollout/restored_tokens": 1,
        "rollout/loaded_tokens": 2,
        "rollout/recomputed_tokens": 3,
        "rollout/useful_reload_ratio": 0.25,
    }
    since_start = metrics([], before=None, after=stats(**second))
    assert since_start["perf/tokens_per_s"] == 80.0


def test_what_the_service_did_may_have_taken_longer_than_the_driver_waited() -> None:
    found = metrics([], before=stats(tokens=10), after=stats(tokens=50), seconds=2.0, between_s=8.0)
    assert found["perf/tokens_per_s"] == 5.0
    assert found["perf/rollout_time"] == 2.0


def test_what_does_not_apply_is_absent() -> None:
    assert metrics([]) == {"rollout/trajectories": 0, "perf/rollout_time": 2.0}
    nothing_written = metrics(
        [], before=stats(written_bytes=7, read_bytes=1), after=stats(written_bytes=7, read_bytes=2)
    )
    assert "rollout/useful_reload_ratio" not in nothing_written
    unsampled = metrics([delivery(trajectory("a/0", (None, 3)))], rewards={})
    assert not {name for name in unsampled if name.startswith(("async/", "rollout/reward"))}
    assert unsampled["partial/partial_ratio"] == 0.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_takes_time(seconds: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"seconds: got .*, allowed: > 0"):
        metrics([], seconds=seconds)
