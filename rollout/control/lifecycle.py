"""The life of a trajectory as a table of legal moves.

    queued → prefilling | restoring → decoding ⇄ preempted → suspending ⇄ suspended → queued …

From every phase on a worker, all of which a pause freezes, a trajectory may be parked (suspending), lose its worker or
be given back (queued), or be over: finished, failed or dropped. Where the KV of a suspended one is, and what it waits
for, is told beside the phase (`Record.whereabouts`).
"""

from rollout.types import Phase

RUNNABLE = frozenset({Phase.RESTORING, Phase.PREFILLING, Phase.DECODING, Phase.PREEMPTED})
"""A worker runs the trajectory, or has it in its own queue."""

ON_WORKER = RUNNABLE | {Phase.PAUSED}
"""As these, or would but for a pause."""

OVER = frozenset({Phase.FINISHED, Phase.FAILED, Phase.DROPPED})
"""Nothing leaves these."""

_LEAVE_WORKER = frozenset({Phase.SUSPENDING, Phase.QUEUED, Phase.PAUSED}) | OVER

MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.RESTORING, Phase.PREFILLING, Phase.SUSPENDED}) | OVER,
    Phase.RESTORING: frozenset({Phase.PREFILLING, Phase.DECODING}) | _LEAVE_WORKER,
    Phase.PREFILLING: frozenset({Phase.DECODING, Phase.PREEMPTED}) | _LEAVE_WORKER,
    Phase.DECODING: frozenset({Phase.PREEMPTED}) | _LEAVE_WORKER,
    Phase.PREEMPTED: frozenset({Phase.PREFILLING, Phase.DECODING}) | _LEAVE_WORKER,
    Phase.PAUSED: RUNNABLE | {Phase.SUSPENDING, Phase.QUEUED} | OVER,
    Phase.SUSPENDING: frozenset({Phase.SUSPENDED, Phase.QUEUED}) | OVER,
    Phase.SUSPENDED: frozenset({Phase.QUEUED, Phase.SUSPENDING}) | OVER,
    Phase.FINISHED: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.DROPPED: frozenset(),
}


def move(source: Phase, target: Phase) -> Phase:
    """`target`, if a trajectory may go there from `source`; an illegal move asserts, naming both."""
    assert target in MOVES[source], f"illegal move {source} → {target}"
    return target
