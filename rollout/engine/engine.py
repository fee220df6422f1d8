"""One decode engine: `step()` polls copies, plans, runs the model, commits, and hands out events.

One thread owns an engine. It knows no Ray and no text; it is told what to do by `submit`, `abort` and
`release`, between steps, and tells what happened by the events that `step` returns. A parked sequence
keeps its pages until it is released; an abort takes effect at once, without another forward.
"""

import math

from rollout.control.messages import (
    Admitted,
    Assignment,
    Failed,
    Finished,
    Freed,
    Parked,
    Preempted,
    RestoreFailed,
    Sampled,
    WorkerEvent,
)
from rollout.engine.runner import Draw, Runner
from rollout.engine.scheduler import Admission, Plan, Scheduler
from rollout.engine.sequence import Sequence, Status
from rollout.errors import DeadlineError, InvalidPromptError, KVError, PromptTooLongError, SegmentError
from rollout.kv.cache import KVCache
from rollout.kv.keys import Fingerprint, page_keys, root_key
from rollout.kv.restore import Restorer
from rollout.metrics import EngineStats
from rollout.types import Columns, NodeId, SegmentId, SequenceKey, Version


class Engine:
    """Runs assignments to their end, their slice or their abort."""

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        cache: KVCache,
        restorer: Restorer,
        fingerprint: Fingerprint,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        max_context: int,
        deterministic: bool,
        weights_id: str,
        version: Version,
    ) -> None:
        assert cache.pages_for(max_context) <= cache.total, (max_context, cache.total)
        self._runner = runner
        self._scheduler = scheduler
        self._cache = cache
        self._restorer = restorer
        self._root = root_key(fingerprint)
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._max_context = max_context
        self._deterministic = deterministic
        self._weights_id = weights_id
        self._version = version
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._admissions: dict[SequenceKey, Admission] = {}
        """Of sequences that are restoring."""
        self._events: list[WorkerEvent] = []
        self.blocked = False
        """The last step could run nothing: only a command or a completed copy changes that."""
        self._steps = 0
        self._prefilled = 0
        self._decoded = 0
        self._sampled = 0
        self._cached = 0
        self._preemptions = 0

    def submit(self, assignment: Assignment) -> None:
        """Queue an assignment.

        Raises `PromptTooLongError` or `InvalidPromptError`; nothing is queued then.
        """
        prompt = assignment.prompt_ids
        max_context = min(self._max_context, assignment.max_context)
        if len(prompt) + len(assignment.output) >= max_context:
            raise PromptTooLongError(
                f"{assignment.trajectory_id}: {len(prompt) + len(assignment.output)} tokens, "
                f"allowed: fewer than the context of {max_context}"
            )
        if not prompt or not all(0 <= token < self._vocab_size for token in prompt):
            raise InvalidPromptError(f"{assignment.trajectory_id}: token ids must be in 0 … {self._vocab_size - 1}")
        sequence = Sequence(
            assignment, eos_ids=self._eos_ids, max_context=max_context, deterministic=self._deterministic
        )
        assert sequence.key not in self._sequences, f"{sequence.key} submitted twice"
        self._sequences[sequence.key] = sequence
        self._scheduler.add(sequence)

    def abort(self, key: SequenceKey) -> None:
        """Park a sequence at once; if its restore has begun, as soon as that is completed.

        Nothing happens if the sequence is already parked, over or unknown.
        """
        sequence = self._sequences.get(key)
        if sequence is None or sequence.status is Status.PARKED:
            return
        if sequence.status is Status.RESTORING:
            if not self._restorer.cancel(key):
                sequence.abort = True
                return
            del self._admissions[key]
            self._scheduler.restore_cancelled(sequence)
        self._park(sequence)

    def release(self, key: SequenceKey) -> None:
        """Free the pages of a parked sequence; nothing happens if it is not parked."""
        freed = self._scheduler.release(key)
        if freed is not None:
            del self._sequences[key]
            self._events.append(
                Freed(trajectory_id=key[0], epoch=key[1], exclusive_pages=freed.exclusive, freed_pages=freed.freed)
            )

    def parked_pages(self, key: SequenceKey) -> tuple[int, ...]:
        """Page numbers of a parked sequence; nobody writes to them until it is released."""
        sequence = self._sequences[key]
        assert sequence.status is Status.PARKED, (key, sequence.status)
        return tuple(sequence.holding.table) if sequence.holding is not None else ()

    @property
    def idle(self) -> bool:
        """Whether `step` would have nothing to run or tell."""
        return not (self._scheduler.waiting or self._scheduler.running or self._events)

    def step(self) -> list[WorkerEvent]:
        """Run one step; returns what happened since the last one, in order."""
        self._complete_restores()
        plan = self._scheduler.plan()
        self.blocked = not (plan.admitted or plan.prefill or plan.decode or plan.preempted)
        self._launch(plan)
        draws = self._runner.run(plan)
        self._commit(plan, draws)
        self._steps += 1
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        self._restorer.close()

    def audit(self) -> None:
        """Recompute page accounting from the structures; asserts if a counter is wrong."""
        sequences = list(self._scheduler.sequences())
        assert {sequence.key for sequence in sequences} == set(self._sequences), "scheduler and engine differ"
        self._cache.audit(sequence.holding for sequence in sequences if sequence.holding is not None)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            steps=self._steps,
            waiting=self._scheduler.waiting,
            running=self._scheduler.running,
            parked=self._scheduler.parked,
            prefilled_tokens=self._prefilled,
            decoded_tokens=self._decoded,
            sampled_tokens=self._sampled,
            cached_tokens=self._cached,
            restored_bytes=self._restorer.restored_bytes,
            preemptions=self._preemptions,
            evicted_pages=self._cache.evicted_pages,
            pages=self._cache.counts,
        )

    def _complete_restores(self) -> None:
        for done in self._restorer.poll():
            sequence = self._sequences[done.key]
            admission = self._admissions.pop(done.key)
            if done.error is None:
                self._scheduler.restored(sequence, done.tokens)
                self._tell_admitted(admission)
            else:
                self._scheduler.restore_failed(sequence)
                self._events.append(_restore_failed(sequence, done.error))
            if sequence.abort:
                self._park(sequence)

    def _launch(self, plan: Plan) -> None:
        """Start the copies that the plan asks for, and tell what it decided."""
        for sequence in plan.preempted:
            self._preemptions += 1
            self._events.append(Preempted(trajectory_id=sequence.trajectory_id, epoch=sequence.epoch))
        for admission in plan.admitted:
            sequence = admission.sequence
            if sequence.status is not Status.RESTORING:
                self._tell_admitted(admission)
                continue
            image = sequence.image
            assert image is not None
            first = sequence.pages.shared
            self._admissions[sequence.key] = admission
            self._restorer.submit(sequence.key, image, first, sequence.pages.table[first : image.pages])

    def _commit(self, plan: Plan, draws: list[Draw]) -> None:
        for chunk in plan.prefill:
            chunk.sequence.advance(chunk.end - chunk.start)
            self._prefilled += chunk.end - chunk.start
            self._scheduler.share(chunk.sequence)
        for sequence in plan.decode:
            sequence.advance(1)
            self._decoded += 1
        for draw in draws:
            sequence = draw.sequence
            if math.isnan(draw.logprob):
                self._fail(sequence, "the model's logits are not numbers")
                continue
            offset = len(sequence.columns)
            reason = sequence.accept(draw.token, draw.logprob, self._version)
            self._sampled += 1
            columns = Columns([draw.token], [draw.logprob], [self._version])
            self._events.append(
                Sampled(trajectory_id=sequence.trajectory_id, epoch=sequence.epoch, offset=offset, columns=columns)
            )
            if reason is not None:
                self._scheduler.finish(sequence)
                del self._sequences[sequence.key]
                self._events.append(Finished(trajectory_id=sequence.trajectory_id, epoch=sequence.epoch, reason=reason))
            elif sequence.slice_over:
                self._park(sequence)

    def _fail(self, sequence: Sequence, error: str) -> None:
        self._scheduler.park(sequence)
        self._scheduler.release(sequence.key)
        del self._sequences[sequence.key]
        self._events.append(Failed(trajectory_id=sequence.trajectory_id, epoch=sequence.epoch, error=error))

    def _park(self, sequence: Sequence) -> None:
        self._scheduler.park(sequence)
        page_tokens = self._cache.page_tokens
        whole = sequence.computed // page_tokens
        keys = page_keys(
            self._root,
            sequence.tokens,
            pages=whole,
            page_tokens=page_tokens,
            weights_id=self._weights_id,
            prefilled=sequence.prompt_tokens if self._deterministic else None,
        )
        self._events.append(
            Parked(
                trajectory_id=sequence.trajectory_id,
                epoch=sequence.epoch,
                kv_tokens=sequence.computed,
                prompt_pages=min(sequence.computed, sequence.prompt_tokens) // page_tokens,
                page_keys=keys,
            )
        )

    def _tell_admitted(self, admission: Admission) -> None:
        self._cached += admission.cached_tokens
        self._events.append(
            Admitted(
                trajectory_id=admission.sequence.trajectory_id,
                epoch=admission.sequence.epoch,
                cached_tokens=admission.cached_tokens,
                restored_tokens=admission.restored_tokens,
                recomputed_tokens=admission.recomputed_tokens,
            )
        )


def _restore_failed(sequence: Sequence, error: KVError | DeadlineError) -> RestoreFailed:
    bad = error if isinstance(error, SegmentError) and error.node and error.segment else None
    return RestoreFailed(
        trajectory_id=sequence.trajectory_id,
        epoch=sequence.epoch,
        error=f"{type(error).__name__}: {error}",
        node=NodeId(str(bad.node)) if bad is not None else None,
        segment=SegmentId(str(bad.segment)) if bad is not None else None,
    )
