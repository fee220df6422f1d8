"""What a step of rollouts came to, under the names that the field charts.

Shares and means are over the trajectories of the deliveries, those of failed groups too; members that were dropped
from their group are not among them. A metric that does not apply is absent, never NaN:

    rollout/trajectories           number
    rollout/tokens                 sampled, of these trajectories
    rollout/reward/{mean,std,min,max}     of those that have one; std is that of the population
    rollout/zero_std_ratio         share of groups, of those with two rewards or more, in which all are equal
    rollout/response_len/{mean,min,max,p50,p90}   sampled tokens; a percentile is the least length that so many reach
    rollout/truncated_ratio        ended by their length limit
    rollout/aborted_ratio          ended by an abort
    rollout/failed_ratio           ended by an error
    partial/partial_ratio          stopped and went on, or were sampled by more than one version
    partial/max_partial_span       newest less oldest version within one trajectory, the most of all
    async/staleness_{mean,max}     live version less that which sampled, over sampled tokens
    perf/rollout_time              seconds for which the driver waited

What the whole service did between two snapshots, for whichever trajectory:

    perf/tokens_per_s              sampled
    rollout/{suspensions,resumed}  number
    rollout/{restored,loaded,recomputed}_tokens   KV read from the pool, read from host memory, computed again
    rollout/useful_reload_ratio    bytes of KV read back for each byte written; absent if none was written
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from rollout.errors import InvalidArgumentError
from rollout.metrics import RolloutCounters, ServiceStats
from rollout.types import Delivery, FinishReason, Trajectory, TrajectoryId

REWARD = "rollout/reward/mean"
RESPONSE_LEN = "rollout/response_len/mean"
RESPONSE_LEN_P90 = "rollout/response_len/p90"
TRUNCATED = "rollout/truncated_ratio"
PARTIAL = "partial/partial_ratio"
STALENESS = "async/staleness_mean"
STALENESS_MAX = "async/staleness_max"
TOKENS_PER_S = "perf/tokens_per_s"
ROLLOUT_TIME = "perf/rollout_time"


def rollout_metrics(
    deliveries: Sequence[Delivery],
    *,
    rewards: Mapping[TrajectoryId, float] | None,
    live: int,
    seconds: float,
    before: ServiceStats | None,
    after: ServiceStats | None,
    between_s: float | None = None,
) -> dict[str, float]:
    """Metrics of the rollouts of one step, for which the driver waited `seconds`; the module says of what.

    `live` is the version that is about to be trained. Rewards of other trajectories are ignored. Without `after` there
    is nothing of the service; without `before` it is since the service began. The two are `between_s` apart, if that is
    not what the driver waited.

    Raises InvalidArgumentError: seconds that are not > 0.
    """
    if not 0 < seconds < math.inf:
        raise InvalidArgumentError(f"seconds: got {seconds!r}, allowed: > 0")
    trajectories = [one for delivery in deliveries for one in delivery.trajectories]
    metrics: dict[str, float] = {"rollout/trajectories": len(trajectories)}
    metrics |= _of_rewards(deliveries, rewards or {})
    metrics |= _of_lengths(trajectories)
    metrics |= _of_versions(trajectories, live)
    metrics[ROLLOUT_TIME] = seconds
    between_s = seconds if between_s is None else between_s
    if after is not None:
        metrics |= _of_service(RolloutCounters() if before is None else before.counters, after.counters, between_s)
    return metrics


def _of_rewards(deliveries: Sequence[Delivery], rewards: Mapping[TrajectoryId, float]) -> dict[str, float]:
    groups = [
        [float(rewards[one.trajectory_id]) for one in d.trajectories if one.trajectory_id in rewards]
        for d in deliveries
    ]
    every = [reward for group in groups for reward in group]
    if not every:
        return {}
    mean = statistics.fmean(every)
    metrics = {
        REWARD: mean,
        "rollout/reward/std": math.sqrt(statistics.fmean((reward - mean) ** 2 for reward in every)),
        "rollout/reward/min": min(every),
        "rollout/reward/max": max(every),
    }
    if compared := [group for group in groups if len(group) > 1]:
        metrics["rollout/zero_std_ratio"] = statistics.fmean(min(group) == max(group) for group in compared)
    return metrics


def _of_lengths(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    lengths = sorted(one.sampled_tokens for one in trajectories)
    if not lengths:
        return {}

    def percentile(share: float) -> int:
        return lengths[math.ceil(share * len(lengths)) - 1]

    def ended_by(reason: FinishReason) -> float:
        return statistics.fmean(one.finish_reason is reason for one in trajectories)

    return {
        "rollout/tokens": sum(lengths),
        RESPONSE_LEN: statistics.fmean(lengths),
        "rollout/response_len/min": lengths[0],
        "rollout/response_len/max": lengths[-1],
        "rollout/response_len/p50": percentile(0.5),
        RESPONSE_LEN_P90: percentile(0.9),
        TRUNCATED: ended_by(FinishReason.LENGTH),
        "rollout/aborted_ratio": ended_by(FinishReason.ABORT),
        "rollout/failed_ratio": ended_by(FinishReason.ERROR),
    }


def _of_versions(trajectories: Sequence[Trajectory], live: int) -> dict[str, float]:
    if not trajectories:
        return {}
    sampled = [[(run.version, run.tokens) for run in one.versions if run.version is not None] for one in trajectories]
    spans = [max(runs)[0] - min(runs)[0] if runs else 0 for runs in sampled]
    metrics: dict[str, float] = {
        PARTIAL: statistics.fmean(bool(one.resumes) or span > 0 for one, span in zip(trajectories, spans, strict=True)),
        "partial/max_partial_span": max(spans),
    }
    lags = [(live - version, tokens) for runs in sampled for version, tokens in runs]
    if tokens := sum(tokens for _, tokens in lags):
        metrics[STALENESS] = sum(lag * tokens for lag, tokens in lags) / tokens
        metrics[STALENESS_MAX] = max(lag for lag, _ in lags)
    return metrics


def _of_service(before: RolloutCounters, after: RolloutCounters, seconds: float) -> dict[str, float]:
    metrics: dict[str, float] = {
        TOKENS_PER_S: (after.tokens - before.tokens) / seconds,
        "rollout/suspensions": after.suspensions - before.suspensions,
        "rollout/resumed": after.resumes - before.resumes,
        "rollout/restored_tokens": after.restored_tokens - before.restored_tokens,
        "rollout/loaded_tokens": after.loaded_tokens - before.loaded_tokens,
        "rollout/recomputed_tokens": after.recomputed_tokens - before.recomputed_tokens,
    }
    if written := after.written_bytes - before.written_bytes:
        metrics["rollout/useful_reload_ratio"] = (after.read_bytes - before.read_bytes) / written
    return metrics
