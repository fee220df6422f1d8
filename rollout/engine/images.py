"""What sequences left on this worker when they stopped, by sequence, and what the controller has done with it.

    Parked → release | keep (device, host) → recalled → release | keep …

A parked or recalled image is pinned, so that it can be exported; a kept one is where it was told to be. What
is under way (a move, copies of pages that are to be freed) is finished first: `poll` tells what came of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rollout.control.messages import Freed, Moved, Parked, Recalled, WorkerEvent
from rollout.engine.live import LiveWeights
from rollout.engine.sequence import Sequence
from rollout.kv import kept
from rollout.kv.cache import KVCache
from rollout.kv.nodes import ID_BYTES
from rollout.kv.tiers import PageRef, Tier
from rollout.types import AbortReason, Keep, KVRun, SequenceKey, TrajectoryId, first_tokens


@dataclass(slots=True, kw_only=True)
class _Left:
    image: kept.Kept
    parked: Parked
    prompt_tokens: int
    releasing: bool = False
    moving: bool = False
    wanted: Keep | None = None
    """Where it is to go once there is room, which copies are making."""


class Images:
    """One thread's: the engine's."""

    def __init__(self, cache: KVCache, live: LiveWeights, *, tail_hold_s: float) -> None:
        self._cache = cache
        self._live = live
        self._tail_hold_s = tail_hold_s
        self._left: dict[SequenceKey, _Left] = {}
        self._latest: dict[TrajectoryId, SequenceKey] = {}
        """Of each trajectory, what it left last."""
        self._under_way: set[SequenceKey] = set()
        """What `poll` is to finish, so that it need not look at all of them in every step."""

    def __len__(self) -> int:
        return len(self._left)

    @property
    def busy(self) -> bool:
        """Whether `poll` is to be called when copies are complete."""
        return bool(self._under_way)

    @property
    def pinned(self) -> int:
        """Images whose pages may be exported just now, so that nothing can evict them."""
        return sum(left.image.pinned for left in self._left.values())

    def park(self, sequence: Sequence, reason: AbortReason | None = None) -> Parked:
        """The sequence's holding becomes a pinned image; so does, if it never had pages, what it left here before.

        `reason` is what was seen in it; None: it was told to stop.
        """
        page_tokens = self._cache.page_tokens
        before = self._settled(sequence.trajectory_id) if sequence.holding is None else None
        if before is not None and self._live.may_use(before.parked.written):
            return self._park_again(sequence, before)
        if before is not None:  # nobody asks for it any more
            self.resumed(sequence.trajectory_id)
        if sequence.holding is not None:
            image = self._cache.park(sequence.holding, sequence.key_of(sequence.shareable_end), sequence.computed)
            sequence.holding = None
        else:
            image = self._cache.park_nothing(sequence.trajectory_id, self._live.weights.weights_id)
        parked = Parked(
            trajectory_id=sequence.trajectory_id,
            epoch=sequence.epoch,
            kv_tokens=image.tokens,
            prompt_pages=min(image.tokens, sequence.prompt_tokens) // page_tokens,
            page_keys=sequence.names.of(sequence.tokens, image.tokens // page_tokens),
            written=sequence.written.until(image.tokens),
            reason=reason,
        )
        self._left[sequence.key] = _Left(image=image, parked=parked, prompt_tokens=sequence.prompt_tokens)
        self._latest[sequence.trajectory_id] = sequence.key
        return parked

    def _park_again(self, sequence: Sequence, left: _Left) -> Parked:
        before = (left.parked.trajectory_id, left.parked.epoch)
        self._cache.kept.pin(left.image)
        tokens = left.image.tokens
        left.parked = Parked(
            trajectory_id=sequence.trajectory_id,
            epoch=sequence.epoch,
            kv_tokens=tokens,
            prompt_pages=min(tokens, left.prompt_tokens) // self._cache.page_tokens,
            page_keys=left.parked.page_keys[: tokens // self._cache.page_tokens],
            written=first_tokens(left.parked.written, tokens),
        )
        del self._left[before]
        self._left[sequence.key] = left
        self._latest[sequence.trajectory_id] = sequence.key
        return left.parked

    def sources(self, key: SequenceKey) -> tuple[PageRef, ...]:
        """Pages of a parked or recalled image, in order; nobody writes to them until the next command for it."""
        return self._cache.kept.sources(self._left[key].image)

    def of(self, trajectory: TrajectoryId) -> tuple[kept.Kept, tuple[KVRun, ...]] | None:
        """What a trajectory left here last and by which weights it was written, if it may go on with that, it was kept
        and nothing is under way with it."""
        left = self._settled(trajectory)
        if left is None or not self._live.may_use(left.parked.written):
            return None
        image = left.image
        tokens = image.tokens if image.tail else len(image.key) // ID_BYTES
        return image, first_tokens(left.parked.written, tokens)

    def resumed(self, trajectory: TrajectoryId) -> None:
        """What the trajectory left here last is over: it goes on with it, or without."""
        left = self._settled(trajectory)
        if left is not None:
            self._cache.kept.forget(left.image)
            self._remove(self._latest[trajectory])

    def adopted(self, trajectory: TrajectoryId) -> None:
        """The cache made it part of a holding."""
        self._remove(self._latest[trajectory])

    def keep(self, key: SequenceKey, where: Keep, now: float) -> list[WorkerEvent]:
        """Leave a parked or recalled image on the device, or move it to the host, or back."""
        left = self._left.get(key)
        if left is None or left.releasing:
            error = "it is not on this worker any more"
            return [Moved(trajectory_id=key[0], epoch=key[1], where=Keep.DEVICE, kv_tokens=0, error=error)]
        if left.moving or left.wanted is not None:
            return []
        tier = Tier.HOST if where is Keep.HOST else Tier.DEVICE
        expires_at = now + self._tail_hold_s
        image = left.image
        if image.tier is tier:
            self._cache.kept.unpin(image, expires_at=expires_at)
            return [self._kept(left, None)]
        if not self._cache.kept.move(image, tier):
            if tier is Tier.DEVICE and self._cache.leaving:
                left.wanted = where  # there will be room
                self._under_way.add(key)
                return []
            self._cache.kept.unpin(image, expires_at=expires_at)
            return [self._kept(left, f"no room on the {tier} for {image.tokens} tokens")]
        left.moving = True
        self._under_way.add(key)
        return []

    def recall(self, key: SequenceKey) -> list[WorkerEvent]:
        """Pin what is left of an image, to be exported; an image that is no longer here has no tokens left."""
        left = self._left.get(key)
        if left is None or left.releasing:
            gone = Recalled(trajectory_id=key[0], epoch=key[1], kv_tokens=0, prompt_pages=0, page_keys=(), written=())
            return [gone]
        if left.moving or left.wanted is not None:
            return []
        self._cache.kept.pin(left.image)
        tokens, page_tokens = left.image.tokens, self._cache.page_tokens
        return [
            Recalled(
                trajectory_id=key[0],
                epoch=key[1],
                kv_tokens=tokens,
                prompt_pages=min(tokens, left.prompt_tokens) // page_tokens,
                page_keys=left.parked.page_keys[: tokens // page_tokens],
                written=first_tokens(left.parked.written, tokens),
            )
        ]

    def release(self, key: SequenceKey) -> list[WorkerEvent]:
        """Free all that only this trajectory used, now or when copies of it are complete."""
        left = self._left.get(key)
        if left is None:
            return []
        left.releasing = True
        self._under_way.add(key)
        freed = self._cache.kept.drop(left.image)
        if freed is None:
            return []
        self._remove(key)
        return [_freed(key, freed)]

    def poll(self, now: float) -> list[WorkerEvent]:
        """Finish what waited for copies."""
        events: list[WorkerEvent] = []
        moved = dict(self._cache.kept.take_moved(expires_at=now + self._tail_hold_s))
        for key in list(self._under_way):
            left = self._left[key]
            self._under_way.discard(key)
            if (freed := moved.get(left.image)) is not None:
                left.moving = False
                error = "a copy failed" if left.image.failed else None
                events.append(self._kept(left, error))
                if left.image.tier is Tier.HOST and not left.image.failed:
                    events.append(_freed(key, freed))
            if left.releasing:
                events += self.release(key)
            elif left.moving:
                self._under_way.add(key)
            elif left.wanted is not None:
                where, left.wanted = left.wanted, None
                events += self.keep(key, where, now)
        return events

    def _settled(self, trajectory: TrajectoryId) -> _Left | None:
        """What a trajectory left here last, if it was kept and nothing is under way with it."""
        left = self._left.get(self._latest.get(trajectory, (trajectory, -1)))
        if left is None or left.image.pinned or left.moving or left.releasing:
            return None
        return left

    def _kept(self, left: _Left, error: str | None) -> Moved:
        where = Keep.HOST if left.image.tier is Tier.HOST else Keep.DEVICE
        key = (left.parked.trajectory_id, left.parked.epoch)
        return Moved(trajectory_id=key[0], epoch=key[1], where=where, kv_tokens=left.image.tokens, error=error)

    def _remove(self, key: SequenceKey) -> None:
        del self._left[key]
        self._under_way.discard(key)
        if self._latest.get(key[0]) == key:
            del self._latest[key[0]]

    def keys(self) -> Iterator[SequenceKey]:
        return iter(self._left)


def _freed(key: SequenceKey, freed: kept.FreedPages) -> Freed:
    return Freed(trajectory_id=key[0], epoch=key[1], exclusive_pages=freed.exclusive, freed_pages=freed.freed)
