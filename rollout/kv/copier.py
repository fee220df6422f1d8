"""Copies between the tiers, on one thread, while decoding goes on: plans in, completions out.

The engine submits what a step planned as one batch and polls at every step and when idle. A copy either put
every byte in place or failed; its pages are the cache's again only when it is completed. Two of the four
fences are here: the batch waits for the computation before it, and a completion is told once, after the bytes.
"""

import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from rollout.kv.fence import Fence
from rollout.kv.storage import KVStorage
from rollout.kv.tiers import Copy, CopyId, Tier

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A copy that is over."""

    copy_id: CopyId
    to: Tier
    ok: bool
    nbytes: int
    seconds: float


class Copier:
    """Executes plans one after the other."""

    def __init__(self, storage: KVStorage, *, wake: Callable[[], None]) -> None:
        """`wake` is called from the copy thread when a copy is completed."""
        self._storage = storage
        self._wake = wake
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copy")
        self._completed: queue.SimpleQueue[Copied] = queue.SimpleQueue()

    def submit(self, copies: Sequence[Copy], after: Fence) -> None:
        """Execute what a step planned, after the computation before `after`."""
        first = sorted(copies, key=lambda copy: copy.to is Tier.HOST)  # sequences wait for those to the device
        self._thread.submit(self._run, first, after)

    def poll(self) -> list[Copied]:
        """Copies completed since the last call, in the order in which they ended."""
        return [self._completed.get() for _ in range(self._completed.qsize())]

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self, copies: Sequence[Copy], after: Fence) -> None:
        computed = self._attempt("waiting for the computation before a batch of copies", after.wait)
        for copy in copies:
            start = time.perf_counter()
            execute = partial(self._storage.copy, copy.to, copy.sources, copy.targets, after)
            ok = computed and self._attempt(f"a copy of {len(copy.sources)} pages to the {copy.to}", execute)
            nbytes = len(copy.sources) * self._storage.page_bytes
            seconds = time.perf_counter() - start
            self._completed.put(Copied(copy_id=copy.copy_id, to=copy.to, ok=ok, nbytes=nbytes, seconds=seconds))
            self._wake()

    def _attempt(self, what: str, work: Callable[[], None]) -> bool:
        try:
            work()
        except Exception:
            logger.exception("%s failed", what)
            return False
        return True
