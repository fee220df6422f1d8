"""The machine of `tier_machine`, with the same histories in every run: case C11, and its counters at the end."""

import hypothesis
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.kv.tier_machine import TieredCacheInTheWorld

RULES = 20_000
HISTORIES = settings(max_examples=60, stateful_step_count=100, deadline=None, database=None)


def test_pages_are_conserved_and_hold_what_they_should_over_20_000_rule_executions() -> None:
    start, rounds = TieredCacheInTheWorld.executions, 0
    while TieredCacheInTheWorld.executions - start < RULES:
        machine = type("TieredCacheInTheWorld", (TieredCacheInTheWorld,), {})
        run_state_machine_as_test(hypothesis.seed(rounds)(machine), settings=HISTORIES)
        rounds += 1
