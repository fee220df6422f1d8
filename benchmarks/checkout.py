"""What benchmarks use of the checkout that they run from."""

from pathlib import Path

from rollout.errors import ModelNotFoundError

CHECKOUT = Path(__file__).resolve().parent.parent
SMOLLM2 = CHECKOUT / "models" / "smollm2-135m"
"""`make model` puts SmolLM2-135M there."""


def require_model(setting: str, path: Path) -> None:
    """Raises `ModelNotFoundError` if the model that a setting names is not there."""
    if not path.is_dir():
        raise ModelNotFoundError(f"{setting}: {path}: no such directory; `make model` puts SmolLM2-135M there")
