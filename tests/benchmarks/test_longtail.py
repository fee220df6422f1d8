"""`bench longtail` at toy sizes: every side delivers what was asked for, and only `reprefill` computes much again."""

from pathlib import Path

import pytest

from benchmarks.longtail import SIDES, Settings, run
from benchmarks.standin import StandIn
from rollout.errors import ConfigError, ModelNotFoundError
from tests.benchmarks.test_servegen import write_histogram


@pytest.mark.soak
def test_all_sides_do_the_same_work(ray_cluster: None, tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {
            "model": StandIn(layers=4, kv_heads=4, head_dim=64).write(tmp_path / "model"),
            "lengths": write_histogram(tmp_path / "lengths.json"),
            "workers": 1,
            "longest": 200,
            "groups": 3,
            "open_groups": 5,
            "samples": 2,
            "prompt_tokens": (4, 8),
            "slice_tokens": 16,
            "kv_bytes": "16MiB",
            "host_bytes": "4MiB",
            "pool_bytes": "8MiB",
            "repeats": 2,
        }
    )
    results, ratios = run(settings)
    assert set(ratios) == {
        "recompute_auto",
        "recompute_divided",
        "time_auto_vs_sync",
        "time_divided_vs_sync",
        "time_auto_vs_reprefill",
    }
    for side in SIDES:
        each = results[side]
        assert len(each["all_collect_s"]) == 2
        assert 0 < each["collect_s"] <= each["all_s"]
        assert 0 <= each["idle_share"] < 1
        assert 0 < each["batch"] <= settings.max_running
        assert each["resumed_elsewhere"] == 0
    assert results["sync"]["suspensions"] == results["sync"]["recomputed_tokens"] == 0
    assert results["sync"]["decisions"] == {}
    assert results["reprefill"]["recomputed_tokens"] > 0
    assert results["reprefill"]["written_bytes"] == 0
    assert results["reprefill"]["useful_reload"] is None
    assert set(results["reprefill"]["decisions"]["quota"]) == {"none"}
    assert results["divided"]["suspensions"] > results["auto"]["suspensions"] > 0
    assert "slice_budget" in results["divided"]["decisions"]
    assert ratios["recompute_auto"] == pytest.approx(
        results["auto"]["recomputed_tokens"] / results["reprefill"]["recomputed_tokens"]
    )


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="make model"):
        run(Settings(model=tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"lengths: .*none\.json"):
        run(Settings(model=tmp_path, lengths=tmp_path / "none.json"))
    with pytest.raises(ValueError, match="open_groups: got 2, allowed: groups \\(3\\) or more"):
        Settings(groups=3, open_groups=2)
