"""A pool between workers that answer when the test says so."""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from ray.exceptions import ActorDiedError

from rollout.cluster.pool import Pool
from rollout.config import PoolConfig
from rollout.control.commands import Export
from rollout.control.messages import Exported, ExportFailed
from rollout.kv.image import Manifest
from rollout.kv.keys import Fingerprint
from rollout.types import Image, NodeId, SegmentId, SequenceKey, TrajectoryId, Turn, Wait, WorkerId
from tests.weights import written

PAGE_TOKENS = 4
TOKEN_BYTES = 10
HERE, THERE = NodeId("here"), NodeId("there")
FINGERPRINT = Fingerprint("fingerprint")
SOON = Turn(Wait.QUEUED, 0)
Sent = tuple[TrajectoryId, int, int]
"""Whose pages, from which one to which one."""


class FakeRef:
    """A reference that can be awaited several times; a waiter that is cancelled does not end the task."""

    def __init__(self, work: Coroutine[Any, Any, list[Manifest]]) -> None:
        self._task = asyncio.ensure_future(work)

    def __await__(self) -> Generator[Any, None, list[Manifest]]:
        return asyncio.shield(self._task).__await__()


class Releases:
    """Whose pages a worker was told to free."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, SequenceKey]] = []

    def remote(self, incarnation: str, key: SequenceKey) -> None:
        self.calls.append((incarnation, key))


class FakeWorker:
    """Its export task is complete when the test lets it go on; `sent` is what it was asked for."""

    def __init__(self, fails: Exception | None = None, fingerprint: Fingerprint = FINGERPRINT) -> None:
        self.tokens: dict[SequenceKey, int] = {}
        self.sent: list[Sent] = []
        self.returns: list[int] = []
        """Of each task."""
        self.release = Releases()
        self.running = 0
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.fails = fails
        self.fails_from = 1000
        """Page from which on its tasks fail."""
        self.hangs_from = 0
        """Page from which on they wait for `go_on`."""
        self.slow: dict[SequenceKey, asyncio.Event] = {}
        """What tasks of these sequences wait for besides."""
        self.fingerprint = fingerprint

    @property
    def export(self) -> Any:
        return self

    def options(self, *, num_returns: int) -> Any:
        self.returns.append(num_returns)
        return self

    def remote(self, incarnation: str, key: SequenceKey, parts: list[tuple[int, int]]) -> Any:
        assert self.returns[-1] == 1 + len(parts)
        self.sent += [(key[0], first, stop) for first, stop in parts]
        return FakeRef(self._export(key, parts)), *(self.data(key, first) for first, _ in parts)

    def data(self, key: SequenceKey, first: int) -> object:
        return object()

    async def _export(self, key: SequenceKey, parts: list[tuple[int, int]]) -> list[Manifest]:
        last = parts[-1][0]
        self.running += 1
        if last >= self.hangs_from:
            await self.go_on.wait()
        if key in self.slow:
            await self.slow[key].wait()
        self.running -= 1
        if self.fails is not None:
            raise self.fails
        if last >= self.fails_from:
            raise ActorDiedError()
        return [self.manifest(key, first, stop) for first, stop in parts]

    def manifest(self, key: SequenceKey, first: int, stop: int) -> Manifest:
        tokens = min(stop * PAGE_TOKENS, self.tokens[key]) - first * PAGE_TOKENS
        return Manifest(
            fingerprint=self.fingerprint,
            page_tokens=PAGE_TOKENS,
            token_bytes=TOKEN_BYTES,
            tokens=tokens,
            checksums=(0,) * (stop - first),
        )

    def parked(
        self,
        name: str,
        prompt: str,
        output: str,
        epoch: int = 1,
        base: Image | None = None,
        turn: Turn = SOON,
        *,
        release: bool = True,
    ) -> Export:
        """The order for a sequence, each token a letter; a page's name is its letters and all before it."""
        tokens = prompt + output
        self.tokens[TrajectoryId(name), epoch] = len(tokens)
        whole = len(tokens) // PAGE_TOKENS
        return Export(
            worker=WorkerId("worker"),
            node=HERE,
            trajectory_id=TrajectoryId(name),
            epoch=epoch,
            kv_tokens=len(tokens),
            prompt_pages=len(prompt) // PAGE_TOKENS,
            page_keys=tuple(tokens[: (page + 1) * PAGE_TOKENS].encode() for page in range(whole)),
            written=written(len(tokens)),
            base=base,
            turn=turn,
            release=release,
        )


def make_pool(budget: int = 10_000, *, copy_room: int = 0, **fields: Any) -> Pool:
    config = PoolConfig.model_validate({"budget_bytes": budget, "export_timeout_s": 60.0} | fields)
    return Pool(HERE, config, PAGE_TOKENS, TOKEN_BYTES, FINGERPRINT, copy_room)


class NotStored(Exception):
    """An export failed."""

    def __init__(self, event: ExportFailed) -> None:
        super().__init__(event.error)
        self.event = event


async def answer(pool: Pool, worker: FakeWorker, order: Export) -> Exported:
    """What the pool tells of an export that it completes; raises `NotStored` if it does not."""
    event = await pool.export(worker, "now", order)
    assert (event.trajectory_id, event.epoch) == (order.trajectory_id, order.epoch)
    if isinstance(event, ExportFailed):
        raise NotStored(event)
    return event


async def stored(pool: Pool, worker: FakeWorker, order: Export) -> tuple[Image, int]:
    """The image that an export makes, and the bytes sent for it."""
    event = await answer(pool, worker, order)
    return event.image, event.sent_bytes


async def check(pool: Pool) -> None:
    assert await pool.audit() is None


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 180.0))


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(120.0):
        while not done():
            await asyncio.sleep(0)


def segments(image: Image) -> frozenset[SegmentId]:
    return frozenset(run.segment for run in image.runs)


async def empty(pool: Pool) -> None:
    """Nothing is stored, charged or read, and nothing is left over."""
    await until(lambda: pool._ledger.reserved == 0 and not pool._late)
    await check(pool)
    stats = await pool.stats()
    assert (stats.stored, stats.reserved, stats.still_read, stats.copied) == (0, 0, 0, 0)
    assert (stats.segments, stats.images, len(pool._jobs)) == (0, 0, 0)
    assert not any(pool._warmth._living.values())
