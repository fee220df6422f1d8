"""What stands for the model: plans take the time that the machine's rates say, and give tokens that are forced.

A token is a function of the trajectory's seed and the position alone, so that a trajectory is the same whatever
happens to it, and two of them share no prefix by accident. None is an end of sequence: output lengths are those
of `max_new_tokens`.
"""

from collections.abc import Callable

from rollout.engine.interface import Draw
from rollout.engine.scheduler import Plan
from rollout.kv.fence import Fence, Passed
from rollout.sim.load import Load
from rollout.sim.machine import MachineRates

VOCAB_SIZE = 2**31 - 1
"""Ids that prompts may have."""
LOGPROB = -1.0
"""Of every token."""

_WORD = 2**64 - 1


def forced_token(seed: int, position: int) -> int:
    """The token at an absolute position (prompt included), 30 bits: a splitmix64 step."""
    mixed = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
    return mixed >> 34


class PacedRunner:
    """A `ModelRunner` without a model."""

    canary = False

    def __init__(self, rates: MachineRates, load: Load, now: Callable[[], float]) -> None:
        """`now` is the worker's time."""
        self._rates = rates
        self._load = load
        self._now = now
        self.page_bytes = rates.page_bytes
        self.prefill_s: float | None = None
        self.decode_s: float | None = None
        self.elapsed_s = 0.0
        """Of the last plan."""

    def run(self, plan: Plan) -> list[Draw]:
        rates = self._rates
        prefill_s = sum(rates.prefill_seconds(chunk.start, chunk.end) for chunk in plan.prefill)
        decode_s = rates.decode_seconds(len(plan.decode), sum(sequence.computed for sequence in plan.decode))
        work_s = prefill_s + decode_s
        self.elapsed_s = self._load.step(self._now(), work_s) if plan.prefill or plan.decode else 0.0
        stretch = self.elapsed_s / work_s if work_s else 1.0
        self.prefill_s = prefill_s * stretch if plan.prefill else None
        self.decode_s = decode_s * stretch if plan.decode else None
        fed = [chunk.sequence for chunk in plan.prefill if chunk.end == len(chunk.sequence.tokens)]
        fed += [sequence for sequence in plan.decode if sequence.computed + 1 == len(sequence.tokens)]
        return [Draw(each, forced_token(each.assignment.seed, len(each.tokens)), LOGPROB) for each in fed]

    def fence(self) -> Fence:
        return Passed()

    def close(self) -> None:
        return
