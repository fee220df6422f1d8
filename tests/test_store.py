"""Trajectories on disk: bit-exact, in the documented schema, and never a torn or a lost old file."""

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import store
from rollout.errors import ConfigError
from rollout.store import TrajectoryWriter, read_trajectories, write_trajectories
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
    version_runs,
)

COLUMNS = [
    *("group_id", "sample_index", "trajectory_id", "seed", "prompt_ids", "output_ids", "logprobs", "versions"),
    *("finish_reason", "suspensions", "workers", "error", "resumes", "submitted_at", "finished_at", "metadata"),
    *("abort_reason", "attempts", "kv_spans"),
]

INT32 = st.integers(0, 2**31 - 1)
WORKERS = st.text(max_size=5).map(WorkerId)
TIMES = st.floats(0, 4e9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    tokens = draw(st.integers(0, 12))
    version = st.none() | st.integers(-(2**63), 2**63 - 1).map(Version)
    versions = draw(st.lists(version, min_size=tokens, max_size=tokens))
    logprobs = st.floats(max_value=0.0, allow_nan=False, width=32)
    attempt = st.builds(
        Attempt,
        seed=st.integers(0, 2**64 - 1),
        output_ids=st.lists(INT32, max_size=3).map(tuple),
        logprobs=st.lists(logprobs, max_size=3).map(tuple),
        versions=st.lists(version, max_size=3).map(version_runs),
        reason=st.none() | st.sampled_from(AbortReason),
        error=st.none() | st.text(),
    )
    resume = st.builds(
        Resume,
        worker=WORKERS,
        cached_tokens=INT32,
        loaded_tokens=INT32,
        restored_tokens=INT32,
        recomputed_tokens=INT32,
    )
    run = st.tuples(INT32, INT32, st.integers(-(2**63), 2**63 - 1).map(Version))
    span = st.builds(KVSpan, first=INT32, stop=INT32, kv=st.lists(run, max_size=2).map(tuple))
    return Trajectory(
        trajectory_id=TrajectoryId(draw(st.text())),
        group_id=GroupId(draw(st.text())),
        sample_index=draw(INT32),
        seed=draw(st.integers(0, 2**64 - 1)),
        prompt_ids=tuple(draw(st.lists(INT32, max_size=5))),
        output_ids=tuple(draw(st.lists(INT32, min_size=tokens, max_size=tokens))),
        logprobs=tuple(draw(st.lists(logprobs, min_size=tokens, max_size=tokens))),
        versions=version_runs(versions),
        finish_reason=draw(st.none() | st.sampled_from(FinishReason)),
        error=draw(st.none() | st.text()),
        suspensions=draw(INT32),
        workers=tuple(draw(st.lists(WORKERS, max_size=3))),
        resumes=tuple(draw(st.lists(resume, max_size=3))),
        submitted_at=draw(TIMES),
        finished_at=draw(st.none() | TIMES),
        metadata=draw(st.dictionaries(st.text(), JSON, max_size=3)),
        abort_reason=draw(st.none() | st.sampled_from(AbortReason)),
        attempts=tuple(draw(st.lists(attempt, max_size=2))),
        kv_spans=tuple(draw(st.lists(span, max_size=2))),
    )


def trajectory(index: int = 0, *, tokens: int = 3, **changes: Any) -> Trajectory:
    values: dict[str, Any] = {
        "trajectory_id": TrajectoryId(f"g/{index}"),
        "group_id": GroupId("g"),
        "sample_index": index,
        "seed": 2**64 - 1 - index,
        "prompt_ids": (1, 2),
        "output_ids": tuple(range(tokens)),
        "logprobs": (-0.5,) * tokens,
        "versions": (VersionRun(version=Version(0), tokens=tokens),) if tokens else (),
        "finish_reason": FinishReason.LENGTH,
    }
    return Trajectory(**values | changes)


def bits(rows: list[Trajectory]) -> list[list[bytes]]:
    return [[struct.pack("<f", value) for value in row.logprobs] for row in rows]


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(trajectories(), max_size=4))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[Trajectory]) -> None:
    path = tmp_path_factory.mktemp("store") / "t.parquet"
    write_trajectories(path, rows)
    read = read_trajectories(path)
    assert read == rows
    assert bits(read) == bits(rows)


def test_fp32_logprobs_keep_their_bits_and_seeds_their_top_bit(tmp_path: Path) -> None:
    patterns = [0x80000000, 0x80000001, 0x807FFFFF, 0x80800000, 0xBEAAAAAB, 0xBF7FFFFF, 0xFF7FFFFF, 0xFF800000]
    logprobs = tuple(struct.unpack("<f", struct.pack("<I", pattern))[0] for pattern in patterns)
    row = trajectory(tokens=len(patterns), logprobs=logprobs, seed=2**63)
    write_trajectories(tmp_path / "t.parquet", [row])
    (read,) = read_trajectories(tmp_path / "t.parquet")
    assert [struct.unpack("<I", struct.pack("<f", value))[0] for value in read.logprobs] == patterns
    assert read.seed == 2**63


def test_the_file_has_the_documented_columns_and_says_its_version(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "t.parquet", [trajectory()])
    schema = pq.read_schema(tmp_path / "t.parquet")
    assert schema.names == COLUMNS
    assert schema.metadata[b"rollout.schema_version"] == b"1"
    assert schema.field("seed").type == pa.uint64()
    assert schema.field("prompt_ids").type == pa.list_(pa.int32())
    assert schema.field("output_ids").type == pa.list_(pa.int32())
    assert schema.field("logprobs").type == pa.list_(pa.float32())
    assert schema.field("versions").type == pa.list_(pa.struct({"version": pa.int64(), "tokens": pa.int32()}))
    assert schema.field("finish_reason").type == pa.string()
    assert [field.name for field in schema if field.nullable] == [
        *("finish_reason", "error", "finished_at", "abort_reason")
    ]


def test_types_survive(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "t.parquet", [trajectory(), trajectory(1, finish_reason=None)])
    finished, partial = read_trajectories(tmp_path / "t.parquet")
    assert finished.finish_reason is FinishReason.LENGTH
    assert partial.finish_reason is None


def test_what_was_appended_keeps_its_place_in_the_loss_mask(tmp_path: Path) -> None:
    runs = tuple(VersionRun(version=version, tokens=2) for version in (Version(0), None, Version(1)))
    write_trajectories(tmp_path / "t.parquet", [trajectory(tokens=6, versions=runs)])
    (read,) = read_trajectories(tmp_path / "t.parquet")
    assert read.loss_mask == (1, 1, 0, 0, 1, 1)
    assert read.sampled_tokens == 4


def test_a_file_without_the_columns_that_were_added_later_is_read(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "t.parquet", [trajectory(abort_reason=AbortReason.TAIL)])
    table = pq.read_table(tmp_path / "t.parquet")
    pq.write_table(table.drop_columns(["abort_reason", "attempts", "kv_spans"]), tmp_path / "old.parquet")
    assert read_trajectories(tmp_path / "old.parquet") == [trajectory()]


def test_an_empty_file_is_a_file(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "t.parquet", [])
    assert read_trajectories(tmp_path / "t.parquet") == []
    assert pq.read_schema(tmp_path / "t.parquet").names == COLUMNS


def test_folders_are_made(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "a" / "b" / "t.parquet", [trajectory()])
    assert read_trajectories(tmp_path / "a" / "b" / "t.parquet") == [trajectory()]


def test_metadata_that_json_cannot_say_becomes_text_and_strange_text_escapes(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "t.parquet", [trajectory(metadata={"path": Path("a/b")}, error="bad \ud800")])
    (read,) = read_trajectories(tmp_path / "t.parquet")
    assert read.metadata == {"path": "a/b"}
    assert read.error == "bad \\ud800"


def test_rows_are_gathered_into_row_groups_and_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_ROW_GROUP_ROWS", 4)
    rows = [trajectory(index) for index in range(10)]
    with TrajectoryWriter(tmp_path / "t.parquet") as writer:
        for row in rows:
            writer.write([row])
    assert writer.written == 10
    assert read_trajectories(tmp_path / "t.parquet") == rows
    metadata = pq.ParquetFile(tmp_path / "t.parquet").metadata
    assert [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)] == [4, 4, 2]


def test_long_rows_make_a_row_group_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_ROW_GROUP_TOKENS", 20)
    write_trajectories(tmp_path / "t.parquet", [trajectory(index, tokens=8) for index in range(5)])
    assert pq.ParquetFile(tmp_path / "t.parquet").metadata.num_row_groups == 3


def test_nothing_is_seen_before_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_ROW_GROUP_ROWS", 1)
    path = tmp_path / "t.parquet"
    write_trajectories(path, [trajectory(7)])
    writer = TrajectoryWriter(path)
    writer.write([trajectory(0), trajectory(1)])
    assert read_trajectories(path) == [trajectory(7)]
    writer.close()
    writer.close()
    assert read_trajectories(path) == [trajectory(0), trajectory(1)]
    assert os.listdir(tmp_path) == ["t.parquet"]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_block_publishes_what_was_finished(tmp_path: Path, interrupt: type[BaseException]) -> None:
    def run() -> None:
        with TrajectoryWriter(path) as writer:
            writer.write([trajectory(0)])
            raise interrupt

    path = tmp_path / "t.parquet"
    with pytest.raises(interrupt):
        run()
    assert read_trajectories(path) == [trajectory(0)]


def test_a_block_that_fails_before_its_first_row_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trajectories(path, [trajectory(7)])
    with pytest.raises(RuntimeError), TrajectoryWriter(path):
        raise RuntimeError
    assert read_trajectories(path) == [trajectory(7)]
    assert os.listdir(tmp_path) == ["t.parquet"]


def test_a_failing_iterable_leaves_the_old_file(tmp_path: Path) -> None:
    def rows() -> Iterator[Trajectory]:
        yield trajectory(0)
        raise RuntimeError

    path = tmp_path / "t.parquet"
    write_trajectories(path, [trajectory(7)])
    with pytest.raises(RuntimeError):
        write_trajectories(path, rows())
    assert read_trajectories(path) == [trajectory(7)]
    assert os.listdir(tmp_path) == ["t.parquet"]


@pytest.mark.parametrize("step", ["write_table", "close"])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    really_close = pq.ParquetWriter.close

    def full(parquet: pq.ParquetWriter, *_: object) -> None:
        really_close(parquet)
        raise OSError(28, "No space left on device")

    path = tmp_path / "t.parquet"
    write_trajectories(path, [trajectory(7)])
    monkeypatch.setattr(pq.ParquetWriter, step, full)
    with pytest.raises(OSError, match="No space left"):
        write_trajectories(path, [trajectory(0)])
    monkeypatch.undo()
    assert read_trajectories(path) == [trajectory(7)]
    assert os.listdir(tmp_path) == ["t.parquet"]


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trajectories(path, [trajectory(7)])
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from rollout import store\n"
        "store._ROW_GROUP_ROWS = 1\n"
        "rows = store.read_trajectories(Path(sys.argv[1]))\n"
        "writer = store.TrajectoryWriter(Path(sys.argv[1]))\n"
        "writer.write(rows * 3)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert read_trajectories(path) == [trajectory(7)]
    assert len(os.listdir(tmp_path)) == 2, "the killed writer had written to a sibling"


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "t.parquet", tmp_path):
        with pytest.raises(ConfigError, match=r"cannot write trajectories: \w"):
            TrajectoryWriter(path)


def test_files_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.parquet: cannot read"):
        read_trajectories(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(ConfigError, match="not a Parquet file"):
        read_trajectories(tmp_path / "text.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match="schema version: got none, allowed: 1"):
        read_trajectories(tmp_path / "other.parquet")
    newer = store.SCHEMA.with_metadata({b"rollout.schema_version": b"2"})
    pq.write_table(newer.empty_table(), tmp_path / "newer.parquet")
    with pytest.raises(ConfigError, match="schema version: got 2, allowed: 1"):
        read_trajectories(tmp_path / "newer.parquet")
