"""`examples/tool_loop.py` runs, and its calculator calculates and does nothing else."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import EOS_ID, make_tiny_llama

TOOL_LOOP = Path(__file__).parent.parent / "examples" / "tool_loop.py"
ENDS = [EOS_ID, *range(4, 320, 24)]
"""So many tokens end a turn that there are turns."""


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("3 + 4", "7"),
        ("First 1 + 1 = 2, then 12 * 11 = 132.", "132"),
        ("(2 + 4) * 1.5 is nine", "9"),
        ("so -2 - 3 / 4", "1.25"),  # a sign before a sum is not taken for one
        ("7 / 0", "no sum found"),
        ("2 ** 9 or 5 - 2", "3"),
        ("2 ** 9", "no sum found"),
        ("__import__('os').getcwd()", "no sum found"),
        ("(" * 90 + "1+1", "no sum found"),
        ("a date: 2024", "no sum found"),
        ("", "no sum found"),
    ],
)
def test_the_calculator_works_out_the_last_sum(text: str, result: str) -> None:
    calculate: Callable[[str], str] = runpy.run_path(str(TOOL_LOOP))["calculate"]
    assert calculate(text) == result


def test_the_example_is_short() -> None:
    assert len(TOOL_LOOP.read_text().splitlines()) <= 80


def test_the_tool_loop_runs(ray_cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_llama(tmp_path / "model", eos_token_id=ENDS)
    runpy.run_path(str(TOOL_LOOP))["main"](str(model))
    lines = capsys.readouterr().out.splitlines()
    ends = [
        match for line in lines if (match := re.fullmatch(r"(\S+) (\w+): mask (.*), (\d+) tokens recomputed", line))
    ]
    assert sorted(match[1] for match in ends) == [f"auto-{group}/{sample}" for group in (0, 1) for sample in (0, 1)]
    for match in ends:
        assert match[4] == "0"
        assert match[2] == "stop"
        assert re.fullmatch(r"\+\d+ -\d+ \+\d+ -\d+ \+\d+", match[3])  # three turns
    assert sum(", the calculator " in line for line in lines) == 2 * len(ends)
