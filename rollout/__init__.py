"""Rollouts for RL post-training that can be suspended with all their KV and resumed on another worker, exactly.

The client is imported at its first use: it brings Ray and torch, which take seconds, and a configuration can
be found wrong without them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollout.config import Config, load_config
from rollout.reports import AbortReport, Collected, UpdateReport
from rollout.types import (
    AbortReason,
    Delivery,
    FinishReason,
    GroupId,
    Keep,
    Priority,
    SamplingParams,
    Then,
    Trajectory,
    TrajectoryId,
    UpdateMode,
)

if TYPE_CHECKING:
    from rollout.client import ALL, AsyncRollout, Rollout, connect, start
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module("rollout.client"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "ALL",
    "AbortReason",
    "AbortReport",
    "AsyncRollout",
    "Collected",
    "Config",
    "Delivery",
    "FinishReason",
    "GroupId",
    "Keep",
    "Priority",
    "Rollout",
    "SamplingParams",
    "Then",
    "Trajectory",
    "TrajectoryId",
    "UpdateMode",
    "UpdateReport",
    "connect",
    "load_config",
    "start",
]
