"""Trajectories as Parquet: the documented schema, an atomic writer, a reader.

One row is one trajectory; columns keep their order and may only be added at the end, and a change of meaning
raises `SCHEMA_VERSION`, which is in the file's metadata. Log-probabilities are the engine's fp32 values, bit for
bit. A file appears under its name only when it is whole: rows go to a sibling that replaces the old file on close.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.errors import ConfigError
from rollout.types import (
    AbortReason,
    Attempt,
    FinishReason,
    GroupId,
    KVSpan,
    Resume,
    Trajectory,
    TrajectoryId,
    Version,
    VersionRun,
    WorkerId,
)

SCHEMA_VERSION = 1
_VERSION_KEY = b"rollout.schema_version"

SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("seed", pa.uint64(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("output_ids", pa.list_(pa.int32()), nullable=False),
        # Of each output id, natural log, under the distribution that it was drawn from.
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        # Run lengths over the output ids: which weights sampled them; version null: appended, not sampled, which is
        # what a loss mask leaves out.
        pa.field("versions", pa.list_(pa.struct({"version": pa.int64(), "tokens": pa.int32()})), nullable=False),
        # stop, length, abort or error; null: still resumable.
        pa.field("finish_reason", pa.string()),
        pa.field("suspensions", pa.int32(), nullable=False),
        # The worker of each start, in order.
        pa.field("workers", pa.list_(pa.string()), nullable=False),
        # What went wrong, where finish_reason is error.
        pa.field("error", pa.string()),
        # Each start after the first: tokens found on the worker, read from the pool, computed again.
        pa.field(
            "resumes",
            pa.list_(
                pa.struct(
                    {
                        "worker": pa.string(),
                        "cached_tokens": pa.int32(),
                        "loaded_tokens": pa.int32(),
                        "restored_tokens": pa.int32(),
                        "recomputed_tokens": pa.int32(),
                    }
                )
            ),
            nullable=False,
        ),
        # Unix time, seconds.
        pa.field("submitted_at", pa.float64(), nullable=False),
        pa.field("finished_at", pa.float64()),
        # The driver's own, as a JSON object; what JSON has no type for is its str().
        pa.field("metadata", pa.string(), nullable=False),
        # What stopped it last; null: nothing, or it went on since.
        pa.field("abort_reason", pa.string()),
        # What it had each time it was begun again, and why; error: what went wrong, where that was no abort.
        pa.field(
            "attempts",
            pa.list_(
                pa.struct(
                    {
                        "seed": pa.uint64(),
                        "output_ids": pa.list_(pa.int32()),
                        "logprobs": pa.list_(pa.float32()),
                        "versions": pa.list_(pa.struct({"version": pa.int64(), "tokens": pa.int32()})),
                        "reason": pa.string(),
                        "error": pa.string(),
                    }
                )
            ),
            nullable=False,
        ),
        # Which versions wrote the KV that output tokens were sampled on: tokens [first, stop), before which the KV of
        # positions [start, stop) is of each version; what follows was written by what sampled them. Positions count the
        # prompt.
        pa.field(
            "kv_spans",
            pa.list_(
                pa.struct(
                    {
                        "first": pa.int32(),
                        "stop": pa.int32(),
                        "kv": pa.list_(pa.struct({"start": pa.int32(), "stop": pa.int32(), "version": pa.int64()})),
                    }
                )
            ),
            nullable=False,
        ),
    ],
    metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()},
)
"""Columns of the file, in order."""

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

    def write(self, trajectories: Iterable[Trajectory]) -> None:
        """Append rows, such as those of a finished group; small groups share a row group of the file."""
        assert not self._closed, f"{self._path}: written to after close"
        for trajectory in trajectories:
            self._batches.append(pa.RecordBatch.from_pylist([_row(trajectory)], schema=SCHEMA))
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
            _sync(self._partial)
            self._partial.replace(self._path)
            _sync(self._path.parent)
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


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write all of them or, if the iterable fails, nothing."""
    with TrajectoryWriter(path) as writer:
        try:
            writer.write(trajectories)
        except BaseException:
            writer.discard()
            raise


def read_trajectories(path: Path) -> list[Trajectory]:
    """All rows. Raises `ConfigError` for a file that is missing, not Parquet or of another schema version."""
    try:
        file = pq.ParquetFile(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read trajectories: {error.strerror or error}") from None
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path}: not a Parquet file: {error}") from None
    with file:
        version = (file.schema_arrow.metadata or {}).get(_VERSION_KEY, b"none").decode(errors="replace")
        if version != str(SCHEMA_VERSION):
            raise ConfigError(f"{path}: trajectory schema version: got {version}, allowed: {SCHEMA_VERSION}")
        return [
            _trajectory(row)
            for group in range(file.num_row_groups)
            for row in file.read_row_group(group, columns=SCHEMA.names).to_pylist()
        ]


def _row(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "group_id": _text(trajectory.group_id),
        "sample_index": trajectory.sample_index,
        "trajectory_id": _text(trajectory.trajectory_id),
        "seed": trajectory.seed,
        "prompt_ids": trajectory.prompt_ids,
        "output_ids": trajectory.output_ids,
        "logprobs": trajectory.logprobs,
        "versions": _run_rows(trajectory.versions),
        "finish_reason": trajectory.finish_reason,
        "suspensions": trajectory.suspensions,
        "workers": trajectory.workers,
        "error": None if trajectory.error is None else _text(trajectory.error),
        "resumes": [
            {
                "worker": resume.worker,
                "cached_tokens": resume.cached_tokens,
                "loaded_tokens": resume.loaded_tokens,
                "restored_tokens": resume.restored_tokens,
                "recomputed_tokens": resume.recomputed_tokens,
            }
            for resume in trajectory.resumes
        ],
        "submitted_at": trajectory.submitted_at,
        "finished_at": trajectory.finished_at,
        "metadata": json.dumps(trajectory.metadata, default=str),
        "abort_reason": trajectory.abort_reason,
        "attempts": [
            {
                "seed": attempt.seed,
                "output_ids": attempt.output_ids,
                "logprobs": attempt.logprobs,
                "versions": _run_rows(attempt.versions),
                "reason": attempt.reason,
                "error": None if attempt.error is None else _text(attempt.error),
            }
            for attempt in trajectory.attempts
        ],
        "kv_spans": [
            {
                "first": span.first,
                "stop": span.stop,
                "kv": [{"start": start, "stop": stop, "version": version} for start, stop, version in span.kv],
            }
            for span in trajectory.kv_spans
        ],
    }


def _run_rows(runs: Iterable[VersionRun]) -> list[dict[str, int | None]]:
    return [{"version": run.version, "tokens": run.tokens} for run in runs]


def _trajectory(row: dict[str, Any]) -> Trajectory:
    reason, stopped = row["finish_reason"], row.get("abort_reason")
    values = row | {
        "group_id": GroupId(row["group_id"]),
        "trajectory_id": TrajectoryId(row["trajectory_id"]),
        "prompt_ids": tuple(row["prompt_ids"]),
        "output_ids": tuple(row["output_ids"]),
        "logprobs": tuple(row["logprobs"]),
        "versions": _runs(row["versions"]),
        "finish_reason": None if reason is None else FinishReason(reason),
        "workers": tuple(WorkerId(worker) for worker in row["workers"]),
        "resumes": tuple(Resume(**resume) for resume in row["resumes"]),
        "metadata": json.loads(row["metadata"]),
        # A file of before has none of these.
        "abort_reason": None if stopped is None else AbortReason(stopped),
        "attempts": tuple(_attempt(attempt) for attempt in row.get("attempts", ())),
        "kv_spans": tuple(_span(span) for span in row.get("kv_spans", ())),
    }
    return Trajectory(**values)


def _span(row: dict[str, Any]) -> KVSpan:
    kv = tuple((run["start"], run["stop"], Version(run["version"])) for run in row["kv"])
    return KVSpan(first=row["first"], stop=row["stop"], kv=kv)


def _attempt(row: dict[str, Any]) -> Attempt:
    reason = row["reason"]
    values = row | {
        "output_ids": tuple(row["output_ids"]),
        "logprobs": tuple(row["logprobs"]),
        "versions": _runs(row["versions"]),
        "reason": None if reason is None else AbortReason(reason),
    }
    return Attempt(**values)


def _runs(rows: Iterable[dict[str, Any]]) -> tuple[VersionRun, ...]:
    return tuple(VersionRun(**run) for run in rows)


def _text(value: str) -> str:
    """Lone surrogates, which a prompt's key may hold and no file can, as escapes."""
    return value.encode("utf-8", errors="backslashreplace").decode()


def _sync(path: Path) -> None:
    """Make a file's bytes, or a directory's renames, last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
