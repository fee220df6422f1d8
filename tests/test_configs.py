"""Every configuration that ships is valid."""

import importlib
from pathlib import Path

import pytest

from rollout.config import Config, ReasoningGymPrompts, SliceBudget, load_config, load_file

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
OF_EXAMPLES = {
    "grpo_cpu.yaml": ("grpo", "Settings"),
    "ppo_cpu.yaml": ("ppo", "PPOSettings"),
    "async_grpo_cpu.yaml": ("async_grpo", "AsyncSettings"),
    "simulated_trainer.yaml": ("simulated_trainer", "Settings"),
}
"""Whose settings they are."""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_it_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Config
    if path.name in OF_EXAMPLES:
        module, name = OF_EXAMPLES[path.name]
        monkeypatch.syspath_prepend(ROOT / "examples")
        kind = getattr(importlib.import_module(module), name)
    load_file(kind, path)


def test_the_demo_suspends_most_trajectories_at_least_three_times() -> None:
    config = load_config(next(path for path in CONFIGS if path.name == "demo.yaml"))
    assert isinstance(config.run.prompts, ReasoningGymPrompts)
    (policy,) = config.abort.policies
    assert isinstance(policy, SliceBudget)
    assert config.sampling.ignore_eos
    assert (config.sampling.max_new_tokens - 1) // policy.tokens >= 3
    assert config.cluster.workers > 1
    assert config.resume.prefer == "other"
