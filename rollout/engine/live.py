"""The weights that an engine runs, and whose KV it may go on with."""

from collections.abc import Iterable, Set

from rollout.types import KVRun, Weights, WeightsId


class LiveWeights:
    """Shared by the parts of one engine; replaced between two steps."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.reusable: Set[WeightsId] = frozenset({weights.weights_id})
        """A trajectory may go on with KV that these wrote for it; nobody else may."""

    def replace(self, weights: Weights, reusable: Set[WeightsId]) -> None:
        assert weights.weights_id in reusable, (weights, reusable)
        self.weights = weights
        self.reusable = reusable

    def may_use(self, runs: Iterable[KVRun]) -> bool:
        """Whether a trajectory may go on with KV that was written like this."""
        return all(run.weights.weights_id in self.reusable for run in runs)
