"""Imports point strictly down the table of layers; heavy packages stay where they belong.

Every import counts: lazy ones, those under `TYPE_CHECKING`, and `import_module` with a constant name.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS = (
    ("errors",),
    ("types",),
    ("config", "durable", "memory", "metrics", "reports"),
    ("attention", "native", "kv", "control", "store", "text", "training", "transport"),
    ("model",),
    ("engine",),
    ("cluster", "sim"),
    ("client",),
    ("",),  # rollout/__init__.py, what drivers import
    ("server",),
    ("cli",),
    ("__main__",),
)
"""Bottom first. A package imports rows below its own, and itself."""

CONFINED = {"ray": {"cluster", "server"}, "fastapi": {"server"}, "flash_attn": {"attention"}}
"""The only packages that may import these."""

TORCH_FREE = (
    "errors",
    "types",
    "config",
    "metrics",
    "reports",
    "control",
    "kv.pages",
    "kv.tiers",
    "kv.nodes",
    "kv.radix",
    "kv.tiered",
    "kv.kept",
    "kv.holding",
    "kv.cache",
    "kv.keys",
    "kv.sums",
    "kv.ledger",
    "kv.displacement",
    "kv.leases",
    "engine.images",
    "engine.sequence_factory",
    "engine.repetition",
    "engine.rates",
    "engine.sources",
    "engine.scheduler",
    "engine.sequence",
    "transport.manifest",
    "sim.clock",
    "sim.load",
    "sim.machine",
    "sim.outcome",
)
"""Modules and packages that reach torch neither directly nor through another module of ours."""

FORBIDDEN_NAMES = {"utils", "common", "base", "helpers", "manager", "misc"}


def test_rollout_keeps_its_layers() -> None:
    sources = {_module(path.relative_to(ROOT)): path.read_text() for path in ROOT.glob("rollout/**/*.py")}
    assert len(sources) > 3
    assert violations(sources) == []


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("rollout.kv.pages", "from rollout.engine import Engine", "kv may not import engine"),
        ("rollout.kv.pages", "from rollout import engine", "kv may not import engine"),
        ("rollout.kv.pages", "from ..control import policy", "kv may not import control"),
        ("rollout.kv", "from ..control import policy", "kv may not import control"),
        ("rollout.kv.pages", "def f():\n    import rollout.model.decoder", "kv may not import model"),
        ("rollout.kv.pages", "if TYPE_CHECKING:\n    from rollout.cli.main import main", "kv may not import cli"),
        ("rollout.kv.pages", "import importlib\nimportlib.import_module('rollout.cli')", "kv may not import cli"),
        ("rollout.cluster.pool", "import rollout", "cluster may not import rollout/__init__.py"),
        ("rollout.sim.clock", "import rollout.cluster", "sim may not import cluster"),
        ("rollout.types", "from rollout.config import Config", "types may not import config"),
        ("rollout.client", "def f():\n    import ray", "ray belongs to cluster, server"),
        ("rollout.cli.serve", "from fastapi import FastAPI", "fastapi belongs to server"),
        ("rollout.model.decoder", "import flash_attn.ops as ops", "flash_attn belongs to attention"),
        ("rollout.kv.radix", "import torch", "reaches torch"),
        ("rollout.control.policies.slices", "from torch import Tensor", "reaches torch"),
        ("rollout.kv.cache", "from rollout.kv import storage", "reaches torch (through rollout.kv.storage)"),
        ("rollout.engine.scheduler", "from .runner import Runner", "through rollout.engine.runner, rollout.kv.storage"),
        ("rollout.kv.utils", "", "no module is called utils"),
        ("rollout.helpers.words", "", "no module is called helpers"),
        ("rollout.plugins", "", "plugins is in no layer"),
    ],
)
def test_a_violation_is_found(module: str, source: str, message: str) -> None:
    clean = {"rollout.kv.storage": "import torch", "rollout.engine.runner": "from rollout.kv import storage"}
    assert violations(clean) == []
    found = violations({**clean, module: source})
    assert any(message in violation for violation in found), found


def test_what_is_allowed_passes() -> None:
    sources = {
        "rollout": "from rollout.client import connect",
        "rollout.kv": "",
        "rollout.kv.cache": "from rollout.kv import pages\nfrom .radix import Tree\nimport numpy",
        "rollout.kv.pages": "from ..types import Version",
        "rollout.kv.radix": "import collections.abc",
        "rollout.cluster.worker": "import ray\nfrom rollout.engine.engine import Engine",
        "rollout.cli.main": "from rollout import connect\nimport rollout.server.http",
    }
    assert violations(sources) == []


def test_actors_that_hold_no_tensors_do_not_load_torch() -> None:
    program = "import sys, rollout.cluster.controller, rollout.cluster.pool; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


def violations(sources: Mapping[str, str]) -> list[str]:
    """What is wrong with a tree of modules, given as source text by dotted name."""
    rank = {package: row for row, layer in enumerate(LAYERS) for package in layer}
    imports = {module: sorted(set(_imports(module, source, sources))) for module, source in sources.items()}
    found: list[str] = []
    for module, names in imports.items():
        own = _package(module)
        found += [f"{module}: no module is called {part}" for part in module.split(".") if part in FORBIDDEN_NAMES]
        if own not in rank:
            found.append(f"{module}: {own} is in no layer")
            continue
        for name in names:
            top = name.partition(".")[0]
            if own not in CONFINED.get(top, {own}):
                found.append(f"{module}: {top} belongs to {', '.join(sorted(CONFINED[top]))}")
            if top != "rollout" or _package(name) == own:
                continue
            if rank.get(_package(name), len(LAYERS)) >= rank[own]:
                found.append(f"{module}: {own} may not import {_package(name) or 'rollout/__init__.py'}")
        if _is_torch_free(module) and (chain := _way_to_torch(module, imports)) is not None:
            through = f" (through {', '.join(chain)})" if chain else ""
            found.append(f"{module}: reaches torch{through}")
    return found


def _imports(module: str, source: str, known: Iterable[str]) -> Iterator[str]:
    """Absolute names of all modules that `module` imports; `from p import m` is p.m where that is a module."""
    modules = {*known, *(f"rollout.{package}" for layer in LAYERS for package in layer)}
    is_package = any(other.startswith(f"{module}.") for other in modules)
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=origin, names=names, level=level):
                if level:
                    parts = module.split(".")
                    parents = parts[: len(parts) - level + is_package]
                    origin = ".".join([*parents, *([origin] if origin else [])])
                assert origin is not None
                for alias in names:
                    inner = f"{origin}.{alias.name}"
                    yield inner if inner in modules else origin
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def _way_to_torch(module: str, imports: Mapping[str, list[str]]) -> list[str] | None:
    """Modules of ours between `module` and torch; none if it cannot be reached."""
    ways: dict[str, list[str]] = {module: []}
    queue = [module]
    for current in queue:
        for name in imports.get(current, []):
            if name.partition(".")[0] == "torch":
                return ways[current]
            if name not in ways:
                ways[name] = [*ways[current], name]
                queue.append(name)
    return None


def _is_torch_free(module: str) -> bool:
    inner = module.removeprefix("rollout.")
    return any(inner == name or inner.startswith(f"{name}.") for name in TORCH_FREE)


def _package(module: str) -> str:
    """`kv` of `rollout.kv.pages`; empty for `rollout` itself."""
    return [*module.split("."), ""][1]


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
