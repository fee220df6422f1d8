"""What all tests share: the soak options, and an environment in which Ray reports nothing."""

import os

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


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
