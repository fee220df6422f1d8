"""Aborts and resumes as a driver calls them: what the reports say, what is kept, and what continues unharmed."""

import os
import signal
from pathlib import Path

import pytest

from rollout.client import Rollout
from rollout.reports import AbortReport
from rollout.types import FinishReason, Phase, Trajectory, TrajectoryId
from tests.cluster.scene import (
    IDS,
    MIDDLE,
    PROMPT_TOKENS,
    PROMPTS,
    SAMPLES,
    SAMPLING,
    Outputs,
    busy,
    collect,
    controller,
    engines,
    eventually,
    held_exports,
    images,
    inside,
    is_prefix,
    limited,
    outputs,
    pids,
    pool,
    reached,
    submit,
)


def by_id(report: AbortReport) -> dict[TrajectoryId, Trajectory]:
    """The partials of what was found, which are all of it."""
    assert tuple(partial.trajectory_id for partial in report.partials) == report.found
    return {partial.trajectory_id: partial for partial in report.partials}


def settled(service: Rollout, phase: Phase, count: int) -> None:
    """Wait until so many are in a phase, without asking workers, which may be stuck."""
    eventually(lambda: inside(controller(service), lambda self: self._core.phases).get(phase) == count)


@pytest.mark.parametrize("keep", ["auto", "pool", "none"])
def test_held_trajectories_return_their_tokens_and_continue_when_resumed(
    service: Rollout, truth: Outputs, keep: str
) -> None:
    before = service.stats().counters
    with limited(service, MIDDLE):
        submit(service)
        reached(service, MIDDLE)
        report = service.abort(keep=keep, then="hold")
    partials = by_id(report)
    assert set(partials) == set(IDS)
    assert all(is_prefix(partial, truth) and partial.finish_reason is None for partial in partials.values())
    assert service.stats().phases == {Phase.SUSPENDED: len(IDS)}
    kv = {name: PROMPT_TOKENS + len(partial.output_ids) - 1 for name, partial in partials.items()}
    kept = {name: image.kv_tokens for name, image in images(service).items()}
    assert kept == ({} if keep == "none" else kv)
    assert (pool(service).stored > 0) == (keep != "none")
    eventually(lambda: [engine.parked for engine in engines(service)] == [0, 0])
    tokens = service.stats().counters.tokens
    assert set(service.resume().resumed) == set(IDS)
    trajectories = collect(service)
    assert outputs(trajectories) == truth
    counters = service.stats().counters
    assert counters.tokens - tokens == sum(160 - len(partial.output_ids) for partial in partials.values())
    for name, trajectory in trajectories.items():
        (resume,) = trajectory.resumes
        assert resume.cached_tokens + resume.restored_tokens + resume.recomputed_tokens == kv[name]
        assert (resume.recomputed_tokens > 0) == (keep == "none")
    assert (counters.recomputed_tokens > before.recomputed_tokens) == (keep == "none")


def test_finished_by_an_abort_is_delivered_with_the_tokens_so_far(service: Rollout, truth: Outputs) -> None:
    with limited(service):
        submit(service)
        reached(service, 30)
        partials = by_id(service.abort(then="finish"))
    trajectories = collect(service)
    assert outputs(trajectories) == outputs(partials)
    for trajectory in trajectories.values():
        assert trajectory.finish_reason is FinishReason.ABORT
        assert 0 < len(trajectory.output_ids) < 160
        assert is_prefix(trajectory, truth)


def test_requeued_goes_on_by_itself(service: Rollout, truth: Outputs) -> None:
    with limited(service):
        submit(service)
        reached(service, 30)
        report = service.abort(then="requeue")
        assert set(report.found) == set(IDS)
    trajectories = collect(service)
    assert outputs(trajectories) == truth
    assert {t.suspensions for t in trajectories.values()} == {1}


def test_a_groups_id_stands_for_its_members_and_a_trajectorys_for_itself(service: Rollout, truth: Outputs) -> None:
    with limited(service):
        submit(service)
        reached(service, 10)
        assert service.abort(["ann"]).found == ("ann/0", "ann/1")
        assert service.abort(["bob/1", "bob/1"]).found == ("bob/1",)
    settled(service, Phase.FINISHED, 1)
    assert service.abort(["bob"]).finished == ("bob/0",)
    assert service.resume(["bob/1"]).resumed == ("bob/1",)
    bob = collect(service, 1)
    assert set(bob) == set(IDS[2:])
    assert service.resume(["ann"]).resumed == ("ann/0", "ann/1")
    trajectories = collect(service, 1) | bob
    assert outputs(trajectories) == truth
    assert trajectories[IDS[2]].suspensions == 0


def test_unknown_ids_are_said_to_be_unknown_and_disturb_nothing(service: Rollout, truth: Outputs) -> None:
    submit(service)
    report = service.abort(["nobody", "ann/7", "an"])
    assert report == AbortReport(unknown=("nobody", "ann/7", "an"))
    assert service.resume(["nobody"]).unknown == ("nobody",)
    trajectories = collect(service)
    assert outputs(trajectories) == truth
    assert service.abort(IDS).unknown == tuple(IDS)
    assert {t.suspensions for t in trajectories.values()} == {0}


def test_a_key_that_begins_like_another_is_another(service: Rollout, truth: Outputs) -> None:
    with limited(service):
        submit(service, ["job-1", "job-10"])
        reached(service, 10)
        assert service.abort(["job-1"], then="finish").found == ("job-1/0", "job-1/1")
    trajectories = collect(service)
    undisturbed = [(trajectories[TrajectoryId(f"job-10/{i}")]) for i in range(SAMPLES)]
    assert [(t.output_ids, t.logprobs) for t in undisturbed] == [
        truth[TrajectoryId(f"bob/{i}")] for i in range(SAMPLES)
    ]
    assert all(t.suspensions == 0 and t.finish_reason is FinishReason.LENGTH for t in undisturbed)


def test_an_abort_right_after_the_submission_takes_effect(service: Rollout, truth: Outputs) -> None:
    before = service.stats().counters
    with limited(service):
        submit(service)
        partials = by_id(service.abort(keep="pool"))
    assert set(partials) == set(IDS)
    assert all(is_prefix(partial, truth) and partial.finish_reason is None for partial in partials.values())
    stats = service.stats()
    assert stats.phases == {Phase.SUSPENDED: len(IDS)}
    assert stats.counters.tokens - before.tokens == sum(len(partial.output_ids) for partial in partials.values())
    service.resume()
    assert outputs(collect(service)) == truth


def test_what_has_no_token_yet_is_aborted_cleanly(service: Rollout, truth: Outputs) -> None:
    with limited(service):
        service.submit(PROMPTS[:1] * 4, n=2, sampling=SAMPLING, key=["a", "b", "c", "d"])
        submit(service)
        assert service.stats().phases[Phase.QUEUED] == len(IDS)
        partials = by_id(service.abort(["ann", "bob/0"], then="hold")) | by_id(service.abort(["bob/1"], then="finish"))
    for partial in partials.values():
        assert (partial.output_ids, partial.logprobs, partial.versions, partial.workers) == ((), (), (), ())
    service.abort(["a", "b", "c", "d"], keep="none", then="finish")
    service.resume(["ann", "bob"])
    trajectories = collect(service, 6)
    ended = trajectories.pop(TrajectoryId("bob/1"))
    assert (ended.finish_reason, ended.output_ids) == (FinishReason.ABORT, ())
    assert all(trajectories[name].output_ids == truth[name][0] for name in IDS[:3])
    assert all(trajectories[name].logprobs == truth[name][1] for name in IDS[:3])


def test_aborted_twice_during_its_export_it_is_released_once(service: Rollout, truth: Outputs, tmp_path: Path) -> None:
    before = service.stats().counters
    with limited(service), held_exports(service, tmp_path) as begun:
        submit(service)
        reached(service, 20)
        assert set(service.abort(keep="pool", then="requeue", timeout_s=0).unreached) == set(IDS)
        eventually(begun)
        assert set(service.abort(keep="pool", then="hold", timeout_s=0.1).unreached) == set(IDS)
    assert set(service.abort(keep="pool", then="hold").found) == set(IDS)
    eventually(lambda: service.stats().counters.releases - before.releases == len(IDS))
    after = service.stats().counters
    assert after.suspensions - before.suspensions == len(IDS)
    assert after.exclusive_pages - before.exclusive_pages == after.freed_pages - before.freed_pages
    service.resume()
    assert outputs(collect(service)) == truth
    assert service.stats().counters.recomputed_tokens == before.recomputed_tokens


def test_resumed_during_its_export_it_goes_on_without_being_asked_again(
    service: Rollout, truth: Outputs, tmp_path: Path
) -> None:
    before = service.stats().counters
    with limited(service), held_exports(service, tmp_path) as begun:
        submit(service)
        reached(service, 20)
        service.abort(keep="pool", then="hold", timeout_s=0)
        eventually(begun)
        assert set(service.resume().resumed) == set(IDS)
    assert outputs(collect(service)) == truth
    assert service.stats().counters.recomputed_tokens == before.recomputed_tokens


def test_what_a_stuck_worker_runs_is_unreached_in_bounded_time_and_stopped_later(
    service: Rollout, truth: Outputs
) -> None:
    before = service.stats().counters
    with limited(service):
        submit(service)
        reached(service, 10)
        pid = pids(service)[busy(service)]
        os.kill(pid, signal.SIGSTOP)
        try:
            report = service.abort(keep="pool", then="hold", timeout_s=1.5)  # raises if it takes much longer
            settled(service, Phase.SUSPENDED, SAMPLES)  # of each group, one on the other worker
            later = service.abort(keep="pool", then="hold", timeout_s=0.0)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert {*report.unreached, *report.found} == set(IDS)
        assert set(later.unreached) <= set(report.unreached)
        assert len(later.unreached) == len(later.found) == SAMPLES
        settled(service, Phase.SUSPENDED, len(IDS))
    service.resume()
    assert outputs(collect(service)) == truth
    assert service.stats().counters.workers_lost == before.workers_lost
