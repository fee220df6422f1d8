"""Groups as a driver takes them: so many of more, one by one, in parts, accepted or not; nothing is thrown away."""

import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from rollout.client import Rollout
from rollout.errors import DeadlineError, InvalidArgumentError
from rollout.reports import Collected
from rollout.types import AbortReason, Delivery, FinishReason, Phase, Trajectory, TrajectoryId
from tests.cluster.scene import (
    IDS,
    MIDDLE,
    PROMPTS,
    SAMPLES,
    SAMPLING,
    Outputs,
    collect,
    controller,
    eventually,
    inside,
    is_prefix,
    limited,
    outputs,
    reached,
    submit,
)

SHORT = replace(SAMPLING, max_new_tokens=41)
KEYS = tuple("012345")
"""Groups that end; they have the two prompts by turns."""


def submit_short(service: Rollout, keys: Iterable[str] = KEYS) -> None:
    service.submit([PROMPTS[int(key) % 2] for key in keys], n=SAMPLES, sampling=SHORT, key=list(keys))


def as_truth(truth: Outputs, trajectories: Iterable[Trajectory]) -> bool:
    """Whether each is what nobody disturbed, as far as its budget goes."""
    for each in trajectories:
        source = ("ann", "bob")[int(each.group_id) % 2] if each.group_id in KEYS else each.group_id
        ids, logprobs = truth[TrajectoryId(f"{source}/{each.sample_index}")]
        count = len(each.output_ids)
        if (each.output_ids, each.logprobs) != (ids[:count], logprobs[:count]):
            return False
    return True


def members(deliveries: Iterable[Delivery]) -> list[Trajectory]:
    return [trajectory for delivery in deliveries for trajectory in delivery.trajectories]


@contextlib.contextmanager
def collecting(service: Rollout, groups: int, **how: Any) -> Iterator[list[Collected]]:
    """A collection that begins before anything runs; yields a list with what it came to, afterwards."""
    found: list[Collected] = []
    with ThreadPoolExecutor(1) as thread:
        service.pause()
        submit_short(service)
        call = thread.submit(service.collect, groups, **how)
        try:
            eventually(lambda: inside(controller(service), lambda self: self._core._roster.collection is not None))
            yield found
        finally:
            service.unpause()  # or the call would wait for ever
        found.append(call.result(timeout=180.0))


def test_a_collection_holds_what_it_does_not_need_and_the_next_begins_with_it(service: Rollout, truth: Outputs) -> None:
    before = service.stats().counters
    with limited(service, MIDDLE):
        submit(service)  # none of these ends
        submit_short(service, "0")
        first = service.collect(1)
    assert [delivery.group_id for delivery in first.groups] == ["0"]
    assert (first.held, first.rejected, first.timed_out) == (2, (), False)
    assert as_truth(truth, members(first.groups))
    eventually(lambda: service.stats().phases == {Phase.SUSPENDED: len(IDS)})
    assert service.next_groups(1) == []  # nothing goes on by itself
    second = service.collect(2)
    assert (second.held, second.timed_out) == (0, False)
    assert outputs({each.trajectory_id: each for each in members(second.groups)}) == truth
    assert service.stats().counters.recomputed_tokens == before.recomputed_tokens


def test_no_more_groups_are_begun_than_wanted_and_the_share_above(service: Rollout, truth: Outputs) -> None:
    with collecting(service, 2, over_sample=0.5) as found:
        pass
    (collected,) = found
    assert len(collected.groups) == 2
    assert collected.held in (3, 4)  # the third may have ended in the same moment
    partials = service.abort().partials
    begun = {partial.group_id for partial in partials if partial.workers}
    assert len(begun) == 1  # 3 of 6, of which 2 are finished
    assert begun < {"0", "1", "2"}  # oldest first
    service.resume()
    rest = members(service.next_groups(4))
    assert {each.group_id for each in [*rest, *members(collected.groups)]} == set(KEYS)
    assert as_truth(truth, [*rest, *members(collected.groups)])


def test_groups_that_are_not_accepted_are_made_up_for(service: Rollout, truth: Outputs) -> None:
    with collecting(service, 3, accept=lambda delivery: delivery.group_id in "024") as found:
        pass
    (collected,) = found
    assert {delivery.group_id for delivery in collected.groups} == {"0", "2", "4"}
    rejected = {delivery.group_id for delivery in collected.rejected}
    assert {"1"} <= rejected <= {"1", "3", "5"}
    assert collected.held == 6 - 3 - len(rejected)
    assert as_truth(truth, members([*collected.groups, *collected.rejected]))
    service.resume()
    assert {delivery.group_id for delivery in service.next_groups(3)} == set(KEYS) - rejected - {"0", "2", "4"}


def test_an_accept_that_fails_costs_nothing(service: Rollout, truth: Outputs) -> None:
    submit_short(service)
    seen: list[str] = []

    def accept(delivery: Delivery) -> bool:
        seen.append(delivery.group_id)
        return len(seen) < 3 or 1 // 0 > 0

    with pytest.raises(ZeroDivisionError):
        service.collect(6, accept=accept)
    service.resume()
    deliveries = []
    while len(deliveries) < 6:
        deliveries += service.next_groups(6 - len(deliveries))
    assert sorted(delivery.group_id for delivery in deliveries) == list(KEYS)
    assert as_truth(truth, members(deliveries))
    assert service.next_groups(1) == []


def test_an_accept_that_calls_its_own_client_is_told_so(service: Rollout) -> None:
    submit_short(service, "0")
    with pytest.raises(InvalidArgumentError, match="accept: it calls this client"):
        service.collect(1, accept=lambda delivery: bool(service.stats()))


def test_a_collection_whose_time_is_up_says_so_and_holds_the_rest(service: Rollout, truth: Outputs) -> None:
    with limited(service):
        submit(service)
        submit_short(service, "0")
        for collected in (
            service.collect(3, timeout_s=2.0),
            service.collect(2, timeout_s=1.0, accept=lambda _: True),
        ):
            assert collected.timed_out
            assert collected.held == 2
    service.resume()
    trajectories = collect(service, 2)
    trajectories.pop(TrajectoryId("0/0"), None)  # on a busy machine it took longer
    trajectories.pop(TrajectoryId("0/1"), None)
    assert as_truth(truth, trajectories.values())


def test_what_is_withheld_runs_on_and_is_the_next_collections(service: Rollout, truth: Outputs) -> None:
    def rest(self: Any, rest: str) -> None:
        self._core._roster.rules = self._core._roster.rules.model_copy(update={"rest": rest})

    inside(controller(service), rest, "withhold")
    try:
        submit(service)
        submit_short(service, "0")
        first = service.collect(1)
        assert [delivery.group_id for delivery in first.groups] == ["0"]
        eventually(lambda: service.stats().phases == {Phase.FINISHED: len(IDS)})
        second = service.collect(2)
    finally:
        inside(controller(service), rest, "abort")
    trajectories = {each.trajectory_id: each for each in members(second.groups)}
    assert outputs(trajectories) == truth
    assert {each.suspensions for each in trajectories.values()} == {0}


def test_finished_groups_come_one_by_one_until_there_are_no_more(service: Rollout, truth: Outputs) -> None:
    submit_short(service)
    deliveries = list(service.as_completed())
    assert sorted(delivery.group_id for delivery in deliveries) == list(KEYS)
    assert as_truth(truth, members(deliveries))
    with limited(service):
        submit(service)
        with pytest.raises(DeadlineError, match=r"no group finished within 0\.1 s"):
            list(service.as_completed(timeout_s=0.1))
    assert outputs(collect(service)) == truth


def test_members_are_handed_out_as_they_end_when_asked(service: Rollout, truth: Outputs) -> None:
    with limited(service):
        service.submit([PROMPTS[0]], n=SAMPLES, sampling=[SHORT, SAMPLING], key="ann", partial=True)
        (early,) = service.next_groups()
        assert [each.trajectory_id for each in early.trajectories] == ["ann/0"]
        assert not early.complete
    (late,) = service.next_groups()
    assert [each.trajectory_id for each in late.trajectories] == ["ann/1"]
    assert late.complete
    assert [len(each.output_ids) for each in members([early, late])] == [41, 160]
    assert as_truth(truth, members([early, late]))
    assert service.next_groups() == []


def test_what_leaves_its_group_is_beside_it_or_gone(service: Rollout, truth: Outputs) -> None:
    dropped = service.stats().accounts.dropped
    with limited(service, MIDDLE):
        submit(service)
        reached(service, 20)
        assert service.abort(["ann/0"], then="drop").found == ("ann/0",)
        report = service.discard(["bob/1", "nobody"])
        assert (report.discarded, report.unknown) == (("bob/1",), ("nobody",))
    deliveries = {delivery.group_id: delivery for delivery in service.next_groups(2)}
    ann, bob = deliveries["ann"], deliveries["bob"]  # type: ignore[index]
    assert [each.trajectory_id for each in ann.trajectories] == ["ann/1"]
    (beside,) = ann.dropped
    assert is_prefix(beside, truth)
    assert (beside.finish_reason, len(beside.output_ids) >= 20) == (FinishReason.ABORT, True)
    assert [each.trajectory_id for each in bob.trajectories] == ["bob/0"]
    assert bob.dropped == ()
    assert as_truth(truth, members([ann, bob]))
    now = service.stats().accounts.dropped
    for reason in (AbortReason.DRIVER, AbortReason.DISCARD):
        assert now[reason] - dropped.get(reason, 0) == 1
    submit(service)
    assert set(service.discard(["ann", "bob"]).discarded) == set(IDS)
    assert service.next_groups() == []  # nothing of them is left


def test_one_that_is_tried_again_keeps_what_it_had_as_an_attempt(service: Rollout, truth: Outputs) -> None:
    with limited(service, MIDDLE):
        submit(service)
        reached(service, 20)
        (partial,) = service.abort(["ann/0"], then="retry").partials
    trajectories = collect(service)
    again = trajectories.pop(TrajectoryId("ann/0"))
    (attempt,) = again.attempts
    ids, logprobs = truth[TrajectoryId("ann/0")]
    count = len(attempt.output_ids)
    assert (attempt.output_ids, attempt.logprobs) == (ids[:count], logprobs[:count])
    assert count >= 20
    assert attempt.reason is AbortReason.DRIVER
    assert attempt.seed == partial.seed != again.seed or partial.output_ids == ()
    assert len(again.output_ids) == 160
    assert again.output_ids[:20] != ids[:20]
    assert as_truth(truth, trajectories.values())


def test_a_groups_budget_is_shared_and_spent(service: Rollout, truth: Outputs) -> None:
    service.submit([PROMPTS[0]], n=SAMPLES, sampling=SAMPLING, key="ann", max_group_tokens=100)
    trajectories = collect(service, 1)
    assert sum(each.sampled_tokens for each in trajectories.values()) == 100
    assert {each.finish_reason for each in trajectories.values()} == {FinishReason.LENGTH}
    assert as_truth(truth, trajectories.values())
