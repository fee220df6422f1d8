"""One Ray node, one model whose KV is large enough for shared memory, and one service that most tests use."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import rollout
from rollout.client import Rollout
from tests.cluster.scene import Outputs, at_rest, audit, collect, eventually, outputs, settings, submit
from tests.tiny_models import make_tiny_llama


@pytest.fixture(scope="session")
def kv_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 KiB of KV a token in fp32."""
    return make_tiny_llama(
        tmp_path_factory.mktemp("models") / "kv",
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
    )


@pytest.fixture(scope="package")
def shared(ray_cluster: None, kv_model: Path) -> Iterator[Rollout]:
    with rollout.start(settings(kv_model, "shared")) as service:
        yield service


@pytest.fixture(scope="package")
def truth(shared: Rollout) -> Outputs:
    """The batch's outputs when nothing disturbs it."""
    submit(shared)
    trajectories = collect(shared)
    assert all(len(t.output_ids) == 160 and not t.suspensions for t in trajectories.values())
    return outputs(trajectories)


@pytest.fixture
def service(shared: Rollout, truth: Outputs) -> Iterator[Rollout]:
    """The shared service, found and left without work, KV in the pool or pages in use."""
    eventually(lambda: at_rest(shared))
    yield shared
    shared.abort(keep="none", then="finish")
    shared.next_groups(100, timeout_s=0)
    eventually(lambda: at_rest(shared))
    audit(shared)
