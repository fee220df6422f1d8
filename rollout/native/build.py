"""Compiles the kernels for this machine's CPU, once: the result is kept in the user's cache directory.

Its name says what it was made from: sources, flags, and everything that the compiler predefines for this CPU. So a
home directory may be shared between unlike machines. The file appears complete or not at all, and nobody waits for
another process: two that start at once both compile.
"""

import hashlib
import os
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from pathlib import Path

from rollout.errors import NativeKernelsError

SOURCES = Path(__file__).parent / "src"
TARGET = ("-std=c++20", "-O3", "-march=native")
FLAGS = (
    *TARGET,
    "-fPIC",
    "-shared",
    "-pthread",
    "-ffp-contract=off",  # bits must not depend on what the compiler fuses where
    "-fno-strict-aliasing",  # elements are read as words
    "-Wno-psabi",  # vectors that the CPU lacks are only passed to inlined functions
)
TIMEOUT_S = 300.0
_ERROR_LINES = 5


def build(*, again: bool = False) -> Path:
    """The shared library, compiled if this machine has none yet, or `again`.

    Raises `NativeKernelsError` if there is no compiler, or it fails.
    """
    compiler = _compiler()
    name = f"native-{_digest(compiler)}.so"
    folder = _cache_folder()
    library = folder / name
    if library.is_file() and not again:
        return library
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / name
        _run([*compiler, *FLAGS, "-o", str(made), str(SOURCES / "library.cpp")])
        made.replace(library)
    return library


def _compiler() -> list[str]:
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++"]
    for command in map(shlex.split, wanted):
        if command and shutil.which(command[0]):
            return command
    raise NativeKernelsError(f"native kernels need GCC 12 or newer: {' or '.join(wanted)} not found")


def _digest(compiler: list[str]) -> str:
    target = _run([*compiler, *TARGET, "-x", "c++", "-dM", "-E", os.devnull])
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    digest.update(" ".join(FLAGS).encode() + target.encode())
    return digest.hexdigest()


def _cache_folder() -> Path:
    """A directory that nobody else can write to: what lies there is loaded."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(home) / "rollout"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        facts = folder.stat()
        ours = facts.st_uid == os.getuid() and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if folder.is_absolute() and ours and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="rollout-"))


def _run(command: list[str]) -> str:
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise NativeKernelsError(f"native kernels: {command[0]} cannot be run: {error}") from None
    with process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the compiler proper is a child of the command
            raise NativeKernelsError(f"native kernels: {command[0]} took more than {TIMEOUT_S:g} s") from None
    if process.returncode:
        said = "\n".join(errors.strip().splitlines()[:_ERROR_LINES])
        raise NativeKernelsError(f"native kernels: {command[0]} failed with exit code {process.returncode}: {said}")
    return output
