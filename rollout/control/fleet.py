"""The workers, the queue before them, and who runs where.

Who starts first: evaluation before training, then the oldest, or the one with most to go. Where, see `routing`.
A trajectory whose KV is kept on a worker waits for room there, but no longer than having it elsewhere would take: so it
loses at most twice what it must. Then it is stranded: its KV is to be moved, or given up.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rollout.control.messages import WorkerFacts, WorkerUp
from rollout.control.records import Record
from rollout.types import GroupId, NodeId, Phase, Priority, TrajectoryId, WorkerId

TURNOVER_S = 5.0
"""Over which it is averaged for what KV a worker takes pages."""
LOST_WEIGHT = 0.2
"""Of the last KV that came back to what is believed to be lost."""
LOST_S = 60.0
"""After which that is believed a third as much, if nothing else is seen."""
REMEMBERED_GROUPS = 64
"""Whose prompts a worker is expected to have."""


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One worker process and what runs on it."""

    worker_id: WorkerId
    node: NodeId
    incarnation: str
    max_running: int
    running: set[TrajectoryId] = field(default_factory=set)
    facts: WorkerFacts | None = None
    kept: dict[TrajectoryId, int] = field(default_factory=dict)
    """KV of suspended trajectories that was left on the device, in tokens; it may have been evicted since."""
    draining: bool = False
    """It is being taken out of service: nothing starts on it."""
    released: bool = False
    """It has given memory back, or is about to: nothing starts on it."""
    _lost_share: float = 0.0
    _lost_at: float = 0.0
    _groups: dict[GroupId, None] = field(default_factory=dict)
    _taken: float = 0.0
    _taken_at: float = 0.0

    @property
    def room(self) -> int:
        return 0 if self.leaving else self.max_running - len(self.running)

    @property
    def leaving(self) -> bool:
        """What is on it is to go elsewhere."""
        return self.draining or self.released

    @property
    def turnover_tokens_s(self) -> float:
        """KV that it took pages for lately, as of the last report."""
        return self._taken / TURNOVER_S

    def took(self, tokens: int, now: float) -> None:
        """Pages for so many tokens, since the last report."""
        self._taken = self._taken * math.exp(min(0.0, self._taken_at - now) / TURNOVER_S) + tokens
        self._taken_at = now

    def came_back(self, share: float, now: float) -> None:
        """So much was left of KV that was kept on the device, when it was needed."""
        before = self.lost_share(now)
        self._lost_share = before + LOST_WEIGHT * (1.0 - share - before)
        self._lost_at = now

    def lost_share(self, now: float) -> float:
        """Of KV that is kept on the device, as lately seen; it is forgotten while nothing is kept there."""
        return self._lost_share * math.exp(min(0.0, self._lost_at - now) / LOST_S)

    def ran(self, group: GroupId) -> None:
        """It has the prompt of this group now."""
        self._groups.pop(group, None)
        self._groups[group] = None
        if len(self._groups) > REMEMBERED_GROUPS:
            del self._groups[next(iter(self._groups))]

    def knows(self, group: GroupId) -> bool:
        """Whether it is expected to have the prompt of this group."""
        return group in self._groups


Choose = Callable[[Record, Sequence[Worker]], Worker]
"""The best of the workers that have room."""
Patience = Callable[[Record], float]
"""Seconds for which a trajectory waits for the worker that has its KV while another has room."""


class Fleet:
    """A trajectory is in the queue or in one worker's set, never both."""

    def __init__(
        self,
        *,
        size: int,
        prefer_other: bool,
        choose: Choose,
        patience: Patience,
        to_go: Callable[[Record], float] | None = None,
    ) -> None:
        """`size` is how many workers there are when all are up. With `to_go`, those with most of it start first."""
        self._size = size
        self._prefer_other = prefer_other
        self._choose = choose
        self._patience = patience
        self._to_go = to_go
        self._workers: dict[WorkerId, Worker] = {}
        self._lost: dict[WorkerId, str] = {}
        self._queue: list[Record] = []
        """Evaluation first, each in submission order."""
        self._stranded: list[Record] = []
        self.paused = False
        """No worker runs a step, and nothing starts."""
        self.held = False
        """Nothing starts."""

    # Workers ------------------------------------------------------------------------------------------

    def get(self, worker_id: WorkerId) -> Worker | None:
        return self._workers.get(worker_id)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Those that are up."""
        return tuple(self._workers.values())

    def join(self, up: WorkerUp) -> Worker:
        assert up.worker not in self._workers, f"{up.worker} joined twice"
        self._lost.pop(up.worker, None)
        worker = Worker(worker_id=up.worker, node=up.node, incarnation=up.incarnation, max_running=up.max_running)
        self._workers[up.worker] = worker
        return worker

    def drop(self, worker_id: WorkerId) -> Worker:
        return self._workers.pop(worker_id)

    def give_up(self, worker_id: WorkerId, error: str) -> None:
        """The worker will not come back."""
        self._lost[worker_id] = error

    def grow(self, count: int) -> None:
        """So many more workers are coming; fewer, if negative."""
        self._size += count

    @property
    def all_known(self) -> bool:
        """Every worker is up or lost for good: none is coming."""
        return len(self._workers) + len(self._lost) >= self._size

    @property
    def hopeless(self) -> str | None:
        """Why nothing will ever run again, if so."""
        if len(self._lost) < self._size:
            return None
        return "no worker is left: " + "; ".join(f"{worker}: {error}" for worker, error in self._lost.items())

    def node_of(self, worker_id: WorkerId) -> NodeId:
        return self._workers[worker_id].node

    # The queue ----------------------------------------------------------------------------------------

    def enqueue(self, record: Record) -> None:
        record.refused_at = None
        bisect.insort(self._queue, record, key=_order)

    def dequeue(self, record: Record) -> None:
        at = bisect.bisect_left(self._queue, _order(record), key=_order)
        assert self._queue[at] is record, f"{record.trajectory_id} is not queued"
        del self._queue[at]

    @property
    def queued(self) -> Sequence[Record]:
        return self._queue

    def leave(self, record: Record) -> Worker:
        """The trajectory is off its worker, which is returned."""
        worker = self._workers[record.workers[-1]]
        worker.running.remove(record.trajectory_id)
        return worker

    def drain(self) -> list[Record]:
        """Everything queued, taken out."""
        drained, self._queue = self._queue, []
        return drained

    def starts(
        self, may_start: Callable[[Record], bool], now: float, *, among: Iterable[Record] | None = None
    ) -> Iterator[tuple[Record, Worker]]:
        """Take those that start now out of the queue, one after the other, each with the worker it starts on. `among`
        names all of training that may start, where these are few.

        A start may only make `may_start` refuse more. With `prefer_other`, room goes first to those that left another
        worker, among evaluation and then among training; no room stays empty for that.
        """
        if not self._queue or self.paused or self.held:
            return
        for priority in Priority:
            if self._prefer_other:
                yield from self._starts_elsewhere(priority, among, may_start)
            yield from self._starts_anywhere(priority, among, may_start, now)

    def _starts_elsewhere(
        self, priority: Priority, among: Iterable[Record] | None, may_start: Callable[[Record], bool]
    ) -> Iterator[tuple[Record, Worker]]:
        """Of those that left a worker, on another one."""
        free = self._free()
        for record in self._in_turn(priority, among) if free else ():
            others = [worker for worker in free if worker.worker_id != record.worker]
            if record.workers and self._home(record) is None and others and may_start(record):
                yield self._assign(record, self._choose(record, others))
                if not (free := self._free()):
                    return

    def _starts_anywhere(
        self, priority: Priority, among: Iterable[Record] | None, may_start: Callable[[Record], bool], now: float
    ) -> Iterator[tuple[Record, Worker]]:
        free = self._free()
        for record in self._in_turn(priority, among) if free else ():
            if not may_start(record):
                continue
            home, best = self._home(record), self._choose(record, free)
            if home is None or best is home:
                yield self._assign(record, best)
                if not (free := self._free()):
                    return
            elif home in free or home.leaving or self._waited(record, now):
                self.dequeue(record)
                self._stranded.append(record)

    def take_stranded(self) -> list[Record]:
        """Those, out of the queue, that are to start elsewhere than where their KV is."""
        stranded, self._stranded = self._stranded, []
        return stranded

    def _free(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.room > 0]

    def _waited(self, record: Record, now: float) -> bool:
        """Whether it has waited for its home for as long as it is to; from now on, if it did not wait yet."""
        if record.refused_at is None:
            record.refused_at = now
        return now - record.refused_at >= self._patience(record)

    @property
    def evaluation(self) -> list[Record]:
        """Queued, and to go first."""
        return list(itertools.takewhile(lambda record: record.priority is Priority.EVAL, self._queue))

    def _in_turn(self, priority: Priority, among: Iterable[Record] | None) -> list[Record]:
        if priority is Priority.EVAL:
            queue = self.evaluation
        elif among is None:
            queue = self._queue[len(self.evaluation) :]
        else:
            queue = sorted((record for record in among if record.phase is Phase.QUEUED), key=_order)
        if self._to_go is None:
            return queue
        to_go = self._to_go
        return sorted(queue, key=lambda record: (-to_go(record), record.order))

    def _home(self, record: Record) -> Worker | None:
        return self._workers.get(record.home.worker) if record.home is not None else None

    def _assign(self, record: Record, worker: Worker) -> tuple[Record, Worker]:
        self.dequeue(record)
        worker.running.add(record.trajectory_id)
        return record, worker


def _order(record: Record) -> tuple[int, int]:
    return (0 if record.priority is Priority.EVAL else 1, record.order)
