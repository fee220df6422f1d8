"""Every step of an export fails, hangs past its deadline, or answers twice: the pool is as it was, or has the image.

Case A7 at the pool: however often a trajectory is let go of during its export, each buffer is dropped once, and not
before the copy has ended.
"""

import asyncio
import weakref
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from rollout.control.commands import Export
from rollout.control.messages import Exported, ExportFailed
from rollout.errors import SegmentMissingError
from rollout.kv.image import Manifest
from rollout.kv.keys import Fingerprint
from rollout.types import Image, SequenceKey, TrajectoryId, Turn, Wait
from tests.cluster.pool_scene import HERE, FakeWorker, check, empty, make_pool, run, segments, until

ANN = TrajectoryId("ann")
NONE: frozenset[Any] = frozenset()
PAGES = {"the first object": 0, "a later object of the prompt": 2, "what follows the prompt": 4, "the tail": 6}
FAULTS = {
    "the worker died": ActorDiedError(),
    "its connection broke": ActorUnavailableError("a connection was reset", None),
    "it was not parked": RayTaskError("export", "traceback", SegmentMissingError("not parked")),
}


def ordered(worker: FakeWorker, *, epoch: int = 2, base: Image | None = None) -> Export:
    """Seven pages, four of them of the prompt, sent as four objects."""
    return worker.parked("ann", "p" * 16, "o" * 11, epoch=epoch, base=base)


class FailingWorker(FakeWorker):
    """Fails from a page on, in a way of its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def _export(self, key: SequenceKey, parts: Any) -> Any:
        if parts[-1][0] >= self.fails_from:
            raise self.error
        return await super()._export(key, parts)


@pytest.mark.parametrize("step", PAGES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_fails_leaves_what_was_held_before(step: str, fault: str) -> None:
    async def scene() -> None:
        pool, worker = make_pool(max_object_bytes=80), FailingWorker(FAULTS[fault])
        before = await pool.export(worker, "now", worker.parked("ann", "", "xxxxx", epoch=1))
        assert isinstance(before, Exported)
        worker.fails_from = PAGES[step]
        failed = await pool.export(worker, "now", ordered(worker))
        assert isinstance(failed, ExportFailed)
        assert pool._ledger.held_by(ANN) == segments(before.image)
        stats = await pool.stats()
        assert (stats.stored, stats.reserved, stats.segments) == (50, 0, len(before.image.runs))
        await check(pool)
        worker.fails_from = 99
        assert isinstance(await pool.export(worker, "now", ordered(worker)), Exported), "the next one works"
        await pool.retain(ANN, NONE)
        await empty(pool)

    run(scene)


@pytest.mark.parametrize("step", PAGES)
def test_a_step_that_hangs_is_given_up_and_stays_charged_while_it_may_write(step: str) -> None:
    async def scene() -> None:
        pool, worker = make_pool(max_object_bytes=80, export_timeout_s=0.05), FakeWorker()
        worker.hangs_from = PAGES[step]
        worker.go_on.clear()
        failed = await pool.export(worker, "now", ordered(worker))
        assert isinstance(failed, ExportFailed)
        assert "did not answer within 0.05 s" in failed.error
        stats = await pool.stats()
        last = 30 if step == "the tail" else 80
        assert (stats.stored, stats.reserved, stats.segments) == (0, last, 0)
        await check(pool)
        worker.go_on.set()
        await empty(pool)

    run(scene)


@pytest.mark.parametrize("step", PAGES)
def test_a_hanging_step_whose_worker_dies_is_credited(step: str) -> None:
    async def scene() -> None:
        pool, worker = make_pool(max_object_bytes=80, export_timeout_s=0.05), FakeWorker()
        worker.hangs_from = worker.fails_from = PAGES[step]
        worker.go_on.clear()
        assert isinstance(await pool.export(worker, "now", ordered(worker)), ExportFailed)
        worker.go_on.set()
        await empty(pool)

    run(scene)


@pytest.mark.parametrize("step", PAGES)
def test_a_step_that_sends_something_else_is_refused(step: str) -> None:
    class Liar(FakeWorker):
        def manifest(self, key: SequenceKey, first: int, stop: int) -> Manifest:
            self.fingerprint = Fingerprint("another" if first >= PAGES[step] else "fingerprint")
            return super().manifest(key, first, stop)

    async def scene() -> None:
        pool, worker = make_pool(max_object_bytes=80), Liar()
        failed = await pool.export(worker, "now", ordered(worker))
        assert isinstance(failed, ExportFailed)
        assert failed.error.startswith("SegmentDamagedError")
        await empty(pool)

    run(scene)


BOTH = {"the prompt": 0, "what follows it": 4}


@pytest.mark.parametrize("part", BOTH)
@pytest.mark.parametrize("fault", [*FAULTS, "it is something else", "it hangs"])
def test_a_call_for_two_objects_stores_both_or_none(part: str, fault: str) -> None:
    class Liar(FailingWorker):
        def manifest(self, key: SequenceKey, first: int, stop: int) -> Manifest:
            made = super().manifest(key, first, stop)
            wrong = fault == "it is something else" and (first, key[1]) == (BOTH[part], 2)
            return replace(made, tokens=made.tokens - 1) if wrong else made

    async def scene() -> None:
        pool, worker = make_pool(export_timeout_s=0.05), Liar(FAULTS.get(fault, ActorDiedError()))
        if fault in FAULTS:
            worker.fails_from = BOTH[part]
        elif fault == "it hangs":
            worker.hangs_from = BOTH[part]
            worker.go_on.clear()
        failed = await pool.export(worker, "now", ordered(worker))
        assert isinstance(failed, ExportFailed)
        assert worker.returns == [3]
        stats = await pool.stats()
        assert (stats.stored, stats.segments, stats.reserved) == (0, 0, 270 if fault == "it hangs" else 0)
        assert worker.release.calls == []
        worker.go_on.set()
        await empty(pool)
        worker.fails_from = 99
        sibling = await pool.export(worker, "now", worker.parked("bob", "p" * 16, "o"))
        assert isinstance(sibling, Exported), "nobody waits for the prompt any more"
        await pool.retain(TrajectoryId("bob"), NONE)
        await empty(pool)

    run(scene)


def test_an_export_that_is_cancelled_with_its_caller_leaves_nothing() -> None:
    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker()
        worker.go_on.clear()
        export = asyncio.ensure_future(pool.export(worker, "now", ordered(worker)))
        await until(lambda: worker.running == 1)
        export.cancel()
        with pytest.raises(asyncio.CancelledError):
            await export
        assert (await pool.stats()).reserved == 270
        worker.go_on.set()
        await empty(pool)

    run(scene)


class Buffer:
    """What stands for the data of a segment: it says when it is let go of."""

    def __init__(self, key: str, freed: list[str]) -> None:
        weakref.finalize(self, freed.append, key)


class BufferWorker(FakeWorker):
    """Notes when its data is let go of, and what copies were under way then."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[str] = []

    def data(self, key: SequenceKey, first: int) -> object:
        return Buffer(f"{key} {first}", self.freed)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_what_is_let_go_of_again_and_again_during_its_export_is_freed_once_and_after_the_copy(times: int) -> None:
    async def scene() -> None:
        pool, worker = make_pool(), BufferWorker()
        worker.go_on.clear()
        export = asyncio.ensure_future(pool.export(worker, "now", ordered(worker)))
        await until(lambda: worker.running == 1)
        for _ in range(times):
            await pool.retain(ANN, NONE)
            assert worker.freed == []
        worker.go_on.set()
        made = await export
        assert isinstance(made, Exported)
        assert worker.freed == []
        for _ in range(times):
            await pool.retain(ANN, NONE)
        assert sorted(worker.freed) == [f"{(ANN, 2)} 0", f"{(ANN, 2)} 4"]
        await empty(pool)

    run(scene)


def test_what_is_read_is_freed_when_the_reader_is_done() -> None:
    async def scene() -> None:
        pool, worker = make_pool(), BufferWorker()
        made = await pool.export(worker, "now", ordered(worker))
        assert isinstance(made, Exported)
        lease, _ = await pool.lease([made.image.runs[1].segment], 600.0, HERE)
        for _ in range(2):
            await pool.retain(ANN, NONE)
        assert worker.freed == [f"{(ANN, 2)} 0"]
        for _ in range(2):
            await pool.close_lease(lease)
        assert sorted(worker.freed) == [f"{(ANN, 2)} 0", f"{(ANN, 2)} 4"]

    run(scene)


class Fate(FakeWorker):
    """Every task waits for a while, and some fail, as chance has it."""

    def __init__(self, luck: Random) -> None:
        super().__init__()
        self.luck = luck

    async def _export(self, key: SequenceKey, parts: Any) -> Any:
        for _ in range(self.luck.randrange(6)):
            await asyncio.sleep(0)
        if self.luck.random() < 0.15:
            raise self.luck.choice(list(FAULTS.values()))
        return await super()._export(key, parts)


@given(seed=st.integers(0, 2**32), budget=st.integers(40, 700))
@settings(max_examples=100, deadline=None)
def test_exports_resumes_and_reads_in_any_order_keep_the_books_and_leave_nothing(seed: int, budget: int) -> None:
    """Like the controller, each trajectory retains the image that its last export made and nothing else."""
    luck = Random(seed)
    named: set[Any] = set()
    """Segments that were told to be displaced."""
    missed: list[frozenset[Any]] = []
    """What was gone of each image that turned out to be incomplete."""

    async def live(pool: Any, worker: FakeWorker, name: str) -> None:
        image: Image | None = None
        prompt, output = "pppp pppp"[: luck.choice([0, 4, 9])], ""
        for epoch in range(1, 6):
            output += name[-1] * luck.randrange(1, 9)
            turn = Turn(luck.choice(list(Wait)), luck.randrange(5))
            order = worker.parked(name, prompt, output, epoch, image, turn)
            calls = [pool.export(worker, "now", order) for _ in range(luck.choice([1, 1, 1, 2]))]
            for event in await asyncio.gather(*calls):
                assert isinstance(event, Exported | ExportFailed)
                named.update(*(one.segments for one in event.displaced))
                image = event.image if isinstance(event, Exported) else image
            keep = segments(image) if image is not None else NONE
            await pool.retain(TrajectoryId(name), keep)
            if gone := keep - pool._ledger.known:
                missed.append(gone)
                image = None
                await pool.retain(TrajectoryId(name), NONE)
            elif keep:
                lease, _ = await pool.lease(sorted(keep), 600.0, HERE)
                await asyncio.sleep(0)
                await pool.close_lease(lease)
            await check(pool)
        await pool.retain(TrajectoryId(name), NONE)

    async def scene() -> None:
        pool, worker = make_pool(budget=budget, max_object_bytes=80), Fate(luck)
        await asyncio.gather(*(live(pool, worker, f"t{i}") for i in range(5)))
        assert all(gone & named for gone in missed), "an image was lost and nobody was told"
        await empty(pool)

    run(scene)
