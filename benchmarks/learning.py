"""What training runs came to: `python -m benchmarks.learning RUN … [--png FILE]`, each RUN a directory of an example's.

Prints a table (mean reward of the first and last ten steps, time) and draws the curves of reward over steps.
"""

import argparse
import statistics
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from rollout.training.charts import REWARD
from rollout.training.recorder import Record, read_metrics

ENDS = 10
"""Steps of which the mean is taken."""


def row(run: Path, records: list[Record]) -> list[str]:
    rewards = column(records, REWARD)
    first, last = statistics.fmean(rewards[:ENDS]), statistics.fmean(rewards[-ENDS:])
    seconds = column(records, "perf/step_time")
    parts = [statistics.median(column(records, f"perf/{part}_time")) for part in ("rollout", "train", "update_weights")]
    mismatch = [abs(value - 1) for value in column(records, "mismatch/ratio_mean")]
    return [
        run.name,
        str(len(records)),
        f"{first:.3f}",
        f"{last:.3f}",
        f"{last / first:.1f}",
        f"{sum(seconds) / 60:.1f}",
        f"{statistics.median(seconds):.1f}",
        *(f"{part:.1f}" for part in parts),
        f"{statistics.fmean(column(records, 'partial/partial_ratio')):.0%}",
        f"{statistics.fmean(column(records, 'async/staleness_mean')):.2f}",
        f"{statistics.fmean(mismatch):.1e}",
        f"{max(column(records, 'mismatch/max_abs_log_ratio')):.2g}",
    ]


HEADINGS = ("run", "steps", f"first {ENDS}", f"last {ENDS}", "ratio", "min", "s/step", "rollout", "train", "update")
MORE = ("partial", "staleness", "|ratio - 1|", "max |log ratio|")


def column(records: list[Record], name: str) -> list[float]:
    return [value for record in records if (value := record.get(name)) is not None]


def draw(runs: dict[str, list[Record]], path: Path) -> None:
    """Rewards, each the mean of five steps around it."""
    figure = Figure(figsize=(8.0, 4.0), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, records in runs.items():
        rewards = column(records, REWARD)
        smooth = [statistics.fmean(rewards[max(0, at - 2) : at + 3]) for at in range(len(rewards))]
        axes.plot(smooth, label=name)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    canvas.print_png(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--png", type=Path, metavar="FILE")
    args = parser.parse_args()
    runs = {run: read_metrics(run / "metrics.jsonl") for run in args.runs}
    table = Table(*HEADINGS, *MORE, caption="times: seconds, medians of steps")
    for run, records in runs.items():
        table.add_row(*row(run, records))
    Console(width=160).print(table)
    if args.png is not None:
        draw({run.name: records for run, records in runs.items()}, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
