"""KV that stays on its worker, through real actors: kept, demoted, promoted, lost; and `rollout check --kv`."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollout
from rollout.cli.main import main
from rollout.client import Rollout
from rollout.types import Keep
from tests.cluster.scene import (
    IDS,
    Outputs,
    all_in_shared_memory,
    at_rest,
    audit,
    collect,
    controller,
    eventually,
    images,
    inside,
    limited,
    outputs,
    pids,
    pool,
    reached,
    submit,
    workers,
)
from tests.cluster.scene import settings as base_settings


@pytest.fixture(scope="module")
def kept(ray_cluster: None, kv_model: Path) -> Iterator[Rollout]:
    config = base_settings(
        kv_model,
        "kept",
        engine={"canary": True},
        host={"bytes": "32MiB", "write": {"kind": "none"}, "load_back_tokens": 0},
        resume={"prefer": "most_room"},
    )
    with rollout.start(config) as service:
        yield service


@pytest.fixture
def service(kept: Rollout, truth: Outputs) -> Iterator[Rollout]:
    yield kept
    kept.abort(keep="none", then="finish")
    kept.next_groups(100, timeout_s=0)
    eventually(lambda: at_rest(kept))
    eventually(lambda: [worker.engine.host.private for worker in kept.stats().workers] == [0, 0])
    audit(kept)


def homes(service: Rollout) -> dict[str, str | None]:
    """Where each trajectory that was not handed out has KV on a worker."""

    def look(self: Any) -> dict[str, str | None]:
        records = self._core._groups.records()
        return {r.trajectory_id: r.home.where.value if r.home is not None else None for r in records}

    return inside(controller(service), look)


@pytest.mark.parametrize("keep", ["device", "host"])
def test_a_batch_kept_on_its_workers_goes_on_there_and_computes_nothing_twice(
    service: Rollout, truth: Outputs, keep: str
) -> None:
    before = service.stats().counters
    with limited(service, 40) as limit:
        submit(service)
        for tokens in (40, 80, 120):
            limit(tokens)
            service.resume()
            reached(service, tokens - 20)
            assert set(service.abort(keep=keep, then="hold").found) == set(IDS)
            assert homes(service) == dict.fromkeys(IDS, keep)
    service.resume()
    assert outputs(collect(service)) == truth
    after = service.stats().counters
    assert after.resumes - before.resumes == after.suspensions - before.suspensions == 3 * len(IDS)
    assert after.recomputed_tokens == before.recomputed_tokens
    assert (after.loaded_tokens > before.loaded_tokens) == (keep == "host")
    assert after.exported_bytes == before.exported_bytes
    assert after.resumed_elsewhere == before.resumed_elsewhere


def test_a_suspended_batch_is_moved_from_tier_to_tier_by_command(service: Rollout, truth: Outputs) -> None:
    before = service.stats().counters
    with limited(service, 60):
        submit(service)
        reached(service, 40)
        for keep in ("device", "host", "pool", "host", "device", "pool", "device"):
            report = service.abort(keep=keep, then="hold")
            assert set(report.found) == set(IDS)
            if keep == "pool":
                assert homes(service) == dict.fromkeys(IDS)
                assert set(images(service)) == set(IDS)
                eventually(lambda: all_in_shared_memory(service))
            else:
                assert homes(service) == dict.fromkeys(IDS, keep)
                assert images(service) == {}
                eventually(lambda: pool(service).stored == 0)
    service.resume()
    assert outputs(collect(service)) == truth
    after = service.stats().counters
    assert after.suspensions - before.suspensions == after.resumes - before.resumes == len(IDS)
    assert (after.recomputed_tokens, after.keep_failures) == (before.recomputed_tokens, before.keep_failures)


@pytest.mark.parametrize("keep", ["device", "host"])
def test_kv_on_a_worker_that_is_killed_costs_recomputation_only(service: Rollout, truth: Outputs, keep: str) -> None:
    with limited(service, 60):
        submit(service)
        reached(service, 40)
        service.abort(keep=keep, then="hold")
        old = pids(service)
        for pid in old.values():
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: len(new := pids(service)) == 2 and not set(new.values()) & set(old.values()))
        eventually(lambda: homes(service) == dict.fromkeys(IDS))
    service.resume()
    trajectories = collect(service)
    assert outputs(trajectories) == truth
    assert all(t.resumes[-1].recomputed_tokens > 0 for t in trajectories.values())


def test_the_accounting_of_a_live_service_is_recomputed(service: Rollout, capsys: pytest.CaptureFixture[str]) -> None:
    submit(service)
    reached(service, 5)
    assert main(["check", "--kv", "--name", "kept"]) == 0
    shown = capsys.readouterr().out
    assert [line.split(":")[1] for line in shown.splitlines() if line.startswith(("worker-", "pool of "))] == [
        " ok"
    ] * 3
    name, worker = next(iter(workers(service).items()))

    def miscount(self: Any, by: int) -> None:
        from rollout.kv.tiers import Tier

        self._host._engine._cache.tiered.counts[Tier.HOST].private += by

    collect(service)
    inside(worker, miscount, 1)
    assert main(["check", "--kv", "--name", "kept"]) == 1
    inside(worker, miscount, -1)
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    assert "host" in line
    assert Keep.HOST in line


def test_what_cannot_be_checked_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], service: Rollout) -> None:
    assert main(["check"]) == 2
    assert main(["check", "--kv", "--name", "nobody"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("rollout: error: ") for line in lines] == [True, True]
