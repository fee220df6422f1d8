"""Points in the order of a worker's work on its pages: a copy waits for the computation it must come after.

On CUDA a forward is only queued when the engine goes on; a fence is an event in its stream. On CPU the
engine goes on when a forward is done, so its fence has nothing to wait for.
"""

from typing import Protocol

import torch


class Fence(Protocol):
    """All that was computed on the pages before some point."""

    def wait(self) -> None:
        """Return when that is done. Called from copy and export threads."""
        ...


class Passed:
    """Of work that is done."""

    def wait(self) -> None:
        return


class EventFence:
    """Of what is queued in the current CUDA stream."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


def fence_for(device: torch.device) -> Fence:
    """A fence at this point of the work on `device`."""
    return EventFence() if device.type == "cuda" else Passed()
