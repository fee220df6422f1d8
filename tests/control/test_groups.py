"""Groups from submission to delivery: in order, once, whole."""

import pytest

from rollout.control.groups import Groups
from rollout.control.records import Batch, Record
from rollout.control.submission import Submission
from rollout.errors import DuplicateKeyError
from rollout.types import FinishReason, GroupId, Phase, TrajectoryId, Version
from tests.control.scene import columns, submission
from tests.weights import VERSIONS


def add(groups: Groups, submission: Submission, now: float = 0.0) -> list[Record]:
    """The members of a new group."""
    return groups.add(submission, Batch(), now).members


def end(groups: Groups, *records: Record) -> None:
    for record in records:
        record.enter(Phase.FINISHED)
        record.finish_reason = FinishReason.STOP
        groups.ended(record)


def delivered(groups: Groups, count: int = 99) -> list[str]:
    return [delivery.group_id for delivery in groups.take(count, "call")]


def test_a_group_has_a_record_for_every_seed_in_submission_order() -> None:
    groups = Groups(VERSIONS)
    first, second = add(groups, submission("a", n=2), now=3.0), add(groups, submission("b"), now=4.0)
    assert [record.trajectory_id for record in (*first, *second)] == ["a/0", "a/1", "b/0"]
    assert [record.order for record in (*first, *second)] == [0, 1, 2]
    assert [record.seed for record in first] == [0, 1]
    assert [record.group.submitted_at for record in (*first, *second)] == [3.0, 3.0, 4.0]
    assert groups.records() == (*first, *second)
    assert groups.get(TrajectoryId("a/1")) is first[1]
    assert groups.get(TrajectoryId("a")) is None


def test_a_group_is_complete_when_its_last_member_is_over() -> None:
    groups = Groups(VERSIONS)
    first, second, third = add(groups, submission(n=3))
    end(groups, second, third)
    assert (groups.complete, groups.take(1, "call")) == (0, [])
    end(groups, first)
    assert groups.complete == 1
    (delivery,) = groups.take(1, "call")
    assert [trajectory.sample_index for trajectory in delivery.trajectories] == [0, 1, 2]


def test_groups_are_taken_in_the_order_they_were_completed() -> None:
    groups = Groups(VERSIONS)
    members = {name: add(groups, submission(name)) for name in "abc"}
    for name in "cab":
        end(groups, *members[name])
    assert delivered(groups, 2) == ["c", "a"]
    assert delivered(groups, 0) == []
    assert delivered(groups) == ["b"]
    assert delivered(groups) == []


def test_what_was_taken_is_forgotten_and_nothing_else() -> None:
    groups = Groups(VERSIONS)
    end(groups, *add(groups, submission("job-1")))
    (other,) = add(groups, submission("job-10"))
    assert delivered(groups) == ["job-1"]
    assert groups.get(TrajectoryId("job-1/0")) is None
    assert groups.records() == (other,)


def test_a_key_is_in_use_until_its_group_was_handed_out() -> None:
    groups = Groups(VERSIONS)
    (record,) = add(groups, submission("a"))
    other = submission("a", n=2)
    with pytest.raises(DuplicateKeyError, match="'a'"):
        groups.check([other])
    end(groups, record)
    with pytest.raises(DuplicateKeyError):
        groups.check([other])
    assert groups.records() == (record,)
    assert delivered(groups) == ["a"]
    assert groups.check([other]) == [other]
    assert [again.order for again in add(groups, other, now=2.0)] == [1, 2]


def test_a_snapshot_says_all_and_does_not_change_afterwards() -> None:
    (record,) = add(Groups(VERSIONS), submission(budget=4), now=1.0)
    record.columns.extend(columns(0, 2))
    before = record.snapshot()
    record.columns.append(7, -1.0, Version(3))
    after = record.snapshot()
    assert (before.group_id, before.trajectory_id) == (GroupId("g"), TrajectoryId("g/0"))
    assert (before.output_ids, before.logprobs, before.finish_reason) == ((100, 101), (0.0, -0.125), None)
    assert after.output_ids == (100, 101, 7)
    assert [(run.version, run.tokens) for run in after.versions] == [(0, 2), (3, 1)]
    assert before.metadata == {"key": "g"}


def test_ids_of_trajectories_and_groups_are_resolved_each_once() -> None:
    groups = Groups(VERSIONS)
    first, second = add(groups, submission("job-1", n=2))
    (other,) = add(groups, submission("job-10"))
    assert groups.resolve(None) == ([first, second, other], ())
    assert groups.resolve(["job-1/1"]) == ([second], ())
    assert groups.resolve(["job-1"]) == ([first, second], ())
    assert groups.resolve(["job-1/1", "job-1", "job-1/1"]) == ([second, first], ())
    assert groups.resolve(["job-10", "job", "job-1/2", "job-1/"]) == ([other], ("job", "job-1/2", "job-1/"))
    assert groups.resolve([]) == ([], ())


def test_groups_are_coming_until_they_are_taken() -> None:
    groups = Groups(VERSIONS)
    for name in "ab":
        end(groups, *add(groups, submission(name)))
    assert (groups.coming, groups.complete) == (2, 2)
    groups.take(1, "call")
    assert (groups.coming, groups.complete) == (1, 1)


def test_held_members_are_counted_once_for_their_group() -> None:
    groups = Groups(VERSIONS)
    first, second = add(groups, submission("a", n=2))
    add(groups, submission("b"))
    for record in (first, first, second):
        groups.hold(record)
    assert groups.coming == 1
    groups.unhold(first)
    groups.unhold(first)
    assert groups.coming == 1
    groups.unhold(second)
    assert groups.coming == 2


def test_looking_for_what_is_new_adds_nothing() -> None:
    groups = Groups(VERSIONS)
    a, b = submission("a"), submission("b")
    add(groups, a)
    assert groups.check([a, b]) == [b]
    assert groups.check([a, b]) == [b]
    assert [record.group_id for record in groups.records()] == ["a"]
