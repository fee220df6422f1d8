"""Sees whether Ray moves objects of this node from its store to disk, by looking where it would put them.

Ray's own count is behind gRPC, which `ray` alone does not install, or the dashboard. Its spill workers write
to a directory that they make at the first spill, in the place that the raylet, the parent of every actor's
process, was told. A look costs a fraction of a millisecond. What was written and deleted again between two
looks is not seen; where Ray spills to a storage that is no file system, nothing is known.
"""

import os
from pathlib import Path

from rollout.types import NodeId

_DIRECTORY = "--fallback_directory="
_SESSION = "--session_dir="
_PREFIX = "ray_spilled_objects"


class SpillWatch:
    """Bytes spilled on a node since this was made."""

    def __init__(self, node: NodeId, parent: Path | None) -> None:
        """`parent` is where Ray makes the spill directories; None: unknown."""
        self._node = node
        self._parent = parent
        self._nbytes: dict[str, int] = {}
        """Of every file ever seen."""
        self._before = sum(self._look().values())

    def look(self) -> int | None:
        """The bytes that are seen to have been spilled so far; None if that is not known."""
        if self._parent is None:
            return None
        self._nbytes |= self._look()
        return sum(self._nbytes.values()) - self._before

    def _look(self) -> dict[str, int]:
        found: dict[str, int] = {}
        if self._parent is None:
            return found
        for directory in self._parent.glob(f"{_PREFIX}*{self._node}*"):
            for file in directory.glob("*"):
                try:
                    found[file.name] = file.stat().st_size
                except FileNotFoundError:
                    continue  # deleted meanwhile
        return found


def find_spill_parent() -> Path | None:
    """Where the raylet that is the parent of this process lets objects be spilled, if that is a directory."""
    try:
        arguments = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except OSError:
        return None
    told = {name: a.removeprefix(name) for a in arguments for name in (_DIRECTORY, _SESSION) if a.startswith(name)}
    parent = Path(told.get(_DIRECTORY, ""))
    session = Path(told.get(_SESSION, ""))
    # With a storage that is no file system, the raylet is told the directory above the session's.
    return parent if parent.is_absolute() and parent != session.parent else None
