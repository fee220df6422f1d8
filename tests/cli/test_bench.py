"""`rollout bench` finds, runs and reports benchmarks; those of this checkout have the shape that it wants."""

import importlib
import inspect
import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.cli import bench
from rollout.cli.main import main
from rollout.config import Section

CHECKOUT = Path(__file__).parents[2]
GOOD = '''"""Counts, for a test.

More words.
"""

from benchmarks.sharing import double
from rollout.config import Section


class Settings(Section):
    number: int = 3
    """To double."""


def run(settings):
    return {"doubled": {"number": double(settings.number)}, "each": [1.0, 2.0]}, {"two": 2.0}
'''
PEERED = '''"""Compares, for a test."""

from rollout.config import Section


class Settings(Section): ...


def run(settings, peer_python):
    return {"peer": str(peer_python)}, {}
'''
NEEDY = '''"""Needs what nobody has."""

import no_such_package_anywhere

class Settings: ...

def run(settings): ...
'''


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout with three benchmarks, which `rollout` believes to run from."""
    directory = tmp_path / "benchmarks"
    directory.mkdir()
    (tmp_path / "pyproject.toml").touch()
    (directory / "__init__.py").touch()
    (directory / "sharing.py").write_text('"""Shared."""\n\n\ndef double(number):\n    return 2 * number\n')
    (directory / "good.py").write_text(GOOD)
    (directory / "needy.py").write_text(NEEDY)
    (directory / "peered.py").write_text(PEERED)
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    real = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "benchmarks"}
    for name in real:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]


def test_a_benchmark_runs_and_its_report_says_where_and_how(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "reports" / "good.json"
    assert main(["bench", "good", "--set", "number=21", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["name"] == "good"
    assert report["command"] == f"rollout bench good --set number=21 --json {out}"
    assert report["settings"] == {"number": 21}
    assert report["results"] == {"doubled": {"number": 42}, "each": [1.0, 2.0]}
    assert report["ratios"] == {"two": 2.0}
    assert report["machine"]["cpu"]
    assert isinstance(report["machine"]["flags"], list)
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["memory_bytes"] > 1 << 20
    assert set(report["machine"]["packages"]) == {"torch", "ray", "numpy"}
    assert list(out.parent.iterdir()) == [out], "nothing but the report is left"
    printed = capsys.readouterr().out
    assert "doubled.number" in printed
    assert "42" in printed
    assert "each" not in printed


@pytest.mark.parametrize(("arguments", "peer"), [([], "None"), (["--peer-python", sys.executable], sys.executable)])
def test_a_benchmark_with_peers_is_told_their_interpreter_if_there_is_one(
    arguments: list[str], peer: str, checkout: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report.json"
    assert main(["bench", "peered", *arguments, "--json", str(out)]) == 0
    assert json.loads(out.read_text())["results"] == {"peer": peer}


def test_the_list_names_what_can_be_run_and_runs_nothing(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    assert capsys.readouterr().out == (
        "good: Counts, for a test.\nneedy: Needs what nobody has.\npeered: Compares, for a test.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no benchmark was named; there are: good, needy, peered"),
        (["fast"], "no benchmark is named 'fast'; there are: good, needy, peered"),
        (["sharing"], "no benchmark is named 'sharing'"),
        (["good", "--set", "number=many"], "bench good: number: "),
        (["good", "--set", "size=1"], "bench good: size: unknown key"),
        (["good", "--set", "number"], "expected a.b=value"),
        (["good", "--json", "."], "is not a regular file"),
        (["good", "--peer-python", sys.executable], "bench good has no peers; those that have: peered"),
        (["peered", "--peer-python", "no/such/python"], "--peer-python: got no/such/python, allowed: an interpreter"),
        (["peered", "--peer-python", "."], "--peer-python: got ., allowed: an interpreter"),
        (["needy"], "needs the package no_such_package_anywhere"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_without_a_checkout_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    (tmp_path / "benchmarks").mkdir()  # somebody else's, beside an installed package
    assert main(["bench", "--list"]) == 2
    assert "run from a checkout of the source only" in capsys.readouterr().err


def test_the_installed_package_has_no_benchmarks() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"]["find"]["include"] == ["rollout*"]


def test_every_module_here_imports_and_every_benchmark_has_its_parts() -> None:
    found = bench.find_benchmarks(CHECKOUT)
    for path in sorted((CHECKOUT / "benchmarks").glob("*.py")):
        name = "benchmarks" if path.stem == "__init__" else f"benchmarks.{path.stem}"
        module = importlib.import_module(name)
        assert module.__doc__, name
        if path.stem not in found:
            continue
        assert found[path.stem].summary == module.__doc__.partition("\n")[0]
        assert issubclass(module.Settings, Section), name
        module.Settings()  # everything has a default
        parameters = ["settings", "peer_python"] if found[path.stem].has_peers else ["settings"]
        assert list(inspect.signature(module.run).parameters) == parameters, name
        undocumented = [field for field, info in module.Settings.model_fields.items() if not info.description]
        assert not undocumented, f"{name}: settings without a docstring: {undocumented}"
