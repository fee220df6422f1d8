"""Processes killed and segments damaged at the worst moments: every run ends with the undisturbed outputs."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from rollout.client import Rollout
from rollout.metrics import RolloutCounters
from rollout.types import TrajectoryId
from tests.cluster.scene import (
    IDS,
    MIDDLE,
    Outputs,
    all_in_shared_memory,
    busy,
    collect,
    controller,
    engines,
    eventually,
    hold,
    images,
    inside,
    limited,
    outputs,
    pids,
    pool,
    pools,
    reached,
    submit,
    workers,
)


def kill(service: Rollout, worker: str) -> int:
    """SIGKILL a worker; returns the pid it had."""
    pid = pids(service)[worker]
    os.kill(pid, signal.SIGKILL)
    return pid


def back(service: Rollout, worker: str, killed: int) -> None:
    """Wait until the worker is there again, as another process, and the controller gives it work."""
    eventually(lambda: pids(service).get(worker, killed) != killed)
    eventually(lambda: inside(controller(service), lambda self: self._core._fleet.get(worker) is not None))


def suspended(service: Rollout) -> None:
    """The batch, stopped in the middle, with all its KV in the pool."""
    with limited(service, MIDDLE):
        submit(service)
        reached(service, MIDDLE)
        service.abort(keep="pool", then="hold")
    assert set(images(service)) == set(IDS)
    eventually(lambda: all_in_shared_memory(service))


def since(service: Rollout, before: RolloutCounters, name: str) -> int:
    return getattr(service.stats().counters, name) - getattr(before, name)


def test_a_worker_killed_while_it_decodes_costs_recomputation_only_and_comes_back(
    service: Rollout, truth: Outputs
) -> None:
    before = service.stats().counters
    with limited(service, MIDDLE):
        submit(service)
        reached(service, MIDDLE)
        victim = busy(service)
        pid = kill(service, victim)
    assert outputs(collect(service)) == truth
    assert since(service, before, "workers_lost") == 1
    assert since(service, before, "restarts") > 0
    assert since(service, before, "recomputed_tokens") > 0
    back(service, victim, pid)
    submit(service)
    trajectories = collect(service)
    assert outputs(trajectories) == truth
    assert any(victim in t.workers for t in trajectories.values())


def test_a_worker_killed_in_the_middle_of_an_export_costs_recomputation_only(
    service: Rollout, truth: Outputs, tmp_path: Path
) -> None:
    before = service.stats().counters
    with limited(service, MIDDLE):
        submit(service)
        reached(service, MIDDLE)
        victim = busy(service)
        begun, _ = hold(service, victim, "gather", tmp_path)
        service.abort(keep="pool", then="requeue", timeout_s=0)
        eventually(begun.exists)
        pid = kill(service, victim)
    assert outputs(collect(service)) == truth
    eventually(lambda: since(service, before, "workers_lost") == 1)
    assert since(service, before, "export_failures") > 0
    assert since(service, before, "recomputed_tokens") > 0
    back(service, victim, pid)


def test_a_worker_killed_in_the_middle_of_a_restore_costs_nothing_that_the_pool_has(
    service: Rollout, truth: Outputs, tmp_path: Path
) -> None:
    before = service.stats().counters
    suspended(service)
    for worker in workers(service).values():  # the leases of readers that are killed end sooner
        inside(worker, lambda self: setattr(self._host._engine._restorer, "_timeout_s", 10.0))
    begun = {worker: hold(service, worker, "scatter", tmp_path)[0] for worker in workers(service)}
    service.resume()
    for worker, flag in begun.items():
        eventually(flag.exists)
        killed = worker, kill(service, worker)
    assert outputs(collect(service)) == truth
    assert since(service, before, "workers_lost") == 2
    assert since(service, before, "recomputed_tokens") == 0
    assert since(service, before, "restore_failures") == 0
    back(service, *killed)


def test_an_export_that_takes_too_long_is_given_up_and_its_pages_wait_for_it(
    service: Rollout, truth: Outputs, tmp_path: Path
) -> None:
    before = service.stats().counters
    (actor,) = pools(service)
    usual = inside(actor, lambda self: self._timeout_s)
    inside(actor, lambda self: setattr(self, "_timeout_s", 10.0))
    with limited(service, MIDDLE):
        submit(service)
        reached(service, MIDDLE)
        victim = busy(service)
        begun, go_on = hold(service, victim, "gather", tmp_path)
        service.abort(keep="pool", then="requeue", timeout_s=0)
        eventually(begun.exists)
    assert outputs(collect(service)) == truth
    assert since(service, before, "export_failures") > 0
    stats = next(worker for worker in service.stats().workers if worker.worker == victim)
    assert stats.exporting > 0
    assert stats.engine.parked > 0
    assert pool(service).reserved > 0
    go_on.touch()
    eventually(lambda: pool(service).reserved == 0)
    eventually(lambda: [engine.parked for engine in engines(service)] == [0, 0])
    inside(actor, lambda self: setattr(self, "_timeout_s", usual))


def hurt(service: Rollout, trajectory: TrajectoryId, how: Callable[[Any, str], None]) -> None:
    """Do something to the last segment of a trajectory, inside the pool."""
    segment = images(service)[trajectory].runs[-1].segment
    inside(pools(service)[0], how, segment)


def replaced(change: Callable[[list[Any]], list[Any]]) -> Callable[[Any, str], None]:
    """Put a changed copy in the place of a segment's data."""

    def how(self: Any, segment: str) -> None:
        import ray

        manifest, ref = self._segments[segment]
        data = change([page.copy() for page in ray.get(ref)])
        self._segments[segment] = (manifest, ray.put(data))

    return how


def flip(data: list[Any]) -> list[Any]:
    data[-1][7] ^= 1
    return data


def rename(self: Any, segment: str) -> None:
    import dataclasses

    manifest, ref = self._segments[segment]
    self._segments[segment] = (dataclasses.replace(manifest, fingerprint="another"), ref)


def forget(self: Any, segment: str) -> None:
    self._ledger.drop(segment)
    self._let_go()


def lose_owner(service: Rollout, trajectory: TrajectoryId) -> None:
    """Have the data owned by a process that dies: Ray forgets the object, and the pool does not know."""

    class Owner:
        def put(self, nested: list[Any]) -> Any:
            import os

            import ray

            return [ray.put([page.copy() for page in ray.get(nested[0])])], os.getpid()

    owner = ray.remote(num_cpus=0)(Owner).remote()
    segment = images(service)[trajectory].runs[-1].segment
    actor = pools(service)[0]
    nested = inside(actor, lambda self: [self._segments[segment][1]])
    copy, pid = ray.get(owner.put.remote(nested))

    def take(self: Any, nested: list[Any]) -> None:
        self._segments[segment] = (self._segments[segment][0], nested[0])

    inside(actor, take, copy)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: lost(copy[0]))


def lost(ref: Any) -> bool:
    try:
        ray.get(ref, timeout=5.0)
    except ray.exceptions.ObjectLostError:
        return True
    except ray.exceptions.GetTimeoutError:
        return False
    return False


@pytest.mark.parametrize("kind", ["damaged", "gone"])
def test_a_segment_that_cannot_be_used_is_refused_and_computed_again(
    service: Rollout, truth: Outputs, kind: str
) -> None:
    before = service.stats().counters
    suspended(service)
    kept = {name: image.kv_tokens for name, image in images(service).items()}
    if kind == "damaged":
        hurt(service, IDS[0], replaced(flip))
        hurt(service, IDS[1], replaced(lambda data: [*data[:-1], data[-1][:-1]]))
        hurt(service, IDS[2], replaced(lambda data: data[:-1]))
        hurt(service, IDS[3], rename)
        spoiled = IDS
    else:
        hurt(service, IDS[0], forget)
        lose_owner(service, IDS[1])
        hurt(service, IDS[2], replaced(lambda data: [page.tolist() for page in data]))
        spoiled = IDS[:3]
    service.resume()
    trajectories = collect(service)
    assert outputs(trajectories) == truth
    assert since(service, before, "restore_failures") == len(spoiled)
    for name, trajectory in trajectories.items():
        (resume,) = trajectory.resumes
        restored = 0 if name in spoiled else kept[name] - resume.cached_tokens
        assert resume.restored_tokens == restored
        assert resume.cached_tokens + restored + resume.recomputed_tokens == kept[name]
    assert since(service, before, "recomputed_tokens") == sum(
        resume.recomputed_tokens for trajectory in trajectories.values() for resume in trajectory.resumes
    )


def kill_pool(service: Rollout) -> None:
    os.kill(inside(pools(service)[0], lambda self: __import__("os").getpid()), signal.SIGKILL)


def test_a_pool_killed_while_it_is_read_spoils_nothing(service: Rollout, truth: Outputs, tmp_path: Path) -> None:
    """Case F3."""
    suspended(service)
    held = [hold(service, worker, "scatter", tmp_path) for worker in workers(service)]
    service.resume()
    for begun, _ in held:
        eventually(begun.exists)
    kill_pool(service)
    eventually(lambda: service.stats().pools and pool(service).exports == 0)
    for _, go_on in held:
        go_on.touch()
    assert outputs(collect(service)) == truth


def test_a_pool_that_is_killed_costs_recomputation_only_and_comes_back(service: Rollout, truth: Outputs) -> None:
    before = service.stats().counters
    suspended(service)
    kill_pool(service)
    service.resume()
    trajectories = collect(service)
    assert outputs(trajectories) == truth
    assert since(service, before, "restore_failures") == len(IDS)
    assert since(service, before, "workers_lost") == 0
    eventually(lambda: service.stats().pools)
    suspended(service)
    service.resume()
    assert outputs(collect(service)) == truth
    assert since(service, before, "restore_failures") == len(IDS)


def test_a_fault_in_a_background_task_of_the_controller_fails_what_waits_for_it(
    service: Rollout, truth: Outputs
) -> None:
    before = service.stats().counters

    def break_exports(self: Any) -> Any:
        pools, self._workers.pools = self._workers.pools, {}
        return pools

    with limited(service, MIDDLE):
        submit(service)
        reached(service, MIDDLE)
        kept = inside(controller(service), break_exports)
        try:
            assert set(service.abort(keep="pool", then="requeue").found) == set(IDS)
            assert since(service, before, "export_failures") == len(IDS)
        finally:
            inside(controller(service), lambda self, pools: setattr(self._workers, "pools", pools), kept)
    assert outputs(collect(service)) == truth
