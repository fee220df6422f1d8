"""The step loop: sharing, refusal, preemption order, stops, and what it says of a model that breaks."""

from pathlib import Path

import pytest
import torch

from rollout.control.commands import Assignment, Watch
from rollout.control.messages import Admitted, Failed, Preempted, Sampled
from rollout.errors import ConfigError, InvalidPromptError, PromptTooLongError
from rollout.types import Columns, FinishReason, SamplingParams, TrajectoryId
from tests.engine.test_parity import prompts
from tests.local_service import LocalService
from tests.tiny_models import EOS_ID, VOCAB_SIZE, make_tiny_llama

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def assignment(prompt: list[int], **changes) -> Assignment:
    fields = {
        "trajectory_id": TrajectoryId("t"),
        "epoch": 1,
        "prompt_ids": tuple(prompt),
        "output": Columns(),
        "sampling": PARAMS,
        "seed": 0,
        "watch": Watch(),
        "max_context": 2048,
        "image": None,
        "kv_tokens": 0,
    }
    return Assignment(**(fields | changes))


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_group_prefills_its_prompt_once(path: Path, deterministic: bool) -> None:
    (prompt,) = prompts(1, lengths=(64,))
    service = LocalService(path, workers=1, deterministic=deterministic, chunk_tokens=16)
    service.submit("p", prompt, PARAMS, n=4)
    service.run(1)
    stats = service.workers["w0"].engine.stats
    # the last token at least is fed again, as a chunk in deterministic mode, else as a page
    assert stats.prefilled_tokens == 64 + 3 * 16
    assert stats.cached_tokens == 3 * 48
    service.close()


def test_a_later_group_finds_an_earlier_ones_prompt_and_output(path: Path) -> None:
    (prompt,) = prompts(1, lengths=(30,))
    service = LocalService(path, workers=1)
    service.submit("a", prompt, PARAMS)
    (first,) = service.run(1).values()
    service.submit("b", [*prompt, *first.output_ids, 5], PARAMS)
    service.run(1)
    assert service.workers["w0"].engine.stats.cached_tokens == 32
    service.close()


def test_what_cannot_run_is_refused_and_leaves_nothing(path: Path) -> None:
    service = LocalService(path, workers=1, max_context_tokens=32)
    engine = service.workers["w0"].engine
    with pytest.raises(PromptTooLongError, match="32 tokens, allowed: fewer than the context of 32"):
        engine.submit(assignment([5] * 32))
    with pytest.raises(InvalidPromptError, match=f"0 … {VOCAB_SIZE - 1}"):
        engine.submit(assignment([5, VOCAB_SIZE]))
    with pytest.raises(InvalidPromptError):
        engine.submit(assignment([]))
    assert engine.idle
    engine.audit()
    service.close()


def test_the_youngest_gives_way_and_comes_back_first(path: Path) -> None:
    service = LocalService(path, workers=1, kv_bytes=8 * 16 * 512)
    params = SamplingParams(temperature=1.0, max_new_tokens=40, ignore_eos=True)
    for index, prompt in enumerate(prompts(5, lengths=(15,))):
        service.submit(f"p{index}", prompt, params)
    service.run(5)
    preempted = [event.trajectory_id for event in service.log if isinstance(event, Preempted)]
    assert preempted
    assert "p0/0" not in preempted
    order = [event.trajectory_id for event in service.log if isinstance(event, Admitted | Preempted)]
    after = order[order.index(preempted[-1]) + 1 :]
    assert preempted[-1] in after
    assert "p4/0" not in after[: after.index(preempted[-1])]
    service.close()


def test_min_new_tokens_hold_back_the_stop_and_a_stop_ends_the_columns(path: Path) -> None:
    service = LocalService(path, workers=1)
    # every token but one is a stop id: only the ban keeps it running
    stops = tuple(token for token in range(VOCAB_SIZE) if token != 7)
    params = SamplingParams(temperature=1.0, max_new_tokens=20, min_new_tokens=6, stop_token_ids=stops)
    service.submit("p", [5, 6], params)
    (ended,) = service.run(1).values()
    assert ended.output_ids[:6] == (7,) * 6
    assert ended.logprobs[:6] == (0.0,) * 6
    if ended.finish_reason is FinishReason.STOP:
        assert ended.output_ids[-1] in stops
        assert set(ended.output_ids[:-1]) == {7}
    service.close()


def test_end_of_sequence_stops_unless_ignored(path: Path) -> None:
    service = LocalService(path, workers=1)
    (prompt,) = prompts(1, lengths=(9,))
    likely = SamplingParams(temperature=50.0, max_new_tokens=1500)
    service.submit("stops", prompt, likely)
    (stopped,) = service.run(1).values()
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.output_ids.index(EOS_ID) == len(stopped.output_ids) - 1
    ignoring = SamplingParams(temperature=50.0, max_new_tokens=1500, ignore_eos=True, seed=1)
    service.submit("ignores", prompt, ignoring)
    (ignored,) = service.run(1).values()
    assert EOS_ID in ignored.output_ids[:-1]
    assert ignored.finish_reason is FinishReason.LENGTH
    service.close()


def test_a_broken_model_fails_the_trajectory_and_not_the_engine(path: Path) -> None:
    service = LocalService(path, workers=1)
    decoder = service.workers["w0"].engine._runner._decoder
    true_logits = decoder.logits
    decoder.logits = lambda hidden: torch.full_like(true_logits(hidden), torch.nan)
    service.submit("p", [5, 6], PARAMS)
    (failed,) = service.run(1).values()
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error == "the model's logits are not numbers"
    assert any(isinstance(event, Failed) for event in service.log)
    decoder.logits = true_logits
    service.submit("q", [5, 6], PARAMS)
    (ended,) = service.run(1).values()
    assert ended.finish_reason is FinishReason.LENGTH
    assert sum(isinstance(event, Sampled) for event in service.log) == PARAMS.max_new_tokens
    service.close()


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"device": "cuda"}, "this worker sees no GPU"),
        ({"kernels": "torch", "deterministic": True, "chunk_tokens": 20}, "multiple of engine.page_tokens"),
        ({"kv_bytes": 100}, "at least two pages"),
        ({"kernels": "flash"}, "flash with device cpu and model.dtype float32"),
    ],
)
def test_sizes_and_devices_that_cannot_work_are_named(path: Path, engine, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalService(path, workers=1, **engine)
