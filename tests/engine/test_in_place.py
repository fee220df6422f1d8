"""Trajectories that go on in place when the weights are replaced: on KV of several weights, as Hugging Face has it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.engine.sequence import Sequence
from rollout.errors import CanaryError
from rollout.types import Keep, SamplingParams, Trajectory, TrajectoryId
from tests.engine.by_hand import assert_greedy_as_it_says, logprobs_NV, spans, version_column
from tests.engine.test_exactness import INVARIANT, REPLAY
from tests.engine.test_parity import prompts
from tests.engine.test_updates import (
    GREEDY,
    NAME,
    ON_HOST,
    RUNNING,
    Paths,
    assert_nothing_is_left_but,
    paths,
    stale,
    step_until_tokens,
    suspend,
)
from tests.local_service import LocalService

__all__ = ["paths"]  # the fixture

PAGE = 16
PROMPT_TOKENS = 40
(PROMPT,) = prompts(1, lengths=(PROMPT_TOKENS,))


def tree_pages(service: LocalService, weights: int) -> int:
    """Pages that the trees have of the first, second, … load of weights."""
    found = 0
    for worker in service.workers.values():
        roots = list(worker.engine._cache._tree._roots.items())
        names = [name for name, _ in roots if name == ("weights" if not weights else f"load {weights - 1}")]
        stack = [child for name, root in roots if name in names for child in root.children.values()]
        while stack:
            node = stack.pop()
            found += len(node.edge) // (4 * PAGE)
            stack += node.children.values()
    return found


@pytest.mark.parametrize("steps", [5, 9, 15, 20])
def test_a_batch_goes_on_as_hugging_face_does_on_the_old_kv(paths: Paths, steps: int) -> None:
    service = LocalService(paths[0], workers=1, kv_reuse=stale(1), **RUNNING)
    names = [n for i, p in enumerate(prompts(3, lengths=(33, 47, 20))) for n in service.submit(f"p{i}", p, GREEDY)]
    names += service.submit("group", prompts(1, lengths=(49,))[0], GREEDY, n=2)
    for _ in range(steps):
        service.step()
    said = {name: len(service.record(name).columns) for name in names}
    service.update(paths[1], 1, in_place=True)
    ended = service.run(4)
    assert service.core.counters.recomputed_tokens == 0
    went_on = 0
    for name in names:
        trajectory, before = ended[name], said[name]
        assert version_column(trajectory) == [0] * before + [1] * (24 - before)
        if 0 < before < 24:
            went_on += 1
            prompt = len(trajectory.prompt_ids)
            at = prompt + before
            assert spans(trajectory)[1] == (at, prompt + 24, [(0, at - 1, 0), (at - 1, at, 1)])
        if before:
            assert_greedy_as_it_says(paths, trajectory)
    assert went_on >= 1
    assert_nothing_is_left_but(service, trajectory)
    service.close()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_in_the_middle_of_a_prompt_the_new_weights_go_on_from_the_old_ones_chunks(paths: Paths, steps: int) -> None:
    service = LocalService(paths[0], workers=1, kv_reuse=stale(1), **RUNNING)
    (prompt,) = prompts(1, lengths=(70,))
    service.submit("p", prompt, GREEDY)
    for _ in range(steps):
        service.step()
    service.update(paths[1], 1, in_place=True)
    trajectory = service.run(1)[NAME]
    ids, old = [*prompt, *trajectory.output_ids], 16 * steps
    said = logprobs_NV(ids[:-1], [(paths[0], old), (paths[1], len(ids) - 1 - old)])[69:]
    assert said.argmax(-1).tolist() == list(trajectory.output_ids)
    assert trajectory.logprobs == pytest.approx(said.max(-1).values.tolist(), abs=1e-4)
    assert (tree_pages(service, 0), tree_pages(service, 1)) == (old // PAGE, 0)
    service.close()


def test_the_result_names_the_old_ones_chunks(paths: Paths) -> None:
    service = LocalService(paths[0], workers=1, kv_reuse=stale(1), **RUNNING)
    service.submit("p", prompts(1, lengths=(70,))[0], GREEDY)
    service.step()
    service.update(paths[1], 1, in_place=True)
    trajectory = service.run(1)[NAME]
    service.close()
    assert spans(trajectory) == [(70, 94, [(0, 16, 0), (16, 70, 1)])]


def test_the_result_names_what_was_replayed_by_the_old_ones(paths: Paths) -> None:
    """Deterministically, with kernels whose bits depend on the batch: tokens are decoded again one by one."""
    service = LocalService(paths[0], workers=1, kv_reuse=stale(1), canary=True, **REPLAY)
    service.submit("p", PROMPT, GREEDY)
    step_until_tokens(service, 12, NAME)
    suspend(service, Keep.NONE, NAME)
    service.resume(NAME)
    (worker,) = service.workers.values()
    decoded = worker.engine.stats.decoded_tokens
    service.step_until(lambda: worker.engine.stats.decoded_tokens == decoded + 5)
    service.update(paths[1], 1, in_place=True)
    trajectory = service.run(1)[NAME]
    service.close()
    assert spans(trajectory)[1:] == [(52, 64, [(0, 45, 0), (45, 52, 1)])]
    assert_greedy_as_it_says(paths, trajectory)


BEFORE, MORE = 4, 16
"""Tokens before the update, and before the trajectory is suspended."""
OLD = PROMPT_TOKENS + BEFORE - 1
KV = PROMPT_TOKENS + BEFORE + MORE - 1


def mixed(paths: Paths, max_lag: int = 1, **engine: Any) -> LocalService:
    """A trajectory that went on in place, for some tokens."""
    service = LocalService(paths[0], host=ON_HOST, kv_reuse=stale(max_lag), canary=True, **(INVARIANT | engine))
    service.submit("p", PROMPT, GREEDY)
    step_until_tokens(service, BEFORE, NAME)
    service.update(paths[1], 1, in_place=True)
    step_until_tokens(service, BEFORE + MORE, NAME)
    return service


def uninterrupted(paths: Paths) -> Trajectory:
    service = mixed(paths)
    trajectory = service.run(1)[NAME]
    service.close()
    assert_greedy_as_it_says(paths, trajectory)
    return trajectory


COUNTS = {Keep.DEVICE: (KV, 0, 0), Keep.HOST: (0, KV, 0), Keep.POOL: (0, 0, KV)}


@pytest.mark.parametrize("second", [Keep.DEVICE, Keep.HOST, Keep.POOL])
@pytest.mark.parametrize("first", [Keep.DEVICE, Keep.HOST, Keep.POOL])
def test_an_image_of_several_weights_resumes_as_if_nothing_had_been(paths: Paths, first: Keep, second: Keep) -> None:
    """Kept where it is told, sent elsewhere, and resumed: from the pool on the other worker."""
    truth = uninterrupted(paths)
    service = mixed(paths)
    suspend(service, first, NAME)
    tail = -(-KV // PAGE) - OLD // PAGE
    if first is not Keep.POOL:
        stats = [worker.engine.stats for worker in service.workers.values()]
        assert sum((each.host if first is Keep.HOST else each.device).private for each in stats) == tail == 2
    suspend(service, second, NAME)
    service.resume(NAME)
    trajectory = service.run(1)[NAME]
    (resume,) = trajectory.resumes
    assert (resume.cached_tokens, resume.loaded_tokens, resume.restored_tokens) == COUNTS[second]
    assert resume.recomputed_tokens == 0
    assert (trajectory.output_ids, trajectory.logprobs) == (truth.output_ids, truth.logprobs)
    assert_greedy_as_it_says(paths, trajectory)
    at, end = PROMPT_TOKENS + BEFORE, PROMPT_TOKENS + GREEDY.max_new_tokens
    assert spans(trajectory) == [
        (PROMPT_TOKENS, at, [(0, PROMPT_TOKENS, 0)]),
        (at, end, [(0, OLD, 0), (OLD, at, 1)]),
    ]
    assert tree_pages(service, 1) == 0
    assert_nothing_is_left_but(service, trajectory)
    service.close()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("max_lag", "reuses"), [(1, False), (2, True)])
@pytest.mark.parametrize("keep", [Keep.DEVICE, Keep.HOST, Keep.POOL])
def test_under_third_weights_an_image_of_the_first_two_is_used_if_the_first_may_be(
    paths: Paths, keep: Keep, max_lag: int, reuses: bool, in_place: bool
) -> None:
    service = mixed(paths, max_lag)
    suspend(service, keep, NAME)
    service.update(paths[2], 2, in_place=in_place)
    service.resume(NAME)
    trajectory = service.run(1)[NAME]
    (resume,) = trajectory.resumes
    found = (resume.cached_tokens, resume.loaded_tokens, resume.restored_tokens)
    assert (*found, resume.recomputed_tokens) == ((*COUNTS[keep], 0) if reuses else (0, 0, 0, KV))
    at, end = KV + 1, PROMPT_TOKENS + GREEDY.max_new_tokens
    kv = [(0, OLD, 0), (OLD, KV, 1), (KV, at, 2)] if reuses else [(0, at, 2)]
    assert spans(trajectory)[-1] == (at, end, kv)
    assert_greedy_as_it_says(paths, trajectory)
    assert_nothing_is_left_but(service, trajectory)
    service.close()


@pytest.mark.parametrize(("max_lag", "reuses"), [(1, False), (2, True)])
def test_running_under_third_weights_it_goes_on_if_the_first_may_be_used(
    paths: Paths, max_lag: int, reuses: bool
) -> None:
    service = mixed(paths, max_lag)
    service.update(paths[2], 2, in_place=True)
    trajectory = service.run(1)[NAME]
    at, end = KV + 1, PROMPT_TOKENS + GREEDY.max_new_tokens
    kv = [(0, OLD, 0), (OLD, KV, 1), (KV, at, 2)] if reuses else [(0, at, 2)]
    assert spans(trajectory)[-1] == (at, end, kv)
    assert_greedy_as_it_says(paths, trajectory)
    service.close()


@pytest.mark.parametrize("earlier", [False, True])
def test_what_runs_is_computed_again_without_its_earlier_image_unless_it_goes_on_in_place(
    paths: Paths, earlier: bool
) -> None:
    """Old KV may be used; but what runs is told to begin again, be its image still in the pool or not."""
    service = LocalService(paths[0], host=ON_HOST, kv_reuse=stale(1), canary=True)
    service.submit("p", PROMPT, GREEDY)
    step_until_tokens(service, BEFORE, NAME)
    if earlier:
        suspend(service, Keep.POOL, NAME)
        service.resume(NAME)
    step_until_tokens(service, BEFORE + MORE, NAME)
    service.update(paths[1], 1)
    trajectory = service.run(1)[NAME]
    assert spans(trajectory)[-1] == (KV + 1, 64, [(0, KV + 1, 1)])
    assert_greedy_as_it_says(paths, trajectory)
    service.close()


def test_what_is_being_restored_goes_on_in_place(paths: Paths) -> None:
    service = LocalService(paths[0], kv_reuse=stale(1), canary=True)
    service.submit("p", PROMPT, GREEDY)
    step_until_tokens(service, BEFORE, NAME)
    suspend(service, Keep.POOL, NAME)
    service.pool.gate.clear()
    service.resume(NAME)
    service.step_until(lambda: service.pool.restores == 1)
    service.update(paths[1], 1, in_place=True)
    service.step()
    service.pool.gate.set()
    trajectory = service.run(1)[NAME]
    (resume,) = trajectory.resumes
    assert (resume.restored_tokens, resume.recomputed_tokens) == (OLD, 0)
    assert spans(trajectory)[1:] == [(OLD + 1, 64, [(0, OLD, 0), (OLD, OLD + 1, 1)])]
    assert_greedy_as_it_says(paths, trajectory)
    assert_nothing_is_left_but(service, trajectory)
    service.close()


# Whose pages these are


def nearly(path: Path, out: Path) -> Path:
    """The same model but for a hair: it says the same, on other KV."""
    out.mkdir()
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
            continue
        generator = torch.Generator().manual_seed(7)
        tensors = load_file(file)
        for tensor in tensors.values():
            tensor.mul_(1 + 1e-4 * torch.randn(tensor.shape, generator=generator))
        save_file(tensors, out / file.name, metadata={"format": "pt"})
    return out


def two_members(old: Path, new: Path) -> LocalService:
    """Of one group, with the same tokens: one is suspended with much of the old weights' KV, the other went on in place
    long before it had that, and is over."""
    service = LocalService(old, workers=1, kv_reuse=stale(1), canary=True)
    params = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    early, late = service.submit("g", PROMPT, params, n=2)
    step_until_tokens(service, 2, early, late)
    suspend(service, Keep.POOL, early)
    step_until_tokens(service, 38, late)
    suspend(service, Keep.POOL, late)
    service.resume(early)
    step_until_tokens(service, 3, early)
    service.update(new, 1, in_place=True)
    step_until_tokens(service, 39, early)
    suspend(service, Keep.DEVICE, early)
    service.resume(late)
    return service


def test_no_page_of_several_weights_is_another_members(paths: Paths, tmp_path: Path) -> None:
    service = two_members(paths[0], nearly(paths[0], tmp_path / "nearly"))
    early, late = (TrajectoryId(f"g/{index}") for index in range(2))
    service.step_until(lambda: service.core.resolve([late])[0][0].over)
    ours = [service.snapshot(name) for name in (early, late)]
    assert ours[0].output_ids[:39] == ours[1].output_ids[:39]
    assert ours[0].logprobs[10:39] != ours[1].logprobs[10:39]
    (resume,) = ours[1].resumes
    assert (resume.cached_tokens, resume.restored_tokens) == (PROMPT_TOKENS // PAGE * PAGE, 45)
    service.close()


def test_if_one_were_the_canary_would_see_it(paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "shareable_end", property(lambda self: self.computed // PAGE * PAGE))
    service = two_members(paths[0], nearly(paths[0], tmp_path / "nearly"))
    with pytest.raises(CanaryError):
        service.run(1)
    service.close()
