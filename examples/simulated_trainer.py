"""A real service with a trainer that only sleeps: throughput without training: `simulated_trainer.py [--compare] …`

Each trajectory has a length that was drawn before, and is made to have it. Prompts are random ids. After it has
collected a batch the trainer sleeps as long as it would compute, then really pushes the weights, under a new version:
the tensors are the same again, but versions, staleness and what becomes of KV are those of a run that learns.
`mode` says how it collects, as grpo.py, `grpo.py --partial` and async_grpo.py do; `--compare` runs all three, one
after the other, on the same groups.
"""

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from rich.console import Console
from rich.table import Table

import rollout
from rollout.config import Config, Section, load_file
from rollout.errors import ConfigError, DeadlineError, RolloutError, ServiceError
from rollout.metrics import ServiceStats, Staleness
from rollout.model.spec import read_spec
from rollout.model.weights import stream_safetensors
from rollout.training import charts
from rollout.training.recorder import Recorder

CONFIG = Path(__file__).parent.parent / "configs" / "simulated_trainer.yaml"
Mode = Literal["sync", "partial", "async"]
MODES: tuple[Mode, ...] = ("sync", "partial", "async")
STEP_TIME = "perf/step_time"
IDLE = "perf/idle_share"
LEFT = "rollout/groups_left"
ROWS = (
    ("seconds per step", STEP_TIME, "{:.2f}"),
    ("tokens per second", charts.TOKENS_PER_S, "{:.0f}"),
    ("idle share of the workers", IDLE, "{:.0%}"),
    ("staleness, mean", charts.STALENESS, "{:.2f}"),
    ("staleness, most", charts.STALENESS_MAX, "{:.0f}"),
    ("tokens computed again", "rollout/recomputed_tokens", "{:.0f}"),
    ("useful reload ratio", "rollout/useful_reload_ratio", "{:.2f}"),
    ("partial trajectories", charts.PARTIAL, "{:.0%}"),
    ("mean length", charts.RESPONSE_LEN, "{:.1f}"),
    ("groups under way at the end", LEFT, "{:.0f}"),
)


class Settings(Section):
    """Of a run."""

    rollout: Config
    """The service's. Its sampling says how tokens are drawn, but not how many."""
    mode: Mode = "sync"
    """sync: a step waits for all of its groups; partial: over-samples, and holds what is not finished for the next
    step; async: other groups are under way while the trainer sleeps."""
    steps: PositiveInt = 6
    prompts: PositiveInt = 8
    """Groups a step."""
    samples: PositiveInt = 4
    """Trajectories a group."""
    prompt_tokens: PositiveInt = 32
    """Of each prompt."""
    median: PositiveFloat = 32.0
    """Of the lengths, in tokens, but for the tail; they are log-normal."""
    sigma: float = Field(default=0.5, ge=0.0, le=5.0)
    """Standard deviation of the logarithm of these lengths."""
    tail_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of trajectories in the tail: from half of `longest` to `longest`."""
    longest: PositiveInt | None = None
    """Tokens of the longest trajectory; null: as many as the context has room for, which is the limit in any case."""
    lengths: Path | None = None
    """Numbers of tokens that are taken in turn instead of drawn: one a line, or a JSON list."""
    train_s: NonNegativeFloat = 0.0
    """For which the trainer sleeps on each batch, in seconds."""
    train_s_per_token: NonNegativeFloat = 0.0
    """Likewise, for each sampled token of the batch."""
    push_weights: bool = True
    """After each batch; without, everything is of version 0."""
    over_sample: NonNegativeFloat = 0.5
    """partial: share of further groups under way."""
    ahead: NonNegativeFloat = 1.0
    """async: steps for which groups are under way while the trainer sleeps."""
    seed: int = 0
    """Of lengths, prompts and draws of tokens."""
    out: Path = Path("out/simulated_trainer")
    """Each mode has its metrics in a directory of its own there."""


class Workload:
    """Groups without end, in order: the prompt and the lengths of each, the same in every run with these settings.

    Raises `ConfigError`: no such model or file, what is in it, or no room for a token after the prompt.
    """

    def __init__(self, settings: Settings) -> None:
        spec = read_spec(settings.rollout.model.path)
        self._settings = settings
        self._vocabulary = range(spec.vocab_size)
        context = min(spec.max_context_tokens, settings.rollout.engine.max_context_tokens or sys.maxsize)
        if settings.prompt_tokens >= context:
            raise ConfigError(f"prompt_tokens: got {settings.prompt_tokens}, allowed: less than the context, {context}")
        self._longest = min(context - settings.prompt_tokens, settings.longest or sys.maxsize)
        self._given = None if settings.lengths is None else read_lengths(settings.lengths)

    def prompt(self, index: int) -> list[int]:
        draw = random.Random(f"{self._settings.seed} prompt {index}")
        return draw.choices(self._vocabulary, k=self._settings.prompt_tokens)

    def lengths(self, index: int) -> list[int]:
        """Of the samples of the group `index`, in tokens."""
        settings = self._settings
        if self._given is not None:
            first = index * settings.samples
            wanted = [self._given[at % len(self._given)] for at in range(first, first + settings.samples)]
        else:
            draw = random.Random(f"{settings.seed} lengths {index}")
            wanted = [self._drawn(draw) for _ in range(settings.samples)]
        return [max(1, round(min(length, self._longest))) for length in wanted]

    def _drawn(self, draw: random.Random) -> float:
        settings = self._settings
        if draw.random() < settings.tail_share:
            return draw.uniform(self._longest / 2, self._longest)
        return draw.lognormvariate(math.log(settings.median), settings.sigma)


def read_lengths(path: Path) -> list[float]:
    """Raises `ConfigError`: the file cannot be read, or holds something else than numbers of 1 or more."""
    try:
        text = path.read_text(encoding="utf-8").strip()
        numbers = json.loads(text if text.startswith("[") else f"[{','.join(text.split())}]")
    except OSError as error:
        raise ConfigError(f"lengths: {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"lengths: {path}: not numbers, one a line or in a JSON list: {error}") from None
    wrong = [each for each in numbers if type(each) not in (int, float) or not 1 <= each < math.inf]
    if wrong or not numbers:
        raise ConfigError(f"lengths: {path}: got {wrong[0] if wrong else 'none'!r:.80}, allowed: numbers >= 1")
    return list(numbers)


class Run:
    """Steps in one mode on one service, and what they came to."""

    def __init__(self, settings: Settings, service: rollout.Rollout, workload: Workload) -> None:
        self.settings = settings
        self.service = service
        self.workload = workload
        self.version = 0
        self.submitted = 0
        self.waiting: dict[str, list[int]] = {}
        """Groups that were not collected, and their lengths."""
        self.collected: list[Sequence[rollout.Delivery]] = []
        """By each step."""
        self.seen = [(time.monotonic(), service.stats())]
        """When, and in what state, the service was looked at: before each step and after it."""
        self._weights = dict(stream_safetensors(settings.rollout.model.path)) if settings.push_weights else {}

    def step(self) -> dict[str, float]:
        began = time.monotonic()
        groups = self.collect()
        collected, live = time.monotonic(), self.version
        tokens = sum(one.sampled_tokens for group in groups for one in group.trajectories)
        time.sleep(self.settings.train_s + self.settings.train_s_per_token * tokens)
        trained = time.monotonic()
        if self.settings.push_weights:
            self.service.update_weights(self._weights, version=live + 1)
            self.version += 1
        ended = time.monotonic()
        self.collected.append(groups)
        self.seen.append((ended, self.service.stats()))
        return self._metrics(groups, live, collected - began, since=-2) | {
            "perf/train_time": trained - collected,
            "perf/update_weights_time": ended - trained,
        }

    def collect(self) -> Sequence[rollout.Delivery]:
        """Groups for one step."""
        settings, service, prompts = self.settings, self.service, self.settings.prompts
        match settings.mode:
            case "sync":
                self.submit(prompts)
                groups = self.check(service.next_groups(prompts))
            case "partial":
                self.submit(math.ceil(prompts * (1 + settings.over_sample)))
                groups = self.check(service.collect(prompts, over_sample=settings.over_sample).groups)
            case "async":
                ahead = round(prompts * settings.ahead)
                self.submit(max(prompts, ahead))
                groups = self.check(service.next_groups(prompts))
                self.submit(ahead)
        return groups

    def submit(self, wanted: int) -> None:
        """Have so many groups under way."""
        while len(self.waiting) < wanted:
            index, key = self.submitted, str(self.submitted)
            lengths = self.workload.lengths(index)
            plain = replace(self.service.sampling, ignore_eos=True, stop_token_ids=(), min_new_tokens=0)
            sampling = [replace(plain, max_new_tokens=length) for length in lengths]
            self.service.submit([self.workload.prompt(index)], n=len(sampling), sampling=sampling, key=[key])
            self.waiting[key] = lengths
            self.submitted += 1

    def check(self, groups: Sequence[rollout.Delivery]) -> Sequence[rollout.Delivery]:
        """These groups, which are not waited for any more.

        Raises `DeadlineError` if there are too few, `ServiceError` if a trajectory failed, and `ConfigError` if one
        ended before its length, unless a policy ended it.
        """
        for group in groups:
            lengths = self.waiting.pop(group.group_id)
            for one in group.raise_for_failure().trajectories:
                if one.error is not None:
                    raise ServiceError(f"{one.trajectory_id}: {one.error}")
                got, wanted = one.sampled_tokens, lengths[one.sample_index]
                if got < wanted and one.finish_reason is rollout.FinishReason.LENGTH:
                    raise ConfigError(f"engine.kv_bytes: {one.trajectory_id} had room for {got} of {wanted} tokens")
        if len(groups) < self.settings.prompts:
            raise DeadlineError(f"{len(groups)} of {self.settings.prompts} groups were done in time")
        return groups

    def summary(self) -> dict[str, float]:
        """Of all steps together but the first, which in every mode begins with nothing under way."""
        first = min(1, len(self.collected) - 1)
        steps = self.collected[first:]
        (began, before), (ended, after) = self.seen[first], self.seen[-1]
        staleness = Staleness(tokens=Counter(after.staleness.tokens) - Counter(before.staleness.tokens))
        metrics = self._metrics([group for step in steps for group in step], 0, ended - began, since=first)
        return metrics | {
            STEP_TIME: (ended - began) / len(steps),
            charts.STALENESS: staleness.mean or 0.0,  # of each step under its own version
            charts.STALENESS_MAX: staleness.max or 0,
        }

    def _metrics(
        self, groups: Sequence[rollout.Delivery], live: int, seconds: float, *, since: int
    ) -> dict[str, float]:
        """Of what was collected in `seconds`, and of the service from the look at it with this index to the last."""
        (began, before), (ended, after) = self.seen[since], self.seen[-1]
        metrics = charts.rollout_metrics(
            groups,
            rewards=None,
            live=live,
            seconds=seconds,
            before=before,
            after=after,
            between_s=ended - began,
        )
        return metrics | {
            STEP_TIME: ended - began,
            IDLE: idle_share(before, after, ended - began),
            LEFT: len(self.waiting),
        }


def idle_share(before: ServiceStats, after: ServiceStats, seconds: float) -> float:
    """Of the time of all workers between two looks at them, what they spent outside of steps."""
    earlier = {(worker.worker, worker.incarnation): worker.engine.busy_s for worker in before.workers}
    busy = [one.engine.busy_s - earlier.get((one.worker, one.incarnation), 0.0) for one in after.workers]
    return max(0.0, 1.0 - sum(busy) / (seconds * max(1, len(busy))))  # they answer a little after the clock was read


def simulate(settings: Settings) -> dict[str, float]:
    """One mode, with a service of its own; returns the summary."""
    workload = Workload(settings)
    seeded = settings.rollout.run.model_copy(update={"seed": settings.seed})
    with (
        Recorder(settings.out / settings.mode) as recorder,
        rollout.start(settings.rollout.model_copy(update={"run": seeded})) as service,
    ):
        run = Run(settings, service, workload)
        for step in range(settings.steps):
            metrics = run.step()
            recorder.log(step, metrics)
            print(f"{settings.mode}: {recorder.summary(step, metrics)}", flush=True)
        return run.summary()


def table(summaries: Mapping[Mode, Mapping[str, float]]) -> Table:
    """What every mode came to, in a column each."""
    made = Table("after the first step", *summaries)
    for title, name, form in ROWS:
        values = [form.format(each[name]) if name in each else "–" for each in summaries.values()]
        made.add_row(title, *values)
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="See the head of this file and configs/ for what can be set.")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--compare", action="store_true", help=f"run all modes in turn: {', '.join(MODES)}")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=value", dest="overrides")
    args = parser.parse_args(words)
    try:
        settings = load_file(Settings, args.config, args.overrides)
        modes = MODES if args.compare else (settings.mode,)
        summaries = {mode: simulate(settings.model_copy(update={"mode": mode})) for mode in modes}
        Console().print(table(summaries))
    except (RolloutError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
