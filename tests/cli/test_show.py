"""What `rollout show` prints: what was asked for, coloured by version, and nothing that a terminal would obey."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from rollout.cli.main import main
from rollout.store import TrajectoryStore, write_trajectories
from rollout.types import FinishReason, Resume, TrajectoryId, Version, VersionRun, WorkerId
from tests.store.rows import FULL, LOGPROBS, trajectory
from tests.tiny_models import make_tiny_tokenizer

RESUME = Resume(worker=WorkerId("w1"), cached_tokens=1, loaded_tokens=2, restored_tokens=3, recomputed_tokens=0)


def runs(*lengths: tuple[int | None, int]) -> tuple[VersionRun, ...]:
    return tuple(
        VersionRun(version=None if version is None else Version(version), tokens=tokens) for version, tokens in lengths
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store of two batches: a/0 and a/1 under version 1, b/0 and b/1 under 4."""
    store = TrajectoryStore(tmp_path / "store")
    first = trajectory(0, trajectory_id=TrajectoryId("a/0"))
    second = trajectory(1, trajectory_id=TrajectoryId("a/1"), versions=runs((3, 3)), finish_reason=FinishReason.STOP)
    third = trajectory(0, trajectory_id=TrajectoryId("b/0"), versions=runs((3, 1), (4, 2)), resumes=(RESUME,))
    fourth = trajectory(1, trajectory_id=TrajectoryId("b/1"), finish_reason=None)
    store.append([first, second], version=1, rewards=[-1.0, 0.5])
    store.append([third, fourth], version=4, rewards=[1.0, None])
    return tmp_path / "store"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a tokenizer."""
    (tmp_path / "model").mkdir()
    make_tiny_tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    return tmp_path / "model"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standard output that is taken for one with colours."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "40"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["show", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def ids(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    return [json.loads(line)["trajectory_id"] for line in shown(capsys, *arguments, "--json").splitlines()]


def styles(line: str) -> list[tuple[str, str]]:
    """What is coloured on a line, and how."""
    text = Text.from_ansi(line)
    names = {"color(2)": "green", "color(6)": "cyan", "dim": "dim"}
    return [
        (text.plain[span.start : span.end], names[str(span.style)]) for span in text.spans if str(span.style) != "none"
    ]


def test_a_trajectory_is_a_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trajectories(tmp_path / "t.parquet", [FULL, trajectory(1, finish_reason=None)], [0.25, None])
    assert shown(capsys, tmp_path / "t.parquet", "--prompt") == (
        "g/0: abort (over_long), reward 0.25, 2 + 6 tokens, on w0 w1\n"
        "  2 by version 3, 2 appended, 2 by version 4\n"
        "  resumed on w1: 1 cached, 2 loaded, 3 restored, 4 recomputed\n"
        "  begun again after 1 tokens: lost\n"
        "  error: lost, too\n"
        "  > 5 2147483647\n"
        "  │ 9 8 7 6 5 4\n"
        "g/1: partial, 2 + 3 tokens, on no worker\n"
        "  3 by version 0\n"
        "  > 1 2\n"
        "  │ 0 1 2\n"
    )


def test_a_store_is_shown_in_order_of_append(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = [line for line in shown(capsys, directory).splitlines() if not line.startswith(" ")]
    assert [head.partition(":")[0] for head in heads] == ["a/0", "a/1", "b/0", "b/1"]
    assert heads[2] == "b/0: length, reward 1, version 4, 2 + 3 tokens, on no worker"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["a/0", "a/1", "b/0", "b/1"]),
        (["--id", "b/*"], ["b/0", "b/1"]),
        (["--id", "?/1"], ["a/1", "b/1"]),
        (["--id", "a"], []),
        (["--version", "1"], ["a/0", "a/1"]),
        (["--version", "3"], ["a/1", "b/0"]),
        (["--version", "4"], ["b/0", "b/1"]),
        (["--version", "0"], ["a/0", "b/1"]),
        (["--finish-reason", "stop"], ["a/1"]),
        (["--finish-reason", "partial"], ["b/1"]),
        (["--resumed"], ["b/0"]),
        (["--min-reward", "0.5"], ["a/1", "b/0"]),
        (["--max-reward", "0.5"], ["a/0", "a/1"]),
        (["--max-reward", "-1"], ["a/0"]),
        (["--min-reward", "0", "--max-reward", "0.9", "--id", "a/*"], ["a/1"]),
        (["--limit", "0"], ["a/0", "a/1", "b/0", "b/1"]),
    ],
)
def test_filters(
    arguments: Sequence[str], expected: list[str], directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(directory), "--json", *arguments]) == 0
    captured = capsys.readouterr()
    assert [json.loads(line)["trajectory_id"] for line in captured.out.splitlines()] == expected
    assert captured.err == ("" if expected else "nothing matches\n")


def test_the_limit_says_how_many_more_match(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(capsys, directory, "--limit", 1).endswith("│ 0 1 2\nmore match; --limit 0 shows all\n")
    assert shown(capsys, directory, "--limit", 1, "--id", "a/*").endswith("\nmore match; --limit 0 shows all\n")
    assert main(["show", str(directory), "--limit", "3", "--json"]) == 0
    captured = capsys.readouterr()
    assert (captured.out.count("\n"), captured.err) == (3, "more match; --limit 0 shows all\n")
    write_trajectories(tmp_path / "t.parquet", [trajectory(index) for index in range(25)])
    assert shown(capsys, tmp_path / "t.parquet").endswith("\nmore match; --limit 0 shows all\n")
    write_trajectories(tmp_path / "t.parquet", [])
    assert shown(capsys, tmp_path / "t.parquet") == "nothing matches\n"


def test_json_has_every_column_and_is_json(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TrajectoryStore(tmp_path / "s").append([FULL], version=12, rewards=[float("nan")])
    line = shown(capsys, tmp_path / "s", "--json", "--model", model)
    row: dict[str, Any] = json.loads(line, parse_constant=pytest.fail)
    assert line.isascii()
    assert (row["version"], row["reward"], row["seed"]) == (12, None, FULL.seed)
    assert row["metadata"] == {"answer": "häh"}
    assert row["logprobs"] == [*LOGPROBS[:-1], None], "JSON has no infinity"
    assert row["resumes"] == [
        {"worker": "w1", "cached_tokens": 1, "loaded_tokens": 2, "restored_tokens": 3, "recomputed_tokens": 4}
    ]
    assert row["prompt_text"] is None, "it has ids that the tokenizer does not know"
    assert row["output_text"] == make_tiny_tokenizer().decode(list(FULL.output_ids), skip_special_tokens=False)


@pytest.mark.usefixtures("terminal")
def test_versions_are_coloured_and_what_was_appended_is_dim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = trajectory(tokens=6, versions=runs((6, 1), (None, 2), (7, 2), (6, 1)), resumes=(RESUME,))
    write_trajectories(tmp_path / "t.parquet", [row])
    _, versions, resume, output = shown(capsys, tmp_path / "t.parquet").splitlines()
    green, cyan = "green", "cyan"
    assert styles(versions) == [
        *(("1 by version 6", green), ("2 appended", "dim"), ("2 by version 7", cyan), ("1 by version 6", green))
    ]
    assert styles(resume) == [("  resumed on w1: 1 cached, 2 loaded, 3 restored, 0 recomputed", cyan)]
    assert styles(output) == [("0", green), (" 1 2", "dim"), (" 3 4", cyan), (" 5", green)]


@pytest.mark.usefixtures("terminal")
def test_no_color_is_respected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    write_trajectories(tmp_path / "t.parquet", [trajectory()])
    assert "\x1b[32m" not in shown(capsys, tmp_path / "t.parquet")


@pytest.mark.usefixtures("terminal")
def test_text_is_whole_though_its_characters_are_of_two_versions(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = make_tiny_tokenizer().encode("ab€ the\nend").ids
    cut = tokens.index(make_tiny_tokenizer().encode("€").ids[0]) + 1
    row = trajectory(tokens=len(tokens), output_ids=tuple(tokens), versions=runs((0, cut), (1, len(tokens) - cut)))
    write_trajectories(tmp_path / "t.parquet", [row])
    *_, first, second = shown(capsys, tmp_path / "t.parquet", "--model", model).splitlines()
    assert styles(first) == [("ab", "green"), ("€ the", "cyan")]
    assert styles(second) == [("end", "cyan")]


def test_ids_that_the_tokenizer_does_not_know_stay_ids(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trajectories(tmp_path / "t.parquet", [trajectory(output_ids=(300, 70, 320)), trajectory(prompt_ids=(320,))])
    lines = shown(capsys, tmp_path / "t.parquet", "--model", model, "--prompt").splitlines()
    assert lines[3] == "  │ 300 70 320"
    assert lines[6] == "  > 320"
    assert "endoftext" in lines[7], "special tokens are shown"


@pytest.mark.usefixtures("terminal")
def test_foreign_text_is_printed_and_not_obeyed(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nasty = "[red]x[/] :smile: \x1b[2J\x07\r\u202e\x9b\x7f"
    tokens = make_tiny_tokenizer().encode(nasty + "\nz").ids
    row = trajectory(
        0,
        tokens=len(tokens),
        output_ids=tuple(tokens),
        prompt_ids=tuple(tokens),
        trajectory_id=TrajectoryId(nasty + "\n"),
        workers=(WorkerId(nasty),),
        resumes=(Resume(worker=WorkerId(nasty), cached_tokens=0, restored_tokens=0, recomputed_tokens=0),),
        error=nasty + "\n",
    )
    write_trajectories(tmp_path / "t.parquet", [row])
    out = shown(capsys, tmp_path / "t.parquet", "--model", model, "--prompt")
    escaped = r"[red]x[/] :smile: \x1b[2J\x07\r\u202e\x9b\x7f"
    assert out.count(escaped) == 6
    assert not {"\x1b[2J", "\x07", "\r", "\u202e", "\x9b", "\x7f", "\x1b[31mx"} & {
        out[at : at + size] for at in range(len(out)) for size in (1, 4, 6)
    }
    assert out.count("\n") == 8, "a header, versions, a resume, an error, two lines of prompt and of output"


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_is_no_error(options: Sequence[str], unbuffered: str, directory: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "rollout", "show", str(directory), *options],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_output_without_unicode_gets_escapes(directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rollout", "show", str(directory), "--limit", "1"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert b"  \\u2502 0 1 2\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.parquet"], "none.parquet: cannot read trajectories: No such file"),
        (["text.parquet"], "text.parquet: not a Parquet file"),
        (["empty"], "empty: not a directory of trajectories: there is no version=N in it"),
        (["store", "--limit", "-1"], "--limit: got -1, allowed: 0 (all) or more"),
        (["store", "--finish-reason", "bored"], "argument --finish-reason: invalid choice: 'bored'"),
        (["store", "--min-reward", "much"], "argument --min-reward: invalid float value: 'much'"),
        (["store", "--model", "empty"], "tokenizer.json: cannot read the tokenizer"),
        ([], "the following arguments are required: PATH"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    arguments: Sequence[str],
    message: str,
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(directory.parent)
    Path("text.parquet").write_text("hello")
    Path("empty").mkdir()
    assert main(["show", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rollout: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
