"""The torch reference against a dense softmax in fp64."""

import pytest
import torch
from torch import Tensor

from rollout.attention import make_attention
from tests.attention.paged import Chunk, Heads, Layout, dense_attention, make_chunk

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])
page_sizes = pytest.mark.parametrize("page_tokens", [16, 256])


def assert_dense(outs: list[Tensor], chunks: list[Chunk]) -> None:
    for out, chunk in zip(outs, chunks, strict=True):
        tolerance = TOLERANCE[out.dtype]
        torch.testing.assert_close(out.double(), dense_attention(chunk), atol=tolerance, rtol=tolerance)


@dtypes
@page_sizes
@pytest.mark.parametrize("heads", [Heads(N=6, K=2), Heads(N=4, K=4, H=16), Heads(N=8, K=1, H=64)], ids=str)
def test_decode_is_dense_attention(dtype: torch.dtype, page_tokens: int, heads: Heads) -> None:
    contexts = [0, 1, 15, 16, 17, 63, 64, 127, 128, 255, 256, 300]
    chunks = [make_chunk(i, context=c, new=1, dtype=dtype, heads=heads) for i, c in enumerate(contexts)]
    layout = Layout(chunks, page_tokens=page_tokens, padding=2, spare_columns=1)
    assert_dense(layout.decode(make_attention("torch", deterministic=False)), chunks)


@dtypes
@page_sizes
@pytest.mark.parametrize("heads", [Heads(N=6, K=2), Heads(N=4, K=4, H=16)], ids=str)
def test_prefill_is_dense_attention(dtype: torch.dtype, page_tokens: int, heads: Heads) -> None:
    spans = [(0, 40), (0, 1), (16, 16), (100, 63), (255, 2), (64, 128), (300, 1)]
    chunks = [make_chunk(i, context=c, new=n, dtype=dtype, heads=heads) for i, (c, n) in enumerate(spans)]
    layout = Layout(chunks, page_tokens=page_tokens, padding=5)
    assert_dense(layout.prefill(make_attention("torch", deterministic=False)), chunks)


@pytest.mark.parametrize(("context", "new"), [(0, 50), (0, 64), (128, 1), (200, 100)])
def test_prefill_of_one_padded_chunk_is_dense_attention(context: int, new: int) -> None:
    chunks = [make_chunk(1, context=context, new=new, dtype=torch.float32)]
    layout = Layout(chunks, page_tokens=16, padding=128 - new)
    assert_dense(layout.prefill(make_attention("torch", deterministic=True)), chunks)


def test_chunked_prefill_and_decode_agree_with_one_prefill() -> None:
    whole = make_chunk(7, context=0, new=150, dtype=torch.float32)
    attention = make_attention("torch", deterministic=False)
    layout = Layout([whole], page_tokens=16)
    expected = layout.prefill(attention)[0]
    for start, end in [(0, 64), (64, 100), (100, 149)]:
        part = Chunk(q_tNH=whole.q_tNH[start:end], k_lKH=whole.k_lKH[:end], v_lKH=whole.v_lKH[:end])
        out = Layout([part], page_tokens=16, padding=3).prefill(attention)[0]
        torch.testing.assert_close(out, expected[start:end], atol=1e-5, rtol=1e-5)
    last = Chunk(q_tNH=whole.q_tNH[149:], k_lKH=whole.k_lKH, v_lKH=whole.v_lKH)
    torch.testing.assert_close(
        Layout([last], page_tokens=16).decode(attention)[0], expected[149:], atol=1e-5, rtol=1e-5
    )


def test_new_keys_and_values_are_in_the_pages_afterwards() -> None:
    chunks = [make_chunk(i, context=c, new=1, dtype=torch.bfloat16) for i, c in enumerate([0, 15, 16, 40])]
    for layout in (Layout(chunks, page_tokens=16, padding=1), Layout(chunks, page_tokens=16)):
        layout.decode(make_attention("torch", deterministic=False))
        for s, chunk in enumerate(chunks):
            k, v = layout.stored(s)
            assert torch.equal(k, chunk.k_lKH)
            assert torch.equal(v, chunk.v_lKH)


def test_sharp_scores_do_not_overflow() -> None:
    chunk = make_chunk(3, context=200, new=1, dtype=torch.float32)
    sharp = Chunk(q_tNH=chunk.q_tNH * 1000, k_lKH=chunk.k_lKH, v_lKH=chunk.v_lKH)
    assert_dense(Layout([sharp], page_tokens=16).decode(make_attention("torch", deterministic=False)), [sharp])


def test_layers_of_one_step_and_the_next_step_use_their_own_batch() -> None:
    attention = make_attention("torch", deterministic=False)
    for context in (10, 90, 10):
        chunks = [make_chunk(context, context=context, new=1, dtype=torch.float32)]
        assert_dense(Layout(chunks, page_tokens=16, seed=context).decode(attention), chunks)
