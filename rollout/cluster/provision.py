"""Gives the live weights to a worker that does not have them: as they came, or from another worker."""

import logging
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ray.exceptions import RayTaskError

from rollout.cluster.calls import is_lost, one_line
from rollout.cluster.description import WorkerDescription
from rollout.cluster.parcels import BroadcastWeights, Parcel, WeightsDirectory
from rollout.cluster.supervision import Supervisor
from rollout.errors import WeightsGoneError
from rollout.types import MemoryOf, Weights, WeightsId, WorkerId

logger = logging.getLogger(__name__)

PEER_BUCKET_BYTES = 32 << 20
"""Of weights that one worker gives to another."""
MOST_PARCELS = 8
"""A full set and the deltas since: with more they are not kept, and a worker that comes up asks another one."""


class Live(NamedTuple):
    """What a worker in service must know."""

    weights: Weights
    reusable: frozenset[WeightsId]
    """Whose KV may be gone on with."""


class Kept(NamedTuple):
    """Weights as they came, to be read again."""

    parcel: Parcel
    digest: str
    """Of what `prepare_weights` found there at first."""


class Provision:
    """Remembers what was loaded, and who has it."""

    def __init__(self, model: Path, digest: str, workers: Supervisor) -> None:
        """Processes load `model` by themselves, and found weights of this digest there."""
        self._model = WeightsDirectory(path=model.absolute())
        self._digest = digest
        self._workers = workers
        self._kept: tuple[Kept, ...] | None = ()
        """What makes the live weights of those of the model's directory, or from its first one on without these; None
        if that cannot be read again."""
        self._whole = False
        """The first one is a full set."""
        self.released: dict[WorkerId, set[MemoryOf]] = {}
        """What workers gave back, so that nothing starts on them."""

    def updated(self, parcel: Parcel, digest: str) -> None:
        """These are live now; what a delta does not name is as before."""
        if not parcel.delta:
            self._kept, self._whole = (), True
        again = self._kept is not None and not isinstance(parcel, BroadcastWeights)
        if self._kept is None or not again or len(self._kept) == MOST_PARCELS:
            self._kept = None
        else:
            self._kept = (*self._kept, Kept(parcel, digest))

    async def to_new(self, actor: Any, described: WorkerDescription, live: Live) -> None:
        """A process that has come up, and loaded what it found at its model's path."""
        as_at_first = described.digest == self._digest
        if described.weights == live.weights and as_at_first:
            return
        if as_at_first and self._kept is not None and not self._whole:
            await self._load_all(actor, described.incarnation, self._kept, live)
        else:
            await self.to_empty(actor, described.incarnation, live)

    async def to_empty(self, actor: Any, incarnation: str, live: Live) -> None:
        """A worker whose weights are of no use. Raises `WeightsGoneError` if nobody has the live ones."""
        if self._kept is not None:
            try:
                if not self._whole:
                    await self._load_model(actor, incarnation, live)
                await self._load_all(actor, incarnation, self._kept, live)
            except (RayTaskError, WeightsGoneError) as error:
                if is_lost(error):
                    raise
                logger.warning("the live weights cannot be read as they came: %s", one_line(error))
            else:
                return
        await self._from_peer(actor, incarnation, live)

    async def _from_peer(self, actor: Any, incarnation: str, live: Live) -> None:
        for name, (peer, named) in self._workers.serving.items():
            if MemoryOf.WEIGHTS in self.released.get(name, ()):
                continue
            try:
                held, parcel = await peer.share_weights.remote(named, PEER_BUCKET_BYTES)
            except Exception as error:
                if not is_lost(error):
                    raise
                continue
            if held == live.weights:
                await self._load(actor, incarnation, parcel, live)
                return
        raise WeightsGoneError(f"nobody has the live weights, version {live.weights.version}: update them again")

    async def _load_model(self, actor: Any, incarnation: str, live: Live) -> None:
        await self._load(actor, incarnation, self._model, live)
        if await actor.digest_weights.remote(incarnation) != self._digest:
            raise WeightsGoneError(f"{self._model.path}: not what it was when the service was started")

    async def _load_all(self, actor: Any, incarnation: str, kept: Sequence[Kept], live: Live) -> None:
        for parcel, digest in kept:
            if await self._load(actor, incarnation, parcel, live) != digest:
                raise WeightsGoneError(f"{parcel}: not what it was when it was loaded")

    async def _load(self, actor: Any, incarnation: str, parcel: Parcel, live: Live) -> str:
        """Returns the digest of what was found there."""
        name = uuid.uuid4().hex
        _, digest = await actor.prepare_weights.remote(incarnation, name, parcel, 1, 2)
        await actor.commit_weights.remote(incarnation, name, live.weights, live.reusable, False)
        return str(digest)


def agreed(digests: Mapping[WorkerId, str]) -> str | None:
    """The digest that all found; None if they found different things."""
    found = set(digests.values())
    return found.pop() if len(found) == 1 else None
