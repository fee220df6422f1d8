"""What was written is on disk, and stays there."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Make a file's bytes, or a directory's renames, last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
