"""PPO with a value head, on the loop of grpo.py: `ppo.py [--steps N] [--partial] …`

Each token's advantage is how much better the answer went on than the value head expected (GAE); there is no comparison
within a group, so one sample a prompt is enough. The value head sits on the policy's last hidden states.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from grpo import CONFIGS, Settings, Trainer, settings_of, train
from torch import Tensor

from rollout.training.advantages import generalized_advantages
from rollout.training.batch import Batch
from rollout.training.corrections import clipped_objective, decoupled, mismatch, stale_mask


class PPOSettings(Settings):
    """What PPO needs besides."""

    epochs: int = 1
    """Passes over each batch, each in `minibatches` optimiser steps."""
    gamma: float = 1.0
    """Discount a token."""
    lam: float = 1.0
    """Of GAE: 1 is the return less the value, 0 the error of one step."""
    value_learning_rate: float = 1e-3
    """Of the head alone; what is below it learns with `learning_rate`."""
    value_coefficient: float = 0.1
    """Of the value loss."""


class PPOTrainer(Trainer):
    """The model that learns, with a value head."""

    def __init__(self, settings: PPOSettings) -> None:
        super().__init__(settings)
        self._ppo = settings
        self.value_head = torch.nn.Linear(self.model.config.hidden_size, 1)
        torch.nn.init.zeros_(self.value_head.weight)
        torch.nn.init.zeros_(self.value_head.bias)
        self.optimizer.add_param_group({"params": self.value_head.parameters(), "lr": settings.value_learning_rate})

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the sampled tokens, and what was expected before each: [B, S], 0 elsewhere."""
        with self.precision():
            hidden_NH = self.hidden(self.model, batch)
            logits_NV = self.model.get_output_embeddings()(hidden_NH)
        values_N = self.value_head(hidden_NH.float()).squeeze(-1)
        return self.chosen(logits_NV, batch), torch.zeros(batch.mask_BS.shape).masked_scatter(batch.mask_BS, values_N)

    def update(self, batch: Batch, rewards: Sequence[Sequence[float]], live: int) -> dict[str, float]:
        settings = self._ppo
        proximal_BS, values_BS = (torch.zeros(batch.mask_BS.shape) for _ in range(2))
        with torch.no_grad():
            for rows, part in batch.split(settings.rows):
                proximal_BS[rows, : part.width], values_BS[rows, : part.width] = self.evaluate(part)
        rewards_BS = at_last_token([reward for group in rewards for reward in group], batch.mask_BS)
        advantages_BS, returns_BS = generalized_advantages(
            rewards_BS, values_BS, batch.mask_BS, gamma=settings.gamma, lam=settings.lam
        )
        fresh_BS = batch.mask_BS & stale_mask(batch.versions_BS, live=live, max_lag=settings.max_lag)
        advantages_N = advantages_BS[fresh_BS]
        if len(advantages_N):
            advantages_BS = (advantages_BS - advantages_N.mean()) / (advantages_N.std(correction=0) + 1e-6)
        losses: dict[str, list[float]] = {"train/loss": [], "train/value_loss": [], "train/grad_norm": []}
        for _ in range(settings.epochs):
            for minibatch, _ in batch.split(math.ceil(len(batch) / settings.minibatches)):
                policy_loss = value_loss = 0.0
                tokens = max(1, int(fresh_BS[minibatch].sum()))
                for rows, part in batch.split(settings.rows, minibatch):
                    at = (rows, slice(part.width))
                    current_BS, expected_BS = self.evaluate(part)
                    mask_BS = fresh_BS[at]
                    ratios = decoupled(current_BS, proximal_BS[at], part.behaviour_BS, mask_BS, cap=settings.cap)
                    objective_BS = clipped_objective(
                        ratios.ratio_BT,
                        advantages_BS[at],
                        mask_BS,
                        clip_low=settings.clip,
                        clip_high=settings.clip,
                    )
                    policy = -(ratios.weights_BT * objective_BS).sum() / tokens
                    value = 0.5 * (expected_BS - returns_BS[at])[mask_BS].square().sum() / tokens
                    (policy + settings.value_coefficient * value).backward()
                    policy_loss, value_loss = policy_loss + policy.item(), value_loss + value.item()
                losses["train/loss"].append(policy_loss)
                losses["train/value_loss"].append(value_loss)
                losses["train/grad_norm"].append(self.step())
        errors_N, returns_N = (returns_BS - values_BS)[batch.mask_BS], returns_BS[batch.mask_BS]
        explained = 1 - errors_N.var(correction=0) / (returns_N.var(correction=0) + 1e-6)
        found = mismatch(proximal_BS, batch.behaviour_BS, batch.mask_BS & (batch.versions_BS == live))
        return {name: sum(each) / len(each) for name, each in losses.items()} | {
            "train/explained_variance": explained.item(),
            "mismatch/ratio_mean": found.ratio_mean,
            "mismatch/max_abs_log_ratio": found.max_abs_log_ratio,
            "mismatch/kl": found.kl,
        }

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"value_head": self.value_head.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.value_head.load_state_dict(state["value_head"])


def at_last_token(rewards: Sequence[float], mask_BS: Tensor) -> Tensor:
    """[B, S]: the reward of each trajectory, at the last token that it sampled."""
    last_B = mask_BS.shape[1] - 1 - mask_BS.int().flip(1).argmax(dim=1)
    return torch.zeros(mask_BS.shape).scatter(1, last_B[:, None], torch.tensor(rewards)[:, None])


if __name__ == "__main__":
    settings, resume = settings_of(PPOSettings, CONFIGS / "ppo_cpu.yaml")
    print(f"curves: {train(settings, resume=resume, trainer=PPOTrainer)}")
