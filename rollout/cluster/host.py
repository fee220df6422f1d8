"""An engine on a thread of its own, with the queues around it. What a worker actor hosts; no Ray here.

The engine thread takes messages from the inbox, steps, and appends what happened to the outbox, which is
polled: the one call here that waits, at most as long as it was told. Exports run on the caller's thread,
beside decoding, and read only pages of parked sequences.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from rollout.cluster.description import Batch, WorkerDescription
from rollout.cluster.exports import Exports
from rollout.config import Config, Memory
from rollout.control.commands import Assignment
from rollout.control.messages import TELL_S, Failed, Moved, Parked, Sampled, WorkerEvent, merge_sampled
from rollout.engine.assembly import assemble
from rollout.engine.engine import IDLE_S
from rollout.errors import DeadlineError, RequestError, WeightsSourceError
from rollout.kv.image import Buffer, Manifest, describe, join
from rollout.kv.restore import ImageReader
from rollout.kv.tiers import Tier
from rollout.memory import return_freed
from rollout.metrics import WorkerStats
from rollout.model.digest import weights_digest
from rollout.model.spec import read_spec
from rollout.model.weights import check_weights, stream_weights, weights_bytes, write_weights
from rollout.reports import FlushReport
from rollout.transport.source import WeightsSource
from rollout.types import Keep, MemoryOf, NodeId, SequenceKey, Weights, WeightsId, WorkerId

logger = logging.getLogger(__name__)

T = TypeVar("T")

IN_USE_S = 0.02
"""Pause between two looks at whether pages are still in use."""


class Host:
    """Loads the model, then runs the engine until the process ends."""

    def __init__(
        self,
        worker: WorkerId,
        node: NodeId,
        incarnation: str,
        config: Config,
        weights: Weights,
        reader: ImageReader,
    ) -> None:
        """Raises `ConfigError` if the configuration and this machine do not fit together."""
        self._worker = worker
        self._node = node
        self._incarnation = incarnation
        self._threads = config.cluster.cpus_per_worker
        self._weights = weights
        self._parked_s = 2 * config.pool.export_timeout_s
        """Pages of a parked sequence that nobody releases are freed after this."""
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._exports = Exports(self._wake)
        self._exported_bytes = 0
        torch.set_num_threads(self._threads)
        engine = config.engine
        if engine.device == "auto" and not config.cluster.gpus_per_worker:
            engine = engine.model_copy(update={"device": "cpu"})  # Ray may let this process see GPUs all the same
        assembled = assemble(
            config.model,
            engine,
            config.host,
            read_spec(config.model.path),
            reader=reader,
            restore_timeout_s=config.pool.restore_timeout_s,
            wake=self._wake,
            weights=weights,
            memory=config.abort.policy(Memory),
        )
        self._engine = assembled.engine
        self._storage = assembled.storage
        self.description = WorkerDescription(
            worker=worker,
            node=node,
            incarnation=incarnation,
            fingerprint=assembled.fingerprint,
            page_tokens=assembled.storage.page_tokens,
            token_bytes=assembled.storage.token_bytes,
            max_context=assembled.max_context,
            max_running=config.engine.max_running,
            weights=weights,
            weights_bytes=weights_bytes(assembled.decoder),
            digest=assembled.digest,
        )
        self._decoder = assembled.decoder
        self._fenced = False
        """Its weights may be a mixture: it serves nothing any more."""
        self._lacks_weights = False
        """Their memory was given back since they were loaded."""
        self._prepared: tuple[str, WeightsSource] | None = None
        self._wanted: str | None = None
        """The weights that are to be prepared, or were: others come too late."""
        self._changed = threading.Condition()
        self._outbox: list[WorkerEvent] = []
        self._pressing = False
        """There is more than tokens in the outbox."""
        self._told = 0.0
        """When `poll` last returned something new."""
        self._unacknowledged: Batch | None = None
        self.stats = self._snapshot()
        """As of the engine's last step."""
        self.facts = self._engine.facts()
        """As of the last event that is more than a token, or later."""
        self._facts_told = False
        """`poll` has returned them: they may be taken again."""
        self._went_round = time.monotonic()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def start(self, assignment: Assignment) -> None:
        self._inbox.put(lambda: self._submit(assignment))

    def stop(self, key: SequenceKey) -> None:
        self._inbox.put(lambda: self._engine.abort(key))

    def release(self, key: SequenceKey) -> None:
        """Free what the sequence left here, once no export reads it."""
        self._exports.close(key, lambda: self._engine.release(key))
        self._wake()

    def keep(self, key: SequenceKey, where: Keep) -> None:
        """Leave a parked sequence's pages on this worker, once no export reads them."""
        self._exports.close(key, lambda: self._engine.keep(key, where), lambda: self._give_up_keeping(key))
        self._wake()

    def recall(self, key: SequenceKey) -> None:
        self._inbox.put(lambda: self._engine.recall(key))

    def pause(self) -> None:
        """Run no step until `unpause`; everything else goes on."""
        self._inbox.put(self._engine.pause)

    def unpause(self) -> None:
        self._inbox.put(self._engine.unpause)

    def audit(self, timeout_s: float) -> str | None:
        """What is wrong with the page accounting, recomputed by the engine's thread between two steps.

        Raises `DeadlineError`.
        """
        answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def audit() -> None:
            try:
                self._engine.audit()
            except AssertionError as error:
                answers.put(str(error) or "an invariant does not hold")
            else:
                answers.put(None)

        self._inbox.put(audit)
        try:
            return answers.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineError(f"the engine of {self._worker} did not answer within {timeout_s:g} s") from None

    def prepare_weights(self, name: str, source: WeightsSource, *, delta: bool) -> tuple[int, str]:
        """See that all of `source` can be read, is whole, and fits, as far as it goes if it is a `delta`.

        Returns its size in bytes, and a digest of its manifest.

        Raises `WeightsError` or `UnsupportedModelError`.
        """
        self.drop_weights()
        self._wanted = name
        if delta and self._lacks_weights:
            source.close()
            raise WeightsSourceError(f"{self._worker}: got some tensors, allowed: all, as it gave its memory back")
        try:
            check_weights(self._decoder, source.manifest.described(), partial=delta)
            source.verify()
        except BaseException:
            source.close()
            raise
        if self._wanted != name:
            source.close()
            raise WeightsSourceError(f"{self._worker}: nobody waits for the weights {name} any more")
        self._prepared = (name, source)
        return source.manifest.nbytes, source.manifest.digest

    def commit_weights(self, name: str, weights: Weights, reusable: Set[WeightsId], *, in_place: bool) -> int:
        """Replace the weights between two steps by what was prepared under this name.

        Waits until that is done, however long the step before takes.
        """
        if self._prepared is None or self._prepared[0] != name:
            raise WeightsSourceError(f"{self._worker}: no weights were prepared as {name}")
        _, source = self._prepared

        def replace() -> None:
            self._fenced = True
            self._decoder.reclaim()
            write_weights(self._decoder, self._alive(source.tensors()))
            self._engine.replace_weights(weights, reusable=reusable, in_place=in_place)
            self._weights = weights
            self._fenced = self._lacks_weights = False

        try:
            self._between_steps(replace)
        finally:
            self.drop_weights()
        return source.manifest.nbytes

    def read_weights(self, read: Callable[[Iterator[tuple[str, Tensor]]], T]) -> tuple[Weights, T]:
        """Have `read` read all weights between two steps; what it made of which."""
        return self._between_steps(lambda: (self._weights, read(self._alive(stream_weights(self._decoder)))))

    def digest_weights(self) -> str:
        """Of what is held now."""
        return self._between_steps(lambda: weights_digest(stream_weights(self._decoder)))

    def flush(self) -> FlushReport:
        """Free all KV that nobody uses just now, between two steps."""
        pages = self._between_steps(self._engine.flush)
        page_bytes = self._storage.page_bytes
        return FlushReport(device_bytes=pages[Tier.DEVICE] * page_bytes, host_bytes=pages[Tier.HOST] * page_bytes)

    def empty(self, timeout_s: float) -> None:
        """Free all pages, waiting for whoever still reads some. Raises `DeadlineError`."""
        deadline = time.monotonic() + timeout_s
        while not self._between_steps(self._emptied):
            if time.monotonic() >= deadline:
                raise DeadlineError(f"{self._worker}: pages were still in use after {timeout_s:g} s")
            time.sleep(IN_USE_S)

    def release_memory(self, what: Set[MemoryOf]) -> int:
        """Give memory, of which none is in use, back to the system; the bytes given back. Nothing may be started until
        `reclaim_memory`."""
        return self._between_steps(lambda: self._release(what))

    def reclaim_memory(self, what: Set[MemoryOf]) -> bool:
        """Take it again; whether weights must be loaded, which hold anything now."""
        return self._between_steps(lambda: self._reclaim(what))

    def _emptied(self) -> bool:
        self._engine.flush()
        return self._engine.empty

    def _release(self, what: Set[MemoryOf]) -> int:
        nbytes = self._storage.release() if MemoryOf.KV in what else 0
        if MemoryOf.WEIGHTS in what:
            nbytes += self._decoder.release()
            self._lacks_weights = True
        return nbytes

    def _reclaim(self, what: Set[MemoryOf]) -> bool:
        if MemoryOf.KV in what:
            self._storage.reclaim()
        if MemoryOf.WEIGHTS in what:
            self._decoder.reclaim()
        return self._lacks_weights

    def _alive(self, named_tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same; each shows that the engine's thread is alive, which otherwise may be silent for so long only."""
        for each in named_tensors:
            self._went_round = time.monotonic()
            yield each

    def _between_steps(self, do: Callable[[], T]) -> T:
        """Have the engine's thread do this, and wait for it, however long the step before takes."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(do())
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future.result()

    def drop_weights(self, name: str | None = None) -> None:
        """What was prepared, under this name or any, will not be committed."""
        if name in (None, self._wanted):
            self._wanted = None
        if self._prepared is not None and name in (None, self._prepared[0]):
            self._prepared[1].close()
            self._prepared = None
            return_freed()

    def poll(self, acknowledged: int, wait_s: float) -> Batch:
        """The next events after batch `acknowledged`, waiting up to `wait_s` seconds for one.

        The same batch is returned again until it is acknowledged. What is no token is not kept waiting. One call at a
        time (`worker.GROUPS`).
        """
        batch = self._unacknowledged
        if batch is not None and batch.number > acknowledged:
            return batch
        deadline = time.monotonic() + wait_s
        with self._changed:
            self._changed.wait_for(lambda: self._outbox, wait_s)
            due = min(deadline, self._told + TELL_S)
            self._changed.wait_for(lambda: self._pressing, max(0.0, due - time.monotonic()))
            events, self._outbox = self._outbox, []
            self._pressing = False
            if events:
                self._told = time.monotonic()
            batch = self._unacknowledged = Batch(
                incarnation=self._incarnation,
                number=acknowledged + 1,
                silent_s=time.monotonic() - self._went_round,
                events=merge_sampled(events),
                facts=self.facts,
            )
            self._facts_told = True
        return batch

    def export(self, key: SequenceKey, first: int, stop: int) -> tuple[Manifest, list[Buffer]]:
        """Pages [first, stop) of a parked sequence, as the manifest and the data of a segment.

        The pages stay until every buffer was dropped. Raises `SegmentMissingError` if it is not parked.
        """
        pages, kv_tokens, fence = self._exports.begin(key)
        buffers: list[Buffer] = []
        try:
            page_tokens = self._storage.page_tokens
            tokens = min(stop * page_tokens, kv_tokens) - first * page_tokens
            buffers = self._storage.gather(pages[first:stop], tokens, fence)
            manifest = describe(
                buffers,
                fingerprint=self.description.fingerprint,
                page_tokens=page_tokens,
                token_bytes=self._storage.token_bytes,
                tokens=tokens,
                checksums=self._storage.checksums(pages[first:stop], tokens, buffers),
                canary=self._storage.shadow(pages[first:stop], tokens),
            )
            buffers = join(buffers, self._storage.runs(pages[first:stop], tokens))
            self._exported_bytes += manifest.nbytes
        finally:
            self._exports.end(key, buffers)
        return manifest, buffers

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP counts threads for each calling thread
        try:
            while True:
                self._went_round = time.monotonic()
                self._take_messages()
                for finish in self._exports.collect(time.monotonic()):
                    finish()
                self._engine.expire()
                if not (self._engine.idle or self._fenced):
                    self._tell(self._engine.step())
                self.stats = self._snapshot()
                if self._facts_told:
                    self._take_facts()
        except BaseException:
            logger.exception("worker %s: the engine failed; its process ends", self._worker)
            os._exit(1)

    def _give_up_keeping(self, key: SequenceKey) -> None:
        """An export still reads what was to be kept: it is released once that is over."""
        error = "an export did not let go of it in time"
        self._tell([Moved(trajectory_id=key[0], epoch=key[1], where=Keep.DEVICE, kv_tokens=0, error=error)])

    def _take_messages(self) -> None:
        """Run what came in; with nothing to run, wait for the next message."""
        wait = self._engine.idle or self._engine.blocked or self._fenced
        while True:
            try:
                message = self._inbox.get(block=wait, timeout=IDLE_S)
            except queue.Empty:
                return
            wait = False
            if message is not None:
                message()

    def _submit(self, assignment: Assignment) -> None:
        try:
            self._engine.submit(assignment)
        except RequestError as error:
            text = f"{type(error).__name__}: {error}"
            self._tell([Failed(trajectory_id=assignment.trajectory_id, epoch=assignment.epoch, error=text)])

    def _tell(self, events: list[WorkerEvent]) -> None:
        if not events:
            return
        deadline = time.monotonic() + self._parked_s
        for event in events:
            if isinstance(event, Parked):
                key = (event.trajectory_id, event.epoch)
                pages, fence = self._engine.sources(key) if event.kv_tokens else ((), self._storage.fence())
                expired = partial(self._engine.release, key)
                self._exports.open(key, pages, event.kv_tokens, fence, deadline, expired)
        pressing = not all(isinstance(event, Sampled) for event in events)
        if pressing:
            self._take_facts()
        with self._changed:
            if pressing or not self._outbox:
                self._changed.notify()
            self._outbox += events
            self._pressing |= pressing

    def _take_facts(self) -> None:
        self._facts_told = False
        self.facts = self._engine.facts()

    def _wake(self) -> None:
        self._inbox.put(None)

    def _snapshot(self) -> WorkerStats:
        return WorkerStats(
            worker=self._worker,
            node=self._node,
            pid=os.getpid(),
            incarnation=self._incarnation,
            engine=self._engine.stats,
            weights=self._weights,
            exported_bytes=self._exported_bytes,
            exporting=self._exports.exporting,
        )
