"""Where a trajectory starts: on the worker where it is expected to be done soonest.

That counts what of its KV is there or can be copied there and what must be computed, by rates that the workers
measured, and then its tokens to go at the pace of a batch that has one more. Where nothing was measured yet, room
decides.
"""

import math
from collections.abc import Sequence

from rollout.control.costs import moving_shares
from rollout.control.experience import Experience
from rollout.control.fleet import Worker
from rollout.control.paces import seconds_at
from rollout.control.records import Record
from rollout.types import Keep

LOYALTY = 0.9
"""Share of the time at home that another worker must promise, for KV to be moved there: estimates are not exact."""


def most_room(record: Record, able: Sequence[Worker]) -> Worker:
    """The one that has its KV, if that is among them."""
    return max(able, key=lambda worker: (is_home(record, worker), worker.room))


def is_home(record: Record, worker: Worker) -> bool:
    return record.home is not None and record.home.worker == worker.worker_id


class Router:
    """The cheapest worker for a trajectory."""

    def __init__(self, slice_tokens: int | None, experience: Experience) -> None:
        """A trajectory is expected to leave its worker after `slice_tokens`, if that is given."""
        self._slice_tokens = slice_tokens
        self._experience = experience

    def choose(self, record: Record, able: Sequence[Worker]) -> Worker:
        """Ties go to the one with its KV, then to the one with most room."""
        return min(
            able,
            key=lambda worker: (
                round(self.done_s(record, worker) * (LOYALTY if is_home(record, worker) else 1.0), 6),
                not is_home(record, worker),
                -worker.room,
            ),
        )

    def done_s(self, record: Record, worker: Worker) -> float:
        """Seconds until it is done there, or leaves."""
        tokens = to_go(record)
        if self._slice_tokens is not None:
            tokens = min(tokens, self._slice_tokens)
        facts = worker.facts
        step_s = facts.step.seconds(len(worker.running) + 1) if facts is not None and facts.step is not None else 0.0
        coming_s = start_s(record, worker)
        if record.home is not None and not is_home(record, worker):
            coming_s = min(coming_s, move_s(record, worker, self._experience))
        return coming_s + tokens * step_s


def start_s(record: Record, worker: Worker) -> float:
    """Seconds until it decodes there: copies of what is there or in a pool, and prefill of the rest."""
    facts = worker.facts
    if facts is None:
        return 0.0
    end = record.tokens - 1 if record.columns else record.tokens
    here = len(record.prompt_ids) if worker.knows(record.group_id) else 0
    home, image = record.home, record.pooled.image
    copying = 0.0
    have = min(end, here)
    if home is not None and home.worker == worker.worker_id and home.kv_tokens >= have:
        have = home.kv_tokens
        if home.where is Keep.HOST:
            copying = seconds_at(facts.load, have * facts.token_bytes)
    elif image is not None and image.kv_tokens > have:
        copying = seconds_at(facts.restore, (image.kv_tokens - have) * facts.token_bytes)
        if any(run.node != worker.node for run in image.runs):
            copying *= 2  # it is copied to this node first
        have = image.kv_tokens
    return copying + facts.prefill.seconds(have, end)


def away_s(record: Record, workers: Sequence[Worker], experience: Experience) -> float:
    """Seconds to have elsewhere what only its home has of its KV, moved or computed; infinite before any worker
    measured."""
    worker = next((each for each in workers if _measured(each)), None)
    if worker is None or record.home is None:
        return math.inf
    return min(recompute_s(record, worker), move_s(record, worker, experience))


def recompute_s(record: Record, worker: Worker) -> float:
    """Seconds to compute what only its home has of its KV."""
    if worker.facts is None or record.home is None:
        return 0.0
    image = record.pooled.image
    return worker.facts.prefill.seconds(image.kv_tokens if image is not None else 0, record.home.kv_tokens)


def move_s(record: Record, worker: Worker, experience: Experience) -> float:
    """Seconds to move what its home has of its KV to `worker`, through the pool."""
    return sum(_move_parts_s(record, worker, experience))


def move_cost_s(record: Record, worker: Worker, experience: Experience) -> float:
    """What that costs in seconds of a worker, as `costs` has it."""
    if worker.facts is None:
        return 0.0
    moving, arriving = moving_shares(worker.facts, 1.0 / worker.max_running)
    export_s, restore_s = _move_parts_s(record, worker, experience)
    return moving * export_s + arriving * restore_s


def to_go(record: Record) -> float:
    """Tokens that it is expected to sample yet, by finished members of its group, else of its batch; otherwise all of
    its budget."""
    budget = record.sampling.max_new_tokens - record.sampled_tokens
    for lengths in (record.group.lengths, record.group.batch.lengths):
        remaining = lengths.remaining(record.sampled_tokens)
        if remaining is not None:
            return min(float(budget), remaining)
    return float(budget)


def _move_parts_s(record: Record, worker: Worker, experience: Experience) -> tuple[float, float]:
    """The export, and the restore."""
    if worker.facts is None or record.home is None:
        return 0.0, 0.0
    nbytes = record.home.kv_tokens * worker.facts.token_bytes
    return seconds_at(experience.export_pace, nbytes), seconds_at(worker.facts.restore, nbytes)


def _measured(worker: Worker) -> bool:
    return worker.facts is not None and worker.facts.prefill.measured
