"""Images in a pool that is full, exports of one trajectory that overlap, and readers on other nodes."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from rollout.cluster import jobs
from rollout.control.messages import Displaced, Exported
from rollout.errors import PoolFullError
from rollout.types import TrajectoryId, Turn, Wait
from tests.cluster.pool_scene import (
    HERE,
    THERE,
    FakeWorker,
    NotStored,
    answer,
    check,
    empty,
    make_pool,
    run,
    segments,
    stored,
    until,
)

ANN, BOB = TrajectoryId("ann"), TrajectoryId("bob")
NONE: frozenset[Any] = frozenset()


def turn(order: int, wait: Wait = Wait.QUEUED) -> Turn:
    return Turn(wait, order)


# A full pool --------------------------------------------------------------------------------------


def test_an_image_that_is_needed_later_makes_room_and_is_named() -> None:
    async def scene() -> None:
        pool, worker = make_pool(budget=100), FakeWorker()
        image, _ = await stored(pool, worker, worker.parked("ann", "pppp", "ooo", turn=turn(2)))
        made = await answer(pool, worker, worker.parked("bob", "qqqq", "ooo", turn=turn(1)))
        assert made.displaced == (Displaced(trajectory_id=ANN, segments=segments(image)),)
        stats = await pool.stats()
        assert (stats.stored, stats.images, stats.displaced_images, stats.refused) == (70, 1, 1, 0)
        assert stats.dropped["displaced"] == 2
        await check(pool)

    run(scene)


def test_an_image_that_is_needed_later_than_all_is_refused_before_anything_is_sent() -> None:
    async def scene() -> None:
        pool, worker = make_pool(budget=100), FakeWorker()
        await stored(pool, worker, worker.parked("ann", "pppp", "ooo", turn=turn(1)))
        sent = len(worker.sent)
        with pytest.raises(NotStored, match="PoolFullError") as refusal:
            await stored(pool, worker, worker.parked("bob", "qqqq", "ooo", turn=turn(2)))
        assert refusal.value.event.displaced == ()
        assert len(worker.sent) == sent
        assert (await pool.stats()).refused == 1
        await check(pool)

    run(scene)


def test_what_is_held_makes_room_until_it_is_queued_again() -> None:
    async def scene() -> None:
        pool, worker = make_pool(budget=100), FakeWorker()
        await stored(pool, worker, worker.parked("ann", "pppp", "ooo", turn=turn(1, Wait.HELD)))
        await pool.expect(ANN, turn(1))
        with pytest.raises(NotStored, match="PoolFullError"):
            await stored(pool, worker, worker.parked("bob", "qqqq", "ooo", turn=turn(2)))
        await pool.expect(ANN, turn(1, Wait.RUNNING))
        made = await answer(pool, worker, worker.parked("bob", "qqqq", "ooo", turn=turn(2)))
        assert [one.trajectory_id for one in made.displaced] == [ANN]

    run(scene)


def test_a_change_of_mind_during_an_export_holds_for_its_image() -> None:
    async def scene() -> None:
        pool, worker = make_pool(budget=100), FakeWorker()
        worker.go_on.clear()
        export = asyncio.ensure_future(stored(pool, worker, worker.parked("ann", "pppp", "ooo", turn=turn(1))))
        await until(lambda: worker.running == 1)
        await pool.expect(ANN, turn(1, Wait.HELD))
        worker.go_on.set()
        await export
        made = await answer(pool, worker, worker.parked("bob", "qqqq", "ooo", turn=turn(2)))
        assert [one.trajectory_id for one in made.displaced] == [ANN]

    run(scene)


def test_an_export_that_fails_after_it_displaced_names_what_it_displaced() -> None:
    async def scene() -> None:
        pool, worker = make_pool(budget=100), FakeWorker()
        await stored(pool, worker, worker.parked("ann", "pppp", "ooo", turn=turn(2)))
        worker.fails = ActorDiedError()
        with pytest.raises(NotStored, match="ActorDiedError") as failure:
            await stored(pool, worker, worker.parked("bob", "qqqq", "ooo", turn=turn(1)))
        assert [one.trajectory_id for one in failure.value.event.displaced] == [ANN]
        await empty(pool)

    run(scene)


def test_a_prompt_that_another_image_needs_stays_when_one_is_displaced() -> None:
    async def scene() -> None:
        pool, worker = make_pool(budget=120), FakeWorker()
        await stored(pool, worker, worker.parked("g/0", "pppp", "ooo", turn=turn(1)))
        late, _ = await stored(pool, worker, worker.parked("g/1", "pppp", "xxx", turn=turn(9)))
        made = await answer(pool, worker, worker.parked("bob", "qqqq", "", turn=turn(2)))
        assert made.displaced == (
            Displaced(trajectory_id=TrajectoryId("g/1"), segments=frozenset({late.runs[1].segment})),
        )
        again = await answer(pool, worker, worker.parked("g/2", "pppp", "", turn=turn(3)))
        assert again.sent_bytes == 0
        await check(pool)

    run(scene)


def test_an_image_that_is_read_is_not_displaced() -> None:
    async def scene() -> None:
        pool, worker = make_pool(budget=100), FakeWorker()
        image, _ = await stored(pool, worker, worker.parked("ann", "pppp", "ooo", turn=turn(2)))
        lease, _ = await pool.lease([image.runs[1].segment], 600.0, HERE)
        order = worker.parked("bob", "qqqq", "ooo", turn=turn(1))
        with pytest.raises(NotStored, match="PoolFullError"):
            await stored(pool, worker, order)
        await pool.close_lease(lease)
        await stored(pool, worker, order)
        await check(pool)

    run(scene)


# Exports that overlap -----------------------------------------------------------------------------


@pytest.mark.parametrize("new_ends_first", [True, False])
def test_an_older_epoch_never_disturbs_what_a_newer_one_stored(
    monkeypatch: pytest.MonkeyPatch, new_ends_first: bool
) -> None:
    monkeypatch.setattr(jobs, "JOINED_BYTES", 0)  # the new one need not wait for all of the old one

    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker()
        worker.slow = {(ANN, epoch): asyncio.Event() for epoch in (1, 2)}
        orders = [worker.parked("ann", "pppp", "o" * (2 + epoch), epoch) for epoch in (1, 2)]
        old, new = (asyncio.ensure_future(pool.export(worker, "now", order)) for order in orders)
        await until(lambda: worker.running == 1)
        first, second = (new, old) if new_ends_first else (old, new)
        if new_ends_first:
            worker.slow[ANN, 1].set()  # its prompt, which the new one waits for
            await until(lambda: len(worker.sent) == 2)
            worker.slow[ANN, 1].clear()
        worker.slow[ANN, 2 if new_ends_first else 1].set()
        made = await first
        worker.slow[ANN, 1 if new_ends_first else 2].set()
        late = await second
        assert isinstance(made, Exported)
        if new_ends_first:
            assert not isinstance(late, Exported)
            assert late.error.startswith("SupersededError")
        newest = made if new_ends_first else late
        assert isinstance(newest, Exported)
        await pool.retain(ANN, segments(newest.image))
        assert pool._ledger.held_by(ANN) == segments(newest.image)
        await pool.lease(sorted(segments(newest.image)), 0.0, HERE)
        await check(pool)
        await pool.retain(ANN, NONE)
        await empty(pool)

    run(scene)


def test_a_late_failure_of_an_older_epoch_takes_nothing_from_a_newer_one() -> None:
    async def scene() -> None:
        pool, dying, worker = make_pool(), FakeWorker(fails=ActorDiedError()), FakeWorker()
        dying.go_on.clear()
        old = asyncio.ensure_future(pool.export(dying, "now", dying.parked("ann", "", "ooo", 1)))
        await until(lambda: dying.running == 1)
        image, _ = await stored(pool, worker, worker.parked("ann", "", "ooooo", 2))
        dying.go_on.set()
        assert not isinstance(await old, Exported)
        assert pool._ledger.held_by(ANN) == segments(image)
        await check(pool)

    run(scene)


def test_an_export_that_answers_twice_leaves_one_image() -> None:
    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker()
        worker.go_on.clear()
        order = worker.parked("ann", "pppp", "ooo")
        twice = [asyncio.ensure_future(answer(pool, worker, order)) for _ in range(2)]
        await until(lambda: worker.running == 1)
        worker.go_on.set()
        first, second = await asyncio.gather(*twice)
        await pool.retain(ANN, segments(first.image))
        assert (await pool.stats()).stored == 70
        await pool.lease(sorted(segments(first.image)), 0.0, HERE)
        assert segments(second.image) - segments(first.image) <= {second.image.runs[-1].segment}
        await check(pool)
        await pool.retain(ANN, NONE)
        await empty(pool)

    run(scene)


def test_what_is_released_while_an_export_builds_on_it_stays_for_that() -> None:
    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker()
        base, _ = await stored(pool, worker, worker.parked("ann", "pppp", "oooo"))
        worker.go_on.clear()
        order = worker.parked("ann", "pppp", "ooooo", epoch=2, base=base)
        export = asyncio.ensure_future(stored(pool, worker, order))
        await until(lambda: worker.running == 1)
        await pool.retain(ANN, NONE)
        worker.go_on.set()
        image, sent = await export
        assert sent == 10
        await pool.lease(sorted(segments(image)), 0.0, HERE)
        await check(pool)

    run(scene)


# What is counted ----------------------------------------------------------------------------------


def test_an_export_is_warm_if_its_process_has_touched_as_much_before() -> None:
    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker()
        kinds: list[tuple[int, int]] = []
        for name, release in [("a", "a"), ("b", ""), ("c", "b"), ("d", "c"), ("e", "")]:
            await stored(pool, worker, worker.parked(name, "", name * (9 if name == "e" else 8)))
            await pool.retain(TrajectoryId(release), NONE)
            stats = await pool.stats()
            kinds.append((stats.warm_exports, stats.cold_exports))
            if name == "d":
                await pool.warmed("now", 160)
        # 80 bytes are new; then they were touched; 160 are new; were touched; 170 are new, whatever the start warmed
        assert kinds == [(0, 1), (1, 1), (1, 2), (2, 2), (2, 3)]
        pool, worker = make_pool(), FakeWorker()
        await pool.warmed("now", 160)
        await stored(pool, worker, worker.parked("a", "", "a" * 16))
        await pool.export(worker, "a later process", worker.parked("b", "", "b" * 16))
        stats = await pool.stats()
        assert (stats.warm_exports, stats.cold_exports) == (1, 1)

    run(scene)


def test_reads_are_counted_by_where_they_go() -> None:
    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker()
        image, _ = await stored(pool, worker, worker.parked("ann", "pppp", "ooo"))
        await pool.lease([image.runs[0].segment], 600.0, HERE)
        await pool.lease([run.segment for run in image.runs], 600.0, THERE)
        stats = await pool.stats()
        assert (stats.read_here, stats.read_elsewhere) == (40, 70)

    run(scene)


def test_why_segments_are_gone_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "JOINED_BYTES", 0)  # so that a part of an image is stored in vain

    async def scene() -> None:
        pool, worker = make_pool(budget=200), FakeWorker()
        image, _ = await stored(pool, worker, worker.parked("ann", "pppp", "ooo"))
        await pool.drop(image.runs[0].segment)
        await pool.retain(ANN, NONE)
        worker.fails_from = 1
        with pytest.raises(NotStored):
            await stored(pool, worker, worker.parked("bob", "qqqq", "ooo"))
        worker.fails_from = 99
        await stored(pool, worker, worker.parked("cid", "", "o" * 15, turn=turn(9)))
        await stored(pool, worker, worker.parked("dan", "", "x" * 15, turn=turn(1)))
        stats = await pool.stats()
        assert stats.dropped == {"released": 1, "displaced": 1, "damaged": 1, "abandoned": 1}
        assert stats.spilled is None, "no raylet is the parent of this process"

    run(scene)


def test_an_audit_says_what_is_wrong() -> None:
    async def scene() -> None:
        pool, worker = make_pool(), FakeWorker()
        image, _ = await stored(pool, worker, worker.parked("ann", "pppp", "ooo"))
        assert await pool.audit() is None
        pool._ledger.stored += 1
        assert "pool of node here: 71" in str(await pool.audit())
        pool._ledger.stored -= 1
        del pool._segments[image.runs[0].segment]
        assert "objects and books differ" in str(await pool.audit())

    run(scene)


# Copies from other nodes --------------------------------------------------------------------------


def test_a_copy_is_charged_here_until_it_is_closed_or_late() -> None:
    async def scene() -> None:
        pool = make_pool(budget=100, copy_room=50)
        lease = await pool.lease_copy(120, 600.0)
        assert (await pool.stats()).copied == 120
        await pool.close_lease(lease)
        await pool.close_lease(lease)
        assert (await pool.stats()).copied == 0
        await pool.lease_copy(120, 0.0)
        await empty(pool)

    run(scene)


def test_a_copy_that_can_never_fit_is_refused_at_once_and_displaces_nothing() -> None:
    async def scene() -> None:
        pool, worker = make_pool(budget=100, copy_room=50), FakeWorker()
        await stored(pool, worker, worker.parked("ann", "pppp", "ooo", turn=turn(9, Wait.HELD)))
        with pytest.raises(PoolFullError, match="a copy of 81 bytes asked for, 30 of 100 are free"):
            await pool.lease_copy(81, 600.0)
        await pool.close_lease(await pool.lease_copy(80, 600.0))
        stats = await pool.stats()
        assert (stats.refused_copies, stats.displaced_images, stats.images) == (1, 0, 1)

    run(scene)


def test_a_copy_waits_for_others_to_end() -> None:
    async def scene() -> None:
        pool = make_pool(budget=100)
        first = await pool.lease_copy(80, 600.0)
        second = asyncio.ensure_future(pool.lease_copy(80, 600.0))
        await until(lambda: pool._ledger.refused_copies > 0)
        assert not second.done()
        await pool.close_lease(first)
        await pool.close_lease(await second)
        await empty(pool)

    run(scene)


def test_a_copy_waits_no_longer_than_its_reader() -> None:
    async def scene() -> None:
        pool = make_pool(budget=100)
        await pool.lease_copy(80, 600.0)
        with pytest.raises(PoolFullError):
            await pool.lease_copy(80, 0.01)

    run(scene)
