"""Which weights wrote the KV of a sequence, position by position. Integers and names only."""

from collections.abc import Iterator, Sequence
from typing import Self

from rollout.types import KVRun, Weights


class Written:
    """Runs of positions from 0 on, each written by one load of weights; the last goes on without end."""

    __slots__ = ("_runs",)

    def __init__(self, weights: Weights) -> None:
        self._runs: list[tuple[int, Weights]] = [(0, weights)]
        """Where each begins."""

    @classmethod
    def continued(cls, runs: Sequence[KVRun], by: Weights) -> Self:
        """What has KV of `runs`, and is written by `by` from there on."""
        written = cls(runs[0].weights if runs else by)
        at = 0
        for run in runs:
            written.change(at, run.weights)
            at += run.tokens
        written.change(at, by)
        return written

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Written) and self._runs == other._runs

    __hash__ = None  # type: ignore[assignment]

    @property
    def first(self) -> Weights:
        """Of position 0."""
        return self._runs[0][1]

    def change(self, at: int, weights: Weights) -> None:
        """Positions from `at` on, none of which is known to be written, are written by `weights`."""
        last, by = self._runs[-1]
        assert at >= last, (at, last)
        if by == weights:
            return
        if at == last:
            self._runs.pop()
        if not self._runs or self._runs[-1][1] != weights:
            self._runs.append((at, weights))

    def pure(self, tokens: int) -> int:
        """Of the first `tokens` positions, how many follow one another from 0 on that the first weights wrote."""
        return min(tokens, self._runs[1][0]) if len(self._runs) > 1 else tokens

    def until(self, tokens: int) -> tuple[KVRun, ...]:
        """The runs of positions [0, tokens)."""
        return tuple(KVRun(weights, stop - start) for start, stop, weights in self.between(0, tokens))

    def between(self, start: int, stop: int) -> Iterator[tuple[int, int, Weights]]:
        """The runs of positions [start, stop), each with where it begins and ends."""
        for index, (begin, weights) in enumerate(self._runs):
            end = self._runs[index + 1][0] if index + 1 < len(self._runs) else stop
            if begin < stop and end > start:
                yield max(begin, start), min(end, stop), weights
