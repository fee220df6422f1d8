"""`bench control` at toy sizes: the parts of a step's overhead add up."""

import pytest

from benchmarks.control import LOOP, Settings, run
from tests.benchmarks.test_replay import MIX


def test_the_parts_of_a_step_add_up() -> None:
    settings = Settings(running=8, context_tokens=40, samples=4, steps=16, block=8, warm_steps=1, mix=MIX, repeats=1)
    results, ratios = run(settings)
    assert ratios == {}
    step = results["step"]
    assert results["step_overhead_8_ms"] == step["overhead_ms"]
    parts = sum(step[f"{part}_ms"] for part in ("loop", "memory", "watches", "answer"))
    assert step["overhead_ms"] == pytest.approx(parts, abs=0.01)
    assert set(step["of_loop"]) == {f"{part}_ms" for part in LOOP}
    assert step["rounds"] == 16
    assert results["updates_per_s"] > 0
