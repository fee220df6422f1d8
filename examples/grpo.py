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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from pydantic import Field
from rich.progress import Progress
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import rollout
from rollout.config import Config, Section, load_file
from rollout.store import TrajectoryStore
from rollout.training.advantages import group_advantages
from rollout.training.batch import Batch
from rollout.training.charts import rollout_metrics
from rollout.training.corrections import clipped_objective, decoupled, mismatch, stale_mask
from rollout.training.recorder import Recorder

CONFIG = Path(__file__).parent.parent / "configs" / "grpo_cpu.yaml"
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
        self._settings = settings
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
        self._first = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) if settings.kl else None

    def hidden(self, model: Any, batch: Batch) -> Tensor:
        """[N, H]: what each sampled token was predicted from. The samples of a prompt share what the model makes of
        it: positions before `shared` are computed once for all rows that begin alike."""
        shared = max(0, int(batch.mask_BS.int().argmax(dim=1).min()) - 1)
        prefixes_US, row_B = torch.unique(batch.ids_BS[:, :shared], dim=0, return_inverse=True)
        cache = DynamicCache()
        if shared:
            model.base_model(prefixes_US, None, None, cache)
            cache.batch_select_indices(row_B)
        rest_BSH = model.base_model(batch.ids_BS[:, shared:], batch.attention_BS, None, cache).last_hidden_state
        return rest_BSH[:, :-1][batch.mask_BS[:, shared + 1 :]]

    def logprobs(self, model: Any, batch: Batch) -> Tensor:
        """[B, S] of the sampled tokens, 0 elsewhere; the vocabulary is computed for these only."""
        with torch.autocast("cpu", torch.bfloat16) if self._settings.autocast else nullcontext():
            logits_NV = model.get_output_embeddings()(self.hidden(model, batch))
        all_NV = torch.log_softmax(logits_NV.float() / self._settings.rollout.sampling.temperature, dim=-1)
        chosen_N = all_NV.gather(-1, batch.ids_BS[batch.mask_BS][:, None]).squeeze(-1)
        return torch.zeros(batch.mask_BS.shape).masked_scatter(batch.mask_BS, chosen_N)

    def update(self, batch: Batch, advantages_B: Tensor, live: int) -> dict[str, float]:
        """Take optimiser steps on trajectories that were collected under version `live`; returns what to chart."""
        settings = self._settings
        proximal_BS = torch.zeros(batch.mask_BS.shape)  # of the model as it is before these steps
        if settings.minibatches > 1:
            with torch.no_grad():
                for rows, part in batch.split(settings.rows):
                    proximal_BS[rows, : part.width] = self.logprobs(self.model, part)
        fresh_BS = batch.mask_BS & stale_mask(batch.versions_BS, live=live, max_lag=settings.max_lag)
        losses, norms = [], []
        for minibatch, _ in batch.split(math.ceil(len(batch) / settings.minibatches)):
            tokens = int(fresh_BS[minibatch].sum())
            losses.append(0.0)
            for rows, part in batch.split(settings.rows, minibatch):
                current_BS, mask_BS = self.logprobs(self.model, part), fresh_BS[rows, : part.width]
                if settings.minibatches == 1:
                    proximal_BS[rows, : part.width] = current_BS.detach()
                loss = self._loss(part, mask_BS, current_BS, proximal_BS[rows, : part.width], advantages_B[rows])
                (loss / max(1, tokens)).backward()
                losses[-1] += loss.item() / max(1, tokens)
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_grad_norm)))
            self.optimizer.step()
            self.optimizer.zero_grad()
        found = mismatch(proximal_BS, batch.behaviour_BS, batch.mask_BS & (batch.versions_BS == live))
        return {
            "train/loss": sum(losses) / len(losses),
            "train/grad_norm": sum(norms) / len(norms),
            "train/stale_tokens": float((batch.mask_BS & ~fresh_BS).sum()),
            "mismatch/ratio_mean": found.ratio_mean,  # of tokens that the live weights sampled
            "mismatch/max_abs_log_ratio": found.max_abs_log_ratio,
            "mismatch/kl": found.kl,
        }

    def _loss(
        self, batch: Batch, mask_BS: Tensor, current_BS: Tensor, proximal_BS: Tensor, advantages_B: Tensor
    ) -> Tensor:
        """Summed over tokens. What is clipped is how far the model went since before this batch; how far it was from
        those that sampled the tokens is made up for by truncated importance weights."""
        settings = self._settings
        ratios = decoupled(current_BS, proximal_BS, batch.behaviour_BS, mask_BS, cap=settings.cap)
        objective_BS = clipped_objective(
            ratios.ratio_BT,
            advantages_B[:, None].expand_as(current_BS),
            mask_BS,
            clip_low=settings.clip,
            clip_high=settings.clip,
        )
        loss = -(ratios.weights_BT * objective_BS).sum()
        if self._first is not None:
            with torch.no_grad():
                first_BS = self.logprobs(self._first, batch)
            away_N = (first_BS - current_BS)[mask_BS]
            loss = loss + settings.kl * (away_N.exp() - away_N - 1).sum()
        return loss

    def weights(self) -> dict[str, Tensor]:
        """Under the names of Hugging Face, as the service takes them."""
        return dict(self.model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Run:
    """A training run: what it consists of, and how far it is."""

    def __init__(self, settings: Settings, service: rollout.Rollout, recorder: Recorder) -> None:
        self.settings = settings
        self.service = service
        self.recorder = recorder
        self.task = Task(settings)
        self.trainer = Trainer(settings)
        self.store = TrajectoryStore(settings.out / "trajectories")
        self.under_way = 0
        """Groups that were submitted and not collected."""

    def step(self, step: int) -> dict[str, float]:
        """One turn of the loop, under version `step`; version `step + 1` is live after it."""
        settings, service = self.settings, self.service
        began, before = time.monotonic(), service.stats()
        over_sample = settings.over_sample if settings.partial else 0.0
        groups = self.collect(over_sample)
        collected = time.monotonic()
        trajectories, advantages_B, rewards = self.scored(groups)
        metrics = rollout_metrics(
            groups, rewards=rewards, live=step, seconds=collected - began, before=before, after=service.stats()
        )
        metrics |= self.trainer.update(Batch.of(trajectories), advantages_B, live=step)
        trained = time.monotonic()
        service.update_weights(self.trainer.weights(), version=step + 1)
        self.store.append(trajectories, version=step, rewards=[rewards[one.trajectory_id] for one in trajectories])
        ended = time.monotonic()
        return metrics | {
            "perf/train_time": trained - collected,
            "perf/update_weights_time": ended - trained,
            "perf/step_time": ended - began,
        }

    def collect(self, over_sample: float) -> Sequence[rollout.Delivery]:
        """Groups for one step, while a share more are under way: what was left over goes first."""
        settings = self.settings
        wanted = math.ceil(settings.prompts * (1 + over_sample))
        self.task.submit(self.service, max(0, wanted - self.under_way), settings.samples)
        self.under_way = max(wanted, self.under_way)
        groups = self.service.collect(settings.prompts, over_sample=over_sample).groups
        self.under_way -= len(groups)
        if len(groups) < settings.prompts:
            raise TimeoutError(f"collected {len(groups)} of {settings.prompts} groups in time")
        return groups

    def scored(
        self, groups: Sequence[rollout.Delivery]
    ) -> tuple[list[rollout.Trajectory], Tensor, dict[rollout.TrajectoryId, float]]:
        """All trajectories that can be trained on, their advantages over their groups, and their rewards."""
        trajectories, advantages, rewards = [], [], {}
        for group in groups:
            members = [one for one in group.raise_for_failure().trajectories if one.error is None and one.output_ids]
            for one in members:
                rewards[one.trajectory_id] = self.task.reward(one, self.service.tokenizer.decode(one.output_ids))
            if members:
                trajectories += members
                advantages.append(group_advantages(torch.tensor([[rewards[one.trajectory_id] for one in members]]))[0])
        return trajectories, torch.cat(advantages), rewards

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


def train(settings: Settings, *, resume: bool) -> Path:
    """Returns where the curves were drawn."""
    checkpoint = settings.out / "checkpoint.pt"
    state = torch.load(checkpoint, weights_only=True, mmap=True) if resume else None
    first = state["step"] if state else 0
    with (
        rollout.start(settings.rollout) as service,
        Recorder(settings.out, first_step=first) as recorder,
        Progress() as progress,
    ):
        run = Run(settings, service, recorder)
        if state is not None:
            run.load(state)
        for step in progress.track(range(first, settings.steps), description="GRPO"):
            metrics = run.step(step)
            recorder.log(step, metrics)
            progress.console.print(recorder.summary(step, metrics))
            if (step + 1) % settings.checkpoint_every == 0 or step + 1 == settings.steps:
                run.save(step + 1)
        return recorder.plot()


def settings_of(kind: type[Settings], words: Sequence[str] | None = None) -> tuple[Settings, bool]:
    """From the command line; and whether to go on from the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
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
    settings, resume = settings_of(Settings)
    print(f"curves: {train(settings, resume=resume)}")
