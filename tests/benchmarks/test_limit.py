"""Every way to compute a linear map that the limit knows computes that map, over all of the model."""

from pathlib import Path

import pytest
import torch

from benchmarks.limit import Limit
from benchmarks.products import find_products
from rollout.model.spec import read_spec
from tests.tiny_models import make_tiny_llama


@pytest.mark.parametrize("rows", [1, 5, 32])
@pytest.mark.parametrize(("columns", "width"), [(320, 64), (50, 576)])
def test_all_products_agree(rows: int, columns: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(columns, width, generator=generator).bfloat16()
    x = torch.randn(rows, width, generator=generator).bfloat16()
    expected = x.float() @ weight.float().T
    for name, pack in find_products(2).items():
        torch.testing.assert_close(pack(weight, rows)(x).float(), expected, rtol=0.02, atol=0.3, msg=name)


def test_the_limit_is_the_fastest_product_and_one_read_of_the_kv(tmp_path: Path) -> None:
    spec = read_spec(make_tiny_llama(tmp_path / "llama"))
    limit = Limit(spec, 1)
    assert limit.token_bytes == 2 * 2 * 2 * 16 * 2
    step = limit.decode_step(4, 100.5)
    assert step["kv_s"] == 4 * 100.5 * limit.token_bytes / max(step["read_bytes_per_s"].values())
    assert step["seconds"] == min(step["gemm_s"].values()) + step["kv_s"]
    prompts = limit.prefill(3, 64, 16)
    assert prompts["seconds"] == min(prompts["gemm_s"].values()) > 0


def test_what_the_calls_take_is_subtracted_but_no_more_than_half(tmp_path: Path) -> None:
    limit = Limit(read_spec(make_tiny_llama(tmp_path / "llama")), 1)
    assert all(seconds > 0 for seconds in limit.call_seconds().values())
    without = limit.gemm_seconds("layers", 8, dict.fromkeys(limit.products, 1e9))
    assert all(seconds > 0 for seconds in without.values())
