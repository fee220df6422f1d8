"""Every configuration that ships is valid."""

from pathlib import Path

import pytest

from rollout.config import ReasoningGymPrompts, SliceBudget, load_config

CONFIGS = sorted((Path(__file__).parent.parent / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_it_loads(path: Path) -> None:
    load_config(path)


def test_the_demo_suspends_most_trajectories_at_least_three_times() -> None:
    config = load_config(next(path for path in CONFIGS if path.name == "demo.yaml"))
    assert isinstance(config.run.prompts, ReasoningGymPrompts)
    (policy,) = config.abort.policies
    assert isinstance(policy, SliceBudget)
    assert config.sampling.ignore_eos
    assert (config.sampling.max_new_tokens - 1) // policy.tokens >= 3
    assert config.cluster.workers > 1
    assert config.resume.prefer == "other"
