"""The controller actor between workers and pools that say what the test tells them to."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from rollout.cluster import controller as module
from rollout.cluster import orders, supervision
from rollout.cluster.controller import ControllerActor
from rollout.cluster.description import Batch, ServiceDescription, WorkerDescription
from rollout.cluster.workforce import Post
from rollout.config import load_config
from rollout.control.messages import Admitted, Displaced, Exported, ExportFailed, Parked, Sampled
from rollout.control.submission import Submission
from rollout.kv.keys import Fingerprint
from rollout.text import read_tokenizer_files
from rollout.types import (
    Columns,
    FinishReason,
    GroupId,
    Image,
    Keep,
    NodeId,
    Phase,
    SamplingParams,
    SegmentId,
    SegmentRun,
    Then,
    TrajectoryId,
    Version,
    Wait,
    WorkerId,
)
from tests.weights import WEIGHTS, written

NODE, WORKER, ANN = NodeId("node"), WorkerId("worker-0"), TrajectoryId("ann/0")


class Method:
    """Of a fake actor: notes its calls, and answers by a function that may wait or raise."""

    def __init__(self, answer: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._answer = answer
        self.calls: list[tuple[Any, ...]] = []

    def remote(self, *args: Any) -> Any:
        self.calls.append(args)
        return asyncio.ensure_future(self._answer(*args))


async def nothing(*_: Any) -> None:
    return None


class FakeWorker:
    """Its process is what `incarnation` says; `tell` hands out events by the next poll."""

    def __init__(self) -> None:
        self.incarnation = "first"
        self.gone: Exception | None = None
        self.silent_s = 0.0
        self.told: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.number = 0
        self.start, self.stop, self.release = (Method(nothing) for _ in range(3))
        self.poll, self.describe, self.warm = Method(self._poll), Method(self._describe), Method(self._warm)

    def tell(self, *events: Any) -> None:
        self.told.put_nowait(events)

    async def _poll(self, acknowledged: int, wait_s: float) -> Batch:
        assert acknowledged == self.number
        try:
            async with asyncio.timeout(wait_s):
                events = await self.told.get()
        except TimeoutError:
            events = ()
        if self.gone is not None:
            self.number = 0
            raise self.gone
        self.number += 1
        return Batch(incarnation=self.incarnation, number=self.number, silent_s=self.silent_s, events=events)

    async def _warm(self) -> int:
        return 64

    async def _describe(self) -> WorkerDescription:
        return self.described

    @property
    def described(self) -> WorkerDescription:
        return WorkerDescription(
            worker=WORKER,
            node=NODE,
            incarnation=self.incarnation,
            fingerprint=Fingerprint("fingerprint"),
            page_tokens=16,
            token_bytes=8,
            max_context=512,
            max_running=4,
            weights=WEIGHTS,
            weights_bytes=0,
            digest="digest",
        )


class FakePool:
    """Its exports are answered when the test does it."""

    def __init__(self) -> None:
        self.answers: list[asyncio.Future[Exported | ExportFailed]] = []
        self.export = Method(self._export)
        self.retain, self.drop, self.expect, self.warmed = (Method(nothing) for _ in range(4))
        self.room, self.spilled = Method(nothing), Method(nothing)

    async def _export(self, *_: Any) -> Exported | ExportFailed:
        self.answers.append(answer := asyncio.get_running_loop().create_future())
        return await answer


class Scene:
    """A controller with one worker and one pool, and a trajectory."""

    def __init__(self, model: Path, **cluster: Any) -> None:
        config = load_config(
            {
                "model": {"path": model},
                "cluster": {"health_interval_s": 0.02, "unresponsive_s": 60.0} | cluster,
                "pool": {"budget_bytes": "1GiB", "export_timeout_s": 0.05},
                "abort": {"keep": "pool"},
            }
        )
        self.worker, self.pool = FakeWorker(), FakePool()
        description = ServiceDescription(
            config=config,
            vocab_size=320,
            max_context=512,
            generation_defaults={},
            tokenizer=read_tokenizer_files(model),
        )
        posts = {WORKER: Post(actor=self.worker, placement=None)}
        self.actor = ControllerActor(description, posts, [self.worker.described], {NODE: self.pool}, WEIGHTS)
        self.epoch = 0

    async def begin(self) -> None:
        await self.actor.begin()
        await until(lambda: len(self.worker.poll.calls) > 0)
        submission = Submission(
            group_id=GroupId("ann"),
            prompt_ids=tuple(range(4, 24)),
            sampling=(SamplingParams(max_new_tokens=50),),
            seeds=(1,),
        )
        await self.actor.submit([submission])
        await self.started()

    async def started(self) -> None:
        """The trajectory was started once more."""
        self.epoch += 1
        await until(lambda: len(self.worker.start.calls) == self.epoch)
        incarnation, assignment = self.worker.start.calls[-1]
        assert (incarnation, assignment.epoch) == (self.worker.incarnation, self.epoch)

    def event(self, kind: Any, **fields: Any) -> Any:
        return kind(trajectory_id=ANN, epoch=self.epoch, **fields)

    async def parked(self) -> None:
        """It sampled a token and was parked; its export was ordered."""
        orders = len(self.pool.answers)
        self.worker.tell(
            self.event(Admitted, cached_tokens=0, restored_tokens=0, recomputed_tokens=0, written=written(0)),
            self.event(Sampled, offset=0, columns=Columns([7], [-1.0], [Version(0)])),
            self.event(Parked, kv_tokens=20, prompt_pages=1, page_keys=(b"page",), written=written(20)),
        )
        await until(lambda: len(self.pool.answers) == orders + 1)

    async def phase(self, phase: Phase) -> None:
        await until(lambda: self.actor._core.phases == {phase: 1})


def image() -> Image:
    runs = (SegmentRun(node=NODE, segment=SegmentId("s1"), first=0, pages=2),)
    return Image(runs=runs, kv_tokens=20, written=written(20))


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(120.0):
        while not done():
            await asyncio.sleep(0.001)


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 180.0))


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each kill forbids a restart."""
    found: list[bool] = []
    monkeypatch.setattr(supervision.ray, "kill", lambda actor, no_restart=True: found.append(no_restart))
    return found


def test_what_a_pool_says_after_the_deadline_is_let_go_of(
    kv_model: Path, kills: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "GRACE_S", 0.05)

    async def scene() -> None:
        here = Scene(kv_model)
        await here.begin()
        ticket = asyncio.ensure_future(here.actor.abort(None, Keep.POOL, Then.HOLD, 120.0))
        await here.parked()
        report = await ticket
        assert report.found == (ANN,)
        assert here.actor._core.counters.export_failures == 1
        await here.actor.resume(None)
        await here.started()
        here.pool.answers[0].set_result(Exported(trajectory_id=ANN, epoch=1, image=image(), sent_bytes=160))
        await until(lambda: (ANN, frozenset()) in here.pool.retain.calls)
        assert here.actor._core.counters.export_failures == 1
        assert here.actor._core.counters.exported_bytes == 0

    run(scene)


def test_a_worker_that_answers_again_after_an_error_is_replaced_all_the_same(kv_model: Path, kills: list[bool]) -> None:
    async def scene() -> None:
        here = Scene(kv_model)
        await here.begin()
        here.worker.gone = ActorUnavailableError("a connection was reset", None)
        await until(lambda: kills == [False])
        assert here.actor._core.counters.workers_lost == 1
        assert len(here.worker.start.calls) == 1
        here.worker.gone, here.worker.incarnation = None, "second"
        await here.started()
        assert here.actor._core.counters.restarts == 1

    run(scene)


@pytest.mark.parametrize("how", ["does not answer", "hangs"])
def test_a_worker_that_does_nothing_is_killed_and_may_restart(kv_model: Path, kills: list[bool], how: str) -> None:
    async def scene() -> None:
        here = Scene(kv_model, unresponsive_s=2.0)
        await here.begin()
        if how == "hangs":
            here.worker.silent_s = 2.1
        else:
            here.worker.poll._answer = lambda *_: asyncio.sleep(60)
        await until(lambda: kills[:1] == [False])
        here.worker.silent_s, here.worker.number, here.worker.incarnation = 0.0, 0, "second"
        here.worker.poll._answer = here.worker._poll
        await here.started()

    run(scene)


def test_a_worker_that_never_comes_back_ends_what_waits_for_it(kv_model: Path, kills: list[bool]) -> None:
    async def scene() -> None:
        here = Scene(kv_model, start_timeout_s=0.3)
        await here.begin()
        here.worker.gone = ActorUnavailableError("a connection was reset", None)
        here.worker.describe._answer = lambda *_: asyncio.sleep(60)
        (delivery,) = await here.actor.next_groups(1, 120.0, "call", (), ())
        (trajectory,) = delivery.trajectories
        assert trajectory.finish_reason is FinishReason.ERROR
        assert "no worker is left: worker-0: TimeoutError" in str(trajectory.error)
        assert kills == [True]

    run(scene)


def test_a_fault_while_events_are_handled_fails_the_run_instead_of_stopping_it(
    kv_model: Path, kills: list[bool]
) -> None:
    async def scene() -> None:
        here = Scene(kv_model)
        await here.begin()
        here.worker.tell(here.event(Sampled, offset=3, columns=Columns([7], [-1.0], [Version(0)])))
        (delivery,) = await here.actor.next_groups(1, 120.0, "call", (), ())
        assert "AssertionError" in str(delivery.trajectories[0].error)
        assert kills == [True]

    run(scene)


def test_an_export_whose_worker_dies_is_counted_and_the_trajectory_goes_on(kv_model: Path, kills: list[bool]) -> None:
    async def scene() -> None:
        here = Scene(kv_model)
        await here.begin()
        ticket = asyncio.ensure_future(here.actor.abort(None, Keep.POOL, Then.REQUEUE, 120.0))
        await here.parked()
        cause = ActorDiedError()
        here.pool.answers[0].set_exception(RayTaskError("export", "traceback", cause))
        assert (await ticket).found == (ANN,)
        await here.started()
        assert here.actor._core.counters.export_failures == 1

    run(scene)


def test_an_export_that_failed_is_told_with_what_it_displaced(kv_model: Path, kills: list[bool]) -> None:
    async def scene() -> None:
        here = Scene(kv_model)
        await here.begin()
        ticket = asyncio.ensure_future(here.actor.abort(None, Keep.POOL, Then.HOLD, 120.0))
        await here.parked()
        here.pool.answers[0].set_result(Exported(trajectory_id=ANN, epoch=1, image=image(), sent_bytes=160))
        await ticket
        await here.actor.resume(None)
        await here.started()
        assert [told[1].wait for told in here.pool.expect.calls] == [Wait.QUEUED, Wait.STARTING]
        ticket = asyncio.ensure_future(here.actor.abort(None, Keep.POOL, Then.HOLD, 120.0))
        here.worker.tell(
            here.event(Admitted, cached_tokens=0, restored_tokens=20, recomputed_tokens=0, written=written(20)),
            here.event(Sampled, offset=1, columns=Columns([7, 8], [-1.0, -1.0], [Version(0)] * 2)),
            here.event(Parked, kv_tokens=22, prompt_pages=1, page_keys=(b"page",), written=written(22)),
        )
        await until(lambda: len(here.pool.answers) == 2)
        lost = Displaced(trajectory_id=ANN, segments=frozenset({SegmentId("s1")}))
        failed = ExportFailed(trajectory_id=ANN, epoch=2, error="PoolFullError", displaced=(lost,))
        here.pool.answers[1].set_result(failed)
        await ticket
        counters = here.actor._core.counters
        assert (counters.export_failures, counters.displaced_images) == (1, 1)

    run(scene)


def test_a_pool_hears_when_its_worker_has_touched_shared_memory(kv_model: Path, kills: list[bool]) -> None:
    async def scene() -> None:
        here = Scene(kv_model)
        await here.begin()
        await until(lambda: here.pool.warmed.calls == [("first", 64)])

    run(scene)


def test_a_node_that_spills_is_told_once(kv_model: Path, kills: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)

    async def spilled(*_: Any) -> int | None:
        return {1: None, 2: 0}.get(len(here_pool[0].spilled.calls), 1000)

    here_pool: list[FakePool] = []

    async def scene() -> None:
        here = Scene(kv_model)
        here_pool.append(here.pool)
        here.pool.spilled._answer = spilled
        await here.begin()
        await until(lambda: len(here.pool.spilled.calls) > 5)
        assert here.actor._core.troubles == ("node node: its object store spilled 1000 bytes to disk",)

    run(scene)
