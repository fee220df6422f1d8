"""`examples/` is no package: its files are imported as a script there imports its neighbours."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

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
def ppo(examples: None) -> ModuleType:
    return importlib.import_module("ppo")


@pytest.fixture(scope="session")
def async_grpo(examples: None) -> ModuleType:
    return importlib.import_module("async_grpo")
