"""A directory of trajectories that a run appends to, partitioned by version: `version=N/part-….parquet`.

Each append is one file, which appears when it is whole: it is written under a hidden name in the directory itself,
synced and renamed. A crash leaves whole files and perhaps a hidden one, which no reader looks at and a later writer
removes. A writer holds a lock (flock) on its hidden file for as long as it lives, so that the lock tells the living
from the dead; any number of processes may append at once, and remove leftovers of their own machine only.
"""

import contextlib
import fcntl
import os
import re
import secrets
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.durable import sync
from rollout.errors import ConfigError, InvalidArgumentError
from rollout.store.file import scan_file
from rollout.store.schema import SCHEMA, Stored, checked_rewards, to_row
from rollout.types import Trajectory, Version

_PARTITION = re.compile(r"version=([0-9]{1,19})")
_PART = re.compile(r"part-([0-9]{8,})-[0-9a-f]{16}\.parquet")
_ROW_GROUP_ROWS = 1024


class TrajectoryStore:
    """Appends batches of trajectories to `directory` and reads them back; need not be closed.

    `version`, the partition, is a label that the driver gives each batch: usually the version that was live when the
    batch was trained on. Which versions sampled a trajectory's tokens is in its column `versions`, whatever the label.
    Raises `ConfigError` for a path that is something else than a directory.
    """

    def __init__(self, directory: Path) -> None:
        if directory.exists() and not directory.is_dir():
            raise ConfigError(f"{directory}: cannot hold trajectories: it is not a directory")
        self._directory = directory
        self._opened = False

    def append(
        self, trajectories: Iterable[Trajectory], *, version: int, rewards: Sequence[float | None] | None = None
    ) -> Path:
        """One more file, which is on disk when this returns, and not there at all if it raises.

        Raises `InvalidArgumentError` for a version that is no label or rewards that do not fit, `ConfigError` if the
        directory cannot be made, `OSError` if writing fails.
        """
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 2**63:
            raise InvalidArgumentError(f"version: got {version!r:.80}, allowed: an integer, 0 … 2**63 - 1")
        rows = list(trajectories)
        given = [None] * len(rows) if rewards is None else checked_rewards(rewards, len(rows))
        table = pa.Table.from_pylist([to_row(*row) for row in zip(rows, given, strict=True)], schema=SCHEMA)
        self._open()
        with self._partial() as partial:
            pq.write_table(table, str(partial), compression="zstd", row_group_size=_ROW_GROUP_ROWS)
            sync(partial)
            return self._publish(partial, Version(version))

    def read(self, versions: Iterable[int] | None = None) -> list[Stored]:
        """All of it, or what was appended under some versions: in order of append, but for appends at the same time.

        Raises `ConfigError` if there is no such directory, or a file of it cannot be read.
        """
        return list(self.scan(versions))

    def scan(self, versions: Iterable[int] | None = None) -> Iterator[Stored]:
        """What `read` returns, one by one."""
        wanted = None if versions is None else set(versions)
        for part in sorted(self._parts()):
            if wanted is None or part.version in wanted:
                yield from scan_file(part.path, part.version)

    def discard(self, *, from_version: int) -> int:
        """Remove what was appended under this version and later ones, for a run that does them again; returns how many
        files that were. The last of them goes first, so that what is left after a crash is what a shorter run would
        have left. Raises `ConfigError` as `read` does, but not for a directory that is not there yet.
        """
        if not self._directory.exists():
            return 0
        late = [part for part in self._parts() if part.version >= from_version]
        for part in sorted(late, reverse=True):
            part.path.unlink(missing_ok=True)
        for partition in {part.path.parent for part in late}:
            sync(partition)
        return len(late)

    def _parts(self) -> "Iterator[_Part]":
        try:
            partitions = list(self._directory.iterdir())
        except OSError as error:
            raise ConfigError(f"{self._directory}: cannot read trajectories: {error.strerror}") from None
        for partition in partitions:
            if (label := _PARTITION.fullmatch(partition.name)) is None:
                continue
            for path in partition.iterdir():
                if (number := _PART.fullmatch(path.name)) is not None:
                    yield _Part(int(number[1]), path.name, Version(int(label[1])), path)

    def _open(self) -> None:
        """Make the directory, and remove what dead writers left there."""
        if self._opened:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            sync(self._directory.parent)
        except OSError as error:
            raise ConfigError(f"{self._directory}: cannot hold trajectories: {error.strerror}") from None
        for partial in self._directory.glob(f".part-*.{socket.gethostname()}.partial"):
            with contextlib.suppress(OSError):  # its writer lives, or has just published it
                _remove_if_dead(partial)
        self._opened = True

    @contextlib.contextmanager
    def _partial(self) -> Iterator[Path]:
        """A hidden file, empty and locked by this process; afterwards it is gone, if it was not renamed."""
        while True:
            path = self._directory / f".part-{secrets.token_hex(8)}.{socket.gethostname()}.partial"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            with contextlib.suppress(OSError):  # a file system without locks; nobody will take it for dead there
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():
                break
            os.close(descriptor)  # taken for dead, between the two calls
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)

    def _publish(self, partial: Path, version: Version) -> Path:
        number = max((part.number for part in self._parts()), default=-1) + 1
        # Two that append at once may get the same number, but not the same name.
        path = self._directory / f"version={version}" / f"part-{number:08}-{secrets.token_hex(8)}.parquet"
        path.parent.mkdir(exist_ok=True)
        partial.replace(path)
        sync(path.parent)
        sync(self._directory)
        return path


class _Part(NamedTuple):
    """One file of a store. Sorts by order of append."""

    number: int
    name: str
    version: Version
    path: Path


def scan(path: Path) -> Iterator[Stored]:
    """The rows of a Parquet file, or of the directory of a `TrajectoryStore`. Raises as these do."""
    return TrajectoryStore(path).scan() if path.is_dir() else scan_file(path)


def _remove_if_dead(partial: Path) -> None:
    """Raises `OSError` if its writer lives."""
    descriptor = os.open(partial, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        partial.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
