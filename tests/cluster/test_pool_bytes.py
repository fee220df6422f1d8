"""Segments are sent once: what a group costs the pool, by the benchmark that measures it with a real model."""

from pathlib import Path

from benchmarks.pool_bytes import Settings, run
from tests.tiny_models import make_tiny_llama


def test_a_group_is_stored_with_one_prompt_and_suspended_again_sends_what_is_new(
    ray_cluster: None, tmp_path: Path
) -> None:
    model = make_tiny_llama(tmp_path / "model", max_position_embeddings=1 << 16)
    settings = Settings(model=model, dtype="float32", cpus=1, prompt_tokens=1000, tokens=200, name="pool-bytes")
    results, ratios = run(settings)
    assert results["tokens_first"] >= 16 * 200
    assert results["displaced_images"] == 0
    assert 1.0 <= ratios["stored_vs_least"] <= 1.05
    assert ratios["sent_again_vs_least"] <= 1.02
    tokens = results["tokens_first"]  # how many that are depends on how fast the machine is
    assert ratios["stored_vs_copies"] <= 1.05 * (1000 + tokens) / (16 * 1000 + tokens)
