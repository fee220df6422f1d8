"""A trajectory while an engine runs it. Integers and lists only, no torch.

A sequence of n tokens has KV for n - 1 once it decodes: the last token is fed by the next step.
`computed` counts the positions with KV. Where history is replayed prompt positions are only ever written
by prefill and output positions by decode steps, so a recomputation replays history; and since bits depend
on which of the two wrote them, the prefix tree knows output positions there by other ids than prompt ones.
"""

import sys
from array import array
from enum import StrEnum

from rollout.control.commands import Assignment
from rollout.engine.repetition import RepetitionFinder
from rollout.kv.chain import Chain, ChainValues
from rollout.kv.holding import Holding
from rollout.kv.keys import PageKey, PageNames
from rollout.kv.written import Written
from rollout.types import AbortReason, Columns, FinishReason, SequenceKey, TrajectoryId, Weights


class Status(StrEnum):
    WAITING = "waiting"
    RESTORING = "restoring"
    RUNNING = "running"


class Sequence:
    """Tokens, KV progress and page table of one assignment."""

    __slots__ = (
        "abort",
        "admission",
        "assignment",
        "chain",
        "computed",
        "holding",
        "image",
        "kv_seen",
        "loadable",
        "look_total",
        "max_total",
        "min_total",
        "most_total",
        "names",
        "only_loads",
        "outdated",
        "prompt_tokens",
        "repetition",
        "replays",
        "restoring",
        "sampled_from",
        "slice_total",
        "status",
        "stop_ids",
        "tokens",
        "turns",
        "written",
    )

    def __init__(
        self,
        assignment: Assignment,
        *,
        eos_ids: tuple[int, ...],
        max_context: int,
        replays: bool,
        root: PageKey,
        page_tokens: int,
        weights: Weights,
    ) -> None:
        """`weights` write its KV, unless it goes on with what others wrote (`write`)."""
        sampling = assignment.sampling
        self.assignment = assignment
        self.prompt_tokens = len(assignment.prompt_ids)
        self.tokens = array("i", [*assignment.prompt_ids, *assignment.output.ids])
        self.replays = replays
        self.written = Written(weights)
        self.names = PageNames(root, page_tokens=page_tokens, written=self.written, prefilled=self._prefilled)
        self.chain = Chain()
        unsampled = len(self.tokens) - assignment.output.sampled
        """Tokens that count for no budget: the prompt, and what was appended to it later."""
        self.max_total = min(max_context, unsampled + sampling.max_new_tokens)
        self.min_total = unsampled + sampling.min_new_tokens
        """Tokens before which it may not stop."""
        self.stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_ids)
        )
        watch = assignment.watch
        self.only_loads = watch.only_loads
        """It is to be parked as soon as it has its KV."""
        self.turns = watch.turns
        self.slice_total = sys.maxsize if watch.slice_tokens is None else len(self.tokens) + watch.slice_tokens
        """Tokens with which its slice is over."""
        self.most_total = sys.maxsize if watch.most_tokens is None else unsampled + watch.most_tokens
        """Tokens with which it is over-long."""
        self.sampled_from = self.prompt_tokens + _after_last_appended(assignment.output)
        """Where the tokens begin that were sampled in one go; repetition is looked for from here."""
        self.repetition = RepetitionFinder(watch.repetition) if watch.repetition is not None else None
        self.look_total = self._next_look()
        """Tokens with which there is something to look at, so that other tokens cost one comparison."""
        self.image = assignment.image
        self.loadable = True
        """No copy from the host has failed for it."""
        self.restoring = False
        """A restore from the pool is under way."""
        self.kv_seen = assignment.kv_tokens
        self.status = Status.WAITING
        self.admission = sys.maxsize
        """When it was admitted last, as an order."""
        self.computed = 0
        self.holding: Holding | None = None
        self.abort = False
        self.outdated = False
        """Its weights were replaced while copies into its pages were under way: it starts again after them."""

    @property
    def trajectory_id(self) -> TrajectoryId:
        return self.assignment.trajectory_id

    @property
    def epoch(self) -> int:
        return self.assignment.epoch

    @property
    def key(self) -> SequenceKey:
        return (self.trajectory_id, self.epoch)

    @property
    def output_tokens(self) -> int:
        """Those after the prompt."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def pages(self) -> Holding:
        assert self.holding is not None, f"{self.key} holds no pages"
        return self.holding

    @property
    def prefill_end(self) -> int:
        """Positions that prefill writes: the prompt; elsewhere everything known."""
        return self.prompt_tokens if self.replays else len(self.tokens)

    @property
    def needs_prefill(self) -> bool:
        """Whether the next position is for prefill: not if a decode step can feed the last token."""
        if self.replays:
            return self.computed < self.prompt_tokens
        missing = len(self.tokens) - self.computed
        return missing > 1 or (missing == 1 and not self.computed)

    @property
    def _prefilled(self) -> int | None:
        """Positions that are told apart from those which decode steps write, if any are."""
        return self.prompt_tokens if self.replays else None

    @property
    def full(self) -> bool:
        """Whether the next position needs another page."""
        return self.computed >= len(self.pages.table) * self.names.page_tokens

    @property
    def reusable_end(self) -> int:
        """Positions whose KV may come from elsewhere: one token at least must be fed."""
        return len(self.tokens) - 1

    @property
    def shareable_end(self) -> int:
        """Positions with KV that are in whole pages, and all of them written by the same weights."""
        whole = self.written.pure(self.computed) // self.names.page_tokens
        return whole * self.names.page_tokens

    def write(self, written: Written) -> None:
        """This is by which weights its KV was and will be written; it has no pages yet."""
        if written == self.written:
            return
        self.written = written
        self.names = self.names.written_by(written)
        self.chain = Chain()

    def change_weights(self, at: int, weights: Weights) -> None:
        """`weights` write its KV from position `at` on; if there was some before it was preempted, that is gone."""
        self.written.change(at, weights)
        self.names.forget(at)
        self.chain.forget(at)

    def chain_values(self, start: int, end: int) -> ChainValues:
        """What a canary must find at positions [start, end)."""
        for begin, stop, weights in self.written.between(len(self.chain), end):
            self.chain.extend(self.tokens[begin:stop], weights.weights_id)
        return self.chain.values(start, end)

    def key_of(self, tokens: int) -> bytes:
        """The first `tokens` positions as the prefix tree knows them."""
        if not self.replays or tokens <= self.prompt_tokens:
            return self.tokens[:tokens].tobytes()
        decoded = array("i", [~token for token in self.tokens[self.prompt_tokens : tokens]])
        return self.tokens[: self.prompt_tokens].tobytes() + decoded.tobytes()

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that the next token may not be."""
        return tuple(self.stop_ids) if len(self.tokens) < self.min_total else ()

    def advance(self, tokens: int) -> bool:
        """`tokens` more positions have KV; True if the last one's logits give a new token."""
        self.computed += tokens
        if self.computed > self.kv_seen:
            self.kv_seen = self.computed
        return self.computed == len(self.tokens)

    def accept(self, token: int) -> FinishReason | AbortReason | None:
        """Append a sampled token; why it is the last one, or for now.

        Stop is looked at before length, and both before what is watched. Where stops end turns, one that leaves no
        token for another turn is the end all the same.
        """
        self.tokens.append(token)
        total = len(self.tokens)
        if token in self.stop_ids:
            return AbortReason.TURN if self.turns and total < self.max_total else FinishReason.STOP
        if total >= self.max_total:
            return FinishReason.LENGTH
        return self._look() if total >= self.look_total else None

    def _look(self) -> AbortReason | None:
        total = len(self.tokens)
        if total >= self.most_total:
            return AbortReason.OVER_LONG
        due = self.repetition is not None and (total - self.sampled_from) % self.repetition.every == 0
        if due and self.repetition is not None and self.repetition.piece(self.tokens, self.sampled_from) is not None:
            return AbortReason.REPETITION
        if total >= self.slice_total:
            return AbortReason.SLICE_BUDGET
        self.look_total = self._next_look()
        return None

    def _next_look(self) -> int:
        """Repetition is looked for at fixed tokens, so that it does not depend on the slices when one is found."""
        total = min(self.slice_total, self.most_total)
        if self.repetition is None:
            return total
        past = len(self.tokens) - self.sampled_from
        return min(total, self.sampled_from + (past // self.repetition.every + 1) * self.repetition.every)


def _after_last_appended(output: Columns) -> int:
    """Tokens up to the last one that was not sampled; 0 if all were."""
    if output.sampled == len(output):
        return 0
    return next(index for index in range(len(output), 0, -1) if output.versions[index - 1] is None)
