"""What a sequence says about its KV: one chain value a position. Integers only; made when the canary is on.

value(position) = H(value(position - 1), token, position, weights_id), so equal values mean the same token at the
same place after the same history, computed by the same weights. It depends on nothing else: two sequences
with a common prefix have the same values there, in every process.
"""

import struct
from array import array
from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.typing import NDArray

ChainValues = NDArray[np.int64]

_FACTS = struct.Struct("<4q")


class Chain:
    """The chain values of one sequence's positions, extended as they get KV."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values = array("q")

    def __len__(self) -> int:
        return len(self._values)

    def extend(self, tokens: Iterable[int], weights_id: str) -> None:
        """The next positions hold `tokens`, their KV computed by the weights `weights_id`."""
        weights = _signed(weights_id.encode())
        position = len(self._values)
        value = self._values[-1] if position else 0
        for token in tokens:
            value = _signed(_FACTS.pack(value, token, position, weights))
            self._values.append(value)
            position += 1

    def forget(self, start: int) -> None:
        """Positions from `start` on are computed anew."""
        del self._values[start:]

    def values(self, start: int, end: int) -> ChainValues:
        """The values of positions [start, end), which must be known."""
        assert 0 <= start <= end <= len(self._values), (start, end, len(self._values))
        return np.frombuffer(self._values[start:end], dtype=np.int64)


def _signed(data: bytes) -> int:
    return int.from_bytes(xxhash.xxh3_64_digest(data), "little", signed=True)
