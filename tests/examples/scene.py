"""Runs of the examples on a service that many of them use, one after the other, and what such a run leaves on disk.

To a run it looks as if it had started the service: it finds the model's weights as version 0 and nothing under way.
"""

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import rollout
from rollout.client import Rollout
from rollout.config import Config
from rollout.store import Stored, TrajectoryStore
from rollout.training.recorder import read_metrics
from rollout.types import Trajectory

MAX_NEW_TOKENS = 40
SLICE_TOKENS = 8
PROMPTS, SAMPLES = 2, 4


class Killed(BaseException):
    """Nothing of a run catches it."""


def service_config(model: Path, name: str, *, workers: int) -> dict[str, Any]:
    return {
        "model": {"path": model, "dtype": "float32"},
        "cluster": {"name": name, "workers": workers, "start_timeout_s": 600},
        "engine": {"kv_bytes": "8MiB", "max_running": 8, "deterministic": True},
        "pool": {"budget_bytes": "32MiB", "warm_bytes": 0},
        "abort": {"keep": "pool", "policies": [{"kind": "slice_budget", "tokens": SLICE_TOKENS}]},
        "resume": {"prefer": "other"},
        "sampling": {"temperature": 1.0, "max_new_tokens": MAX_NEW_TOKENS},
    }


def fields(config: Config | Mapping[str, Any], out: Path, **values: Any) -> dict[str, Any]:
    """Of a run of a few small steps, in which a tiny model changes a lot."""
    own = {"prompts": PROMPTS, "samples": SAMPLES, "learning_rate": 1e-3, "autocast": False, "out": out}
    return {"rollout": config} | own | values


def marked(run: type[Any]) -> type[Any]:
    """A run with rewards of which a random model gets some, and groups in an order that is the same in every run."""

    class Marked(run):
        def reward(self, one: Trajectory) -> float:
            return sum(one.output_ids) % 7 / 7

        def collect(self) -> Sequence[rollout.Delivery]:
            return sorted(super().collect(), key=lambda group: int(group.group_id))

    return Marked


def train(
    monkeypatch: pytest.MonkeyPatch, service: Rollout, grpo: ModuleType, settings: Any, *, run: type[Any], **how: Any
) -> Path:
    """`train` of the examples, on this service; returns where the curves were drawn."""

    @contextlib.contextmanager
    def start(config: Config) -> Iterator[Rollout]:
        assert config.run.seed == service.config.run.seed
        service.abort(keep="none", then="finish")
        service.next_groups(1000, timeout_s=0)
        service.update_weights(config.model.path, version=0)
        yield service

    with monkeypatch.context() as patch:
        patch.setattr(rollout, "start", start)
        importlib.import_module("session").train(settings, run=marked(run), **({"trainer": grpo.Trainer} | how))
    return settings.out / "curves.png"


def stored(out: Path) -> list[Stored]:
    return TrajectoryStore(out / "trajectories").read()


def metrics(out: Path) -> list[dict[str, Any]]:
    return read_metrics(out / "metrics.jsonl")


def checkpoint(out: Path) -> dict[str, Any]:
    return torch.load(out / "checkpoint.pt", weights_only=True)


def under_way(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The trajectories in a checkpoint, by id."""
    groups = state["run"]["rollout"]["groups"]
    members = [member["trajectory"] for group in groups for member in group["members"]]
    return {each["trajectory_id"]: each for each in members}


def assert_sound(out: Path, *, steps: int, samples: int = SAMPLES) -> None:
    """After a run to its end: every step is there once, every prompt is trained once or in the checkpoint, and the
    columns of every trajectory are aligned (B3)."""
    assert [line["step"] for line in metrics(out)] == list(range(steps))
    rows, state = stored(out), checkpoint(out)
    assert state["step"] == steps
    trained = [row.trajectory.trajectory_id for row in rows]
    left = list(under_way(state))
    assert len(left) == state["run"]["under_way"] * samples
    expected = [f"{prompt}/{sample}" for prompt in range(state["run"]["next_prompt"]) for sample in range(samples)]
    assert sorted(trained + left) == sorted(expected)
    assert sorted({row.version for row in rows}) == list(range(steps))
    for row in rows:
        assert_aligned(row.trajectory)
    lengths = [sum(len(row.trajectory.output_ids) for row in rows if row.version == step) for step in range(steps)]
    assert [line["rollout/tokens"] for line in metrics(out)] == lengths


def assert_aligned(one: Trajectory) -> None:
    count = len(one.output_ids)
    assert 1 <= count <= MAX_NEW_TOKENS
    assert count == len(one.logprobs) == len(one.loss_mask) == sum(run.tokens for run in one.versions)
    assert all(logprob <= 0 for logprob in one.logprobs)
    edges = [(span.first, span.stop) for span in one.kv_spans]
    start, stop = len(one.prompt_ids), len(one.prompt_ids) + count
    assert [first for first, _ in edges] == [start, *(stop for _, stop in edges[:-1])]
    assert edges[-1][1] == stop
    for span in one.kv_spans:
        assert [first for first, _, _ in span.kv] == [0, *(stop for _, stop, _ in span.kv[:-1])]
        assert span.kv[-1][1] == span.first


def sampled_by(one: Trajectory) -> list[int]:
    """The version of each output token."""
    return [run.version for run in one.versions for _ in range(run.tokens) if run.version is not None]


def stale_spans(one: Trajectory) -> int:
    """How many of its spans were sampled on KV that other weights than those that sampled them had written."""
    by = sampled_by(one)
    start = len(one.prompt_ids)
    return sum(any(version != by[span.first - start] for _, _, version in span.kv) for span in one.kv_spans)
