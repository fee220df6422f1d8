"""What the next step does: who is admitted, restored, prefilled, decoded, preempted. Plans only, no torch.

First come, first served; a preempted sequence goes back to the front. A sequence gets pages for all it
knows when it is admitted and one more page at a time while it decodes; when pages run out the youngest
running one gives its pages up. A prompt whose next page a running sequence is about to compute waits for it.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rollout.engine.sequence import Sequence, Status
from rollout.kv.cache import FreedPages, KVCache
from rollout.types import SequenceKey


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
    restored_tokens: int
    """To be restored; until then the sequence does not run."""
    recomputed_tokens: int


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
    """Longest prefill chunk of one sequence; in deterministic mode chunks end at multiples of it."""
    prefill_tokens: int
    """Prompt tokens of all chunks together."""
    deterministic: bool


class Scheduler:
    """Queues of sequences and the pages they hold."""

    def __init__(self, cache: KVCache, limits: Limits, weights_id: str) -> None:
        self._cache = cache
        self._limits = limits
        self._weights_id = weights_id
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        """In order of admission; those restoring included."""
        self._parked: dict[SequenceKey, Sequence] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def parked(self) -> int:
        return len(self._parked)

    def sequences(self) -> Iterator[Sequence]:
        yield from self._waiting
        yield from self._running
        yield from self._parked.values()

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def plan(self) -> Plan:
        """Decide the next step and move pages for it."""
        preempted = self._make_room()
        admitted = self._admit() if not preempted else ()
        ready = [sequence for sequence in self._running if sequence.status is Status.RUNNING]
        return Plan(
            admitted=admitted,
            prefill=self._chunks(sequence for sequence in ready if sequence.needs_prefill),
            decode=tuple(sequence for sequence in ready if not sequence.needs_prefill),
            preempted=preempted,
        )

    def restored(self, sequence: Sequence, tokens: int) -> None:
        """The copy into a restoring sequence's pages is over: positions [0, tokens) have KV."""
        self._cache.settle(sequence.pages)
        sequence.computed = tokens
        sequence.kv_seen = max(sequence.kv_seen, tokens)
        sequence.status = Status.RUNNING
        self.share(sequence)

    def restore_cancelled(self, sequence: Sequence) -> None:
        """The copy never began: only what came from the tree has KV."""
        self._cache.settle(sequence.pages)
        sequence.status = Status.RUNNING

    def restore_failed(self, sequence: Sequence) -> None:
        """The copy failed: the sequence starts again without its image."""
        self._cache.settle(sequence.pages)
        sequence.image = None
        self._requeue(sequence)

    def share(self, sequence: Sequence) -> None:
        """Put the whole pages that others may use into the prefix tree."""
        self._cache.commit(sequence.pages, sequence.tokens, sequence.shareable_end)

    def finish(self, sequence: Sequence) -> None:
        """Out of the engine; what the tree may keep stays there."""
        self._leave(sequence)
        if sequence.holding is not None:
            self.share(sequence)
            self._cache.close(sequence.holding, keep_exclusive=True)
            sequence.holding = None

    def park(self, sequence: Sequence) -> None:
        """Out of the batch, pages held until `release`."""
        self._leave(sequence)
        sequence.status = Status.PARKED
        self._parked[sequence.key] = sequence

    def release(self, key: SequenceKey) -> FreedPages | None:
        """Free all that only a parked sequence used; None if no such sequence is parked."""
        sequence = self._parked.pop(key, None)
        if sequence is None:
            return None
        if sequence.holding is None:
            return FreedPages(exclusive=0, freed=0)
        freed = self._cache.close(sequence.holding, keep_exclusive=False)
        sequence.holding = None
        return freed

    def _leave(self, sequence: Sequence) -> None:
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)

    def _make_room(self) -> tuple[Sequence, ...]:
        """One more page for every decoding sequence that needs it, oldest first, preempting the youngest."""
        preempted: list[Sequence] = []
        for sequence in list(self._running):
            if sequence.status is not Status.RUNNING or sequence.needs_prefill:
                continue
            while sequence.status is Status.RUNNING:
                if self._cache.grow(sequence.pages, self._cache.pages_for(sequence.computed + 1)):
                    break
                victim = next(s for s in reversed(self._running) if s.status is Status.RUNNING)
                preempted.append(victim)
                self._requeue(victim)
        return tuple(preempted)

    def _requeue(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._cache.close(sequence.pages, keep_exclusive=True)
        sequence.holding = None
        sequence.computed = 0
        sequence.status = Status.WAITING
        self._waiting.appendleft(sequence)

    def _admit(self) -> tuple[Admission, ...]:
        admitted: list[Admission] = []
        for sequence in list(self._waiting):
            if len(self._running) >= self._limits.max_running:
                break
            cached = self._stored(sequence)
            if self._sibling_computes(sequence, cached + self._unit):
                continue
            if not self._fits(sequence, cached):
                break
            self._waiting.remove(sequence)
            self._running.append(sequence)
            admitted.append(self._open(sequence, cached))
        return tuple(admitted)

    def _fits(self, sequence: Sequence, cached: int) -> bool:
        """Whether there are pages for what it knows, and one more for each running sequence."""
        cache = self._cache
        pages, evictable = cache.stored_pages(self._weights_id, sequence.tokens, cached)
        need = cache.pages_for(len(sequence.tokens)) - pages + len(self._running)
        return need <= cache.available - evictable

    def _open(self, sequence: Sequence, cached: int) -> Admission:
        """Pages for a sequence: the longest useful prefix of the tree, then its image, then fresh ones."""
        cache = self._cache
        holding = cache.open(sequence.trajectory_id, self._weights_id, sequence.tokens, cached)
        image_tokens = sequence.image.kv_tokens if sequence.image is not None else 0
        restored = max(0, image_tokens - cached)
        grown = not restored or cache.grow(holding, cache.pages_for(image_tokens), reserved=True)
        grown = grown and cache.grow(holding, cache.pages_for(len(sequence.tokens)))
        assert grown, (len(sequence.tokens), cache.counts)
        sequence.status = Status.RESTORING if restored else Status.RUNNING
        sequence.holding = holding
        sequence.computed = cached
        return Admission(
            sequence=sequence,
            cached_tokens=cached,
            restored_tokens=restored,
            recomputed_tokens=max(0, sequence.kv_seen - cached - restored),
        )

    @property
    def _unit(self) -> int:
        """Prefixes are reused in multiples of this: whole pages; in deterministic mode whole chunks."""
        return self._limits.chunk_tokens if self._limits.deterministic else self._cache.page_tokens

    def _stored(self, sequence: Sequence) -> int:
        """Tokens of the longest prefix that the sequence can take from the tree."""
        unit = self._unit
        end = sequence.reusable_end // unit * unit
        pages, _ = self._cache.stored_pages(self._weights_id, sequence.tokens, end)
        return pages * self._cache.page_tokens // unit * unit

    def _sibling_computes(self, sequence: Sequence, end: int) -> bool:
        """Whether a running prefill is about to write positions up to `end` that this sequence could reuse."""
        if end > sequence.reusable_end:
            return False
        return any(
            other.status is Status.RUNNING
            and other.computed < end <= other.prefill_end
            and other.tokens[:end] == sequence.tokens[:end]
            for other in self._running
        )

    def _chunks(self, sequences: Iterator[Sequence]) -> tuple[Chunk, ...]:
        chunks: list[Chunk] = []
        budget = self._limits.prefill_tokens
        for sequence in sequences:
            if budget <= 0:
                break
            start = sequence.computed
            length = self._limits.chunk_tokens
            if self._limits.deterministic:
                length -= start % length
            else:
                length = min(length, budget)
            end = min(start + length, sequence.prefill_end)
            chunks.append(Chunk(sequence=sequence, start=start, end=end))
            budget -= self._limits.chunk_tokens if self._limits.deterministic else end - start
        return tuple(chunks)
