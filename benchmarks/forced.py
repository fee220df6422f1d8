"""Groups whose outputs are made to have lengths that were drawn before, and services that are asked for them.

The end of text does not end such an output, and whoever collects it makes sure that it has its length.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.servegen import Lengths
from benchmarks.workload import WrongOutputError
from rollout.client import Rollout
from rollout.errors import DeadlineError
from rollout.types import Delivery, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A prompt and the length of each of its outputs."""

    key: str
    prompt: list[int]
    lengths: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Groups of one workload."""

    name: str
    ids: Sequence[int]
    """Of which prompts are made."""
    prompt_tokens: tuple[int, int]
    """Least and most."""
    samples: int
    """Outputs of a group."""
    output_tokens: Lengths | tuple[int, int]
    """A histogram, or least and most."""

    def groups(self, turn: str, count: int) -> list[Group]:
        """Of a turn, in the order in which they are submitted; the same whenever they are asked for."""
        draw = random.Random(f"{self.name} {turn}")
        return [
            Group(
                key=f"{turn}-{index}",
                prompt=draw.choices(self.ids, k=draw.randint(*self.prompt_tokens)),
                lengths=self._lengths(draw),
            )
            for index in range(count)
        ]

    def _lengths(self, draw: random.Random) -> list[int]:
        if isinstance(self.output_tokens, Lengths):
            return self.output_tokens.draw(draw, self.samples)
        return [draw.randint(*self.output_tokens) for _ in range(self.samples)]


class Order:
    """Groups that a service was asked for and has not delivered.

    Both ways to get some raise `DeadlineError` if there are fewer within `timeout_s`, and `WrongOutputError` if one was
    not asked for, or its outputs have other lengths.
    """

    def __init__(self, service: Rollout, timeout_s: float) -> None:
        self._service = service
        self._timeout_s = timeout_s
        self._missing: dict[str, list[int]] = {}

    @property
    def missing(self) -> int:
        """Groups that are not delivered yet."""
        return len(self._missing)

    def submit(self, groups: Sequence[Group]) -> None:
        for group in groups:
            sampling = [SamplingParams(max_new_tokens=length, ignore_eos=True) for length in group.lengths]
            self._service.submit([group.prompt], n=len(sampling), sampling=sampling, key=[group.key])
            self._missing[group.key] = group.lengths

    def wait(self, count: int) -> None:
        """For so many groups, while everything else goes on."""
        self._take(self._service.next_groups(count, self._timeout_s), count)

    def collect(self, count: int, *, over_sample: float) -> None:
        """So many groups, with a share of `over_sample` more under way, which is stopped then."""
        collected = self._service.collect(count, over_sample=over_sample, timeout_s=self._timeout_s)
        self._take(collected.groups, count)

    def _take(self, deliveries: Sequence[Delivery], count: int) -> None:
        if len(deliveries) < count:
            raise DeadlineError(f"{len(deliveries)} of {count} groups within {self._timeout_s:g} s")
        for delivery in deliveries:
            lengths = [len(trajectory.output_ids) for trajectory in delivery.trajectories]
            asked = self._missing.pop(str(delivery.group_id), None)
            if lengths != asked:
                raise WrongOutputError(f"{delivery.group_id}: asked for outputs of {asked} tokens, and got {lengths}")
