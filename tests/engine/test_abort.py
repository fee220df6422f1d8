"""Aborts in every stage give the exact tokens so far, leak no page, and the rest of the run is as if alone."""

import hashlib
from pathlib import Path

import pytest

from rollout.control.messages import Preempted
from rollout.types import FinishReason, Keep, Phase, SamplingParams, Then, Trajectory, TrajectoryId
from tests.engine.test_parity import prompts
from tests.local_service import LocalService
from tests.tiny_models import make_tiny_llama

CHUNK = 16
PARAMS = SamplingParams(temperature=0.8, max_new_tokens=20, ignore_eos=True)
DETERMINISTIC = {"kernels": "torch", "deterministic": True, "chunk_tokens": CHUNK, "prefill_tokens": CHUNK}
(PROMPT,) = prompts(1, lengths=(4 * CHUNK + 5,))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def truth(path: Path) -> Trajectory:
    """The trajectory of PROMPT, uninterrupted."""
    service = LocalService(path, workers=1, **DETERMINISTIC)
    service.submit("p", PROMPT, PARAMS)
    (trajectory,) = service.run(1).values()
    service.close()
    return trajectory


def started(path: Path, **engine) -> LocalService:
    service = LocalService(path, **(DETERMINISTIC | engine))
    service.submit("p", PROMPT, PARAMS)
    return service


def assert_exact_partial_then_exact_end(service: LocalService, truth: Trajectory, tokens: int | None = None) -> None:
    """The suspended trajectory holds a prefix of the truth; pages are back; resumed, it ends as the truth."""
    (trajectory,) = service.core.resolve(["p"])[0]
    service.step_until(lambda: trajectory.phase is Phase.SUSPENDED)
    service.step_until(lambda: all(w.engine.idle for w in service.workers.values()))
    partial = trajectory.snapshot()
    count = len(partial.output_ids)
    assert tokens is None or count == tokens
    assert (partial.output_ids, partial.logprobs) == (truth.output_ids[:count], truth.logprobs[:count])
    assert sum(run.tokens for run in partial.versions) == count
    assert service.free_pages() == [w.engine.stats.device.total for w in service.workers.values()]
    service.resume(trajectory.trajectory_id)
    (ended,) = service.run(1).values()
    assert (ended.output_ids, ended.logprobs) == (truth.output_ids, truth.logprobs)
    assert ended.finish_reason is FinishReason.LENGTH
    service.close()


@pytest.mark.parametrize("keep", [Keep.POOL, Keep.NONE])
@pytest.mark.parametrize("steps", range(12))
def test_abort_before_and_in_every_chunk_of_the_prefill_and_while_decoding(
    path: Path, truth: Trajectory, steps: int, keep: Keep
) -> None:
    """Cases A1, A2, A4: after 0 steps nothing has reached the engine's batch, 1 to 4 are chunks, 5 is the last."""
    service = started(path)
    for _ in range(steps):
        service.step()
    service.abort("p/0", keep=keep)
    assert_exact_partial_then_exact_end(service, truth, tokens=max(0, steps - 4))


def test_abort_of_what_is_queued_behind_full_workers(path: Path, truth: Trajectory) -> None:
    service = LocalService(path, workers=1, **(DETERMINISTIC | {"max_running": 1}))
    service.submit("other", PROMPT, PARAMS)
    service.submit("p", PROMPT, PARAMS)
    assert service.phase("p/0") is Phase.QUEUED
    service.abort("p/0")
    assert service.phase("p/0") is Phase.SUSPENDED
    service.run(1)
    service.resume("p/0")
    (ended,) = service.run(1).values()
    assert ended.output_ids == uninterrupted(path, "p", max_running=1).output_ids
    service.close()


def uninterrupted(path: Path, key: str, **engine) -> Trajectory:
    service = LocalService(path, workers=1, **(DETERMINISTIC | engine))
    service.submit(key, PROMPT, PARAMS)
    (trajectory,) = service.run(1).values()
    service.close()
    return trajectory


def test_abort_of_a_preempted_sequence(path: Path) -> None:
    short = prompts(4, lengths=(15,))
    service = LocalService(path, workers=1, **(DETERMINISTIC | {"kv_bytes": 8 * 16 * 512}))
    for index, prompt in enumerate(short):
        service.submit(f"p{index}", prompt, PARAMS)
    service.step_until(lambda: any(isinstance(event, Preempted) for event in service.log))
    victim = next(event.trajectory_id for event in service.log if isinstance(event, Preempted))
    assert service.phase(victim) is Phase.PREEMPTED
    service.abort(victim)
    service.step_until(lambda: service.phase(victim) is Phase.SUSPENDED)
    assert len(service.snapshot(victim).output_ids) > 0
    rest = service.run(3)
    service.resume(victim)
    rest |= service.run(1)
    alone = LocalService(path, workers=1, **DETERMINISTIC)
    for index, prompt in enumerate(short):
        alone.submit(f"p{index}", prompt, PARAMS)
    for key, trajectory in alone.run(4).items():
        assert rest[key].output_ids == trajectory.output_ids
        assert rest[key].logprobs == trajectory.logprobs
    assert service.free_pages() == [7]
    for each in (service, alone):
        each.close()


def test_second_abort_during_the_export_changes_only_the_outcome(path: Path, truth: Trajectory) -> None:
    service = started(path)
    service.exports = []
    service.step_until(lambda: len(service.snapshot("p/0").output_ids) == 7)
    service.abort("p/0", then=Then.REQUEUE)
    service.step_until(lambda: service.phase("p/0") is Phase.SUSPENDING)
    service.abort("p/0", then=Then.HOLD)
    (order,) = service.exports
    service.exports = None
    service.export(order)
    assert service.phase("p/0") is Phase.SUSPENDED
    assert_exact_partial_then_exact_end(service, truth, tokens=7)


def test_abort_of_what_is_offloaded(path: Path, truth: Trajectory) -> None:
    service = started(path)
    service.step_until(lambda: len(service.snapshot("p/0").output_ids) == 3)
    service.abort("p/0")
    service.step_until(lambda: service.phase("p/0") is Phase.SUSPENDED)
    service.abort("p/0", keep=Keep.NONE)
    assert_exact_partial_then_exact_end(service, truth, tokens=3)


def test_abort_during_the_restore(path: Path, truth: Trajectory) -> None:
    service = started(path)
    service.step_until(lambda: len(service.snapshot("p/0").output_ids) == 9)
    service.abort("p/0")
    service.step_until(lambda: service.phase("p/0") is Phase.SUSPENDED)
    service.pool.gate.clear()
    service.resume("p/0")
    service.step()
    assert service.phase("p/0") is Phase.RESTORING
    assert sum(w.engine.stats.device.reserved for w in service.workers.values()) > 0
    service.abort("p/0")
    service.step()
    assert service.phase("p/0") is Phase.RESTORING  # the copy goes on; its pages are not given away
    service.pool.gate.set()
    assert_exact_partial_then_exact_end(service, truth, tokens=9)


def test_a_name_that_starts_like_another_is_not_aborted_with_it(path: Path) -> None:
    """Case A3."""
    service = LocalService(path, **DETERMINISTIC)
    for key in ("job-1", "job-10"):
        service.submit(key, PROMPT, PARAMS)
    for _ in range(7):
        service.step()
    service.abort("job-1/0")
    (ended,) = service.run(1).values()
    assert ended.trajectory_id == "job-10/0"
    alone = uninterrupted(path, "job-10")
    assert (ended.output_ids, ended.logprobs) == (alone.output_ids, alone.logprobs)
    service.close()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("abort_first", [True, False])
def test_finish_and_abort_in_the_same_step(path: Path, truth: Trajectory, abort_first: bool, times: int) -> None:
    """Case A5: one result, no double free; what has completed is reported as completed."""
    service = started(path, max_running=1)
    last = len(truth.output_ids) - 1
    service.step_until(lambda: len(service.snapshot("p/0").output_ids) == last)
    if abort_first:
        for _ in range(times):
            service.abort("p/0", then=Then.FINISH)
    worker = service.workers[service.snapshot("p/0").workers[-1]]
    if not abort_first:
        service.step()
        for _ in range(times):
            service.abort("p/0", then=Then.FINISH)
            worker.engine.abort(("p/0", 1))
            worker.engine.release(("p/0", 1))
    (ended,) = service.run(1).values()
    assert ended.finish_reason is (FinishReason.ABORT if abort_first else FinishReason.LENGTH)
    assert ended.output_ids == truth.output_ids[: last if abort_first else last + 1]
    assert service.take(5) == []
    assert service.free_pages() == [w.engine.stats.device.total for w in service.workers.values()]
    service.close()


@pytest.mark.parametrize("slice_tokens", [1, 2, 3, 7])
def test_budget_holds_over_any_number_of_suspensions(path: Path, truth: Trajectory, slice_tokens: int) -> None:
    """Case B1."""
    service = LocalService(path, slice_tokens=slice_tokens, **DETERMINISTIC)
    service.submit("p", PROMPT, PARAMS)
    (ended,) = service.run(1).values()
    assert ended.output_ids == truth.output_ids
    assert len(ended.output_ids) == PARAMS.max_new_tokens
    assert ended.finish_reason is FinishReason.LENGTH
    service.close()


def test_a_budget_of_nothing_touches_no_engine(path: Path) -> None:
    service = LocalService(path, workers=1)
    service.submit("p", PROMPT, SamplingParams(max_new_tokens=0))
    (ended,) = service.run(1).values()
    assert (ended.output_ids, ended.finish_reason, ended.workers) == ((), FinishReason.LENGTH, ())
    service.close()


def test_resume_at_one_token_before_the_end_of_the_context(path: Path) -> None:
    """Case B2."""
    limit = len(PROMPT) + 8
    params = SamplingParams(temperature=0.8, max_new_tokens=100, ignore_eos=True)
    service = LocalService(path, max_context_tokens=limit, **DETERMINISTIC)
    service.submit("p", PROMPT, params)
    service.step_until(lambda: len(service.snapshot("p/0").output_ids) == 7)
    service.abort("p/0")
    service.step_until(lambda: service.phase("p/0") is Phase.SUSPENDED)
    service.resume("p/0")
    (ended,) = service.run(1).values()
    assert len(ended.output_ids) == 8
    assert ended.finish_reason is FinishReason.LENGTH
    assert ended.resumes[0].restored_tokens + ended.resumes[0].cached_tokens == limit - 2
    service.close()


def test_columns_stay_aligned_after_every_suspension(path: Path) -> None:
    """Case B3."""
    service = LocalService(path, slice_tokens=3, **DETERMINISTIC)
    (trajectory,) = service.submit("p", PROMPT, PARAMS)
    record = service.record(trajectory)
    while not record.over:
        service.step()
        snapshot = record.snapshot()
        count = len(snapshot.output_ids)
        assert len(snapshot.logprobs) == sum(run.tokens for run in snapshot.versions) == count
    assert record.suspensions == 6
    service.close()


def test_64_aborts_in_one_step_hash_no_page_that_was_hashed_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case A8: pages are named as they are completed, so that many aborts at once hold nobody up with hashing."""
    service = LocalService(path, workers=1, max_running=64, kv_bytes=64 << 20)
    for index, prompt in enumerate(prompts(64, lengths=(200,))):
        service.submit(f"p{index}", prompt, SamplingParams(max_new_tokens=64, ignore_eos=True))
    names = [TrajectoryId(f"p{index}/0") for index in range(64)]
    service.step_until(lambda: all(len(service.record(name).columns) >= 20 for name in names))
    hashed: list[bytes] = []
    blake2b = hashlib.blake2b

    def counting(data: bytes, **sizes: int) -> object:
        hashed.append(data)
        return blake2b(data, **sizes)

    monkeypatch.setattr("rollout.kv.keys.hashlib.blake2b", counting)
    service.abort(*names, keep=Keep.DEVICE)
    assert hashed == []
    service.step_until(lambda: all(service.phase(name) is Phase.SUSPENDED for name in names))
    assert hashed == []
    assert all(len(service.record(name).columns) < 64 for name in names)
    service.close()
