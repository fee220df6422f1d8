"""A service that suspends by itself, from its start to the death of its last worker. The tests go in this order."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollout
from rollout.client import Rollout
from rollout.types import FinishReason, TrajectoryId
from tests.cluster.scene import (
    PROMPT_TOKENS,
    PROMPTS,
    SAMPLES,
    SAMPLING,
    Outputs,
    at_rest,
    audit,
    busy,
    collect,
    engines,
    eventually,
    inside,
    is_prefix,
    outputs,
    pids,
    pool,
    pools,
    sampled,
    settings,
    submit,
)

SLICE = 24
SUSPENSIONS = 159 // SLICE
GROUPS = {"ann": "ann", "bob": "bob", "cid": "ann", "dee": "bob"}
"""Four groups; whose outputs theirs are equal to, since seeds do not depend on keys."""


@pytest.fixture(scope="module")
def sliced(ray_cluster: None, kv_model: Path) -> Iterator[Rollout]:
    config = settings(
        kv_model, "sliced", cluster={"max_restarts": 1, "unresponsive_s": 6}, abort={"slice_tokens": SLICE}
    )
    with rollout.start(config) as service:
        yield service


@pytest.fixture
def expected(truth: Outputs) -> Outputs:
    return {
        TrajectoryId(f"{key}/{sample}"): truth[TrajectoryId(f"{source}/{sample}")]
        for key, source in GROUPS.items()
        for sample in range(SAMPLES)
    }


def submit_all(service: Rollout) -> None:
    service.submit(PROMPTS * 2, n=SAMPLES, sampling=SAMPLING, key=list(GROUPS))


def test_sliced_trajectories_compute_nothing_twice_and_leave_nothing(sliced: Rollout, expected: Outputs) -> None:
    submit_all(sliced)
    trajectories = collect(sliced, len(GROUPS))
    assert outputs(trajectories) == expected
    eventually(lambda: at_rest(sliced))
    audit(sliced)
    stats = sliced.stats()
    counters = stats.counters
    found = [worker.engine for worker in stats.workers]
    assert {t.suspensions for t in trajectories.values()} == {SUSPENSIONS}
    assert counters.suspensions == counters.resumes == counters.releases == SUSPENSIONS * len(expected)
    assert 0 < counters.resumed_elsewhere <= counters.resumes
    assert (counters.recomputed_tokens, counters.export_failures, counters.restore_failures) == (0, 0, 0)
    assert (counters.preemptions, counters.workers_lost, counters.restarts) == (0, 0, 0)
    cached_at_first = sum(engine.cached_tokens for engine in found) - counters.cached_tokens
    assert sum(engine.prefilled_tokens for engine in found) == PROMPT_TOKENS * len(expected) - cached_at_first
    known = [PROMPT_TOKENS + SLICE * number - 1 for number in range(1, SUSPENSIONS + 1)]
    assert counters.restored_tokens + counters.cached_tokens == sum(known) * len(expected)
    assert counters.restored_tokens > 0
    assert counters.exclusive_pages == counters.freed_pages > 0
    assert sum(engine.decoded_tokens for engine in found) == 159 * len(expected)
    assert counters.exported_bytes == pool(sliced).sent


def test_an_abort_that_queues_again_ends_although_slices_go_on_ending(sliced: Rollout, expected: Outputs) -> None:
    submit_all(sliced)
    for _ in range(4):
        sampled(sliced, 60)
        start = time.monotonic()
        report = sliced.abort(keep="pool", then="requeue", timeout_s=30.0)
        assert report.unreached == ()
        assert time.monotonic() - start < 10.0
        assert all(is_prefix(partial, expected) for partial in report.partials)
    assert outputs(collect(sliced, len(GROUPS))) == expected


def test_what_does_not_fit_the_budget_is_computed_again_and_the_budget_holds(
    sliced: Rollout, expected: Outputs
) -> None:
    eventually(lambda: at_rest(sliced))
    before = sliced.stats().counters
    budget = 1 << 20
    (actor,) = pools(sliced)

    def limit(self: Any, budget: int) -> int:
        before, self._ledger.budget = self._ledger.budget, budget
        return int(before)

    allowed = inside(actor, limit, budget)
    submit_all(sliced)
    taken: dict[TrajectoryId, Any] = {}
    while len(taken) < len(expected):
        taken |= {t.trajectory_id: t for group in sliced.next_groups(4, timeout_s=0.05) for t in group.trajectories}
        now = pool(sliced)
        assert now.stored + now.reserved + now.still_read <= now.budget == budget
    after = sliced.stats().counters
    assert outputs(taken) == expected
    assert pool(sliced).refused > 0
    assert after.export_failures - before.export_failures == pool(sliced).refused
    assert after.recomputed_tokens > before.recomputed_tokens
    assert after.restored_tokens > before.restored_tokens
    eventually(lambda: at_rest(sliced))
    audit(sliced)
    assert inside(actor, limit, allowed) == budget


def test_a_worker_that_hangs_is_killed_and_replaced(sliced: Rollout, expected: Outputs) -> None:
    before = sliced.stats().counters
    submit_all(sliced)
    sampled(sliced, 100)
    victim = busy(sliced)
    pid = pids(sliced)[victim]
    os.kill(pid, signal.SIGSTOP)
    assert outputs(collect(sliced, len(GROUPS))) == expected
    assert sliced.stats().counters.workers_lost - before.workers_lost == 1
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    eventually(lambda: pids(sliced).get(victim, pid) != pid)


def test_without_a_worker_every_trajectory_ends_with_an_error_in_bounded_time(sliced: Rollout, truth: Outputs) -> None:
    submit(sliced)
    sampled(sliced, 50)
    sliced.abort(["bob/1"], then="hold")
    rest = [f"more{number}" for number in range(20)]  # a fast machine finishes some between two kills, never all
    for key in rest:
        sliced.submit(PROMPTS[:1], n=1, sampling=SAMPLING, key=[key])
    taken: dict[TrajectoryId, Any] = {}
    deadline = time.monotonic() + 90.0
    while not any(trajectory.finish_reason is FinishReason.ERROR for trajectory in taken.values()):
        assert time.monotonic() < deadline, sliced.stats()
        for pid in pids(sliced).values():
            os.kill(pid, signal.SIGKILL)
        groups = sliced.next_groups(1, timeout_s=0.2)
        taken |= {t.trajectory_id: t for group in groups for t in group.trajectories}
    start = time.monotonic()
    assert sliced.resume(["bob"]).resumed == ("bob/1",)
    taken |= collect(sliced, len(rest) + 2 - len({t.group_id for t in taken.values()}))
    submit(sliced, ["later", "too"])
    refused = collect(sliced)
    assert time.monotonic() - start < 10.0
    failed = {name: t for name, t in (taken | refused).items() if t.finish_reason is FinishReason.ERROR}
    assert {"bob/1", "more19/0", *refused} <= set(failed)
    for trajectory in failed.values():
        assert trajectory.error is not None
        assert trajectory.error.startswith("no worker is left: worker-")
        assert "\n" not in trajectory.error
    expected = truth | {TrajectoryId(f"{key}/0"): truth[TrajectoryId("ann/0")] for key in rest}
    assert all(is_prefix(trajectory, expected) for trajectory in taken.values())
    assert engines(sliced) == []
