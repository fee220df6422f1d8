"""How far a run is, on stderr: a live bar on a terminal, elsewhere a plain line every few seconds."""

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

import rich.progress
from rich.console import Console

from rollout.metrics import ServiceStats
from rollout.types import Phase

LOG_S = 10.0
"""Seconds between two plain lines."""
RATE_UPDATES = 20
"""Tokens per second are those of so many last updates."""


class Progress:
    """Shows what `update` is given, from the beginning to the end of its `with` block."""

    def __init__(
        self, console: Console, *, title: str, total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`total` is the number of groups."""
        self._console = console
        self._title = title
        self._total = total
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque([(clock(), 0)], maxlen=RATE_UPDATES)
        self._logged_at = float("-inf")
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(bar_width=10),  # all columns fit into 80
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("groups, {task.fields[detail]}"),
            rich.progress.TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=total, detail="starting")

    def update(self, stats: ServiceStats, done: int) -> None:
        """`done` groups are over."""
        now = self._clock()
        tokens = stats.counters.tokens
        self._samples.append((now, tokens))
        suspensions = f"{stats.counters.suspensions} suspensions"
        self._bar.update(self._task, completed=done, detail=f"{tokens} tokens, {self._rate():.0f}/s, {suspensions}")
        if not self._console.is_terminal and tokens and now - self._logged_at >= LOG_S:
            self._logged_at = now
            self.note(
                f"{self._title}: {done}/{self._total} groups, {tokens} tokens, {self._rate():.1f} tokens/s, "
                f"{_trajectories(stats)}, {suspensions}"
            )

    def note(self, line: str) -> None:
        """A line of its own, above the bar."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def _rate(self) -> float:
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0


def _trajectories(stats: ServiceStats) -> str:
    def count(*phases: Phase) -> int:
        return sum(stats.phases.get(phase, 0) for phase in phases)

    running = count(Phase.RESTORING, Phase.PREFILLING, Phase.DECODING, Phase.PREEMPTED)
    waiting = count(Phase.QUEUED, Phase.SUSPENDING, Phase.SUSPENDED)
    return f"{running} running, {waiting} waiting"
