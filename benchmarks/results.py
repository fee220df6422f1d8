"""Makes `RESULTS.md` of the files that `rollout bench NAME --json FILE` wrote: `python -m benchmarks.results FILE …`.

Each benchmark has its machine, date and command, all ratios, and all results; those that are tables, and a plot (PNG)
of the first kind that there is: `tokens_per_s`, or the durations (`…_ms`) of entries that have the same ones. Of one
benchmark, several files are several sections if labels tell them apart: `intel=FILE`. Paths of the machine are left out
of commands.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.checkout import CHECKOUT
from rollout.cli.bench import find_benchmarks
from rollout.errors import ConfigError

RATE = "tokens_per_s"
LABELLED = re.compile(r"(?P<label>[A-Za-z0-9_-]+)=(?P<file>.+)")
WORDS = {RATE: "tokens per second", "ms": "milliseconds"}
TITLE = """# Results

What `rollout bench` measured. `python -m benchmarks.results FILE …` makes this file of the reports that its `--json`
writes; the docstring of each module says what it measures.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Figures of one unit: rows of columns."""

    unit: str
    columns: tuple[str, ...]
    rows: Mapping[str, Mapping[str, float]]


def read(files: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The reports in the order of `files`, which may have labels before them, by the names of their sections.

    Raises `ConfigError` for a file that is none, and for two of one benchmark that no label tells apart.
    """
    reports: dict[str, dict[str, Any]] = {}
    for each in files:
        labelled = LABELLED.fullmatch(each)
        label, file = (labelled["label"], Path(labelled["file"])) if labelled else (None, Path(each))
        try:
            report = json.loads(file.read_text(encoding="utf-8"))
            missing = {"name", "date", "command", "machine", "results", "ratios"} - set(report)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{file}: expected a report of rollout bench: {error}") from None
        if missing:
            raise ConfigError(f"{file}: expected a report of rollout bench, which has {', '.join(sorted(missing))}")
        section = f"{report['name']}-{label}" if label else report["name"]
        if section in reports:
            raise ConfigError(f"{file}: a second report of {section}; LABEL=FILE tells those of one benchmark apart")
        reports[section] = report
    return reports


def find_table(results: Mapping[str, Any]) -> Table | None:
    """What is worth a plot."""
    rates = results.get(RATE)
    if isinstance(rates, Mapping):
        nested = {name: row for name, row in rates.items() if isinstance(row, Mapping)}
        return _table(RATE, nested or {"": rates})
    rows = {name: _durations(row) for name, row in results.items() if isinstance(row, Mapping)}
    rows = {name: row for name, row in rows.items() if row}
    if len(rows) > 1 and set.intersection(*map(set, rows.values())):
        return _table("ms", rows)
    flat = _durations(results)
    return _table("ms", {name: {"": value} for name, value in flat.items()}) if len(flat) > 1 else None


def plot(name: str, table: Table, file: Path) -> None:
    """Bars, a group for each row; durations of different sizes on a logarithmic axis."""
    figure = Figure(figsize=(max(6.0, 1.2 + 0.35 * len(table.rows) * len(table.columns)), 4.0), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(table.columns)
    for index, column in enumerate(table.columns):
        places = [place for place, row in enumerate(table.rows.values()) if column in row]
        values = [row[column] for row in table.rows.values() if column in row]
        bars = axes.bar([place + index * width for place in places], values, width, label=column)
        axes.bar_label(bars, fmt="%.3g", fontsize=7, rotation=90 if len(table.columns) > 3 else 0, padding=2)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(table.rows))], list(table.rows))
    values = [value for row in table.rows.values() for value in row.values() if value > 0]
    if table.unit == "ms" and max(values) > 30 * min(values):
        axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_ylabel(WORDS[table.unit])
    axes.set_title(name)
    if table.columns != ("",):
        axes.legend(fontsize=8, ncols=2)
    figure.savefig(file, dpi=120, metadata={"Software": None})


def write(reports: Mapping[str, Mapping[str, Any]], out: Path, about: Mapping[str, str]) -> None:
    """`out`, and the plots in a directory `results` beside it; `about` says what each benchmark is."""
    plots = out.parent / "results"
    plots.mkdir(parents=True, exist_ok=True)
    parts = [TITLE]
    for name, report in reports.items():
        table = find_table(report["results"])
        if table is not None:
            plot(name, table, plots / f"{name}.png")
        parts.append("\n".join(_section(name, report, table, about.get(report["name"], ""))))
    out.write_text("\n".join(parts), encoding="utf-8")


def _section(name: str, report: Mapping[str, Any], table: Table | None, about: str) -> Iterator[str]:
    machine = report["machine"]
    packages = ", ".join(f"{package} {version}" for package, version in machine["packages"].items())
    yield f"## {name}\n\n{about}\n"
    yield f"- {report['date']}: `{_command(report['command'])}`"
    yield (
        f"- {machine['cpu']}, {machine['cores']} cores ({' '.join(machine.get('flags', ()))}), "
        f"{machine['memory_bytes'] / 2**30:.1f} GiB, load {machine['load']} before"
    )
    yield f"- {machine['os']}, Python {machine['python']}, {packages}\n"
    yield from _rows(("ratio", ""), ([f"`{ratio}`", _figure(value)] for ratio, value in report["ratios"].items()))
    results = dict(report["results"])
    if table is not None:
        yield f"![{name}: {WORDS[table.unit]}](results/{name}.png)\n"
        if table.unit == RATE:
            del results[RATE]
        columns = [column or WORDS[table.unit] for column in table.columns]
        rows = ([row, *(_figure(cells.get(each)) for each in table.columns)] for row, cells in table.rows.items())
        yield from _rows((WORDS[table.unit], *columns), rows)
    yield "<details><summary>All results</summary>\n"
    yield from _rows(("result", ""), ([f"`{leaf}`", _figure(value)] for leaf, value in _leaves(results)))
    yield "</details>\n"


def _table(unit: str, rows: Mapping[str, Mapping[str, float]]) -> Table:
    return Table(unit=unit, columns=tuple(dict.fromkeys(column for row in rows.values() for column in row)), rows=rows)


def _durations(row: Mapping[str, Any]) -> dict[str, float]:
    return {name[:-3]: value for name, value in row.items() if name.endswith("_ms") and isinstance(value, (int, float))}


def _leaves(results: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """With dotted names; lists, which are single turns, are for the file only."""
    for name, value in results.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{before}{name}.")
        elif not isinstance(value, list):
            yield f"{before}{name}", value


def _rows(head: Sequence[str], rows: Iterator[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'---:|' * (len(head) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return "" if value is None else str(value).replace("|", "\\|")


def _command(command: str) -> str:
    words = shlex.split(command)
    for index, word in enumerate(words[1:], start=1):
        if words[index - 1] == "--peer-python":
            words[index] = "PATH"
        elif words[index - 1] == "--json":
            words[index] = Path(word).name
    return shlex.join(words)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.results", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", metavar="[LABEL=]FILE", help="what rollout bench --json wrote")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "benchmarks" / "RESULTS.md", metavar="FILE")
    args = parser.parse_args(argv)
    try:
        about = {name: each.summary for name, each in find_benchmarks(CHECKOUT).items()}
        write(read(args.files), args.out, about)
    except ConfigError as error:
        sys.stderr.write(f"benchmarks.results: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
