"""What a driver is told when there is too much, or nothing goes on; who goes first; what a pause and a deadline do."""

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from rollout.client import Rollout
from rollout.errors import ServiceBusyError, StalledError
from rollout.metrics import ServiceStats
from rollout.types import AbortReason, FinishReason, Keep, Phase, Priority, Trajectory, TrajectoryId
from tests.cluster.scene import (
    IDS,
    MIDDLE,
    PROMPTS,
    SAMPLES,
    SAMPLING,
    Outputs,
    collect,
    controller,
    engines,
    eventually,
    inside,
    is_prefix,
    limited,
    outputs,
    reached,
    submit,
    workers,
)


@contextlib.contextmanager
def driver(service: Rollout, **fields: Any) -> Iterator[None]:
    """The service with other limits in its section `driver`."""

    def change(self: Any, fields: dict[str, Any]) -> dict[str, Any]:
        section = self._config.driver
        self._config = self._config.model_copy(update={"driver": section.model_copy(update=fields)})
        return {name: getattr(section, name) for name in fields}

    before = inside(controller(service), change, fields)
    try:
        yield
    finally:
        inside(controller(service), change, before)


@contextlib.contextmanager
def policies(service: Rollout, *policies: dict[str, Any]) -> Iterator[None]:
    """The service with other policies, but for what its workers look at on their own account."""

    def change(self: Any, policies: list[dict[str, Any]]) -> None:
        from rollout.config import AbortConfig
        from rollout.control.policies import Policies

        config = AbortConfig.model_validate({"keep": "pool", "policies": policies})
        self._core._roster.policies = Policies(config, self._core._roster.versions, max_resumes=64)

    inside(controller(service), change, list(policies))
    try:
        yield
    finally:
        inside(controller(service), change, [])


@contextlib.contextmanager
def paused(service: Rollout) -> Iterator[None]:
    service.pause()
    try:
        yield
    finally:
        service.unpause()


def waiting(service: Rollout, calls: int) -> None:
    """Until so many calls wait in the controller."""
    eventually(lambda: inside(controller(service), lambda self: len(self._changed._waiters)) >= calls)


# Too much, and nothing ------------------------------------------------------------------------------------


def test_more_than_may_be_outstanding_waits_for_room_or_is_refused(service: Rollout, truth: Outputs) -> None:
    with driver(service, max_outstanding=5), limited(service, MIDDLE) as limit, ThreadPoolExecutor(1) as thread:
        submit(service)
        submit(service)  # told twice: nothing new
        with pytest.raises(ServiceBusyError) as refused:
            service.submit(PROMPTS[:1], n=2, sampling=SAMPLING, key="more")
        assert "4 trajectories are outstanding, 2 more were submitted; allowed: 5" in str(refused.value)
        assert "driver.max_outstanding" in str(refused.value)
        service.submit(PROMPTS[:1], sampling=SAMPLING, key="one")
        later = thread.submit(service.submit, PROMPTS[:1], n=2, sampling=SAMPLING, key="more", timeout_s=180.0)
        waiting(service, 1)
        limit(1000)
        first = collect(service, 3)
        assert later.result(timeout=180.0) == ["more"]
    more = collect(service, 1)
    assert {name: value for name, value in outputs(first).items() if name in truth} == truth
    assert outputs(more) == {TrajectoryId(f"more/{index}"): truth[IDS[index]] for index in range(SAMPLES)}


def test_when_nothing_goes_on_every_waiting_call_says_what_everything_was_doing(
    service: Rollout, truth: Outputs
) -> None:
    with limited(service, MIDDLE):
        submit(service)
        reached(service, MIDDLE)
        with driver(service, stall_timeout_s=1.0):
            for call in (service.next_groups, service.next_turns, service.collect):
                with pytest.raises(StalledError, match=r"nothing went on for 1 s \(driver\.stall_timeout_s\)") as told:
                    call(1)
                state = json.loads(told.value.state)
                assert state["phases"] in ({"decoding": 4}, {"suspending": 4}, {"suspended": 4})
                if call != service.collect:
                    assert state["phases"] == {"decoding": 4}
                    assert state["stalled_s"] >= 1.0
                    running = {name for worker in state["workers"].values() for name in worker["running"]}
                    assert running == set(IDS)
                    assert str(told.value).endswith(told.value.state)
        service.resume()
    assert outputs(collect(service)) == truth


def test_what_waits_for_its_driver_or_a_pause_is_not_a_stall(service: Rollout, truth: Outputs) -> None:
    with driver(service, stall_timeout_s=0.5), limited(service, MIDDLE):
        submit(service)
        with paused(service):
            assert service.next_groups(1, timeout_s=1.5) == []
        service.abort()
        assert service.next_turns(1) == []
        assert service.next_groups(1) == []
    service.resume()
    assert outputs(collect(service)) == truth


# Who goes first -------------------------------------------------------------------------------------------


def test_evaluation_takes_the_place_of_the_youngest_which_go_on_afterwards(service: Rollout, truth: Outputs) -> None:
    names = ["ann", "bob", "cid", "dee"]  # as many trajectories as run at once
    with limited(service, MIDDLE):
        service.submit(PROMPTS * 2, n=SAMPLES, sampling=SAMPLING, key=names)
        reached(service, 20)
        service.submit([PROMPTS[0]], sampling=replace(SAMPLING, max_new_tokens=60), key="eval", priority=Priority.EVAL)
        (delivery,) = service.next_groups(1)
        assert delivery.group_id == "eval"
    (first,) = delivery.trajectories
    assert (first.output_ids, first.logprobs) == tuple(column[:60] for column in truth[IDS[0]])
    trajectories = collect(service, 4)
    assert {name for name, each in trajectories.items() if each.suspensions} == {"dee/1"}
    sources = dict(zip(names, ("ann", "bob", "ann", "bob"), strict=True))
    for each in trajectories.values():
        assert (each.output_ids, each.logprobs) == truth[TrajectoryId(f"{sources[each.group_id]}/{each.sample_index}")]


# Pausing --------------------------------------------------------------------------------------------------


def test_an_abort_while_paused_returns_the_tokens_so_far(service: Rollout, truth: Outputs) -> None:
    before = service.stats().counters
    with limited(service, MIDDLE):
        submit(service)
        reached(service, 20)
        with paused(service):
            eventually(lambda: service.stats().phases == {Phase.PAUSED: len(IDS)})
            service.submit(PROMPTS[:1], sampling=SAMPLING, key="later")
            report = service.abort(["ann", "bob"])
            assert set(report.found) == set(IDS)
            assert all(len(partial.output_ids) >= 20 and is_prefix(partial, truth) for partial in report.partials)
            assert service.stats().phases == {Phase.SUSPENDED: len(IDS), Phase.QUEUED: 1}
            service.resume()
            assert service.stats().phases == {Phase.QUEUED: len(IDS) + 1}
    trajectories = collect(service, 3)
    later = trajectories.pop(TrajectoryId("later/0"))
    assert outputs(trajectories) == truth
    assert (later.output_ids, later.logprobs) == truth[IDS[0]]
    assert service.stats().counters.recomputed_tokens == before.recomputed_tokens


def test_paused_and_let_go_on_nothing_is_computed_twice(service: Rollout, truth: Outputs) -> None:
    before = sum(engine.prefilled_tokens for engine in engines(service))
    with limited(service, MIDDLE):
        submit(service)
        reached(service, 20)
        prefilled = sum(engine.prefilled_tokens for engine in engines(service)) - before
        with paused(service):
            service.pause()  # twice is once
            tokens = service.stats().counters.tokens
    trajectories = collect(service)
    assert outputs(trajectories) == truth
    assert {each.suspensions for each in trajectories.values()} == {0}
    assert sum(engine.prefilled_tokens for engine in engines(service)) - before == prefilled
    assert tokens >= 20 * len(IDS)


# Policies -------------------------------------------------------------------------------------------------


def ended(service: Rollout, reason: AbortReason, groups: int = 1) -> dict[TrajectoryId, Trajectory]:
    """Groups that were ended for a reason, with what they had."""
    found = collect(service, groups)
    assert {(each.finish_reason, each.abort_reason) for each in found.values()} == {(FinishReason.ABORT, reason)}
    return found


def test_a_deadline_ends_what_runs_with_its_tokens(service: Rollout, truth: Outputs) -> None:
    with limited(service, MIDDLE):
        service.submit([PROMPTS[0]], n=SAMPLES, sampling=SAMPLING, key="ann", deadline_s=1.0)
        service.submit([PROMPTS[1]], n=SAMPLES, sampling=SAMPLING, key="bob")
        found = ended(service, AbortReason.DEADLINE)
        assert all(is_prefix(each, truth) for each in found.values())
    assert outputs(collect(service, 1)) == {name: truth[name] for name in IDS[2:]}


def test_the_over_long_wait_for_their_driver_once(service: Rollout, truth: Outputs) -> None:
    with policies(service, {"kind": "over_long", "tokens": 50}):
        submit(service)
        eventually(lambda: service.stats().phases == {Phase.SUSPENDED: len(IDS)})
        assert service.next_groups(1) == []
        report = service.abort()
        assert {len(partial.output_ids) for partial in report.partials} == {50}
        assert service.stats().suspended == {str(Keep.POOL): len(IDS)}
        service.resume()
        trajectories = collect(service)
    assert outputs(trajectories) == truth
    assert {each.suspensions for each in trajectories.values()} == {1}


def test_the_longest_of_a_group_wait_when_the_others_are_far_shorter(service: Rollout, truth: Outputs) -> None:
    short = replace(SAMPLING, max_new_tokens=20)
    with policies(service, {"kind": "over_long", "factor": 1.5, "min_finished": 3, "then": "finish"}):
        service.submit([PROMPTS[0]], n=4, sampling=[SAMPLING, short, short, short], key="ann")
        trajectories = collect(service, 1)
    long = trajectories[TrajectoryId("ann/0")]
    assert (long.finish_reason, long.abort_reason) == (FinishReason.ABORT, AbortReason.OVER_LONG)
    assert 30 < len(long.output_ids) < 160
    assert is_prefix(long, truth)


def test_the_tail_of_a_batch_is_held_once_the_rest_is_done(service: Rollout, truth: Outputs) -> None:
    short = replace(SAMPLING, max_new_tokens=20)
    with policies(service, {"kind": "tail", "share": 0.25}), limited(service, MIDDLE):
        service.submit(PROMPTS, n=SAMPLES, sampling=[SAMPLING, short], key=["ann", "bob"])
        assert service.abort(["nobody"]).unknown == ("nobody",)
        service.abort(["bob/0"], then="finish")
        (bob,) = service.next_groups(2)  # all there is to come
        assert bob.group_id == "bob"
        assert service.stats().suspended == {str(Keep.POOL): 1}
    service.resume()
    assert collect(service, 1)[IDS[0]].output_ids == truth[IDS[0]][0]


def test_a_loop_is_ended(service: Rollout) -> None:
    others = tuple(token for token in range(320) if token != 7)  # none of which may stop it so early
    sampling = replace(SAMPLING, stop_token_ids=others, min_new_tokens=150)
    with policies(service, {"kind": "repetition", "ngram": 8, "times": 3, "min_tokens": 32}):
        service.submit([PROMPTS[0]], sampling=sampling, key="loop")
        (loop,) = ended(service, AbortReason.REPETITION).values()
    assert loop.output_ids == (7,) * 32


def test_short_of_memory_a_worker_suspends_its_youngest(service: Rollout, truth: Outputs) -> None:
    def spare(self: Any, pages: int) -> None:
        import dataclasses

        scheduler = self._host._engine._scheduler
        scheduler._limits = dataclasses.replace(scheduler._limits, spare_pages=pages)
        self._host._wake()

    def memory(stats: ServiceStats) -> int:
        return sum(stats.decisions.get(AbortReason.MEMORY, {}).values())

    before = service.stats()
    with limited(service, MIDDLE):
        submit(service)
        reached(service, 40)
        for worker in workers(service).values():
            inside(worker, spare, engines(service)[0].device.total)
        try:
            eventually(lambda: memory(service.stats()) - memory(before) == 2)  # one of two on each worker
        finally:
            for worker in workers(service).values():
                inside(worker, spare, 0)
    trajectories = collect(service)
    assert outputs(trajectories) == truth
    assert {name for name, each in trajectories.items() if each.suspensions} == set(IDS[2:])
    after = service.stats().counters
    assert after.suspensions - before.counters.suspensions == 2
    assert after.recomputed_tokens == before.counters.recomputed_tokens
    assert after.preemptions == before.counters.preemptions
