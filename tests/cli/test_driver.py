"""How a run ends when something goes wrong, on a fake service: everything known is written first."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout.cli import driver as driver_module
from rollout.cli import execution
from rollout.cli.main import main
from rollout.config import Config
from rollout.errors import ServiceClosedError
from rollout.store import read_trajectories
from rollout.types import FinishReason, GroupId, Trajectory
from tests.cli.fake_service import FakeService
from tests.tiny_models import make_tiny_llama

PROMPTS = 6
SAMPLES = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters are looked at every turn."""
    monkeypatch.setattr(driver_module, "STATS_S", 0.0)


@pytest.fixture
def config(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("".join(f'{{"prompt": "number {number}"}}\n' for number in range(PROMPTS)))
    settings = {
        "model": {"path": str(model)},
        "engine": {"deterministic": True},
        "abort": {"policies": [{"kind": "slice_budget", "tokens": 4}]},
        "run": {"prompts": {"kind": "file", "path": "prompts.jsonl"}, "samples": SAMPLES, "out": "out.parquet"},
    }
    Path("run.yaml").write_text(json.dumps(settings))
    return "run.yaml"


def use(monkeypatch: pytest.MonkeyPatch, **faults: Any) -> list[FakeService]:
    """Have runs start fake services; returns those that were started."""
    started: list[FakeService] = []

    def start(config: Config) -> FakeService:
        started.append(FakeService(config, **faults))
        return started[-1]

    monkeypatch.setattr(execution, "start", start)
    return started


def half(group: GroupId) -> bool:
    return int(group) % 2 == 0


def test_more_prompts_than_a_turn_submits_are_all_rolled_out(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver_module, "TURN_PROMPTS", 4)
    monkeypatch.setattr(driver_module, "TURN_GROUPS", 1)
    started = use(monkeypatch)
    assert main(["run", config]) == 0
    assert started[0].closed
    assert len(read_trajectories(Path("out.parquet"))) == PROMPTS * SAMPLES
    assert "out.parquet: 12 rows" in capsys.readouterr().out


def test_a_stall_writes_what_is_there_and_dumps_the_state(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = use(monkeypatch, finishes=half)
    assert main(["run", config, "--set", "driver.stall_timeout_s=0.05", "--json", "report.json"]) == 1
    assert started[0].closed
    assert reasons() == {"length": 6, "abort": 6}
    errors = capsys.readouterr().err
    assert '"phases": {' in errors
    assert errors.splitlines()[-1] == "rollout: error: nothing went on for long enough"
    assert json.loads(Path("report.json").read_text())["ended"] == "stalled"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_partial_trajectories_written(
    number: signal.Signals, config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, finishes=half, on_poll=once(lambda: os.kill(os.getpid(), number)))
    before = signal.getsignal(number)
    assert main(["run", config, "--verify", "--json", "report.json"]) == 130
    assert signal.getsignal(number) is before
    assert reasons() == {"length": 6, "abort": 6}
    assert all(len(each.output_ids) == 8 for each in read_trajectories(Path("out.parquet")))
    captured = capsys.readouterr()
    assert "tokens recomputed" in captured.out
    assert captured.err.splitlines()[-1] == "rollout: interrupted"
    report = json.loads(Path("report.json").read_text())
    assert (report["ended"], report["verified_trajectories"]) == ("interrupted", None)


def test_what_does_not_stop_in_time_is_told_and_the_rest_is_written(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt = once(lambda: os.kill(os.getpid(), signal.SIGINT))
    use(monkeypatch, finishes=half, stops=lambda group: group != "3", on_poll=interrupt)
    assert main(["run", config]) == 130
    assert reasons() == {"length": 6, "abort": 5}
    assert "1 trajectories did not stop within 15 s" in capsys.readouterr().err


def test_a_signal_while_the_service_starts_leaves_the_old_file(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out.parquet").write_text("old")
    monkeypatch.setattr(execution, "start", lambda config: os.kill(os.getpid(), signal.SIGINT))
    assert main(["run", config]) == 130
    assert capsys.readouterr().err == "rollout: interrupted\n"
    assert Path("out.parquet").read_text() == "old"
    assert [path.name for path in Path().iterdir() if path.name.endswith(".partial")] == []


def test_a_service_that_dies_leaves_what_was_finished(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    polls: list[None] = []

    def die_later() -> None:
        polls.append(None)
        if len(polls) > 1:
            raise ServiceClosedError("the service was closed, or its controller died")

    use(monkeypatch, finishes=half, on_poll=die_later)
    assert main(["run", config]) == 1
    assert reasons() == {"length": 6}
    assert capsys.readouterr().err.splitlines()[-1].startswith("rollout: error: the service was closed")


def test_failed_trajectories_are_written_and_fail_the_run(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(one: Trajectory) -> Trajectory:
        return replace(one, error="WorkerLostError: no worker is left") if one.trajectory_id == "3/1" else one

    use(monkeypatch, change=fail)
    assert main(["run", config, "--json", "report.json"]) == 1
    assert reasons() == {"length": 11, "error": 1}
    assert "1 of 12 trajectories failed; 3/1: WorkerLostError" in capsys.readouterr().err
    assert json.loads(Path("report.json").read_text())["failed_trajectories"] == 1


def test_verify_reports_what_differs_and_fails_the_run(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def differ(one: Trajectory) -> Trajectory:
        replayed = len(one.workers) == 1
        return replace(one, output_ids=(*one.output_ids[:5], 0, 0, 0)) if replayed and one.sample_index else one

    started = use(monkeypatch, change=differ)
    assert main(["run", config, "--verify", "--json", "report.json"]) == 1
    assert [service.closed for service in started] == [True, True]
    assert started[1].config.abort.policies == ()
    report = json.loads(Path("report.json").read_text())
    assert (report["verified_trajectories"], report["mismatched_trajectories"]) == (12, 6)
    assert report["mismatches"][0] == {"trajectory_id": "0/1", "kind": "ids", "index": 5}
    assert "0/1: ids differ from token 5 on" in capsys.readouterr().out


def test_verify_says_when_equality_is_not_promised_and_replays_nothing_without_resumes(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = use(monkeypatch)
    arguments = ["--set", "engine.deterministic=false", "--set", "abort.policies=[]"]
    assert main(["run", config, "--verify", *arguments]) == 0
    assert len(started) == 1
    captured = capsys.readouterr()
    assert "promised with engine.deterministic=true only" in captured.err
    assert "verified: 0 resumed trajectories, 0 differ" in captured.out


def test_a_bad_file_of_prompts_is_noted_in_a_few_lines(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("prompts.jsonl").write_text("".join(f'{{"prompt": {number}}}\n' for number in range(40)))
    use(monkeypatch)
    assert main(["run", config]) == 1, "a run without a prompt of use has failed"
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 7
    assert errors[0].startswith("rejected prompt 0: InvalidPromptError: got int")
    assert errors[-1] == "rollout: error: all 40 prompts were rejected; out.parquet says why"
    rows = read_trajectories(Path("out.parquet"))
    assert [row.group_id for row in rows] == [str(number) for number in range(40)]
    assert all(row.finish_reason is FinishReason.ERROR and row.error for row in rows)


def reasons() -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in read_trajectories(Path("out.parquet")):
        assert row.finish_reason is not None
        counts[row.finish_reason.value] = counts.get(row.finish_reason.value, 0) + 1
    return counts


def once(act: Callable[[], None]) -> Callable[[], None]:
    left = [act]
    return lambda: left.pop()() if left else None
