"""The documented Arrow schema of trajectories, and a trajectory as one row of it.

Columns keep their order and may only be added at the end; a change of meaning raises `SCHEMA_VERSION`, which is in the
metadata of every file. Log-probabilities are the engine's fp32 values, bit for bit.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import pyarrow as pa

from rollout.errors import InvalidArgumentError
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
VERSION_KEY = b"rollout.schema_version"

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
        # What the driver gave it, if anything.
        pa.field("reward", pa.float64()),
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()},
)
"""Columns of the file, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A trajectory as it lies on disk."""

    trajectory: Trajectory
    reward: float | None = None
    """What the driver gave it, if anything."""
    version: Version | None = None
    """The label that it was appended to a `TrajectoryStore` under; None: it is from a single file."""


def checked_rewards(rewards: Sequence[float | None], trajectories: int) -> list[float | None]:
    """One for each trajectory, as plain numbers. Raises `InvalidArgumentError`."""
    if len(rewards) != trajectories:
        raise InvalidArgumentError(f"rewards: got {len(rewards)}, allowed: one for each of {trajectories} trajectories")
    for index, reward in enumerate(rewards):
        if reward is not None and not isinstance(reward, Real):
            raise InvalidArgumentError(
                f"rewards: item {index}: got {type(reward).__name__} ({reward!r:.80}), allowed: a number or None"
            )
    return [None if reward is None else float(reward) for reward in rewards]


def to_row(trajectory: Trajectory, reward: float | None = None) -> dict[str, Any]:
    """Its columns, in plain Python."""
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
        "reward": reward,
    }


def _run_rows(runs: Iterable[VersionRun]) -> list[dict[str, int | None]]:
    return [{"version": run.version, "tokens": run.tokens} for run in runs]


def from_row(row: dict[str, Any]) -> tuple[Trajectory, float | None]:
    """What `to_row` was given. A file of before may lack `abort_reason` and the columns after it."""
    reward = row.get("reward")
    row = {name: value for name, value in row.items() if name != "reward"}
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
        "abort_reason": None if stopped is None else AbortReason(stopped),
        "attempts": tuple(_attempt(attempt) for attempt in row.get("attempts", ())),
        "kv_spans": tuple(_span(span) for span in row.get("kv_spans", ())),
    }
    return Trajectory(**values), reward


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
