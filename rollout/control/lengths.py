"""How long trajectories became that are finished: what is too long, and what the others may be expected to become."""

import bisect
from collections.abc import Iterable, Iterator
from itertools import accumulate


class Lengths:
    """Sampled tokens of finished trajectories, in order of length."""

    __slots__ = ("_longest_first_sums", "_sorted")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._sorted = sorted(tokens)
        self._longest_first_sums: list[int] | None = None
        """Of the longest one, the longest two, …; made when it is asked for."""

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[int]:
        return iter(self._sorted)

    def add(self, tokens: int) -> None:
        bisect.insort(self._sorted, tokens)
        self._longest_first_sums = None

    @property
    def median(self) -> float:
        """Of one at least."""
        middle = len(self._sorted) // 2
        if len(self._sorted) % 2:
            return float(self._sorted[middle])
        return (self._sorted[middle - 1] + self._sorted[middle]) / 2

    def remaining(self, tokens: int) -> float | None:
        """Expected tokens to go for one that has `tokens`: the mean of what longer ones had more; None if there are no
        longer ones."""
        if self._longest_first_sums is None:
            self._longest_first_sums = list(accumulate(reversed(self._sorted)))
        longer = len(self._sorted) - bisect.bisect_right(self._sorted, tokens)
        return self._longest_first_sums[longer - 1] / longer - tokens if longer else None
