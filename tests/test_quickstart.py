"""The README's ten lines are `examples/quickstart.py`, and they run."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_llama

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "examples" / "quickstart.py"


def test_the_readme_shows_the_code_of_the_quickstart() -> None:
    code = QUICKSTART.read_text().partition('"""\n\n')[2]
    assert f"```python\n{code}```" in (ROOT / "README.md").read_text()
    assert len([line for line in code.splitlines() if line and not line.startswith("import")]) <= 12


def test_the_quickstart_runs(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_llama(tmp_path / "model")
    monkeypatch.setattr(sys, "argv", [str(QUICKSTART), str(model)])
    runpy.run_path(str(QUICKSTART), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert " suspended, " in lines[0]
    assert sorted(line.split()[0] for line in lines[1:]) == [
        f"auto-{group}/{sample}" for group in (0, 1) for sample in range(4)
    ]
    assert all(line.split()[1].startswith("worker-") for line in lines[1:])
