"""What an export sends, what is charged for it, what a failure leaves, and what readers keep."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from rollout.cluster import jobs
from rollout.cluster import pool as module
from rollout.errors import SegmentMissingError
from rollout.kv.keys import Fingerprint
from rollout.types import Image, SegmentId, SegmentRun, TrajectoryId
from tests.cluster.pool_scene import (
    FINGERPRINT,
    HERE,
    PAGE_TOKENS,
    THERE,
    TOKEN_BYTES,
    FakeWorker,
    NotStored,
    check,
    make_pool,
    run,
    stored,
    until,
)
from tests.weights import written


def test_an_image_covers_every_token_prompt_and_tail_included() -> None:
    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker()
        order = worker.parked("ann", "pppppp", "ooooo")
        image, sent = await stored(pool, worker, order)
        assert worker.sent == [("ann", 0, 1), ("ann", 1, 3)]
        assert worker.returns == [3], "one call, an object for the prompt and one for the rest"
        assert (image.kv_tokens, image.pages, sent) == (11, 3, 110)
        stats = await pool.stats()
        assert (stats.stored, stats.reserved, stats.segments, stats.exports, stats.sent) == (110, 0, 2, 1, 110)
        await check(pool)

    run(scene)


@pytest.mark.parametrize(("joined_bytes", "asked"), [(30, 2), (29, 1)])
def test_four_siblings_that_stop_together_send_their_prompt_once(
    monkeypatch: pytest.MonkeyPatch, joined_bytes: int, asked: int
) -> None:
    monkeypatch.setattr(jobs, "JOINED_BYTES", joined_bytes)

    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker()
        worker.go_on.clear()
        orders = [worker.parked(f"g/{i}", "pppppppp", f"{i}{i}{i}") for i in range(4)]
        exports = [asyncio.ensure_future(stored(pool, worker, order)) for order in orders]
        await until(lambda: worker.running == 1)
        assert worker.sent == [("g/0", 0, 2), ("g/0", 2, 3)][:asked]
        worker.go_on.set()
        images = [image for image, _ in await asyncio.gather(*exports)]
        assert sorted(worker.sent) == [("g/0", 0, 2), *((f"g/{i}", 2, 3) for i in range(4))]
        assert len({image.runs[0].segment for image in images}) == 1
        stats = await pool.stats()
        assert stats.sent == 80 + 4 * 30
        assert stats.shared == 3 * 80
        for order in orders:
            await check(pool)
            await pool.retain(order.trajectory_id, frozenset())
        assert (await pool.stats()).stored == 0
        await check(pool)

    run(scene)


def test_a_sibling_sends_the_prompt_when_the_first_one_fails_to() -> None:
    async def scene() -> None:
        pool, dying, worker = make_pool(), FakeWorker(fails=ActorDiedError()), FakeWorker()
        dying.go_on.clear()
        first = asyncio.ensure_future(stored(pool, dying, dying.parked("g/0", "pppp", "o")))
        second = asyncio.ensure_future(stored(pool, worker, worker.parked("g/1", "pppp", "o")))
        await until(lambda: dying.running == 1)
        assert worker.sent == []
        dying.go_on.set()
        with pytest.raises(NotStored, match="ActorDiedError"):
            await first
        image, _ = await second
        assert image.pages == 2
        assert (await pool.stats()).stored == 50
        await check(pool)

    run(scene)


def test_what_follows_a_prompt_and_is_stored_already_is_not_sent_with_it() -> None:
    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker()
        base, _ = await stored(pool, worker, worker.parked("ann", "pppp", "oooo"))
        await pool.drop(base.runs[0].segment)
        image, sent = await stored(pool, worker, worker.parked("bob", "pppp", "ooooo"))
        assert worker.sent[2:] == [("bob", 0, 1), ("bob", 2, 3)]
        assert (image.pages, sent, image.runs[1]) == (3, 50, base.runs[1])
        await check(pool)

    run(scene)


def test_what_follows_a_prompt_is_sent_apart_if_it_is_more_than_an_object() -> None:
    async def scene() -> None:
        pool, worker = make_pool(max_object_bytes=2 * PAGE_TOKENS * TOKEN_BYTES), FakeWorker()
        await stored(pool, worker, worker.parked("ann", "p" * 12, "o" * 8))
        await stored(pool, worker, worker.parked("bob", "q" * 12, "o" * 9))
        assert worker.returns == [2, 3, 2, 2, 2, 2]
        assert worker.sent[:3] == [("ann", 0, 2), ("ann", 2, 3), ("ann", 3, 5)]
        assert worker.sent[3:] == [("bob", 0, 2), ("bob", 2, 3), ("bob", 3, 5), ("bob", 5, 6)]
        await check(pool)

    run(scene)


def test_a_second_suspension_sends_only_what_is_new() -> None:
    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker()
        base, _ = await stored(pool, worker, worker.parked("ann", "pppp", "ooo"))
        image, sent = await stored(pool, worker, worker.parked("ann", "pppp", "oooooo", epoch=2, base=base))
        assert worker.sent[2:] == [("ann", 1, 3)]
        assert (image.pages, sent) == (3, 60)
        await pool.retain(TrajectoryId("ann"), frozenset(run.segment for run in image.runs))
        assert (await pool.stats()).stored == 40 + 60
        await check(pool)

    run(scene)


def test_pages_that_another_node_holds_are_not_sent_again() -> None:
    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker()
        base = Image(
            runs=(SegmentRun(node=THERE, segment=SegmentId("far"), first=3, pages=2),), kv_tokens=6, written=written(6)
        )
        image, _ = await stored(pool, worker, worker.parked("ann", "pppp", "ooooo", base=base))
        assert worker.sent == [("ann", 1, 3)]
        assert image.runs[0] == SegmentRun(node=THERE, segment=SegmentId("far"), first=3, pages=1)

    run(scene)


def test_a_base_whose_segment_is_gone_is_sent_again_from_there_on() -> None:
    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker()
        base, _ = await stored(pool, worker, worker.parked("ann", "pppp", "oooo"))
        await pool.drop(base.runs[1].segment)
        image, _ = await stored(pool, worker, worker.parked("ann", "pppp", "ooooo", epoch=2, base=base))
        assert worker.sent[2:] == [("ann", 1, 3)]
        assert image.runs[0] == base.runs[0]
        assert image.pages == 3
        await check(pool)

    run(scene)


def test_long_runs_are_split_into_objects_of_bounded_size() -> None:
    async def scene() -> None:
        pool, worker = make_pool(max_object_bytes=2 * PAGE_TOKENS * TOKEN_BYTES), FakeWorker()
        image, sent = await stored(pool, worker, worker.parked("ann", "p" * 20, "o" * 3))
        assert worker.sent == [("ann", 0, 2), ("ann", 2, 4), ("ann", 4, 5), ("ann", 5, 6)]
        assert [run.pages for run in image.runs] == [2, 2, 1, 1]
        assert sent == 230
        await check(pool)

    run(scene)


def test_an_export_that_does_not_fit_is_refused_and_leaves_what_was_held() -> None:
    async def scene() -> None:
        pool, worker = make_pool(budget=100), FakeWorker()
        base, _ = await stored(pool, worker, worker.parked("ann", "pppp", "ooo"))
        for _ in range(3):
            with pytest.raises(NotStored, match="PoolFullError: 80 bytes asked for, 30 of 100"):
                await stored(pool, worker, worker.parked("ann", "pppp", "o" * 8, epoch=2, base=base))
            assert pool._ledger.held_by(TrajectoryId("ann")) == {run.segment for run in base.runs}
        stats = await pool.stats()
        assert (stats.stored, stats.reserved, stats.refused, stats.exports) == (70, 0, 3, 1)
        await check(pool)

    run(scene)


def test_a_failure_half_way_lets_go_of_what_was_sent_for_it() -> None:
    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker()
        worker.fails_from = 2
        with pytest.raises(NotStored, match="ActorDiedError"):
            await stored(pool, worker, worker.parked("ann", "pppppppp", "o" * 8))
        assert worker.sent == [("ann", 0, 2), ("ann", 2, 4)]
        stats = await pool.stats()
        assert (stats.stored, stats.reserved, stats.segments) == (0, 0, 0)
        await check(pool)

    run(scene)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_worker_is_told_to_free_what_is_stored_once_all_of_it_is(ordered: bool) -> None:
    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker()
        worker.go_on.clear()
        order = worker.parked("ann", "pppp", "ooo", release=ordered)
        export = asyncio.ensure_future(stored(pool, worker, order))
        await until(lambda: worker.running == 1)
        assert worker.release.calls == []
        worker.go_on.set()
        await export
        assert worker.release.calls == [("now", ("ann", 1))] * ordered

    run(scene)


@pytest.mark.parametrize("page", [0, 1])
def test_a_worker_keeps_what_was_not_stored_until_the_controller_says_otherwise(page: int) -> None:
    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker()
        worker.fails_from = page
        with pytest.raises(NotStored, match="ActorDiedError"):
            await stored(pool, worker, worker.parked("ann", "pppp", "ooo"))
        assert worker.release.calls == []

    run(scene)


def test_what_a_later_export_superseded_is_not_freed_by_the_pool() -> None:
    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker()
        await stored(pool, worker, worker.parked("ann", "pppp", "oooo", epoch=2))
        with pytest.raises(NotStored, match="SupersededError"):
            await stored(pool, worker, worker.parked("ann", "pppp", "ooo", epoch=1))
        assert worker.release.calls == [("now", ("ann", 2))]

    run(scene)


def test_a_late_export_stays_charged_until_it_can_write_no_more() -> None:
    async def scene() -> None:
        pool, worker = make_pool(export_timeout_s=0.05), FakeWorker()
        worker.go_on.clear()
        with pytest.raises(NotStored, match=r"did not answer within 0\.05 s"):
            await stored(pool, worker, worker.parked("ann", "pppp", "ooo"))
        stats = await pool.stats()
        assert (stats.reserved, stats.stored, pool._ledger.held_by(TrajectoryId("ann"))) == (70, 0, frozenset())
        worker.go_on.set()
        await until(lambda: pool._ledger.reserved == 0)
        await check(pool)

    run(scene)


@pytest.mark.parametrize("fingerprint", [Fingerprint("another"), FINGERPRINT])
def test_an_export_that_is_not_what_was_ordered_is_refused(fingerprint: Fingerprint) -> None:
    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker(fingerprint=fingerprint)
        order = worker.parked("ann", "pppp", "ooo")
        if fingerprint == FINGERPRINT:
            order = replace(order, kv_tokens=6)
        with pytest.raises(NotStored, match="SegmentDamagedError"):
            await stored(pool, worker, order)
        assert (await pool.stats()).reserved == 0
        await check(pool)

    run(scene)


def test_a_reader_that_died_does_not_keep_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now, time_ns=time.time_ns))

    async def scene() -> None:
        nonlocal now
        pool, worker = make_pool(budget=70), FakeWorker()
        image, _ = await stored(pool, worker, worker.parked("ann", "pppp", "ooo"))
        await pool.lease([run.segment for run in image.runs], 5.0, HERE)
        await pool.retain(TrajectoryId("ann"), frozenset())
        with pytest.raises(NotStored, match="PoolFullError"):
            await stored(pool, worker, worker.parked("bob", "qqqq", "ooo"))
        now += 5.0
        await stored(pool, worker, worker.parked("bob", "qqqq", "ooo"))
        await check(pool)

    run(scene)


def test_a_lease_covers_all_or_nothing_and_ends_once() -> None:
    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker()
        image, _ = await stored(pool, worker, worker.parked("ann", "pppp", "ooo"))
        segments = [run.segment for run in image.runs]
        with pytest.raises(SegmentMissingError):
            await pool.lease([*segments, SegmentId("never")], 5.0, HERE)
        lease, leased = await pool.lease(segments, 600.0, HERE)
        assert [manifest.tokens for manifest, _ in leased] == [4, 3]
        await pool.retain(TrajectoryId("ann"), frozenset())
        assert ((await pool.stats()).still_read, len(pool._segments)) == (70, 2)
        await pool.close_lease(lease)
        await pool.close_lease(lease)
        assert ((await pool.stats()).still_read, len(pool._segments)) == (0, 0)
        await check(pool)

    run(scene)


def test_names_are_never_given_twice_not_even_by_a_pool_that_was_restarted() -> None:
    async def scene() -> None:
        named: list[str] = []
        for _ in range(2):
            pool, worker = make_pool(), FakeWorker()
            image, _ = await stored(pool, worker, worker.parked("ann", "pppp", "ooo"))
            named += [run.segment for run in image.runs]
            lease, _ = await pool.lease([run.segment for run in image.runs], 5.0, HERE)
            named.append(str(lease))
        assert len(set(named)) == 6

    run(scene)
