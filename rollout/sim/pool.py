"""The pool of the node on the virtual clock: the real ledger, and exports that go as those of `cluster.pool` go.

An export finds what is stored, has the worker send the rest of the prompt and then what only the trajectory has,
in one call if the latter is little, and is charged as a whole before. Siblings wait while one of them sends the
prompt. There are no objects, so nothing is ever damaged, split or lost, and no export is given up for being late.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollout.control.commands import Export
from rollout.control.messages import Displaced, Exported, ExportFailed, PoolRoom
from rollout.errors import KVError, SupersededError
from rollout.kv.keys import PageKey
from rollout.kv.ledger import Place, PoolLedger
from rollout.sim.clock import Clock, Lane, Process
from rollout.sim.machine import MachineRates
from rollout.sim.worker import SimWorker
from rollout.types import Image, NodeId, SegmentId, SegmentRun, TrajectoryId, Turn

JOINED_BYTES = 32 << 20
"""As `cluster.jobs.JOINED_BYTES`."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """An export under way."""

    order: Export
    claim: int
    turn: Turn
    runs: list[SegmentRun] = field(default_factory=list)
    sent: int = 0
    displaced: list[Displaced] = field(default_factory=list)

    @property
    def pages(self) -> int:
        return sum(run.pages for run in self.runs)


class SimPool:
    """One for all workers."""

    def __init__(
        self,
        node: NodeId,
        rates: MachineRates,
        clock: Clock,
        *,
        answer: Callable[[Exported | ExportFailed | PoolRoom], None],
        check: bool,
    ) -> None:
        """`answer` is called when an answer reaches the controller. With `check` the books are checked after every
        change."""
        self.node = node
        self.sent_bytes = 0
        self.shared_bytes = 0
        """Not sent, since they were here."""
        self.ledger = PoolLedger(rates.pool_bytes)
        self._rates = rates
        self._clock = clock
        self._answer = answer
        self._check = check
        self._prompts: dict[PageKey, Lane] = {}
        self._jobs: dict[int, _Job] = {}
        self._told: int | None = None
        """The room that the controller knows of, or is about to."""
        self._telling = False
        self._named = 0
        self._tell_room()

    def export(self, worker: SimWorker, order: Export) -> None:
        """Store what is missing of a parked sequence's KV, then have the worker free it if that is ordered."""
        self._clock.spawn(self._export(worker, order))

    def expect(self, trajectory: TrajectoryId, turn: Turn) -> None:
        """This is when the trajectory's image, or the one that is being exported, will be needed."""
        self.ledger.expect(trajectory, turn)
        for job in self._jobs.values():
            if job.order.trajectory_id == trajectory:
                job.turn = turn

    def retain(self, trajectory: TrajectoryId, segments: frozenset[SegmentId]) -> None:
        """From now on the trajectory needs exactly these."""
        self.ledger.retain(trajectory, segments)
        self._changed()

    def drop(self, segment: SegmentId) -> None:
        self.ledger.drop(segment)
        self._changed()

    def lease(self, segments: Sequence[SegmentId], ttl_s: float) -> int:
        """Keep segments readable until `close_lease`. Raises `SegmentMissingError` if one is not stored."""
        self.ledger.expire(self._clock.now)
        return self.ledger.lease(segments, self._clock.now + ttl_s)

    def close_lease(self, lease: int) -> None:
        self.ledger.close_lease(lease)
        self._changed()

    def _export(self, worker: SimWorker, order: Export) -> Process:
        began = self._clock.now
        claim = self.ledger.open_claim(order.trajectory_id)
        job = self._jobs[claim] = _Job(order=order, claim=claim, turn=order.turn)
        error: KVError | None = None
        try:
            yield from self._store(worker, job)
            self._complete(job)
        except KVError as failure:
            error = failure
        del self._jobs[claim]
        self.ledger.end_claim(claim)
        self._changed()
        key, latency_s = (order.trajectory_id, order.epoch), self._rates.latency_s
        displaced = tuple(job.displaced)
        if error is None and order.release:
            self._clock.after(latency_s, lambda: worker.release(key))
        answer: Exported | ExportFailed
        if error is None:
            answer = Exported(
                trajectory_id=key[0],
                epoch=key[1],
                image=Image(runs=tuple(job.runs), kv_tokens=order.kv_tokens, written=order.written),
                sent_bytes=job.sent,
                seconds=self._clock.now - began + latency_s,
                displaced=displaced,
            )
        else:
            text = f"{type(error).__name__}: {error}"
            answer = ExportFailed(trajectory_id=key[0], epoch=key[1], error=text, displaced=displaced)
        self._clock.after(latency_s, lambda: self._answer(answer))

    def _store(self, worker: SimWorker, job: _Job) -> Process:
        order, page_tokens = job.order, self._rates.page_tokens
        job.runs = self._usable(order.base)
        self.ledger.hold(job.claim, {run.segment for run in job.runs})
        if order.prompt_pages > job.pages:
            lane = self._prompts.setdefault(PageKey(order.page_keys[order.prompt_pages - 1]), Lane(self._clock))
            yield lane
            try:
                self._find(job)
                yield from self._send(worker, job, order.prompt_pages)
            finally:
                lane.leave()
        self._find(job)
        yield from self._send(worker, job, -(-order.kv_tokens // page_tokens))

    def _send(self, worker: SimWorker, job: _Job, end: int) -> Process:
        """Continue the runs up to page `end` with a segment that the worker sends, and with what follows in the same
        call if that is little and not stored already."""
        first, order = job.pages, job.order
        if first >= end:
            return
        all_pages = -(-order.kv_tokens // self._rates.page_tokens)
        displaced = self.ledger.reserve(job.claim, self._nbytes(order, first, all_pages), job.turn)
        job.displaced += [Displaced(trajectory_id=t, segments=segments) for t, segments in displaced.items()]
        self._changed()
        parts = [(first, end)]
        if end < all_pages and self._nbytes(order, end, all_pages) <= JOINED_BYTES:
            next_key = [PageKey(key) for key in order.page_keys[end : end + 1]]
            parts += [] if self.ledger.find(next_key) else [(end, all_pages)]
        nbytes = sum(self._nbytes(order, *part) for part in parts)
        yield from worker.export((order.trajectory_id, order.epoch), nbytes)
        for since, upto in parts:
            self._commit(job, since, upto)

    def _commit(self, job: _Job, first: int, stop: int) -> None:
        self._named += 1
        segment = SegmentId(f"s{self._named}")
        nbytes = self._nbytes(job.order, first, stop)
        self.ledger.commit(job.claim, segment, nbytes, [PageKey(key) for key in job.order.page_keys[first:stop]])
        job.sent += nbytes
        job.runs.append(SegmentRun(node=self.node, segment=segment, first=0, pages=stop - first))

    def _complete(self, job: _Job) -> None:
        order = job.order
        if self.ledger.superseded(job.claim, order.epoch):
            raise SupersededError(f"{order.trajectory_id}: a later export than that of epoch {order.epoch} is stored")
        self.ledger.complete(job.claim, epoch=order.epoch, turn=job.turn, kv_tokens=order.kv_tokens)
        self.sent_bytes += job.sent

    def _usable(self, base: Image | None) -> list[SegmentRun]:
        """The whole pages of an earlier image, up to the first segment that is gone."""
        runs: list[SegmentRun] = []
        left = base.kv_tokens // self._rates.page_tokens if base is not None else 0
        for run in base.runs if base is not None else ():
            if not left or not self.ledger.holds(run.segment):
                break
            pages = min(run.pages, left)
            runs.append(SegmentRun(node=run.node, segment=run.segment, first=run.first, pages=pages))
            left -= pages
        return runs

    def _find(self, job: _Job) -> None:
        """Continue the runs with pages that are stored already."""
        places = self.ledger.find([PageKey(key) for key in job.order.page_keys[job.pages :]])
        self.ledger.hold(job.claim, {place.segment for place in places})
        self.shared_bytes += len(places) * self._rates.page_bytes
        job.runs += self._as_runs(places)

    def _as_runs(self, places: Sequence[Place]) -> list[SegmentRun]:
        """Consecutive places joined to runs."""
        runs: list[SegmentRun] = []
        for place in places:
            last = runs[-1] if runs else None
            if last is not None and last.segment == place.segment and last.first + last.pages == place.index:
                runs[-1] = SegmentRun(node=self.node, segment=last.segment, first=last.first, pages=last.pages + 1)
            else:
                runs.append(SegmentRun(node=self.node, segment=place.segment, first=place.index, pages=1))
        return runs

    def _nbytes(self, order: Export, first: int, stop: int) -> int:
        """Of pages [first, stop) of the image, the last packed to its tokens."""
        page_tokens = self._rates.page_tokens
        return (min(stop * page_tokens, order.kv_tokens) - first * page_tokens) * self._rates.token_bytes

    def _changed(self) -> None:
        """The ledger did: nobody keeps objects here, but the controller wants to know what room there is."""
        self.ledger.take_gone()
        if self._check:
            self.ledger.audit()
        self._tell_room()

    def _tell_room(self) -> None:
        """One message at a time: what changes meanwhile is told after it."""
        if self._telling or self._told == self.ledger.free:
            return
        self._telling, self._told = True, self.ledger.free
        room = PoolRoom(node=self.node, free_bytes=self.ledger.free, budget_bytes=self.ledger.budget)

        def arrive() -> None:
            self._telling = False
            self._answer(room)
            self._tell_room()

        self._clock.after(self._rates.latency_s, arrive)
