"""`bench control` at toy sizes: what is told again leads to the same, and the parts of a step's overhead add up."""

import pytest

from benchmarks.control import LOOP, Mix, Settings, run


def test_parts_add_up_and_a_replay_agrees() -> None:
    mix = Mix(
        workers=2,
        max_running=4,
        device_tokens=1024,
        groups=6,
        samples=2,
        collect=2,
        prompt_tokens=20,
        mean_tokens=60,
        slice_tokens=32,
    )
    settings = Settings(running=8, context_tokens=40, samples=4, steps=16, block=8, warm_steps=1, mix=mix, repeats=1)
    results, ratios = run(settings)
    assert ratios == {}
    step = results["step"]
    assert results["step_overhead_8_ms"] == step["overhead_ms"]
    parts = sum(step[f"{part}_ms"] for part in ("loop", "memory", "watches", "answer"))
    assert step["overhead_ms"] == pytest.approx(parts, abs=0.01)
    assert set(step["of_loop"]) == {f"{part}_ms" for part in LOOP}
    assert step["rounds"] == 16
    kinds = results["kinds"]
    assert results["updates"] == sum(kinds.values())
    assert {"Admitted", "Sampled", "Parked", "Finished"} <= set(kinds)
    assert kinds["Finished"] == 12
    assert results["calls"]["WorkerUp"] == 2
    assert results["calls"]["begin_collection"] >= 3
    assert {"slice_budget", "quota"} <= set(results["decisions"])
    assert results["profile"]
