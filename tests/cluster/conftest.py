"""One Ray node, one model whose KV is large enough for shared memory, and one service that most tests use."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import rollout
from rollout.client import Rollout
from tests.cluster.scene import Outputs, at_rest, audit, collect, eventually, make_kv_model, outputs, settings, submit


@pytest.fixture(scope="session")
def kv_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kv_model(tmp_path_factory.mktemp("models") / "kv")


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
