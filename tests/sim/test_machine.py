"""What things take, against sums by hand; slowed steps; the order of virtual time."""

import pytest

from rollout.cluster import controller, jobs
from rollout.sim import pool as sim_pool
from rollout.sim import simulation
from rollout.sim.clock import Clock, Lane, Process
from rollout.sim.load import Load
from rollout.sim.machine import rising_prefill
from tests.sim.scene import rates


def test_the_simulation_goes_by_the_constants_of_the_service() -> None:
    assert sim_pool.JOINED_BYTES == jobs.JOINED_BYTES
    assert simulation.TICK_S == controller.TICK_S


def test_prefill_is_summed_by_position() -> None:
    machine = rates(prefill_s=(1.0, 2.0, 3.0, 10.0))  # positions 0 and 1, 2 … 3, 4 … 7, 8 …
    assert machine.prefill_seconds(0, 2) == 2.0
    assert machine.prefill_seconds(0, 10) == 2 * 1.0 + 2 * 2.0 + 4 * 3.0 + 2 * 10.0
    assert machine.prefill_seconds(5, 6) == 3.0
    assert machine.prefill_seconds(100, 103) == 30.0
    assert machine.prefill_seconds(7, 7) == 0.0


def test_prefill_that_rises_with_position_is_the_same_in_sum() -> None:
    machine = rates(prefill_s=rising_prefill(2.0, 0.5, 64))
    assert machine.prefill_seconds(1, 64) == pytest.approx(sum(2.0 + 0.5 * position for position in range(1, 64)))


def test_a_decode_step_takes_its_fixed_part_its_sequences_and_their_kv() -> None:
    machine = rates(kv_token_s=0.0001)
    assert machine.decode_seconds(3, 100) == pytest.approx(0.020 + 3 * 0.001 + 0.01)
    assert machine.decode_seconds(0, 0) == 0.0


def test_a_step_beside_a_transfer_is_slower_by_the_share() -> None:
    load = Load(0.5)
    load.moves(0.0, 10.0)
    assert load.step(0.0, 1.0) == 2.0  # all of it beside the transfer
    assert load.step(8.0, 3.0) == 4.0  # two seconds at half speed, two at full
    assert load.step(12.0, 1.0) == 1.0


def test_two_transfers_at_a_time_slow_as_one_does() -> None:
    load = Load(0.5)
    load.moves(0.0, 4.0)
    load.moves(0.0, 4.0)
    assert load.step(0.0, 1.0) == 2.0


def test_what_begins_in_a_step_slows_the_next() -> None:
    load = Load(0.5)
    assert load.step(0.0, 2.0) == 2.0
    load.moves(1.0, 1.5)
    assert load.step(2.0, 2.0) == 2.25
    assert load.step(4.25, 2.0) == 2.0


def test_what_is_due_at_once_happens_in_order_of_scheduling() -> None:
    clock, seen = Clock(), list[str]()
    clock.at(1.0, lambda: seen.append("b"))
    clock.at(0.5, lambda: seen.append("a"))
    clock.at(1.0, lambda: seen.append("c"))
    while clock.advance():
        pass
    assert (seen, clock.now) == (["a", "b", "c"], 1.0)


def test_a_lane_is_first_come_first_served() -> None:
    clock, seen = Clock(), list[tuple[str, float]]()
    lane = Lane(clock, width=2)

    def stay(name: str, seconds: float) -> Process:
        yield lane
        yield seconds
        seen.append((name, clock.now))
        lane.leave()

    for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 1.0), ("d", 0.5)):
        clock.spawn(stay(name, seconds))
    while clock.advance():
        pass
    assert seen == [("b", 1.0), ("c", 2.0), ("d", 2.5), ("a", 3.0)]


def test_only_chores_left_is_being_stuck() -> None:
    clock = Clock()
    clock.after(1.0, lambda: None, chore=True)
    assert clock.stuck
    clock.after(0.5, lambda: None)
    assert not clock.stuck
    clock.advance()
    assert clock.stuck
