"""Trajectories on disk: bit-exact, in the documented schema, and never a torn or a lost old file."""

import dataclasses
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

from rollout.errors import ConfigError, InvalidArgumentError
from rollout.store import SCHEMA, TrajectoryWriter, file, read_trajectories, scan_file, write_trajectories
from rollout.types import AbortReason, Attempt, FinishReason, KVSpan, Resume, Trajectory, Version, VersionRun
from tests.store.rows import FULL, trajectories, trajectory

COLUMNS = [
    *("group_id", "sample_index", "trajectory_id", "seed", "prompt_ids", "output_ids", "logprobs", "versions"),
    *("finish_reason", "suspensions", "workers", "error", "resumes", "submitted_at", "finished_at", "metadata"),
    *("abort_reason", "attempts", "kv_spans", "reward"),
]


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
        *("finish_reason", "error", "finished_at", "abort_reason", "reward")
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
    pq.write_table(table.drop_columns(["abort_reason", "attempts", "kv_spans", "reward"]), tmp_path / "old.parquet")
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
    monkeypatch.setattr(file, "_ROW_GROUP_ROWS", 4)
    rows = [trajectory(index) for index in range(10)]
    with TrajectoryWriter(tmp_path / "t.parquet") as writer:
        for row in rows:
            writer.write([row])
    assert writer.written == 10
    assert read_trajectories(tmp_path / "t.parquet") == rows
    metadata = pq.ParquetFile(tmp_path / "t.parquet").metadata
    assert [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)] == [4, 4, 2]


def test_long_rows_make_a_row_group_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "_ROW_GROUP_TOKENS", 20)
    write_trajectories(tmp_path / "t.parquet", [trajectory(index, tokens=8) for index in range(5)])
    assert pq.ParquetFile(tmp_path / "t.parquet").metadata.num_row_groups == 3


def test_nothing_is_seen_before_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "_ROW_GROUP_ROWS", 1)
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
        "store.file._ROW_GROUP_ROWS = 1\n"
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
    newer = SCHEMA.with_metadata({b"rollout.schema_version": b"2"})
    pq.write_table(newer.empty_table(), tmp_path / "newer.parquet")
    with pytest.raises(ConfigError, match="schema version: got 2, allowed: 1"):
        read_trajectories(tmp_path / "newer.parquet")


def test_rewards_are_written_where_there_are_any(tmp_path: Path) -> None:
    rows = [trajectory(index) for index in range(4)]
    with TrajectoryWriter(tmp_path / "t.parquet") as writer:
        writer.write(rows[:1])
        writer.write(rows[1:], [0.1, None, -(2.0**-1074)])
    read = list(scan_file(tmp_path / "t.parquet"))
    assert [stored.trajectory for stored in read] == rows
    assert [stored.reward for stored in read] == [None, 0.1, None, -(2.0**-1074)]
    assert {stored.version for stored in read} == {None}


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([1.0], "rewards: got 1, allowed: one for each of 2 trajectories"),
        ([1.0] * 3, "rewards: got 3, allowed: one for each of 2 trajectories"),
        ([1.0, "2"], r"rewards: item 1: got str \('2'\), allowed: a number or None"),
    ],
)
def test_rewards_that_do_not_fit_write_nothing(tmp_path: Path, rewards: list[Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        write_trajectories(tmp_path / "t.parquet", [trajectory(0), trajectory(1)], rewards)
    assert os.listdir(tmp_path) == []


def test_every_field_of_a_result_has_its_column() -> None:
    def inner(column: str) -> set[str]:
        return {field.name for field in SCHEMA.field(column).type.value_type.fields}

    def fields(kind: type) -> set[str]:
        return {field.name for field in dataclasses.fields(kind)}

    assert fields(Trajectory) | {"reward"} == set(SCHEMA.names)
    assert fields(VersionRun) == inner("versions")
    assert fields(Resume) == inner("resumes")
    assert fields(Attempt) == inner("attempts")
    assert fields(KVSpan) == inner("kv_spans")


def test_every_field_of_a_result_is_read_again(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "t.parquet", [FULL])
    (read,) = read_trajectories(tmp_path / "t.parquet")
    silent = trajectory(trajectory_id="", group_id="", sample_index=1, seed=0, prompt_ids=(), tokens=0)
    for field in dataclasses.fields(Trajectory):
        value = getattr(FULL, field.name)
        assert value != getattr(silent, field.name), f"{field.name} of FULL says nothing"
        assert getattr(read, field.name) == value, field.name


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trajectories(path, [trajectory()])
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(196)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"t\.parquet: cannot read trajectories: \w"):
        read_trajectories(path)
