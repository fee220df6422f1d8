"""A run's metrics: on disk as JSONL, in TensorBoard where that is installed, as a line a step, and as curves.

Owns `metrics.jsonl`, `tensorboard/` and `curves.png` in its directory. A line of the JSONL is an object with `step`
and numbers by name; what is not finite is null, which is valid JSON and does not end a run. A step that is logged in
several lines has the numbers of all of them, later ones first.
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rollout.errors import ConfigError, InvalidArgumentError
from rollout.training import charts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

logger = logging.getLogger(__name__)

Record = dict[str, float | None]
"""`step`, and metrics by name; None: not finite."""

_SUMMARY = (
    (charts.REWARD, "reward {:.3f}"),
    (charts.RESPONSE_LEN, "length {:.1f}"),
    (charts.TRUNCATED, "truncated {:.0%}"),
    (charts.PARTIAL, "partial {:.0%}"),
    (charts.STALENESS, "staleness {:.2f}"),
    (charts.TOKENS_PER_S, "{:.0f} tokens/s"),
    (charts.ROLLOUT_TIME, "rollout {:.1f} s"),
    ("perf/train_time", "train {:.1f} s"),
)
_PANELS = (
    ("Reward", "mean over trajectories", ((charts.REWARD, "mean"),)),
    ("Response length", "tokens", ((charts.RESPONSE_LEN, "mean"), (charts.RESPONSE_LEN_P90, "90th percentile"))),
    ("Staleness", "versions behind", ((charts.STALENESS, "mean"), (charts.STALENESS_MAX, "max"))),
    ("Throughput", "sampled tokens / s", ((charts.TOKENS_PER_S, "tokens / s"),)),
)
_INCHES, _DPI = (11.0, 7.0), 100
_COLOURS = ("#1f5fa8", "#d98a29")


class Recorder:
    """Writes the metrics of one run, from `first_step` on, into `directory`, which is made if it is missing.

    A run that goes on from a checkpoint begins at the step that it does again: lines of this and later steps are
    dropped, which are all for a run that begins at 0, and TensorBoard no longer shows them. A last line that a crash
    left torn is dropped too.

    Raises ConfigError: a directory that cannot be written, or lines that are not metrics.
    """

    def __init__(self, directory: Path, *, first_step: int = 0) -> None:
        self._directory = directory
        self._path = directory / "metrics.jsonl"
        self._step = first_step
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _cut(self._path, first_step)
            self._board = _board(directory / "tensorboard", first_step)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be written: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing can be logged any more; what was can still be plotted."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of `step`; they survive this process when this returns.

        Raises InvalidArgumentError: a step before the last one, or a metric that is called `step` or is no number.
        """
        if step < self._step:
            raise InvalidArgumentError(f"step: got {step}, allowed: >= {self._step}")
        if "step" in metrics:
            raise InvalidArgumentError("metrics: got one that is called step, allowed: any other name")
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        record: Record = {"step": step}
        record |= {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        self._step = step
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()

    def summary(self, step: int, metrics: Mapping[str, float]) -> str:
        """One line, of the metrics that are there and best tell how the run goes."""
        return "  ".join([f"step {step}", *(form.format(metrics[name]) for name, form in _SUMMARY if name in metrics)])

    def plot(self, path: Path | None = None) -> Path:
        """Draw reward, response length, staleness and throughput over all steps in the JSONL; where the PNG is.

        `path` is `curves.png` in the directory unless given; it is complete or not there. A panel without numbers says
        so. pyplot is not used, and no setting of matplotlib's is changed.

        Raises ConfigError: matplotlib is not installed, or lines that are not metrics.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            raise ConfigError(
                "curves need matplotlib, which is not installed (pip install 'rollout[train]' brings it)"
            ) from None
        path = self._directory / "curves.png" if path is None else path
        records = _merged(read_metrics(self._path))
        figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        for axes, (title, unit, curves) in zip(figure.subplots(2, 2, sharex=True).flat, _PANELS, strict=True):
            _draw(axes, title, unit, curves, records)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            canvas.print_png(partial)  # type: ignore[no-untyped-call]
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return path


def read_metrics(path: Path) -> list[Record]:
    """The lines of a `metrics.jsonl`, in order, without a torn last one. None for metrics that were not finite.

    Raises ConfigError: another line is not metrics. OSError: the file cannot be read.
    """
    return [record for _, record in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    """Each line as it is, and what it says."""
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            step = record["step"]
        except (ValueError, TypeError, KeyError):
            step = None
        if isinstance(step, int):
            yield line, record
        elif number < len(lines):
            raise ConfigError(f"{path}, line {number}: got {line[:80]!r}, allowed: an object with step and numbers")


def _cut(path: Path, first_step: int) -> None:
    """Leave whole lines of steps before `first_step` only: at once, or the file stays as it is."""
    if not path.exists():
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.writelines(line + b"\n" for line, record in _lines(path) if _step(record) < first_step)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _step(record: Record) -> int:
    return int(record["step"] or 0)


def _board(directory: Path, first_step: int) -> Any:
    """A writer of TensorBoard's that hides what earlier ones wrote of `first_step` and later; None without it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning("tensorboard is not installed: metrics go to metrics.jsonl only")
        return None
    return SummaryWriter(str(directory), purge_step=first_step)


def _number(name: str, value: Any) -> float:
    """An int stays one, so that counts are written exactly."""
    if isinstance(value, int):
        return int(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"metrics: got {value!r:.80} for {name}, allowed: a number") from None


def _merged(records: Sequence[Record]) -> dict[int, Record]:
    """By step, in order."""
    merged: dict[int, Record] = {}
    for record in records:
        merged.setdefault(_step(record), {}).update(record)
    return dict(sorted(merged.items()))


def _draw(
    axes: "Axes", title: str, unit: str, curves: Sequence[tuple[str, str]], records: Mapping[int, Record]
) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelbottom=True)
    drawn: list[float] = []
    for (name, label), colour in zip(curves, _COLOURS, strict=False):
        values = [math.nan if (value := record.get(name)) is None else value for record in records.values()]
        if known := [value for value in values if not math.isnan(value)]:
            axes.plot(list(records), values, ".-", color=colour, label=label, linewidth=1.4, markersize=4)
            drawn += known
    if not drawn:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color="#888888")
    elif min(drawn) >= 0:
        axes.set_ylim(bottom=0)
    if len(axes.get_lines()) > 1:
        axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1)
