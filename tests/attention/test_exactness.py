"""What the reference promises bit for bit: a row depends on itself, its own context and the call's shape."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.attention import make_attention
from tests.attention.paged import Chunk, Heads, Layout, make_chunk

pytestmark = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
B = 7


class Products(TorchDispatchMode):
    """Collects the shapes of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[torch.Size, torch.Size]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mm" in str(func):
            self.shapes.append((args[0].shape, args[1].shape))
        return func(*args, **(kwargs or {}))


HEADS = [Heads(N=9, K=3, H=64), Heads(N=4, K=4, H=16), Heads(N=6, K=2, H=40)]
all_heads = pytest.mark.parametrize("heads", HEADS, ids=str)


def decode(chunks: Sequence[Chunk], *, page_tokens: int = 16, seed: int = 0) -> list[Tensor]:
    layout = Layout(chunks, page_tokens=page_tokens, seed=seed, padding=B - len(chunks))
    return layout.decode(make_attention("torch", deterministic=True))


def rows(contexts: Sequence[int], dtype: torch.dtype, heads: Heads) -> list[Chunk]:
    return [make_chunk(i, context=c, new=1, dtype=dtype, heads=heads) for i, c in enumerate(contexts)]


@all_heads
def test_decode_row_does_not_depend_on_other_rows(dtype: torch.dtype, heads: Heads) -> None:
    mine, *others = rows([100, 5, 64, 130, 99, 0, 17], dtype, heads)
    alone = decode([mine])[0]
    assert torch.equal(alone, decode([mine, *others], seed=1)[0])
    assert torch.equal(alone, decode([mine, *others[:3]], seed=2)[0])


@all_heads
def test_decode_row_does_not_depend_on_its_place(dtype: torch.dtype, heads: Heads) -> None:
    chunks = rows([100, 5, 64, 130, 99, 0, 17], dtype, heads)
    expected = decode(chunks)
    for seed in range(3):
        order = torch.randperm(B, generator=torch.Generator().manual_seed(seed)).tolist()
        outs = decode([chunks[i] for i in order], seed=seed)
        assert all(torch.equal(out, expected[i]) for i, out in zip(order, outs, strict=True))


@all_heads
def test_decode_row_does_not_depend_on_the_longest_context(dtype: torch.dtype, heads: Heads) -> None:
    mine = rows([70], dtype, heads)[0]
    expected = decode([mine])[0]
    for longest in (0, 71, 128, 1000):
        other = make_chunk(9, context=longest, new=1, dtype=dtype, heads=heads)
        assert torch.equal(expected, decode([other, mine])[1])


def test_decode_row_does_not_depend_on_the_page_size(dtype: torch.dtype) -> None:
    chunks = rows([0, 70, 300], dtype, HEADS[0])
    small, large = decode(chunks), decode(chunks, page_tokens=256)
    assert all(torch.equal(a, b) for a, b in zip(small, large, strict=True))


def test_a_broken_sequence_breaks_no_other(dtype: torch.dtype) -> None:
    mine, other = rows([70, 200], dtype, HEADS[0])
    broken = Chunk(
        q_tNH=torch.full_like(other.q_tNH, torch.nan),
        k_lKH=torch.full_like(other.k_lKH, torch.inf),
        v_lKH=torch.full_like(other.v_lKH, torch.nan),
    )
    outs = decode([mine, broken])
    assert torch.equal(outs[0], decode([mine])[0])
    assert outs[1].isnan().all()


@all_heads
@pytest.mark.parametrize(("context", "new"), [(0, 9), (64, 31), (128, 64), (200, 1)])
def test_padded_prefill_does_not_depend_on_its_padding(
    dtype: torch.dtype, heads: Heads, context: int, new: int
) -> None:
    chunk = make_chunk(5, context=context, new=new, dtype=dtype, heads=heads)
    outs = [
        Layout([chunk], page_tokens=16, seed=seed, padding=64 - new, spare_columns=5 * seed).prefill(
            make_attention("torch", deterministic=True)
        )[0]
        for seed in range(3)
    ]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_prefill_row_does_not_depend_on_rows_after_it(dtype: torch.dtype) -> None:
    """A chunk cut short and padded gives the same bits as the full one: nothing looks ahead."""
    full = make_chunk(5, context=64, new=64, dtype=dtype, heads=HEADS[0])
    short = Chunk(q_tNH=full.q_tNH[:20], k_lKH=full.k_lKH[:84], v_lKH=full.v_lKH[:84])
    attention = make_attention("torch", deterministic=True)
    outs = Layout([short], page_tokens=16, padding=44).prefill(attention)
    assert torch.equal(outs[0], Layout([full], page_tokens=16).prefill(attention)[0][:20])


def test_products_of_a_padded_prefill_have_the_shape_of_the_padded_chunk(dtype: torch.dtype) -> None:
    shapes = []
    for new in (64, 40, 1):
        chunk = make_chunk(5, context=64, new=new, dtype=dtype, heads=HEADS[0])
        with Products() as products:
            Layout([chunk], page_tokens=16, padding=64 - new).prefill(make_attention("torch", deterministic=True))
        shapes.append(products.shapes)
    assert len(shapes[0]) == 4
    assert shapes[0] == shapes[1] == shapes[2]


def test_products_of_a_decode_do_not_know_the_longest_context(dtype: torch.dtype) -> None:
    for longest in (5, 300):
        with Products() as products:
            decode(rows([10, longest], dtype, HEADS[0]))
        assert set(products.shapes) == {
            (torch.Size([B * 3, 3, 64]), torch.Size([B * 3, 64, 64])),
        }
