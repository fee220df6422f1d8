"""What of a benchmark's results is worth a table or a chart.

Most benchmarks are told by the shape of their results. Those whose figures are of several kinds have their own tables.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.errors import ConfigError

RATE = "tokens_per_s"
WORDS = {RATE: "tokens per second", "ms": "milliseconds", "s": "seconds"}
STEP_OVERHEAD = re.compile(r"step_overhead_(?P<running>\d+)_ms")
MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of columns, in which cells may be absent."""

    title: str
    """Above the names of the rows."""
    columns: tuple[str, ...]
    rows: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, title: str, rows: Mapping[str, Mapping[str, Any]]) -> "Table":
        """With the columns of all rows."""
        return cls(
            title=title, columns=tuple(dict.fromkeys(column for row in rows.values() for column in row)), rows=rows
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Figures of one unit, a group of bars for each row."""

    unit: str
    """A key of `WORDS`."""
    table: Table

    @classmethod
    def of(cls, unit: str, rows: Mapping[str, Mapping[str, float]]) -> "Chart":
        return cls(unit=unit, table=Table.of(WORDS[unit], rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Of one report."""

    tables: Sequence[Table] = ()
    chart: Chart | None = None


def shown(name: str, results: Mapping[str, Any]) -> Shown:
    """Of the results of the benchmark `name`. Raises `ConfigError` if one of those that belong there is missing."""
    if name in OWN:
        try:
            return OWN[name](results)
        except KeyError as error:
            raise ConfigError(f"bench {name}: expected results with {error}, as this version of it has them") from None
    chart = find_chart(results)
    return Shown(tables=[chart.table], chart=chart) if chart else Shown()


def find_chart(results: Mapping[str, Any]) -> Chart | None:
    """The first kind that there is: `tokens_per_s`, or the durations (`…_ms`) of entries that have the same ones."""
    rates = results.get(RATE)
    if isinstance(rates, Mapping):
        nested = {name: row for name, row in rates.items() if isinstance(row, Mapping)}
        return Chart.of(RATE, nested or {"": rates})
    rows = {name: _durations(row) for name, row in results.items() if isinstance(row, Mapping)}
    rows = {name: row for name, row in rows.items() if row}
    if len(rows) > 1 and set.intersection(*map(set, rows.values())):
        return Chart.of("ms", rows)
    flat = _durations(results)
    return Chart.of("ms", {name: {"": value} for name, value in flat.items()}) if len(flat) > 1 else None


def _durations(row: Mapping[str, Any]) -> dict[str, float]:
    return {name[:-3]: value for name, value in row.items() if name.endswith("_ms") and isinstance(value, (int, float))}


def _longtail(results: Mapping[str, Any]) -> Shown:
    sides = {
        side: {
            "collection (s)": row["collect_s"],
            WORDS[RATE]: row[RATE],
            "recomputed tokens": row["recomputed_tokens"],
            "MB written": row["written_bytes"] / MB,
            "MB read": row["read_bytes"] / MB,
            "useful reload": row["useful_reload"],
            "idle share": row["idle_share"],
        }
        for side, row in results.items()
    }
    rates = {
        side: {"while collecting": row[RATE], "with the rest": row[f"all_{RATE}"]} for side, row in results.items()
    }
    return Shown(tables=[Table.of("side", sides)], chart=Chart.of(RATE, rates))


def _keep(results: Mapping[str, Any]) -> Shown:
    simulated = results["simulated"]
    costs = {name: _seconds(row) for name, row in simulated.items()}
    rows = {
        name: {
            **{f"{place} (s)": seconds for place, seconds in costs[name].items()},
            "best fixed": row["best"],
            "auto over best": row["regret"],
        }
        for name, row in simulated.items()
    }
    pairs = {
        name: {
            "auto (s)": row["auto_s"],
            "fixed": row["fixed"],
            "fixed (s)": row["fixed_s"],
            "pairs": len(row["pairs"]),
            "median of auto over fixed": row["median_ratio"],
            "95 % from": row["low_95"],
            "to": row["high_95"],
        }
        for name, row in results["real"].items()
    }
    tables = [Table.of("simulated", rows), *([Table.of("real", pairs)] if pairs else [])]
    return Shown(tables=tables, chart=Chart.of("s", costs))


def _seconds(row: Mapping[str, Any]) -> dict[str, float]:
    return {name[:-2]: value for name, value in row.items() if name.endswith("_s")}


def _control(results: Mapping[str, Any]) -> Shown:
    overheads = {
        f"overhead of a step with {found['running']} sequences (ms)": {"measured": value}
        for name, value in results.items()
        if (found := STEP_OVERHEAD.fullmatch(name))
    }
    updates = {"worker events that a controller takes in, per second of a core": {"measured": results["updates_per_s"]}}
    return Shown(tables=[Table.of("deciding", overheads | updates)])


def _weights(results: Mapping[str, Any]) -> Shown:
    models = {name: row for name, row in results.items() if isinstance(row, Mapping)}
    rows: dict[str, dict[str, Any]] = {}
    for model, row in models.items():
        for name, each in row.items():
            if isinstance(each, Mapping) and "in_place_s" in each:
                rows[f"{model}, {name}"] = _update(each, row) if "decoding" in each else _among_steps(each)
    seconds = {
        model: {
            name: each["update_s"] for name, each in row.items() if isinstance(each, Mapping) and "decoding" in each
        }
        for model, row in models.items()
    }
    return Shown(tables=[Table.of("update", rows)], chart=Chart.of("s", seconds))


def _update(each: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    shown_row = {
        "call (s)": each["update_s"],
        "trainer (s)": each["trainer_s"],
        "a worker: prepare (s)": each["prepare_s"],
        "commit (s)": each["commit_s"],
        "both over memcpy": each["in_place_s"] / model["memcpy_s"],
    }
    if "one_worker" in each:
        shown_row["of one worker"] = each["one_worker"]["in_place_s"] / model["one_worker"]["memcpy_s"]
    return shown_row | _among_steps(each["decoding"])


def _among_steps(each: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "decoding: call (s)": each["update_s"],
        "longest gap (ms)": 1e3 * each["gap_s"],
        "step (ms)": 1e3 * each["step_s"],
        "while preparing (ms)": 1e3 * each["step_preparing_s"],
    }


def _mismatch(results: Mapping[str, Any]) -> Shown:
    rows = {
        f"{dtype}, {case}": {
            **{name.replace("_", " "): value for name, value in row.items() if isinstance(value, int)},
            **{
                f"{figure}, {name.replace('_', ' ')}": figures[f"{figure}_abs_delta"]
                for name, figures in row.items()
                if isinstance(figures, Mapping) and name.startswith("trainer_")
                for figure in ("mean", "max")
            },
        }
        for dtype, cases in results.items()
        if isinstance(cases, Mapping)
        for case, row in cases.items()
    }
    return Shown(tables=[Table.of("workers, case", rows)])


OWN: Mapping[str, Callable[[Mapping[str, Any]], Shown]] = {
    "longtail": _longtail,
    "keep": _keep,
    "control": _control,
    "weights": _weights,
    "mismatch": _mismatch,
}
"""Benchmarks that have tables of their own."""
