"""RESULTS.md has, for each benchmark, where it ran, its figures, and a plot where there is something to plot."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import find_table, main

PNG = b"\x89PNG"


def report(tmp_path: Path, name: str, results: dict[str, Any], *, date: str = "2030-01-02", **ratios: float) -> Path:
    machine = {
        "cpu": "Abacus",
        "cores": 2,
        "flags": ["avx2"],
        "memory_bytes": 3 << 30,
        "os": "Unix",
        "python": "3.11",
        "packages": {"torch": "2"},
        "load": 0.1,
    }
    file = tmp_path / f"{name}-{date}.json"
    command = f"rollout bench {name} --peer-python /home/me/bin/python --json {file}"
    what = {"name": name, "date": date, "command": command, "machine": machine, "settings": {}}
    file.write_text(json.dumps(what | {"results": results, "ratios": ratios}))
    return file


def test_each_benchmark_has_its_machine_ratios_results_and_plot(tmp_path: Path) -> None:
    rates = {"b1": {"rollout": 50.0, "vllm": 25.0}, "b32": {"rollout": 400.0, "limit": 12345.6}}
    decode = {"tokens_per_s": rates, "limit": {"b1": {"step_ms": 3.25}}, "turns_s": {"b1": [1.0]}}
    files = [
        report(tmp_path, "decode", decode, decode_vs_vllm_b1=2.0),
        report(tmp_path, "scheduler", {f"b{n}": {"plan_ms": 0.1 * n, "step_ms": 10.0} for n in (1, 64)}, overhead=0.04),
        report(tmp_path, "counts", {"nodes": 3}, share=0.5),
    ]
    out = tmp_path / "out" / "RESULTS.md"
    assert main([*map(str, files), "--out", str(out)]) == 0
    text = out.read_text()
    assert "## decode\n\nDecoding at full speed" in text
    assert "`rollout bench decode --peer-python PATH --json decode-2030-01-02.json`" in text
    assert str(tmp_path) not in text
    assert "Abacus, 2 cores (avx2), 3.0 GiB" in text
    assert "| `decode_vs_vllm_b1` | 2 |" in text
    assert "| b32 | 400 |  | 12346 |" in text
    assert "| `limit.b1.step_ms` | 3.25 |" in text
    assert "turns_s" not in text
    assert "![scheduler: milliseconds](results/scheduler.png)" in text
    assert "| `nodes` | 3 |" in text
    plots = sorted(path.name for path in (tmp_path / "out" / "results").iterdir())
    assert plots == ["decode.png", "scheduler.png"]
    assert all((tmp_path / "out" / "results" / name).read_bytes().startswith(PNG) for name in plots)


def test_two_reports_of_one_benchmark_need_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = {"tokens_per_s": {"rollout": 2.0, "vllm": 1.0}}
    plain = report(tmp_path, "decode", rates, date="2030-01-01", speed=1.0)
    intel = report(tmp_path, "decode", rates, date="2030-02-01", speed=2.0)
    out = tmp_path / "RESULTS.md"
    assert main([str(plain), str(intel), "--out", str(out)]) == 2
    assert "a second report of decode; LABEL=FILE tells" in capsys.readouterr().err
    assert main([f"intel={plain}", f"intel={intel}", "--out", str(out)]) == 2
    assert "a second report of decode-intel" in capsys.readouterr().err
    assert not out.exists()
    assert main([str(plain), f"intel={intel}", "--out", str(out)]) == 0
    text = out.read_text()
    assert "## decode\n\nDecoding at full speed" in text
    assert "## decode-intel\n\nDecoding at full speed" in text
    assert text.index("| `speed` | 1 |") < text.index("| `speed` | 2 |")
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["decode-intel.png", "decode.png"]


def test_what_is_plotted_are_rates_or_durations_that_entries_share_or_single_ones() -> None:
    rates = find_table({"tokens_per_s": {"rollout": 2.0, "vllm": 1.0}, "a": {"x_ms": 1}, "b": {"x_ms": 2}})
    assert rates is not None
    assert (rates.unit, rates.columns, list(rates.rows)) == ("tokens_per_s", ("rollout", "vllm"), [""])
    shared = find_table({"a": {"x_ms": 1, "n": 3}, "b": {"x_ms": 2, "y_ms": 4}, "z_ms": 5})
    assert shared is not None
    assert (shared.unit, shared.columns, dict(shared.rows["b"])) == ("ms", ("x", "y"), {"x": 2, "y": 4})
    single = find_table({"pool_ms": 1.0, "host_ms": 2.0})
    assert single is not None
    assert single.rows == {"pool": {"": 1.0}, "host": {"": 2.0}}
    assert find_table({"nodes": 3, "only_ms": 1.0}) is None


@pytest.mark.parametrize(("content", "message"), [("{", "Expecting"), ("{}", "which has command, date"), (None, "No")])
def test_a_file_that_is_no_report_is_refused(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    if content is not None:
        file.write_text(content)
    assert main([str(file), "--out", str(tmp_path / "RESULTS.md")]) == 2
    error = capsys.readouterr().err
    assert "expected a report of rollout bench" in error
    assert message in error
    assert not (tmp_path / "RESULTS.md").exists()
