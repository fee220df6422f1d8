"""Other readers of Parquet see the same values: pandas, polars, DuckDB and `datasets`."""

import math
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.store import TrajectoryStore
from tests.store.rows import FULL, LOGPROB_BITS, SEED, trajectory

PLAIN = trajectory(1, tokens=0, finish_reason=None)
EXPECTED = [
    {
        "group_id": "g",
        "sample_index": 0,
        "trajectory_id": "g/0",
        "seed": SEED,
        "prompt_ids": [5, 2**31 - 1],
        "output_ids": [9, 8, 7, 6, 5, 4],
        "logprobs": LOGPROB_BITS,
        "versions": [{"version": 3, "tokens": 2}, {"version": None, "tokens": 2}, {"version": 4, "tokens": 2}],
        "finish_reason": "abort",
        "suspensions": 2,
        "workers": ["w0", "w1"],
        "error": "lost, too",
        "resumes": [
            {"worker": "w1", "cached_tokens": 1, "loaded_tokens": 2, "restored_tokens": 3, "recomputed_tokens": 4}
        ],
        "submitted_at": 1.5,
        "finished_at": 2.25,
        "metadata": '{"answer": "h\\u00e4h"}',
        "abort_reason": "over_long",
        "attempts": [
            {
                "seed": 2**63,
                "output_ids": [1],
                "logprobs": LOGPROB_BITS[2:3],
                "versions": [{"version": 2, "tokens": 1}],
                "reason": None,
                "error": "lost",
            }
        ],
        "kv_spans": [
            {
                "first": 2,
                "stop": 8,
                "kv": [{"start": 0, "stop": 1, "version": 3}, {"start": 1, "stop": 2, "version": 4}],
            }
        ],
        "reward": 0.1,
        "version": 12,
    },
    {
        "group_id": "g",
        "sample_index": 1,
        "trajectory_id": "g/1",
        "seed": 2**64 - 2,
        "prompt_ids": [1, 2],
        "output_ids": [],
        "logprobs": [],
        "versions": [],
        "finish_reason": None,
        "suspensions": 0,
        "workers": [],
        "error": None,
        "resumes": [],
        "submitted_at": 0.0,
        "finished_at": None,
        "metadata": "{}",
        "abort_reason": None,
        "attempts": [],
        "kv_spans": [],
        "reward": None,
        "version": 3,
    },
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store of two partitions, and what a crash would leave there."""
    store = TrajectoryStore(tmp_path / "store")
    store.append([FULL], version=12, rewards=[0.1])
    store.append([PLAIN], version=3)
    (tmp_path / "store" / ".part-0.there.partial").write_text("torn")
    return tmp_path / "store"


def by_pandas(directory: Path) -> Iterable[dict[str, Any]]:
    import pandas

    frame = pandas.read_parquet(directory)
    assert frame["seed"].dtype == "uint64"
    assert frame["logprobs"][0].dtype == "float32"
    rows: list[dict[str, Any]] = frame.to_dict("records")
    return rows


def by_polars(directory: Path) -> Iterable[dict[str, Any]]:
    import polars

    frame = polars.read_parquet(directory / "*" / "*.parquet", hive_partitioning=True)
    assert frame.schema["seed"] == polars.UInt64
    assert frame.schema["logprobs"] == polars.List(polars.Float32)
    return frame.to_dicts()


def by_duckdb(directory: Path) -> Iterable[dict[str, Any]]:
    import duckdb

    with duckdb.connect() as connection:
        relation = connection.sql(f"SELECT * FROM read_parquet('{directory}/*/*.parquet', hive_partitioning = true)")
        types = dict(zip(relation.columns, map(str, relation.types), strict=True))
        assert (types["seed"], types["logprobs"], types["version"]) == ("UBIGINT", "FLOAT[]", "BIGINT")
        rows: list[tuple[Any, ...]] = relation.fetchall()
        return [dict(zip(relation.columns, row, strict=True)) for row in rows]


def by_datasets(directory: Path) -> Iterable[dict[str, Any]]:
    import datasets

    files = sorted(str(path) for path in directory.glob("*/*.parquet"))
    data = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(directory.parent / "cache"))
    assert data.features["seed"].dtype == "uint64"
    return data.to_list()


@pytest.mark.parametrize("read", [by_pandas, by_polars, by_duckdb, by_datasets])
def test_others_read_the_same(
    read: Callable[[Path], Iterable[dict[str, Any]]], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expected = EXPECTED
    if read is by_datasets:  # it knows no partitions
        expected = [{name: value for name, value in row.items() if name != "version"} for row in EXPECTED]
    rows = sorted((plain(row) for row in read(directory)), key=lambda row: str(row["trajectory_id"]))
    assert rows == expected


def plain(value: Any) -> Any:
    """Without numpy and pandas' NaN for what is missing; log-probabilities as their 32 bits."""
    match value:
        case np.ndarray() | list():
            return [plain(item) for item in value]
        case dict():
            return {name: plain(bits(item) if name == "logprobs" else item) for name, item in value.items()}
        case np.generic():
            return plain(value.item())
        case float() if math.isnan(value):
            return None
    return value


def bits(logprobs: Iterable[float]) -> list[int]:
    """Of values that must be fp32 already."""
    values = [float(value) for value in logprobs]
    packed = struct.pack(f"<{len(values)}f", *values)
    assert list(struct.unpack(f"<{len(values)}f", packed)) == values
    return list(struct.unpack(f"<{len(values)}I", packed))
