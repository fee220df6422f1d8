"""GRPO, with `rollout` for generation and a model of Hugging Face as the trainer: `grpo.py [--steps N] [--partial] …`

One step: collect groups of samples, score them, compare each with its group, take optimiser steps on a clipped
objective, and give the new weights to the service. With `--partial` a step does not wait for the longest samples: more
groups than it needs are under way, and what is not finished is suspended and goes on in the next one. `--resume` goes
on from the last checkpoint, which holds the tokens of unfinished trajectories, too.

The trainer is one process with one copy of the model. Under FSDP or DeepSpeed every rank runs `Trainer.update` on its
share of the batch; rank 0 alone talks to the service, and `Trainer.weights` gathers full tensors, one at a time.
"""

import argparse
import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from pydantic import Field
from rich.progress import Progress
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

import rollout
from rollout.config import Config, Section, load_file
from rollout.errors import ConfigError
from rollout.store import TrajectoryStore
from rollout.training.advantages import group_advantages
from rollout.training.batch import Batch
from rollout.training.charts import rollout_metrics
from rollout.training.corrections import clipped_objective, decoupled, mismatch, stale_mask
from rollout.training.recorder import Recorder

CONFIGS = Path(__file__).parent.parent / "configs"
NUMBER = re.compile(r"-?\d+")


class Settings(Section):
    """Of a run."""

    rollout: Config
    """The service's; the trainer begins with its model."""
    steps: int = 45
    prompts: int = 8
    """Groups a step."""
    samples: int = 8
    """Trajectories a group."""
    dataset: str = "chain_sum"
    """Of reasoning-gym."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Passed to the data set."""
    seed: int = 0
    partial: bool = False
    """Collect with over-sampling; what is not finished goes on in the next step."""
    over_sample: float = 0.5
    """With `partial`: share of further groups under way."""
    learning_rate: float = 1e-5
    warmup: int = 0
    """Optimiser steps in which it grows to that."""
    minibatches: int = 1
    """Optimiser steps on each batch."""
    rows: int = 64
    """Trajectories in one forward pass of the trainer."""
    clip: float = 0.2
    cap: float = 2.0
    """Of importance weights between the trainer's probabilities and those that tokens were sampled with."""
    max_lag: int = 4
    """Tokens sampled more versions ago are not trained on."""
    kl: float = 0.0
    """Weight of the divergence from the first model; 0 needs no copy of it."""
    max_grad_norm: float = 1.0
    autocast: bool = True
    """Compute in bfloat16; parameters and optimiser stay float32."""
    checkpoint_every: int = 15
    """Steps."""
    out: Path = Path("out/grpo")
    """Metrics, curves, trajectories and the checkpoint."""


class Task:
    """Prompts without end, in order, and their rewards."""

    def __init__(self, settings: Settings) -> None:
        endless = dict(settings.options) | {"seed": settings.seed, "size": 1 << 30}
        self._dataset = reasoning_gym.create_dataset(settings.dataset, **endless)
        self.next = 0

    def submit(self, service: rollout.Rollout, prompts: int, samples: int) -> None:
        for index in range(self.next, self.next + prompts):
            service.submit(self._dataset[index]["question"], n=samples, key=str(index), chat=True)
        self.next += prompts

    def reward(self, one: rollout.Trajectory, text: str) -> float:
        """1 if the last number of the answer is right."""
        numbers = NUMBER.findall(text)
        entry = self._dataset[int(one.group_id)]
        return float(bool(numbers) and self._dataset.score_answer(numbers[-1], entry) == 1.0)


class Trainer:
    """The model that learns, with its optimiser."""

    def __init__(self, settings: Settings) -> None:
        path = settings.rollout.model.path
        disable_progress_bar()  # of loading
        self._settings = settings
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
        self.steps = 0
        self._first = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) if settings.kl else None

    def hidden(self, model: Any, batch: Batch) -> Tensor:
        """[N, H]: what each sampled token was predicted from. The samples of a prompt share what the model makes of
        it: positions before `shared` are computed once for all rows that begin alike."""
        shared = max(0, int(batch.mask_BS.int().argmax(dim=1).min()) - 1)
        cache = DynamicCache()
        if shared:
            prefixes_US, row_B = torch.unique(batch.ids_BS[:, :shared], dim=0, return_inverse=True)
            model.base_model(prefixes_US, None, None, cache)
            cache.batch_select_indices(row_B)
        rest_BSH = model.base_model(batch.ids_BS[:, shared:], batch.attention_BS, None, cache).last_hidden_state
        return rest_BSH[:, :-1][batch.mask_BS[:, shared + 1 :]]

    def logprobs(self, model: Any, batch: Batch) -> Tensor:
        """[B, S]; of what is not sampled, nothing is computed over the vocabulary."""
        with self.precision():
            logits_NV = model.get_output_embeddings()(self.hidden(model, batch))
        return self.chosen(logits_NV, batch)

    def precision(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self._settings.autocast else nullcontext()

    def chosen(self, logits_NV: Tensor, batch: Batch) -> Tensor:
        """[B, S]: log-probabilities of the sampled tokens, at the temperature of sampling; 0 elsewhere."""
        all_NV = torch.log_softmax(logits_NV.float() / self._settings.rollout.sampling.temperature, dim=-1)
        chosen_N = all_NV.gather(-1, batch.ids_BS[batch.mask_BS][:, None]).squeeze(-1)
        return torch.zeros(batch.mask_BS.shape).masked_scatter(batch.mask_BS, chosen_N)

    def update(self, batch: Batch, rewards: Sequence[Sequence[float]], live: int) -> dict[str, float]:
        """Take optimiser steps on trajectories that were collected under version `live`, with the rewards of each group
        in turn; returns what to chart."""
        settings = self._settings
        advantages_B = torch.cat([group_advantages([group])[0] for group in rewards])
        proximal_BS = torch.zeros(batch.mask_BS.shape)  # of the model as it is before these steps
        if settings.minibatches > 1:
            with torch.no_grad():
                for rows, part in batch.split(settings.rows):
                    proximal_BS[rows, : part.width] = self.logprobs(self.model, part)
        fresh_BS = batch.mask_BS & stale_mask(batch.versions_BS, live=live, max_lag=settings.max_lag)
        losses, norms = [], []
        for minibatch, _ in batch.split(math.ceil(len(batch) / settings.minibatches)):
            # The mean over tokens of a trajectory, and then over trajectories.
            shares_BS = fresh_BS / fresh_BS.sum(dim=1, keepdim=True).clamp(min=1) / len(fresh_BS[minibatch])
            losses.append(0.0)
            for rows, part in batch.split(settings.rows, minibatch):
                at = rows, slice(part.width)
                current_BS = self.logprobs(self.model, part)
                if settings.minibatches == 1:
                    proximal_BS[at] = current_BS.detach()
                loss = (shares_BS[at] * self._loss(part, current_BS, proximal_BS[at], advantages_B[rows])).sum()
                loss.backward()
                losses[-1] += loss.item()
            norms.append(self.step())
        found = mismatch(proximal_BS, batch.behaviour_BS, batch.mask_BS & (batch.versions_BS == live))
        return {
            "train/loss": sum(losses) / len(losses),
            "train/grad_norm": sum(norms) / len(norms),
            "train/stale_tokens": float((batch.mask_BS & ~fresh_BS).sum()),
            "mismatch/ratio_mean": found.ratio_mean,  # of tokens that the live weights sampled
            "mismatch/max_abs_log_ratio": found.max_abs_log_ratio,
            "mismatch/kl": found.kl,
        }

    def step(self) -> float:
        """One of the optimiser; returns the norm of the gradient."""
        self.steps += 1
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * min(1.0, self.steps / max(1, self._settings.warmup))
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def _loss(self, batch: Batch, current_BS: Tensor, proximal_BS: Tensor, advantages_B: Tensor) -> Tensor:
        """[B, S]. What is clipped is how far the model went since before this batch; how far it was from those that
        sampled the tokens is made up for by truncated importance weights."""
        settings, mask_BS = self._settings, batch.mask_BS
        ratios = decoupled(current_BS, proximal_BS, batch.behaviour_BS, mask_BS, cap=settings.cap)
        advantages_BS = advantages_B[:, None].expand_as(current_BS)
        clip = {"clip_low": settings.clip, "clip_high": settings.clip}
        loss_BS = -ratios.weights_BT * clipped_objective(ratios.ratio_BT, advantages_BS, mask_BS, **clip)
        if self._first is not None:
            with torch.no_grad():
                first_BS = self.logprobs(self._first, batch)
            away_BS = first_BS - current_BS
            loss_BS = loss_BS + settings.kl * (away_BS.exp() - away_BS - 1)
        return loss_BS

    def weights(self) -> dict[str, Tensor]:
        """Under the names of Hugging Face, as the service takes them."""
        return dict(self.model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Run:
    """A training run: what it consists of, and how far it is."""

    def __init__(self, settings: Settings, service: rollout.Rollout, trainer: Trainer) -> None:
        temperature, top_k, top_p = (
            settings.rollout.sampling.temperature,
            service.sampling.top_k,
            service.sampling.top_p,
        )
        if not temperature or (top_k, top_p) != (0, 1.0):  # the trainer computes no others; null is what the model says
            got = f"temperature {temperature}, top_k {top_k} and top_p {top_p}"
            raise ConfigError(f"rollout.sampling: got {got}, allowed: > 0, 0 and 1.0")
        self.settings = settings
        self.service = service
        self.trainer = trainer
        self.task = Task(settings)
        self.store = TrajectoryStore(settings.out / "trajectories")
        self.under_way = 0
        """Groups that were submitted and not collected."""
        self.seen = time.monotonic(), service.stats()
        """When, and in what state, the service was looked at last."""

    def step(self, step: int) -> dict[str, float]:
        """One turn of the loop, under version `step`; version `step + 1` is live after it."""
        service, began = self.service, time.monotonic()
        groups = self.collect()
        collected, after = time.monotonic(), service.stats()
        members = [self.usable(group) for group in groups]
        trajectories = [one for group in members for one in group]
        rewards = {one.trajectory_id: self.reward(one) for one in trajectories}
        since, before = self.seen
        metrics = rollout_metrics(
            groups,
            rewards=rewards,
            live=step,
            seconds=collected - began,
            before=before,
            after=after,
            between_s=collected - since,
        )
        self.seen = collected, after
        by_group = [[rewards[one.trajectory_id] for one in group] for group in members if group]
        metrics |= self.trainer.update(Batch.of(trajectories), by_group, live=step)
        trained = time.monotonic()
        service.update_weights(self.trainer.weights(), version=step + 1)
        self.store.append(trajectories, version=step, rewards=list(rewards.values()))
        ended = time.monotonic()
        return metrics | {
            "perf/train_time": trained - collected,
            "perf/update_weights_time": ended - trained,
            "perf/step_time": ended - began,
        }

    def collect(self) -> Sequence[rollout.Delivery]:
        """Groups for one step. With `partial` a share more are under way, and what was left over goes first."""
        settings = self.settings
        over_sample = settings.over_sample if settings.partial else 0.0
        self.submit(math.ceil(settings.prompts * (1 + over_sample)))
        groups = self.service.collect(settings.prompts, over_sample=over_sample).groups
        self.under_way -= len(groups)
        if len(groups) < settings.prompts:
            raise TimeoutError(f"collected {len(groups)} of {settings.prompts} groups in time")
        return groups

    def submit(self, wanted: int) -> None:
        """Have so many groups under way."""
        self.task.submit(self.service, max(0, wanted - self.under_way), self.settings.samples)
        self.under_way = max(wanted, self.under_way)

    def usable(self, group: rollout.Delivery) -> list[rollout.Trajectory]:
        """Those that can be trained on. Raises `GroupFailedError` if the group failed as a whole."""
        return [one for one in group.raise_for_failure().trajectories if one.error is None and one.output_ids]

    def reward(self, one: rollout.Trajectory) -> float:
        return self.task.reward(one, self.service.tokenizer.decode(one.output_ids))

    def save(self, step: int) -> None:
        """Write the checkpoint of before `step`, whole or not at all."""
        path = self.settings.out / "checkpoint.pt"
        state = {"step": step, "next_prompt": self.task.next, "under_way": self.under_way}
        torch.save(
            state | {"trainer": self.trainer.state_dict(), "rollout": self.service.state_dict()},
            path.with_suffix(".partial"),
        )
        path.with_suffix(".partial").replace(path)

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, with a new service: partial trajectories come back with their tokens."""
        self.task.next, self.under_way = state["next_prompt"], state["under_way"]
        self.trainer.load_state_dict(state["trainer"])
        self.service.update_weights(self.trainer.weights(), version=state["step"])
        self.service.load_state_dict(state["rollout"])


def train(settings: Settings, *, resume: bool, trainer: type[Trainer] = Trainer, run: type[Run] = Run) -> Path:
    """Returns where the curves were drawn."""
    sampling = settings.rollout.run.model_copy(update={"seed": settings.seed})
    checkpoint = settings.out / "checkpoint.pt"
    if resume and not checkpoint.exists():
        raise ConfigError(f"{checkpoint}: there is no checkpoint to go on from; --resume is for a run that wrote one")
    state = torch.load(checkpoint, weights_only=True, mmap=True) if resume else None
    first = state["step"] if state else 0
    with (
        rollout.start(settings.rollout.model_copy(update={"run": sampling})) as service,
        Recorder(settings.out, first_step=first) as recorder,
        Progress() as progress,
    ):
        loop = run(settings, service, trainer(settings))
        if state is None:
            checkpoint.unlink(missing_ok=True)  # of another run
        loop.store.discard(from_version=first)  # what was done after the checkpoint is done again
        if state is not None:
            loop.load(state)
        for step in progress.track(range(first, settings.steps), description="training"):
            metrics = loop.step(step)
            recorder.log(step, metrics)
            progress.console.print(recorder.summary(step, metrics), soft_wrap=True)
            if (step + 1) % settings.checkpoint_every == 0 or step + 1 == settings.steps:
                loop.save(step + 1)
        return recorder.plot()


def settings_of(kind: type[Settings], config: Path, words: Sequence[str] | None = None) -> tuple[Settings, bool]:
    """From the command line; and whether to go on from the checkpoint."""
    parser = argparse.ArgumentParser(description="See the head of this file and configs/ for what can be set.")
    parser.add_argument("--config", type=Path, default=config)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--partial", action="store_true", help="leave what is not finished to the next step")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=value", dest="overrides")
    args = parser.parse_args(words)
    chosen = {"steps": args.steps, "out": args.out, "partial": args.partial or None}
    overrides = [f"{name}={value}" for name, value in chosen.items() if value is not None]
    return load_file(kind, args.config, overrides + args.overrides), args.resume


if __name__ == "__main__":
    settings, resume = settings_of(Settings, CONFIGS / "grpo_cpu.yaml")
    print(f"curves: {train(settings, resume=resume)}")
