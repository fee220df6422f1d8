"""`bench keep` at toy sizes: the simulations do the same work, the sums are right, and the real pairs run."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.calibration import Calibration, fit
from benchmarks.keep import FIXED, Settings, drawing, median_interval, run, simulate, simulate_all
from benchmarks.standin import StandIn
from rollout.control.paces import Pace
from rollout.sim.machine import MachineRates
from rollout.types import Keep
from tests.benchmarks.test_servegen import write_histogram

RATES = MachineRates(
    prefill_s=(0.001,),
    step=Pace(fixed_s=0.02, unit_s=0.001),
    export=Pace(fixed_s=0.005, unit_s=1e-8),
    restore=Pace(fixed_s=0.003, unit_s=1e-8),
    save=Pace(fixed_s=0.002, unit_s=1e-8),
    load=Pace(fixed_s=0.002, unit_s=1e-8),
    latency_s=0.0005,
    slowdown=0.2,
    token_bytes=4096,
    page_tokens=16,
    device_pages=1,
    pool_bytes=1,
    max_context=512,
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    common = {"prompt_tokens": (8, 16), "samples": 2, "max_running": 4, "device_tokens": 2048}
    return Settings.model_validate(
        {
            "model": StandIn(layers=4, kv_heads=4, head_dim=64).write(tmp_path / "model"),
            "lengths": write_histogram(tmp_path / "lengths.json"),
            "workers": 1,
            "short": {"groups": 4, "output_tokens": (12, 16), "slice_tokens": 8, **common},
            "longtail": {"rounds": 2, "groups": 2, "over": 1, "longest": 100, "slice_tokens": 32, **common},
            "starved": {
                "groups": 4,
                "output_tokens": (40, 60),
                "free_share": 0.1,
                **common,
                "device_tokens": 256,
            },
            "calibration": {"sizes": (40, 80), "moves": 2, "batches": (2, 4), "steps": 4},
            "turns": 1,
            "seeds": 2,
            "pairs": 2,
        }
    )


def test_all_sides_do_the_same_work_and_the_best_fixed_one_is_the_cheapest(settings: Settings) -> None:
    for name in settings.workloads:
        submitted = settings.shape(name).submitted
        turns = [drawing(settings, name).groups(f"0-{index}", submitted) for index in range(2)]
        outcomes = {keep: simulate(settings, name, RATES, keep, turns) for keep in (Keep.AUTO, *FIXED)}
        assert {each.tokens for each in outcomes.values()} == {sum(sum(group.lengths) for group in turns[1])}
        assert outcomes[Keep.AUTO].counters.suspensions > 0
        result, best = simulate_all(settings, name, RATES)
        costs = {keep: result[f"{keep}_s"] for keep in FIXED}
        assert costs[best] == min(costs.values())
        assert result["regret"] == result["auto_s"] / costs[best]
        assert len(result["regrets"]) == 2


def test_where_computing_is_next_to_free_nothing_is_saved(settings: Settings) -> None:
    fast = replace(RATES, prefill_s=(1e-9,))
    result, _ = simulate_all(settings, "short", fast)
    assert result["regret"] <= 1.03
    slow = replace(RATES, prefill_s=(0.05,))
    result, best = simulate_all(settings, "short", slow)
    assert best is not Keep.NONE
    assert "none" not in result["decisions"]["slice_budget"]


def test_lines_have_no_part_below_zero() -> None:
    assert fit([(100, 3.0), (100, 3.0), (300, 7.0)]) == Pace(fixed_s=pytest.approx(1.0), unit_s=pytest.approx(0.02))
    assert fit([(100, 3.0), (300, 1.0)]) == Pace(fixed_s=2.0, unit_s=0.0)
    assert fit([(100, 1.0), (300, 9.0)]).fixed_s == 0.0
    assert fit([(100, 1.0)]) == Pace(fixed_s=1.0, unit_s=0.0)


def test_the_interval_is_around_the_median() -> None:
    assert median_interval([1.0] * 7) == (1.0, 1.0)
    low, high = median_interval([0.9, 0.95, 0.98, 1.0, 1.02, 1.1, 1.3])
    assert 0.9 <= low < 1.0 < high <= 1.3


@pytest.mark.soak
def test_a_whole_run(ray_cluster: None, settings: Settings) -> None:
    results, ratios = run(settings.model_copy(update={"workloads": ("short",), "pairs": 2}))
    assert set(ratios) == {"regret_short", "real_short"}
    assert results["rates"]["prefill_tokens_per_s"] > 0
    real = results["real"]["short"]
    assert real["fixed"] == results["simulated"]["short"]["best"]
    assert len(real["pairs"]) == 2
    assert real["low_95"] <= real["median_ratio"] == ratios["real_short"] <= real["high_95"]
    assert real["decisions"]
    assert Calibration.model_validate({"sizes": (40, 80)}).moves == 4
