"""Packed weights are what `rollout/native/src/linear.h` says, whoever packs them and wherever the source lies.

Shape letters: those of `rollout.model.packed`.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rollout.model.packed import CHUNK_BYTES, PackedLinear
from rollout.native.library import PANEL, Kernels

SIZES = [(1, 2), (31, 6), (32, 32), (33, 34), (64, 30), (150, 66), (192, 576), (323, 1022), (40, 2048)]


@pytest.fixture(scope="module", params=[None, 1, 3], ids=["torch", "one-thread", "three-threads"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels | None]:
    kernels = Kernels(request.param) if request.param else None
    yield kernels
    if kernels is not None:
        kernels.close()


def packed(weight_YX: Tensor) -> Tensor:
    """In plain torch, one element after the other."""
    rows, x = weight_YX.shape
    word = 4 // weight_YX.element_size()
    padded_RX = torch.zeros((-(-rows // PANEL) * PANEL, x), dtype=weight_YX.dtype)
    padded_RX[:rows] = weight_YX
    return torch.stack([panel_cX.view(PANEL, x // word, word).transpose(0, 1) for panel_cX in padded_RX.split(PANEL)])


def random(rows: int, x: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    return torch.randn((rows, x), generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def dirty(linear: PackedLinear) -> PackedLinear:
    """As memory that was used before."""
    for memory in linear.memory():
        memory.fill_(7)
    linear.clear_padding()
    return linear


both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@both
@pytest.mark.parametrize(("rows", "x"), SIZES)
def test_rows_become_panels_and_rows_again(rows: int, x: int, dtype: torch.dtype, kernels: Kernels | None) -> None:
    weight_YX = random(rows, x, dtype)
    linear = dirty(PackedLinear(x, {"w": rows}, bias=False, dtype=dtype, kernels=kernels))
    linear.weight("w").write(weight_YX)
    assert same(linear._weight_Pscw, packed(weight_YX))
    assert same(linear.weight("w").read(), weight_YX)


@both
def test_parts_do_not_touch_each_other(dtype: torch.dtype, kernels: Kernels | None) -> None:
    parts = {"q": 66, "k": 22, "v": 32, "last": 5}
    linear = dirty(PackedLinear(34, parts, bias=True, dtype=dtype, kernels=kernels))
    weights = {name: random(rows, 34, dtype, seed=rows) for name, rows in parts.items()}
    biases = {name: random(rows, 1, dtype, seed=-rows)[:, 0] for name, rows in parts.items()}
    for name in reversed(parts):
        linear.weight(name).write(weights[name])
        linear.bias(name).write(biases[name])
    assert same(linear._weight_Pscw, torch.cat([packed(weight_YX) for weight_YX in weights.values()]))
    padded = [torch.nn.functional.pad(bias_Y, (0, -len(bias_Y) % PANEL)) for bias_Y in biases.values()]
    assert same(linear._bias_Pc.flatten(), torch.cat(padded))
    for name in parts:
        assert same(linear.weight(name).read(), weights[name])
        assert same(linear.bias(name).read(), biases[name])


@both
@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "x"), [(33, 34), (323, 1022), (1500, 1024)])
def test_other_dtypes_are_converted_as_torch_converts(
    rows: int, x: int, given: torch.dtype, dtype: torch.dtype, kernels: Kernels | None
) -> None:
    weight_YX = random(rows, x, given)
    linear = PackedLinear(x, {"w": rows}, bias=False, dtype=dtype, kernels=kernels)
    linear.weight("w").write(weight_YX)
    assert same(linear._weight_Pscw, packed(weight_YX.to(dtype)))


def test_one_of_the_conversions_takes_several_chunks() -> None:
    assert 2 * CHUNK_BYTES < 1500 * 1024 * 2


@both
@pytest.mark.parametrize("offset", [1, 2, 3, 17])
def test_a_source_at_any_address_is_read(offset: int, dtype: torch.dtype, kernels: Kernels | None) -> None:
    """As the tensors of a file, or of a buffer that came over a wire."""
    weight_YX = random(97, 46, dtype)
    buffer = bytearray(offset) + weight_YX.view(torch.uint8).numpy().tobytes()
    before = bytes(buffer)
    source_YX = torch.frombuffer(buffer, dtype=dtype, offset=offset).view(97, 46)
    linear = PackedLinear(46, {"w": 97}, bias=False, dtype=dtype, kernels=kernels)
    linear.weight("w").write(source_YX)
    assert same(linear._weight_Pscw, packed(weight_YX))
    assert buffer == before


@both
@pytest.mark.parametrize("layout", ["transposed", "strided", "wide-rows"])
def test_a_source_that_is_not_contiguous_is_packed_likewise(
    layout: str, dtype: torch.dtype, kernels: Kernels | None
) -> None:
    weight_YX = random(97, 46, dtype)
    source_YX = {
        "transposed": weight_YX.T.contiguous().T,
        "strided": torch.stack([weight_YX, weight_YX + 1], dim=2)[:, :, 0],
        "wide-rows": torch.cat([weight_YX, weight_YX], dim=1)[:, :46],
    }[layout]
    assert not source_YX.is_contiguous()
    linear = PackedLinear(46, {"w": 97}, bias=False, dtype=dtype, kernels=kernels)
    linear.weight("w").write(source_YX)
    assert same(linear._weight_Pscw, packed(weight_YX))


@both
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "x"), [(33, 34), (320, 64), (1500, 1024)])
def test_a_copy_of_the_rows_is_kept_beside_the_panels(
    rows: int, x: int, given: torch.dtype, dtype: torch.dtype, kernels: Kernels | None
) -> None:
    weight_YX, copy_YX = random(rows, x, given), torch.empty((rows, x), dtype=dtype)
    linear = PackedLinear(x, {"w": rows}, bias=False, dtype=dtype, kernels=kernels)
    target = linear.weight("w", copy_YX=copy_YX)
    target.write(weight_YX)
    assert same(copy_YX, weight_YX.to(dtype))
    assert same(linear._weight_Pscw, packed(weight_YX.to(dtype)))
    assert same(target.read(), weight_YX.to(dtype))


@both
def test_every_bit_pattern_survives(dtype: torch.dtype, kernels: Kernels | None) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32) * (0x10001 if dtype is torch.float32 else 1)
    weight_YX = bits.to(torch.int32 if dtype is torch.float32 else torch.int16).view(dtype).view(256, 256)
    linear = PackedLinear(256, {"w": 256}, bias=False, dtype=dtype, kernels=kernels)
    linear.weight("w").write(weight_YX)
    assert same(linear._weight_Pscw, packed(weight_YX))
    assert same(linear.weight("w").read(), weight_YX)


def test_panels_that_do_not_begin_at_a_cache_line_are_refused_with_their_address() -> None:
    kernels = Kernels(1)
    for panels, copy in ((0x1004, None), (0x1000, 0x2008)):
        with pytest.raises(AssertionError, match=f"{panels:#x}.*{copy or 0:#x}"):
            kernels.pack(rows=0, count=0, steps=1, panels=panels, copy=copy)
    kernels.close()
