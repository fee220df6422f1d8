"""Lengths are those of the histogram, scaled."""

import json
import random
from pathlib import Path

import pytest

from benchmarks.servegen import Lengths
from rollout.errors import ConfigError


def write_histogram(path: Path) -> Path:
    """Of two windows: 100 and 1,000 tokens are as frequent as 50 and 2,000."""
    windows = {
        "0": {"input_tokens": "{1: 1.0}", "output_tokens": "{100: 0.5, 1000: 0.5}"},
        "600": {"output_tokens": "{50: 0.5, 2000: 0.5}"},
    }
    path.write_text(json.dumps(windows))
    return path


def test_the_longest_of_all_windows_is_scaled_to_what_is_asked_for(tmp_path: Path) -> None:
    lengths = Lengths.read("lengths", write_histogram(tmp_path / "h.json"), 100)
    drawn = lengths.draw(random.Random(0), 4000)
    assert set(drawn) == {3, 5, 50, 100}  # 50, 100, 1000 and 2000 tokens, over 20, rounded up
    assert all(abs(drawn.count(each) - 1000) < 150 for each in set(drawn))
    assert drawn == lengths.draw(random.Random(0), 4000)


@pytest.mark.parametrize("text", ["{}", "[]", '{"0": {}}', '{"0": {"output_tokens": "{1:"}}', "no"])
def test_what_is_no_histogram_is_refused_by_the_name_of_the_setting(tmp_path: Path, text: str) -> None:
    (tmp_path / "h.json").write_text(text)
    with pytest.raises(ConfigError, match=r"case\.lengths: .*h\.json: expected histograms"):
        Lengths.read("case.lengths", tmp_path / "h.json", 100)
    with pytest.raises(ConfigError, match="No such file"):
        Lengths.read("lengths", tmp_path / "none.json", 100)
