"""An export as its pool carries it out: what of the image is there, and what the worker is asked for next."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.control.commands import Export
from rollout.control.messages import Displaced
from rollout.kv.ledger import Place
from rollout.types import NodeId, SegmentRun, Turn

JOINED_BYTES = 32 << 20
"""So much that follows a prompt is sent in the same call: to copy it takes about as long as another call would, and
siblings wait for the call that sends the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Pages [first, stop) of an image: what becomes one object."""

    first: int
    stop: int
    nbytes: int


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """An export under way."""

    worker: Any
    incarnation: str
    order: Export
    page_tokens: int
    token_bytes: int
    claim: int
    """Of the ledger: what the export holds until its trajectory does."""
    turn: Turn
    runs: list[SegmentRun] = field(default_factory=list)
    """The image so far."""
    sent: int = 0
    shared: int = 0
    warm: bool = True
    displaced: list[Displaced] = field(default_factory=list)
    late: Any = None
    """The manifests of a call that nobody waits for any more, and that may still write."""
    late_nbytes: int = 0

    @property
    def pages(self) -> int:
        """How many of the image's are there."""
        return sum(run.pages for run in self.runs)

    @property
    def all_pages(self) -> int:
        return -(-self.order.kv_tokens // self.page_tokens)

    def part(self, first: int, stop: int) -> Part:
        tokens = min(stop * self.page_tokens, self.order.kv_tokens) - first * self.page_tokens
        return Part(first=first, stop=stop, nbytes=tokens * self.token_bytes)

    def next_parts(self, end: int, most_pages: int) -> list[Part]:
        """What of the pages up to `end` to ask for in one call; what follows them too, if that is little.

        A part has `most_pages` pages at most.
        """
        first = self.pages
        parts = [self.part(first, min(end, first + most_pages))]
        if parts[0].stop == end < self.all_pages <= end + most_pages:
            rest = self.part(end, self.all_pages)
            if rest.nbytes <= JOINED_BYTES:
                parts.append(rest)
        return parts


def as_runs(node: NodeId, places: Sequence[Place]) -> list[SegmentRun]:
    """Consecutive places joined to runs."""
    runs: list[SegmentRun] = []
    for place in places:
        last = runs[-1] if runs else None
        if last is not None and last.segment == place.segment and last.first + last.pages == place.index:
            runs[-1] = SegmentRun(node=node, segment=last.segment, first=last.first, pages=last.pages + 1)
        else:
            runs.append(SegmentRun(node=node, segment=place.segment, first=place.index, pages=1))
    return runs
