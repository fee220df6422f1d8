"""Gives the live weights to a worker that does not have them: as they came, or from another worker."""

import logging
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from ray.exceptions import RayTaskError

from rollout.cluster.calls import one_line
from rollout.cluster.description import WorkerDescription
from rollout.cluster.supervision import Supervisor
from rollout.cluster.weights import BroadcastWeights, Parcel, WeightsDirectory
from rollout.errors import WeightsSourceError
from rollout.types import Weights, WeightsId, WorkerId

logger = logging.getLogger(__name__)

PEER_BUCKET_BYTES = 32 << 20
"""Of weights that one worker gives to another."""


class Live(NamedTuple):
    """What a worker in service must know."""

    weights: Weights
    reusable: frozenset[WeightsId]
    """Whose KV may be gone on with."""


class Provision:
    """Remembers what was loaded, and who has it."""

    def __init__(self, model: Path, digest: str, workers: Supervisor) -> None:
        """Processes load `model` by themselves, and found weights of this digest there."""
        self._model = WeightsDirectory(path=model.absolute())
        self._digest = digest
        self._workers = workers
        self._parcels: tuple[Parcel, ...] | None = (self._model,)
        """What makes the live weights, in this order; None if some of it was sent once."""
        self.lacking: set[WorkerId] = set()
        """Workers in service that gave the memory of their weights back."""

    def updated(self, parcel: Parcel, *, delta: bool) -> None:
        """These are live now; what a `delta` does not name is as before."""
        before = self._parcels if delta else ()
        sent_once = isinstance(parcel, BroadcastWeights) or before is None
        self._parcels = None if before is None or sent_once else (*before, parcel)

    async def to_new(self, actor: Any, described: WorkerDescription, live: Live) -> None:
        """A process that has come up, and loaded what it found at its model's path."""
        as_at_first = described.digest == self._digest
        if described.weights == live.weights and as_at_first:
            return
        if as_at_first and self._parcels is not None and self._parcels[0] is self._model:
            await self._load_all(actor, described.incarnation, self._parcels[1:], live)
        else:
            await self.to_empty(actor, described.incarnation, live)

    async def to_empty(self, actor: Any, incarnation: str, live: Live) -> None:
        """A worker whose weights are of no use. Raises `WeightsSourceError` if nobody has the live ones."""
        if self._parcels is not None:
            try:
                await self._load_all(actor, incarnation, self._parcels, live)
            except RayTaskError as error:
                logger.warning("the live weights cannot be read as they came: %s", one_line(error))
            else:
                if self._parcels != (self._model,) or await actor.digest_weights.remote(incarnation) == self._digest:
                    return
                logger.warning("%s: its weights have changed since the service was started", self._model.path)
        having = (there for name, there in self._workers.serving.items() if name not in self.lacking)
        peer, named = next(having, (None, ""))
        if peer is None:
            version = live.weights.version
            raise WeightsSourceError(f"nobody has the live weights, version {version}: update them again")
        held, parcel = await peer.share_weights.remote(named, PEER_BUCKET_BYTES)
        if held != live.weights:
            raise WeightsSourceError(f"a worker in service has version {held.version}, not {live.weights.version}")
        await self._load_all(actor, incarnation, (parcel,), live)

    async def _load_all(self, actor: Any, incarnation: str, parcels: tuple[Parcel, ...], live: Live) -> None:
        for parcel in parcels:
            name = uuid.uuid4().hex
            await actor.prepare_weights.remote(incarnation, name, parcel, 1, 2)
            await actor.commit_weights.remote(incarnation, name, live.weights, live.reusable, False)
