"""What all sides of a comparison are given: prompts of random ids, all of one length, and how many tokens to sample.

No two turns have a prompt in common, so no prefix cache helps; within a turn all sides get the same.
"""

import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollout.errors import RolloutError

Prompts = list[list[int]]


class WrongOutputError(RolloutError):
    """A side that did not sample what it was asked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What one side made of one turn."""

    seconds: float
    """From handing over all prompts to the last result."""
    output_ids: Sequence[Sequence[int]]
    logprobs: Sequence[int]
    """How many log-probabilities each output has."""


class Side(Protocol):
    """One of the systems that are compared."""

    def generate(self, prompts: Prompts, new_tokens: int) -> Generated: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Ids that a prompt may have."""

    size: int
    ids: Sequence[int]
    """All but the special ones."""

    @classmethod
    def read(cls, model: Path, size: int) -> "Vocabulary":
        """Of a model directory."""
        added = json.loads((model / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens", [])
        special = {token["id"] for token in added if token["special"]}
        return cls(size=size, ids=[token for token in range(size) if token not in special])


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Turns of one shape."""

    name: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    vocabulary: Vocabulary
    seed: int

    def prompts(self, turn: int | str) -> Prompts:
        draw = random.Random(f"{self.seed} {self.name} {turn}")
        return [draw.choices(self.vocabulary.ids, k=self.prompt_tokens) for _ in range(self.batch)]

    def measure(
        self,
        sides: Mapping[str, Side],
        turns: Mapping[str, int],
        *,
        warm_tokens: int,
        beside: Callable[[], object],
    ) -> dict[str, list[float]]:
        """Seconds of each side's turns, in the order reversed from turn to turn.

        `turns` says how many each side has. Before them each has one with `warm_tokens` new tokens, which does not
        count. `beside` is measured in every turn too, by itself. Raises `WrongOutputError`.
        """
        measured: dict[str, list[float]] = {name: [] for name in sides}
        for name, side in sides.items():
            self._checked(name, side.generate(self.prompts("warm"), warm_tokens), warm_tokens)
        for turn in range(max(turns[name] for name in sides)):
            prompts = self.prompts(turn)
            order: list[str | None] = [*sides, None]
            for each in order if turn % 2 == 0 else reversed(order):
                if each is None:
                    beside()
                elif turn < turns[each]:
                    done = sides[each].generate(prompts, self.new_tokens)
                    measured[each].append(self._checked(each, done, self.new_tokens))
        return measured

    def _checked(self, name: str, done: Generated, new_tokens: int) -> float:
        """Its seconds, if it sampled what it should have."""
        lengths = sorted({len(ids) for ids in done.output_ids})
        if len(done.output_ids) != self.batch or lengths != [new_tokens]:
            raise WrongOutputError(
                f"{self.name}: {name} was asked for {self.batch} outputs of {new_tokens} tokens, "
                f"and made {len(done.output_ids)} of {lengths}"
            )
        if list(done.logprobs) != [new_tokens] * self.batch:
            raise WrongOutputError(
                f"{self.name}: {name} was asked for {new_tokens} log-probabilities with each of {self.batch} outputs, "
                f"and gave {sorted(set(done.logprobs))} with {len(done.logprobs)}"
            )
        strange = [token for ids in done.output_ids for token in ids if not 0 <= token < self.vocabulary.size]
        if strange:
            raise WrongOutputError(
                f"{self.name}: {name} made ids outside of 0 … {self.vocabulary.size - 1}: {strange[:5]}"
            )
        return done.seconds


def rates(measured: Mapping[str, Sequence[float]], tokens: int) -> dict[str, float]:
    """Tokens per second of each side, by the median of its turns."""
    return {name: tokens / statistics.median(seconds) for name, seconds in measured.items() if seconds}
