"""Workers that come and go while trajectories run: nothing is lost, all is as if nobody had moved it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.util.placement_group import placement_group_table

import rollout
from rollout.client import Rollout
from rollout.errors import ClusterTooSmallError, ConfigError, InvalidArgumentError, UnknownWorkerError
from rollout.types import Phase
from tests.cluster.scene import (
    IDS,
    MIDDLE,
    Outputs,
    at_rest,
    audit,
    collect,
    controller,
    eventually,
    hold,
    images,
    inside,
    limited,
    outputs,
    pids,
    reached,
    settings,
    submit,
)


@pytest.fixture(scope="module")
def changing(ray_cluster: None, kv_model: Path) -> Iterator[Rollout]:
    """Of one worker at first; what the tests add and drain leaves one."""
    before = places()
    with rollout.start(settings(kv_model, "changing", cluster={"workers": 1, "max_restarts": 1})) as service:
        yield service
    eventually(lambda: places() <= before)


@pytest.fixture
def service(changing: Rollout, truth: Outputs) -> Iterator[Rollout]:
    yield changing
    changing.abort(keep="none", then="finish")
    changing.next_groups(100, timeout_s=0)
    eventually(lambda: at_rest(changing, workers=len(pids(changing))))
    audit(changing)


def places() -> set[str]:
    """Placement groups that hold resources."""
    return {name for name, group in placement_group_table().items() if group["state"] != "REMOVED"}


def gone(pid: int) -> None:
    eventually(lambda: not Path(f"/proc/{pid}").exists())


def one_more(service: Rollout) -> tuple[str, str]:
    """The worker there is, and one that was added."""
    (old,) = pids(service)
    (new,) = service.add_workers()
    assert set(pids(service)) == {old, new}
    return old, new


def test_a_worker_that_is_added_takes_over_all_of_one_that_is_drained(service: Rollout, truth: Outputs) -> None:
    before, held = service.stats().counters, places()
    with limited(service, MIDDLE) as limit:
        submit(service)
        reached(service, 20)
        old, new = one_more(service)
        pid = pids(service)[old]
        assert len(places()) == len(held) + 1
        limit(MIDDLE)  # the new one, too
        report = service.drain(old)
        assert (report.worker, set(report.moved), report.empty) == (old, set(IDS), True)
        assert set(pids(service)) == {new}
        gone(pid)
        eventually(lambda: len(places()) == len(held))
        assert len(held - places()) == 1  # that of the old one was given back
    trajectories = collect(service)
    assert outputs(trajectories) == truth
    for each in trajectories.values():
        assert each.workers == (old, new)
        (resume,) = each.resumes
        assert (resume.worker, resume.recomputed_tokens) == (new, 0)
    after = service.stats().counters
    assert (after.workers_lost, after.recomputed_tokens) == (before.workers_lost, before.recomputed_tokens)


def test_what_a_drained_worker_keeps_for_its_driver_moves_to_the_pool(service: Rollout, truth: Outputs) -> None:
    before = service.stats().counters
    with limited(service, MIDDLE):
        submit(service)
        reached(service, 20)
        service.abort(["ann"], keep="device")
        service.abort(["bob"], keep="none")
    old, new = one_more(service)
    report = service.drain(old)
    assert (set(report.moved), report.empty) == ({"ann/0", "ann/1"}, True)
    assert set(images(service)) == {"ann/0", "ann/1"}
    assert service.stats().phases == {Phase.SUSPENDED: len(IDS)}
    service.resume()
    trajectories = collect(service)
    assert outputs(trajectories) == truth
    assert all(each.resumes[-1].recomputed_tokens == 0 for name, each in trajectories.items() if name in IDS[:2])
    assert service.stats().counters.workers_lost == before.workers_lost
    assert set(pids(service)) == {new}


def test_a_worker_killed_while_it_is_drained_costs_recomputation_only(
    service: Rollout, truth: Outputs, tmp_path: Path
) -> None:
    before, held = service.stats().counters, places()
    with limited(service, MIDDLE) as limit:
        submit(service)
        reached(service, 20)
        old, new = one_more(service)
        limit(MIDDLE)
        pid = pids(service)[old]
        begun, _ = hold(service, old, "gather", tmp_path)
        report = service.drain(old, timeout_s=0.0)
        assert (set(report.moved), report.empty) == (set(IDS), False)
        eventually(begun.exists)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: inside(controller(service), lambda self, old: self._core.is_retired(old), old))
        eventually(lambda: len(places()) == len(held))
    trajectories = collect(service)
    assert outputs(trajectories) == truth
    assert set(pids(service)) == {new}
    # Whether it counts as lost is open: that its KV is gone may be told first, and then it is out of service already.
    assert service.stats().counters.recomputed_tokens > before.recomputed_tokens


def test_the_last_worker_and_unknown_ones_stay_in_service(service: Rollout, truth: Outputs) -> None:
    (last,) = pids(service)
    submit(service)
    with pytest.raises(UnknownWorkerError, match=f"got '{last}', the only one in service; add another first"):
        service.drain(last)
    with pytest.raises(UnknownWorkerError, match=f"got 'nobody', allowed: one of {last}"):
        service.drain("nobody")
    assert outputs(collect(service)) == truth


def test_more_workers_than_the_cluster_has_are_refused_and_none_is_added(service: Rollout, truth: Outputs) -> None:
    held, before = places(), pids(service)
    submit(service)
    with pytest.raises(ClusterTooSmallError, match="5 workers of 1 CPU need 5 CPU, the Ray cluster has 4"):
        service.add_workers(5)

    def patience(self: Any, seconds: float) -> float:
        from rollout.cluster import placement

        before, placement.PLACEMENT_S = placement.PLACEMENT_S, seconds
        return before

    usual = inside(controller(service), patience, 1.0)
    try:
        with pytest.raises(ClusterTooSmallError, match=r"4 workers need 4 CPU; . of 4 CPU are free"):
            service.add_workers(4)
    finally:
        inside(controller(service), patience, usual)

    def budget(self: Any, nbytes: int) -> int:
        import dataclasses

        config = self._description.config
        pool = config.pool.model_copy(update={"budget_bytes": nbytes})
        changed = config.model_copy(update={"pool": pool})
        self._description = dataclasses.replace(self._description, config=changed)
        return int(config.pool.budget_bytes)

    usual_bytes = inside(controller(service), budget, 512 << 20)
    try:
        with pytest.raises(ConfigError, match=r"pool\.budget_bytes: got 536870912, allowed: at most"):
            service.add_workers()  # whose own share of the object store does not fit
    finally:
        inside(controller(service), budget, usual_bytes)
    for count in (0, -1):
        with pytest.raises(InvalidArgumentError, match=f"count: got {count}, allowed: an integer >= 1"):
            service.add_workers(count)
    assert outputs(collect(service)) == truth
    assert pids(service) == before
    eventually(lambda: places() == held)


def test_a_worker_that_is_added_during_a_pause_waits_for_its_end(service: Rollout, truth: Outputs) -> None:
    service.pause()
    submit(service)
    old, new = one_more(service)
    assert service.stats().phases == {Phase.QUEUED: len(IDS)}
    service.unpause()
    trajectories = collect(service)
    assert outputs(trajectories) == truth
    assert {each.workers for each in trajectories.values()} == {(old,), (new,)}
    assert service.drain(old).empty
