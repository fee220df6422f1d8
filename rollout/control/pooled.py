"""What the pools hold of one trajectory: its image, and every pool that may hold more than that."""

from rollout.control.messages import Command, Retain
from rollout.types import Image, NodeId, SegmentId, TrajectoryId


class Pooled:
    """Replacing the image tells every pool concerned what the trajectory needs from then on."""

    __slots__ = ("_nodes", "_trajectory_id", "image")

    def __init__(self, trajectory_id: TrajectoryId) -> None:
        self._trajectory_id = trajectory_id
        self._nodes: set[NodeId] = set()
        self.image: Image | None = None

    @property
    def kv_tokens(self) -> int:
        """Positions whose KV the image holds."""
        return self.image.kv_tokens if self.image is not None else 0

    def exporting_to(self, node: NodeId) -> None:
        """From now on the pool of `node` may hold KV of it, whatever is told of the export."""
        self._nodes.add(node)

    def replace(self, image: Image | None) -> list[Command]:
        """This is the image now; pools let go of everything else."""
        self.image = image
        needed: dict[NodeId, set[SegmentId]] = {node: set() for node in sorted(self._nodes)}
        for run in image.runs if image is not None else ():
            needed.setdefault(run.node, set()).add(run.segment)
        self._nodes = {node for node, segments in needed.items() if segments}
        return [
            Retain(node=node, trajectory_id=self._trajectory_id, segments=frozenset(segments))
            for node, segments in needed.items()
        ]

    def let_go_of(self, unwanted: Image) -> list[Command]:
        """Pools that stored `unwanted` keep of it only what the image needs."""
        self._nodes |= {run.node for run in unwanted.runs}
        return self.replace(self.image)
