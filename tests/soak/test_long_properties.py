"""The state machines of `make test` with fresh seeds and longer histories, until their share of the time is over."""

import time

import hypothesis
import pytest
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.control.test_controller_properties import ControllerInTheWorld
from tests.kv.test_cache import CacheAgainstContents

pytestmark = pytest.mark.soak

SHARE = 0.2
"""Of the whole duration, for each machine; the storm takes the rest."""
HISTORIES = hypothesis.settings(max_examples=100, stateful_step_count=150, deadline=None, database=None)


@pytest.mark.parametrize("machine", [ControllerInTheWorld, CacheAgainstContents])
def test_long_histories_keep_every_invariant(
    machine: type[RuleBasedStateMachine], soak_seed: int, soak_duration_s: float
) -> None:
    end = time.monotonic() + SHARE * soak_duration_s
    rounds = 0
    while not rounds or time.monotonic() < end:
        seeded = hypothesis.seed(soak_seed * 1_000_003 + rounds)(type(machine.__name__, (machine,), {}))
        run_state_machine_as_test(seeded, settings=HISTORIES)
        rounds += 1
