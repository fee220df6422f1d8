"""flash-attn held to its package's contract through a stand-in, and to the reference; to the package on a GPU."""

import importlib.util
import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.attention import Attention, make_attention
from rollout.errors import ConfigError
from tests.attention import fake_flash
from tests.attention.paged import Heads, Layout, make_chunk

DTYPES = [torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])


@pytest.fixture
def flash_package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in, importable as flash_attn for one test."""
    module = fake_flash.fake_flash_module()
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return module


@pytest.fixture
def flash(flash_package: ModuleType) -> Attention:
    return make_attention("flash", deterministic=False)


def assert_same(outs: list[Tensor], expected: list[Tensor]) -> None:
    for out, want in zip(outs, expected, strict=True):
        torch.testing.assert_close(out, want, atol=1e-2, rtol=1e-2)


def assert_same_pages(layout: Layout, expected: Layout) -> None:
    """Page 0 is scratch; all others must hold the same bits, NaN where nobody wrote."""
    assert torch.equal(layout.pages[1:].isnan(), expected.pages[1:].isnan())
    assert torch.equal(layout.pages[1:].nan_to_num(), expected.pages[1:].nan_to_num())


@dtypes
@pytest.mark.parametrize("heads", [Heads(N=6, K=2), Heads(N=4, K=4, H=16), Heads(N=9, K=3, H=64)], ids=str)
def test_decode_is_the_reference(flash: Attention, dtype: torch.dtype, heads: Heads) -> None:
    contexts = [0, 1, 255, 256, 257, 300]
    chunks = [make_chunk(i, context=c, new=1, dtype=dtype, heads=heads) for i, c in enumerate(contexts)]
    layouts = [Layout(chunks, page_tokens=256, padding=2) for _ in range(2)]
    reference = make_attention("torch", deterministic=False)
    assert_same(layouts[0].decode(flash), layouts[1].decode(reference))
    assert_same_pages(*layouts)


@dtypes
@pytest.mark.parametrize("padding", [0, 4])
def test_prefill_is_the_reference(flash: Attention, dtype: torch.dtype, padding: int) -> None:
    spans = [(0, 40), (0, 1), (256, 16), (250, 12), (300, 1)]
    chunks = [make_chunk(i, context=c, new=n, dtype=dtype) for i, (c, n) in enumerate(spans)]
    layouts = [Layout(chunks, page_tokens=256, padding=padding) for _ in range(2)]
    reference = make_attention("torch", deterministic=False)
    assert_same(layouts[0].prefill(flash), layouts[1].prefill(reference))
    assert_same_pages(*layouts)


def test_one_padded_chunk_is_the_reference(flash: Attention) -> None:
    chunks = [make_chunk(1, context=64, new=20, dtype=torch.bfloat16)]
    layouts = [Layout(chunks, page_tokens=512, padding=44) for _ in range(2)]
    assert_same(layouts[0].prefill(flash), layouts[1].prefill(make_attention("torch", deterministic=True)))


@pytest.mark.parametrize(("deterministic", "num_splits"), [(True, 1), (False, 0)])
def test_deterministic_decoding_does_not_split_keys(
    flash_package: ModuleType, monkeypatch: pytest.MonkeyPatch, deterministic: bool, num_splits: int
) -> None:
    calls: list[dict[str, Any]] = []

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs)
        return fake_flash.flash_attn_with_kvcache(*args, **kwargs)

    monkeypatch.setattr(flash_package, "flash_attn_with_kvcache", recorded)
    layout = Layout([make_chunk(1, context=5, new=1, dtype=torch.bfloat16)], page_tokens=256)
    layout.decode(make_attention("flash", deterministic=deterministic))
    assert [call["num_splits"] for call in calls] == [num_splits]


def test_works_on_rows_that_require_gradients(flash: Attention) -> None:
    chunk = make_chunk(1, context=5, new=1, dtype=torch.bfloat16)
    chunk.q_tNH.requires_grad_()
    assert not Layout([chunk], page_tokens=256).decode(flash)[0].requires_grad


def test_what_the_package_refuses_is_refused(flash: Attention) -> None:
    """The stand-in is strict: small pages and fp32 do not pass."""
    small = Layout([make_chunk(1, context=5, new=1, dtype=torch.bfloat16)], page_tokens=16)
    single = Layout([make_chunk(1, context=5, new=1, dtype=torch.float32)], page_tokens=256)
    for layout, problem in [(small, "not a multiple of 256"), (single, "float32")]:
        with pytest.raises(fake_flash.ContractError, match=problem):
            layout.decode(flash)
        with pytest.raises(fake_flash.ContractError, match=problem):
            layout.prefill(flash)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ConfigError, match=r"pip install rollout\[cuda\]"):
        make_attention("flash", deterministic=False)


needs_package = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@needs_package
@pytest.mark.parametrize("name", ["flash_attn_varlen_func", "flash_attn_with_kvcache"])
def test_the_stand_in_has_the_signature_of_the_package(name: str) -> None:
    import flash_attn

    def shape(function: Any) -> list[tuple[str, Any]]:
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]

    assert shape(getattr(fake_flash, name)) == shape(getattr(flash_attn, name))


@needs_package
@needs_gpu
@dtypes
def test_the_package_is_the_reference(dtype: torch.dtype) -> None:
    spans = [(0, 40), (256, 16), (250, 12), (300, 1)]
    flash, reference = (make_attention(name, deterministic=True) for name in ("flash", "torch"))
    chunks = [make_chunk(i, context=c, new=n, dtype=dtype) for i, (c, n) in enumerate(spans)]
    layouts = [Layout(chunks, page_tokens=256, padding=4, device="cuda") for _ in range(2)]
    assert_same(layouts[0].prefill(flash), layouts[1].prefill(reference))
    assert_same_pages(*layouts)
    chunks = [make_chunk(i, context=c, new=1, dtype=dtype) for i, c in enumerate([0, 1, 255, 256, 300])]
    layouts = [Layout(chunks, page_tokens=256, padding=3, device="cuda") for _ in range(2)]
    assert_same(layouts[0].decode(flash), layouts[1].decode(reference))
    assert_same_pages(*layouts)
