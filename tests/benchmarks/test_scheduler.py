"""`bench scheduler` at toy sizes: its parts add up, and it runs what it says."""

from pathlib import Path

import pytest

from benchmarks.scheduler import Settings, run
from rollout.errors import ModelNotFoundError
from tests.tiny_models import make_tiny_llama


def test_the_parts_of_a_step_add_up(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "llama")
    settings = Settings(
        model=model, cpus=1, sizes=(1, 4, 32), real_sequences=4, context_tokens=60, steps=16, warm_steps=1
    )
    results, ratios = run(settings)
    assert set(ratios) == {"overhead_b1", "overhead_b4"}
    assert all(0 < ratio < 1 for ratio in ratios.values())
    assert results["huge_pages"] is True
    for size in settings.sizes:
        parts = results[f"b{size}"]
        assert parts["overhead_ms"] == pytest.approx(parts["step_ms"] - parts["model_ms"], rel=0.5)
        assert all(ms >= 0 for ms in parts.values()), parts
    assert results["plan_32_ms"] > 0
    assert results["plan_32_all_grow_ms"] > 0


def test_without_the_model_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="make model"):
        run(Settings(model=tmp_path / "none"))
