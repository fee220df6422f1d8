"""Copies under way: executed by a thread and told of by somebody, each when the test says so."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.kv.cache import KVCache
from rollout.kv.fence import Passed
from rollout.kv.tiers import Copy, Tier
from tests.kv.contents import Contents


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    copy: Copy
    source: NDArray[np.int32]
    """The bytes that it must copy."""
    executed: bool = False


class Flights:
    """Those of one cache, between its plans and its tensors."""

    def __init__(self, cache: KVCache, contents: Contents) -> None:
        self._cache = cache
        self._contents = contents
        self.all: list[Flight] = []
        self.ended = dict.fromkeys(Tier, 0)
        """Pages whose copies into a tier are over."""

    @property
    def waiting(self) -> list[Flight]:
        """Those that were not executed."""
        return [flight for flight in self.all if not flight.executed]

    def launch(self) -> None:
        """Take over what was planned."""
        for copy in self._cache.tiered.take_copies():
            source = self._contents.words[copy.to.other][[*copy.sources]]
            self.all.append(Flight(copy=copy, source=source.copy()))

    def execute(self, flight: Flight, *, ok: bool = True) -> None:
        """A copy thread does it, or a half of it."""
        copy = flight.copy
        found = self._contents.words[copy.to.other][[*copy.sources]]
        assert (found == flight.source).all(), "a page changed while it was copied"
        flight.executed = True
        count = len(copy.sources) if ok else len(copy.sources) // 2
        self._contents.storage.copy(copy.to, copy.sources[:count], copy.targets[:count], Passed())

    def complete(self, flight: Flight, *, ok: bool) -> None:
        """The cache is told."""
        self.all.remove(flight)
        if not flight.executed:
            self.execute(flight, ok=ok)
        copy = flight.copy
        self.ended[copy.to] += len(copy.targets)
        if ok:
            written = self._contents.words[copy.to][[*copy.targets]]
            assert (written == flight.source).all(), "a page that was copied to was written by somebody else"
        self._cache.tiered.copied(copy.copy_id, ok=ok)
