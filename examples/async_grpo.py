"""GRPO that does not wait: generation goes on while the trainer computes: `async_grpo.py [--steps N] …`

While the trainer computes, groups are under way for `ahead` further steps, and weights are replaced while trajectories
run (`rollout.weights.mode` says how these go on). With `ahead` of 1 or less, nothing that is trained on is more than a
version behind. Beyond that slow groups are overtaken, and staleness is bounded by the policy `stale`, which begins a
trajectory again that fell too far behind, and by `max_lag`, beyond which a token is not trained on. What is left is
corrected by importance weights, as in grpo.py.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from grpo import Run, Settings, Trainer
from pydantic import PositiveFloat, model_validator
from session import CONFIGS, main

import rollout


class AsyncSettings(Settings):
    """Of a run that does not wait."""

    ahead: PositiveFloat = 1.0
    """Steps for which groups are under way while one trains; a fraction is a part of one."""
    out: Path = Path("out/async_grpo")

    @model_validator(mode="after")
    def _not_partial(self) -> Self:
        if self.partial:
            raise ValueError("partial: of no use here: nothing waits for the longest samples, and nothing is stopped")
        return self


class AsyncRun(Run):
    """The loop of grpo.py, with other groups under way while it trains."""

    settings: AsyncSettings

    def collect(self) -> Sequence[rollout.Delivery]:
        """The groups that are done first. What takes their place is submitted before they are trained on."""
        prompts, ahead = self.settings.prompts, round(self.settings.prompts * self.settings.ahead)
        self.submit(max(prompts, ahead))
        groups = self.taken(self.service.next_groups(prompts, timeout_s=self.settings.timeout_s))
        self.submit(ahead)
        return groups


if __name__ == "__main__":
    sys.exit(main(AsyncSettings, CONFIGS / "async_grpo_cpu.yaml", trainer=Trainer, run=AsyncRun))
