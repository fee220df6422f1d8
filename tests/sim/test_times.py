"""Virtual time against sums by hand: the truth here is arithmetic on the machine's rates, not the simulator."""

import pytest

from rollout.config import EngineConfig
from rollout.sim.simulation import Driver, Simulation, forced_group
from rollout.types import Keep, Then, Trajectory
from tests.sim.scene import collect_all, keeping, phases, rates

LATENCY, STEP = 0.0005, 0.021
PROMPT = list(range(1, 11))


def test_one_trajectory_takes_its_prefill_its_steps_and_two_calls() -> None:
    simulation = Simulation(rates(), check=True)
    found: list[Trajectory] = []
    outcome = simulation.run(collect_all(simulation, [forced_group("g", PROMPT, [5])], found))
    # The command, ten tokens of prompt with the first token out of them, four more steps, the report.
    assert outcome.seconds == pytest.approx(LATENCY + 10 * 0.001 + 4 * STEP + LATENCY)
    assert outcome.busy_s[0] == pytest.approx(10 * 0.001 + 4 * STEP)
    assert [worker.stats.busy_s for worker in simulation.workers.values()] == pytest.approx(outcome.busy_s)
    assert outcome.idle_share == pytest.approx(2 * LATENCY / outcome.seconds)


def test_a_batch_shares_the_fixed_part_and_who_finds_it_full_waits() -> None:
    simulation = Simulation(rates(), engine=EngineConfig(max_running=2), check=True)
    groups = [forced_group(name, [index] * 8, [3]) for index, name in enumerate("abc", 1)]
    outcome = simulation.run(collect_all(simulation, groups, []))
    # The first command wakes the worker, so that b's comes during the first step. The controller hears of a's end, and
    # has c started, during the step that ends b.
    prefill, alone, both = 8 * 0.001, STEP, 0.020 + 2 * 0.001
    steps = [prefill, prefill + alone, both, alone, prefill, alone, alone]
    assert outcome.seconds == pytest.approx(2 * LATENCY + sum(steps))


def test_long_contexts_are_slower_by_their_kv() -> None:
    simulation = Simulation(rates(kv_token_s=0.0001), check=True)
    outcome = simulation.run(collect_all(simulation, [forced_group("g", PROMPT, [4])], []))
    kv = 0.0001 * (10 + 11 + 12)
    assert outcome.seconds == pytest.approx(2 * LATENCY + 10 * 0.001 + 3 * STEP + kv)


def test_tokens_are_told_every_tenth_of_a_second_and_an_end_at_once() -> None:
    simulation = Simulation(rates(), check=True)
    seen: list[tuple[float, int]] = []

    def drive() -> Driver:
        simulation.submit([forced_group("g", PROMPT, [12])])
        while len(seen) < 4:
            known = simulation.controller.counters.tokens
            yield lambda: simulation.controller.counters.tokens > known  # noqa: B023
            seen.append((simulation.now, simulation.controller.counters.tokens))

    simulation.run(drive())
    begun = LATENCY + 0.010
    # The first token comes with the admission, at the end of the prefill; what is sampled after it waits.
    times = [time - LATENCY for time, _ in seen]
    assert times == pytest.approx([begun, begun + 0.1, begun + 0.2, begun + 11 * STEP])
    assert [tokens for _, tokens in seen] == [1, 5, 10, 12]  # of 0.1 s later, steps end at 21, 42, 63 and 84 ms


def suspend_and_resume(simulation: Simulation, keep: Keep, marks: list[float]) -> Driver:
    """One trajectory, stopped after its 4th token and resumed as soon as it is suspended."""
    simulation.submit([forced_group("g", PROMPT, [8])])
    yield LATENCY + 0.010 + 3 * STEP - LATENCY - 0.001  # the stop arrives a millisecond before the 4th token
    simulation.abort(keep=keep, then=Then.HOLD)
    yield phases(simulation, "suspended")
    marks.append(simulation.now)
    simulation.resume()
    yield lambda: simulation.controller.complete_groups == 1
    marks.append(simulation.now)


STOPPED = LATENCY + 0.010 + 3 * STEP
"""When the 4th token is there: 14 tokens, of which 13 have KV."""


def test_none_is_suspended_at_the_report_and_computes_again() -> None:
    simulation, marks = Simulation(rates(), abort=keeping("none"), check=True), list[float]()
    outcome = simulation.run(suspend_and_resume(simulation, Keep.NONE, marks))
    assert marks[0] == pytest.approx(STOPPED + LATENCY)
    # What was its own is gone; of the prompt the tree still may have two pages, which a release leaves.
    again = outcome.counters.recomputed_tokens
    assert again == 13 - outcome.counters.cached_tokens
    prefill = (14 - outcome.counters.cached_tokens) * 0.001
    assert marks[1] - marks[0] == pytest.approx(LATENCY + prefill + 3 * STEP + LATENCY)


def test_device_resumes_at_once() -> None:
    simulation, marks = Simulation(rates(), abort=keeping("device"), check=True), list[float]()
    outcome = simulation.run(suspend_and_resume(simulation, Keep.DEVICE, marks))
    # Parked, told, kept there by a command, told.
    assert marks[0] == pytest.approx(STOPPED + 3 * LATENCY)
    assert marks[1] - marks[0] == pytest.approx(LATENCY + 4 * STEP + LATENCY)
    assert outcome.counters.recomputed_tokens == 0


def test_pool_takes_an_export_and_a_restore() -> None:
    simulation, marks = Simulation(rates(), abort=keeping("pool"), check=True), list[float]()
    outcome = simulation.run(suspend_and_resume(simulation, Keep.POOL, marks))
    # Parked; the order to the pool; one call for prompt and rest, 13 tokens of 100 bytes; the answer.
    assert marks[0] == pytest.approx(STOPPED + LATENCY + LATENCY + 0.005 + 1300e-6 + LATENCY)
    assert outcome.sent_bytes == 1300
    restored = outcome.counters.restored_tokens
    assert (restored + outcome.counters.cached_tokens, outcome.counters.recomputed_tokens) == (13, 0)
    assert marks[1] - marks[0] == pytest.approx(LATENCY + 0.003 + restored * 100e-6 + 4 * STEP + LATENCY)


def test_host_takes_a_copy_each_way() -> None:
    simulation, marks = Simulation(rates(), abort=keeping("host"), check=True), list[float]()
    outcome = simulation.run(suspend_and_resume(simulation, Keep.HOST, marks))
    assert outcome.counters.recomputed_tokens == 0
    assert outcome.saved_bytes == 4 * 400  # 13 tokens are four pages of four
    # Three copies one after the other: the prompt's pages, the one behind them, and the tail.
    copies_s = 3 * 0.002 + 1600e-6
    assert marks[0] == pytest.approx(STOPPED + LATENCY + LATENCY + copies_s + LATENCY)
    assert outcome.loaded_bytes == 4 * 400
    assert marks[1] - marks[0] == pytest.approx(LATENCY + copies_s + 4 * STEP + LATENCY)


def test_an_export_slows_the_decoding_beside_it() -> None:
    def seconds(slowdown: float) -> float:
        simulation = Simulation(rates(slowdown=slowdown), abort=keeping("pool"), check=True)

        def drive() -> Driver:
            simulation.submit([forced_group("a", PROMPT, [40]), forced_group("b", list(range(50, 60)), [40])])
            yield 0.200
            simulation.abort(["a"], then=Then.HOLD)
            yield lambda: simulation.controller.complete_groups == 1

        return simulation.run(drive()).seconds

    # 0.2 s after the start b has 8 tokens … the export is 5 ms and 100 µs a token; at half speed half of that is lost.
    lost = seconds(0.5) - seconds(0.0)
    assert 0.5 * (0.005 + 15 * 100e-6) < lost < 0.5 * (0.005 + 25 * 100e-6)
