"""Timing that compares: sides take turns within one run, and what is reported of each is a median.

Other work on the machine then slows all sides alike, and a ratio of medians does not show it.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

Repeats = Annotated[int, Field(ge=5)]
"""Of a measurement; a median of fewer says little."""


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleaved(
    sides: Mapping[str, Callable[[], float]], repeats: int, *, unmeasured: int = 1
) -> dict[str, list[float]]:
    """What each side returns, `repeats` times in turns; the order is reversed from turn to turn.

    The first `unmeasured` turns warm up and do not count.
    """
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(unmeasured + repeats):
        for name in list(sides) if turn % 2 == 0 else reversed(sides):
            value = sides[name]()
            if turn >= unmeasured:
                measured[name].append(value)
    return measured


def medians(measured: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in measured.items()}


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two values around it."""
    return float(np.percentile(values, percent))


class MemoryCopy:
    """A plain copy of `nbytes` between two buffers of this process, both touched before."""

    def __init__(self, nbytes: int) -> None:
        self._source = np.ones(nbytes, dtype=np.uint8)
        self._target = np.zeros(nbytes, dtype=np.uint8)
        self()

    def __call__(self) -> float:
        """Seconds that it takes."""
        return timed(lambda: np.copyto(self._target, self._source))
