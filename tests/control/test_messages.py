"""Messages survive the way to another process, and tokens are told together."""

import pickle

import pytest

from rollout.control.messages import Admitted, Finished, Preempted, Sampled, WorkerEvent, merge_sampled
from rollout.types import Columns, FinishReason, TrajectoryId, Version
from tests.weights import written

WHO = {"trajectory_id": TrajectoryId("a/0"), "epoch": 3}


@pytest.mark.parametrize(
    "event",
    [
        Sampled(offset=7, columns=Columns([5, 6], [-1.0, -0.5], [Version(1), Version(2)]), **WHO),
        Sampled(offset=0, columns=Columns(), **WHO),
        Admitted(cached_tokens=1, restored_tokens=2, recomputed_tokens=3, written=written(3), **WHO),
        Finished(reason=FinishReason.STOP, **WHO),
    ],
)
def test_events_are_the_same_on_the_other_side(event: WorkerEvent) -> None:
    copy = pickle.loads(pickle.dumps(event, protocol=5))
    assert copy == event
    assert type(copy) is type(event)


def test_tokens_of_a_trajectory_are_one_event_if_nothing_else_of_it_is_in_between() -> None:
    other = Sampled(trajectory_id=TrajectoryId("b/0"), epoch=1, offset=0, columns=Columns.single(9, -1.0, Version(1)))
    preempted = Preempted(**WHO)
    events = [_sampled(0, 5), other, _sampled(1, 6), preempted, _sampled(2, 7), _sampled(3, 8)]
    assert merge_sampled(events) == (_sampled(0, 5, 6), other, preempted, _sampled(2, 7, 8))


def _sampled(offset: int, *ids: int) -> Sampled:
    count = len(ids)
    return Sampled(offset=offset, columns=Columns(list(ids), [-1.0] * count, [Version(1)] * count), **WHO)
