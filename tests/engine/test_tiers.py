"""Trajectories kept on their worker: resumed = uninterrupted, bit for bit, with a canary in every forward."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.control.messages import Moved
from rollout.types import Keep, Phase, SamplingParams, Then, Trajectory, TrajectoryId
from tests.engine.test_exactness import DETERMINISTIC, PARAMS, assert_same, roll_out
from tests.engine.test_parity import prompts
from tests.local_service import LocalService
from tests.tiny_models import make_tiny_llama

PAGE_BYTES = 16 * 512
"""Of the tiny model in fp32."""
HOST = {"bytes": 64 * PAGE_BYTES}
POLICIES: list[dict[str, Any]] = [
    {"kind": "write_through"},
    {"kind": "write_through_selective", "hits": 1},
    {"kind": "write_back"},
    {"kind": "none"},
]
MODES = pytest.mark.parametrize("mode", [DETERMINISTIC, {}], ids=["deterministic", "fast"])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def truth(path: Path) -> dict[TrajectoryId, Trajectory]:
    trajectories, _ = roll_out(path, prompts(6), n=2, workers=1)
    return trajectories


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["kind"])
@pytest.mark.parametrize("keep", [Keep.DEVICE, Keep.HOST])
def test_slices_kept_on_the_worker_resume_there_exactly_and_compute_nothing_twice(
    path: Path, truth: dict[TrajectoryId, Trajectory], keep: Keep, policy: dict[str, Any]
) -> None:
    host = HOST | {"write": policy, "load_back_tokens": 0}
    ours, service = roll_out(path, prompts(6), n=2, slice_tokens=7, keep=keep, host=host, canary=True)
    assert_same(ours, truth)
    counters = service.core.counters
    assert counters.suspensions == counters.resumes == 12 * 4
    assert (counters.resumed_elsewhere, counters.recomputed_tokens, counters.keep_failures) == (0, 0, 0)
    assert counters.exported_bytes == service.pool.restores == 0
    assert (counters.loaded_tokens > 0) == (keep is Keep.HOST)
    assert service.free_pages() == [w.engine.stats.device.total for w in service.workers.values()]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["kind"])
def test_with_few_pages_in_both_tiers_everything_ends_as_it_must(
    path: Path, truth: dict[TrajectoryId, Trajectory], policy: dict[str, Any]
) -> None:
    """Cases C7, C8, C9: what does not fit anywhere is computed again; nothing waits for ever."""
    for pages, keep in ((1, Keep.HOST), (3, Keep.HOST), (5, Keep.DEVICE)):
        host = {"bytes": pages * PAGE_BYTES, "write": policy, "load_back_tokens": 0}
        ours, service = roll_out(
            path, prompts(6), n=2, slice_tokens=5, keep=keep, host=host, canary=True, kv_bytes=10 * PAGE_BYTES
        )
        assert_same(ours, truth)
        assert all(w.engine.stats.host.private == 0 for w in service.workers.values())


def held(path: Path, keep: Keep, *, host_pages: int = 64, **service: Any) -> LocalService:
    """One trajectory, suspended after some tokens."""
    host = {"bytes": host_pages * PAGE_BYTES, "load_back_tokens": 0}
    local = LocalService(path, host=host, canary=True, **service)
    local.submit("p0", prompts(1, lengths=(40,))[0], PARAMS)
    local.step_until(lambda: len(local.record(TrajectoryId("p0/0")).columns) == 13)
    move(local, keep)
    return local


def move(local: LocalService, keep: Keep) -> None:
    """Suspend it there, or send it there if it is suspended."""
    name = TrajectoryId("p0/0")
    local.abort(name, keep=keep, then=Then.HOLD)
    record = local.record(name)
    local.step_until(lambda: record.phase is Phase.SUSPENDED and record.intent is None)


def in_pool(local: LocalService) -> bool:
    return local.record(TrajectoryId("p0/0")).pooled.image is not None


def prefilled(local: LocalService) -> int:
    return sum(worker.engine.stats.prefilled_tokens for worker in local.workers.values())


def at_home(local: LocalService) -> Keep | None:
    home = local.record(TrajectoryId("p0/0")).home
    return home.where if home is not None else None


@MODES
@pytest.mark.parametrize("second", [Keep.DEVICE, Keep.HOST, Keep.POOL, Keep.NONE])
@pytest.mark.parametrize("first", [Keep.DEVICE, Keep.HOST, Keep.POOL, Keep.NONE])
def test_a_suspended_trajectory_is_demoted_and_promoted_whole(
    path: Path, first: Keep, second: Keep, mode: dict[str, Any]
) -> None:
    truth, _ = roll_out(path, prompts(1, lengths=(40,)), workers=1)
    local = held(path, first, **mode)
    columns = len(local.record(TrajectoryId("p0/0")).columns)
    for keep in (second, first, second):
        move(local, keep)
    lost = Keep.NONE in (first, second)
    assert at_home(local) == (None if lost or second is Keep.POOL else second)
    assert in_pool(local) == (second is Keep.POOL and not lost)
    assert len(local.record(TrajectoryId("p0/0")).columns) == columns
    before = prefilled(local)
    local.resume(TrajectoryId("p0/0"))
    trajectory = local.run(1)[TrajectoryId("p0/0")]
    assert lost or prefilled(local) == before  # cases C13, D3
    (resume,) = trajectory.resumes
    known = 40 + columns - 1
    assert resume.recomputed_tokens == (known - resume.cached_tokens if lost else 0)
    assert resume.loaded_tokens == (known if second is Keep.HOST and not lost else 0)
    assert trajectory.suspensions == 1
    if mode:
        assert_same({trajectory.trajectory_id: trajectory}, truth)
    assert [t.host.private for t in (w.engine.stats for w in local.workers.values())] == [0, 0]
    local.close()


@pytest.mark.parametrize("keep", [Keep.DEVICE, Keep.HOST])
def test_kept_on_a_worker_that_is_lost_it_is_computed_again(path: Path, keep: Keep) -> None:
    truth, _ = roll_out(path, prompts(1, lengths=(40,)), workers=1)
    local = held(path, keep, **DETERMINISTIC)
    home = local.record(TrajectoryId("p0/0")).worker
    assert home is not None
    local.lose(home)
    assert at_home(local) is None
    local.resume(TrajectoryId("p0/0"))
    assert_same(local.run(1), truth)


def test_a_host_that_is_full_is_told_and_the_device_copy_stays(path: Path) -> None:
    """Case C7."""
    local = held(path, Keep.HOST, host_pages=2, **DETERMINISTIC)
    moved = [event for event in local.log if isinstance(event, Moved)]
    assert [(event.where, event.error is not None) for event in moved] == [(Keep.DEVICE, True)]
    assert local.core.counters.keep_failures == 1
    local.resume(TrajectoryId("p0/0"))
    (resume,) = local.run(1)[TrajectoryId("p0/0")].resumes
    assert (resume.recomputed_tokens, resume.restored_tokens) == (0, 0)


def recomputed(path: Path, order: Callable[[list[int]], list[int]], *, policy: str, share: float | None) -> int:
    """Tokens computed in the second of two passes over 64 prompts with device pages for half of them."""
    batch = prompts(64, lengths=(65,))
    params = SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True)
    working_set = 64 * 4
    host = {}
    if share is not None:
        host = {"bytes": int(share * working_set) * PAGE_BYTES, "write": {"kind": policy}, "load_back_tokens": 0}
    local = LocalService(path, workers=1, host=host, canary=True, kv_bytes=(working_set // 2 + 1) * PAGE_BYTES)
    engine = local.workers[next(iter(local.workers))].engine
    for turn, indices in enumerate((list(range(64)), order(list(range(64))))):
        before = engine.stats.prefilled_tokens
        for index in indices:
            local.submit(f"{turn}-{index}", batch[index], params)
            local.run(1)
    local.close()
    return engine.stats.prefilled_tokens - before


@pytest.mark.parametrize("order", [list, lambda indices: indices[::-1]], ids=["same order", "reversed"])
def test_a_second_pass_over_more_prompts_than_the_device_holds_finds_them_on_the_host(
    path: Path, order: Callable[[list[int]], list[int]]
) -> None:
    without = recomputed(path, order, policy="none", share=None)
    through = recomputed(path, order, policy="write_through", share=1.1)
    back = recomputed(path, order, policy="write_back", share=0.6)
    assert without > 1000
    assert through <= 0.05 * without
    assert back <= 0.15 * without
