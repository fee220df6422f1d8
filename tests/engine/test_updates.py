"""Cases D1 and D2 with real kernels: after an update without flush, against cold services and Hugging Face."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.control.commands import Assignment, Watch
from rollout.control.messages import Finished, Sampled
from rollout.types import Columns, Keep, Phase, SamplingParams, Trajectory, TrajectoryId, Version
from tests.engine.by_hand import assert_greedy_as_it_says, spans, version_column
from tests.engine.test_exactness import INVARIANT, REPLAY
from tests.engine.test_parity import prompts
from tests.local_service import LocalService
from tests.tiny_models import make_tiny_llama, make_tiny_qwen2

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
HOST = {"bytes": 1 << 20, "write": {"kind": "write_through"}, "load_back_tokens": 0}
ON_HOST = {"bytes": 1 << 20, "load_back_tokens": 0}
SAME = {"kind": "same_weights"}
NAME = TrajectoryId("p/0")
Paths = dict[int, Path]


def stale(max_lag: int) -> dict[str, Any]:
    return {"kind": "stale", "max_lag": max_lag}


@pytest.fixture(scope="module", params=[make_tiny_llama, make_tiny_qwen2], ids=["llama", "qwen2"])
def paths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """Of three versions of one model."""
    make: Callable[..., Path] = request.param
    return {version: make(tmp_path_factory.mktemp("tiny"), seed=5 * version) for version in range(3)}


def step_until_tokens(service: LocalService, tokens: int, *names: TrajectoryId) -> None:
    for name in names:
        record = service.record(name)
        service.step_until(lambda record=record: len(record.columns) >= tokens)  # type: ignore[misc]


def suspend(service: LocalService, keep: Keep, *names: TrajectoryId) -> None:
    service.abort(*names, keep=keep)
    for name in names:
        record = service.record(name)
        service.step_until(
            lambda record=record: record.phase is Phase.SUSPENDED and record.intent is None  # type: ignore[misc]
        )


def assert_nothing_is_left(service: LocalService) -> None:
    """Of weights that are not live, on any worker; and no page is lost."""
    assert service.free_pages() == [worker.engine.stats.device.total for worker in service.workers.values()]
    for worker in service.workers.values():
        worker.engine.expire()
        worker.engine.audit()
        live = {worker.engine._live.weights.weights_id}
        assert set(worker.engine._cache._tree._roots) <= live
        stats = worker.engine.stats
        assert (stats.parked, stats.host.private, stats.host.reserved) == (0, 0, 0)


def roll_out(service: LocalService, batch: list[list[int]], name: str) -> list[Trajectory]:
    for index, prompt in enumerate(batch):
        service.submit(f"{name}{index}", prompt, GREEDY)
    trajectories = service.run(len(batch))
    return [trajectories[TrajectoryId(f"{name}{index}/0")] for index in range(len(batch))]


def cold(path: Path, batch: list[list[int]]) -> list[Trajectory]:
    service = LocalService(path)
    trajectories = roll_out(service, batch, "cold")
    service.close()
    return trajectories


def assert_same(ours: list[Trajectory], truth: list[Trajectory]) -> None:
    assert [(t.output_ids, t.logprobs) for t in ours] == [(t.output_ids, t.logprobs) for t in truth]


def test_sixteen_prompts_cached_everywhere_reuse_nothing_old(paths: Paths) -> None:
    """In the tree and on the host, and four of them in the pool; then other weights of the same version, and the first
    again."""
    batch = prompts(16)
    expected = {version: cold(path, batch) for version, path in paths.items()}
    service = LocalService(paths[0], host=HOST, canary=True)
    assert_same(roll_out(service, batch, "old"), expected[0])
    pooled = [TrajectoryId(f"pooled{index}/0") for index in range(12, 16)]
    for index in range(12, 16):
        service.submit(f"pooled{index}", batch[index], GREEDY)
    step_until_tokens(service, 6, *pooled)
    suspend(service, Keep.POOL, *pooled)
    assert all(service.record(name).pooled.image is not None for name in pooled)
    assert all(worker.engine.stats.host.tree > 0 for worker in service.workers.values())

    def cached() -> int:
        return sum(worker.engine.stats.cached_tokens for worker in service.workers.values())

    for label, version in ((1, 1), (1, 2), (0, 0)):
        before, loaded, restores = cached(), service.core.counters.loaded_tokens, service.pool.restores
        service.update(paths[version], label)
        found = roll_out(service, batch, f"load-{version}-")
        assert_same(found, expected[version])
        assert all(version_column(trajectory) == [label] * 24 for trajectory in found)
        assert (cached(), service.core.counters.loaded_tokens, service.pool.restores) == (before, loaded, restores)
        found = roll_out(service, batch, f"again-{version}-")
        assert_same(found, expected[version])
        assert cached() > before, "of the new ones"
    service.resume(*pooled)
    ended = service.run(4)
    for name in pooled:
        assert_greedy_as_it_says({0: paths[0]}, ended[name])  # the last load of version 0 has the first one's values
        (resume,) = ended[name].resumes
        assert (resume.restored_tokens, resume.loaded_tokens) == (0, 0)
    for worker in service.workers.values():
        worker.engine.expire()
        assert len(worker.engine._cache._tree._roots) == 1
    service.close()


KEPT = {Keep.DEVICE: "cached_tokens", Keep.HOST: "loaded_tokens", Keep.POOL: "restored_tokens", Keep.NONE: ""}
PROMPT_TOKENS, BEFORE = 40, 13
KV = PROMPT_TOKENS + BEFORE - 1


@pytest.mark.parametrize(
    ("reuse", "updates", "reuses"),
    [(SAME, 1, False), (stale(1), 1, True), (stale(1), 2, False), (stale(2), 2, True), (stale(2), 0, True)],
    ids=["same_weights", "stale(1)", "stale(1), two updates", "stale(2), two updates", "no update"],
)
@pytest.mark.parametrize("keep", [Keep.DEVICE, Keep.HOST, Keep.POOL, Keep.NONE])
def test_suspended_under_old_weights_and_resumed_under_new_ones(
    paths: Paths, keep: Keep, reuse: dict[str, Any], updates: int, reuses: bool
) -> None:
    service = LocalService(paths[0], host=ON_HOST, kv_reuse=reuse, canary=True)
    service.submit("p", prompts(1, lengths=(PROMPT_TOKENS,))[0], GREEDY)
    step_until_tokens(service, BEFORE, NAME)
    suspend(service, keep, NAME)
    for version in range(1, updates + 1):
        service.update(paths[version], version)
    service.resume(NAME)
    trajectory = service.run(1)[NAME]
    (resume,) = trajectory.resumes
    counts = {name: getattr(resume, name) for name in ("cached_tokens", "loaded_tokens", "restored_tokens")}
    assert counts == {name: KV if reuses and name == KEPT[keep] else 0 for name in counts}
    reused = sum(counts.values())
    assert resume.recomputed_tokens == KV - reused
    assert version_column(trajectory) == [0] * BEFORE + [updates] * (GREEDY.max_new_tokens - BEFORE)
    first, end = KV + 1, PROMPT_TOKENS + GREEDY.max_new_tokens
    old = (PROMPT_TOKENS, first, [(0, PROMPT_TOKENS, 0)])
    mixed = [(0, KV, 0), (KV, first, updates)] if reused else [(0, first, updates)]
    assert spans(trajectory) == ([old, (first, end, mixed)] if updates else [(PROMPT_TOKENS, end, [(0, 40, 0)])])
    assert_greedy_as_it_says(paths, trajectory)
    assert_nothing_is_left_but(service, trajectory)
    service.close()


def assert_nothing_is_left_but(service: LocalService, trajectory: Trajectory) -> None:
    """What it finished with in the tree, where the first of its pages may be those of weights that are reusable."""
    assert service.free_pages() == [worker.engine.stats.device.total for worker in service.workers.values()]
    for worker in service.workers.values():
        worker.engine.expire()
        assert set(worker.engine._cache._tree._roots) <= worker.engine._live.reusable
        assert worker.engine.stats.parked == worker.engine.stats.host.private == 0


RUNNING = {"chunk_tokens": 16, "prefill_tokens": 32, "canary": True}


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 9, 15])
def test_running_ones_start_again_and_equal_hugging_face_on_the_new_weights(paths: Paths, steps: int) -> None:
    """In the middle of chunked prefills, and while they decode; two members of a group share their prompt."""
    service = LocalService(paths[0], workers=1, host=HOST, **RUNNING)
    names = [
        name for i, p in enumerate(prompts(3, lengths=(33, 70, 20))) for name in service.submit(f"p{i}", p, GREEDY)
    ]
    names += service.submit("group", prompts(1, lengths=(49,))[0], GREEDY, n=2)
    for _ in range(steps):
        service.step()
    said = {name: len(service.record(name).columns) for name in names}
    service.update(paths[1], 1)
    ended = service.run(4)
    for name in names:
        trajectory, before = ended[name], said[name]
        assert version_column(trajectory) == [0] * before + [1] * (24 - before)
        prompt = len(trajectory.prompt_ids)
        old = [(prompt, prompt + before, [(0, prompt, 0)])] if before else []
        assert spans(trajectory) == [*old, (prompt + before, prompt + 24, [(0, prompt + before, 1)])]
        assert_greedy_as_it_says(paths, trajectory)
    assert_nothing_is_left(service)
    service.close()


# What is under way at the moment of the update


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("aborted", [False, True])
def test_restores_in_flight_bring_nothing(paths: Paths, in_place: bool, aborted: bool) -> None:
    service = LocalService(paths[0], canary=True)
    service.submit("p", prompts(1, lengths=(PROMPT_TOKENS,))[0], GREEDY)
    step_until_tokens(service, BEFORE, NAME)
    suspend(service, Keep.POOL, NAME)
    service.pool.gate.clear()
    service.resume(NAME)
    service.step_until(lambda: service.pool.restores == 1)
    service.update(paths[1], 1, in_place=in_place)
    for _ in range(3):
        service.step()
    if aborted:
        service.abort(NAME)
    service.pool.gate.set()
    if aborted:
        service.step_until(lambda: service.phase(NAME) is Phase.SUSPENDED and service.record(NAME).intent is None)
        assert service.record(NAME).pooled.image is None
        service.resume(NAME)
    trajectory = service.run(1)[NAME]
    assert spans(trajectory)[1] == (53, 64, [(0, 53, 1)])
    assert [resume.restored_tokens for resume in trajectory.resumes] == [0] * len(trajectory.resumes)
    assert trajectory.resumes[-1].recomputed_tokens == KV
    assert_greedy_as_it_says(paths, trajectory)
    assert_nothing_is_left(service)
    service.close()


@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize("to", [Keep.HOST, Keep.DEVICE])
def test_copies_between_the_tiers_in_flight(
    paths: Paths, to: Keep, max_lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image that moves to the host, and one that is loaded by a sequence that goes on with it."""
    reuse = stale(1) if max_lag else SAME
    service = LocalService(paths[0], workers=1, host=ON_HOST, kv_reuse=reuse, canary=True)
    (worker,) = service.workers.values()
    service.submit("p", prompts(1, lengths=(PROMPT_TOKENS,))[0], GREEDY)
    step_until_tokens(service, BEFORE, NAME)
    gate, copy = threading.Event(), worker.storage.copy

    def slow(*args: Any) -> None:
        assert gate.wait(60)
        copy(*args)

    if to is Keep.DEVICE:
        suspend(service, Keep.HOST, NAME)
    monkeypatch.setattr(worker.storage, "copy", slow)
    if to is Keep.DEVICE:
        service.resume(NAME)
    else:
        service.abort(NAME, keep=Keep.HOST)
    service.step_until(lambda: worker.engine.copying)
    service.update(paths[1], 1)
    worker.engine.expire()
    for _ in range(3):
        service.step()
    gate.set()
    if to is Keep.HOST:
        service.step_until(lambda: service.phase(NAME) is Phase.SUSPENDED and service.record(NAME).intent is None)
        service.resume(NAME)
    trajectory = service.run(1)[NAME]
    (resume,) = trajectory.resumes
    # What runs or is about to starts again in an update, whatever may be reused.
    reused = KV if max_lag and to is Keep.HOST else 0
    assert (resume.cached_tokens, resume.loaded_tokens, resume.recomputed_tokens) == (0, reused, KV - reused)
    assert_greedy_as_it_says(paths, trajectory)
    if not max_lag:
        assert_nothing_is_left(service)
        assert worker.engine.stats.host.free == worker.engine.stats.host.total
    service.close()


@pytest.mark.parametrize("resumed", ["before", "after"])
@pytest.mark.parametrize("max_lag", [0, 1])
def test_exports_in_flight(paths: Paths, max_lag: int, resumed: str) -> None:
    """An abort's export is under way; it is of use, or not, when it is over."""
    service = LocalService(paths[0], kv_reuse=stale(1) if max_lag else SAME, canary=True)
    service.submit("p", prompts(1, lengths=(PROMPT_TOKENS,))[0], GREEDY)
    step_until_tokens(service, BEFORE, NAME)
    service.exports = []
    service.abort(NAME)
    service.step()
    (order,) = service.exports
    service.update(paths[1], 1)
    if resumed == "before":
        service.resume(NAME)
    for _ in range(3):
        service.step()
    service.exports = None
    service.export(order)
    service.step_until(lambda: service.phase(NAME) is not Phase.SUSPENDING)
    assert (service.record(NAME).pooled.image is not None) == bool(max_lag)
    if resumed == "after":
        service.resume(NAME)
    trajectory = service.run(1)[NAME]
    assert trajectory.resumes[-1].restored_tokens == (KV if max_lag else 0)
    assert_greedy_as_it_says(paths, trajectory)
    if not max_lag:
        assert_nothing_is_left(service)
    service.close()


# Deterministic


def told_to_begin_with(path: Path, trajectory: Trajectory, tokens: int, mode: dict[str, Any]) -> Columns:
    """What a cold service says after the first tokens of a trajectory."""
    service = LocalService(path, workers=1, **mode)
    (worker,) = service.workers.values()
    versions = [Version(0)] * tokens
    output = Columns(trajectory.output_ids[:tokens], trajectory.logprobs[:tokens], versions)
    worker.engine.submit(
        Assignment(
            trajectory_id=trajectory.trajectory_id,
            epoch=1,
            prompt_ids=trajectory.prompt_ids,
            output=output,
            sampling=WARM,
            seed=trajectory.seed,
            watch=Watch(),
            max_context=2048,
            image=None,
            kv_tokens=0,
        )
    )
    said, events = Columns(), []
    while not any(isinstance(event, Finished) for event in events):
        events = worker.engine.step()
        for event in events:
            if isinstance(event, Sampled):
                said.extend(event.columns)
    service.close()
    return said


WARM = SamplingParams(temperature=1.0, max_new_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("steps", [1, 9, 14])
@pytest.mark.parametrize("mode", [REPLAY, INVARIANT], ids=["replay", "invariant"])
def test_deterministically_what_follows_an_update_is_what_follows_these_tokens_on_a_cold_service(
    paths: Paths, mode: dict[str, Any], steps: int
) -> None:
    batch = prompts(3, lengths=(20, 45, 33))
    service = LocalService(paths[0], workers=1, canary=True, host=HOST, **mode)
    names = [name for index, prompt in enumerate(batch) for name in service.submit(f"p{index}", prompt, WARM)]
    for _ in range(steps):
        service.step()
    said = {name: len(service.record(name).columns) for name in names}
    service.update(paths[1], 1)
    ended = service.run(3)
    for name in names:
        trajectory, before = ended[name], said[name]
        assert version_column(trajectory) == [0] * before + [1] * (24 - before)
        truth = told_to_begin_with(paths[1], trajectory, before, mode)
        assert list(trajectory.output_ids[before:]) == list(truth.ids)
        assert list(trajectory.logprobs[before:]) == list(truth.logprobs)
    assert_nothing_is_left(service)
    service.close()
