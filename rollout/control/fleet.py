"""The workers, the queue before them, and who runs where.

Routing: oldest first, on the worker with the most room. With `prefer_other`, room goes first to
trajectories that left another worker; no room stays empty for that. A trajectory whose KV is kept on a worker
waits for room there.
"""

import bisect
from collections import deque
from dataclasses import dataclass, field

from rollout.control.messages import WorkerUp
from rollout.control.records import Record
from rollout.types import NodeId, TrajectoryId, WorkerId


@dataclass(slots=True, kw_only=True, eq=False)
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
        self._fresh: list[Record] = []
        """Queued and never started, in submission order."""
        self._returning: list[Record] = []
        """Queued after a start, in submission order."""

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
        bisect.insort(self._queue_of(record), record, key=_order)

    def dequeue(self, record: Record) -> None:
        queue = self._queue_of(record)
        at = bisect.bisect_left(queue, record.order, key=_order)
        assert queue[at] is record, f"{record.trajectory_id} is not queued"
        del queue[at]

    def leave(self, record: Record) -> Worker:
        """The trajectory is off its worker, which is returned."""
        worker = self._workers[record.workers[-1]]
        worker.running.remove(record.trajectory_id)
        return worker

    def node_of(self, worker_id: WorkerId) -> NodeId:
        return self._workers[worker_id].node

    def drain(self) -> list[Record]:
        """Everything queued, taken out."""
        drained = sorted([*self._returning, *self._fresh], key=_order)
        self._returning, self._fresh = [], []
        return drained

    def dispatch(self) -> list[tuple[Record, Worker]]:
        """Take out of the queue what starts now, with the worker it starts on.

        New trajectories left no worker: they never overtake an older one.
        """
        chosen: list[tuple[Record, Worker]] = []
        free = [worker for worker in self._workers.values() if worker.room > 0]
        waiting: deque[Record] = deque()
        for record in list(self._returning) if free else ():
            leaves = self._prefer_other and self._home(record) is None
            able = [worker for worker in free if worker.worker_id != record.worker] if leaves else []
            if able:
                self._assign(record, able, free, chosen)
            else:
                waiting.append(record)
        while free and (waiting or self._fresh):
            head = min((queue[0] for queue in (waiting, self._fresh) if queue), key=_order)
            if waiting and head is waiting[0]:
                waiting.popleft()
            home = self._home(head)
            able = [worker for worker in free if home is None or worker is home]
            if able:
                self._assign(head, able, free, chosen)
        return chosen

    def _home(self, record: Record) -> Worker | None:
        return self._workers.get(record.home.worker) if record.home is not None else None

    def _assign(
        self, record: Record, able: list[Worker], free: list[Worker], chosen: list[tuple[Record, Worker]]
    ) -> None:
        """Give a queued trajectory to the one of `able` with the most room; a full worker is no longer free."""
        worker = max(able, key=lambda worker: worker.room)
        self.dequeue(record)
        worker.running.add(record.trajectory_id)
        chosen.append((record, worker))
        if not worker.room:
            free.remove(worker)

    def _queue_of(self, record: Record) -> list[Record]:
        return self._returning if record.workers else self._fresh


def _order(record: Record) -> int:
    return record.order
