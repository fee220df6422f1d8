"""`bench kv_copy` at toy sizes: it runs through, and its parts add up."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.kv_copy import Settings, run
from benchmarks.load import Load
from benchmarks.standin import StandIn
from rollout.errors import ModelNotFoundError
from tests.tiny_models import make_tiny_llama

MODEL = StandIn(layers=4, kv_heads=4, head_dim=64)


@pytest.mark.soak
def test_warm_moves_add_up_and_cold_ones_are_beside_them(ray_cluster: None) -> None:
    settings = Settings(parts=("warm", "cold"), repeats=5, sizes_mb=(1,), model=MODEL)
    results, ratios = run(settings)
    assert set(ratios) == {"export_vs_memcpy_1mb", "restore_vs_memcpy_1mb"}
    assert all(ratio > 0 for ratio in ratios.values())
    warm: dict[str, Any] = results["warm"]["1mb"]
    assert warm["nbytes"] >= settings.nbytes(1)
    for kind in ("export", "restore"):
        assert len(warm[f"{kind}_all_ms"]) == len(warm[f"{kind}_memcpy_all_ms"]) == 5
        assert all(phase >= 0 for phase in warm[f"{kind}_phases"].values()), warm
        assert sum(warm[f"{kind}_phases"].values()) == pytest.approx(warm[f"{kind}_ms"], rel=0.5)
    assert set(warm["isolated"]) >= {"gather_ms", "checksum_ms", "ray_return_ms", "ray_get_ms", "scatter_ms"}
    assert set(warm["after_restart"]) == {"export_ms", "restore_ms"}
    assert set(results["cold"]["1mb"]) == {"export_ms", "restore_ms"}


def test_decoding_is_timed_with_moves_and_without(ray_cluster: None, tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "llama", num_key_value_heads=4, head_dim=64, max_position_embeddings=1 << 16)
    load = Load(
        model=model, batch=3, steps=30, every=10, tokens=60, movers=2, prompt_tokens=5, unmeasured_tokens=20_000
    )
    results, ratios = run(Settings(parts=("load",), load=load))
    assert ratios["decode_slowdown"] > 0
    assert results["load"]["still"]["steps"] == results["load"]["moving"]["steps"] == 30
    assert results["load"]["moves"] == 3
    assert results["load"]["bytes_per_move"] > 0


def test_without_the_model_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="make model"):
        run(Settings(parts=("load",), load=Load(model=tmp_path / "none")))
