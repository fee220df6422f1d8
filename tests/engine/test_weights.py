"""Case D1: under new weights nothing that old ones computed is found, in the tree, on the host or by name in a pool."""

from pathlib import Path

import pytest

from rollout.control.messages import Parked
from rollout.types import Keep, SamplingParams, Trajectory, TrajectoryId
from tests.engine.test_parity import prompts
from tests.local_service import LocalService
from tests.tiny_models import make_tiny_llama

PARAMS = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
(PROMPT,) = prompts(1, lengths=(70,))
HOST = {"bytes": 1 << 20, "write": {"kind": "write_through"}, "load_back_tokens": 0}


def roll_out(service: LocalService, key: str) -> Trajectory:
    service.submit(key, PROMPT, PARAMS)
    return service.run(1)[TrajectoryId(f"{key}/0")]


def parked_keys(service: LocalService, key: str) -> set[bytes]:
    """Names of the pages of a trajectory of the prompt, stopped."""
    service.submit(key, PROMPT, PARAMS)
    name = TrajectoryId(f"{key}/0")
    service.step_until(lambda: len(service.record(name).columns) >= 12)
    service.abort(name, keep=Keep.NONE)
    service.step_until(lambda: service.record(name).intent is None)
    events = [event for event in service.log if isinstance(event, Parked) and event.trajectory_id == name]
    return set(events[-1].page_keys)


@pytest.mark.parametrize("length", [5, 30])
@pytest.mark.parametrize("keep", [Keep.DEVICE, Keep.HOST])
def test_what_a_trajectory_left_under_old_weights_is_not_used(tmp_path: Path, keep: Keep, length: int) -> None:
    """Case D2, without a choice: recomputed."""
    old, new = make_tiny_llama(tmp_path / "old"), make_tiny_llama(tmp_path / "new", seed=5)
    service = LocalService(old, workers=1, host=HOST, canary=True)
    name = TrajectoryId("p/0")
    service.submit("p", PROMPT[:length], PARAMS)
    service.step_until(lambda: len(service.record(name).columns) >= 6)
    service.abort(name, keep=keep)
    service.step_until(lambda: service.record(name).home is not None)
    service.update(new, 1)
    service.resume(name)
    (resume,) = service.run(1)[name].resumes
    assert (resume.cached_tokens, resume.loaded_tokens) == (0, 0)
    assert resume.recomputed_tokens >= length
    assert all(worker.engine.stats.parked == 0 for worker in service.workers.values())
    assert service.free_pages() == [worker.engine.stats.device.total for worker in service.workers.values()]
    service.close()


def test_new_weights_reuse_nothing_and_give_what_a_cold_service_gives(tmp_path: Path) -> None:
    old, new = make_tiny_llama(tmp_path / "old"), make_tiny_llama(tmp_path / "new", seed=5)
    cold = LocalService(new, workers=1)
    expected = roll_out(cold, "p")
    cold.close()
    service = LocalService(old, workers=1, host=HOST, canary=True)
    engine = service.workers[next(iter(service.workers))].engine
    before = roll_out(service, "old")
    names = parked_keys(service, "old-again")
    cached = engine.stats.cached_tokens
    assert cached > 0
    assert engine.stats.host.tree > 0
    service.update(new, 1)
    found = roll_out(service, "new")
    assert found.output_ids == expected.output_ids
    assert found.logprobs == expected.logprobs
    assert found.output_ids != before.output_ids
    assert engine.stats.cached_tokens == cached
    assert not names & parked_keys(service, "new-again")
    assert engine.stats.cached_tokens > cached  # of the new ones
    service.update(old, 0)
    again = roll_out(service, "back")
    assert again.output_ids == before.output_ids
    assert again.logprobs == before.logprobs
    service.close()
