"""One decode engine: `step()` polls copies, plans, runs the model, commits, and hands out events.

One thread owns an engine. It knows no Ray and no text; it is told what to do by `submit`, `abort`, `keep`,
`recall` and `release`, between steps, and tells what happened by the events that `step` returns. An abort takes
effect at once, without another forward; what the sequence leaves is then one of `engine.images`.
"""

import math
import time
from collections.abc import Callable, Set

from rollout.control.commands import Assignment
from rollout.control.messages import (
    Admitted,
    Failed,
    Finished,
    Preempted,
    RestoreFailed,
    Reweighed,
    Sampled,
    WorkerEvent,
    WorkerFacts,
)
from rollout.engine.images import Images
from rollout.engine.interface import Draw, ImageRestorer, ModelRunner, PageCopier
from rollout.engine.live import LiveWeights
from rollout.engine.rates import Rates
from rollout.engine.scheduler import Admission, Plan, Scheduler
from rollout.engine.sequence import Sequence, Status
from rollout.engine.sequence_factory import SequenceFactory
from rollout.errors import DeadlineError, KVError, SegmentError
from rollout.kv.cache import KVCache
from rollout.kv.fence import Fence
from rollout.kv.keys import PageKey
from rollout.kv.tiers import PageRef, Tier
from rollout.metrics import EngineStats
from rollout.types import AbortReason, Columns, FinishReason, Keep, NodeId, SegmentId, SequenceKey, Weights, WeightsId

IDLE_S = 0.5
"""Longest sleep of an engine's thread that nobody wakes; bounds how late a deadline is seen."""


class Engine:
    """Runs assignments to their end, their slice or their abort."""

    def __init__(
        self,
        *,
        runner: ModelRunner,
        scheduler: Scheduler,
        cache: KVCache,
        images: Images,
        copier: PageCopier,
        restorer: ImageRestorer,
        rates: Rates,
        root: PageKey,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        max_context: int,
        replays: bool,
        live: LiveWeights,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert cache.pages_for(max_context) <= cache.total, (max_context, cache.total)
        self._runner = runner
        self._scheduler = scheduler
        self._cache = cache
        self._images = images
        self._copier = copier
        self._restorer = restorer
        self._rates = rates
        self._factory = SequenceFactory(
            root=root,
            page_tokens=cache.page_tokens,
            vocab_size=vocab_size,
            eos_ids=eos_ids,
            max_context=max_context,
            replays=replays,
            live=live,
        )
        self._live = live
        self._purged = True
        """Nothing is left that weights wrote which are of no use any more."""
        self._clock = clock
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._admissions: dict[SequenceKey, tuple[Admission, float]] = {}
        """Of sequences that wait for copies, with when that began."""
        self._events: list[WorkerEvent] = []
        self.blocked = False
        """The last step could run nothing: only a command or a completed copy changes that."""
        self._paused = False
        self._steps = 0
        self._busy_s = 0.0
        self._prefilled = 0
        self._decoded = 0
        self._sampled = 0
        self._cached = 0
        self._preemptions = 0

    # Commands -----------------------------------------------------------------------------------------

    def submit(self, assignment: Assignment) -> None:
        """Queue an assignment.

        Raises `PromptTooLongError` or `InvalidPromptError`; nothing is queued then.
        """
        sequence = self._factory.make(assignment)
        assert sequence.key not in self._sequences, f"{sequence.key} submitted twice"
        self._sequences[sequence.key] = sequence
        self._scheduler.add(sequence)

    def abort(self, key: SequenceKey) -> None:
        """Park a sequence at once; if copies into its pages have begun, as soon as they are over.

        Nothing happens if the sequence is already parked, over or unknown.
        """
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        if sequence.status is Status.RESTORING:
            if sequence.pages.loads or not self._restorer.cancel(key):
                sequence.abort = True
                return
            del self._admissions[key]
            sequence.restoring = False
            self._scheduler.restore_cancelled(sequence)
        self._park(sequence)

    def keep(self, key: SequenceKey, where: Keep) -> None:
        """Leave a parked or recalled image on this worker (DEVICE or HOST); nothing happens if it is not here."""
        self._events += self._images.keep(key, where, self._clock())
        self._start_copies()

    def recall(self, key: SequenceKey) -> None:
        """Pin what is left of a kept image."""
        self._events += self._images.recall(key)

    def release(self, key: SequenceKey) -> None:
        """Free what only this sequence used; nothing happens if it left nothing here."""
        self._events += self._images.release(key)

    def expire(self) -> None:
        """Free what was held for long enough, or until nobody reads it; to be called now and then, idle or not."""
        self._cache.kept.expire(self._clock())
        if not self._purged:
            self._purged = self._cache.tiered.purge(self._live.reusable)

    def pause(self) -> None:
        """Until `unpause` no step runs the model or gives a sequence its pages; commands and copies go on."""
        self._paused = True

    def unpause(self) -> None:
        self._paused = False

    def replace_weights(self, weights: Weights, *, reusable: Set[WeightsId], in_place: bool) -> None:
        """The model has other weights from now on; KV that `reusable` ones wrote may be gone on with.

        With `in_place` sequences that run on such KV do; otherwise all that run start again from their tokens. So do
        those that have none yet: what they are about to write belongs below another root of the prefix tree.
        """
        self._live.replace(weights, reusable)
        for sequence in reversed(list(self._scheduler.running_sequences())):  # the first waits first again
            restoring = self._admissions.get(sequence.key)
            known = restoring[0].known_tokens if restoring is not None else sequence.computed
            if in_place and known and self._live.may_use(sequence.written.until(known)):
                if restoring is None and (sequence.needs_prefill or sequence.replays):  # it may be replaying
                    written = sequence.written.until(known)
                    self._events.append(
                        Reweighed(trajectory_id=sequence.trajectory_id, epoch=sequence.epoch, written=written)
                    )
                sequence.change_weights(known, weights)
                continue
            sequence.image = None  # older weights wrote that, too
            if restoring is not None:
                sequence.outdated = True
            else:
                self._scheduler.requeue(sequence)
                self._events.append(
                    Preempted(trajectory_id=sequence.trajectory_id, epoch=sequence.epoch, outdated=True)
                )
        self._purged = False

    def flush(self) -> dict[Tier, int]:
        """Free all pages that no sequence holds and nobody reads; how many of each tier."""
        before = {tier: self._cache.tiered.free(tier) for tier in Tier}
        self._cache.tiered.purge(frozenset())
        return {tier: self._cache.tiered.free(tier) - before[tier] for tier in Tier}

    @property
    def empty(self) -> bool:
        """No page is in use."""
        cache = self._cache
        return all(cache.tiered.free(tier) == cache.tiered.total(tier) for tier in Tier)

    def sources(self, key: SequenceKey) -> tuple[tuple[PageRef, ...], Fence]:
        """Pages of a parked or recalled image, and what must have been computed before they are read.

        Nobody writes to them until the next command for it.
        """
        return self._images.sources(key), self._runner.fence()

    # Steps --------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether `step` would have nothing to run, finish or tell."""
        runs = not self._paused and (self._scheduler.waiting or self._scheduler.running)
        return not (runs or self._events or self.copying or self._images.busy)

    @property
    def copying(self) -> bool:
        """Whether copies to or from pages are under way."""
        return bool(self._cache.tiered.flights or self._admissions)

    def step(self) -> list[WorkerEvent]:
        """Run one step; returns what happened since the last one, in order."""
        self._complete_copies()
        if self._paused:
            self.blocked = True
            self._park_loaded()
        else:
            self._run()
        self._start_copies()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        self._restorer.close()
        self._copier.close()
        self._runner.close()

    def audit(self) -> None:
        """Recompute page accounting from the structures; asserts if a counter is wrong."""
        sequences = list(self._scheduler.sequences())
        assert {sequence.key for sequence in sequences} == set(self._sequences), "scheduler and engine differ"
        self._cache.audit(sequence.holding for sequence in sequences if sequence.holding is not None)

    @property
    def stats(self) -> EngineStats:
        device, host = self._cache.stats(Tier.DEVICE), self._cache.stats(Tier.HOST)
        return EngineStats(
            steps=self._steps,
            busy_s=self._busy_s,
            waiting=self._scheduler.waiting,
            running=self._scheduler.running,
            parked=len(self._images),
            prefilled_tokens=self._prefilled,
            decoded_tokens=self._decoded,
            sampled_tokens=self._sampled,
            cached_tokens=self._cached,
            restored_bytes=self._restorer.restored_bytes,
            preemptions=self._preemptions,
            load_back_tokens=None if math.isinf(self._rates.load_back_tokens) else self._rates.load_back_tokens,
            written_bytes=host.arrived * self._runner.page_bytes,
            loaded_bytes=device.arrived * self._runner.page_bytes,
            device=device,
            host=host,
            page_bytes=self._runner.page_bytes,
        )

    def facts(self) -> WorkerFacts:
        """What was measured, and the room there is, now."""
        cache, tiered, paces = self._cache, self._cache.tiered, self._rates.paces
        return WorkerFacts(
            free_tokens=cache.available * cache.page_tokens,
            host_free_tokens=tiered.room_on_host * cache.page_tokens,
            token_bytes=self._rates.token_bytes,
            computed_tokens=self._prefilled + self._decoded,
            prefill=paces.prefill,
            step=paces.step,
            restore=paces.restore,
            load=paces.load,
            save=paces.save,
            moving_share=paces.moving_share,
        )

    def _run(self) -> None:
        began = self._clock()
        if (youngest := self._scheduler.giving_way()) is not None:
            self._park(youngest, AbortReason.MEMORY)
        plan = self._scheduler.plan()
        self.blocked = not (plan.admitted or plan.prefill or plan.decode or plan.preempted)
        self._launch(plan)
        draws = self._runner.run(plan)
        self._measure(plan)
        self._commit(plan, draws)
        self._steps += 1
        if not self.blocked:
            self._busy_s += self._clock() - began

    def _measure(self, plan: Plan) -> None:
        if plan.prefill and self._runner.prefill_s is not None:
            self._rates.prefilled([(chunk.start, chunk.end) for chunk in plan.prefill], self._runner.prefill_s)
        if plan.decode and self._runner.decode_s is not None:
            moving = self.copying or self._images.pinned > 0
            self._rates.stepped(len(plan.decode), self._runner.decode_s, moving=moving)

    def _complete_copies(self) -> None:
        """Take in what copies, restores and moves are over, and what waited for them."""
        for done in self._copier.poll():
            self._cache.tiered.copied(done.copy_id, ok=done.ok)
            if done.ok:
                self._rates.copied(done.to, done.nbytes, done.seconds)
        for restored in self._restorer.poll():
            sequence = self._sequences[restored.key]
            sequence.restoring = False
            if restored.error is not None:
                sequence.image = None
                self._events.append(_restore_failed(sequence, restored.error))
        for key, (admission, began) in list(self._admissions.items()):
            sequence = admission.sequence
            if sequence.restoring or sequence.pages.loads:
                continue
            del self._admissions[key]
            self._restored(admission, self._clock() - began)
        self._events += self._images.poll(self._clock())

    def _restored(self, admission: Admission, seconds: float) -> None:
        sequence = admission.sequence
        failed = sequence.pages.load_failed
        if failed:
            sequence.loadable = False
        if failed or sequence.outdated or (admission.restored_tokens and sequence.image is None):
            self._scheduler.restart(sequence)
        else:
            self._scheduler.restored(sequence, admission.known_tokens)
            if not admission.restored_tokens:
                self._rates.loaded(admission.loaded_tokens, seconds)
            elif not admission.loaded_tokens:
                self._rates.restored(admission.restored_tokens, seconds)
            self._tell_admitted(admission)
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
            self._admissions[sequence.key] = (admission, self._clock())
            if sequence.restoring:
                image = sequence.image
                assert image is not None
                first = sequence.pages.shared
                table = sequence.pages.table[first : image.pages]
                chain = sequence.chain_values(0, image.kv_tokens) if self._runner.canary else None
                self._restorer.submit(sequence.key, image, first, table, self._runner.fence(), chain)
        self._park_loaded()
        self._start_copies()

    def _park_loaded(self) -> None:
        for sequence in self._scheduler.only_parked():
            self._park(sequence)

    def _start_copies(self) -> None:
        """Hand what was planned to the copy thread, behind all that was computed so far."""
        if copies := self._cache.tiered.take_copies():
            self._copier.submit(copies, self._runner.fence())

    def _commit(self, plan: Plan, draws: list[Draw]) -> None:
        for chunk in plan.prefill:
            chunk.sequence.advance(chunk.end - chunk.start)
            self._prefilled += chunk.end - chunk.start
            chunk.sequence.names.of(chunk.sequence.tokens, chunk.sequence.computed // self._cache.page_tokens)
            self._scheduler.share(chunk.sequence)
        page_tokens = self._cache.page_tokens
        self._decoded += len(plan.decode)
        for sequence in plan.decode:
            sequence.advance(1)
            if sequence.computed % page_tokens == 0:  # so that parking it has nothing left to hash
                sequence.names.of(sequence.tokens, sequence.computed // page_tokens)
        for draw in draws:
            sequence = draw.sequence
            if math.isnan(draw.logprob):
                self._fail(sequence, "the model's logits are not numbers")
                continue
            offset = sequence.output_tokens
            reason = sequence.accept(draw.token)
            self._sampled += 1
            columns = Columns.single(draw.token, draw.logprob, self._live.weights.version)
            self._events.append(
                Sampled(trajectory_id=sequence.trajectory_id, epoch=sequence.epoch, offset=offset, columns=columns)
            )
            if isinstance(reason, FinishReason):
                self._scheduler.finish(sequence)
                del self._sequences[sequence.key]
                self._events.append(Finished(trajectory_id=sequence.trajectory_id, epoch=sequence.epoch, reason=reason))
            elif reason is not None:
                self._park(sequence, reason)

    def _fail(self, sequence: Sequence, error: str) -> None:
        self._scheduler.leave(sequence)
        if sequence.holding is not None:
            self._cache.close(sequence.holding)
        del self._sequences[sequence.key]
        self._events.append(Failed(trajectory_id=sequence.trajectory_id, epoch=sequence.epoch, error=error))

    def _park(self, sequence: Sequence, reason: AbortReason | None = None) -> None:
        self._scheduler.leave(sequence)
        del self._sequences[sequence.key]
        self._events.append(self._images.park(sequence, reason))

    def _tell_admitted(self, admission: Admission) -> None:
        self._cached += admission.cached_tokens
        self._events.append(
            Admitted(
                trajectory_id=admission.sequence.trajectory_id,
                epoch=admission.sequence.epoch,
                cached_tokens=admission.cached_tokens,
                loaded_tokens=admission.loaded_tokens,
                restored_tokens=admission.restored_tokens,
                recomputed_tokens=admission.recomputed_tokens,
                written=admission.sequence.written.until(admission.known_tokens),
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
