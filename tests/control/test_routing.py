"""Who starts first, and where: against sums done by hand, and so that nobody waits for ever."""

import contextlib
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.control.commands import Recall, Release
from rollout.control.fleet import REMEMBERED_GROUPS
from rollout.control.lengths import Lengths
from rollout.control.messages import WorkerFacts
from rollout.control.routing import Router, start_s, to_go
from rollout.types import AbortReason, GroupId, Keep, Phase, TrajectoryId, WorkerId
from tests.control.stage import W1, W2, W3, Stage, facts, member, pace, start_of, started, submission

A, B = member("a"), member("b")
KNOWN = facts(step=pace(0.01, 0.001), restore=pace(0.02, 1e-7), load=pace(0.01, 1e-8))
"""A step takes 10 ms and 1 ms for each sequence; a token of prefill 1 ms, one of kB from the pool 0.1 ms."""


def three(known: WorkerFacts = KNOWN, **options: object) -> Stage:
    """w1 on node n1; w2 and w3 on n2."""
    stage = Stage(W1, W2, W3, **options)  # type: ignore[arg-type]
    for worker in (W1, W2, W3):
        stage.report(worker, facts=known)
    return stage


@contextlib.contextmanager
def room_only_on(stage: Stage, worker: WorkerId) -> Iterator[None]:
    others = [each for each in stage.controller._fleet.workers if each.worker_id != worker]
    rooms = [each.max_running for each in others]
    for each in others:
        each.max_running = 0
    yield
    for each, room in zip(others, rooms, strict=True):
        each.max_running = room


def suspended(
    stage: Stage, keep: Keep, *, tokens: int = 100, worker: WorkerId = W1, group: str = "a", prompt: int = 4
) -> TrajectoryId:
    """One that has so many tokens and was left on, or exported from, this worker."""
    t = member(group)
    with room_only_on(stage, worker):
        stage.submit(group, budget=4000, prompt=range(prompt))
    assert stage.record(t).worker == worker
    stage.admit(t)
    stage.sample(t, tokens)
    stage.hold(t, keep=keep)
    return t


def seconds(stage: Stage, t: TrajectoryId = A) -> dict[WorkerId, float]:
    """Until it decodes on each."""
    return {each.worker_id: start_s(stage.record(t), each) for each in stage.controller._fleet.workers}


# What it takes to start -----------------------------------------------------------------------------


def test_a_new_one_computes_its_prompt_where_its_group_did_not_run() -> None:
    stage = three()
    stage.submit("a", 1, prompt=range(60))
    first = stage.record(A).worker
    expected = {worker: pytest.approx(0.060) for worker in (W1, W2, W3)}
    assert first is not None
    assert seconds(stage) == expected | {first: 0.0}


def test_a_worker_is_expected_to_have_the_prompts_of_the_last_groups_that_it_ran() -> None:
    stage = Stage(W1, room=999)
    for number in range(REMEMBERED_GROUPS):
        stage.submit(f"g{number}")
    stage.submit("g0", 1)
    worker = stage.controller._fleet.workers[0]
    assert worker.knows(GroupId("g0"))
    stage.submit("last")
    assert not worker.knows(GroupId("g0"))
    assert worker.knows(GroupId("g1"))
    assert worker.knows(GroupId("last"))


def test_on_its_own_worker_nothing_is_copied_from_the_device_and_bytes_from_the_host() -> None:
    """103 tokens have KV, the last one is fed by the next step; elsewhere all are computed. Its prompt of 4 is cached
    where it ran."""
    for keep, at_home in ((Keep.DEVICE, 0.0), (Keep.HOST, 0.01 + 103_000 * 1e-8)):
        stage = three()
        suspended(stage, keep)
        elsewhere = pytest.approx(0.103)
        assert seconds(stage) == {W1: pytest.approx(at_home), W2: elsewhere, W3: elsewhere}


def test_an_image_costs_its_bytes_twice_on_another_node() -> None:
    """The worker that ran it has its prompt; the others read that, too."""
    stage = three()
    suspended(stage, Keep.POOL, prompt=64)
    assert stage.record(A).tokens == 164
    here, all_of_it = 0.02 + 99_000 * 1e-7, 0.02 + 163_000 * 1e-7
    expected = {W1: here, W2: 2 * all_of_it, W3: 2 * all_of_it}
    assert seconds(stage) == {worker: pytest.approx(cost) for worker, cost in expected.items()}


def test_what_came_after_the_image_is_computed() -> None:
    stage = three()
    suspended(stage, Keep.POOL)
    before = seconds(stage)
    stage.extend(A, range(50))
    assert stage.record(A).worker == W1
    stage.sample(A)
    stage.down(W1)
    after = seconds(stage)
    assert after[W3] - before[W3] == pytest.approx(0.051)


def test_without_any_kv_everything_but_the_cached_prompt_is_computed() -> None:
    stage = three()
    suspended(stage, Keep.NONE, prompt=64)
    assert seconds(stage) == {W1: pytest.approx(0.099), W2: pytest.approx(0.163), W3: pytest.approx(0.163)}


def test_of_what_was_never_measured_a_start_costs_nothing() -> None:
    stage = Stage(W1)
    stage.submit("a")
    assert seconds(stage) == {W1: 0.0}


# Where it goes --------------------------------------------------------------------------------------


def goes_to(stage: Stage, t: TrajectoryId = A) -> WorkerId | None:
    stage.resume(t)
    record = stage.record(t)
    return record.worker if record.on_worker else None


def loaded(stage: Stage, worker: WorkerId, count: int) -> None:
    """So many others run there."""
    with room_only_on(stage, worker):
        stage.submit(f"load{worker}", count, budget=4000)


def test_it_goes_where_its_prompt_is() -> None:
    stage = three()
    stage.submit("a", 2, prompt=range(600))
    assert stage.record(A).worker == stage.record(member("a", 1)).worker


def test_it_goes_to_where_its_image_is_read_from_its_own_node() -> None:
    stage = three()
    suspended(stage, Keep.POOL, worker=W2, prompt=1)
    loaded(stage, W2, 1)
    assert goes_to(stage) == W3, "w2 has one more, w1 is another node"


def test_it_goes_to_another_node_rather_than_to_a_full_batch() -> None:
    """Of 3,900 tokens each takes 1 ms more for each sequence in the batch; the copy takes 60 ms more."""
    stage = three()
    suspended(stage, Keep.POOL, worker=W2, prompt=1)
    loaded(stage, W2, 2)
    loaded(stage, W3, 2)
    assert goes_to(stage) == W1


def test_a_batch_counts_by_the_tokens_that_are_to_be_sampled_in_it() -> None:
    """Of a slice of 8 tokens each takes 1 ms more in company; computing 99 tokens elsewhere takes longer."""
    sliced, whole = (
        three(policies=[{"kind": "slice_budget", "tokens": 8}] if slices else []) for slices in (True, False)
    )
    for stage in (sliced, whole):
        suspended(stage, Keep.NONE, prompt=100, tokens=4)
        loaded(stage, W1, 1)
    assert goes_to(sliced) == W1
    assert goes_to(whole) != W1


def test_where_nothing_was_measured_most_room_decides() -> None:
    stage = Stage(W1, W2)
    loaded(stage, W1, 1)
    stage.submit("a")
    assert stage.record(A).worker == W2


def test_most_room_may_be_asked_for() -> None:
    stage = three(resume={"prefer": "most_room"})
    stage.submit("a", 3, prompt=range(600))
    assert {stage.record(member("a", i)).worker for i in range(3)} == {W1, W2, W3}


def test_what_it_takes_until_it_is_done_is_the_start_and_its_tokens() -> None:
    stage = three()
    suspended(stage, Keep.DEVICE, tokens=100)
    loaded(stage, W1, 2)
    worker = next(each for each in stage.controller._fleet.workers if each.worker_id == W1)
    whole = 3900 * (0.01 + 3 * 0.001)
    assert Router(None, stage.controller.keeping.experience).done_s(stage.record(A), worker) == pytest.approx(whole)
    assert Router(8, stage.controller.keeping.experience).done_s(stage.record(A), worker) == pytest.approx(8 * 0.013)


# How long it may become -----------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(0, 50))
@settings(deadline=None)
def test_what_remains_is_the_mean_of_what_longer_ones_had_more(lengths: list[int], tokens: int) -> None:
    seen = Lengths()
    for length in lengths:
        seen.add(length)
    longer = [length - tokens for length in lengths if length > tokens]
    assert seen.remaining(tokens) == (pytest.approx(sum(longer) / len(longer)) if longer else None)
    assert len(seen) == len(lengths)


def test_tokens_to_go_are_told_by_the_group_else_the_batch_else_the_budget() -> None:
    stage = Stage(W1, room=9)
    stage.submit_all(submission("a", 3, budget=50), submission("b", 2, budget=50))
    stage.sample(A, 10)
    assert to_go(stage.record(A)) == 40.0
    stage.finish(B, 30)
    assert to_go(stage.record(A)) == 20.0
    stage.finish(member("a", 1), 14)
    assert to_go(stage.record(A)) == 4.0
    stage.sample(A, 10)
    assert to_go(stage.record(A)) == 10.0, "longer than any of its group; those of the batch had 10 more"
    stage.sample(A, 20)
    assert to_go(stage.record(A)) == 10.0, "the longest of all: its budget"


# Who goes first -------------------------------------------------------------------------------------


def full(**options: object) -> Stage:
    """One place, taken by z; its group and b's have shown their lengths: 5 and 40."""
    stage = Stage(W1, room=1, resume=options)
    for group, length in (("short", 5), ("long", 40)):
        stage.submit(group, 2)
        stage.finish(member(group), length)
        stage.hold(member(group, 1))
    stage.submit("z")
    stage.resume("short/1", "long/1")
    return stage


def test_the_oldest_goes_first() -> None:
    assert started(full().finish(member("z"), 1)) == [(W1, member("short", 1))]


def test_the_longest_goes_first_if_asked_for() -> None:
    assert started(full(order="longest").finish(member("z"), 1)) == [(W1, member("long", 1))]


def test_of_equally_long_ones_the_oldest_goes_first() -> None:
    stage = Stage(W1, room=1, resume={"order": "longest"})
    for group in ("z", "a", "b"):
        stage.submit(group)
    assert started(stage.finish(member("z"), 1)) == [(W1, A)]


# Room at home ---------------------------------------------------------------------------------------

SLOW_POOL = facts(restore=pace(1.0))


def homeless(known: WorkerFacts | None, keep: Keep = Keep.HOST) -> Stage:
    """a has 103 tokens of KV on w1, which has no room; w2 has had some since now."""
    stage = Stage(W1, W2, room=1)
    suspended(stage, keep)
    loaded(stage, W1, 1)
    for worker in (W1, W2) if known is not None else ():
        stage.report(worker, facts=known)
    stage.resume(A)
    assert stage.phase(A) is Phase.QUEUED
    return stage


def test_it_waits_for_room_at_home_as_long_as_moving_it_would_take_and_then_moves() -> None:
    """The ski-rental rule: 20 ms and 103 kB at 10 MB/s."""
    stage = homeless(KNOWN)
    assert stage.wait(0.030) == []
    assert [type(each) for each in stage.wait(0.001)] == [Recall]
    stage.answer_all()
    assert start_of(stage.commands, A).worker == W2
    image = start_of(stage.commands, A).assignment.image
    assert image is not None
    assert image.kv_tokens == 103


def test_where_computing_it_again_is_faster_than_moving_it_waits_so_long_and_then_does_that() -> None:
    """The ski-rental rule: 103 ms."""
    stage = homeless(SLOW_POOL)
    assert stage.wait(0.102) == []
    release, start = stage.wait(0.002)
    assert isinstance(release, Release)
    assert started([start]) == [(W2, A)]
    assert start_of([start], A).assignment.image is None
    assert start_of([start], A).assignment.kv_tokens == 103


def test_a_move_that_the_pool_has_no_room_for_is_not_tried_again() -> None:
    stage = homeless(KNOWN)
    stage.wait(1.0)
    stage.answer_all(pool_is_full=True)
    stage.wait(1.0)
    assert stage.record(A).worker == W2
    assert len([each for each in stage.commands if isinstance(each, Recall)]) == 1


def test_if_room_comes_in_time_it_goes_home() -> None:
    stage = homeless(KNOWN)
    stage.wait(0.03)
    assert started(stage.finish(member("loadw1"), 1)) == [(W1, A)]


@pytest.mark.parametrize("known", [None, facts(prefill_s=None)])
def test_before_any_worker_knows_what_computing_takes_it_waits(known: WorkerFacts | None) -> None:
    stage = homeless(known)
    assert stage.wait(1e6) == []
    assert started(stage.finish(member("loadw1"), 1)) == [(W1, A)]


def test_the_wait_begins_when_another_worker_has_room_and_again_with_every_time_it_is_queued() -> None:
    stage = homeless(SLOW_POOL)
    stage.wait(0.1)
    stage.hold(A, keep=Keep.HOST)
    stage.resume(A)
    assert stage.wait(0.1) == []
    loaded(stage, W2, 1)
    stage.hold(A, keep=Keep.HOST)
    stage.resume(A)
    assert stage.wait(5.0) == [], "there is no room anywhere"
    stage.finish(member("loadw2"), 1)
    assert stage.wait(0.1) == []
    assert started(stage.wait(0.01)) == [(W2, A)]


def test_younger_ones_take_the_room_that_it_does_not_want() -> None:
    stage = homeless(KNOWN)
    assert started(stage.submit("b")) == [(W2, B)]


def test_with_room_at_home_it_goes_there_unless_another_worker_promises_much_less() -> None:
    """Of 3,900 tokens each takes 11 ms alone, and 12 in company: not a tenth less. Then with three more: a fifth."""
    for company, worker in ((1, W1), (3, W2)):
        stage = Stage(W1, W2)
        for each in (W1, W2):
            stage.report(each, facts=KNOWN)
        suspended(stage, Keep.DEVICE)
        loaded(stage, W1, company)
        stage.resume(A)
        stage.answer_all()
        assert start_of(stage.commands, A).worker == worker
        assert (start_of(stage.commands, A).assignment.image is not None) == (worker == W2), "it was moved"


def test_a_preference_for_most_room_does_not_take_it_from_a_home_with_room() -> None:
    stage = Stage(W1, W2, resume={"prefer": "most_room"})
    suspended(stage, Keep.HOST)
    loaded(stage, W1, 2)
    assert goes_to(stage) == W1


# Nobody starves -------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32),
    order=st.sampled_from(["oldest", "longest"]),
    prefer=st.sampled_from(["cheapest", "most_room", "other"]),
    keep=st.sampled_from(["auto", "device", "host", "pool", "none"]),
)
@settings(max_examples=60, deadline=None)
def test_however_slices_and_places_fall_everything_ends(seed: int, order: str, prefer: str, keep: str) -> None:
    """Case E4: without new submissions, in a number of steps that is bounded by the work."""
    luck = Random(seed)
    stage = three(
        keep=keep,
        room=1,
        policies=[{"kind": "slice_budget", "tokens": 2}],
        resume={"order": order, "prefer": prefer},
    )
    length = {member(f"g{i}", j): luck.randint(1, 8) for i in range(4) for j in range(2)}
    stage.submit_all(*(submission(f"g{i}", 2) for i in range(4)))
    for _ in range(sum(length.values()) * 3):
        if not stage.controller.unfinished_groups:
            break
        stage.wait(0.01)
        for t in sorted(stage.running):
            stage.admit(t)
            stage.sample(t)
            done = len(stage.record(t).columns)
            if done == length[t]:
                stage.finish(t)
            elif done % 2 == 0:
                stage.park(t, AbortReason.SLICE_BUDGET)
        stage.answer_all()
    assert stage.controller.unfinished_groups == 0, stage.controller.state(stage.now)
    assert sum(len(each.trajectories) for each in stage.take()) == len(length)


def test_a_stream_of_new_ones_does_not_keep_an_older_one_waiting() -> None:
    """Case E4."""
    stage = Stage(W1, room=1)
    stage.submit("n0")
    stage.submit("a")
    stage.sample(member("n0"), 2)
    stage.submit("n1")
    assert started(stage.finish(member("n0"))) == [(W1, A)]
    stage.sample(A)
    stage.hold(A, keep=Keep.HOST)
    assert stage.running == {member("n1")}
    stage.resume(A)
    for number in range(2, 5):
        stage.submit(f"n{number}")
    assert started(stage.finish(member("n1"), 1)) == [(W1, A)]


def test_a_long_one_goes_before_any_number_of_short_ones_but_these_go_before_new_ones_of_their_length() -> None:
    """Case E4, of `order: longest`."""
    stage = full(order="longest")
    stage.submit("n", 2)
    assert started(stage.finish(member("z"), 1)) == [(W1, member("n"))], "nothing is known of it: its whole budget"
    assert started(stage.finish(member("n"), 50)) == [(W1, member("n", 1))]
