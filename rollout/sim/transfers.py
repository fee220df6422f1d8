"""What stands for the threads that move KV beside an engine's steps: bytes take time and go nowhere.

As on a real worker there is one lane for copies between the tiers and one for restores, each first come, first
served; a restore that has not begun can be cancelled.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rollout.errors import DeadlineError, KVError
from rollout.kv.chain import ChainValues
from rollout.kv.copier import Copied
from rollout.kv.fence import Fence
from rollout.kv.restore import Restored
from rollout.kv.tiers import Copy, Tier
from rollout.sim.clock import Clock
from rollout.sim.load import Load
from rollout.sim.machine import MachineRates
from rollout.types import Image, SegmentId, SequenceKey


class PacedCopier:
    """A `PageCopier` without pages."""

    def __init__(
        self, rates: MachineRates, clock: Clock, load: Load, now: Callable[[], float], wake: Callable[[], None]
    ) -> None:
        """`now` is the worker's time, which may be ahead of the clock; `wake` is called when a copy is complete."""
        self._rates = rates
        self._clock = clock
        self._load = load
        self._now = now
        self._wake = wake
        self._free_at = 0.0
        self._completed: list[Copied] = []

    def submit(self, copies: Sequence[Copy], after: Fence) -> None:
        for copy in sorted(copies, key=lambda copy: copy.to is Tier.HOST):
            nbytes = len(copy.sources) * self._rates.page_bytes
            pace = self._rates.save if copy.to is Tier.HOST else self._rates.load
            seconds = pace.seconds(nbytes)
            begin = max(self._now(), self._free_at)
            self._free_at = begin + seconds
            if begin == self._now():
                self._load.moves(begin, self._free_at)
            else:
                self._clock.at(begin, partial(self._load.moves, begin, self._free_at))
            copied = Copied(copy_id=copy.copy_id, to=copy.to, ok=True, nbytes=nbytes, seconds=seconds)
            self._clock.at(self._free_at, partial(self._complete, copied))

    def poll(self) -> list[Copied]:
        completed, self._completed = self._completed, []
        return completed

    def close(self) -> None:
        return

    def _complete(self, copied: Copied) -> None:
        self._completed.append(copied)
        self._wake()


class Lender(Protocol):
    """A pool, as readers see it."""

    def lease(self, segments: Sequence[SegmentId], ttl_s: float) -> int:
        """Raises `SegmentMissingError`."""
        ...

    def close_lease(self, lease: int) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Restore:
    key: SequenceKey
    tokens: int
    segments: tuple[SegmentId, ...]
    nbytes: int
    deadline: float
    error: KVError | DeadlineError | None = None
    lease: int | None = None


class PacedRestorer:
    """An `ImageRestorer` that leases, waits and writes nothing."""

    def __init__(
        self,
        rates: MachineRates,
        clock: Clock,
        load: Load,
        pool: Lender,
        *,
        timeout_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._rates = rates
        self._clock = clock
        self._load = load
        self._pool = pool
        self._timeout_s = timeout_s
        self._wake = wake
        self._queue: deque[_Restore] = deque()
        self._running: _Restore | None = None
        self._completed: list[Restored] = []
        self.restored_bytes = 0

    def submit(
        self,
        key: SequenceKey,
        image: Image,
        first_page: int,
        pages: Sequence[int],
        after: Fence,
        chain: ChainValues | None = None,
    ) -> None:
        assert len(pages) == image.pages - first_page, (len(pages), image.pages, first_page)
        ends = 0
        segments: dict[SegmentId, None] = {}
        for run in image.runs:
            ends += run.pages
            if ends > first_page:
                segments[run.segment] = None
        self._queue.append(
            _Restore(
                key=key,
                tokens=image.kv_tokens,
                segments=tuple(segments),
                nbytes=(image.kv_tokens - first_page * self._rates.page_tokens) * self._rates.token_bytes,
                deadline=self._clock.now + self._timeout_s,
            )
        )
        self._begin_next()

    def cancel(self, key: SequenceKey) -> bool:
        for restore in self._queue:
            if restore.key == key:
                self._queue.remove(restore)
                return True
        return False

    def poll(self) -> list[Restored]:
        completed, self._completed = self._completed, []
        return completed

    def close(self) -> None:
        return

    def _begin_next(self) -> None:
        if self._running is not None or not self._queue:
            return
        restore = self._running = self._queue.popleft()
        now = self._clock.now
        ends = now + self._rates.restore.seconds(restore.nbytes)
        try:
            restore.lease = self._pool.lease(restore.segments, max(0.0, restore.deadline - now))
        except KVError as error:
            restore.error = error
            ends = now + self._rates.restore.fixed_s
        if ends > restore.deadline:
            restore.error = DeadlineError(f"{restore.key}: not restored within {self._timeout_s:g} s")
            ends = max(now, restore.deadline)
        self._load.moves(now, ends)
        self._clock.at(ends, partial(self._complete, restore))

    def _complete(self, restore: _Restore) -> None:
        if restore.lease is not None:
            self._pool.close_lease(restore.lease)
        if restore.error is None:
            self.restored_bytes += restore.nbytes
        self._completed.append(Restored(key=restore.key, tokens=restore.tokens, error=restore.error))
        self._running = None
        self._begin_next()
        self._wake()
