"""Output lengths as a real service saw them: drawn from a ServeGen histogram, scaled to a longest one.

A file of ServeGen (`chunk-<n>-dataset.json`) maps time windows to histograms, each a string that reads as a Python
mapping from a number of tokens to its share. The windows count alike.
"""

import ast
import json
import math
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from benchmarks.checkout import CHECKOUT
from rollout.errors import ConfigError

SERVEGEN = CHECKOUT.parent / "shared" / "data" / "servegen" / "chunk-22-dataset.json"
"""A reasoning model's hour: long outputs and a long tail."""
COLUMN = "output_tokens"


class Lengths:
    """Every length is multiplied by what makes the longest of the histogram, which may never be drawn, `longest`."""

    def __init__(self, histogram: Mapping[int, float], longest: int) -> None:
        self._tokens = sorted(histogram)
        self._shares = [histogram[tokens] for tokens in self._tokens]
        self._scale = longest / self._tokens[-1]

    @classmethod
    def read(cls, setting: str, path: Path, longest: int) -> "Lengths":
        """Raises `ConfigError`, which names the setting, if the file is not there or is none of ServeGen."""
        try:
            windows = json.loads(path.read_text(encoding="utf-8"))
            shares: Counter[int] = Counter()
            for window in windows.values():
                shares.update(ast.literal_eval(window[COLUMN]))
            if not shares:
                raise ValueError("no windows")
        except (OSError, ValueError, SyntaxError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{setting}: {path}: expected histograms of {COLUMN}, as ServeGen has: {error}") from None
        return cls(shares, longest)

    def draw(self, draw: random.Random, count: int) -> list[int]:
        """So many lengths, each 1 token or more."""
        drawn = draw.choices(self._tokens, self._shares, k=count)
        return [max(1, math.ceil(tokens * self._scale)) for tokens in drawn]
