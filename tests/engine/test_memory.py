"""The `memory` policy: before a preemption drops KV, the youngest is parked with all of it, one at a time."""

import random

import pytest

from rollout.config import WriteThrough
from rollout.control.messages import Admitted, Parked, Preempted, Sampled
from rollout.types import AbortReason, Columns, Image, Keep, NodeId, SegmentId, SegmentRun, TrajectoryId, Version
from tests.engine.scripted import PAGE_TOKENS, Scripted, count_up
from tests.weights import written

PAGES = 40
SPARE = 4


def crowded(count: int = 4, **changes: object) -> Scripted:
    """Sequences that together need more pages than there are."""
    scripted = Scripted(pages=PAGES, **({"spare_pages": SPARE} | changes))  # type: ignore[arg-type]
    for index in range(count):
        scripted.submit(f"{index}", (index,) * 8, max_new_tokens=60)
    return scripted


def known(ids: list[int]) -> Columns:
    return Columns(ids, [0.0] * len(ids), [Version(0)] * len(ids))


def step_until_parked(scripted: Scripted, count: int = 1) -> Parked:
    for _ in range(1000):
        if len(parked := scripted.of(Parked)) >= count:
            event = parked[-1]
            assert isinstance(event, Parked)
            return event
        scripted.step()
    raise AssertionError(scripted.engine.stats)


def test_the_youngest_is_parked_when_fewer_pages_are_left_and_none_is_preempted() -> None:
    scripted = crowded()
    while scripted.cache.available >= SPARE:
        assert not scripted.of(Parked)
        scripted.step()
    assert scripted.engine.stats.running == 4
    scripted.step()
    parked = scripted.parked("3")
    assert (parked.reason, len(scripted.of(Parked))) == (AbortReason.MEMORY, 1)
    assert parked.kv_tokens == 8 + len(scripted.ids("3")) - 1
    assert not scripted.of(Preempted)


def test_it_does_not_fire_again_before_the_pages_of_the_first_are_free() -> None:
    scripted = crowded()
    step_until_parked(scripted)
    while not scripted.of(Preempted) and len(scripted.of(Parked)) == 1:
        assert scripted.cache.available < SPARE + 4
        scripted.step()
    assert len(scripted.of(Parked)) == 1  # pages ran out first: the export took longer than there was room for


@pytest.mark.parametrize("keep", [Keep.POOL, Keep.DEVICE])
def test_what_it_frees_is_used_by_the_others(keep: Keep) -> None:
    scripted = crowded()
    parked = step_until_parked(scripted)
    before = scripted.cache.available
    key = (parked.trajectory_id, parked.epoch)
    if keep is Keep.DEVICE:
        scripted.engine.keep(key, keep)
    else:
        scripted.engine.release(key)
    assert scripted.cache.available >= before + parked.kv_tokens // PAGE_TOKENS
    assert scripted.cache.available > SPARE
    scripted.step()
    assert len(scripted.of(Parked)) == 1


@pytest.mark.parametrize("count", [1, 2])
def test_one_alone_is_left_running(count: int) -> None:
    scripted = Scripted(pages=10, spare_pages=9)
    for index in range(count):
        scripted.submit(f"{index}", (index,) * 4, max_new_tokens=20)
    scripted.run()
    assert len(scripted.of(Parked)) == 0
    assert len(scripted.ids("0")) == 20


def test_without_the_policy_pages_run_out_and_one_is_preempted() -> None:
    scripted = crowded(spare_pages=0)
    scripted.run()
    assert scripted.of(Preempted)
    assert not scripted.of(Parked)


def test_one_that_is_being_restored_is_not_the_youngest() -> None:
    scripted = Scripted(pages=PAGES, spare_pages=SPARE)
    scripted.restorer.held = True
    for name in "ab":
        scripted.submit(name, (5,) * 20, max_new_tokens=60)
    scripted.step()
    run = SegmentRun(node=NodeId("n"), segment=SegmentId("s"), first=0, pages=4)
    scripted.submit("c", (6,) * 16, image=Image(runs=(run,), kv_tokens=15, written=written(15)))
    parked = step_until_parked(scripted)
    assert parked.trajectory_id == "b"


def test_pages_on_their_way_to_the_host_are_waited_for() -> None:
    scripted = Scripted(pages=PAGES, spare_pages=SPARE, host_pages=40, write=WriteThrough(kind="write_through"))
    for index in range(3):
        scripted.submit(f"{index}", (index,) * 8, max_new_tokens=60)
    parked = step_until_parked(scripted)
    scripted.copier.held = True
    scripted.engine.keep((parked.trajectory_id, parked.epoch), Keep.HOST)
    while not scripted.of(Preempted) and scripted.engine.stats.running > 1 and not scripted.engine.blocked:
        scripted.step()
        assert len(scripted.of(Parked)) == 1
    scripted.copier.held = False
    scripted.run()
    assert len(scripted.ids("0")) == 60


@pytest.mark.parametrize("seed", range(8))
def test_no_token_is_ever_lost_and_all_come_to_their_end(seed: int) -> None:
    """Parked ones are released, some steps later, and resumed from their tokens, as a controller does."""
    draw = random.Random(seed)
    scripted = Scripted(pages=PAGES, spare_pages=draw.randint(1, 8), max_running=8)
    lengths = {f"{index}": draw.randint(1, 100) for index in range(10)}
    for name, length in lengths.items():
        scripted.submit(name, (int(name),) * draw.randint(1, 20), max_new_tokens=length)
    prompts = {str(s.trajectory_id): s.assignment.prompt_ids for s in scripted.engine._scheduler.sequences()}
    said: dict[str, list[int]] = {name: [] for name in lengths}
    held: list[tuple[int, Parked]] = []
    parks = steps = 0
    while scripted.engine.stats.running or scripted.engine.stats.waiting or held:
        steps += 1
        assert steps < 5000, scripted.engine.stats
        for event in scripted.step():
            if isinstance(event, Sampled):
                assert event.offset == len(said[event.trajectory_id])
                said[event.trajectory_id] += event.columns.ids
            if isinstance(event, Parked):
                assert event.reason is AbortReason.MEMORY
                parks += 1
                held.append((steps + draw.randint(0, 6), event))
        for due, event in [entry for entry in held if entry[0] <= steps]:
            held.remove((due, event))
            name = event.trajectory_id
            scripted.engine.release((name, event.epoch))
            output = known(said[name])
            scripted.submit(name, prompts[name], output=output, epoch=event.epoch + 1, max_new_tokens=lengths[name])
    assert said == {name: [count_up(TrajectoryId(name), i) for i in range(n)] for name, n in lengths.items()}
    assert parks > 0
    counts = scripted.engine.stats.device
    assert counts.free + counts.tree == PAGES


def test_what_comes_back_is_admitted_only_where_it_need_not_give_way_at_once() -> None:
    """Given back to the same worker at once, it waits until there is room for more than its pages."""
    scripted = crowded()
    resumed = 0
    while len(scripted.of(Parked)) + len(scripted.of(Admitted)) < 100 and not scripted.engine.idle:
        for event in scripted.step():
            if isinstance(event, Parked):
                name = event.trajectory_id
                resumed += 1
                scripted.engine.release((name, event.epoch))
                ids = scripted.ids(name)
                output = known(ids)
                scripted.submit(name, (int(name),) * 8, output=output, epoch=event.epoch + 1, max_new_tokens=60)
    assert scripted.engine.idle
    assert [len(scripted.ids(f"{index}")) for index in range(4)] == [60] * 4
    assert resumed <= 4
