"""`examples/ppo.py` and `examples/async_grpo.py` from end to end: what they do otherwise than `grpo.py`."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollout.client import Rollout
from tests.cluster.scene import eventually
from tests.examples.scene import (
    PROMPTS,
    assert_sound,
    checkpoint,
    fields,
    metrics,
    sampled_by,
    stale_spans,
    stored,
    train,
)

STEPS = 4


def test_ppo_goes_on_with_its_value_head(
    service: Rollout, ppo: ModuleType, grpo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With one sample a prompt, half of them left to the next step."""
    values = {"samples": 1, "prompts": 4, "partial": True, "checkpoint_every": 1}
    settings = ppo.PPOSettings.model_validate(fields(service.config, tmp_path, steps=2, **values))
    train(monkeypatch, service, grpo, settings, run=grpo.Run, trainer=ppo.PPOTrainer)
    assert_sound(tmp_path, steps=2, samples=1)
    head = checkpoint(tmp_path)["run"]["trainer"]["value_head"]
    assert head["bias"].any()
    loaded = []

    class Restored(ppo.PPOTrainer):
        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict(state)
            loaded.append({name: value.clone() for name, value in self.value_head.state_dict().items()})

    more = settings.model_copy(update={"steps": 3})
    train(monkeypatch, service, grpo, more, run=grpo.Run, trainer=Restored, resume=True)
    assert_sound(tmp_path, steps=3, samples=1)
    assert all(loaded[0][name].equal(head[name]) for name in head)
    assert not checkpoint(tmp_path)["run"]["trainer"]["value_head"]["bias"].equal(head["bias"])
    for line in metrics(tmp_path):
        assert line["mismatch/ratio_mean"] == pytest.approx(1, abs=1e-4)
        assert line["train/value_loss"] > 0
        assert "train/explained_variance" in line


@pytest.mark.parametrize(
    ("name", "ahead"),
    [
        ("service", 1.0),  # which computes the KV of running trajectories again
        ("reusing", 1.0),  # where they go on in place
        ("reusing", 2.0),
        ("service", 0.5),
    ],
)
def test_generation_goes_on_while_the_trainer_computes(
    name: str,
    ahead: float,
    request: pytest.FixtureRequest,
    grpo: ModuleType,
    async_grpo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    service: Rollout = request.getfixturevalue(name)
    kind = async_grpo.AsyncSettings
    settings = kind.model_validate(fields(service.config, tmp_path, steps=STEPS, ahead=ahead, max_lag=1))
    live: list[int] = []
    sampled: list[int] = []

    class Watched(async_grpo.AsyncRun):
        def submit(self, wanted: int) -> None:
            sampled.append(service.stats().counters.tokens)
            super().submit(wanted)

    class Waiting(grpo.Trainer):
        """Trains when the service has sampled more than when the last groups were submitted."""

        def update(self, *batch: Any, **how: Any) -> dict[str, float]:
            stats = service.stats()
            live.append(stats.weights.version)
            assert stats.coming_groups == round(PROMPTS * ahead)
            eventually(lambda: service.stats().counters.tokens > sampled[-1])
            return super().update(*batch, **how)

    train(monkeypatch, service, grpo, settings, run=Watched, trainer=Waiting)
    assert_sound(tmp_path, steps=STEPS)
    assert live == list(range(STEPS))
    assert service.stats().weights.version == STEPS
    assert checkpoint(tmp_path)["run"]["under_way"] == round(PROMPTS * ahead)
    rows = stored(tmp_path)
    for line, step in zip(metrics(tmp_path), range(STEPS), strict=True):
        lags = [step - by for row in rows if row.version == step for by in sampled_by(row.trajectory)]
        assert line["async/staleness_max"] == max(lags)
        assert line["async/staleness_mean"] == pytest.approx(sum(lags) / len(lags))
        assert line["train/stale_tokens"] == sum(lag > 1 for lag in lags)
        if ahead <= 1:
            assert max(lags) <= 1
    assert max(line["async/staleness_max"] for line in metrics(tmp_path)) > 0
    mixed = [row.trajectory for row in rows if len(set(sampled_by(row.trajectory))) > 1]
    assert bool(sum(map(stale_spans, mixed))) == (name == "reusing" and bool(mixed))
