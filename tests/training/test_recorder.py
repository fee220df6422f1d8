"""What a run writes of itself: JSONL that survives crashes and restarts, TensorBoard's events, curves.

Shape letters: H, W height and width of a picture.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollout.errors import ConfigError, InvalidArgumentError
from rollout.training.recorder import Recorder, read_metrics

NAN, INF = float("nan"), float("inf")


def step_metrics(step: int) -> dict[str, float]:
    return {
        "rollout/reward/mean": step / 10,
        "rollout/response_len/mean": 20.0 - step,
        "rollout/response_len/p90": 30.0 - step,
        "async/staleness_mean": 0.5,
        "async/staleness_max": 1,
        "perf/tokens_per_s": 1000.0 + step,
        "perf/rollout_time": 3.25,
    }


def run(directory: Path, first: int, stop: int, **more: float) -> None:
    with Recorder(directory, first_step=first) as recorder:
        for step in range(first, stop):
            recorder.log(step, step_metrics(step) | more)


def scalars(directory: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard shows."""
    board = EventAccumulator(str(directory / "tensorboard"))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(name)]


def test_a_step_is_a_line_that_is_there_at_once(tmp_path: Path) -> None:
    with Recorder(tmp_path / "made" / "here") as recorder:
        recorder.log(0, {"a/b": 0.25, "count": 3})
        lines = (tmp_path / "made" / "here" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [{"step": 0, "a/b": 0.25, "count": 3}]
    assert scalars(tmp_path / "made" / "here", "a/b") == [(0, 0.25)]


def test_a_restart_does_again_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, 0, 6, attempt=1)
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    run(tmp_path, 4, 8, attempt=2)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[:4] == before[:4]
    expected = [(step, 1 if step < 4 else 2) for step in range(8)]
    assert [(record["step"], record["attempt"]) for record in read_metrics(tmp_path / "metrics.jsonl")] == expected
    assert scalars(tmp_path, "attempt") == expected
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "tensorboard"}


def test_a_run_from_the_beginning_leaves_nothing_of_the_last_one(tmp_path: Path) -> None:
    run(tmp_path, 0, 3, attempt=1)
    run(tmp_path, 0, 1, attempt=2)
    assert [record["attempt"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [2]
    assert scalars(tmp_path, "attempt") == [(0, 2.0)]


@pytest.mark.parametrize("torn", [b'{"step": 2, "a": 0.', b'{"step"', b'{"a": 1}', b"\0\0\0\0", b"{", b"7"])
def test_a_torn_last_line_is_repaired(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "a": 1}\n{"step": 1, "a": 2}\n' + torn)
    assert read_metrics(path) == [{"step": 0, "a": 1}, {"step": 1, "a": 2}]
    with Recorder(tmp_path, first_step=2) as recorder:
        recorder.log(2, {"a": 3})
    assert path.read_bytes() == b'{"step": 0, "a": 1}\n{"step": 1, "a": 2}\n{"step": 2, "a": 3}\n'


def test_a_last_line_that_lacks_its_end_only_is_kept(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0, "a": 1}')
    Recorder(tmp_path, first_step=1).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 0, "a": 1}\n'


def test_lines_that_are_not_metrics_are_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\nnotes\n{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 2: got b'notes', allowed: an object with step"):
        Recorder(tmp_path, first_step=2)
    assert path.read_bytes() == b'{"step": 0}\nnotes\n{"step": 1}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_directory_that_cannot_be_written_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"metrics.jsonl: cannot be written: "):
        Recorder(tmp_path / "file" / "run")


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.log(0, {"loss": NAN, "norm": INF, "least": -INF, "reward": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 0, "loss": null, "norm": null, "least": null, "reward": 1.0}\n'
    assert scalars(tmp_path, "norm") == [(0, INF)]


@pytest.mark.parametrize(
    ("step", "values", "message"),
    [
        (4, {}, "step: got 4, allowed: >= 5"),
        (5, {"step": 1.0}, "metrics: got one that is called step, allowed: any other name"),
        (5, {"loss": "high"}, "metrics: got 'high' for loss, allowed: a number"),
        (5, {"loss": None}, "metrics: got None for loss"),
    ],
)
def test_wrong_metrics_are_refused_and_nothing_is_written(
    tmp_path: Path, step: int, values: dict[str, Any], message: str
) -> None:
    with Recorder(tmp_path, first_step=5) as recorder, pytest.raises(InvalidArgumentError, match=message):
        recorder.log(step, values)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_without_tensorboard_there_is_jsonl_and_a_word_about_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with caplog.at_level(logging.WARNING):
        run(tmp_path, 0, 3)
    assert [record.message for record in caplog.records] == [
        "tensorboard is not installed: metrics go to metrics.jsonl only"
    ]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    assert not (tmp_path / "tensorboard").exists()


def test_summary_is_one_line_of_what_is_there(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        line = recorder.summary(12, step_metrics(12) | {"partial/partial_ratio": 0.25, "rollout/truncated_ratio": 0.5})
        assert line == (
            "step 12  reward 1.200  length 8.0  truncated 50%  partial 25%  staleness 0.50"
            "  1012 tokens/s  rollout 3.2 s"
        )
        assert recorder.summary(3, {"loss": 1.0}) == "step 3"
        assert recorder.summary(3, {"rollout/reward/mean": NAN}) == "step 3  reward nan"


def test_curves_are_a_picture_of_the_whole_run(tmp_path: Path) -> None:
    run(tmp_path, 0, 4)
    settings = dict(mpl.rcParams)
    with Recorder(tmp_path, first_step=4) as recorder:
        recorder.log(4, step_metrics(4) | {"rollout/reward/mean": NAN})
        recorder.log(5, {"async/staleness_mean": 1.0})
        path = recorder.plot()
    assert path == tmp_path / "curves.png"
    assert dict(mpl.rcParams) == settings
    with Image.open(path) as picture:
        assert picture.size == (1100, 700)
        grey = picture.convert("L")
        halves = [(0, 0, 550, 350), (550, 0, 1100, 350), (0, 350, 550, 700), (550, 350, 1100, 700)]
        assert all(grey.crop(box).getextrema()[0] < 60 for box in halves), "a panel is blank"
        red_HW, _, blue_HW = (np.asarray(band, dtype=int) for band in picture.convert("RGB").split())
        assert (blue_HW > red_HW + 60).sum() > 400, "no curves"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl", "tensorboard"]


def test_curves_of_nothing_say_so_and_go_where_they_are_told(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    recorder.close()
    recorder.close()
    path = recorder.plot(tmp_path / "elsewhere.png")
    with Image.open(path) as picture:
        assert picture.size == (1100, 700)
    assert [entry.name for entry in tmp_path.glob("*.png")] == ["elsewhere.png"]


def test_curves_without_matplotlib_are_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with Recorder(tmp_path) as recorder, pytest.raises(ConfigError, match=r"curves need matplotlib, which is not"):
        recorder.plot()
