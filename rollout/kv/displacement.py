"""Which images a full pool gives up for a new one. Plain numbers; decides, changes nothing.

An image is rent: it occupies its bytes for as many turns as there are before its own, and spares the tokens
that its trajectory would compute again. What costs most for what it spares goes first:

    turns until it is needed × bytes that only it needs / tokens that it spares

Among images of nothing shared, bytes per token are one constant, so they go last turn first; one that shares
its prompt frees little and goes late. Never given up: what is needed sooner than the new image, and what is pinned.
Nor is anything if all that may go is not enough.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rollout.types import SegmentId, TrajectoryId, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """What a trajectory has in the pool."""

    trajectory: TrajectoryId
    turn: Turn
    kv_tokens: int
    """The cost of its loss: positions that would be computed again, wherever their KV is. At least 1."""
    segments: Collection[SegmentId]
    pinned: bool
    """Read, or extended, just now."""


def choose_victims(
    images: Sequence[StoredImage], freeable: Mapping[SegmentId, int], *, need: int, turn: Turn
) -> list[TrajectoryId]:
    """Whose images to give up for one of `turn` so that `need` bytes are freed; none if that cannot be done.

    `freeable` says what each segment frees when the last image that needs it goes, in bytes.
    """
    needed_by = Counter(segment for image in images for segment in image.segments)

    def rent(place: int, image: StoredImage) -> float:
        exclusive = sum(freeable[segment] for segment in image.segments if needed_by[segment] == 1)
        return place * exclusive / image.kv_tokens

    queue = sorted(images, key=lambda image: image.turn)
    movable = [(place, image) for place, image in enumerate(queue, 1) if image.turn > turn and not image.pinned]
    movable.sort(key=lambda at: (rent(*at), at[0]), reverse=True)

    chosen: list[StoredImage] = []
    freed = 0
    for _, image in movable:
        if freed >= need:
            break
        chosen.append(image)
        for segment in image.segments:
            needed_by[segment] -= 1
            freed += freeable[segment] if not needed_by[segment] else 0
    if freed < need:
        return []
    return [image.trajectory for image in _without_the_needless(chosen, needed_by, freeable, freed - need)]


def _without_the_needless(
    chosen: list[StoredImage], needed_by: Counter[SegmentId], freeable: Mapping[SegmentId, int], surplus: int
) -> list[StoredImage]:
    """Spare, from the last chosen on, whatever frees no more than the surplus."""
    going: list[StoredImage] = []
    for image in reversed(chosen):
        frees = sum(freeable[segment] for segment in image.segments if not needed_by[segment])
        if frees > surplus:
            going.append(image)
            continue
        surplus -= frees
        needed_by.update(image.segments)
    return going[::-1]
