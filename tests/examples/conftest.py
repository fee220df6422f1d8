"""`examples/` is no package: its files are imported as a script there imports its neighbours."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import rollout
from rollout.client import Rollout
from tests.examples.scene import service_config
from tests.tiny_models import EOS_ID, make_tiny_llama

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(scope="session")
def examples() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield


@pytest.fixture(scope="session")
def grpo(examples: None) -> ModuleType:
    return importlib.import_module("grpo")


@pytest.fixture(scope="session")
def session(examples: None) -> ModuleType:
    return importlib.import_module("session")


@pytest.fixture(scope="session")
def ppo(examples: None) -> ModuleType:
    return importlib.import_module("ppo")


@pytest.fixture(scope="session")
def async_grpo(examples: None) -> ModuleType:
    return importlib.import_module("async_grpo")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So many of its tokens end a sequence that lengths differ a lot."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "llama", eos_token_id=[EOS_ID, *range(4, 320, 24)])


@pytest.fixture(scope="package")
def service(ray_cluster: None, model: Path) -> Iterator[Rollout]:
    """Suspends every trajectory after each slice, and uses no KV of other weights."""
    with rollout.start(service_config(model, "examples", workers=2)) as service:
        yield service


@pytest.fixture(scope="package")
def reusing(ray_cluster: None, model: Path) -> Iterator[Rollout]:
    """The same with KV of earlier weights, and what is two versions old begun again."""
    config = service_config(model, "reusing", workers=1)
    config["abort"]["policies"].append({"kind": "stale", "behind": 2})
    config["weights"] = {"mode": "in_place", "kv_reuse": {"kind": "stale", "max_lag": 4}}
    with rollout.start(config) as service:
        yield service
