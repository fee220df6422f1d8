"""From one service to the next: groups as values that outlive a service (`saved`), and groups from such values.

What a trajectory does next is saved with it; to have it do that is up to the controller that takes it up.
"""

from rollout.control.groups import Groups
from rollout.control.lengths import Lengths
from rollout.control.pooled import Pooled
from rollout.control.records import Batch, Group, Record
from rollout.control.saved import Saved, SavedBatch, SavedGroup, SavedMember
from rollout.control.spans import Spans
from rollout.errors import DuplicateKeyError
from rollout.types import Columns, Delivery, FinishReason, Phase, Then, Version


def save_groups(groups: Groups, version: Version, now: float) -> Saved:
    """Everything that is not known to have arrived at a driver; `version` is live."""
    undelivered = [*groups.returned, *groups.handed]
    # Of a group that goes on, what was handed out early is still with the group.
    early = [delivery for delivery in undelivered if _goes_on(groups, delivery)]
    missed = {one.trajectory_id for delivery in early for one in delivery.trajectories}
    batches = list({id(group.batch): group.batch for group in groups}.values())
    numbers = {id(batch): number for number, batch in enumerate(batches)}
    return Saved(
        version=version,
        batches=tuple(_saved_batch(batch) for batch in batches),
        groups=tuple(
            SavedGroup(
                submission=group.submission,
                batch=numbers[id(group.batch)],
                age_s=now - group.submitted_at,
                members=tuple(_saved_member(record) for record in group.members),
                handed=tuple(sorted(group.handed - missed)),
                error=group.error,
            )
            for group in groups
        ),
        deliveries=tuple(delivery for delivery in undelivered if not _goes_on(groups, delivery)),
    )


def check_restorable(groups: Groups, saved: Saved) -> None:
    """Raises `DuplicateKeyError` if one has the id of a group that is here, or is to be handed out again."""
    known = {group.group_id for group in groups}
    returned = {delivery.group_id for delivery in groups.returned}
    here = [group.submission.group_id for group in saved.groups if group.submission.group_id in known]
    here += [delivery.group_id for delivery in saved.deliveries if delivery.group_id in returned]
    if here:
        raise DuplicateKeyError(f"key {here[0]!r} is in use by a group that is here already")


def restore_groups(groups: Groups, saved: Saved, now: float) -> list[Group]:
    """Take up what `saved` holds; its members that are not over are in no queue yet."""
    batches = [_restored_batch(batch) for batch in saved.batches]
    restored = [_restored_group(groups, each, batches[each.batch], now) for each in saved.groups]
    ready = [group for group in restored if group.over or (group.submission.partial and _has_new(group))]
    for group in sorted(ready, key=_ready_since):
        groups.offer(group)
    for delivery in saved.deliveries:
        groups.take_back(delivery)
    return restored


def _goes_on(groups: Groups, delivery: Delivery) -> bool:
    """Whether it is of a group that is here, and not of an earlier one of that key."""
    group = groups.find(delivery.group_id)
    if group is None or delivery.complete:
        return False
    return all(one.submitted_at == group.submitted_at for one in delivery.trajectories)


def _restored_group(groups: Groups, saved: SavedGroup, batch: Batch, now: float) -> Group:
    group = Group(submission=saved.submission, batch=batch, submitted_at=now - saved.age_s, error=saved.error)
    group.handed.update(saved.handed)
    for order, member in enumerate(saved.members, start=groups.submitted):
        group.members.append(_restored_member(member, group, order=order, epoch=groups.epoch))
    for record in group.members:
        if record.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            group.lengths.add(record.sampled_tokens)
    groups.enter(group)
    if not group.over and any(record.workers for record in group.members):
        groups.begin(group)
    return group


def _has_new(group: Group) -> bool:
    over = (member for member in group.members if member.over and member.phase is not Phase.DROPPED)
    return any(member.trajectory_id not in group.handed for member in over)


def _ready_since(group: Group) -> float:
    """When there was something of it to hand out."""
    new = [member for member in group.members if member.over and member.trajectory_id not in group.handed]
    times = [member.finished_at for member in new if member.finished_at is not None]
    return (min if group.submission.partial else max)(times, default=0.0)


def _saved_member(record: Record) -> SavedMember:
    then = None
    if not record.over:
        then = record.intent.then if record.intent is not None else Then.HOLD if record.held else Then.REQUEUE
    return SavedMember(
        trajectory=record.snapshot(),
        then=then,
        reason=record.intent.reason if record.intent is not None else record.abort_reason,
        dropped=record.phase is Phase.DROPPED,
        ended_turn=record.ended_turn,
        failures=record.failures,
        fired=tuple(sorted(record.fired)),
    )


def _saved_batch(batch: Batch) -> SavedBatch:
    return SavedBatch(size=batch.size, tailed=batch.tailed, lengths=tuple(batch.lengths))


def _restored_batch(saved: SavedBatch) -> Batch:
    return Batch(size=saved.size, tailed=saved.tailed, lengths=Lengths(saved.lengths))


def _restored_member(saved: SavedMember, group: Group, *, order: int, epoch: int) -> Record:
    """One that is over, or is queued and in no queue yet. The time between counts neither in its age nor in the time
    that it took."""
    was = saved.trajectory
    versions = [run.version for run in was.versions for _ in range(run.tokens)]
    last = max((index for index, version in enumerate(versions) if version is not None), default=None)
    between_s = group.submitted_at - was.submitted_at
    record = Record(
        trajectory_id=was.trajectory_id,
        group=group,
        sample_index=was.sample_index,
        order=order,
        seed=was.seed,
        pooled=Pooled(was.trajectory_id),
        columns=Columns(was.output_ids, was.logprobs, versions),
        spans=Spans.told(was.kv_spans),
        epoch=epoch,
        suspensions=was.suspensions,
        abort_reason=saved.reason,
        fired=set(saved.fired),
        ended_turn=saved.ended_turn,
        attempts=list(was.attempts),
        failures=saved.failures,
        workers=list(was.workers),
        resumes=list(was.resumes),
        # The last token that was sampled, and what was appended since, never had KV.
        kv_tokens=len(was.prompt_ids) + last if last is not None else 0,
        starts=int(last is not None),
        began=last is not None,
        finish_reason=was.finish_reason,
        error=was.error,
        finished_at=was.finished_at + between_s if was.finished_at is not None else None,
    )
    if saved.then is None:
        failed = was.finish_reason is FinishReason.ERROR
        record.phase = Phase.DROPPED if saved.dropped else Phase.FAILED if failed else Phase.FINISHED
    return record
