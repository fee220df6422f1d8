"""`bench decode` and `bench prefill` at toy sizes, with those peers that this interpreter has."""

import sys
from pathlib import Path

import pytest

from benchmarks import decode, prefill
from benchmarks.sides import Sides
from rollout.errors import ConfigError, ModelNotFoundError
from tests.tiny_models import make_tiny_llama


@pytest.fixture
def sides(tmp_path: Path) -> Sides:
    return Sides(model=make_tiny_llama(tmp_path / "llama"), cpus=1)


@pytest.mark.soak
def test_decoding_is_compared_with_the_limit_and_with_each_peer_that_works(ray_cluster: None, sides: Sides) -> None:
    settings = decode.Settings(
        sides=sides,
        batches=(1, 3),
        long_batches=(2,),
        new_tokens=4,
        long_tokens=9,
        turns=2,
        hf_batches=(3,),
        hf_turns=2,
    )
    results, ratios = decode.run(settings, Path(sys.executable))
    assert set(ratios) == {
        "replace_vs_memcpy",
        "memory_vs_allowed",
        *(f"decode_vs_limit_b{case}" for case in ("1", "3", "2_long")),
        *(f"decode_vs_{peer}_b3" for peer in ("hf", "hf_cb")),
    }
    assert all(ratio > 0 for ratio in ratios.values())
    assert set(results["tokens_per_s"]["b3"]) == {"rollout", "hf", "hf_cb", "limit"}
    assert set(results["tokens_per_s"]["b1"]) == {"rollout", "limit"}
    assert {name: len(turns) for name, turns in results["turns_s"]["b3"].items()} == {
        "rollout": 2,
        "hf": 2,
        "hf_cb": 2,
    }
    assert "No module named 'vllm'" in results["sides"]["vllm"]["unavailable"]
    assert results["sides"]["hf"]["versions"]["transformers"]
    assert results["sides"]["hf"]["huge_pages"] is results["sides"]["limit"]["huge_pages"] is True
    assert set(results["our_share_of_peer_turns"]) == {"hf", "hf_cb"}
    assert results["medians_of"]["b3"] == {"rollout": 2, "hf": 2, "hf_cb": 2}
    memory = results["memory"]
    assert memory["peak_bytes"] == memory["weights_bytes"] + memory["pages_bytes"] + memory["over_bytes"]
    assert results["weights"]["bytes"] > 0
    limit = results["limit"]["b3"]
    assert limit["step_ms"] == pytest.approx(
        min(value for name, value in limit.items() if name.startswith("gemm_")) + limit["kv_ms"], rel=0.5
    )


def test_prompts_are_compared_with_the_limit_and_without_an_interpreter_with_nothing_else(
    ray_cluster: None, sides: Sides
) -> None:
    settings = prefill.Settings(sides=sides, prompts=3, prompt_tokens=40, turns=1, limit_rows=(16, 32))
    results, ratios = prefill.run(settings, None)
    assert set(ratios) == {"prefill_vs_limit"}
    assert set(results["tokens_per_s"]) == {"rollout", "limit"}
    assert set(results["limit"]) == {"rows_16", "rows_32"}
    assert set(results["sides"]) == {"rollout", "limit"}


def test_what_cannot_be_measured_is_refused_first(tmp_path: Path, sides: Sides) -> None:
    with pytest.raises(ModelNotFoundError, match="make model"):
        decode.run(decode.Settings(sides=Sides(model=tmp_path / "none")), None)
    with pytest.raises(ConfigError, match=r"sides.cpus: got 10000, and this process may use"):
        prefill.run(prefill.Settings(sides=Sides(model=sides.model, cpus=10_000)), None)
