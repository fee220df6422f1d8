"""One engine behind its queues, in this process: what polls return, and when the pages of a parked sequence go."""

import contextlib
import gc
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.cluster.host import Host
from rollout.config import load_config
from rollout.control.commands import Assignment, Watch
from rollout.control.messages import Admitted, Failed, Finished, Freed, Moved, Parked, Sampled, WorkerEvent, WorkerFacts
from rollout.errors import SegmentMissingError
from rollout.kv.image import verify
from rollout.kv.restore import Segment
from rollout.types import (
    AbortReason,
    Columns,
    FinishReason,
    Keep,
    NodeId,
    SamplingParams,
    SegmentRun,
    SequenceKey,
    TrajectoryId,
    WorkerId,
)
from tests.cluster.scene import eventually, settings
from tests.weights import WEIGHTS

PAGE_TOKENS = 16
PAGES = 15
PROMPT = tuple(range(4, 44))


class NoReader:
    """Nothing was ever stored."""

    @contextlib.contextmanager
    def open(self, runs: Sequence[SegmentRun]) -> Iterator[Sequence[Segment]]:
        raise SegmentMissingError(f"{len(runs)} runs are not stored")
        yield


class Driver:
    """Polls a host and acknowledges, as the controller does."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.acknowledged = 0
        self.events: list[WorkerEvent] = []
        self.facts: WorkerFacts | None = None
        """Of the last batch."""

    def start(
        self, name: str, *, tokens: int, prompt: tuple[int, ...] = PROMPT, slice_tokens: int | None = None
    ) -> SequenceKey:
        assignment = Assignment(
            trajectory_id=TrajectoryId(name),
            epoch=1,
            prompt_ids=prompt,
            output=Columns(),
            sampling=SamplingParams(max_new_tokens=tokens, ignore_eos=True),
            seed=1,
            watch=Watch(slice_tokens=slice_tokens),
            max_context=1 << 20,
            image=None,
            kv_tokens=0,
        )
        self.host.start(assignment)
        return (assignment.trajectory_id, assignment.epoch)

    def poll(self) -> list[WorkerEvent]:
        batch = self.host.poll(self.acknowledged, 0.05)
        self.acknowledged = batch.number
        self.events += batch.events
        self.facts = batch.facts
        return self.events

    def until(self, kind: type[WorkerEvent], name: str) -> WorkerEvent:
        """The first event of a kind about a trajectory."""

        def find() -> WorkerEvent | None:
            return next((e for e in self.poll() if isinstance(e, kind) and e.trajectory_id == name), None)

        event = eventually(find)
        assert event is not None
        return event

    @property
    def unused_pages(self) -> int:
        """Free, or of no use but to be found in the tree, as of the last snapshot."""
        counts = self.host.stats.engine.device
        assert counts.free + counts.tree + counts.private + counts.reserved == counts.total
        return counts.free + counts.tree

    def ids(self, name: str) -> list[int]:
        """The tokens told of a trajectory, each told once and in order."""
        ids: list[int] = []
        for event in self.events:
            if isinstance(event, Sampled) and event.trajectory_id == name:
                assert event.offset == len(ids)
                ids += event.columns.ids
        return ids


@pytest.fixture
def make_host(kv_model: Path) -> Iterator[Callable[..., Driver]]:
    """Hosts with 15 pages of KV; their threads stay, asleep."""
    threads = torch.get_num_threads()

    def make(
        export_timeout_s: float = 60.0, tail_hold_s: float = 60.0, policies: Sequence[dict[str, Any]] = ()
    ) -> Driver:
        config = load_config(
            settings(
                kv_model,
                "none",
                engine={
                    "kv_bytes": (PAGES + 1) * PAGE_TOKENS * 8192,
                    "max_context_tokens": None,
                    "tail_hold_s": tail_hold_s,
                },
                pool={"export_timeout_s": export_timeout_s},
                abort={"policies": list(policies)},
            )
        )
        return Driver(Host(WorkerId("worker"), NodeId("node"), "incarnation", config, WEIGHTS, NoReader()))

    yield make
    torch.set_num_threads(threads)


def test_a_batch_is_repeated_until_it_is_acknowledged(make_host: Callable[..., Driver]) -> None:
    driver = make_host()
    driver.start("ann", tokens=30)
    first = driver.host.poll(0, 60.0)  # an empty batch would be repeated, too
    assert first.events
    assert driver.host.poll(0, 0.05) == first == driver.host.poll(0, 0.0)
    second = driver.host.poll(first.number, 5.0)
    assert second.number == first.number + 1
    driver.events += [*first.events, *second.events]
    driver.acknowledged = second.number
    driver.until(Finished, "ann")
    assert len(driver.ids("ann")) == 30


def test_tokens_wait_until_there_is_something_else_to_tell(
    make_host: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.cluster.host.TELL_S", 120.0)
    driver = make_host()
    driver.start("ann", tokens=100)
    driver.until(Admitted, "ann")
    batch = driver.host.poll(driver.acknowledged, 60.0)
    assert [type(event) for event in batch.events] == [Sampled, Finished]
    driver.events += batch.events
    assert len(driver.ids("ann")) == 100


def test_an_engine_that_hangs_is_told_apart_from_an_idle_one(make_host: Callable[..., Driver]) -> None:
    driver = make_host()

    def goes_round() -> bool:
        batch = driver.host.poll(driver.acknowledged, 2.0)
        driver.acknowledged = batch.number
        return batch.silent_s < 1.5

    eventually(goes_round)  # idle, it looks for deadlines all the same; one that hangs is silent for ever longer
    begun, gate = threading.Event(), threading.Event()
    step = driver.host._engine.step

    def hang() -> list[WorkerEvent]:
        begun.set()
        assert gate.wait(180)
        return step()

    driver.host._engine.step = hang
    driver.start("ann", tokens=3)
    assert begun.wait(180)
    assert driver.host.poll(driver.acknowledged, 1.5).silent_s > 1.4
    gate.set()
    driver.until(Finished, "ann")


def test_an_exported_page_is_not_reused_before_its_buffer_is_dropped(make_host: Callable[..., Driver]) -> None:
    driver = make_host()
    key = driver.start("ann", tokens=100, slice_tokens=30)
    parked = driver.until(Parked, "ann")
    assert isinstance(parked, Parked)
    pages = -(-parked.kv_tokens // PAGE_TOKENS)
    manifest, buffers = driver.host.export(key, 0, pages)
    before = [buffer.copy() for buffer in buffers]
    driver.host.release(key)
    driver.start("bob", tokens=60, prompt=tuple(range(100, 200)))
    driver.until(Finished, "bob")
    assert all(np.array_equal(now, then) for now, then in zip(buffers, before, strict=True))
    fingerprint = driver.host.description.fingerprint
    verify(manifest, buffers, range(pages), parked.kv_tokens, fingerprint)
    assert driver.host.stats.engine.parked == 1
    assert driver.host.stats.exporting == 1
    del buffers
    gc.collect()
    freed = driver.until(Freed, "ann")
    assert isinstance(freed, Freed)
    assert freed.exclusive_pages == freed.freed_pages == pages
    eventually(lambda: driver.unused_pages == PAGES)  # once the snapshot is taken that follows the event
    with pytest.raises(SegmentMissingError):
        driver.host.export(key, 0, 1)


def test_pages_that_nobody_releases_are_freed_after_the_deadline(make_host: Callable[..., Driver]) -> None:
    driver = make_host(export_timeout_s=0.2)
    key = driver.start("ann", tokens=100, slice_tokens=30)
    driver.until(Parked, "ann")
    driver.until(Freed, "ann")
    with pytest.raises(SegmentMissingError):
        driver.host.export(key, 0, 1)
    eventually(lambda: driver.unused_pages == PAGES)


def test_a_released_sequence_is_freed_once_however_often_it_is_released(make_host: Callable[..., Driver]) -> None:
    driver = make_host()
    key = driver.start("ann", tokens=100, slice_tokens=10)
    driver.until(Parked, "ann")
    for _ in range(3):
        driver.host.release(key)
    driver.until(Freed, "ann")
    driver.host.release(key)
    driver.host.stop(key)
    driver.start("bob", tokens=5)
    driver.until(Finished, "bob")
    assert sum(isinstance(event, Freed) for event in driver.events) == 1


def test_a_stop_parks_with_every_token_told_before(make_host: Callable[..., Driver]) -> None:
    driver = make_host()
    steps, asked = itertools.count(), threading.Event()
    step = driver.host._engine.step

    def wait_for_the_stop() -> list[WorkerEvent]:
        if next(steps) == 20:  # else a fast engine might be at the end before it is told to stop
            assert asked.wait(180)
        return step()

    driver.host._engine.step = wait_for_the_stop
    key = driver.start("ann", tokens=150)
    eventually(lambda: len(driver.poll()) > 0 and len(driver.ids("ann")) >= 5)
    driver.host.stop(key)
    asked.set()
    parked = driver.until(Parked, "ann")
    assert isinstance(parked, Parked)
    assert parked.kv_tokens == len(PROMPT) + len(driver.ids("ann")) - 1
    told = driver.events.index(parked)
    assert not any(isinstance(event, Sampled) for event in driver.events[told:])


def test_an_assignment_that_cannot_run_fails_alone(make_host: Callable[..., Driver]) -> None:
    driver = make_host()
    driver.start("long", tokens=5, prompt=(5,) * PAGES * PAGE_TOKENS)
    driver.start("strange", tokens=5, prompt=(5, 320))
    driver.start("ann", tokens=5)
    finished = driver.until(Finished, "ann")
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.LENGTH
    for name, error in {"long": "PromptTooLongError: long: 240 tokens", "strange": "InvalidPromptError"}.items():
        failed = driver.until(Failed, name)
        assert isinstance(failed, Failed)
        assert failed.error.startswith(error)


def test_the_tail_of_a_kept_trajectory_is_freed_in_bounded_time_though_the_engine_is_idle(
    make_host: Callable[..., Driver],
) -> None:
    driver = make_host(tail_hold_s=0.2)
    key = driver.start("ann", tokens=100, slice_tokens=30)
    driver.until(Parked, "ann")
    driver.host.keep(key, Keep.DEVICE)
    driver.until(Moved, "ann")
    eventually(lambda: driver.host.stats.engine.device.private == 0)
    assert driver.host.stats.engine.device.tree > 0
    driver.host.release(key)
    driver.until(Freed, "ann")
    eventually(lambda: driver.host.stats.engine.device.free == PAGES)


def test_a_paused_worker_samples_nothing_obeys_a_stop_and_is_no_hung_one(make_host: Callable[..., Driver]) -> None:
    driver = make_host()
    count, asked = itertools.count(), threading.Event()
    step = driver.host._engine.step

    def wait_for_the_pause() -> list[WorkerEvent]:
        if next(count) == 20:  # else a fast engine might be at the end before it is told to pause
            assert asked.wait(180)
        return step()

    driver.host._engine.step = wait_for_the_pause
    keys = {name: driver.start(name, tokens=150) for name in ("ann", "bob")}
    eventually(lambda: len(driver.poll()) > 0 and all(len(driver.ids(name)) >= 3 for name in keys))
    driver.host.pause()
    asked.set()
    driver.host.audit(180.0)  # what was sent before is done
    steps = driver.host.stats.engine.steps
    driver.host.stop(keys["ann"])
    parked = driver.until(Parked, "ann")
    assert isinstance(parked, Parked)
    assert parked.kv_tokens == len(PROMPT) + len(driver.ids("ann")) - 1
    driver.host.release(keys["ann"])
    driver.until(Freed, "ann")

    def goes_round() -> bool:
        batch = driver.host.poll(driver.acknowledged, 2.0)
        driver.acknowledged = batch.number
        assert not batch.events
        return batch.silent_s < 1.5

    eventually(goes_round)
    driver.host.audit(180.0)
    assert driver.host.stats.engine.steps == steps
    driver.host.unpause()
    driver.until(Finished, "bob")
    assert len(driver.ids("bob")) == 150


def test_facts_come_with_the_events_they_follow_from(make_host: Callable[..., Driver]) -> None:
    driver = make_host()
    assert driver.host.poll(0, 0.0).facts == WorkerFacts(
        free_tokens=PAGES * PAGE_TOKENS,
        host_free_tokens=0,
        token_bytes=driver.host.description.token_bytes,
    )
    driver.acknowledged = 1
    key = driver.start("ann", tokens=100, slice_tokens=30)
    parked = driver.until(Parked, "ann")
    assert isinstance(parked, Parked)
    assert driver.facts is not None
    pages = -(-parked.kv_tokens // PAGE_TOKENS)
    assert driver.facts.free_tokens == (PAGES - pages) * PAGE_TOKENS
    assert driver.facts.step is not None
    assert driver.facts.step.seconds(1) > 0
    # the prompt's 40 tokens were positions 0 ... 39
    assert [token_s is not None for token_s in driver.facts.prefill.token_s] == [True] * 6
    driver.host.release(key)
    driver.until(Freed, "ann")
    assert driver.facts.free_tokens == PAGES * PAGE_TOKENS


def test_the_memory_policy_parks_the_youngest_and_nothing_is_preempted(make_host: Callable[..., Driver]) -> None:
    driver = make_host(policies=[{"kind": "memory", "free_share": 0.2}])
    for name in ("ann", "bob"):
        driver.start(name, tokens=100, prompt=tuple(range(100, 120) if name == "bob" else PROMPT))
    parked = driver.until(Parked, "bob")
    assert isinstance(parked, Parked)
    assert parked.reason is AbortReason.MEMORY
    driver.host.release((parked.trajectory_id, parked.epoch))
    driver.until(Finished, "ann")
    assert driver.host.stats.engine.preemptions == 0


def test_what_a_worker_is_told_to_watch_is_the_reason_it_gives(make_host: Callable[..., Driver]) -> None:
    driver = make_host()
    driver.start("ann", tokens=100, slice_tokens=10)
    parked = driver.until(Parked, "ann")
    assert isinstance(parked, Parked)
    assert parked.reason is AbortReason.SLICE_BUDGET
    assert len(driver.ids("ann")) == 10
