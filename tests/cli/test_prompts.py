"""Where prompts come from, which rows are refused by name, and which sources are refused altogether."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout.cli.prompts import PromptRow, load_prompts
from rollout.config import FilePrompts, ReasoningGymPrompts
from rollout.errors import ConfigError

CHAT = [{"role": "user", "content": "Hi"}]


def jsonl(path: Path, *lines: object) -> Path:
    """A file of lines; strings are written as they are, anything else as JSON."""
    file = path / "p.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return file


def load(path: Path, **options: Any) -> list[PromptRow]:
    return load_prompts(FilePrompts(kind="file", path=path, **options))


def test_jsonl_rows_keep_their_order_type_and_other_columns(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "Hi", "answer": 3}, "", {"prompt": CHAT}, {"prompt": [1, 2], "tags": ["a"]})
    assert load(path) == [
        PromptRow(key="0", prompt="Hi", metadata={"answer": 3}),
        PromptRow(key="1", prompt=CHAT),
        PromptRow(key="2", prompt=[1, 2], metadata={"tags": ["a"]}),
    ]


def test_parquet_rows_are_the_same_as_jsonl_rows(tmp_path: Path) -> None:
    records = [{"id": "a", "prompt": CHAT, "level": 1}, {"id": "b", "prompt": [*CHAT, *CHAT], "level": None}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "p.parquet")
    rows = load(tmp_path / "p.parquet", key_column="id")
    assert rows == load(jsonl(tmp_path, *records), key_column="id")
    assert rows[0] == PromptRow(key="a", prompt=CHAT, metadata={"level": 1})


def test_columns_and_limit_are_chosen(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"q": "a", "id": 7}, {"q": "b", "id": "x y"}, "{ never read")
    assert load(path, column="q", key_column="id", limit=2) == [
        PromptRow(key="7", prompt="a"),
        PromptRow(key="x y", prompt="b"),
    ]


def test_prompts_are_not_looked_at(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": None}, {"prompt": 3.5}, {"prompt": []})
    assert [(row.prompt, row.error) for row in load(path)] == [(None, None), (3.5, None), ([], None)]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", "line 2 is not valid JSON"),
        ('{"prompt": "x"', "line 2 is not valid JSON"),
        ("[" * 100_000, "line 2 is not valid JSON"),
        ("[1, 2]", "line 2: got list, not an object"),
        ('"text"', "line 2: got str, not an object"),
        ('{"promt": "x"}', "row 1 has no column 'prompt', only ['promt']"),
    ],
)
def test_a_malformed_row_is_refused_by_name_and_the_others_stay(tmp_path: Path, line: str, error: str) -> None:
    first, bad, last = load(jsonl(tmp_path, {"prompt": "a"}, line, {"prompt": "b"}))
    assert (first.prompt, first.error, last.prompt, last.error) == ("a", None, "b", None)
    assert (bad.key, bad.prompt, last.key) == ("1", None, "2")
    assert bad.error is not None
    assert error in bad.error


def test_a_line_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "\xff"}\n{"prompt": "b"}\n')
    bad, good = load(tmp_path / "p.jsonl")
    assert bad.error is not None
    assert "line 1 is not valid JSON" in bad.error
    assert good.prompt == "b"


@pytest.mark.parametrize("key", [None, "", 1.5, True, ["a"], "a\nb", "\ud800"])
def test_a_row_without_a_usable_key_is_refused_by_its_number(tmp_path: Path, key: object) -> None:
    path = jsonl(tmp_path, {"id": "a", "prompt": "x"}, {"id": key, "prompt": "y", "answer": 3}, "{")
    good, bad, broken = load(path, key_column="id")
    assert (good.key, good.error) == ("a", None)
    assert (bad.key, bad.prompt, bad.metadata) == ("row 1", None, {"answer": 3})
    assert bad.error is not None
    assert f"key column 'id': got {key!r}" in bad.error
    assert broken.key == "row 2"
    assert broken.error is not None
    assert "line 3 is not valid JSON" in broken.error


def test_keys_must_differ(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"id": "a", "prompt": "x"}, {"id": 1, "prompt": "y"}, {"id": "1", "prompt": "z"})
    with pytest.raises(ConfigError, match="rows 1 and 2 have the same key '1'"):
        load(path, key_column="id")
    assert [row.key for row in load(path)] == ["0", "1", "2"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_source_that_cannot_be_read_is_refused(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"folder.{suffix}").mkdir()
    for name in ("none", "folder"):
        with pytest.raises(ConfigError, match=rf"{name}\.{suffix}: cannot read the prompts: \w"):
            load(tmp_path / f"{name}.{suffix}")


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.parquet").write_text("hello")
    with pytest.raises(ConfigError, match="not a readable Parquet file"):
        load(tmp_path / "p.parquet")


@pytest.mark.parametrize("name", ["p.csv", "p", "p.json", "p.JSONL"])
def test_an_unknown_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown suffix .*, allowed: \.jsonl, \.parquet"):
        load(tmp_path / name)


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "p.parquet")
    for path in (jsonl(tmp_path), tmp_path / "p.parquet"):
        with pytest.raises(ConfigError, match="no prompts"):
            load(path)


@pytest.mark.parametrize("option", ["column", "key_column"])
def test_a_column_that_no_row_has_is_refused(tmp_path: Path, option: str) -> None:
    records = [{"prompt": "x", "id": "a"}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "p.parquet")
    for path in (jsonl(tmp_path, "{", *records), tmp_path / "p.parquet"):
        with pytest.raises(ConfigError, match="no column 'query', only id, prompt"):
            load(path, **{option: "query"})


def test_reasoning_gym_prompts_are_the_same_every_time() -> None:
    config = ReasoningGymPrompts(kind="reasoning_gym", dataset="chain_sum", size=4, seed=3, options={"max_terms": 3})
    rows = load_prompts(config)
    assert rows == load_prompts(config)
    assert rows != load_prompts(config.model_copy(update={"seed": 4}))
    assert [row.key for row in rows] == ["0", "1", "2", "3"]
    for row in rows:
        assert row.error is None
        assert row.metadata["metadata"]["num_terms"] <= 3
        assert eval(row.metadata["metadata"]["expression"]) == int(row.metadata["answer"])
        assert row.metadata["metadata"]["expression"] in row.prompt


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ("chain_sums", {}, "has no data set 'chain_sums'"),
        ("chain_sum", {"max_term": 3}, "'chain_sum': .*max_term"),
        ("chain_sum", {"size": 3}, "'chain_sum': .*size"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "max_terms must be"),
    ],
)
def test_a_data_set_that_cannot_be_made_is_refused(dataset: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_prompts(ReasoningGymPrompts(kind="reasoning_gym", dataset=dataset, options=options))


def test_a_missing_reasoning_gym_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match="need the package reasoning-gym"):
        load_prompts(ReasoningGymPrompts(kind="reasoning_gym", dataset="chain_sum"))
