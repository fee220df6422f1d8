"""The state machines of `make test` with fresh seeds and longer histories, until their share of the time is over.

That of the KV tiers goes on, whatever its share, until a million rules were executed in a run of ordinary length.
"""

import time
from collections.abc import Callable

import hypothesis
import pytest
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.control.machine.test_rules import ControllerInTheWorld
from tests.kv.test_radix_machine import TreeAgainstDictionary
from tests.kv.tier_machine import TieredCacheInTheWorld

pytestmark = pytest.mark.soak

SHARE = 0.1
"""Of the whole duration, for each machine; the storm takes the rest."""
ORDINARY_S = 600.0
RULES = 1_000_000
HISTORIES = hypothesis.settings(max_examples=30, stateful_step_count=150, deadline=None, database=None)


@pytest.mark.parametrize("machine", [ControllerInTheWorld, TreeAgainstDictionary])
def test_long_histories_keep_every_invariant(
    machine: type[RuleBasedStateMachine], soak_seed: int, soak_duration_s: float
) -> None:
    end = time.monotonic() + SHARE * soak_duration_s
    run_while(lambda rounds: not rounds or time.monotonic() < end, machine, soak_seed)


def test_a_million_rules_lose_no_page_and_change_none(
    soak_seed: int, soak_duration_s: float, record_property: Callable[[str, object], None]
) -> None:
    start, before = time.monotonic(), TieredCacheInTheWorld.executions
    wanted = RULES * min(1.0, soak_duration_s / ORDINARY_S)

    def executed() -> int:
        return TieredCacheInTheWorld.executions - before

    run_while(lambda _: executed() < wanted, TieredCacheInTheWorld, soak_seed)
    record_property("rule executions", executed())
    record_property("seconds", round(time.monotonic() - start))


def run_while(go_on: Callable[[int], bool], machine: type[RuleBasedStateMachine], seed: int) -> None:
    """Histories with another seed in every round."""
    rounds = 0
    while go_on(rounds):
        seeded = hypothesis.seed(seed * 1_000_003 + rounds)(type(machine.__name__, (machine,), {}))
        run_state_machine_as_test(seeded, settings=HISTORIES)
        rounds += 1
