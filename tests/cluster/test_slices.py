"""A service that suspends by itself, from its start to the death of its last worker. The tests go in this order."""

import contextlib
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
    controller,
    engines,
    eventually,
    inside,
    is_prefix,
    limited,
    outputs,
    pids,
    pool,
    pools,
    reached,
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
        kv_model,
        "sliced",
        cluster={"max_restarts": 1, "unresponsive_s": 15},
        abort={"policies": [{"kind": "slice_budget", "tokens": SLICE}]},
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


def test_with_room_everywhere_every_slice_goes_on_on_the_other_worker(sliced: Rollout, truth: Outputs) -> None:
    before = sliced.stats().counters
    submit(sliced)  # as many as one worker runs: the other one always has room
    trajectories = collect(sliced)
    after = sliced.stats().counters
    assert outputs(trajectories) == truth
    assert after.resumes - before.resumes == SUSPENSIONS * len(truth)
    assert after.resumed_elsewhere - before.resumed_elsewhere == SUSPENSIONS * len(truth)


def test_an_abort_that_queues_again_ends_although_slices_go_on_ending(sliced: Rollout, expected: Outputs) -> None:
    with limited(sliced, 39) as limit:
        submit_all(sliced)
        for tokens in (39, 79, 119, 159):  # more than a slice each time
            limit(tokens)
            reached(sliced, tokens - 31)
            report = sliced.abort(keep="pool", then="requeue")
            assert set(report.found) == set(expected)
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
    deadline = time.monotonic() + 600.0
    while len(taken) < len(expected):
        assert time.monotonic() < deadline, sliced.stats()
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
    with limited(sliced, SLICE - 1):
        submit_all(sliced)
        reached(sliced, 10)
        victim = busy(sliced)
        pid = pids(sliced)[victim]
        os.kill(pid, signal.SIGSTOP)
    assert outputs(collect(sliced, len(GROUPS))) == expected
    assert sliced.stats().counters.workers_lost - before.workers_lost == 1
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    eventually(lambda: pids(sliced).get(victim, pid) != pid)


def kill_all(service: Rollout) -> None:
    for pid in pids(service).values():
        with contextlib.suppress(ProcessLookupError):  # the controller was faster
            os.kill(pid, signal.SIGKILL)


def test_without_a_worker_every_trajectory_ends_with_an_error_in_bounded_time(sliced: Rollout, truth: Outputs) -> None:
    rest = [f"more{number}" for number in range(200)]  # a fast machine finishes some between two kills, never all
    with limited(sliced):  # so that the first kill meets all of them
        submit(sliced)
        reached(sliced, 10)
        assert sliced.abort(["bob/1"], then="hold").found == ("bob/1",)
        sliced.submit(PROMPTS[:1] * len(rest), n=1, sampling=SAMPLING, key=rest)
        kill_all(sliced)

    def hopeless() -> bool:
        kill_all(sliced)
        return inside(controller(sliced), lambda self: self._core._fleet.hopeless is not None)

    eventually(hopeless)
    assert sliced.resume(["bob"]).resumed == ("bob/1",)
    taken = collect(sliced, len(rest) + 2)
    submit(sliced, ["later", "too"])
    refused = collect(sliced)
    failed = {name: t for name, t in (taken | refused).items() if t.finish_reason is FinishReason.ERROR}
    assert {"bob/1", f"{rest[-1]}/0", *refused} <= set(failed)
    for trajectory in failed.values():
        assert trajectory.error is not None
        assert trajectory.error.startswith("no worker is left: worker-")
        assert "\n" not in trajectory.error
    expected = truth | {TrajectoryId(f"{key}/0"): truth[TrajectoryId("ann/0")] for key in rest}
    assert all(is_prefix(trajectory, expected) for trajectory in taken.values())
    assert engines(sliced) == []
