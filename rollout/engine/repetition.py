"""Finds out when a sequence repeats itself: its end is one piece of tokens, over and over. Pure, no torch.

Looking costs a search of bytes for the last few tokens, and a comparison of two slices for each place where they
are; a sequence looks once in `every` tokens, so that a token costs a bounded number of bytes whatever is looked for.
"""

from array import array

from rollout.control.commands import RepetitionWatch

ANCHOR_TOKENS = 8
"""At the end, that are looked for before."""
LEAST_EVERY = 8


class RepetitionFinder:
    """Looks for what a watch describes."""

    def __init__(self, watch: RepetitionWatch) -> None:
        self._watch = watch
        # A loop of pieces of p tokens and of total length l has its last l - p tokens p tokens before, too.
        shortest = min(self._length(piece) - piece for piece in range(1, watch.ngram + 1))
        self._anchor = max(1, min(ANCHOR_TOKENS, shortest))
        self.every = max(LEAST_EVERY, watch.ngram // 8)
        """Tokens after which it is worth looking again."""

    def piece(self, tokens: "array[int]", first: int) -> int | None:
        """Length of the shortest piece with which `tokens[first:]` ends in a loop; None if it does not."""
        size = tokens.itemsize
        end = len(tokens)
        oldest = max(first, end - self._anchor - self._watch.ngram)
        recent = tokens[oldest:].tobytes()
        anchor = recent[-self._anchor * size :]
        if len(anchor) < self._anchor * size:
            return None
        limit = len(recent) - size
        while (at := recent.rfind(anchor, 0, limit)) >= 0:
            within = at % size
            if within:  # of a token
                limit = at - within + len(anchor)
                continue
            limit = at - size + len(anchor)
            piece = (len(recent) - len(anchor) - at) // size
            start = end - self._length(piece)
            if (
                start >= first
                and tokens[start] == tokens[start + piece]  # spares most slices that would differ
                and tokens[start : end - piece] == tokens[start + piece : end]
            ):
                return piece
        return None

    def _length(self, piece: int) -> int:
        """Least length of a loop of pieces of `piece` tokens."""
        return piece * max(self._watch.times, -(-self._watch.min_tokens // piece))
