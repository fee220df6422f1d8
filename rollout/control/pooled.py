"""What the pools hold of one trajectory: its image, and every pool that may hold more than that."""

from collections.abc import Sequence, Set

from rollout.control.commands import Command, Expect, Retain
from rollout.types import Image, KVRun, NodeId, SegmentId, TrajectoryId, Turn, Wait, first_tokens


class Pooled:
    """Replacing the image tells every pool concerned what the trajectory needs from then on."""

    __slots__ = ("_displaced", "_nodes", "_trajectory_id", "image")

    def __init__(self, trajectory_id: TrajectoryId) -> None:
        self._trajectory_id = trajectory_id
        self._nodes: dict[NodeId, Turn | None] = {}
        """With what the pool there was told to expect."""
        self._displaced: set[SegmentId] = set()
        """Gone since the last export was ordered, which may have built on them."""
        self.image: Image | None = None

    @property
    def kv_tokens(self) -> int:
        """Positions whose KV the image holds."""
        return self.image.kv_tokens if self.image is not None else 0

    def agreeing(self, written: Sequence[KVRun]) -> Image | None:
        """The image, if KV that was written like this is the same as far as both go; if not, it is of older weights."""
        if self.image is None:
            return None
        both = min(self.image.kv_tokens, sum(run.tokens for run in written))
        return self.image if first_tokens(written, both) == first_tokens(self.image.written, both) else None

    def export_to(self, node: NodeId, turn: Turn) -> None:
        """An export is ordered: from now on the pool of `node` may hold KV of it, whatever is told of the export."""
        self._nodes[node] = turn
        self._displaced.clear()

    def may_be_at(self, image: Image) -> None:
        """The pools that `image` names may hold KV of it."""
        for run in image.runs:
            self._nodes.setdefault(run.node, None)

    def expect(self, turn: Turn) -> list[Command]:
        """This is when the image will be needed; pools that were told otherwise hear of it."""
        if self.image is None and turn.wait in (Wait.STARTING, Wait.RUNNING):
            return []  # there is neither an image nor, while it is on a worker, an export that makes one
        late = sorted(node for node, told in self._nodes.items() if told != turn)
        self._nodes.update((node, turn) for node in late)
        return [Expect(node=node, trajectory_id=self._trajectory_id, turn=turn) for node in late]

    def stored(self, image: Image) -> list[Command]:
        """An export made this image; it is of no use if what it builds on was displaced meanwhile."""
        return self.let_go_of(image) if _has_part_in(image, self._displaced) else self.replace(image)

    def displaced(self, segments: Set[SegmentId]) -> bool:
        """These are gone; returns whether the image needs one of them."""
        self._displaced |= segments
        return self.image is not None and _has_part_in(self.image, segments)

    def replace(self, image: Image | None) -> list[Command]:
        """This is the image now; pools let go of everything else."""
        self.image = image
        needed: dict[NodeId, set[SegmentId]] = {node: set() for node in sorted(self._nodes)}
        for run in image.runs if image is not None else ():
            needed.setdefault(run.node, set()).add(run.segment)
        self._nodes = {node: self._nodes.get(node) for node, segments in needed.items() if segments}
        return [
            Retain(node=node, trajectory_id=self._trajectory_id, segments=frozenset(segments))
            for node, segments in needed.items()
        ]

    def let_go_of(self, unwanted: Image) -> list[Command]:
        """Pools that stored `unwanted` keep of it only what the image needs."""
        self.may_be_at(unwanted)
        return self.replace(self.image)


def _has_part_in(image: Image, segments: Set[SegmentId]) -> bool:
    return any(run.segment in segments for run in image.runs)
