"""Makes `RESULTS.md` of the files that `rollout bench NAME --json FILE` wrote: `python -m benchmarks.results FILE …`.

Each benchmark has its machine, date and command, all ratios, and all results; what is worth it as tables, and a chart
(PNG), see `tables`. Of one benchmark, several files are several sections if labels tell them apart: `intel=FILE`.
Sections that no file is given for stay as they are. Paths of the machine are left out of commands.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.checkout import CHECKOUT
from benchmarks.tables import RATE, WORDS, Chart, Shown, Table, shown
from rollout.cli.bench import find_benchmarks
from rollout.errors import ConfigError

LABELLED = re.compile(r"(?P<label>[A-Za-z0-9_-]+)=(?P<file>.+)")
TITLE = """# Results

What `rollout bench` measured. `python -m benchmarks.results FILE …` makes this file of the reports that its `--json`
writes; the docstring of each module says what it measures.
"""


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


def plot(name: str, chart: Chart, file: Path) -> None:
    """Bars, a group for each row; durations of different sizes on a logarithmic axis."""
    table = chart.table
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
    if chart.unit == "ms" and max(values) > 30 * min(values):
        axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_ylabel(WORDS[chart.unit])
    axes.set_title(name)
    if table.columns != ("",):
        figure.legend(loc="outside lower center", fontsize=8, ncols=5)
    figure.savefig(file, dpi=120, metadata={"Software": None})


def write(reports: Mapping[str, Mapping[str, Any]], out: Path, about: Mapping[str, str]) -> None:
    """`out`, and the plots in a directory `results` beside it; `about` says what each benchmark is."""
    plots = out.parent / "results"
    plots.mkdir(parents=True, exist_ok=True)
    sections = _sections(out)
    for name, report in reports.items():
        what = shown(report["name"], report["results"])
        if what.chart is not None:
            plot(name, what.chart, plots / f"{name}.png")
        sections[name] = "\n".join(_section(name, report, what, about.get(report["name"], "")))
    out.write_text("\n".join([TITLE, *(sections[name] for name in sorted(sections))]), encoding="utf-8")


def _sections(out: Path) -> dict[str, str]:
    """Those that a file has, by their names."""
    if not out.exists():
        return {}
    _, *parts = re.split(r"^(?=## )", out.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {part.partition("\n")[0].removeprefix("## "): part.removesuffix("\n") + "\n" for part in parts}


def _section(name: str, report: Mapping[str, Any], what: Shown, about: str) -> Iterator[str]:
    machine = report["machine"]
    packages = ", ".join(f"{package} {version}" for package, version in machine["packages"].items())
    yield f"## {name}\n\n{about}\n"
    yield f"- {report['date']}: `{_command(report['command'])}`"
    yield (
        f"- {machine['cpu']}, {machine['cores']} cores ({' '.join(machine.get('flags', ()))}), "
        f"{machine['memory_bytes'] / 2**30:.1f} GiB, load {machine['load']} before"
    )
    yield f"- {machine['os']}, Python {machine['python']}, {packages}\n"
    if report["ratios"]:
        yield from _rows(("ratio", ""), ([f"`{ratio}`", _figure(value)] for ratio, value in report["ratios"].items()))
    if what.chart is not None:
        yield f"![{name}: {WORDS[what.chart.unit]}](results/{name}.png)\n"
    for table in what.tables:
        yield from _cells(table)
    results = {key: value for key, value in report["results"].items() if key != RATE}  # it is a table
    yield "<details><summary>All results</summary>\n"
    yield from _rows(("result", ""), ([f"`{leaf}`", _figure(value)] for leaf, value in _leaves(results)))
    yield "</details>\n"


def _cells(table: Table) -> Iterator[str]:
    columns = [column or table.title for column in table.columns]
    rows = ([row, *(_figure(cells.get(each)) for each in table.columns)] for row, cells in table.rows.items())
    yield from _rows((table.title, *columns), rows)


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
        elif words[index - 1] == "--set" and "=/" in word:
            field, _, path = word.partition("=")
            words[index] = f"{field}={Path(path).name}"
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
