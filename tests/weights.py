"""Weights as tests name them, and KV that they wrote."""

from rollout.config import WeightsConfig
from rollout.control.versions import Versions
from rollout.types import KVRun, Version, Weights, WeightsId

WEIGHTS = Weights(WeightsId("weights"), Version(0))
"""What services of tests begin with, unless they say otherwise."""
VERSIONS = Versions(WEIGHTS, WeightsConfig().kv_reuse)
"""Of services in which nothing else was loaded."""


def loaded(version: int) -> Weights:
    """The only load of this version."""
    return WEIGHTS if version == WEIGHTS.version else Weights(WeightsId(f"weights-{version}"), Version(version))


def written(tokens: int, by: Weights = WEIGHTS) -> tuple[KVRun, ...]:
    """KV of so many positions."""
    return (KVRun(by, tokens),) if tokens else ()
