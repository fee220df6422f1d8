"""Resumed = uninterrupted, bit for bit, in deterministic mode at temperature 1: ids and log-probabilities."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.control.commands import Assignment, Watch
from rollout.control.messages import Finished
from rollout.types import Columns, Keep, Phase, SamplingParams, Trajectory, TrajectoryId
from tests.engine.test_parity import prompts
from tests.local_service import LocalService
from tests.tiny_models import make_tiny_llama, make_tiny_qwen2

CHUNK = 32
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=30, ignore_eos=True)
REPLAY: dict[str, Any] = {"kernels": "torch", "deterministic": True, "chunk_tokens": CHUNK}
"""Bits depend on the batch: it is padded, and what was decoded is decoded again."""
INVARIANT: dict[str, Any] = {"kernels": "native", "deterministic": True, "chunk_tokens": CHUNK}
"""Bits depend on the sequence only."""
both = pytest.mark.parametrize("mode", [REPLAY, INVARIANT], ids=["replay", "invariant"])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def roll_out(
    path: Path, prompts: list[list[int]], *, n: int = 1, params: SamplingParams = PARAMS, **service
) -> tuple[dict[TrajectoryId, Trajectory], LocalService]:
    local = LocalService(path, **(REPLAY | service))
    for index, prompt in enumerate(prompts):
        local.submit(f"p{index}", prompt, params, n=n)
    trajectories = local.run(len(prompts))
    local.close()
    return trajectories, local


def assert_same(ours: Mapping[TrajectoryId, Trajectory], truth: Mapping[TrajectoryId, Trajectory]) -> None:
    assert ours.keys() == truth.keys()
    for key, trajectory in ours.items():
        assert trajectory.output_ids == truth[key].output_ids, key
        assert trajectory.logprobs == truth[key].logprobs, key
        assert trajectory.finish_reason == truth[key].finish_reason, key


@both
@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_qwen2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_suspended_on_one_worker_and_resumed_on_another(tmp_path: Path, make, dtype: str, mode: dict[str, Any]) -> None:
    path = make(tmp_path)
    truth, _ = roll_out(path, prompts(6), n=2, workers=1, dtype=dtype, **mode)
    ours, service = roll_out(path, prompts(6), n=2, slice_tokens=7, dtype=dtype, **mode)
    assert_same(ours, truth)
    counters = service.core.counters
    assert counters.suspensions == 12 * 4
    assert counters.resumed_elsewhere > 20
    assert counters.recomputed_tokens == 0
    assert counters.exclusive_pages == counters.freed_pages > 0
    assert all(resume.restored_tokens > 0 for trajectory in ours.values() for resume in trajectory.resumes)


def test_restores_prefill_nothing(path: Path) -> None:
    """Case C13: what prefill wrote is the first start of each trajectory and no more."""
    _, service = roll_out(path, prompts(6), slice_tokens=7)
    prefilled = sum(worker.engine.stats.prefilled_tokens for worker in service.workers.values())
    assert prefilled == sum(len(prompt) for prompt in prompts(6))
    decoded = sum(worker.engine.stats.decoded_tokens for worker in service.workers.values())
    assert decoded == 6 * (PARAMS.max_new_tokens - 1)


@both
def test_batch_composition_does_not_matter(path: Path, mode: dict[str, Any]) -> None:
    alone = {}
    for index, prompt in enumerate(prompts(6)):
        service = LocalService(path, workers=1, **mode)
        service.submit(f"p{index}", prompt, PARAMS)
        alone |= service.run(1)
        service.close()
    together, _ = roll_out(path, prompts(6), workers=1, **mode)
    assert_same(together, alone)


def test_where_prefill_is_cut_and_how_many_threads_run_does_not_matter_to_invariant_kernels(path: Path) -> None:
    truth, _ = roll_out(path, prompts(6), n=2, workers=1, **INVARIANT)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for sizes in ({"chunk_tokens": 5}, {"chunk_tokens": 64, "prefill_tokens": 7}, {"page_tokens": 4}):
            ours, _ = roll_out(path, prompts(6), n=2, slice_tokens=9, **(INVARIANT | sizes))
            assert_same(ours, truth)
    finally:
        torch.set_num_threads(before)


@both
@pytest.mark.parametrize("slice_tokens", [None, 20])
def test_preemption_is_exact(path: Path, slice_tokens: int | None, mode: dict[str, Any]) -> None:
    """Seven pages for four sequences that start with one page and end with three."""
    batch = prompts(6, lengths=(15,))
    truth, _ = roll_out(path, batch, workers=1, **mode)
    ours, service = roll_out(path, batch, workers=1, kv_bytes=8 * 16 * 512, slice_tokens=slice_tokens, **mode)
    assert service.workers["w0"].engine.stats.preemptions > 0
    assert service.core.counters.recomputed_tokens > 0
    assert_same(ours, truth)


@both
def test_dropped_kv_is_recomputed_exactly(path: Path, mode: dict[str, Any]) -> None:
    truth, _ = roll_out(path, prompts(4), workers=1, **mode)
    ours, service = roll_out(path, prompts(4), slice_tokens=7, keep=Keep.NONE, **mode)
    assert_same(ours, truth)
    assert service.core.counters.recomputed_tokens > 0
    assert service.pool.restores == 0


@both
def test_shared_prompts_of_every_length_modulo_the_chunk(path: Path, mode: dict[str, Any]) -> None:
    """Groups share prefixes through the tree, in whole chunks only, and are suspended on top."""
    (stem,) = prompts(1, lengths=(2 * CHUNK,))
    params = SamplingParams(temperature=1.0, max_new_tokens=5, ignore_eos=True)
    lengths = range(CHUNK, 2 * CHUNK + 1)
    truth = {}
    for index, length in enumerate(lengths):
        service = LocalService(path, workers=1, **mode)
        service.submit(f"p{index}", stem[:length], params, n=2)
        truth |= service.run(1)
        service.close()
    ours, service = roll_out(path, [stem[:length] for length in lengths], n=2, params=params, slice_tokens=3, **mode)
    assert sum(worker.engine.stats.cached_tokens for worker in service.workers.values()) > CHUNK * len(lengths)
    assert_same(ours, truth)


@both
@pytest.mark.parametrize("local", ["nothing", "shorter", "equal", "longer"])
def test_suspension_at_every_length_modulo_the_page(path: Path, local: str, mode: dict[str, Any]) -> None:
    """Case C5: restored onto a local prefix shorter than, equal to and longer than the tail's start."""
    page = 16
    (stem,) = prompts(1, lengths=(4 * page,))
    params = SamplingParams(temperature=1.0, max_new_tokens=4 + page, ignore_eos=True)
    replays = mode is REPLAY
    mode = mode | {"chunk_tokens": page}
    truth, _ = roll_out(path, [stem[: 2 * page]], params=params, workers=1, **mode)
    (uninterrupted,) = truth.values()
    for tokens in range(1, page + 2):  # KV ends at 2 * page … 3 * page
        service = LocalService(path, **mode)
        (trajectory,) = service.submit("p0", stem[: 2 * page], params)
        _suspend_at(service, trajectory, tokens)
        known = [*stem[: 2 * page], *service.snapshot(trajectory).output_ids]
        prefix = {"nothing": [], "shorter": known[:page], "equal": known[: 2 * page], "longer": [*known, 7]}[local]
        if prefix:
            _warm(service, "w1", prefix)
        service.resume(trajectory)
        ours = service.run(1)["p0/0"]
        assert ours.output_ids == uninterrupted.output_ids
        assert ours.logprobs == uninterrupted.logprobs
        (resume,) = ours.resumes
        assert resume.worker == "w1"
        assert resume.recomputed_tokens == 0
        kv_tokens = 2 * page + tokens - 1
        # Where history is replayed only the prompt may come from there: output KV is never written by prefill.
        reusable = 2 * page if replays else kv_tokens // page * page
        assert resume.cached_tokens == min(len(prefix) // page * page, reusable)
        assert resume.cached_tokens + resume.restored_tokens == kv_tokens
        service.close()


def _suspend_at(service: LocalService, trajectory: TrajectoryId, tokens: int) -> None:
    """Abort with `hold` after so many new tokens."""
    service.step_until(lambda: len(service.snapshot(trajectory).output_ids) == tokens)
    service.abort(trajectory)
    service.step_until(lambda: service.phase(trajectory) is Phase.SUSPENDED)


def _warm(service: LocalService, worker: str, prompt: list[int]) -> None:
    """Put a prompt into one worker's prefix tree, behind the controller's back."""
    assignment = Assignment(
        trajectory_id=TrajectoryId("warm"),
        epoch=1,
        prompt_ids=tuple(prompt),
        output=Columns(),
        sampling=SamplingParams(max_new_tokens=1),
        seed=0,
        watch=Watch(),
        max_context=2048,
        image=None,
        kv_tokens=0,
    )
    engine = service.workers[worker].engine
    engine.submit(assignment)
    while not any(isinstance(event, Finished) for event in engine.step()):
        pass
