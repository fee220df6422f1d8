"""By which versions the KV was written on which each output token was sampled."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from rollout.types import KVRun, KVSpan, Version


@dataclass(slots=True)
class Spans:
    """Of one trajectory: told where its KV came from at each admission, and what was sampled since.

    Positions count the prompt.
    """

    _spans: list[tuple[int, int, tuple[tuple[int, Version], ...]]] = field(default_factory=list)
    """First and last but one token, and where each run of its KV begins."""
    _known: tuple[tuple[int, Version], ...] | None = None
    """At the last admission, as far as it was not computed then; None once a token was sampled since."""
    _known_tokens: int = 0

    @classmethod
    def told(cls, spans: Sequence[KVSpan]) -> Self:
        """Such that `of` tells these; KV that they tell of is gone."""
        starts = [tuple((start, version) for start, _, version in span.kv) for span in spans]
        return cls([(span.first, span.stop, each) for span, each in zip(spans, starts, strict=True)])

    def admitted(self, written: Sequence[KVRun]) -> None:
        """It has KV of these runs; what else it needs is computed by whatever samples next."""
        starts: list[tuple[int, Version]] = []
        self._known_tokens = 0
        for run in written:
            _change(starts, self._known_tokens, run.weights.version)
            self._known_tokens += run.tokens
        self._known = tuple(starts)

    def told_again(self) -> None:
        """A token was told of before, and so was the admission that it came after."""
        self._known = None

    def sampled(self, first: int, versions: Sequence[Version | None]) -> None:
        """Tokens at positions from `first` on."""
        at = first
        while at < first + len(versions):
            version = versions[at - first]
            assert version is not None, f"position {at} was not sampled"
            stop = first + len(versions)
            if versions.count(version) != len(versions):
                stop = next((p for p in range(at, stop) if versions[p - first] != version), stop)
            self._add(at, stop, version)
            at = stop

    def of(self, prompt_tokens: int, tokens: int) -> tuple[KVSpan, ...]:
        """Of all tokens after the prompt, `tokens` with that, if any was sampled.

        Appended ones belong to what was sampled before them; those that nothing was sampled before have a span of
        their own.
        """
        spans: list[KVSpan] = []
        if self._spans and self._spans[0][0] > prompt_tokens:
            first, _, starts = self._spans[0]
            spans.append(_span(prompt_tokens, first, starts))
        for index, (first, stop, starts) in enumerate(self._spans):
            end = self._spans[index + 1][0] if index + 1 < len(self._spans) else max(stop, tokens)
            spans.append(_span(first, end, starts))
        return tuple(spans)

    def _add(self, first: int, stop: int, version: Version) -> None:
        starts = list(self._spans[-1][2]) if self._spans else []
        if self._known is not None:
            starts, self._known = list(self._known), None
            _change(starts, self._known_tokens, version)
        elif starts and starts[-1][1] != version:
            _change(starts, first - 1, version)  # the weights were replaced before the last token was fed
        elif not starts:
            _change(starts, 0, version)
        if self._spans and self._spans[-1][2] == tuple(starts):
            self._spans[-1] = (self._spans[-1][0], stop, self._spans[-1][2])
        else:
            self._spans.append((first, stop, tuple(starts)))


def _span(first: int, stop: int, starts: Sequence[tuple[int, Version]]) -> KVSpan:
    ends = [*(start for start, _ in starts[1:]), first]
    runs = zip(starts, ends, strict=True)
    kv = tuple((start, min(end, first), version) for (start, version), end in runs if start < first)
    return KVSpan(first=first, stop=stop, kv=kv)


def _change(starts: list[tuple[int, Version]], at: int, version: Version) -> None:
    """From position `at` on another version writes."""
    if starts and starts[-1][1] == version:
        return
    if starts and starts[-1][0] == at:
        starts.pop()
    if not starts or starts[-1][1] != version:
        starts.append((at, version))
