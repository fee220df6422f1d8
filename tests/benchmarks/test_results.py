"""RESULTS.md has, for each benchmark, where it ran, its figures, and a plot where there is something to plot."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import main
from tests.benchmarks.test_tables import CONTROL, KEEP, LONGTAIL

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


def test_benchmarks_of_several_units_have_tables_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        report(tmp_path, "longtail", LONGTAIL, time_auto_vs_sync=0.5),
        report(tmp_path, "keep", KEEP, regret_short=1.25),
        report(tmp_path, "control", CONTROL),
    ]
    out = tmp_path / "RESULTS.md"
    assert main([*map(str, files), "--out", str(out)]) == 0
    text = out.read_text()
    assert "![longtail: tokens per second](results/longtail.png)" in text
    assert "| auto | 40 | 120 | 7 | 3 | 1.5 | 0.5 | 0.25 |" in text
    assert "![keep: seconds](results/keep.png)" in text
    assert "| short | 10 | 8 | 12 | host | 1.25 |" in text
    assert "| short | 10.5 | host | 10 | 3 | 1.05 | 0.95 | 1.1 |" in text
    assert "| overhead of a step with 256 sequences (ms) | 0.96 |" in text
    plots = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert plots == ["keep.png", "longtail.png"]
    control = text[text.index("## control") : text.index("## keep")]
    assert "| ratio |" not in control
    old = report(tmp_path, "keep", {"simulated": {}}, date="2029-01-01")
    assert main([str(old), "--out", str(out)]) == 2
    assert "bench keep: expected results with 'real', as this version" in capsys.readouterr().err


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


def test_sections_of_other_benchmarks_stay_as_they_are(tmp_path: Path) -> None:
    out = tmp_path / "RESULTS.md"
    other = report(tmp_path, "other", {"nodes": 3}, share=0.5)
    assert main([str(other), "--out", str(out)]) == 0
    alone = out.read_text()
    assert main([str(report(tmp_path, "counts", {"nodes": 4}, share=0.25)), "--out", str(out)]) == 0
    both = out.read_text()
    assert alone.partition("## other")[2].rstrip() in both
    assert both.index("## counts") < both.index("## other")
    assert main([str(report(tmp_path, "counts", {"nodes": 5}, share=0.75)), "--out", str(out)]) == 0
    again = out.read_text()
    assert (again.count("## counts"), "| `nodes` | 4 |" in again, "| `nodes` | 5 |" in again) == (1, False, True)
    assert alone.partition("## other")[2].rstrip() in again


def test_no_path_of_a_setting_is_told(tmp_path: Path) -> None:
    file = report(tmp_path, "counts", {"nodes": 3}, share=0.5)
    told = json.loads(file.read_text())
    told["command"] = "rollout bench counts --set lengths=/home/me/data/lengths.json --set turns=3"
    file.write_text(json.dumps(told))
    out = tmp_path / "RESULTS.md"
    assert main([str(file), "--out", str(out)]) == 0
    assert "`rollout bench counts --set lengths=lengths.json --set turns=3`" in out.read_text()
