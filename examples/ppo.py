"""PPO with a value head, on the loop of grpo.py: `ppo.py [--steps N] [--partial] …`

Each token's advantage is how much better the answer went on than the value head expected (GAE); nothing is compared
within a group. The value head sits on the policy's last hidden states. An answer that was cut off ends there as others
do: nothing is expected after it.
"""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from grpo import Run, Settings, Trainer, divergence
from pydantic import Field, PositiveFloat, PositiveInt
from session import CONFIGS, main
from torch import Tensor

from rollout.training.advantages import generalized_advantages
from rollout.training.batch import Batch
from rollout.training.corrections import stale_mask
from rollout.training.forward import hidden_before_sampled, logprobs_of_sampled, scattered


class PPOSettings(Settings):
    """Of a run with PPO."""

    epochs: PositiveInt = 1
    """Passes over each batch, each in `minibatches` optimiser steps."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount a token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Of GAE: 1 is the return less the value, 0 the error of one step."""
    value_learning_rate: PositiveFloat = 1e-3
    """Of the head alone; what is below it learns with `learning_rate`."""
    value_coefficient: PositiveFloat = 0.1
    """Of the value loss."""
    out: Path = Path("out/ppo")


class PPOTrainer(Trainer):
    """The model that learns, with a value head."""

    settings: PPOSettings

    def __init__(self, settings: PPOSettings) -> None:
        super().__init__(settings)
        self.value_head = torch.nn.Linear(self.model.config.hidden_size, 1).to(settings.device)
        torch.nn.init.zeros_(self.value_head.weight)
        torch.nn.init.zeros_(self.value_head.bias)
        self.optimizer.add_param_group({"params": self.value_head.parameters()})
        self.rates.append(settings.value_learning_rate)

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the sampled tokens, and what was expected before each: [B, S], 0 elsewhere."""
        with self.autocast():
            hidden_NH = hidden_before_sampled(self.model.base_model, batch)
            logits_NV = self.model.get_output_embeddings()(hidden_NH)
        values_N = self.value_head(hidden_NH.float()).squeeze(-1)
        return logprobs_of_sampled(logits_NV, batch, temperature=self.temperature), scattered(values_N, batch)

    def update(self, batch: Batch, rewards: Sequence[Sequence[float]], live: int) -> dict[str, float]:
        settings, batch = self.settings, batch.to(self.settings.device)
        first_BS = self.logprobs_now(self.first, batch) if self.first is not None else None
        proximal_BS, values_BS = torch.zeros_like(batch.behaviour_BS), torch.zeros_like(batch.behaviour_BS)
        with torch.no_grad():
            for place, part in batch.split(settings.rows):
                at = place, slice(part.width)
                proximal_BS[at], values_BS[at] = self.evaluate(part)
        rewards_BS = at_last_token([reward for group in rewards for reward in group], batch.mask_BS)
        advantages_BS, returns_BS = generalized_advantages(
            rewards_BS, values_BS, batch.mask_BS, gamma=settings.gamma, lam=settings.lam
        )
        fresh_BS = batch.mask_BS & stale_mask(batch.versions_BS, live=live, max_lag=settings.max_lag)
        advantages_N = advantages_BS[fresh_BS]
        if len(advantages_N):
            advantages_BS = (advantages_BS - advantages_N.mean()) / (advantages_N.std(correction=0) + 1e-6)
        charted = defaultdict(list)
        for minibatch in [each for _ in range(settings.epochs) for each in self.minibatches(len(batch))]:
            shares_BS = fresh_BS / fresh_BS[minibatch].sum().clamp(min=1)  # the mean over all tokens
            policy_loss = value_loss = 0.0
            for place, part in batch.split(settings.rows, minibatch):
                at = place, slice(part.width)
                current_BS, expected_BS = self.evaluate(part)
                loss_BS = self.policy_loss(part, current_BS, proximal_BS[at], advantages_BS[at])
                if first_BS is not None:
                    loss_BS = loss_BS + settings.kl * divergence(current_BS, first_BS[at])
                policy = (shares_BS[at] * loss_BS).sum()
                value = 0.5 * (shares_BS[at] * (expected_BS - returns_BS[at]).square()).sum()
                (policy + settings.value_coefficient * value).backward()
                policy_loss, value_loss = policy_loss + policy.item(), value_loss + value.item()
            charted["train/loss"].append(policy_loss)
            charted["train/value_loss"].append(value_loss)
            charted["train/grad_norm"].append(self.step())
        metrics = {name: sum(each) / len(each) for name, each in charted.items()}
        if first_BS is not None:
            metrics["train/kl"] = divergence(proximal_BS, first_BS)[batch.mask_BS].mean().item()
        errors_N, returns_N = (returns_BS - values_BS)[batch.mask_BS], returns_BS[batch.mask_BS]
        unexplained = errors_N.var(correction=0) / (returns_N.var(correction=0) + 1e-6)
        metrics["train/explained_variance"] = 1 - unexplained.item()
        return metrics | self.report(batch, proximal_BS, fresh_BS, live)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"value_head": self.value_head.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.value_head.load_state_dict(state["value_head"])


def at_last_token(rewards: Sequence[float], mask_BS: Tensor) -> Tensor:
    """[B, S]: the reward of each trajectory, at the last token that it sampled."""
    last_B = mask_BS.shape[1] - 1 - mask_BS.int().flip(1).argmax(dim=1)
    at_BS = torch.zeros(mask_BS.shape, device=mask_BS.device)
    return at_BS.scatter(1, last_B[:, None], at_BS.new_tensor(rewards)[:, None])


if __name__ == "__main__":
    sys.exit(main(PPOSettings, CONFIGS / "ppo_cpu.yaml", trainer=PPOTrainer, run=Run))
