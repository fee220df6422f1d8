"""Kernels are compiled once a machine, and where they cannot be an engine says so and runs without them."""

import logging
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.errors import NativeKernelsError
from rollout.native.build import build
from rollout.native.library import Kernels, load
from tests.engine.test_parity import GREEDY, assert_equal, hugging_face, prompts
from tests.local_service import LocalService
from tests.tiny_models import make_tiny_llama

COMPILE = f'exec {shutil.which("g++")} "$@" -O0'
"""As it would be, without what takes most of the time."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory, and no library loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(_script(tmp_path / "compiler", COMPILE)))
    load.cache_clear()
    yield tmp_path / "cache"
    load.cache_clear()


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that notes the arguments of each of its calls in this file."""
    log = tmp_path / "calls"
    monkeypatch.setenv("CXX", str(_script(tmp_path / "noting", f'echo "$@" >> {log}\n{COMPILE}')))
    return log


def _script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def compilations(calls: Path) -> int:
    return sum("library.cpp" in line for line in calls.read_text().splitlines())


def test_the_second_build_finds_the_first_one(cache: Path, calls: Path) -> None:
    first = build()
    assert first.is_relative_to(cache)
    assert build() == first
    assert compilations(calls) == 1
    assert [file.name for file in first.parent.iterdir()] == [first.name]


def test_another_cpu_gets_another_build(cache: Path, tmp_path: Path) -> None:
    first = build()
    _script(tmp_path / "compiler", f"{COMPILE} -D__ANOTHER_CPU__=1")
    assert build() != first


def test_a_cache_that_cannot_be_written_is_replaced_by_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("CXX", str(_script(tmp_path / "compiler", COMPILE)))
    library = build()
    assert library.is_file()
    shutil.rmtree(library.parent)


def test_nothing_is_taken_from_a_directory_that_others_can_write_to(cache: Path) -> None:
    (cache / "rollout").mkdir(parents=True)
    (cache / "rollout").chmod(0o777)
    library = build()
    assert not library.is_relative_to(cache)
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    shutil.rmtree(library.parent)


def test_a_damaged_library_is_compiled_again(cache: Path, calls: Path) -> None:
    build().write_bytes(b"")
    Kernels(1).close()
    assert compilations(calls) == 2


def test_no_compiler_is_a_typed_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeKernelsError, match="need GCC 12 or newer: no-such-compiler not found"):
        build()


def test_what_a_failing_compiler_says_is_in_the_error(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(_script(tmp_path / "broken", "echo no space left >&2; exit 3")))
    with pytest.raises(NativeKernelsError, match="failed with exit code 3: no space left"):
        build()


def test_a_compiler_that_hangs_is_given_up_with_its_children(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    monkeypatch.setattr("rollout.native.build.TIMEOUT_S", 1.0)
    monkeypatch.setenv("CXX", str(_script(tmp_path / "hangs", f"sleep 600 &\necho $! > {child}\nwait")))
    with pytest.raises(NativeKernelsError, match=r"took more than 1 s"):
        build()
    deadline = time.monotonic() + 10
    while _runs(int(child.read_text())):
        assert time.monotonic() < deadline, "the compiler's child still runs"


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_without_a_compiler_the_engine_runs_on_torch_and_says_so_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    path = make_tiny_llama(tmp_path / "tiny")
    (prompt,) = prompts(1)
    with caplog.at_level(logging.WARNING):
        service = LocalService(path, workers=1)
        service.submit("p", prompt, GREEDY)
        ours = service.run(1)
    assert_equal(ours["p/0"], *hugging_face(path, prompt, GREEDY.max_new_tokens))
    assert [record.message for record in caplog.records if "kernels" in record.message] == [
        "engine.kernels: torch, several times slower than native, which cannot be: "
        "native kernels need GCC 12 or newer: no-such-compiler not found"
    ]
    service.close()
    for asked in ({"kernels": "native"}, {"deterministic": True}):
        with pytest.raises(NativeKernelsError, match="no-such-compiler not found"):
            LocalService(path, workers=1, **asked)


def test_a_model_that_native_kernels_cannot_run_is_run_by_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_tiny_llama(tmp_path, intermediate_size=97)
    (prompt,) = prompts(1)
    service = LocalService(path, workers=1)
    service.submit("p", prompt, GREEDY)
    assert_equal(service.run(1)["p/0"], *hugging_face(path, prompt, GREEDY.max_new_tokens))
    assert "got {'intermediate': 97}, allowed: even sizes" in caplog.text
    service.close()
    with pytest.raises(NativeKernelsError, match="allowed: even sizes"):
        LocalService(path, workers=1, kernels="native")
