"""`rollout bench`: runs a benchmark of the checkout that this installation runs from.

A benchmark is a module in `benchmarks/` with a docstring that says what it measures, a `Settings` section,
and `run(settings)`, which returns results (nested mappings of numbers and words) and ratios (numbers without
a dimension). One that can compare with other systems has `run(settings, peer_python)`: their interpreter, or None,
and then their ratios are absent. Modules that lack one of these are code that benchmarks share.
"""

import argparse
import ast
import importlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

import rollout
from rollout.cli.interrupt import Interrupt
from rollout.cli.machine import Machine, this_machine
from rollout.cli.output import check_writable, write_atomically
from rollout.config import Section, load_section
from rollout.errors import ConfigError

PACKAGE = "benchmarks"
CHECKOUT = Path(rollout.__file__).resolve().parent.parent
"""Where this package is installed from, if that is a checkout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One that can be run."""

    summary: str
    """The first line of what it says of itself."""
    has_peers: bool
    """It takes --peer-python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run of one benchmark. Field names are an interface; more may be added."""

    name: str
    date: str
    """When it began."""
    command: str
    machine: Machine
    settings: dict[str, Any]
    results: Mapping[str, Any]
    ratios: Mapping[str, float]

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = subparsers.add_parser("bench", help="run a benchmark of this checkout")
    command.add_argument("name", nargs="?", metavar="NAME", help="which one; --list names them")
    command.add_argument("--list", action="store_true", help="say what there is, and end")
    command.add_argument(
        "--set", action="append", default=[], metavar="a.b=value", dest="overrides", help="change one of its settings"
    )
    command.add_argument(
        "--peer-python",
        type=Path,
        metavar="PATH",
        help="interpreter that has the systems to compare with; without it they are left out",
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write machine, command, results and ratios there")
    command.set_defaults(func=_bench)


def find_benchmarks(checkout: Path) -> dict[str, Benchmark]:
    """The benchmarks of a checkout, by name.

    They are read, not imported. Raises `ConfigError` if `checkout` is none.
    """
    directory = checkout / PACKAGE
    if not directory.is_dir() or not (checkout / "pyproject.toml").is_file():
        raise ConfigError(
            f"benchmarks run from a checkout of the source only, and {checkout} is none "
            "(clone it, then pip install -e .)"
        )
    found = {}
    for path in sorted(directory.glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"), str(path))
        named = {node.name: node for node in module.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        run = named.get("run")
        if "Settings" in named and isinstance(run, ast.FunctionDef):
            summary = (ast.get_docstring(module) or "").partition("\n")[0]
            has_peers = any(argument.arg == "peer_python" for argument in run.args.args)
            found[path.stem] = Benchmark(summary=summary, has_peers=has_peers)
    return found


def _bench(args: argparse.Namespace) -> int:
    found = find_benchmarks(CHECKOUT)
    if args.list:
        sys.stdout.writelines(f"{name}: {each.summary}\n" for name, each in found.items())
        return 0
    if args.name not in found:
        wanted = "no benchmark was named" if args.name is None else f"no benchmark is named {args.name!r}"
        raise ConfigError(f"{wanted}; there are: {', '.join(found) or 'none'}")
    peers = {}
    if found[args.name].has_peers:
        peers["peer_python"] = args.peer_python and _interpreter(args.peer_python)
    elif args.peer_python is not None:
        with_peers = ", ".join(name for name, each in found.items() if each.has_peers)
        raise ConfigError(f"--peer-python: bench {args.name} has no peers; those that have: {with_peers or 'none'}")
    if args.json is not None:
        check_writable(args.json)
    with Interrupt():
        report = _run(args.name, args.overrides, args.command, peers)
    Console().print(_table("ratios", report.ratios))
    Console().print(_table("results", report.results))
    if args.json is not None:
        write_atomically(args.json, report.as_json())
    return 0


def _interpreter(path: Path) -> Path:
    """Where it lies; links are not followed, since an environment is known by them."""
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ConfigError(f"--peer-python: got {path}, allowed: an interpreter, such as bin/python of an environment")
    return path.absolute()


def _run(name: str, overrides: Sequence[str], command: str, peers: Mapping[str, Path | None]) -> Report:
    module = _load(name)
    settings: Section = load_section(module.Settings, {}, overrides, where=f"bench {name}")
    date, machine = datetime.now(UTC).isoformat(timespec="seconds"), this_machine()
    results, ratios = module.run(settings, **peers)
    assert all(isinstance(ratio, float) and math.isfinite(ratio) for ratio in ratios.values()), ratios
    return Report(
        name=name,
        date=date,
        command=command,
        machine=machine,
        settings=settings.model_dump(mode="json"),
        results=results,
        ratios=ratios,
    )


def _load(name: str) -> ModuleType:
    """Raises `ConfigError` if the benchmark needs a package that is not installed."""
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    try:
        return importlib.import_module(f"{PACKAGE}.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == PACKAGE:
            raise
        raise ConfigError(f"bench {name} needs the package {error.name} (pip install -e '.[dev]')") from None


def _table(title: str, values: Mapping[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in _flat(values):
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    return table


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """The leaves of nested mappings with their dotted names; lists are for the file only."""
    leaves: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            leaves += _flat(value, f"{before}{name}.")
        elif not isinstance(value, (list, tuple)):
            leaves.append((f"{before}{name}", value))
    return leaves
