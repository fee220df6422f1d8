"""Trajectories by the groups they form, from submission until the whole group is over and has arrived.

A group is handed out to one call. If that call's answer is lost, and the driver says so, it is handed out again.
Everything submitted is accounted for at any time (`accounts`).
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from rollout.control.lifecycle import ON_WORKER
from rollout.control.pooled import Pooled
from rollout.control.records import Batch, Group, Record
from rollout.control.submission import Submission
from rollout.control.versions import Versions
from rollout.errors import DuplicateKeyError, UnsatisfiableVersionError
from rollout.metrics import Accounts, Staleness
from rollout.types import AbortReason, Delivery, FinishReason, GroupId, Phase, Priority, Trajectory, TrajectoryId


class Groups:
    """Every trajectory, until its group has arrived at a driver."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._behind: Counter[int] = Counter()
        """Versions between tokens that were handed out and what was live then."""
        self._records: dict[TrajectoryId, Record] = {}
        self._groups: dict[GroupId, Group] = {}
        self._held: set[GroupId] = set()
        """Groups with members on hold."""
        self._begun: set[GroupId] = set()
        """Groups of which a member was started once, and that are not over."""
        self._complete: deque[GroupId] = deque()
        """With something to hand out: all of a group, or members of one that is handed out in parts."""
        self._handed: dict[str, list[Delivery]] = {}
        """By the call that they were handed out to, until it is known whether they arrived."""
        self._returned: deque[Delivery] = deque()
        """Handed out to a call that was abandoned."""
        self._abandoned: set[str] = set()
        """Calls that are still under way although nobody waits for them."""
        self._acknowledged = 0
        self._dropped: Counter[AbortReason] = Counter()
        self.submitted = 0
        """Trajectories, ever: where the order of the next one begins."""
        self.epoch = 0
        """The highest of any group that was handed out: where a key that is used again begins."""

    # Submission ---------------------------------------------------------------------------------------

    def check(self, submissions: Sequence[Submission]) -> list[Submission]:
        """Those of `submissions` that are new; one that is here already, all of it equal, was told twice.

        Raises `DuplicateKeyError` if one has the id of another group that was not handed out yet, and
        `UnsatisfiableVersionError` if one asks for a version that is past.
        """
        live = self._versions.live.version
        new: dict[GroupId, Submission] = {}
        for submission in submissions:
            group = self._groups.get(submission.group_id)
            other = group.submission if group is not None else new.get(submission.group_id)
            if other is None:
                if submission.exact_version is not None and submission.exact_version < live:
                    raise UnsatisfiableVersionError(
                        f"exact_version: got {submission.exact_version}, allowed: {live}, which is live, or a later one"
                    )
                new[submission.group_id] = submission
            elif other != submission or submission.group_id in new:
                raise DuplicateKeyError(f"key {submission.group_id!r} is in use by a group that was not handed out yet")
        return list(new.values())

    def add(self, submission: Submission, batch: Batch, now: float) -> Group:
        """New records for a group that `check` let through."""
        group = Group(submission=submission, batch=batch, submitted_at=now)
        for index, seed in enumerate(submission.seeds):
            trajectory_id = TrajectoryId(f"{submission.group_id}/{index}")
            record = Record(
                trajectory_id=trajectory_id,
                group=group,
                sample_index=index,
                order=self.submitted + index,
                seed=seed,
                pooled=Pooled(trajectory_id),
                epoch=self.epoch,
            )
            group.members.append(record)
        batch.size += len(group.members)
        self.enter(group)
        return group

    def enter(self, group: Group) -> None:
        """A group is here from now on, with all its members, of which some may be over, or have arrived at a driver."""
        self._groups[group.group_id] = group
        self.submitted += len(group.members)
        self._acknowledged += len(group.handed)
        for record in group.members:
            self._records[record.trajectory_id] = record
            if not record.over:
                group.batch.open[record.trajectory_id] = record
            elif record.phase is Phase.DROPPED and record.abort_reason is not None:
                self._dropped[record.abort_reason] += 1

    def __iter__(self) -> Iterator[Group]:
        """In the order in which they were submitted."""
        return iter(self._groups.values())

    def find(self, group_id: GroupId) -> Group | None:
        return self._groups.get(group_id)

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
            record, group = self._records.get(TrajectoryId(name)), self._groups.get(GroupId(name))
            members = [record] if record is not None else group.members if group is not None else []
            known.update((member.trajectory_id, member) for member in members)
            if not members:
                unknown.append(TrajectoryId(name))
        return list(known.values()), tuple(unknown)

    @property
    def outstanding(self) -> int:
        """Trajectories that were not handed out."""
        return len(self._records) - sum(len(group.handed) for group in self._groups.values())

    def begin(self, group: Group) -> None:
        """A member starts. Evaluation does not count."""
        if group.submission.priority is Priority.TRAIN:
            self._begun.add(group.group_id)

    def has_begun(self, group: Group) -> bool:
        return group.group_id in self._begun

    def begun_and_queued(self) -> list[Record]:
        """Members of training groups that have begun, which are queued."""
        return [
            member
            for group_id in self._begun
            for member in self._groups[group_id].members
            if member.phase is Phase.QUEUED
        ]

    @property
    def under_way(self) -> int:
        """Groups of which a member was started once, that are not over, and of which none is on hold."""
        return len(self._begun - self._held)

    @property
    def unfinished(self) -> int:
        """Groups that are not over."""
        return sum(not group.over for group in self._groups.values())

    # Holding and ending -------------------------------------------------------------------------------

    @property
    def coming(self) -> int:
        """Groups that were not handed out and are complete, or will be without another command."""
        return len(self._groups) - len(self._held) + len(self._returned)

    @property
    def complete(self) -> int:
        """Deliveries that are ready and were not handed out."""
        return len(self._complete) + len(self._returned)

    def hold(self, record: Record) -> None:
        """`record` stays suspended until somebody commands otherwise."""
        record.group.held.add(record.trajectory_id)
        self._held.add(record.group_id)

    def unhold(self, record: Record) -> None:
        record.group.held.discard(record.trajectory_id)
        if not record.group.held:
            self._held.discard(record.group_id)

    def ended(self, record: Record) -> None:
        """`record` is over; with the last of its group the group is complete."""
        group = record.group
        del group.batch.open[record.trajectory_id]
        if record.phase is Phase.DROPPED:
            assert record.abort_reason is not None, f"{record.trajectory_id} was dropped for no reason"
            self._dropped[record.abort_reason] += 1
        elif record.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            for lengths in (group.lengths, group.batch.lengths):
                lengths.add(record.sampled_tokens)
        if group.over:
            self._begun.discard(group.group_id)
        if group.over and all(_discarded(member) for member in group.members):
            self._forget(group)
        elif group.submission.partial:
            if group.group_id not in self._complete and (group.over or record.phase is not Phase.DROPPED):
                self.offer(group)
        elif group.over:
            self.offer(group)

    # Handing out --------------------------------------------------------------------------------------

    @property
    def collected(self) -> int:
        """Groups of training that are over and were not handed out."""
        over = sum(_collectable(self._groups[group_id]) for group_id in self._complete if group_id in self._groups)
        return over + sum(_is_collected(delivery) for delivery in self._returned)

    @property
    def collectable(self) -> int:
        """Groups of training that are over, or will be without another command, and were not handed out."""
        coming = sum(
            group.submission.priority is Priority.TRAIN and group_id not in self._held
            for group_id, group in self._groups.items()
        )
        return coming + sum(_is_collected(delivery) for delivery in self._returned)

    def take_collected(self, count: int, call: str) -> list[Delivery]:
        """As `take`, of groups of training that are over."""
        others = deque(group_id for group_id in self._complete if not _collectable(self._groups.get(group_id)))
        ready = deque(group_id for group_id in self._complete if _collectable(self._groups.get(group_id)))
        kept = deque(delivery for delivery in self._returned if not _is_collected(delivery))
        returned = deque(delivery for delivery in self._returned if _is_collected(delivery))
        self._complete, self._returned = ready, returned
        try:
            return self.take(count, call)
        finally:
            self._complete.extend(others)
            self._returned.extend(kept)

    def take(self, count: int, call: str) -> list[Delivery]:
        """Up to `count` deliveries, first completed first, handed out to `call`.

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
            self._acknowledged += sum(len(delivery.trajectories) for delivery in self._handed.pop(call, ()))

    def abandon(self, calls: Iterable[str]) -> None:
        """Nobody waits for these calls any more: what they were handed, or would be, is handed out again."""
        for call in calls:
            if call in self._handed:
                self._returned.extend(self._handed.pop(call))
            else:
                self._abandoned.add(call)

    @property
    def handed(self) -> list[Delivery]:
        """Handed out, and it is not known whether they arrived."""
        return [delivery for handed in self._handed.values() for delivery in handed]

    @property
    def returned(self) -> Sequence[Delivery]:
        """To be handed out again."""
        return self._returned

    def offer(self, group: Group) -> None:
        """There is something of it to hand out, after what was ready before."""
        self._complete.append(group.group_id)

    def take_back(self, delivery: Delivery) -> None:
        """Another service handed it out, and it did not arrive."""
        self.submitted += len(delivery.trajectories) + len(delivery.dropped)
        self._dropped.update(one.abort_reason for one in delivery.dropped if one.abort_reason is not None)
        self._returned.append(delivery)

    def accounts(self) -> Accounts:
        """Where everything is that was ever submitted, counted from what there is."""
        phases = Counter(record.phase for record in self._records.values())
        early = sum(len(group.handed) for group in self._groups.values())
        returned = sum(len(delivery.trajectories) for delivery in self._returned)
        return Accounts(
            submitted=self.submitted,
            queued=phases[Phase.QUEUED],
            active=sum(phases[phase] for phase in ON_WORKER) + phases[Phase.SUSPENDING],
            suspended=phases[Phase.SUSPENDED],
            buffered=phases[Phase.FINISHED] + phases[Phase.FAILED] - early + returned,
            delivered=sum(len(delivery.trajectories) for delivery in self.handed),
            acknowledged=self._acknowledged,
            dropped={reason: count for reason, count in self._dropped.items() if count},
        )

    def _deliver(self, group_id: GroupId) -> Delivery:
        """What of a group is over and was not handed out."""
        group = self._groups[group_id]
        ready = [member for member in group.members if member.over and member.trajectory_id not in group.handed]
        kept = [member for member in ready if member.phase is not Phase.DROPPED]
        dropped = [member for member in ready if member.phase is Phase.DROPPED and not _discarded(member)]
        for record in kept:
            self._count(record)
        over = group.over
        if over:
            self._forget(group)
        else:
            group.handed.update(member.trajectory_id for member in kept)
        return Delivery(
            group_id=group_id,
            trajectories=_snapshots(kept),
            dropped=_snapshots(dropped) if over else (),
            complete=over,
            priority=group.submission.priority,
            error=group.error,
            version=self._versions.live.version,
        )

    def _count(self, record: Record) -> None:
        live = self._versions.live.version
        for version, tokens in Counter(record.columns.versions).items():
            if version is not None:
                self._behind[live - version] += tokens

    @property
    def staleness(self) -> Staleness:
        """Of all that was handed out, when it was."""
        return Staleness(tokens=dict(sorted(self._behind.items())))

    def _forget(self, group: Group) -> None:
        del self._groups[group.group_id]
        for record in group.members:
            del self._records[record.trajectory_id]
            self.epoch = max(self.epoch, record.epoch)


def _collectable(group: Group | None) -> bool:
    return group is not None and group.over and group.submission.priority is Priority.TRAIN


def _is_collected(delivery: Delivery) -> bool:
    return delivery.complete and delivery.priority is Priority.TRAIN


def _discarded(record: Record) -> bool:
    return record.phase is Phase.DROPPED and record.abort_reason is AbortReason.DISCARD


def _snapshots(records: Iterable[Record]) -> tuple[Trajectory, ...]:
    return tuple(record.snapshot() for record in records)
