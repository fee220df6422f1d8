"""`rollout run` with real workers: what it writes, that it repeats, and that Ctrl-C ends it cleanly."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rollout.cli.main import main
from rollout.store import read_trajectories
from rollout.types import FinishReason, Trajectory, TrajectoryId, trajectory_seed
from tests.tiny_models import make_tiny_llama

COLUMNS = [
    "group_id",
    "sample_index",
    "trajectory_id",
    "seed",
    "prompt_ids",
    "output_ids",
    "logprobs",
    "versions",
    "finish_reason",
    "suspensions",
    "workers",
]
PROMPTS: dict[str, Any] = {
    "text": "Count to ten, slowly.",
    "ids": list(range(4, 60)),
    "long": "x" * 600,
    "chat": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
    "number": 7,
    "empty": "",
    "foreign": [5, 999],
    "again": "Count to twenty.",
}
GOOD = ("text", "ids", "chat", "again")
SAMPLES = 3
NEW_TOKENS = 64
SLICE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that is over."""

    code: int
    stdout: str
    stderr: str
    report: dict[str, Any]
    out: Path
    rows: dict[TrajectoryId, Trajectory]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 8 KiB of KV a token, so that a slice is more than Ray would inline, prompts and a configuration."""
    directory = tmp_path_factory.mktemp("run")
    make_tiny_llama(
        directory / "model",
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
    )
    lines = [json.dumps({"id": key, "prompt": prompt, "level": 3}) for key, prompt in PROMPTS.items()]
    (directory / "prompts.jsonl").write_text("\n".join([*lines, "{not json"]) + "\n")
    settings = {
        "model": {"path": str(directory / "model"), "dtype": "float32"},
        "engine": {
            "max_running": len(GOOD) * SAMPLES,  # so that the other worker always has room
            "deterministic": True,
            "chunk_tokens": 32,
            "kv_bytes": "32MiB",
            "max_context_tokens": 512,
        },
        "cluster": {"name": "run", "workers": 2, "start_timeout_s": 600},
        "pool": {"budget_bytes": "64MiB", "warm_bytes": "8MiB"},
        "abort": {"keep": "pool", "policies": [{"kind": "slice_budget", "tokens": SLICE_TOKENS}]},
        "resume": {"prefer": "other"},
        "sampling": {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "run": {
            "prompts": {"kind": "file", "path": str(directory / "prompts.jsonl"), "key_column": "id"},
            "samples": SAMPLES,
            "seed": 11,
        },
    }
    (directory / "run.yaml").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def sliced(directory: Path, ray_cluster: None) -> Run:
    """Suspended after every slice, and verified."""
    return run(directory, "sliced", "--verify")


@pytest.fixture(scope="module")
def whole(directory: Path, ray_cluster: None) -> Run:
    """The same, never suspended."""
    return run(directory, "whole", "--set", "abort.policies=[]")


def run(directory: Path, name: str, *arguments: str) -> Run:
    out, report = directory / f"{name}.parquet", directory / f"{name}.json"
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main(["run", str(directory / "run.yaml"), "--out", str(out), "--json", str(report), *arguments])
    return Run(
        code=code,
        stdout=stdout.getvalue(),
        stderr=stderr.getvalue(),
        report=json.loads(report.read_text()),
        out=out,
        rows={row.trajectory_id: row for row in read_trajectories(out)},
    )


def test_every_resumed_trajectory_equals_its_uninterrupted_replay(sliced: Run) -> None:
    assert sliced.code == 0
    trajectories = len(GOOD) * SAMPLES
    suspensions = trajectories * ((NEW_TOKENS - 1) // SLICE_TOKENS)
    counted = {
        "ended": "complete",
        "groups": len(GOOD),
        "trajectories": trajectories,
        "generated_tokens": trajectories * NEW_TOKENS,
        "suspensions": suspensions,
        "resumes": suspensions,
        "recomputed_tokens": 0,
        "preemptions": 0,
        "workers_lost": 0,
        "restarts": 0,
        "export_failures": 0,
        "restore_failures": 0,
        "failed_trajectories": 0,
        "exclusive_pages_freed_ratio": 1.0,
        "verified_trajectories": trajectories,
        "mismatched_trajectories": 0,
        "mismatches": [],
    }
    assert {name: sliced.report[name] for name in counted} == counted
    assert sliced.report["resumed_elsewhere"] == suspensions


def test_the_report_says_what_ran_and_how_much_moved(sliced: Run, directory: Path) -> None:
    report = sliced.report
    assert report["command"].startswith(f"rollout run {directory / 'run.yaml'} --out ")
    policy = {"kind": "slice_budget", "tokens": SLICE_TOKENS, "keep": "auto", "then": "requeue"}
    assert report["config"]["abort"] == {"keep": "pool", "policies": [policy]}
    assert report["decisions"] == {"slice_budget": {"pool": report["suspensions"]}}
    assert report["config"]["run"]["out"] == str(sliced.out)
    assert report["tokens_per_s"] == pytest.approx(report["generated_tokens"] / report["wall_s"])
    assert report["exported_bytes"] > report["suspensions"] * SLICE_TOKENS * 8192
    assert report["restored_bytes"] > 0
    assert report["restored_tokens"] + report["cached_tokens"] > report["suspensions"] * SLICE_TOKENS
    assert report["freed_pages"] == report["exclusive_pages"] > report["suspensions"]
    assert report["pages_freed_per_suspension"] == report["freed_pages"] / report["suspensions"]


def test_the_table_closes_the_run_and_the_log_is_plain(sliced: Run) -> None:
    for name in ("tokens/s", "suspensions", "exported", "restored", "tokens recomputed", "pages freed per suspension"):
        assert name in sliced.stdout
    assert f"{sliced.out}: 17 rows" in sliced.stdout
    assert "verified: 12 resumed trajectories, 0 differ" in sliced.stdout
    assert "\x1b" not in sliced.stdout + sliced.stderr
    assert "roll out: " in sliced.stderr
    assert "/9 groups, " in sliced.stderr


def test_the_documented_columns_come_first_and_hold_what_they_say(sliced: Run) -> None:
    assert pq.read_schema(sliced.out).names[: len(COLUMNS)] == COLUMNS
    for key in GOOD:
        for index in range(SAMPLES):
            row = sliced.rows[TrajectoryId(f"{key}/{index}")]
            assert (row.group_id, row.sample_index) == (key, index)
            assert row.seed == trajectory_seed(request_seed=None, run_seed=11, key=key, sample_index=index)
            assert len(row.output_ids) == len(row.logprobs) == NEW_TOKENS
            assert [(each.version, each.tokens) for each in row.versions] == [(0, NEW_TOKENS)]
            assert row.finish_reason is FinishReason.LENGTH
            assert row.suspensions == len(row.resumes) == len(row.workers) - 1 == (NEW_TOKENS - 1) // SLICE_TOKENS
            assert row.metadata == {"level": 3}
    assert sliced.rows[TrajectoryId("ids/0")].prompt_ids == tuple(PROMPTS["ids"])


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("long", "PromptTooLongError: long: the prompt has "),
        ("number", "InvalidPromptError: got int"),
        ("empty", "InvalidPromptError: empty string"),
        ("foreign", "InvalidPromptError: "),
        ("row 8", "InvalidPromptError: line 9 is not valid JSON"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_one_row_that_says_why(key: str, error: str, sliced: Run) -> None:
    [row] = [row for row in sliced.rows.values() if row.group_id == key]
    assert row.error is not None
    assert row.error.startswith(error)
    assert (row.finish_reason, row.sample_index, row.output_ids, row.workers) == (FinishReason.ERROR, 0, (), ())
    assert f"rejected prompt {key}: {row.error}" in sliced.stderr
    assert sliced.report["rejected_prompts"] == 5


def test_a_second_run_draws_the_same_tokens_whether_suspended_or_not(sliced: Run, whole: Run) -> None:
    assert whole.code == 0
    assert (whole.report["suspensions"], whole.report["exclusive_pages_freed_ratio"]) == (0, None)
    assert list(map(identity, ordered(sliced))) == list(map(identity, ordered(whole)))
    assert [row.output_ids for row in ordered(sliced)] == [row.output_ids for row in ordered(whole)]
    assert logprob_bits(sliced) == logprob_bits(whole)


def test_ctrl_c_writes_finished_and_partial_trajectories(directory: Path) -> None:
    out, report = directory / "interrupted.parquet", directory / "interrupted.json"
    command = [
        *(sys.executable, "-m", "rollout", "run", str(directory / "run.yaml")),
        *("--out", str(out), "--json", str(report)),
        *("--set", "sampling.max_new_tokens=400", "--set", "run.samples=64", "--set", "engine.max_running=4"),
    ]
    with (
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"RAY_ADDRESS": "local", "RAY_OVERRIDE_RESOURCES": '{"CPU": 4}'},
            start_new_session=True,
        ) as process,
        deadline(process, seconds=600),
    ):
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if "tokens/s" in line:
                break
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        stdout, stderr = process.communicate()
    assert process.returncode == 130, (seen, stdout, stderr)
    assert stderr.splitlines()[-1] == "rollout: interrupted"
    assert "tokens recomputed" in stdout
    rows = read_trajectories(out)
    assert len(rows) == len(GOOD) * 64 + 5
    partial = [row for row in rows if row.finish_reason is FinishReason.ABORT and row.output_ids]
    assert partial
    assert all(len(row.output_ids) == len(row.logprobs) < 400 for row in partial)
    assert json.loads(report.read_text())["ended"] == "interrupted"
    assert [path.name for path in directory.iterdir() if path.name.endswith(".partial")] == []


@contextlib.contextmanager
def deadline(process: "subprocess.Popen[str]", *, seconds: float) -> Iterator[None]:
    """Kills the process if the block takes longer."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        process.kill()


def ordered(run: Run) -> list[Trajectory]:
    return [run.rows[name] for name in sorted(run.rows)]


def identity(row: Trajectory) -> tuple[str, int, str, int]:
    return row.group_id, row.sample_index, row.trajectory_id, row.seed


def logprob_bits(run: Run) -> list[bytes]:
    column = pq.read_table(run.out).sort_by("trajectory_id").column("logprobs").combine_chunks()
    return [values.values.to_numpy().tobytes() for values in column]
