"""The weights that were loaded into the service, in order, and whose KV may be gone on with."""

from collections.abc import Iterable

from rollout.config import KVReuse, SameWeights
from rollout.types import KVRun, Weights, WeightsId


class Versions:
    """The last of them is live."""

    def __init__(self, live: Weights, reuse: KVReuse) -> None:
        self._loaded = [live]
        self.most_behind = 0 if isinstance(reuse, SameWeights) else reuse.max_lag
        """Updates after which KV may still be gone on with."""

    @property
    def live(self) -> Weights:
        return self._loaded[-1]

    def load(self, weights: Weights) -> bool:
        """These are live now; False if they were."""
        if weights == self.live:
            return False
        self._loaded.append(weights)
        del self._loaded[: -self.most_behind - 1]
        return True

    def reusable_with(self, weights: Weights) -> frozenset[WeightsId]:
        """Whose KV may be gone on with once these are live."""
        after = [*self._loaded, weights] if weights != self.live else self._loaded
        return frozenset(each.weights_id for each in after[-self.most_behind - 1 :])

    def may_use(self, runs: Iterable[KVRun]) -> bool:
        """Whether a trajectory may go on with KV that was written like this."""
        reusable = self.reusable_with(self.live)
        return all(run.weights.weights_id in reusable for run in runs)
