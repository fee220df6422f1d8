"""What the next step does: who is admitted, restored, prefilled, decoded, preempted. Plans only, no torch.

First come, first served; a preempted sequence goes back to the front. A sequence gets pages for all it
knows when it is admitted and one more page at a time while it decodes; when pages run out the youngest
running one gives its pages up, or is parked before, where pages are to be spare. A prompt whose next page a
running sequence is about to compute waits for it.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from rollout.engine.images import Images
from rollout.engine.live import LiveWeights
from rollout.engine.rates import Rates
from rollout.engine.sequence import Sequence, Status
from rollout.engine.sources import Sources, find_sources
from rollout.kv.cache import KVCache
from rollout.kv.tiers import Tier

CHUNK_TOKENS = 128
"""Longest piece of one sequence that is prefilled in a step, where it is not configured and pages are not longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Positions [start, end) of one sequence, to prefill."""

    sequence: Sequence
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A sequence that got its pages in this plan, with where its KV comes from, in tokens."""

    sequence: Sequence
    cached_tokens: int
    loaded_tokens: int
    """To be copied from the host; until then the sequence does not run."""
    restored_tokens: int
    """To be read from the pool; likewise."""
    recomputed_tokens: int

    @property
    def known_tokens(self) -> int:
        """Positions that have KV when it runs."""
        return self.cached_tokens + self.loaded_tokens + self.restored_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step."""

    admitted: tuple[Admission, ...]
    prefill: tuple[Chunk, ...]
    decode: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one step may do."""

    max_running: int
    """Sequences that hold pages and run or restore."""
    chunk_tokens: int
    """Longest prefill chunk of one sequence; where history is replayed chunks end at multiples of it."""
    prefill_tokens: int
    """Prompt tokens of all chunks together."""
    replays: bool
    """Deterministic mode with kernels whose bits depend on the batch: what is recomputed is run as it was at first."""
    spare_pages: int = 0
    """With fewer device pages to be had than this, the youngest running sequence is to be parked."""


class Scheduler:
    """Queues of sequences and the pages they hold."""

    def __init__(self, cache: KVCache, images: Images, rates: Rates, live: LiveWeights, limits: Limits) -> None:
        self._cache = cache
        self._images = images
        self._rates = rates
        self._live = live
        self._limits = limits
        # Keys only, so that one of many leaves in constant time.
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()
        self._running: dict[Sequence, None] = {}
        """In order of admission; those restoring included."""
        self._admissions = itertools.count()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def sequences(self) -> Iterator[Sequence]:
        yield from self._waiting
        yield from self._running

    def running_sequences(self) -> Iterator[Sequence]:
        """Those that hold pages, in order of admission."""
        return iter(self._running)

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence] = None

    def plan(self) -> Plan:
        """Decide the next step and move pages for it."""
        preempted, stalled = self._make_room()
        admitted = self._admit() if self._waiting and not preempted and not stalled else ()
        prefill: list[Sequence] = []
        decode: list[Sequence] = []
        for sequence in self._running:
            if sequence.status is Status.RUNNING and not sequence.only_loads:
                (prefill if sequence.needs_prefill else decode).append(sequence)
        if stalled:
            decode = [sequence for sequence in decode if sequence not in stalled]
        return Plan(admitted=admitted, prefill=self._chunks(prefill), decode=tuple(decode), preempted=preempted)

    def only_parked(self) -> list[Sequence]:
        """Running sequences that have their KV and were only to get it."""
        return [sequence for sequence in self._running if sequence.status is Status.RUNNING and sequence.only_loads]

    def giving_way(self) -> Sequence | None:
        """The youngest running sequence, if it is to be parked so that there are spare pages; one at a time.

        Not as long as pages of an earlier one wait to be exported or copied: they are about to be free. What is parked
        keeps its KV, which a preemption would drop.
        """
        cache = self._cache
        spare = self._limits.spare_pages
        if not spare or len(self._running) < 2 or cache.available >= spare:
            return None
        if cache.leaving or self._images.pinned:
            return None
        running = (s for s in reversed(self._running) if s.status is Status.RUNNING and not s.only_loads)
        return next(running, None)

    def restored(self, sequence: Sequence, tokens: int) -> None:
        """The copies into a restoring sequence's pages are over: positions [0, tokens) have KV."""
        self._cache.settle(sequence.pages)
        sequence.computed = tokens
        sequence.kv_seen = max(sequence.kv_seen, tokens)
        sequence.status = Status.RUNNING
        self.share(sequence)

    def restore_cancelled(self, sequence: Sequence) -> None:
        """The copy from the pool never began, and there was no other: only what was on the device has KV."""
        self._cache.settle(sequence.pages)
        sequence.status = Status.RUNNING

    def restart(self, sequence: Sequence) -> None:
        """The copies into a restoring sequence's pages are over, but one failed, or what they brought is of no use: it
        starts again without that."""
        self._cache.settle(sequence.pages)
        self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """A running sequence waits again without its KV, first in line but for those that were admitted before it."""
        del self._running[sequence]
        self._cache.close(sequence.pages)
        sequence.holding = None
        sequence.computed = 0
        sequence.outdated = False
        sequence.status = Status.WAITING
        earlier = [*itertools.takewhile(lambda other: other.admission < sequence.admission, self._waiting)]
        for each in (sequence, *reversed(earlier)):
            self._waiting[each] = None
            self._waiting.move_to_end(each, last=False)

    def share(self, sequence: Sequence) -> None:
        """Put the whole pages that have KV into the prefix tree."""
        self._cache.commit(sequence.pages, sequence.key_of(sequence.shareable_end))

    def finish(self, sequence: Sequence) -> None:
        """Out of the engine; what the tree may keep stays there."""
        self.leave(sequence)
        if sequence.holding is not None:
            self.share(sequence)
            self._cache.close(sequence.holding)
            sequence.holding = None

    def leave(self, sequence: Sequence) -> None:
        """Out of the queues; its holding is the caller's."""
        if sequence.status is Status.WAITING:
            del self._waiting[sequence]
        else:
            del self._running[sequence]

    def _make_room(self) -> tuple[tuple[Sequence, ...], list[Sequence]]:
        """One more page for every decoding sequence that needs it, oldest first, preempting the youngest.

        A sequence whose page is on its way out, or held by an export or a copy, sits the step out: preempting would
        not help.
        """
        preempted: list[Sequence] = []
        stalled: list[Sequence] = []
        full = [s for s in self._running if s.full and s.status is Status.RUNNING]
        full = [s for s in full if not s.needs_prefill and not s.only_loads]
        if self._cache.grow_each([sequence.pages for sequence in full]):
            return (), []
        for sequence in full:
            while sequence.status is Status.RUNNING:
                if self._cache.grow(sequence.pages, self._cache.pages_for(sequence.computed + 1)):
                    break
                victim = next(s for s in reversed(self._running) if s.status is Status.RUNNING)
                held = self._images.pinned or self._cache.tiered.flights
                if self._cache.leaving or (victim is sequence and held):
                    stalled.append(sequence)
                    break
                preempted.append(victim)
                self.requeue(victim)
        return tuple(preempted), stalled

    def _admit(self) -> tuple[Admission, ...]:
        admitted: list[Admission] = []
        for sequence in list(self._waiting):
            if len(self._running) >= self._limits.max_running:
                break
            sources = find_sources(sequence, self._cache, self._images, self._rates, self._live, unit=self._unit)
            if sources.arriving or self._sibling_computes(sequence, sources):
                continue
            admission = self._open(sequence, sources) if self._fits(sequence, sources) else None
            if admission is None:
                break
            del self._waiting[sequence]
            self._running[sequence] = None
            sequence.admission = next(self._admissions)
            admitted.append(admission)
        return tuple(admitted)

    def _fits(self, sequence: Sequence, sources: Sources) -> bool:
        """Whether there are pages for what it knows, and one more for each running sequence.

        Beside others it also leaves twice the spare pages, or it would have to give way almost at once.
        """
        evictable = min(sources.device, sources.stored.evictable)
        need = self._cache.pages_for(len(sequence.tokens)) - sources.device + len(self._running)
        need += 2 * self._limits.spare_pages if self._running else 0
        return need <= self._cache.available - evictable

    def _open(self, sequence: Sequence, sources: Sources) -> Admission | None:
        """Pages for a sequence, and the copies that fill them; None if some are still on their way out."""
        cache = self._cache
        key = sequence.key_of(sources.stored_tokens)
        pages = cache.pages_for(len(sequence.tokens))
        root = sources.written.first.weights_id
        holding = cache.open(sequence.trajectory_id, root, key, sources.device)
        tail = sources.tail
        room = pages - sources.device
        if tail is not None:
            room -= len(tail.tail.get(Tier.DEVICE, ()))
            cache.kept.hold_tail(tail, held=True)
        roomy = (
            cache.load(holding, key, sources.device + sources.host, room=room)
            if sources.host
            else cache.make_room(room)
        )
        if not roomy:
            cache.close(holding)
            if tail is not None:
                cache.kept.hold_tail(tail, held=False)
            return None
        if tail is not None:
            cache.adopt(tail, holding)
            self._images.adopted(sequence.trajectory_id)
        else:
            self._images.resumed(sequence.trajectory_id)
        restored = max(0, sources.image_tokens - sources.stored_tokens) if tail is None else 0
        grown = not restored or cache.grow(holding, cache.pages_for(sources.image_tokens), reserved=True)
        grown = grown and cache.grow(holding, pages)
        assert grown, (len(sequence.tokens), cache.stats())
        cache.admitted(holding, sources.stored, sources.wanted)
        sequence.write(sources.written)
        sequence.holding = holding
        sequence.restoring = restored > 0
        sequence.status = Status.RESTORING if restored or holding.loads else Status.RUNNING
        known = sources.stored_tokens + restored if tail is None else tail.tokens
        sequence.computed = sources.device * cache.page_tokens if sequence.status is Status.RESTORING else known
        loaded = known - restored - sources.device * cache.page_tokens if holding.loads else 0
        return Admission(
            sequence=sequence,
            cached_tokens=known - restored - loaded,
            loaded_tokens=loaded,
            restored_tokens=restored,
            recomputed_tokens=max(0, sequence.kv_seen - known),
        )

    @property
    def _unit(self) -> int:
        """Prefixes of a prompt are reused in multiples of this: whole pages; where history is replayed whole chunks."""
        return self._limits.chunk_tokens if self._limits.replays else self._cache.page_tokens

    def _sibling_computes(self, sequence: Sequence, sources: Sources) -> bool:
        """Whether a running prefill is about to write the positions behind those stored, for this sequence to reuse."""
        end = sources.stored_tokens + self._unit
        if end > sequence.reusable_end or sources.written.first != self._live.weights:
            return False
        return any(
            other.status is Status.RUNNING
            and other.computed < end <= other.written.pure(other.prefill_end)
            and other.written.first == self._live.weights
            and other.tokens[:end] == sequence.tokens[:end]
            for other in self._running
        )

    def _chunks(self, sequences: list[Sequence]) -> tuple[Chunk, ...]:
        chunks: list[Chunk] = []
        budget = self._limits.prefill_tokens
        for sequence in sequences:
            if budget <= 0:
                break
            start = sequence.computed
            length = self._limits.chunk_tokens
            if self._limits.replays:
                length -= start % length
            else:
                length = min(length, budget)
            end = min(start + length, sequence.prefill_end)
            chunks.append(Chunk(sequence=sequence, start=start, end=end))
            budget -= self._limits.chunk_tokens if self._limits.replays else end - start
        return tuple(chunks)
