"""Trajectories by the groups they form, from submission until the whole group is over and has arrived.

A group is handed out to one call. If that call's answer is lost, and the driver says so, it is handed out again.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from rollout.control.pooled import Pooled
from rollout.control.records import Record, Submission
from rollout.errors import DuplicateKeyError
from rollout.types import Delivery, GroupId, TrajectoryId


class Groups:
    """Every trajectory, until its group has arrived at a driver."""

    def __init__(self) -> None:
        self._records: dict[TrajectoryId, Record] = {}
        self._groups: dict[GroupId, list[Record]] = {}
        self._submissions: dict[GroupId, Submission] = {}
        self._held: dict[GroupId, set[TrajectoryId]] = {}
        """Members on hold, of groups that have any."""
        self._complete: deque[GroupId] = deque()
        self._handed: dict[str, list[Delivery]] = {}
        """By the call that they were handed out to, until it is known whether they arrived."""
        self._returned: deque[Delivery] = deque()
        """Handed out to a call that was abandoned."""
        self._abandoned: set[str] = set()
        """Calls that are still under way although nobody waits for them."""
        self._submitted = 0
        self._epoch = 0
        """The highest of any group that was handed out: where a key that is used again begins."""

    def check(self, submissions: Sequence[Submission]) -> list[Submission]:
        """Those of `submissions` that are new; one that is here already, all of it equal, was told twice.

        Raises `DuplicateKeyError` if one has the id of another group that was not handed out yet.
        """
        new: dict[GroupId, Submission] = {}
        for submission in submissions:
            other = self._submissions.get(submission.group_id) or new.get(submission.group_id)
            if other is None:
                new[submission.group_id] = submission
            elif other != submission or submission.group_id in new:
                raise DuplicateKeyError(f"key {submission.group_id!r} is in use by a group that was not handed out yet")
        return list(new.values())

    def add(self, submission: Submission, now: float) -> list[Record]:
        """New records for a group that `check` let through."""
        group: list[Record] = []
        for index, seed in enumerate(submission.seeds):
            trajectory_id = TrajectoryId(f"{submission.group_id}/{index}")
            record = Record(
                trajectory_id=trajectory_id,
                group_id=submission.group_id,
                sample_index=index,
                order=self._submitted + index,
                prompt_ids=submission.prompt_ids,
                sampling=submission.sampling,
                seed=seed,
                submitted_at=now,
                metadata=submission.metadata,
                pooled=Pooled(trajectory_id),
                epoch=self._epoch,
            )
            group.append(record)
        self._submitted += len(group)
        self._records.update((record.trajectory_id, record) for record in group)
        self._groups[submission.group_id] = group
        self._submissions[submission.group_id] = submission
        return group

    def get(self, trajectory_id: TrajectoryId) -> Record | None:
        return self._records.get(trajectory_id)

    def records(self) -> tuple[Record, ...]:
        return tuple(self._records.values())

    def resolve(self, ids: Sequence[str] | None) -> tuple[list[Record], tuple[TrajectoryId, ...]]:
        """The records that `ids` name, each once, and the ids that name none; a group's id names its members."""
        if ids is None:
            return list(self._records.values()), ()
        known: dict[TrajectoryId, Record] = {}
        unknown: list[TrajectoryId] = []
        for name in ids:
            record = self._records.get(TrajectoryId(name))
            members = [record] if record is not None else self._groups.get(GroupId(name), [])
            known.update((member.trajectory_id, member) for member in members)
            if not members:
                unknown.append(TrajectoryId(name))
        return list(known.values()), tuple(unknown)

    @property
    def coming(self) -> int:
        """Groups that were not handed out and are complete, or will be without another command."""
        return len(self._groups) - len(self._held) + len(self._returned)

    @property
    def complete(self) -> int:
        """Groups that are over and were not handed out."""
        return len(self._complete) + len(self._returned)

    def hold(self, record: Record) -> None:
        """`record` stays suspended until somebody commands otherwise."""
        self._held.setdefault(record.group_id, set()).add(record.trajectory_id)

    def unhold(self, record: Record) -> None:
        if record.group_id in self._held:
            self._held[record.group_id].discard(record.trajectory_id)
            if not self._held[record.group_id]:
                del self._held[record.group_id]

    def ended(self, record: Record) -> None:
        """`record` is over; with the last of its group the group is complete."""
        if all(member.over for member in self._groups[record.group_id]):
            self._complete.append(record.group_id)

    def take(self, count: int, call: str) -> list[Delivery]:
        """Up to `count` complete groups, first completed first, handed out to `call`.

        They are kept until it is told what became of the call: `acknowledge` or `abandon`.
        """
        taken: list[Delivery] = []
        while self.complete and len(taken) < count and call not in self._abandoned:
            taken.append(self._returned.popleft() if self._returned else self._deliver(self._complete.popleft()))
        if taken:
            self._handed[call] = taken
        self._abandoned.discard(call)
        return taken

    def acknowledge(self, calls: Iterable[str]) -> None:
        """What was handed out to these calls has arrived."""
        for call in calls:
            self._handed.pop(call, None)

    def abandon(self, calls: Iterable[str]) -> None:
        """Nobody waits for these calls any more: what they were handed, or would be, is handed out again."""
        for call in calls:
            if call in self._handed:
                self._returned.extend(self._handed.pop(call))
            else:
                self._abandoned.add(call)

    def _deliver(self, group_id: GroupId) -> Delivery:
        group = self._groups.pop(group_id)
        del self._submissions[group_id]
        for record in group:
            del self._records[record.trajectory_id]
            self._epoch = max(self._epoch, record.epoch)
        return Delivery(group_id=group_id, trajectories=tuple(record.snapshot() for record in group))
