"""Nodes of the prefix tree: an edge of whole pages, and the page numbers that hold it in each tier. Integers only."""

from array import array
from collections.abc import Iterable

from rollout.kv.tiers import CopyId, Residency, Tier
from rollout.types import TrajectoryId

ID_BYTES = array("i").itemsize


def edge_bytes(ids: Iterable[int]) -> bytes:
    """Token ids (or other ints of 32 bits that stand for them) as the tree compares them."""
    return ids.tobytes() if isinstance(ids, array) else array("i", ids).tobytes()


class Spot:
    """A node in one tier."""

    __slots__ = ("below", "locks", "pages")

    def __init__(self, pages: list[int], locks: int = 0) -> None:
        self.pages = pages
        self.locks = locks
        self.below = 0
        """Children that have pages in this tier."""


class Arriving:
    """A copy that is writing a node's pages in tier `to`."""

    __slots__ = ("copy_id", "pages", "to")

    def __init__(self, copy_id: CopyId, to: Tier, pages: list[int]) -> None:
        self.copy_id = copy_id
        self.to = to
        self.pages = pages


class Node:
    """An edge of the tree with what hangs below it."""

    __slots__ = ("arriving", "children", "device", "edge", "hits", "host", "owner", "parent", "used_at")

    def __init__(self, parent: "Node | None", edge: bytes, owner: TrajectoryId | None) -> None:
        self.parent = parent
        self.edge = edge
        self.children: dict[bytes, Node] = {}
        self.device = Spot([])
        self.host = Spot([])
        self.arriving: Arriving | None = None
        self.owner = owner
        self.hits = 0
        """Sequences that used it since it was inserted."""
        self.used_at = 0

    def at(self, tier: Tier) -> Spot:
        return self.device if tier is Tier.DEVICE else self.host

    @property
    def residency(self) -> Residency:
        if not self.host.pages:
            return Residency.DEVICE
        return Residency.BOTH if self.device.pages else Residency.HOST

    def path(self) -> "list[Node]":
        """From below the root to this node."""
        path: list[Node] = []
        node = self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        return path
