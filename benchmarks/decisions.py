"""Where KV went, as reports tell it."""

from collections import Counter
from collections.abc import Mapping

from rollout.types import AbortReason, Keep


def summed(*decisions: Mapping[AbortReason, Mapping[Keep, int]]) -> dict[str, dict[str, int]]:
    """How often each place was chosen, by what stopped the trajectory, in all of `decisions` together."""
    places: dict[str, Counter[str]] = {}
    for each in decisions:
        for reason, counts in each.items():
            places.setdefault(str(reason), Counter()).update({str(keep): count for keep, count in counts.items()})
    return {reason: dict(counts) for reason, counts in places.items()}
