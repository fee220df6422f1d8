"""Trajectories kept on their worker: resumed = uninterrupted, bit for bit, with a canary in every forward."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.control.messages import Moved
from rollout.types import Keep, Phase, SamplingParams, Then, Trajectory, TrajectoryId
from tests.engine.test_exactness import INVARIANT, PARAMS, REPLAY, assert_same, roll_out
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
MODES = pytest.mark.parametrize("mode", [REPLAY, INVARIANT], ids=["replay", "invariant"])


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


def held(
    path: Path, keep: Keep, *, host_pages: int = 64, policy: dict[str, Any] = POLICIES[-1], **service: Any
) -> LocalService:
    """One trajectory, suspended after some tokens."""
    host = {"bytes": host_pages * PAGE_BYTES, "load_back_tokens": 0, "write": policy}
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
    truth, _ = roll_out(path, prompts(1, lengths=(40,)), workers=1, **mode)
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
    assert_same({trajectory.trajectory_id: trajectory}, truth)
    assert [t.host.private for t in (w.engine.stats for w in local.workers.values())] == [0, 0]
    local.close()


@pytest.mark.parametrize("keep", [Keep.DEVICE, Keep.HOST])
def test_kept_on_a_worker_that_is_lost_it_is_computed_again(path: Path, keep: Keep) -> None:
    truth, _ = roll_out(path, prompts(1, lengths=(40,)), workers=1)
    local = held(path, keep, **REPLAY)
    home = local.record(TrajectoryId("p0/0")).worker
    assert home is not None
    local.lose(home)
    assert at_home(local) is None
    local.resume(TrajectoryId("p0/0"))
    assert_same(local.run(1), truth)


def test_a_host_that_is_full_is_told_and_the_device_copy_stays(path: Path) -> None:
    """Case C7."""
    local = held(path, Keep.HOST, host_pages=2, **REPLAY)
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


@pytest.mark.parametrize("workers", [1, 2], ids=["on the same worker", "on another one"])
def test_resumed_while_its_export_is_in_flight_it_goes_on_exactly(path: Path, workers: int) -> None:
    """Case C6."""
    truth, _ = roll_out(path, prompts(1, lengths=(40,)), workers=1)
    local = LocalService(path, workers=workers, canary=True, **REPLAY)
    name = TrajectoryId("p0/0")
    local.submit("p0", prompts(1, lengths=(40,))[0], PARAMS)
    local.step_until(lambda: len(local.record(name).columns) == 13)
    local.exports = []
    local.abort(name, keep=Keep.POOL)
    local.step()
    (order,) = local.exports
    local.resume(name)
    for _ in range(3):
        local.step()
    assert local.phase(name) is Phase.SUSPENDING
    local.exports = None
    local.export(order)
    ended = local.run(1)
    assert_same(ended, truth)
    (resume,) = ended[name].resumes
    assert (resume.cached_tokens + resume.restored_tokens, resume.recomputed_tokens) == (52, 0)
    local.close()


def test_restores_that_need_more_pages_than_there_are_make_progress(path: Path) -> None:
    """Case C9: six images of four pages each, and eight pages."""
    batch = prompts(6, lengths=(40,))
    truth, _ = roll_out(path, batch, workers=1)
    local = LocalService(path, workers=1, canary=True, kv_bytes=10 * PAGE_BYTES, **REPLAY)
    for index, prompt in enumerate(batch):
        name = TrajectoryId(f"p{index}/0")
        local.submit(f"p{index}", prompt, PARAMS)
        local.step_until(lambda name=name: len(local.record(name).columns) >= 10)  # type: ignore[misc]
        local.abort(name, keep=Keep.POOL)
        local.step_until(lambda name=name: local.phase(name) is Phase.SUSPENDED)  # type: ignore[misc]
    local.resume(*(TrajectoryId(f"p{index}/0") for index in range(6)))
    assert_same(local.run(6), truth)
    local.close()


def test_copies_are_acknowledged_while_decoding_without_arrivals_and_while_idle(path: Path) -> None:
    """Case C10."""
    host = HOST | {"write": {"kind": "write_through"}}
    local = LocalService(path, workers=1, host=host)
    engine = local.workers[next(iter(local.workers))].engine
    params = SamplingParams(max_new_tokens=400, ignore_eos=True)
    local.submit("p0", prompts(1, lengths=(40,))[0], params)
    local.step_until(lambda: engine.stats.host.tree == 2)
    record = local.record(TrajectoryId("p0/0"))
    assert record.phase is Phase.DECODING
    local.step_until(lambda: local.core.complete_groups == 1)
    while not engine.idle:  # what finishing wrote through is still to be acknowledged
        engine.step()
    assert engine.stats.host.tree == 439 // 16
    assert engine.stats.host.reserved == 0
    local.close()


def test_a_promotion_waits_for_room_that_copies_are_making(path: Path) -> None:
    """Write-back, a device full of what others left."""
    local = held(path, Keep.HOST, workers=1, kv_bytes=12 * PAGE_BYTES, policy={"kind": "write_back"})
    for index, prompt in enumerate(prompts(3, lengths=(60,))):
        local.submit(f"other{index}", prompt, SamplingParams(max_new_tokens=4, ignore_eos=True))
    local.run(3)
    engine = local.workers[next(iter(local.workers))].engine
    assert engine.stats.device.free < 4
    move(local, Keep.DEVICE)
    assert at_home(local) is Keep.DEVICE
    assert local.core.counters.keep_failures == 0
    local.close()


def test_a_sequence_waits_for_pages_that_copies_hold_rather_than_give_up_its_own(path: Path) -> None:
    local = LocalService(
        path, workers=1, host=HOST | {"write": {"kind": "write_through"}}, kv_bytes=5 * PAGE_BYTES, canary=True
    )
    worker = local.workers[next(iter(local.workers))]
    gate = threading.Event()
    copy = worker.storage.copy

    def slow(*args: Any) -> None:
        assert gate.wait(60)
        copy(*args)

    worker.storage.copy = slow  # type: ignore[method-assign]
    local.submit("old", prompts(1, lengths=(33,))[0], SamplingParams(max_new_tokens=2, ignore_eos=True))
    local.step_until(lambda: local.core.complete_groups == 1)
    local.submit("new", prompts(2, lengths=(20,))[1], SamplingParams(max_new_tokens=30, ignore_eos=True))
    for _ in range(60):
        local.step()
    assert worker.engine.blocked
    gate.set()
    local.run(2)
    assert worker.engine.stats.preemptions == 0
    local.close()


def test_every_copy_restore_and_export_comes_after_what_was_computed_before(path: Path) -> None:
    """The fence of the moment is handed to all three; what it is good for is tested in tests/kv/test_fences.py."""
    local = held(path, Keep.HOST, workers=1)
    worker = local.workers[next(iter(local.workers))]

    class Spy:
        waited = 0

        def wait(self) -> None:
            self.waited += 1

    spies: list[Spy] = []

    def fence() -> Spy:
        spies.append(Spy())
        return spies[-1]

    worker.storage.fence = fence  # type: ignore[method-assign]
    for keep in (Keep.DEVICE, Keep.POOL, Keep.DEVICE, Keep.HOST):  # a load, an export, a restore, a write
        before = sum(spy.waited for spy in spies)
        move(local, keep)
        assert sum(spy.waited for spy in spies) > before, keep
    local.close()


@pytest.mark.parametrize("chunk", [64, 128])
def test_what_is_not_loaded_leaves_a_prefix_of_whole_chunks(path: Path, chunk: int) -> None:
    """Deterministic mode, with fewer tokens on the host than are loaded."""
    mode = REPLAY | {"chunk_tokens": chunk}
    batch = prompts(1, lengths=(300,))
    seeded = SamplingParams(max_new_tokens=30, ignore_eos=True, seed=0)
    truth, _ = roll_out(path, batch, workers=1, params=seeded, **mode)
    host = HOST | {"write": {"kind": "write_back"}, "load_back_tokens": 10_000}
    local = LocalService(path, workers=1, host=host, kv_bytes=30 * PAGE_BYTES, canary=True, **mode)
    local.submit("p0", batch[0], PARAMS)
    local.run(1)
    local.submit("other", prompts(2, lengths=(200,))[1], PARAMS)
    local.run(1)
    engine = local.workers[next(iter(local.workers))].engine
    assert engine.stats.host.tree > 0
    assert engine.stats.device.tree > 200 // 16
    starts: list[int] = []
    plan = engine._scheduler.plan

    def spied() -> Any:
        found = plan()
        starts.extend(part.start for part in found.prefill)
        return found

    engine._scheduler.plan = spied  # type: ignore[method-assign]
    local.submit("again", batch[0], seeded)
    (again,) = local.run(1).values()
    assert starts
    assert all(start % chunk == 0 for start in starts), starts
    assert (again.output_ids, again.logprobs) == (truth["p0/0"].output_ids, truth["p0/0"].logprobs)
    local.close()
