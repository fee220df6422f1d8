"""Files that a command writes: checked before the work begins, complete or not there at all."""

import os
from pathlib import Path

from rollout.errors import ConfigError


def check_writable(path: Path) -> None:
    """Make the directory of `path`, and refuse what could not be written in the end.

    Raises `ConfigError`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ConfigError(f"{path}: cannot be written: it exists and is not a regular file")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path}: cannot be written: no permission for its directory")


def write_atomically(path: Path, text: str) -> None:
    """Put `text` where `path` is, all of it or nothing.

    Raises `OSError`.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
