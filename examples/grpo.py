"""GRPO, with `rollout` for generation and a model of Hugging Face as the trainer: `grpo.py [--steps N] [--partial] …`

One step: collect groups of samples, score them, compare each with its group, take optimiser steps on a clipped
objective, and give the new weights to the service. With `--partial` a step does not wait for the longest samples: more
groups than it needs are under way, and what is not finished is suspended and goes on in the next one. `--resume` goes
on from the last checkpoint, which holds the tokens of unfinished trajectories, too.

The trainer is one process with one copy of the model. With FSDP or DeepSpeed, `Trainer` is what changes: the wrapper is
called instead of its parts, each rank updates on its share of the batch, its engine takes the steps, and `weights`
becomes a generator of gathered tensors. Only rank 0 has a `Run`.
"""

import itertools
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from session import CONFIGS, SessionSettings, main
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import rollout
from rollout.errors import ConfigError, DeadlineError
from rollout.store import TrajectoryStore
from rollout.training.advantages import group_advantages
from rollout.training.batch import Batch
from rollout.training.charts import rollout_metrics
from rollout.training.corrections import clipped_objective, decoupled, mismatch, stale_mask
from rollout.training.forward import hidden_before_sampled, logprobs_of_sampled

INTEGER = re.compile(r"-?\d+")


class Settings(SessionSettings):
    """Of a run: what is not under `rollout` is the trainer's."""

    prompts: PositiveInt = 8
    """Groups a step."""
    samples: PositiveInt = 8
    """Trajectories a group."""
    dataset: str = "chain_sum"
    """Of reasoning-gym, with integers for answers. Its seed is `rollout.run.seed`."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Passed to the data set."""
    partial: bool = False
    """Collect with over-sampling; what is not finished goes on in the next step."""
    over_sample: NonNegativeFloat = 0.5
    """With `partial`: share of further groups under way."""
    timeout_s: PositiveFloat = 3600.0
    """Seconds for the groups of a step."""
    learning_rate: PositiveFloat = 1e-5
    warmup: NonNegativeInt = 0
    """Optimiser steps over which the learning rate rises to that."""
    minibatches: PositiveInt = 1
    """Optimiser steps on each batch."""
    rows: PositiveInt = 64
    """Trajectories in one forward pass of the trainer."""
    clip: NonNegativeFloat = 0.2
    """How far a token's probability may go up or down in one batch, as a ratio less 1."""
    cap: PositiveFloat = 2.0
    """Upper bound of importance weights: the trainer's probability over that with which a token was sampled."""
    max_lag: NonNegativeInt = 4
    """Tokens sampled more versions ago are not trained on."""
    kl: NonNegativeFloat = 0.0
    """Weight of the divergence from the first model; 0 needs no copy of it."""
    max_grad_norm: PositiveFloat = 1.0
    device: str = "cpu"
    """Of the trainer."""
    autocast: bool = True
    """Compute in bfloat16; parameters and optimiser stay float32."""
    out: Path = Path("out/grpo")


class Task:
    """Prompts without end, in order, and their rewards."""

    def __init__(self, settings: Settings) -> None:
        endless = dict(settings.options) | {"seed": settings.rollout.run.seed, "size": 1 << 30}
        self.what = {"dataset": settings.dataset, **endless, "samples": settings.samples}
        try:
            self._dataset = reasoning_gym.create_dataset(settings.dataset, **endless)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"dataset: {settings.dataset} with {dict(settings.options)}: {error}") from None
        self.next = 0

    def submit(self, service: rollout.Rollout, prompts: int, samples: int) -> None:
        """The next prompts, in one call: policies compare those of a call."""
        keys = [str(index) for index in range(self.next, self.next + prompts)]
        if keys:
            service.submit([self._dataset[int(key)]["question"] for key in keys], key=keys, n=samples, chat=True)
        self.next += prompts

    def reward(self, one: rollout.Trajectory, text: str) -> float:
        """1 if the last number of the answer is right, however the answer ended."""
        numbers = INTEGER.findall(text)
        entry = self._dataset[int(one.group_id)]
        return float(bool(numbers) and self._dataset.score_answer(numbers[-1], entry) == 1.0)


class Trainer:
    """The model that learns, with its optimiser."""

    def __init__(self, settings: Settings) -> None:
        disable_progress_bar()  # of loading
        self.settings = settings
        self.model = self._load()
        self.first = self._load() if settings.kl else None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.0)
        self.rates = [settings.learning_rate]
        """Of each group of the optimiser's parameters, after the warm-up."""
        self.steps = 0
        self.temperature = settings.rollout.sampling.temperature or 1.0

    def _load(self) -> Any:
        model = AutoModelForCausalLM.from_pretrained(self.settings.rollout.model.path, dtype=torch.float32)
        return model.to(self.settings.device)

    def logprobs(self, model: Any, batch: Batch) -> Tensor:
        """[B, S] of the sampled tokens, 0 elsewhere."""
        with self.autocast():
            logits_NV = model.get_output_embeddings()(hidden_before_sampled(model.base_model, batch))
        return logprobs_of_sampled(logits_NV, batch, temperature=self.temperature)

    def autocast(self) -> torch.autocast:
        return torch.autocast(torch.device(self.settings.device).type, torch.bfloat16, enabled=self.settings.autocast)

    @torch.no_grad()
    def logprobs_now(self, model: Any, batch: Batch) -> Tensor:
        """As `logprobs`, of a batch of any size, without gradients."""
        logprobs_BS = torch.zeros_like(batch.behaviour_BS)
        for rows, part in batch.split(self.settings.rows):
            logprobs_BS[rows, : part.width] = self.logprobs(model, part)
        return logprobs_BS

    def update(self, batch: Batch, rewards: Sequence[Sequence[float]], live: int) -> dict[str, float]:
        """Take optimiser steps on trajectories that were collected under version `live`, with the rewards of each group
        in turn; returns what to chart."""
        settings, batch = self.settings, batch.to(self.settings.device)
        advantages_B = torch.cat([group_advantages([group])[0] for group in rewards]).to(settings.device)
        advantages_BS = advantages_B[:, None].expand_as(batch.behaviour_BS)
        first_BS = self.logprobs_now(self.first, batch) if self.first is not None else None
        # Of the model as it is before these steps; with one step that is what the step itself computes.
        several = settings.minibatches > 1
        proximal_BS = self.logprobs_now(self.model, batch) if several else torch.zeros_like(batch.behaviour_BS)
        fresh_BS = batch.mask_BS & stale_mask(batch.versions_BS, live=live, max_lag=settings.max_lag)
        losses, norms = [], []
        for minibatch in self.minibatches(len(batch)):
            # The mean over the tokens of a trajectory, and then over trajectories.
            rows = minibatch.stop - minibatch.start
            shares_BS = fresh_BS / fresh_BS.sum(dim=1, keepdim=True).clamp(min=1) / rows
            losses.append(0.0)
            for place, part in batch.split(settings.rows, minibatch):
                at = place, slice(part.width)
                current_BS = self.logprobs(self.model, part)
                if not several:
                    proximal_BS[at] = current_BS.detach()
                loss_BS = self.policy_loss(part, current_BS, proximal_BS[at], advantages_BS[at])
                if first_BS is not None:
                    loss_BS = loss_BS + settings.kl * divergence(current_BS, first_BS[at])
                loss = (shares_BS[at] * loss_BS).sum()
                loss.backward()
                losses[-1] += loss.item()
            norms.append(self.step())
        metrics = {"train/loss": sum(losses) / len(losses), "train/grad_norm": sum(norms) / len(norms)}
        if first_BS is not None:
            metrics["train/kl"] = divergence(proximal_BS, first_BS)[batch.mask_BS].mean().item()
        return metrics | self.report(batch, proximal_BS, fresh_BS, live)

    def minibatches(self, rows: int) -> Iterator[slice]:
        """As many as are wanted, of equal size but for one row; none of them empty."""
        bounds = [rows * index // self.settings.minibatches for index in range(self.settings.minibatches + 1)]
        return (slice(start, stop) for start, stop in itertools.pairwise(bounds) if start < stop)

    def policy_loss(self, batch: Batch, current_BS: Tensor, proximal_BS: Tensor, advantages_BS: Tensor) -> Tensor:
        """[B, S]. What is clipped is how far the model went since before this batch; how far it was from those that
        sampled the tokens is made up for by truncated importance weights."""
        settings, mask_BS = self.settings, batch.mask_BS
        ratios = decoupled(current_BS, proximal_BS, batch.behaviour_BS, mask_BS, cap=settings.cap)
        clip = {"clip_low": min(1.0, settings.clip), "clip_high": settings.clip}
        return -ratios.weights_BT * clipped_objective(ratios.ratio_BT, advantages_BS, mask_BS, **clip)

    def step(self) -> float:
        """One of the optimiser; returns the norm of the gradient."""
        self.steps += 1
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * min(1.0, self.steps / max(1, self.settings.warmup))
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def report(self, batch: Batch, proximal_BS: Tensor, fresh_BS: Tensor, live: int) -> dict[str, float]:
        """How far the trainer was from what sampled, of tokens of the live weights."""
        found = mismatch(proximal_BS, batch.behaviour_BS, batch.mask_BS & (batch.versions_BS == live))
        return {
            "train/stale_tokens": float((batch.mask_BS & ~fresh_BS).sum()),
            "mismatch/ratio_mean": found.ratio_mean,
            "mismatch/max_abs_log_ratio": found.max_abs_log_ratio,
            "mismatch/kl": found.kl,
        }

    def weights(self) -> dict[str, Tensor]:
        """Under the names of Hugging Face, as the service takes them."""
        return dict(self.model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def divergence(current_BS: Tensor, first_BS: Tensor) -> Tensor:
    """[B, S]: of the first model from the current one, estimated by its tokens (k3, Schulman 2020)."""
    away_BS = first_BS - current_BS
    return away_BS.exp() - away_BS - 1


class Run:
    """A training run: what it consists of, and how far it is."""

    def __init__(self, settings: Settings, service: rollout.Rollout, trainer: Trainer) -> None:
        sampling = service.sampling
        got = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_new_tokens
        if not got[0] or got[1:] != (0, 1.0, 0):  # the trainer computes probabilities over the whole vocabulary
            values = "temperature {}, top_k {}, top_p {} and min_new_tokens {}".format(*got)
            raise ConfigError(f"rollout.sampling: got {values}, allowed: > 0, 0, 1.0 and 0")
        self.settings = settings
        self.service = service
        self.trainer = trainer
        trainer.temperature = sampling.temperature
        self.task = Task(settings)
        self.store = TrajectoryStore(settings.out / "trajectories")
        self.under_way = 0
        """Groups that were submitted and not collected."""

    def step(self, step: int) -> dict[str, float]:
        """One turn of the loop, under version `step`; version `step + 1` is live after it."""
        began, before = time.monotonic(), self.service.stats()
        groups = self.collect()
        collected = time.monotonic()
        members = [self.usable(group) for group in groups]
        trajectories = [one for group in members for one in group]
        if not trajectories:
            raise ConfigError(f"step {step}: no trajectory to train on; the first of {len(groups)}: {groups[0].error}")
        rewards = {one.trajectory_id: self.reward(one) for one in trajectories}
        by_group = [[rewards[one.trajectory_id] for one in group] for group in members if group]
        metrics = self.trainer.update(Batch.of(trajectories), by_group, live=step)
        trained = time.monotonic()
        self.service.update_weights(self.trainer.weights(), version=step + 1)
        updated = time.monotonic()
        self.store.append(trajectories, version=step, rewards=[rewards[one.trajectory_id] for one in trajectories])
        ended, after = time.monotonic(), self.service.stats()
        whole_step = {"before": before, "after": after, "between_s": ended - began}
        return {
            **rollout_metrics(groups, rewards=rewards, live=step, seconds=collected - began, **whole_step),
            **metrics,
            "perf/train_time": trained - collected,
            "perf/update_weights_time": updated - trained,
            "perf/step_time": ended - began,
        }

    def collect(self) -> Sequence[rollout.Delivery]:
        """Groups for one step. With `partial` a share more are under way, and what was left over goes first."""
        settings = self.settings
        over_sample = settings.over_sample if settings.partial else 0.0
        self.submit(math.ceil(settings.prompts * (1 + over_sample)))
        return self.taken(
            self.service.collect(settings.prompts, over_sample=over_sample, timeout_s=settings.timeout_s).groups
        )

    def submit(self, wanted: int) -> None:
        """Have so many groups under way."""
        self.task.submit(self.service, max(0, wanted - self.under_way), self.settings.samples)
        self.under_way = max(wanted, self.under_way)

    def taken(self, groups: Sequence[rollout.Delivery]) -> Sequence[rollout.Delivery]:
        """These are not under way any more. Raises `DeadlineError` if they are not enough for a step."""
        self.under_way -= len(groups)
        if len(groups) < self.settings.prompts:
            held = sum(self.service.stats().suspended.values())
            raise DeadlineError(
                f"{len(groups)} of {self.settings.prompts} groups were finished within {self.settings.timeout_s:g} s, "
                f"or nothing more goes on; {held} trajectories are suspended (a policy whose `then` is hold?)"
            )
        return groups

    def usable(self, group: rollout.Delivery) -> list[rollout.Trajectory]:
        """Those that can be trained on: none of a group that failed as a whole. Answers that were cut off count."""
        return [one for one in group.trajectories if not (group.error or one.error) and one.sampled_tokens]

    def reward(self, one: rollout.Trajectory) -> float:
        return self.task.reward(one, self.service.tokenizer.decode(one.output_ids))

    def state_dict(self) -> dict[str, Any]:
        """All that a checkpoint needs, partial trajectories and their tokens included."""
        progress = {"task": self.task.what, "next_prompt": self.task.next, "under_way": self.under_way}
        return progress | {"trainer": self.trainer.state_dict(), "rollout": self.service.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], live: int) -> None:
        """Go on from there with a new service, whose weights get their version again first."""
        was, now = state["task"], self.task.what
        if was != now:
            changed = [name for name in was | now if was.get(name) != now.get(name)]
            other = ", ".join(f"{name}: {was.get(name)}, and now {now.get(name)}" for name in changed)
            raise ConfigError(f"the checkpoint is of other prompts: {other}")
        self.task.next, self.under_way = state["next_prompt"], state["under_way"]
        self.trainer.load_state_dict(state["trainer"])
        self.service.update_weights(self.trainer.weights(), version=live)
        self.service.load_state_dict(state["rollout"])


if __name__ == "__main__":
    sys.exit(main(Settings, CONFIGS / "grpo_cpu.yaml", trainer=Trainer, run=Run))
