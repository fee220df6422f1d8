"""GRPO that does not wait: generation goes on while the trainer computes: `async_grpo.py [--steps N] …`

While the trainer computes, groups are under way for `ahead` further steps, so that the workers always have something
to do; weights are replaced while trajectories run (`rollout.weights.mode` says how these go on). Staleness is bounded
three times: by `ahead`; by the policy `stale`, which begins a trajectory again that fell too far behind; and by
`max_lag`, beyond which a token is not trained on. What is left is corrected by importance weights, as in grpo.py.
"""

from collections.abc import Sequence

from grpo import CONFIGS, Run, Settings, settings_of, train

import rollout


class AsyncSettings(Settings):
    """What this loop needs besides."""

    ahead: float = 1.0
    """Steps for which groups are under way while one trains; a fraction is a part of one."""


class AsyncRun(Run):
    """The loop of grpo.py, with other groups under way while it trains."""

    settings: AsyncSettings

    def collect(self) -> Sequence[rollout.Delivery]:
        """The groups that are done first. What takes their place is submitted before they are trained on."""
        prompts, ahead = self.settings.prompts, round(self.settings.prompts * self.settings.ahead)
        self.submit(max(prompts, ahead))
        groups = self.service.next_groups(prompts)
        self.under_way -= len(groups)
        if len(groups) < prompts:
            raise TimeoutError(f"{len(groups)} of {prompts} groups were done in time")
        self.submit(ahead)
        return groups


if __name__ == "__main__":
    settings, resume = settings_of(AsyncSettings, CONFIGS / "async_grpo_cpu.yaml")
    print(f"curves: {train(settings, resume=resume, run=AsyncRun)}")
