"""Ctrl-C and SIGTERM during a run: the first is an exception or, while trajectories are at stake, only noted.

Noting it is what lets a run write what it has: an exception in the middle of a call to the service would lose
the groups that the call was about to hand over. The second signal ends the process at once.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

EXIT_CODE = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Handles both signals within its `with` block, which must be in the main thread."""

    def __init__(self) -> None:
        self.requested = False
        self._deferring = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._received) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Within, a first signal sets `requested` and nothing else."""
        for number in _SIGNALS:
            signal.signal(number, self._received)  # Ray has installed its own for SIGTERM
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(EXIT_CODE)
        self.requested = True
        if not self._deferring:
            raise KeyboardInterrupt
