"""`bench resume` at toy sizes: every resume had its KV from where it was kept, which the benchmark checks itself."""

import sys
from pathlib import Path

import pytest
from pydantic import ByteSize

from benchmarks.resume import KEEPS, Settings, run
from benchmarks.standin import StandIn
from rollout.errors import ModelNotFoundError

POOL_BYTES = ByteSize(64 << 20)

PEER = """
from benchmarks.peers.protocol import serve

def prepare(options):
    cached = []
    def generate(request):
        (prompt,) = request["prompts"]
        n = request["new_tokens"]
        warm = cached == prompt[: len(cached)]
        cached[:] = prompt
        return {"seconds": (0.5 if warm and cached else 2.0) + n / 100, "output_ids": [[7] * n], "logprobs": [n]}
    def forget(request):
        cached.clear()
        cached.append(-1)
        return {"forgotten": True}
    return {"block_size": 128, "openmp": options["openmp"]}, {"generate": generate, "forget": forget}

serve(prepare)
"""


@pytest.mark.soak
def test_every_place_is_measured(ray_cluster: None, tmp_path: Path) -> None:
    model = StandIn(layers=4, kv_heads=4, head_dim=64).write(tmp_path / "model")
    results, ratios = run(Settings(model=model, cpus=1, tokens=400, repeats=5, pool_bytes=POOL_BYTES), None)
    assert set(ratios) == {"resume_vs_copy", "resume_vs_reprefill"}
    for keep in KEEPS:
        assert len(results[keep]["all_ms"]) == 5
    phases = results["pool"]["phases"]
    assert set(phases) == {"command_ms", "admit_ms", "open_ms", "verify_and_scatter_ms", "to_batch_ms"}
    assert results["memcpy_ms"] > 0
    assert results["decode_step_ms"] > 0


def test_the_peer_resubmits_lengths_spread_over_a_block(ray_cluster: None, tmp_path: Path) -> None:
    model = StandIn(layers=4, kv_heads=4, head_dim=64).write(tmp_path / "model")
    (tmp_path / "peer.py").write_text(PEER)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "peer.py"} "$3"\n')  # behind -m MODULE
    python.chmod(0o755)
    results, ratios = run(
        Settings(model=model, cpus=1, tokens=64, repeats=5, peer_turns=4, pool_bytes=POOL_BYTES), python
    )
    vllm = results["vllm"]
    assert vllm["resubmitted_tokens"] == [65, 97, 129, 161]
    assert vllm["medians_of"] == len(vllm["warm_all_ms"]) == len(vllm["evicted_all_ms"]) == 4
    assert (vllm["warm_ms"], vllm["evicted_ms"]) == (pytest.approx(500), pytest.approx(2000))
    assert vllm["described"]["openmp"] == "plain"
    assert ratios["resume_vs_peer"] == pytest.approx(4 * ratios["resume_vs_peer_warm"])


def test_without_the_model_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="make model"):
        run(Settings(model=tmp_path / "none"), None)
