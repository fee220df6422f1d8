"""The worker actor: a host behind methods that only enqueue, read snapshots, poll or export.

The model is loaded by the first `describe`, so that its errors reach the caller as they are, and again
after Ray has restarted the process. Calls that name another incarnation of the worker are ignored.

Whoever gets a handle of a worker imports this module: torch and what needs it are imported where they are used.
"""

import gc
import uuid
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

import ray

from rollout.cluster.description import Batch, WorkerDescription
from rollout.cluster.mapping import touch_store
from rollout.cluster.parcels import Parcel, StoredWeights
from rollout.config import Config
from rollout.control.commands import Assignment
from rollout.errors import SegmentMissingError, WorkerLostError
from rollout.kv.image import Buffer, Manifest
from rollout.metrics import WorkerStats
from rollout.reports import FlushReport
from rollout.types import Keep, MemoryOf, NodeId, SequenceKey, Weights, WeightsId, WorkerId

if TYPE_CHECKING:
    from rollout.cluster.host import Host

GROUPS = {"control": 1, "events": 1, "data": 2, "weights": 4}
"""Threads of each concurrency group. One for `control` keeps commands in order; those for `weights` take turns, but one
that hangs, on a network file system that does not answer, is not in the way of the next."""


class Worker:
    """One process of the service that decodes."""

    def __init__(self, worker: WorkerId, config: Config, weights: Weights) -> None:
        """`weights` are what `config` makes every worker of the service load."""
        self._worker = worker
        self._weights = weights
        self._config = config
        self._incarnation = uuid.uuid4().hex
        self._host: Host | None = None

    @ray.method(concurrency_group="control")
    def describe(self) -> WorkerDescription:
        """Load the model if that was not done yet.

        Raises `ConfigError` if the configuration and this machine do not fit together.
        """
        if self._host is None:
            from rollout.cluster.host import Host
            from rollout.cluster.reader import PoolReader

            node = NodeId(ray.get_runtime_context().get_node_id())
            reader = PoolReader(self._config.cluster.name, node)
            self._host = Host(self._worker, node, self._incarnation, self._config, self._weights, reader)
            gc.freeze()  # what is loaded now stays: collections need not look through it between steps
        return self._host.description

    @ray.method(concurrency_group="control")
    def start(self, incarnation: str, assignment: Assignment) -> None:
        if host := self._addressed(incarnation):
            host.start(assignment)

    @ray.method(concurrency_group="control")
    def stop(self, incarnation: str, key: SequenceKey) -> None:
        if host := self._addressed(incarnation):
            host.stop(key)

    @ray.method(concurrency_group="control")
    def release(self, incarnation: str, key: SequenceKey) -> None:
        if host := self._addressed(incarnation):
            host.release(key)

    @ray.method(concurrency_group="control")
    def keep(self, incarnation: str, key: SequenceKey, where: Keep) -> None:
        if host := self._addressed(incarnation):
            host.keep(key, where)

    @ray.method(concurrency_group="control")
    def recall(self, incarnation: str, key: SequenceKey) -> None:
        if host := self._addressed(incarnation):
            host.recall(key)

    @ray.method(concurrency_group="control")
    def pause(self, incarnation: str) -> None:
        """Run no step until `unpause`; commands are obeyed all the same."""
        if host := self._addressed(incarnation):
            host.pause()

    @ray.method(concurrency_group="control")
    def unpause(self, incarnation: str) -> None:
        if host := self._addressed(incarnation):
            host.unpause()

    @ray.method(concurrency_group="data")
    def audit(self, timeout_s: float) -> str | None:
        """What is wrong with the page accounting, recomputed from the structures. Raises `DeadlineError`."""
        return self._host.audit(timeout_s) if self._host is not None else None

    @ray.method(concurrency_group="control")
    def stats(self) -> WorkerStats | None:
        """As of the engine's last step; None before the model is loaded."""
        return self._host.stats if self._host is not None else None

    @ray.method(concurrency_group="events")
    def poll(self, acknowledged: int, wait_s: float) -> Batch:
        """The next events after batch `acknowledged`, waiting up to `wait_s` seconds for one."""
        if self._host is None:
            return Batch(incarnation=self._incarnation, number=0, silent_s=0.0, events=())
        return self._host.poll(acknowledged, wait_s)

    @ray.method(concurrency_group="data")
    def export(
        self, incarnation: str, key: SequenceKey, parts: Sequence[tuple[int, int]]
    ) -> tuple[list[Manifest], *tuple[list[Buffer], ...]]:
        """Pages [first, stop) of a parked sequence for each part: the manifests, then the data of each.

        The caller asks for as many returns, all of which it owns. Raises `SegmentMissingError` if the sequence is not
        parked here.
        """
        host = self._addressed(incarnation)
        if host is None:
            raise SegmentMissingError(f"{key[0]}: worker {self._worker} was restarted since")
        exported = [host.export(key, first, stop) for first, stop in parts]
        return [manifest for manifest, _ in exported], *(buffers for _, buffers in exported)

    @ray.method(concurrency_group="weights")
    def prepare_weights(self, incarnation: str, name: str, parcel: Parcel, rank: int, size: int) -> tuple[int, str]:
        """Read all of it, and see that it is whole and fits, while decoding goes on; its size in bytes, and a digest.

        `rank` is that of this worker among `size` ends of the transfer. Raises `WeightsError` or
        `UnsupportedModelError`.
        """
        from rollout.cluster.weights import open_parcel

        return self._the_same(incarnation).prepare_weights(name, open_parcel(parcel, rank, size), delta=parcel.delta)

    @ray.method(concurrency_group="control")
    def commit_weights(
        self, incarnation: str, name: str, weights: Weights, reusable: Set[WeightsId], in_place: bool
    ) -> int:
        """Replace the weights between two steps by what was prepared, after all that was commanded before; returns its
        size in bytes.

        After an error this process serves nothing any more.
        """
        return self._the_same(incarnation).commit_weights(name, weights, reusable, in_place=in_place)

    @ray.method(concurrency_group="weights")
    def share_weights(self, incarnation: str, bucket_bytes: int) -> tuple[Weights, StoredWeights]:
        """What this worker has, put into the object store for one that comes up; decoding waits meanwhile."""
        from rollout.cluster.weights import put_weights

        return self._the_same(incarnation).read_weights(lambda held: put_weights(held, bucket_bytes, delta=False))

    @ray.method(concurrency_group="weights")
    def digest_weights(self, incarnation: str) -> str:
        """Of what this worker has."""
        return self._the_same(incarnation).digest_weights()

    @ray.method(concurrency_group="control")
    def flush(self, incarnation: str) -> FlushReport:
        """Free all KV that nobody uses just now."""
        return self._the_same(incarnation).flush()

    @ray.method(concurrency_group="weights")
    def empty(self, incarnation: str, timeout_s: float) -> None:
        """Free all pages. Raises `DeadlineError` if some are still in use then."""
        self._the_same(incarnation).empty(timeout_s)

    @ray.method(concurrency_group="weights")
    def release_memory(self, incarnation: str, what: Set[MemoryOf]) -> int:
        """Give memory back to the system; the bytes given back."""
        return self._the_same(incarnation).release_memory(what)

    @ray.method(concurrency_group="weights")
    def reclaim_memory(self, incarnation: str, what: Set[MemoryOf]) -> bool:
        """Take it again; whether weights must be loaded."""
        return self._the_same(incarnation).reclaim_memory(what)

    @ray.method(concurrency_group="weights")
    def drop_weights(self, incarnation: str, name: str) -> None:
        """What was prepared will not be committed."""
        if host := self._addressed(incarnation):
            host.drop_weights(name)

    @ray.method(concurrency_group="data")
    def warm(self) -> int:
        """Touch shared memory, so that this process has it mapped before the first export; returns how much."""
        return touch_store(int(self._config.pool.warm_bytes))

    def _the_same(self, incarnation: str) -> "Host":
        host = self._addressed(incarnation)
        if host is None:
            raise WorkerLostError(f"worker {self._worker} was restarted since")
        return host

    def _addressed(self, incarnation: str) -> "Host | None":
        return self._host if incarnation == self._incarnation else None
