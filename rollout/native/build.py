"""Compiles the kernels for this machine's CPU, once: the result is kept in the user's cache directory.

Its name says what it was made from: sources, flags, and everything that the compiler predefines for this CPU. So a
home directory may be shared between unlike machines. The file appears complete or not at all, and nobody waits for
another process: two that start at once both compile.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from rollout.errors import NativeKernelsError

SOURCES = Path(__file__).parent / "src"
FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-strict-aliasing",  # elements are read as words
    "-Wno-psabi",  # vectors that the CPU lacks are only passed to inlined functions
)
TIMEOUT_S = 300.0
_ERROR_LINES = 5


def build() -> Path:
    """The shared library, compiled if this machine has none yet.

    Raises `NativeKernelsError` if there is no compiler, or it fails.
    """
    compiler = _compiler()
    name = f"native-{_digest(compiler)}.so"
    for folder in _cache_folders():
        library = folder / name
        if library.is_file():
            return library
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / name
                _run([compiler, *FLAGS, "-o", str(made), str(SOURCES / "library.cpp")])
                made.replace(library)
        except OSError:
            continue  # not writable: the next one
        return library
    raise NativeKernelsError("native kernels: no directory to build in; set XDG_CACHE_HOME to one that is writable")


def _compiler() -> str:
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++"]
    for name in wanted:
        if found := shutil.which(name):
            return found
    raise NativeKernelsError(f"native kernels need GCC 12 or newer: {' or '.join(wanted)} not found")


def _digest(compiler: str) -> str:
    target = _run([compiler, *FLAGS[:3], "-x", "c++", "-dM", "-E", os.devnull])
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    digest.update(" ".join(FLAGS).encode() + target.encode())
    return digest.hexdigest()


def _cache_folders() -> tuple[Path, ...]:
    home = os.environ.get("XDG_CACHE_HOME")
    chosen = Path(home) if home else Path("~/.cache").expanduser()
    return (chosen / "rollout", Path(tempfile.gettempdir()) / f"rollout-{os.getuid()}-{os.getpid()}")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NativeKernelsError(f"native kernels: {command[0]} took more than {TIMEOUT_S:g} s") from None
    except OSError as error:
        raise NativeKernelsError(f"native kernels: {command[0]} cannot be run: {error}") from None
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[:_ERROR_LINES])
        raise NativeKernelsError(f"native kernels: {command[0]} failed with exit code {done.returncode}: {said}")
    return done.stdout
