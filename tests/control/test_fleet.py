"""Who goes where, and when: oldest first, most room, and elsewhere if that is preferred."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.control.fleet import Fleet
from rollout.control.intent import Home
from rollout.control.messages import WorkerUp
from rollout.control.pooled import Pooled
from rollout.control.records import Batch, Group, Record
from rollout.control.routing import most_room
from rollout.types import Keep, NodeId, Priority, TrajectoryId, WorkerId
from tests.control.scene import W1, W2, W3, submission
from tests.weights import written


def make_fleet(
    rooms: dict[WorkerId, int],
    *,
    prefer_other: bool = False,
    size: int | None = None,
    patience_s: float = math.inf,
    to_go: Callable[[Record], float] | None = None,
) -> Fleet:
    fleet = Fleet(
        size=size or len(rooms),
        prefer_other=prefer_other,
        choose=most_room,
        patience=lambda record: patience_s,
        to_go=to_go,
    )
    for worker, room in rooms.items():
        fleet.join(WorkerUp(worker=worker, node=NodeId("n"), incarnation="a", max_running=room))
    return fleet


def make_record(
    order: int, *workers: WorkerId, home: WorkerId | None = None, priority: Priority = Priority.TRAIN
) -> Record:
    trajectory_id = TrajectoryId(f"t{order}")
    return Record(
        trajectory_id=trajectory_id,
        group=Group(submission=submission(priority=priority), batch=Batch(), submitted_at=0.0),
        sample_index=0,
        order=order,
        seed=0,
        pooled=Pooled(trajectory_id),
        workers=[*workers],
        home=Home(worker=home, epoch=1, where=Keep.HOST, kv_tokens=4, written=written(4)) if home is not None else None,
    )


def dispatch(fleet: Fleet, *records: Record, now: float = 0.0) -> list[tuple[int, WorkerId]]:
    """Order and worker of all that start when `records` are queued."""
    for record in records:
        fleet.enqueue(record)
    return [(record.order, worker.worker_id) for record, worker in fleet.starts(lambda record: True, now)]


def test_the_oldest_starts_first_however_it_was_queued() -> None:
    fleet = make_fleet({W1: 2})
    assert dispatch(fleet, make_record(3), make_record(1), make_record(2)) == [(1, W1), (2, W1)]
    assert [record.order for record in fleet.drain()] == [3]


def test_most_room_is_filled_first() -> None:
    fleet = make_fleet({W1: 1, W2: 3})
    started = dispatch(fleet, *(make_record(i) for i in range(4)))
    assert [worker for _, worker in started[:2]] == [W2, W2]
    assert sorted(worker for _, worker in started) == [W1, W2, W2, W2]


def test_room_comes_back_when_a_trajectory_leaves() -> None:
    fleet = make_fleet({W1: 1})
    first, second = make_record(0), make_record(1)
    assert dispatch(fleet, first, second) == [(0, W1)]
    first.workers.append(W1)
    assert dispatch(fleet) == []
    assert fleet.leave(first).worker_id == W1
    assert dispatch(fleet) == [(1, W1)]


def test_without_a_preference_a_trajectory_may_go_back_to_its_worker() -> None:
    assert dispatch(make_fleet({W1: 3, W2: 1}), make_record(0, W1)) == [(0, W1)]


def test_with_a_preference_it_goes_elsewhere_even_where_there_is_less_room() -> None:
    fleet = make_fleet({W1: 3, W2: 1}, prefer_other=True)
    assert dispatch(fleet, make_record(0, W1), make_record(1, W1)) == [(0, W2), (1, W1)]


def test_only_the_last_worker_counts_as_left() -> None:
    assert dispatch(make_fleet({W1: 1, W2: 1}, prefer_other=True), make_record(0, W2, W1)) == [(0, W2)]


def test_room_goes_first_to_who_left_another_worker() -> None:
    fleet = make_fleet({W1: 1}, prefer_other=True)
    assert dispatch(fleet, make_record(0, W1), make_record(1), make_record(2, W2)) == [(2, W1)]


def test_a_preference_leaves_no_room_empty() -> None:
    fleet = make_fleet({W1: 2}, prefer_other=True)
    assert dispatch(fleet, make_record(0, W1), make_record(1, W1)) == [(0, W1), (1, W1)]


def test_new_trajectories_do_not_overtake_one_that_only_its_own_worker_has_room_for() -> None:
    """Case E4: otherwise a stream of new ones would starve it on a fleet of one."""
    fleet = make_fleet({W1: 1, W2: 0}, prefer_other=True)
    assert dispatch(fleet, make_record(0, W1), make_record(1)) == [(0, W1)]


@pytest.mark.parametrize("prefer_other", [False, True])
def test_a_trajectory_goes_home_even_where_there_is_less_room(prefer_other: bool) -> None:
    fleet = make_fleet({W1: 1, W2: 3}, prefer_other=prefer_other)
    assert dispatch(fleet, make_record(0, W1, home=W1)) == [(0, W1)]


def test_who_is_at_home_elsewhere_waits_and_is_passed_by_who_is_not() -> None:
    fleet = make_fleet({W1: 0, W2: 2})
    assert dispatch(fleet, make_record(0, W1, home=W1), make_record(1, W1), make_record(2)) == [(1, W2), (2, W2)]
    assert [record.order for record in fleet.drain()] == [0]


def test_who_is_at_home_does_not_overtake_an_older_one() -> None:
    """Case E4: otherwise two that take turns in the last room would starve it."""
    fleet = make_fleet({W1: 1})
    assert dispatch(fleet, make_record(0, W2), make_record(1, W1, home=W1)) == [(0, W1)]


def test_who_is_at_home_goes_before_younger_ones() -> None:
    fleet = make_fleet({W1: 1, W2: 1})
    assert dispatch(fleet, make_record(0, W1, home=W1), make_record(1, W1), make_record(2)) == [(0, W1), (1, W2)]


def test_a_home_that_is_lost_binds_nobody() -> None:
    assert dispatch(make_fleet({W1: 1}), make_record(0, W2, home=W2)) == [(0, W1)]


WORKERS = st.sampled_from([W1, W2, W3])


@given(
    rooms=st.dictionaries(WORKERS, st.integers(0, 4)),
    lives=st.lists(st.tuples(st.lists(WORKERS, max_size=2), st.booleans()), max_size=12),
    prefer_other=st.booleans(),
)
def test_routing_rules(
    rooms: dict[WorkerId, int], lives: list[tuple[list[WorkerId], bool]], prefer_other: bool
) -> None:
    fleet = make_fleet(rooms, prefer_other=prefer_other, size=3)
    homes = [next((w for w in workers[-1:] if settled and w in rooms), None) for workers, settled in lives]
    records = [make_record(order, *life[0], home=homes[order]) for order, life in enumerate(lives)]
    started = dict(dispatch(fleet, *reversed(records)))
    waiting = [record.order for record in fleet.drain()]
    left = {worker: room - list(started.values()).count(worker) for worker, room in rooms.items()}
    assert sorted([*started, *waiting]) == list(range(len(records)))
    assert waiting == sorted(waiting)
    assert min(left.values(), default=0) >= 0
    for order in waiting:
        home = homes[order]
        assert not (left[home] if home is not None else any(left.values())), "room is empty while somebody waits for it"
    for order, worker in started.items():
        assert homes[order] in (None, worker)
        back = worker == records[order].worker
        if prefer_other and back and homes[order] is None:
            assert not any(room for other, room in left.items() if other != worker)
        overtaken = [older for older in waiting if older < order and homes[older] in (None, worker)]
        assert not overtaken or (prefer_other and records[order].worker is not None and not back)


def test_nothing_is_hopeless_while_a_worker_may_come() -> None:
    fleet = make_fleet({}, size=2)
    assert fleet.hopeless is None
    fleet.give_up(W1, "no memory")
    fleet.give_up(W1, "no memory")
    assert fleet.hopeless is None
    fleet.give_up(W2, "killed")
    assert fleet.hopeless == "no worker is left: w1: no memory; w2: killed"


def test_a_worker_that_comes_back_after_all_gives_hope() -> None:
    fleet = make_fleet({}, size=1)
    fleet.give_up(W1, "killed")
    fleet.join(WorkerUp(worker=W1, node=NodeId("n"), incarnation="b", max_running=1))
    assert fleet.hopeless is None
    assert dispatch(fleet, make_record(0)) == [(0, W1)]


def test_a_dropped_worker_takes_nothing_any_more() -> None:
    fleet = make_fleet({W1: 1, W2: 1})
    assert fleet.drop(W1).worker_id == W1
    assert fleet.get(W1) is None
    assert dispatch(fleet, make_record(0), make_record(1)) == [(0, W2)]


def test_what_is_dequeued_does_not_start() -> None:
    fleet = make_fleet({})
    first, second = make_record(0), make_record(1)
    fleet.enqueue(first)
    fleet.enqueue(second)
    fleet.dequeue(first)
    fleet.join(WorkerUp(worker=W1, node=NodeId("n"), incarnation="a", max_running=4))
    assert dispatch(fleet) == [(1, W1)]


def test_joining_twice_asserts() -> None:
    fleet = make_fleet({W1: 1})
    with pytest.raises(AssertionError, match="w1 joined twice"):
        fleet.join(WorkerUp(worker=W1, node=NodeId("n"), incarnation="b", max_running=1))


def test_a_trajectory_is_taken_out_by_itself_and_not_by_its_place() -> None:
    fleet = make_fleet({})
    fresh, returning = [make_record(order) for order in (4, 0, 2)], [make_record(order, W1) for order in (3, 1, 5)]
    for record in (*fresh, *returning):
        fleet.enqueue(record)
    fleet.dequeue(fresh[2])
    fleet.dequeue(returning[0])
    assert fleet.drain() == [fresh[1], returning[1], fresh[0], returning[2]]


@pytest.mark.parametrize("workers", [(), (W1,)])
def test_taking_out_what_is_not_queued_asserts_though_another_is_in_its_place(workers: tuple[WorkerId, ...]) -> None:
    fleet = make_fleet({})
    fleet.enqueue(make_record(1, *workers))
    with pytest.raises(AssertionError, match="t1 is not queued"):
        fleet.dequeue(make_record(1, *workers))


def test_what_is_drained_is_in_submission_order_and_gone() -> None:
    fleet = make_fleet({})
    records = [make_record(order, *([W1] if order % 3 else [])) for order in range(9)]
    for record in reversed(records):
        fleet.enqueue(record)
    assert fleet.drain() == records
    assert fleet.drain() == []
    fleet.join(WorkerUp(worker=W1, node=NodeId("n"), incarnation="a", max_running=9))
    assert dispatch(fleet) == []


def test_with_a_preference_all_room_is_filled_and_none_exceeded() -> None:
    rooms = {W1: 3, W2: 1, W3: 2}
    fleet = make_fleet(rooms, prefer_other=True)
    records = [make_record(order, *([W1] if order < 6 else [])) for order in range(9)]
    started = dispatch(fleet, *records)
    assert sorted(worker for _, worker in started) == sorted(W for W, room in rooms.items() for _ in range(room))
    assert {order for order, worker in started if worker in (W2, W3)} == {0, 1, 2}, "who left w1 goes elsewhere first"
    assert {order for order, worker in started if worker == W1} == {3, 4, 5}, "and back where only that has room"
    assert dispatch(fleet) == []
    assert [record.order for record in fleet.drain()] == [6, 7, 8]


def test_with_a_preference_room_that_comes_back_is_filled_again_and_not_exceeded() -> None:
    fleet = make_fleet({W1: 1, W2: 1}, prefer_other=True)
    first, second = make_record(0, W1), make_record(1, W2)
    assert dispatch(fleet, first, second, make_record(2)) == [(0, W2), (1, W1)]
    first.workers.append(W2)
    fleet.leave(first)
    assert dispatch(fleet, first) == [(0, W2)], "older than the new one, and the other worker is full"
