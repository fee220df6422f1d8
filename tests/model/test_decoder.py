"""The decoder computes what Hugging Face computes, however the tokens reach it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rollout.model.decoder import Decoder
from rollout.model.layers import RMSNorm, swiglu
from rollout.model.spec import read_spec
from tests.model.paged import UNEVEN, PagedDecoder, native_decoder, torch_decoder
from tests.tiny_models import make_tiny_llama, make_tiny_qwen2

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "llama": (make_tiny_llama, {}),
    "llama-untied": (make_tiny_llama, {"tie_word_embeddings": False}),
    "llama-without-gqa": (make_tiny_llama, {"num_key_value_heads": 4}),
    "llama-wide-heads": (make_tiny_llama, {"head_dim": 32, "num_attention_heads": 8, "rms_norm_eps": 1e-2}),
    "llama-uneven": (make_tiny_llama, UNEVEN),
    "llama-head-dim-256": (make_tiny_llama, {"head_dim": 256}),
    "llama-64-heads-on-1": (make_tiny_llama, {"num_attention_heads": 64, "num_key_value_heads": 1}),
    "llama3-rope": (make_tiny_llama, {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "qwen2": (make_tiny_qwen2, {}),
    "qwen2-untied": (make_tiny_qwen2, {"tie_word_embeddings": False, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen2-uneven": (make_tiny_qwen2, {**UNEVEN, "tie_word_embeddings": False}),
}
IDS = torch.randint(4, 320, (61,), generator=torch.Generator().manual_seed(1)).tolist()


Load = Callable[[Path, torch.dtype], Decoder]
DECODERS: dict[str, Load] = {"torch": torch_decoder, "native": native_decoder}
both = pytest.mark.parametrize("load", DECODERS.values(), ids=list(DECODERS))


@pytest.fixture(scope="module", params=[(model, kind) for model in MODELS for kind in DECODERS], ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Decoder, Tensor]]:
    """A decoder, and Hugging Face's logits of IDS."""
    model, kind = request.param
    make, overrides = MODELS[model]
    path = make(tmp_path_factory.mktemp("model"), **overrides)
    decoder = DECODERS[kind](path, torch.float32)
    yield decoder, _hugging_face_logits(path, torch.float32, IDS)
    decoder.close()


def test_one_prefill_gives_the_logits_of_hugging_face(pair: tuple[Decoder, Tensor]) -> None:
    decoder, expected_TV = pair
    (logits_TV,) = PagedDecoder(decoder).prefill([IDS])
    torch.testing.assert_close(logits_TV, expected_TV, atol=1e-4, rtol=0)


def test_chunks_give_the_logits_of_hugging_face(pair: tuple[Decoder, Tensor]) -> None:
    decoder, expected_TV = pair
    paged = PagedDecoder(decoder)
    chunks = [paged.prefill([IDS[start : start + 7]], padding=3)[0] for start in range(0, len(IDS), 7)]
    torch.testing.assert_close(torch.cat(chunks), expected_TV, atol=1e-4, rtol=0)


def test_decoding_gives_the_logits_of_hugging_face(pair: tuple[Decoder, Tensor]) -> None:
    decoder, expected_TV = pair
    paged = PagedDecoder(decoder)
    paged.prefill([IDS[:5]])
    steps = [paged.decode([token], padding=2) for token in IDS[5:]]
    torch.testing.assert_close(torch.cat(steps), expected_TV[5:], atol=1e-4, rtol=0)


def test_sequences_of_one_batch_do_not_mix(pair: tuple[Decoder, Tensor]) -> None:
    decoder, expected_TV = pair
    paged = PagedDecoder(decoder, sequences=2)
    _, first_TV = paged.prefill([IDS[30:33], IDS[:9]])
    step_BV = paged.decode([IDS[50], IDS[9]])
    torch.testing.assert_close(first_TV, expected_TV[:9], atol=1e-4, rtol=0)
    torch.testing.assert_close(step_BV[1], expected_TV[9], atol=1e-4, rtol=0)


@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_qwen2])
def test_bf16_native_is_as_close_to_fp32_as_hugging_face(make: Callable[..., Path], tmp_path: Path) -> None:
    path = make(tmp_path, dtype=torch.bfloat16)
    true_TV = _hugging_face_logits(path, torch.float32, IDS)
    (logits_TV,) = PagedDecoder(native_decoder(path, torch.bfloat16)).prefill([IDS])
    theirs_TV = _hugging_face_logits(path, torch.bfloat16, IDS)
    ours, theirs = ((found_TV - true_TV).abs().mean() for found_TV in (logits_TV, theirs_TV))
    assert 0 < ours <= 1.1 * theirs


@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_qwen2])
def test_bf16_rounds_where_hugging_face_rounds(make: Callable[..., Path], tmp_path: Path) -> None:
    path = make(tmp_path, dtype=torch.bfloat16)
    (logits_TV,) = PagedDecoder(torch_decoder(path, torch.bfloat16)).prefill([IDS])
    expected_TV = _hugging_face_logits(path, torch.bfloat16, IDS)
    torch.testing.assert_close(logits_TV, expected_TV, atol=0.2, rtol=0)
    # Matrix products of other widths may sum in another order; nothing else differs.
    assert (logits_TV == expected_TV).float().mean() > 0.5


@both
def test_bf16_weights_run_in_fp32(load: Load, tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path, dtype=torch.bfloat16)
    (logits_TV,) = PagedDecoder(load(path, torch.float32)).prefill([IDS])
    torch.testing.assert_close(logits_TV, _hugging_face_logits(path, torch.float32, IDS), atol=1e-4, rtol=0)


@pytest.fixture
def three_threads() -> Iterator[None]:
    """More threads than rows divide into, so that threads meet inside a row."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(7, 20), (37, 100), (64, 8960)])
def test_swiglu_of_a_row_does_not_depend_on_its_place(rows: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):  # A badly rounded value is rare.
        row_G = (3 * torch.randn(2 * width, generator=generator)).to(dtype)
        out_TI = swiglu(row_G.repeat(rows, 1))
        assert torch.equal(out_TI, out_TI[:1].expand_as(out_TI))
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out_TI[0].float(), _swiglu(row_G.float()), atol=tolerance, rtol=tolerance)


def _swiglu(row_G: Tensor) -> Tensor:
    gate_I, up_I = row_G.chunk(2)
    return gate_I / (1 + (-gate_I).exp()) * up_I


@pytest.mark.usefixtures("three_threads")
@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_row_does_not_depend_on_its_place_or_on_other_rows(
    tmp_path: Path, dtype: torch.dtype, load: Load
) -> None:
    decoder = load(make_tiny_qwen2(tmp_path, dtype=dtype, intermediate_size=8960, head_dim=20), dtype)
    alike, mixed = PagedDecoder(decoder, sequences=10), PagedDecoder(decoder, sequences=10)
    alike.prefill([IDS[:1]] * 10)
    mixed.prefill([*([token] for token in IDS[20:29]), IDS[:1]])
    for token in IDS[1:8]:
        alike_BV = alike.decode([token] * 10)
        mixed_BV = mixed.decode([*IDS[30:39], token])
        assert torch.equal(alike_BV, alike_BV[:1].expand_as(alike_BV))
        assert torch.equal(mixed_BV[9], alike_BV[0])


@both
def test_what_stale_pages_hold_does_not_matter(tmp_path: Path, load: Load) -> None:
    decoder = load(make_tiny_llama(tmp_path), torch.float32)
    clean, stale = PagedDecoder(decoder), PagedDecoder(decoder)
    stale.pages.fill_(torch.nan)
    for paged in (clean, stale):
        paged.prefill([IDS[:21]])
    for token in IDS[21:40]:
        assert torch.equal(clean.decode([token]), stale.decode([token]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 20, 80])
def test_native_bits_are_those_of_the_sequence_alone(tmp_path: Path, dtype: torch.dtype, head_dim: int) -> None:
    """However it is cut into chunks and decode steps, whatever runs beside it, and on any number of threads."""
    path = make_tiny_qwen2(tmp_path, dtype=dtype, head_dim=head_dim)
    ids = [*IDS, *IDS[::-1], *IDS[::2], *IDS]  # four blocks of keys
    truth_TV = PagedDecoder(native_decoder(path, dtype, threads=1), max_tokens=300).prefill([ids])[0]
    for threads, chunk in ((1, 7), (2, 64), (3, 100)):
        decoder = native_decoder(path, dtype, threads=threads)
        paged = PagedDecoder(decoder, sequences=3, max_tokens=300)
        logits, others = list[Tensor](), iter(range(4, 300))
        while paged.lengths[1] + chunk < len(ids) - 10:
            start = paged.lengths[1]
            logits.append(paged.prefill([[next(others)], ids[start : start + chunk], [5] * 6])[1])
        while paged.lengths[1] < len(ids):
            logits.append(paged.decode([next(others), ids[paged.lengths[1]], 9])[1:2])
        assert torch.equal(torch.cat(logits), truth_TV)
        decoder.close()


@pytest.mark.usefixtures("three_threads")
def test_the_norm_of_a_row_does_not_depend_on_its_place(tmp_path: Path) -> None:
    norm = RMSNorm(read_spec(make_tiny_llama(tmp_path, hidden_size=1000)), dtype=torch.float32, device=CPU)
    norm.weight_E.normal_()
    out_TE = norm(torch.randn(1000).repeat(64, 1))
    assert torch.equal(out_TE, out_TE[:1].expand_as(out_TE))


@both
def test_smollm2_answers_with_the_tokens_of_hugging_face(smollm2_path: Path, load: Load) -> None:
    decoder, theirs = load(smollm2_path, torch.float32), _hugging_face(smollm2_path, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    for question, answer in (("What is the capital of France?", "Paris"), ("What colour is the sky?", "blue")):
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        paged = PagedDecoder(decoder)
        logits_V = paged.prefill([prompt])[0][-1]
        output, logprobs = list[int](), list[float]()
        while len(output) < 16 and not set(output) & set(decoder.spec.eos_token_ids):
            output.append(int(logits_V.argmax()))
            logprobs.append(float(logits_V.log_softmax(-1)[output[-1]]))
            logits_V = paged.decode(output[-1:])[0]
        with torch.inference_mode():
            logits_TV = theirs(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        assert logits_TV.argmax(-1).tolist() == output
        assert logprobs == pytest.approx(logits_TV.log_softmax(-1).amax(-1).tolist(), abs=1e-4)
        assert answer in tokenizer.decode(output)


def _hugging_face(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model


@torch.inference_mode()
def _hugging_face_logits(path: Path, dtype: torch.dtype, ids: list[int]) -> Tensor:
    logits_TV: Tensor = _hugging_face(path, dtype)(torch.tensor([ids])).logits[0]
    return logits_TV.float()
