"""A directory of trajectories: whole files only, whoever dies or writes at the same time."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout.errors import ConfigError, InvalidArgumentError
from rollout.store import Stored, TrajectoryStore, dataset, read_trajectories, scan, write_trajectories
from rollout.types import Version
from tests.store.rows import trajectory

PREAMBLE = """
import os, signal, sys
from pathlib import Path
from rollout.store import TrajectoryStore, dataset
from tests.store.rows import trajectory
directory = Path(sys.argv[1])
"""


def stored(index: int, version: int, reward: float | None = None) -> Stored:
    return Stored(trajectory=trajectory(index), version=Version(version), reward=reward)


def run(script: str, *arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PREAMBLE + script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def hidden(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("*") if path.is_file() and path.suffix != ".parquet"]


def test_what_was_appended_is_read_in_order_with_its_label_and_rewards(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "a" / "b")
    first = store.append([trajectory(0), trajectory(1)], version=7, rewards=[0.5, None])
    second = store.append([trajectory(2)], version=10)
    third = store.append(iter([trajectory(3)]), version=7, rewards=(1,))
    assert [path.parent.name for path in (first, second, third)] == ["version=7", "version=10", "version=7"]
    expected = [stored(0, 7, 0.5), stored(1, 7), stored(2, 10), stored(3, 7, 1.0)]
    assert store.read() == expected
    assert list(scan(tmp_path / "a" / "b")) == expected
    assert TrajectoryStore(tmp_path / "a" / "b").read(versions=[7]) == [*expected[:2], expected[3]]
    assert store.read(versions=range(8, 11)) == [expected[2]]
    assert store.read(versions=[]) == store.read(versions=[8]) == []
    assert read_trajectories(third) == [trajectory(3)], "every part is a file like any other"
    assert hidden(tmp_path) == []


def test_an_empty_batch_is_a_file_and_an_empty_directory_a_store(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    assert store.read() == []
    assert store.append([], version=0).exists()
    assert store.read() == []


def test_a_long_batch_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "_ROW_GROUP_ROWS", 4)
    store = TrajectoryStore(tmp_path)
    path = store.append([trajectory(index) for index in range(10)], version=0)
    assert pq.ParquetFile(path).metadata.num_row_groups == 3
    assert store.read() == [stored(index, 0) for index in range(10)]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.append([trajectory()], version=0)
    for name in ("version=0/.hidden.parquet", "version=0/other.parquet", "notes.txt", ".part-x.elsewhere.partial"):
        (tmp_path / name).write_text("")
    write_trajectories(tmp_path / "version=-1" / "t.parquet", [trajectory(1)])
    assert store.read() == [stored(0, 0)]
    TrajectoryStore(tmp_path).append([], version=0)
    assert (tmp_path / ".part-x.elsewhere.partial").exists(), "its writer may live on another machine"


@pytest.mark.parametrize("version", [-1, 2**63, True, 1.0, "1", None])
def test_what_is_no_label_is_refused(tmp_path: Path, version: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"version: got {version!r}, allowed: an integer, 0 … 2\*\*63 - 1"):
        TrajectoryStore(tmp_path / "s").append([trajectory()], version=version)
    assert not (tmp_path / "s").exists()


def test_rewards_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="rewards: got 2, allowed: one for each of 1 trajectories"):
        TrajectoryStore(tmp_path / "s").append([trajectory()], version=0, rewards=[1.0, 2.0])
    assert not (tmp_path / "s").exists()


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file: cannot hold trajectories: it is not a directory"):
        TrajectoryStore(tmp_path / "file")
    with pytest.raises(ConfigError, match="inner: cannot hold trajectories: Not a directory"):
        TrajectoryStore(tmp_path / "file" / "inner").append([], version=0)
    with pytest.raises(ConfigError, match="none: cannot read trajectories: No such file"):
        TrajectoryStore(tmp_path / "none").read()


def test_what_is_done_again_is_forgotten_first(tmp_path: Path) -> None:
    assert TrajectoryStore(tmp_path / "not there").discard(from_version=0) == 0
    store = TrajectoryStore(tmp_path)
    for version in (3, 5, 4, 5, 6):
        store.append([trajectory(version)], version=version)
    assert TrajectoryStore(tmp_path).discard(from_version=5) == 3
    assert store.read() == [stored(3, 3), stored(4, 4)]
    store.append([trajectory(7)], version=5)
    assert TrajectoryStore(tmp_path).read() == [stored(3, 3), stored(4, 4), stored(7, 5)]


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    path = store.append([trajectory()], version=0)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=path.name):
        store.read()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_append_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupt: BaseException
) -> None:
    def fail(table: pa.Table, path: str, **_: object) -> None:
        Path(path).write_text("torn")
        raise interrupt

    store = TrajectoryStore(tmp_path)
    store.append([trajectory(0)], version=0)
    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", fail)
        with pytest.raises((KeyboardInterrupt, OSError)):
            store.append([trajectory(1)], version=1)
    assert hidden(tmp_path) == []
    store.append([trajectory(2)], version=2)
    assert store.read() == [stored(0, 0), stored(2, 2)]


@pytest.mark.parametrize("moment", ["torn", "not yet synced", "synced"])
def test_a_killed_writer_leaves_whole_files_and_what_the_next_one_removes(tmp_path: Path, moment: str) -> None:
    script = """
TrajectoryStore(directory).append([trajectory(0)], version=0)
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
match sys.argv[2]:
    case "torn":
        dataset.pq.write_table = lambda table, path, **_: (Path(path).write_bytes(b"PAR1 torn"), die())
    case "not yet synced":
        dataset.sync = lambda path: path.suffix == ".partial" and die()
    case "synced":
        TrajectoryStore._publish = die
TrajectoryStore(directory).append([trajectory(1)], version=0)
"""
    process = run(script, tmp_path, moment)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert len(hidden(tmp_path)) == 1, "it had begun to write"
    store = TrajectoryStore(tmp_path)
    assert store.read() == [stored(0, 0)]
    assert pq.read_table(tmp_path, partitioning="hive").num_rows == 1
    assert len(hidden(tmp_path)) == 1, "who only reads removes nothing"
    store.append([trajectory(2)], version=0)
    assert hidden(tmp_path) == []
    assert store.read() == [stored(0, 0), stored(2, 0)]


def test_a_writer_killed_at_any_time_has_kept_what_it_said(tmp_path: Path) -> None:
    script = """
store = TrajectoryStore(directory)
for index in range(10**6):
    store.append([trajectory(index)], version=index % 2)
    print(index, flush=True)
"""
    with run(script, tmp_path) as process:
        assert process.stdout is not None
        for _ in range(20):
            process.stdout.readline()
        process.kill()
        said = 20 + len(process.stdout.readlines())
    read = TrajectoryStore(tmp_path).read()
    assert read == [stored(index, index % 2) for index in range(len(read))]
    assert said <= len(read) <= said + 1


def test_writers_at_the_same_time_lose_nothing_of_each_other(tmp_path: Path) -> None:
    script = """
for index in range(25):
    first = int(sys.argv[2]) * 100 + index * 2
    TrajectoryStore(directory).append([trajectory(first), trajectory(first + 1)], version=index % 3)
"""
    processes = [run(script, tmp_path, writer) for writer in range(3)]
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0, 0, 0]
    read = TrajectoryStore(tmp_path).read()
    assert len(list(tmp_path.rglob("*.parquet"))) == 75
    for writer in range(3):
        own = [row for row in read if row.trajectory.sample_index // 100 == writer]
        assert own == [stored(writer * 100 + index, index // 2 % 3) for index in range(50)]
    assert hidden(tmp_path) == []


def test_a_writer_does_not_take_another_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(path: Path) -> None:
        monkeypatch.undo()
        assert os.listdir(tmp_path) == [path.name]
        TrajectoryStore(tmp_path).append([trajectory(0)], version=0)

    store = TrajectoryStore(tmp_path)
    store.append([], version=0).unlink()
    (tmp_path / "version=0").rmdir()
    monkeypatch.setattr(dataset, "sync", meanwhile)
    store.append([trajectory(1)], version=1)
    assert store.read() == [stored(0, 0), stored(1, 1)]
    assert hidden(tmp_path) == []


def test_a_writer_that_was_taken_for_dead_before_it_had_its_lock_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        (path,) = tmp_path.glob(".part-*")
        path.unlink()
        monkeypatch.setattr(dataset, "sync", meanwhile)

    def meanwhile(path: Path) -> None:
        monkeypatch.undo()
        TrajectoryStore(tmp_path).append([trajectory(0)], version=0)

    store = TrajectoryStore(tmp_path)
    store.append([], version=0)
    monkeypatch.setattr(dataset.fcntl, "flock", too_late)
    store.append([trajectory(1)], version=1)
    assert store.read() == [stored(0, 0), stored(1, 1)], "the name that it took then is locked"
    assert hidden(tmp_path) == []
