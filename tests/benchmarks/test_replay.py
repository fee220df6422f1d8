"""What a controller was told leads to the same again; what would not be told again is refused."""

import pytest

from benchmarks.measure import MeasurementError
from benchmarks.replay import Mix, Recording, UnrecordedCallError, measure_updates
from rollout.sim.simulation import Simulation
from tests.benchmarks.test_keep import RATES

MIX = Mix(
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


def test_a_replay_comes_to_the_same_and_tells_what_was_told() -> None:
    results = measure_updates(MIX, 1)
    kinds = results["kinds"]
    assert results["updates"] == sum(kinds.values())
    assert results["updates_per_s"] > 0
    assert {"Admitted", "Sampled", "Parked", "Finished"} <= set(kinds)
    assert kinds["Finished"] == 12
    assert results["calls"]["WorkerUp"] == 2
    assert results["calls"]["begin_collection"] >= 3
    assert {"slice_budget", "quota"} <= set(results["decisions"])
    assert results["profile"]


def test_a_call_that_is_not_recorded_is_refused() -> None:
    simulation = Simulation(RATES)
    Recording(simulation)
    assert simulation.controller.complete_groups == 0
    for call in ("pause", "discard", "extend", "drain", "expect_workers"):
        with pytest.raises(UnrecordedCallError, match=f"got a call of {call}, recorded are: abort, begin_collection"):
            getattr(simulation.controller, call)


def test_a_controller_that_decides_otherwise_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recording, "agrees", lambda *_: False)
    with pytest.raises(MeasurementError, match="decided otherwise"):
        measure_updates(MIX, 1)
