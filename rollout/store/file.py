"""One Parquet file of trajectories: an atomic writer, a reader.

A file appears under its name only when it is whole: rows go to a sibling that replaces the old file on close.
"""

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.durable import sync
from rollout.errors import ConfigError
from rollout.store.schema import SCHEMA, SCHEMA_VERSION, VERSION_KEY, Stored, checked_rewards, from_row, to_row
from rollout.types import Trajectory, Version

_ROW_GROUP_TOKENS = 1 << 20
_ROW_GROUP_ROWS = 1024


class TrajectoryWriter:
    """Writes one file; `close`, or leaving the `with` block in whatever way, publishes what was written.

    A block that fails before its first row leaves the old file alone, as do `discard` and a failing disk.
    Raises `ConfigError` if the file cannot be made, `OSError` if writing fails later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise ConfigError(f"{path}: cannot write trajectories: it is a directory")
            # By name: a sink of Arrow's own is not torn by a signal, as a Python file object would be.
            self._parquet = pq.ParquetWriter(str(self._partial), SCHEMA, compression="zstd")
        except OSError as error:
            raise ConfigError(f"{path}: cannot write trajectories: {error.strerror or error}") from None
        self._batches: list[pa.RecordBatch] = []
        self._buffered_tokens = 0
        self._closed = False
        self.written = 0
        """Rows so far."""

    def write(self, trajectories: Iterable[Trajectory], rewards: Sequence[float | None] | None = None) -> None:
        """Append rows, such as those of a finished group; small groups share a row group of the file.

        Raises `InvalidArgumentError`, before it writes any, unless `rewards` has one for each.
        """
        assert not self._closed, f"{self._path}: written to after close"
        for trajectory, reward in _rewarded(trajectories, rewards):
            self._batches.append(pa.RecordBatch.from_pylist([to_row(trajectory, reward)], schema=SCHEMA))
            self._buffered_tokens += len(trajectory.prompt_ids) + len(trajectory.output_ids)
            self.written += 1
            if self._buffered_tokens >= _ROW_GROUP_TOKENS or len(self._batches) >= _ROW_GROUP_ROWS:
                self._flush()

    def close(self) -> None:
        """Publish: all rows on disk, then the file under its name. Closing twice is allowed."""
        if self._closed:
            return
        self._flush()
        try:
            self._parquet.close()
            sync(self._partial)
            self._partial.replace(self._path)
            sync(self._path.parent)
        except OSError:
            self.discard()
            raise
        self._closed = True

    def discard(self) -> None:
        """Drop what was written; the old file, if any, stays."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._parquet.close()
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.written == 0:
            self.discard()
        else:
            self.close()

    def _flush(self) -> None:
        """Write one row group. Rows leave the buffer first: an interrupt is raised once the write has returned."""
        if not self._batches:
            return
        table = pa.Table.from_batches(self._batches).combine_chunks()
        self._batches = []
        self._buffered_tokens = 0
        try:
            self._parquet.write_table(table)
        except OSError:
            self.discard()
            raise


def write_trajectories(
    path: Path, trajectories: Iterable[Trajectory], rewards: Sequence[float | None] | None = None
) -> None:
    """Write all of them or, if the iterable fails, nothing."""
    with TrajectoryWriter(path) as writer:
        try:
            writer.write(trajectories, rewards)
        except BaseException:
            writer.discard()
            raise


def read_trajectories(path: Path) -> list[Trajectory]:
    """All rows. Raises `ConfigError` for a file that is missing, not Parquet or of another schema version."""
    return [stored.trajectory for stored in scan_file(path)]


def scan_file(path: Path, version: Version | None = None) -> Iterator[Stored]:
    """Its rows one by one, with their rewards; `version` is where the file lies. Raises as `read_trajectories` does."""
    try:
        file = pq.ParquetFile(path)
    except OSError as error:
        reason = error if error.errno is None else os.strerror(error.errno)
        raise ConfigError(f"{path}: cannot read trajectories: {reason}") from None
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path}: not a Parquet file: {error}") from None
    with file:
        schema_version = (file.schema_arrow.metadata or {}).get(VERSION_KEY, b"none").decode(errors="replace")
        if schema_version != str(SCHEMA_VERSION):
            raise ConfigError(f"{path}: trajectory schema version: got {schema_version}, allowed: {SCHEMA_VERSION}")
        for group in range(file.num_row_groups):
            for trajectory, reward in _read_group(file, group, path):
                yield Stored(trajectory=trajectory, reward=reward, version=version)


def _rewarded(
    trajectories: Iterable[Trajectory], rewards: Sequence[float | None] | None
) -> Iterable[tuple[Trajectory, float | None]]:
    if rewards is None:
        return ((trajectory, None) for trajectory in trajectories)
    rows = list(trajectories)
    return zip(rows, checked_rewards(rewards, len(rows)), strict=True)


def _read_group(file: pq.ParquetFile, group: int, path: Path) -> list[tuple[Trajectory, float | None]]:
    try:
        return [from_row(row) for row in file.read_row_group(group, columns=SCHEMA.names).to_pylist()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read trajectories: {error}") from None
