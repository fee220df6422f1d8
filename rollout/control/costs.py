"""What it costs to keep the KV of a stopped trajectory in each place, in expected seconds of a worker.

Prefill takes all of a worker; moving KV takes the share of its speed that the worker was seen to lose meanwhile; what a
trajectory only waits for takes one place in a batch. Keeping costs what moving the KV takes now, and what bringing it
back takes if the trajectory resumes; not keeping it, the prefill of everything that no prefix tree will have. What may
be lost in the meantime (pages of the device that are needed for something else, images that displace others) costs its
recomputation, as likely as that is. A place that has no room costs infinity, and so does every place if the KV is
certain to be of no use. What was never measured costs nothing: so it is tried, and measured.

That a trajectory may have to wait for the one worker that has its KV costs nothing here: others use the place
meanwhile, and before it is long the KV moves (`Fleet`).
"""

import math
from dataclasses import dataclass

from rollout.control.messages import WorkerFacts
from rollout.control.paces import Pace, seconds_at
from rollout.types import Keep

SAFE_SHARE = 0.5
"""Of a worker's free KV: what is parked survives for certain while less than this is taken for other things."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A stopped trajectory, and what is expected of it."""

    kv_tokens: int
    pooled_tokens: int
    """Of them, the pool has these already."""
    shared_tokens: int
    """Of them, prefix trees are expected to have these when it resumes."""
    likely: float
    """That it resumes."""
    same_weights: float
    """That its KV is of use then."""
    wait_s: float
    """Until it resumes."""
    turnover_tokens_s: float
    """KV that its worker takes pages for."""
    kept_tokens: int
    """KV of others that was left on the worker's device."""
    lost_share: float
    """Of such KV, that was gone when it was needed, lately."""
    worker: WorkerFacts
    pool_free_bytes: float
    pool_budget_bytes: float
    export: Pace | None
    """By bytes."""
    place_share: float
    """Of a worker, that one place in its batch is."""


def costs_s(case: Case) -> dict[Keep, float]:
    """Expected cost of each place, cheapest to hold first: equal costs are decided in this order."""
    useful = case.likely * case.same_weights
    recompute = case.worker.prefill.seconds(case.shared_tokens, case.kv_tokens)
    in_vain = case.likely * (1.0 - case.same_weights) * recompute
    if not useful:
        return {Keep.DEVICE: math.inf, Keep.HOST: math.inf, Keep.POOL: math.inf, Keep.NONE: in_vain}
    nbytes = case.kv_tokens * case.worker.token_bytes
    moving, arriving = moving_shares(case.worker, case.place_share)
    survives = _survival(case)
    device = useful * (1.0 - survives) * recompute
    host = moving * seconds_at(case.worker.save, nbytes)
    host += useful * arriving * seconds_at(case.worker.load, nbytes)
    new_bytes = (case.kv_tokens - case.pooled_tokens) * case.worker.token_bytes
    displaced = min(1.0, max(0.0, new_bytes - case.pool_free_bytes) / new_bytes) if new_bytes else 0.0
    pool = moving * seconds_at(case.export, new_bytes) if new_bytes else 0.0
    pool += useful * (arriving * seconds_at(case.worker.restore, nbytes) + displaced * recompute)
    return {
        Keep.DEVICE: device + in_vain if survives or not recompute else math.inf,
        Keep.HOST: host + in_vain if case.kv_tokens <= case.worker.host_free_tokens else math.inf,
        Keep.POOL: pool + in_vain if nbytes <= case.pool_budget_bytes else math.inf,
        Keep.NONE: useful * recompute + in_vain,
    }


def moving_shares(worker: WorkerFacts, place_share: float) -> tuple[float, float]:
    """Of a worker: what it loses while KV is moved away, and while KV arrives, for which a place in its batch waits."""
    moving = worker.moving_share if worker.moving_share is not None else 1.0
    return moving, min(1.0, moving + place_share)


def _survival(case: Case) -> float:
    """Chance that pages which may be evicted are there when the trajectory resumes: the least recently used go first,
    so all that was free before is taken before them. What others left there is not free: they would lose it."""
    free = case.worker.free_tokens - case.kept_tokens
    if free <= 0:
        return 0.0
    taken = case.turnover_tokens_s * case.wait_s
    return (1.0 - case.lost_share) * min(1.0, max(0.0, (free - taken) / (free - SAFE_SHARE * free)))
