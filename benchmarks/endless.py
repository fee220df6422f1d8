"""Sequences that do not end, watched for all that a worker can look for and never sees, in an engine of its own."""

from typing import Any

from rollout.control.commands import Assignment, RepetitionWatch, Watch
from rollout.types import Columns, SamplingParams, TrajectoryId

MOST_TOKENS = 1 << 14
"""No sequence comes so far."""
EVERYTHING = Watch(
    slice_tokens=MOST_TOKENS,
    most_tokens=MOST_TOKENS,
    turns=True,
    repetition=RepetitionWatch(ngram=64, times=8, min_tokens=64),
)


class NoImages:
    """Of an engine that restores nothing."""

    def open(self, runs: Any, deadline: float) -> Any:
        raise AssertionError("nothing is restored here")


def endless(index: int, prompt: tuple[int, ...], watch: Watch) -> Assignment:
    """The assignment of sequence `index`."""
    return Assignment(
        trajectory_id=TrajectoryId(f"{index}/0"),
        epoch=1,
        prompt_ids=prompt,
        output=Columns(),
        sampling=SamplingParams(max_new_tokens=MOST_TOKENS, ignore_eos=True),
        seed=index,
        watch=watch,
        max_context=2 * MOST_TOKENS,
        image=None,
        kv_tokens=0,
    )
