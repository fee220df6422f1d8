"""`bench resume` at toy sizes: every resume had its KV from where it was kept, which the benchmark checks itself."""

from pathlib import Path

import pytest

from benchmarks.resume import KEEPS, Settings, run
from benchmarks.standin import StandIn
from rollout.errors import ModelNotFoundError


def test_every_place_is_measured(ray_cluster: None, tmp_path: Path) -> None:
    model = StandIn(layers=4, kv_heads=4, head_dim=64).write(tmp_path / "model")
    results, ratios = run(Settings(model=model, cpus=1, tokens=400, repeats=5), None)
    assert set(ratios) == {"resume_vs_copy", "resume_vs_reprefill"}
    for keep in KEEPS:
        assert len(results[keep]["all_ms"]) == 5
    phases = results["pool"]["phases"]
    assert set(phases) == {"command_ms", "admit_ms", "open_ms", "verify_and_scatter_ms", "to_batch_ms"}
    assert results["memcpy_ms"] > 0
    assert results["decode_step_ms"] > 0


def test_without_the_model_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="make model"):
        run(Settings(model=tmp_path / "none"), None)
