"""The workers, the queue before them, and who runs where.

Routing: oldest first, on the worker with the most room. With `prefer_other`, room goes first to
trajectories that left another worker; no room stays empty for that.
"""

import bisect
from dataclasses import dataclass, field

from rollout.control.messages import WorkerUp
from rollout.control.records import Record
from rollout.types import NodeId, TrajectoryId, WorkerId


@dataclass(slots=True, kw_only=True)
class Worker:
    """One worker process and what runs on it."""

    worker_id: WorkerId
    node: NodeId
    incarnation: str
    max_running: int
    running: set[TrajectoryId] = field(default_factory=set)

    @property
    def room(self) -> int:
        return self.max_running - len(self.running)


class Fleet:
    """A trajectory is in the queue or in one worker's set, never both."""

    def __init__(self, *, size: int, prefer_other: bool) -> None:
        self._size = size
        self._prefer_other = prefer_other
        self._workers: dict[WorkerId, Worker] = {}
        self._lost: dict[WorkerId, str] = {}
        self._queue: list[Record] = []
        """In submission order."""

    def get(self, worker_id: WorkerId) -> Worker | None:
        return self._workers.get(worker_id)

    def join(self, up: WorkerUp) -> None:
        assert up.worker not in self._workers, f"{up.worker} joined twice"
        self._lost.pop(up.worker, None)
        self._workers[up.worker] = Worker(
            worker_id=up.worker, node=up.node, incarnation=up.incarnation, max_running=up.max_running
        )

    def drop(self, worker_id: WorkerId) -> Worker:
        return self._workers.pop(worker_id)

    def give_up(self, worker_id: WorkerId, error: str) -> None:
        """The worker will not come back."""
        self._lost[worker_id] = error

    @property
    def hopeless(self) -> str | None:
        """Why nothing will ever run again, if so."""
        if len(self._lost) < self._size:
            return None
        return "no worker is left: " + "; ".join(f"{worker}: {error}" for worker, error in self._lost.items())

    def enqueue(self, record: Record) -> None:
        bisect.insort(self._queue, record, key=lambda queued: queued.order)

    def dequeue(self, record: Record) -> None:
        self._queue.remove(record)

    def leave(self, record: Record) -> Worker:
        """The trajectory is off its worker, which is returned."""
        worker = self._workers[record.workers[-1]]
        worker.running.remove(record.trajectory_id)
        return worker

    def drain(self) -> list[Record]:
        """Everything queued, taken out."""
        drained, self._queue = self._queue, []
        return drained

    def dispatch(self) -> list[tuple[Record, Worker]]:
        """Take out of the queue what starts now, with the worker it starts on.

        New trajectories left no worker: they never overtake an older one.
        """
        chosen: list[tuple[Record, Worker]] = []
        for elsewhere_only in (True, False) if self._prefer_other else (False,):
            for record in list(self._queue):
                able = [worker for worker in self._workers.values() if worker.room > 0]
                if not able:
                    return chosen
                if elsewhere_only:
                    if record.worker is None:
                        continue
                    able = [worker for worker in able if worker.worker_id != record.worker]
                    if not able:
                        continue
                worker = max(able, key=lambda worker: worker.room)
                worker.running.add(record.trajectory_id)
                self._queue.remove(record)
                chosen.append((record, worker))
        return chosen
