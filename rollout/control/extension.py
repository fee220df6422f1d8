"""Which trajectories may be extended by tokens that were not sampled."""

from rollout.control.records import Record
from rollout.errors import NotExtendableError, PromptTooLongError
from rollout.types import Phase, Then, TrajectoryId


def check_extendable(trajectory_id: TrajectoryId, record: Record | None, tokens: int, max_context: int) -> Record:
    """The record, if so many tokens may follow what it has.

    Raises `NotExtendableError` if it is unknown, or neither suspended nor its KV being moved to be held,
    `PromptTooLongError` if no room would be left for a new token.
    """
    if record is None:
        raise NotExtendableError(f"{trajectory_id}: no such trajectory, or it was handed out")
    held = record.intent is not None and record.intent.then is Then.HOLD
    moving = held and (record.promoting or record.phase in (Phase.SUSPENDING, Phase.QUEUED))
    if record.phase is not Phase.SUSPENDED and not moving:
        raise NotExtendableError(f"{trajectory_id}: it is {record.phase}, allowed: suspended, or waiting for a turn")
    if record.tokens + tokens >= max_context:
        raise PromptTooLongError(
            f"{trajectory_id}: {record.tokens} tokens and {tokens} more, "
            f"allowed: fewer than the context of {max_context}"
        )
    return record
