"""`examples/simulated_trainer.py` makes trajectories have the lengths that were drawn, and loses none in any mode."""

import contextlib
import importlib.util
import io
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import rollout
from rollout.errors import ConfigError, DeadlineError
from rollout.training.recorder import read_metrics
from rollout.types import Delivery
from tests.tiny_models import make_tiny_llama

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "simulated_trainer.py"
LONG = 1000
LENGTHS = [4, LONG, 5, 3, 1, 7]
"""In turn: every third group of two has a trajectory that takes much longer than all others."""


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The module, which is part of no package."""
    spec = importlib.util.spec_from_file_location("simulated_trainer", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def raw(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a short run whose trainer does not sleep."""
    tmp_path = tmp_path_factory.mktemp("settings")
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps(LENGTHS))
    service = {
        "model": {"path": str(model), "dtype": "float32"},
        "cluster": {"name": "simulated", "workers": 1},
        "engine": {"max_running": 8, "kv_bytes": "8MiB"},
        "pool": {"budget_bytes": "16MiB", "warm_bytes": 0},
        "abort": {"keep": "pool"},
        "weights": {"mode": "in_place", "kv_reuse": {"kind": "stale", "max_lag": 8}},
    }
    shape = {"steps": 3, "prompts": 2, "samples": 2, "prompt_tokens": 8, "over_sample": 1.0, "ahead": 2.0}
    return shape | {"lengths": str(lengths), "out": str(tmp_path / "out"), "rollout": service}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `--compare` did."""

    code: int
    printed: str
    runs: dict[str, Any]
    """By mode."""
    summaries: dict[str, dict[str, float]]
    left: dict[str, list[Delivery]]
    """Groups that were under way at the end of each, completed after it."""


@pytest.fixture(scope="module")
def comparison(ray_cluster: None, example: Any, raw: dict[str, Any], tmp_path_factory: Any) -> Comparison:
    """One for all tests: every mode starts a service."""
    runs: dict[str, Any] = {}
    summaries: dict[str, dict[str, float]] = {}
    left: dict[str, list[Delivery]] = {}

    class Completed(example.Run):  # type: ignore[misc]
        def summary(self) -> Any:
            summaries[self.settings.mode] = summary = super().summary()
            runs[self.settings.mode] = self
            self.service.resume()
            left[self.settings.mode] = self.service.next_groups(len(self.waiting)) if self.waiting else []
            return summary

    config = tmp_path_factory.mktemp("config") / "config.yaml"
    config.write_text(yaml.safe_dump(raw))
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(example, "Run", Completed)
        code = example.main(["--config", str(config), "--compare"])
    return Comparison(code=code, printed=printed.getvalue(), runs=runs, summaries=summaries, left=left)


def consumed(run: Any) -> list[Delivery]:
    return [group for step in run.collected for group in step]


def lengths_of(group: Delivery) -> list[int]:
    return [one.sampled_tokens for one in group.trajectories]


# Lengths


def test_lengths_are_the_same_whenever_they_are_asked_for_and_follow_the_seed(
    example: Any, raw: dict[str, Any]
) -> None:
    def drawn(**changes: Any) -> list[list[int]]:
        settings = example.Settings.model_validate(raw | {"lengths": None} | changes)
        return [example.Workload(settings).lengths(index) for index in range(8)]

    assert drawn() == drawn()
    assert drawn() == drawn(mode="async")
    assert drawn() != drawn(seed=1)


def test_lengths_are_log_normal_with_a_tail_and_a_bound(example: Any, raw: dict[str, Any]) -> None:
    def drawn(**changes: Any) -> list[int]:
        shape = {"lengths": None, "samples": 1000, "median": 32, "sigma": 0.3, "longest": 400}
        return list(example.Workload(example.Settings.model_validate(raw | shape | changes)).lengths(0))

    assert statistics.median(drawn()) == pytest.approx(32, rel=0.1)
    assert max(drawn()) < 200
    tail = [length for length in drawn(tail_share=0.1) if length >= 200]
    assert len(tail) == pytest.approx(100, rel=0.4)
    assert max(tail) <= 400
    assert min(drawn(median=0.01)) == 1
    assert set(drawn(median=1000, sigma=0.0)) == {400}
    assert set(drawn(median=1e6, longest=None)) == {2048 - 8}  # what the context has room for


@pytest.mark.parametrize("text", ["[4, 2.0, 30]", "4\n2\n\n30\n"])
def test_lengths_of_a_file_are_taken_in_turn(example: Any, raw: dict[str, Any], tmp_path: Path, text: str) -> None:
    (tmp_path / "mine").write_text(text)
    settings = example.Settings.model_validate(raw | {"lengths": tmp_path / "mine", "longest": 20})
    assert [example.Workload(settings).lengths(index) for index in range(3)] == [[4, 2], [20, 4], [2, 20]]


# Runs


@pytest.mark.parametrize("mode", ["sync", "partial", "async"])
def test_every_group_has_the_lengths_that_were_drawn_and_is_consumed_once_or_left(
    comparison: Comparison, mode: str
) -> None:
    run, left = comparison.runs[mode], comparison.left[mode]
    assert [len(step) for step in run.collected] == [2, 2, 2]
    assert {group.group_id for group in left} == set(run.waiting)
    groups = [*consumed(run), *left]
    everything = {int(group.group_id): lengths_of(group) for group in groups}
    assert len(everything) == len(groups)  # none of them twice
    assert everything == {index: run.workload.lengths(index) for index in range(run.submitted)}


def test_a_step_that_waits_for_all_trains_on_what_the_live_weights_sampled(comparison: Comparison) -> None:
    run = comparison.runs["sync"]
    assert not comparison.left["sync"]
    assert comparison.summaries["sync"]["async/staleness_max"] == 0
    batches = [[one for group in step for one in group.trajectories] for step in run.collected]
    versions = [{part.version for one in batch for part in one.versions} for batch in batches]
    assert versions == [{0}, {1}, {2}]


def test_what_partial_leaves_goes_on_where_it_was_stopped(comparison: Comparison) -> None:
    run, left = comparison.runs["partial"], comparison.left["partial"]
    assert len(left) == 2
    resumed = [one for group in [*consumed(run), *left] for one in group.trajectories if one.resumes]
    assert max(one.sampled_tokens for one in resumed) == LONG
    assert any(len(one.versions) > 1 for one in resumed)


def test_groups_are_ahead_while_the_trainer_is_busy(comparison: Comparison) -> None:
    run, left = comparison.runs["async"], comparison.left["async"]
    assert len(left) == 4
    (first,) = [group for group in [*consumed(run), *left] if group.group_id == "0"]
    (long,) = [one for one in first.trajectories if one.sampled_tokens == LONG]
    assert long.versions[0].version == 0  # it began in the first step, which others completed
    assert first.version > 0


def test_all_modes_are_compared_in_one_table_and_recorded(
    comparison: Comparison, example: Any, raw: dict[str, Any]
) -> None:
    assert comparison.code == 0
    assert all(title in comparison.printed for title, _, _ in example.ROWS)
    for mode in example.MODES:
        assert f"{mode}: step 2 " in comparison.printed
        records = read_metrics(Path(raw["out"]) / mode / "metrics.jsonl")
        assert [record["step"] for record in records] == [0, 1, 2]
        assert all(0 <= (record["perf/idle_share"] or 0) <= 1 for record in records)


# What cannot work


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mode=later", "mode: Input should be 'sync', 'partial' or 'async' (got 'later')"),
        ("train_s=-1", "train_s: Input should be greater than or equal to 0"),
        ("tail=0.1", "tail: unknown key"),
        ("prompt_tokens=2048", "prompt_tokens: got 2048, allowed: less than the context, 2048"),
        ("rollout.engine.max_context_tokens=8", "prompt_tokens: got 8, allowed: less than the context, 8"),
        ("rollout.model.path=nowhere", "nowhere: no such directory"),
        ("lengths=nowhere", "lengths: nowhere: cannot be read"),
    ],
)
def test_a_wrong_setting_is_one_line(
    example: Any, raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw))
    assert example.main(["--config", str(tmp_path / "config.yaml"), "--set", override]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [(DeadlineError("too\nlate"), 1, "error: too late\n"), (KeyboardInterrupt(), 130, "interrupted\n")],
)
def test_what_ends_a_run_is_one_line(
    example: Any,
    raw: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: BaseException,
    code: int,
    line: str,
) -> None:
    def fail(settings: Any) -> None:
        raise raised

    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw))
    monkeypatch.setattr(example, "simulate", fail)
    assert example.main(["--config", str(tmp_path / "config.yaml")]) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("text", ["", "[]", "3\nlong", "[3, 0]", "[true]", "[NaN]", '["3"]', "[[3]]", "[3"])
def test_lengths_that_are_none_are_refused(example: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(ConfigError, match=r"lengths: .*lengths: (got|not numbers)"):
        example.read_lengths(tmp_path / "lengths")


def test_a_trajectory_that_ends_early_or_is_missing_is_told(example: Any, raw: dict[str, Any]) -> None:
    run = object.__new__(example.Run)
    run.settings = example.Settings.model_validate(raw)
    run.waiting = {"0": [3, 4]}
    short = rollout.Trajectory(
        trajectory_id=rollout.TrajectoryId("0/1"),
        group_id=rollout.GroupId("0"),
        sample_index=1,
        seed=0,
        prompt_ids=(1,),
        output_ids=(),
        logprobs=(),
        versions=(),
        finish_reason=rollout.FinishReason.LENGTH,
    )
    with pytest.raises(ConfigError, match=r"engine\.kv_bytes: 0/1 had room for 0 of 4 tokens"):
        run.check([Delivery(group_id=rollout.GroupId("0"), trajectories=(short,))])
    with pytest.raises(DeadlineError, match="0 of 2 groups were done in time"):
        run.check([])
