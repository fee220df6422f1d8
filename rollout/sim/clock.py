"""Virtual time: what happens next happens at once, and takes as long as it says. Seconds.

What is due at the same time happens in the order in which it was scheduled, so that two runs are equal. Chores
(ticks, idle looks) go on for ever: a simulation in which nothing but chores is left is stuck.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator

MOST_AT_ONCE = 1_000_000
"""Happenings in a row that may take no time; more are a loop."""


class Lane:
    """Up to `width` processes at a time, first come, first served."""

    def __init__(self, clock: "Clock", width: int = 1) -> None:
        self._clock = clock
        self._free = width
        self._queue: deque[Callable[[], None]] = deque()

    def enter(self, entered: Callable[[], None]) -> None:
        """`entered` is called once there is a place, which is its caller's until `leave`."""
        if self._free:
            self._free -= 1
            self._clock.after(0.0, entered)
        else:
            self._queue.append(entered)

    def leave(self) -> None:
        if self._queue:
            self._clock.after(0.0, self._queue.popleft())
        else:
            self._free += 1


Process = Generator[float | Lane, None, None]
"""Yields how long to wait, or a lane to enter."""


class Clock:
    """A heap of what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, bool, Callable[[], None]]] = []
        self._order = itertools.count()
        self._real = 0
        """Entries that are no chores."""
        self._at_once = 0

    @property
    def stuck(self) -> bool:
        """Whether nothing but chores is to come."""
        return not self._real

    def at(self, time: float, happen: Callable[[], None], *, chore: bool = False) -> None:
        assert time >= self.now, (time, self.now)
        heapq.heappush(self._heap, (time, next(self._order), chore, happen))
        self._real += not chore

    def after(self, delay_s: float, happen: Callable[[], None], *, chore: bool = False) -> None:
        self.at(self.now + delay_s, happen, chore=chore)

    def spawn(self, process: Process) -> None:
        """Run a process from now on."""
        self.after(0.0, lambda: self._go_on(process))

    def advance(self) -> bool:
        """Let the next thing happen; False if there is none."""
        if not self._heap:
            return False
        time, _, chore, happen = heapq.heappop(self._heap)
        self._at_once = 0 if time > self.now else self._at_once + 1
        assert self._at_once < MOST_AT_ONCE, f"time does not go on at {self.now} s: {happen}"
        self.now = time
        self._real -= not chore
        happen()
        return True

    def _go_on(self, process: Process) -> None:
        try:
            wait = next(process)
        except StopIteration:
            return
        if isinstance(wait, Lane):
            wait.enter(lambda: self._go_on(process))
        else:
            self.after(wait, lambda: self._go_on(process))
