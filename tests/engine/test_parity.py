"""Ours equals Hugging Face: greedy tokens, and log-probabilities within 1e-4, in fp32."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout.types import SamplingParams, Trajectory
from tests.local_service import LocalService
from tests.tiny_models import VOCAB_SIZE, make_tiny_llama, make_tiny_qwen2

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)


def prompts(count: int, *, vocab: int = VOCAB_SIZE, lengths: Sequence[int] = (1, 5, 16, 17, 33, 70)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(4, vocab, (lengths[index % len(lengths)],), generator=generator).tolist()
        for index in range(count)
    ]


def hugging_face(path: Path, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy ids by `generate`, and the log-probability of each under the model's own logits."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        eos_token_id=None,
    )
    with torch.no_grad():
        logprobs = model(out).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    ids = out[0, len(prompt) :]
    return ids.tolist(), logprobs.gather(1, ids[:, None])[:, 0].tolist()


def assert_equal(ours: Trajectory, ids: list[int], logprobs: list[float]) -> None:
    assert list(ours.output_ids) == ids
    assert ours.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_qwen2])
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("plain", {}),
        ("chunked prefill", {"chunk_tokens": 16, "prefill_tokens": 24}),
        ("odd chunks", {"chunk_tokens": 7}),
        ("torch", {"kernels": "torch", "chunk_tokens": 16, "prefill_tokens": 24}),
        ("deterministic by replay", {"kernels": "torch", "deterministic": True, "chunk_tokens": 16}),
    ],
)
def test_tiny_models_equal_hugging_face(tmp_path: Path, make, name: str, engine) -> None:
    path = make(tmp_path)
    service = LocalService(path, workers=1, **engine)
    for index, prompt in enumerate(prompts(8)):
        service.submit(f"p{index}", prompt, GREEDY)
    ours = service.run(8)
    for index, prompt in enumerate(prompts(8)):
        assert_equal(ours[f"p{index}/0"], *hugging_face(path, prompt, GREEDY.max_new_tokens))
    service.close()


@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_qwen2])
def test_shared_prefixes_and_preemption_change_nothing(tmp_path: Path, make) -> None:
    path = make(tmp_path)
    # 12 pages of 16 tokens for four sequences that end with 6 pages each
    service = LocalService(path, workers=1, kv_bytes=13 * 16 * 512, chunk_tokens=16)
    (stem,) = prompts(1, lengths=(40,))
    shared = [[*stem, *prompt] for prompt in prompts(6, lengths=(3, 8, 20))]
    params = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    for index, prompt in enumerate(shared):
        service.submit(f"p{index}", prompt, params)
    ours = service.run(6)
    stats = service.workers["w0"].engine.stats
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    for index, prompt in enumerate(shared):
        assert_equal(ours[f"p{index}/0"], *hugging_face(path, prompt, params.max_new_tokens))
    service.close()


def test_suspended_and_resumed_equals_hugging_face(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path)
    service = LocalService(path, slice_tokens=5)
    for index, prompt in enumerate(prompts(6)):
        service.submit(f"p{index}", prompt, GREEDY)
    ours = service.run(6)
    for index, prompt in enumerate(prompts(6)):
        trajectory = ours[f"p{index}/0"]
        assert trajectory.suspensions == 4
        assert_equal(trajectory, *hugging_face(path, prompt, GREEDY.max_new_tokens))
    service.close()


def test_smollm2_equals_hugging_face(smollm2_path: Path) -> None:
    """16 prompts of 64 greedy tokens, batched, with chunked prefill."""
    service = LocalService(smollm2_path, workers=1, kv_bytes=256 << 20, max_running=16, chunk_tokens=32)
    params = SamplingParams(temperature=0.0, max_new_tokens=64, ignore_eos=True)
    texts = [f"Question {index}: what is {index} plus {index * 7}? Explain step by step." for index in range(16)]
    from rollout.text import Tokenizer, read_tokenizer_files

    tokenizer = Tokenizer(read_tokenizer_files(smollm2_path))
    chats = [tokenizer.prompt_ids(text, chat=True) for text in texts]
    for index, prompt in enumerate(chats):
        service.submit(f"p{index}", prompt, params)
    ours = service.run(16)
    ids, logprobs = _hugging_face_batch(smollm2_path, chats, params.max_new_tokens)
    for index in range(16):
        assert_equal(ours[f"p{index}/0"], ids[index], logprobs[index])
    service.close()


def _hugging_face_batch(
    path: Path, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[list[list[int]], list[list[float]]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        padded,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = out.sequences[:, longest:]
    logprobs = torch.stack(out.logits, dim=1).float().log_softmax(-1).gather(2, ids[:, :, None])[:, :, 0]
    return ids.tolist(), logprobs.tolist()
