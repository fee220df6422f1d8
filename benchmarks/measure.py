"""Timing that compares: sides take turns within one run, and what is reported of each is a median.

Other work on the machine then slows all sides alike, and a ratio of medians does not show it.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from rollout.errors import RolloutError

Repeats = Annotated[int, Field(ge=5)]
"""Of a measurement; a median of fewer says little."""


class MeasurementError(RolloutError):
    """What is measured did not run as it should, or did not tell what it took."""


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    start = time.monotonic()
    work()
    return time.monotonic() - start


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


def medians(measured: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of each name's values."""
    rows = list(measured)
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def in_ms(seconds: Mapping[str, float]) -> dict[str, float]:
    """The same durations under names that give their unit, in milliseconds."""
    return {f"{name}_ms": round(1e3 * value, 3) for name, value in seconds.items()}


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two values around it."""
    return float(np.percentile(values, percent))


class MemoryCopy:
    """Plain copies between two buffers of this process, both touched before."""

    def __init__(self, most_bytes: int) -> None:
        self._source = np.ones(most_bytes, dtype=np.uint8)
        self._target = np.zeros(most_bytes, dtype=np.uint8)
        self(most_bytes)

    def __call__(self, nbytes: int) -> float:
        """Seconds to copy `nbytes`."""
        source, target = self._source[:nbytes], self._target[:nbytes]
        assert source.nbytes == nbytes, (source.nbytes, nbytes)
        return timed(lambda: np.copyto(target, source))
