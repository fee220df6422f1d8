"""Rollouts for RL post-training that can be suspended with all their KV and resumed on another worker, exactly."""

from rollout.client import ALL, AsyncRollout, Rollout, connect, start
from rollout.config import Config, load_config
from rollout.types import (
    AbortReport,
    Delivery,
    FinishReason,
    GroupId,
    Keep,
    SamplingParams,
    Then,
    Trajectory,
    TrajectoryId,
)

__all__ = [
    "ALL",
    "AbortReport",
    "AsyncRollout",
    "Config",
    "Delivery",
    "FinishReason",
    "GroupId",
    "Keep",
    "Rollout",
    "SamplingParams",
    "Then",
    "Trajectory",
    "TrajectoryId",
    "connect",
    "load_config",
    "start",
]
