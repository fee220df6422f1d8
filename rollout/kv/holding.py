"""The page table of one sequence. Integers only; what its pages mean to others is up to `cache`."""

from array import array
from collections.abc import Iterable

from rollout.kv.nodes import Node
from rollout.kv.tiers import CopyId
from rollout.types import TrajectoryId


class Holding:
    """The page table of one sequence."""

    __slots__ = ("_packed", "load_failed", "loads", "node", "owner", "reserved", "shared", "table", "weights_id")

    def __init__(self, owner: TrajectoryId, weights_id: str, node: Node, table: list[int]) -> None:
        self.owner = owner
        self.weights_id = weights_id
        self.node = node
        self.table = table
        """To be changed by `append`, `replace` and `clear` only."""
        self._packed: array[int] | None = None
        self.shared = len(table)
        self.reserved = 0
        """Own pages that a copy is writing to."""
        self.loads: set[CopyId] = set()
        """Copies from the host that are under way into its pages."""
        self.load_failed = False
        """It has less than was asked for, and can only be closed."""

    @property
    def packed(self) -> "array[int]":
        """The table as 32-bit integers, made anew only after it has changed."""
        if self._packed is None:
            self._packed = array("i", self.table)
        return self._packed

    def append(self, pages: Iterable[int]) -> None:
        self.table += pages
        self._packed = None

    def replace(self, first: int, stop: int, pages: list[int]) -> None:
        """`pages` take the place of [first, stop)."""
        self.table[first:stop] = pages
        self._packed = None

    def clear(self) -> None:
        self.table = []
        self._packed = None
