"""Messages survive the way to another process."""

import pickle

import pytest

from rollout.control.messages import Admitted, Finished, Sampled, WorkerEvent
from rollout.types import Columns, FinishReason, TrajectoryId, Version

WHO = {"trajectory_id": TrajectoryId("a/0"), "epoch": 3}


@pytest.mark.parametrize(
    "event",
    [
        Sampled(offset=7, columns=Columns([5, 6], [-1.0, -0.5], [Version(1), Version(2)]), **WHO),
        Sampled(offset=0, columns=Columns(), **WHO),
        Admitted(cached_tokens=1, restored_tokens=2, recomputed_tokens=3, **WHO),
        Finished(reason=FinishReason.STOP, **WHO),
    ],
)
def test_events_are_the_same_on_the_other_side(event: WorkerEvent) -> None:
    copy = pickle.loads(pickle.dumps(event, protocol=5))
    assert copy == event
    assert type(copy) is type(event)
