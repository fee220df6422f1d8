"""Injected delays: computation that goes on for as long as nobody waits for it, and copies held up by a gate."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from rollout.kv.fence import Fence
from rollout.kv.storage import KVStorage
from rollout.kv.tiers import Tier

PATIENCE_S = 60
"""Longest wait for another thread; only a failing test waits that long."""


class Late:
    """A thread that does its work on the pages late: when somebody waits for it, or at `finish`. It is its fence."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._wanted = threading.Event()
        self._work = work
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        assert self._wanted.wait(PATIENCE_S)
        self._work()

    def wait(self) -> None:
        self.finish()

    def finish(self) -> None:
        self._wanted.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


class SlowStorage(KVStorage):
    """Copies wait in the middle until `gate` is set."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.entered = threading.Event()
        self.gate = threading.Event()

    def copy(self, to: Tier, sources: Sequence[int], targets: Sequence[int], after: Fence) -> None:
        half = len(sources) // 2
        super().copy(to, sources[:half], targets[:half], after)
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        super().copy(to, sources[half:], targets[half:], after)
