"""The node that benchmarks start for services has just the object store that services ask for."""

from pathlib import Path
from typing import Any

import pytest
import ray

from benchmarks.services import ROUNDING_BYTES, store_bytes
from rollout.cluster.description import WorkerDescription
from rollout.cluster.placement import STORE_SHARE, check_store
from rollout.config import load_config
from rollout.errors import ConfigError
from rollout.kv.keys import Fingerprint
from rollout.types import NodeId, WorkerId
from tests.tiny_models import make_tiny_llama
from tests.weights import WEIGHTS


@pytest.mark.parametrize("transport", ["object_store", "disk"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_service_starts_in_the_store_that_was_made_for_it_and_in_no_smaller_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, transport: str, dtype: str
) -> None:
    config = load_config(
        {
            "model": {"path": make_tiny_llama(tmp_path / "llama", hidden_size=256), "dtype": dtype},
            "cluster": {"workers": 2},
            "pool": {"budget_bytes": "8MiB", "warm_bytes": "4MiB"},
            "weights": {"transport": {"kind": transport}},
        }
    )
    elements = (tmp_path / "llama" / "model.safetensors").stat().st_size // 4
    described = WorkerDescription(
        worker=WorkerId("a"),
        node=NodeId("n"),
        incarnation="",
        fingerprint=Fingerprint(""),
        page_tokens=16,
        token_bytes=1,
        max_context=1,
        max_running=1,
        weights=WEIGHTS,
        digest="",
        weights_bytes=(4 if dtype == "float32" else 2) * elements,
    )

    def check(store: int) -> None:
        node: dict[str, Any] = {"NodeID": "n", "Resources": {"object_store_memory": float(store)}}
        monkeypatch.setattr(ray, "nodes", lambda: [node])
        check_store(config.pool, config.weights, [described, described])

    made = store_bytes(config)
    check(made)
    with pytest.raises(ConfigError, match=r"pool\.budget_bytes"):
        check(made - int(2 * ROUNDING_BYTES / STORE_SHARE))
