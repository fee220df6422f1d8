"""Two nodes whose object stores are too small for the KV that is suspended: Ray never spills, and nothing is lost."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_llama

RAY_SETTINGS = {"RAY_verbose_spill_logs": "1", "RAY_health_check_period_ms": "500"}
"""All spilling is logged, and a lost node is noticed sooner."""


@pytest.mark.soak
def test_pools_of_two_nodes_never_make_ray_spill_and_a_lost_node_costs_recomputation_only(tmp_path: Path) -> None:
    model = make_tiny_llama(
        tmp_path / "wide",
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=256,
    )
    with tempfile.TemporaryDirectory(prefix="ray-") as apart:
        ran = subprocess.run(
            [sys.executable, "-m", "tests.cluster.two_nodes", str(model), str(tmp_path / "seen.json")],
            capture_output=True,
            text=True,
            timeout=1200,
            cwd=Path(__file__).parents[2],
            env=os.environ | RAY_SETTINGS | {"RAY_TMPDIR": apart},
        )
    assert ran.returncode == 0, ran.stderr[-8000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["nodes"] == 2
    assert seen["equal"]
    assert seen["spilled"] == []
    assert seen["seen_to_spill"] == [0, 0]
    assert seen["spilled_when_full"] > 0
    assert len(seen["alarm"]) == 1
    assert seen["read_elsewhere"] > 0
    assert seen["still_copied"] == [0, 0]
    assert all(refused > 0 for refused in seen["refused"])
    assert seen["exported_bytes"] > 0
    assert seen["resumed_elsewhere"] > 0
    assert seen["restored_tokens"] > 0
    assert seen["restore_failures"] == 0
    assert seen["equal_without_a_node"]
    assert seen["workers_lost"] == 1
