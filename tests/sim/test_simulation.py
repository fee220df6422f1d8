"""Whole workloads under the virtual clock: what is delivered, what is recomputed, and that two runs are equal."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from rollout.config import EngineConfig, HostConfig
from rollout.control.paces import Pace
from rollout.errors import StalledError
from rollout.sim.machine import MachineRates
from rollout.sim.outcome import Outcome
from rollout.sim.runner import forced_token
from rollout.sim.simulation import Driver, Simulation
from rollout.types import AbortReason, FinishReason, Keep, Then, Trajectory
from tests.sim.scene import collect_all, keeping, phases, rates, workload

KEEPS = ["pool", "device", "host", "none", "auto"]
ENGINE = EngineConfig(max_running=4)


def run(
    keep: str,
    *,
    machine: MachineRates | None = None,
    workers: int = 2,
    slice_tokens: int | None = 10,
    lengths: tuple[int, int] = (5, 40),
) -> tuple[Outcome, list[Trajectory]]:
    """16 trajectories in slices, audited at every step."""
    simulation = Simulation(
        machine or rates(), workers=workers, engine=ENGINE, abort=keeping(keep, slice_tokens=slice_tokens), check=True
    )
    found: list[Trajectory] = []
    outcome = simulation.run(collect_all(simulation, workload(4, 4, prompt=13, lengths=lengths), found))
    simulation.audit()
    return outcome, found


@pytest.mark.parametrize("keep", KEEPS)
def test_what_is_delivered_is_what_was_forced(keep: str) -> None:
    _, found = run(keep)
    wanted = {s.group_id: s for s in workload(4, 4, prompt=13, lengths=(5, 40))}
    assert len(found) == 16
    for each in found:
        submission = wanted[each.group_id]
        length = submission.sampling[each.sample_index].max_new_tokens
        assert (each.finish_reason, each.error) == (FinishReason.LENGTH, None)
        assert each.prompt_ids == submission.prompt_ids
        assert each.output_ids == tuple(forced_token(each.seed, 13 + i) for i in range(length))
        assert each.suspensions == (length - 1) // 10


@pytest.mark.parametrize("keep", KEEPS)
def test_two_runs_are_equal(keep: str) -> None:
    assert run(keep) == run(keep)


@pytest.mark.parametrize("keep", ["pool", "host"])
def test_kv_that_is_kept_is_never_computed_again(keep: str) -> None:
    """With one worker: with more, one that has no room may be left, and little KV is then computed elsewhere."""
    outcome, _ = run(keep, workers=1)
    assert outcome.counters.suspensions > 16
    assert outcome.counters.recomputed_tokens == 0


def test_with_none_all_that_is_not_cached_is_computed_again() -> None:
    outcome, found = run("none")
    had = sum(13 + stop - 1 for each in found for stop in range(10, len(each.output_ids), 10))
    counters = outcome.counters
    assert counters.recomputed_tokens + counters.cached_tokens == had
    assert counters.recomputed_tokens > 0
    assert (outcome.sent_bytes, counters.restored_tokens) == (0, 0)


def test_with_the_pool_all_that_is_not_cached_is_read() -> None:
    outcome, found = run("pool")
    had = sum(13 + stop - 1 for each in found for stop in range(10, len(each.output_ids), 10))
    assert outcome.counters.restored_tokens + outcome.counters.cached_tokens == had
    assert outcome.restored_bytes == outcome.counters.restored_tokens * 100
    assert outcome.sent_bytes == outcome.counters.exported_bytes


def test_a_group_sends_its_prompt_once() -> None:
    simulation = Simulation(rates(), workers=1, engine=ENGINE, abort=keeping("pool"), check=True)

    def drive() -> Driver:
        simulation.submit(workload(1, 4, prompt=16, lengths=(30, 30)))
        yield 0.3
        simulation.abort(then=Then.HOLD)
        yield phases(simulation, "suspended")

    outcome = simulation.run(drive())
    assert outcome.shared_bytes == 3 * 4 * 400  # of four siblings three find the prompt's four pages
    kept = sum(record.kv_tokens for record in simulation.controller.resolve(None)[0])
    assert outcome.sent_bytes == kept * 100 - outcome.shared_bytes


def test_a_full_pool_gives_up_images_and_everything_still_ends() -> None:
    outcome, found = run("pool", machine=rates(pool_bytes=6000))
    assert len(found) == 16
    assert outcome.counters.displaced_images + outcome.counters.export_failures > 0
    assert outcome.counters.recomputed_tokens > 0


@pytest.mark.parametrize("keep", ["pool", "device", "host", "none"])
def test_short_memory_preempts_and_everything_still_ends(keep: str) -> None:
    _, found = run(keep, machine=rates(device_pages=24, host_pages=16, max_context=90), lengths=(20, 60))
    assert sorted(len(each.output_ids) for each in found) == sorted(
        sampling.max_new_tokens for each in workload(4, 4, prompt=13, lengths=(20, 60)) for sampling in each.sampling
    )


@pytest.mark.parametrize("keep", ["pool", "none"])
@pytest.mark.parametrize(
    "faster",
    [
        lambda r: replace(r, prefill_s=(0.0005,)),
        lambda r: replace(r, step=Pace(fixed_s=0.010, unit_s=0.001)),
        lambda r: replace(r, latency_s=0.0001),
        lambda r: replace(r, restore=Pace(fixed_s=0.001, unit_s=1e-7), export=Pace(fixed_s=0.001, unit_s=1e-7)),
        lambda r: replace(r, slowdown=0.1),
    ],
    ids=["prefill", "decode", "latency", "transfers", "slowdown"],
)
def test_a_faster_machine_is_never_slower(keep: str, faster: Callable[[MachineRates], MachineRates]) -> None:
    machine = rates(slowdown=0.5)
    assert run(keep, machine=faster(machine))[0].seconds <= run(keep, machine=machine)[0].seconds


def test_without_stops_nothing_is_moved() -> None:
    outcome, _ = run("pool", slice_tokens=None)
    assert (outcome.counters.suspensions, outcome.sent_bytes, outcome.read_bytes) == (0, 0, 0)


def test_a_trajectory_moves_between_all_places() -> None:
    """Suspended ones are sent elsewhere by other aborts: recalled, exported, brought to a worker for their KV."""
    simulation = Simulation(rates(), workers=2, engine=ENGINE, host=HostConfig(load_back_tokens=0), check=True)
    places = [Keep.DEVICE, Keep.HOST, Keep.POOL, Keep.DEVICE, Keep.HOST]
    found: list[Trajectory] = []

    def drive() -> Driver:
        simulation.submit(workload(2, 2, prompt=13, lengths=(40, 40)))
        yield 0.4
        for keep in places:
            simulation.abort(keep=keep, then=Then.HOLD)
            yield phases(simulation, "suspended")
            yield 0.1
            simulation.audit()
        simulation.resume()
        yield lambda: simulation.controller.complete_groups == 2
        found.extend(each for delivery in simulation.take(2) for each in delivery.trajectories)

    outcome = simulation.run(drive())
    assert [len(each.output_ids) for each in found] == [40] * 4
    assert outcome.counters.recomputed_tokens == 0
    assert outcome.sent_bytes > 0


@pytest.mark.parametrize("keep", KEEPS)
def test_collecting_holds_what_is_left_for_the_next_time(keep: str) -> None:
    simulation = Simulation(rates(), workers=2, engine=ENGINE, abort=keeping(keep), check=True)
    submissions = workload(6, 4, prompt=13, lengths=(5, 60))
    rounds: list[list[str]] = []

    def drive() -> Driver:
        simulation.submit(submissions)
        while sum(map(len, rounds)) < len(submissions):
            deliveries = yield from simulation.collect(2, over_sample=0.5)
            rounds.append([delivery.group_id for delivery in deliveries])

    outcome = simulation.run(drive())
    assert [len(each) for each in rounds] == [2, 2, 2]
    assert sorted(name for each in rounds for name in each) == [each.group_id for each in submissions]
    assert outcome.counters.suspensions > 0
    assert outcome.tokens == sum(each.max_new_tokens for group in submissions for each in group.sampling)
    assert set(outcome.decisions) == {AbortReason.QUOTA}
    assert sum(outcome.decisions[AbortReason.QUOTA].values()) == outcome.counters.suspensions
    if keep != "auto":
        assert set(outcome.decisions[AbortReason.QUOTA]) == {Keep(keep)}


def test_a_pause_stops_the_steps_and_nothing_is_lost() -> None:
    def seconds(pause_s: float) -> float:
        simulation = Simulation(rates(), workers=2, engine=ENGINE, abort=keeping("pool"), check=True)
        submissions = workload(2, 4, prompt=13, lengths=(30, 30))

        def drive() -> Driver:
            simulation.submit(submissions)
            yield 0.2
            if pause_s:
                simulation.carry_out(simulation.controller.pause(simulation.now))
                yield pause_s
                simulation.carry_out(simulation.controller.unpause(simulation.now))
            yield lambda: simulation.controller.complete_groups == 2

        outcome = simulation.run(drive())
        assert (outcome.tokens, outcome.counters.suspensions) == (240, 0)
        return outcome.seconds

    # The step that is under way when the pause comes is finished in it.
    assert 3.0 - 0.05 < seconds(3.0) - seconds(0.0) <= 3.0


def test_what_came_since_a_moment_is_the_rest() -> None:
    simulation = Simulation(rates(), workers=2, engine=ENGINE, abort=keeping("pool", slice_tokens=10))
    first, second = workload(2, 4, prompt=13, lengths=(5, 40)), workload(4, 4, prompt=13, lengths=(5, 40))[2:]
    marks: list[Outcome] = []

    def drive() -> Driver:
        yield from collect_all(simulation, first, [])
        marks.append(simulation.outcome())
        yield from collect_all(simulation, second, [])

    whole = simulation.run(drive())
    rest = whole.since(marks[0])
    assert rest.seconds == whole.seconds - marks[0].seconds > 0.0
    assert rest.tokens == sum(sampling.max_new_tokens for each in second for sampling in each.sampling)
    assert rest.counters.trajectories == 8
    assert whole.since(whole).decisions == {}


def test_a_driver_that_waits_for_nothing_is_told_so() -> None:
    simulation = Simulation(rates())

    def drive() -> Driver:
        yield lambda: simulation.controller.complete_groups == 1

    with pytest.raises(StalledError, match="nothing happens any more"):
        simulation.run(drive())
