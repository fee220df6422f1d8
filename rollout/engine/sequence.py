"""A trajectory while an engine runs it. Integers and lists only, no torch.

A sequence of n tokens has KV for n - 1 once it decodes: the last token is fed by the next step.
`computed` counts the positions with KV. Where history is replayed prompt positions are only ever written
by prefill and output positions by decode steps, so a recomputation replays history; and since bits depend
on which of the two wrote them, the prefix tree knows output positions there by other ids than prompt ones.
"""

import sys
from array import array
from enum import StrEnum

from rollout.control.messages import Assignment
from rollout.kv.chain import Chain, ChainValues
from rollout.kv.holding import Holding
from rollout.kv.keys import PageNames
from rollout.types import FinishReason, SequenceKey, TrajectoryId


class Status(StrEnum):
    WAITING = "waiting"
    RESTORING = "restoring"
    RUNNING = "running"


class Sequence:
    """Tokens, KV progress and page table of one assignment."""

    __slots__ = (
        "abort",
        "assignment",
        "chain",
        "computed",
        "holding",
        "image",
        "kv_seen",
        "loadable",
        "max_total",
        "names",
        "prompt_tokens",
        "replays",
        "restoring",
        "slice_total",
        "status",
        "stop_ids",
        "tokens",
        "weights_id",
    )

    def __init__(
        self,
        assignment: Assignment,
        *,
        eos_ids: tuple[int, ...],
        max_context: int,
        replays: bool,
        names: PageNames,
        weights_id: str,
    ) -> None:
        sampling = assignment.sampling
        self.assignment = assignment
        self.prompt_tokens = len(assignment.prompt_ids)
        self.tokens = array("i", [*assignment.prompt_ids, *assignment.output.ids])
        self.names = names
        self.weights_id = weights_id
        self.replays = replays
        self.max_total = min(max_context, len(assignment.prompt_ids) + sampling.max_new_tokens)
        self.stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_ids)
        )
        self.slice_total = (
            sys.maxsize if assignment.slice_tokens is None else len(self.tokens) + assignment.slice_tokens
        )
        """Tokens with which it is to be parked."""
        self.image = assignment.image
        self.loadable = True
        """No copy from the host has failed for it."""
        self.restoring = False
        """A restore from the pool is under way."""
        self.kv_seen = assignment.kv_tokens
        self.status = Status.WAITING
        self.computed = 0
        self.holding: Holding | None = None
        self.abort = False
        self.chain = Chain()

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
        """Sampled ones."""
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
    def full(self) -> bool:
        """Whether the next position needs another page."""
        return self.computed >= len(self.pages.table) * self.names.page_tokens

    @property
    def reusable_end(self) -> int:
        """Positions whose KV may come from elsewhere: one token at least must be fed."""
        return len(self.tokens) - 1

    def chain_values(self, start: int, end: int) -> ChainValues:
        """What a canary must find at positions [start, end)."""
        if len(self.chain) < end:
            self.chain.extend(self.tokens[len(self.chain) : end], self.weights_id)
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
        return tuple(self.stop_ids) if self.output_tokens < self.assignment.sampling.min_new_tokens else ()

    def advance(self, tokens: int) -> bool:
        """`tokens` more positions have KV; True if the last one's logits give a new token."""
        self.computed += tokens
        if self.computed > self.kv_seen:
            self.kv_seen = self.computed
        return self.computed == len(self.tokens)

    def accept(self, token: int) -> FinishReason | None:
        """Append a sampled token; the reason if it is the last one. Stop is looked at before length."""
        self.tokens.append(token)
        if token in self.stop_ids:
            return FinishReason.STOP
        if len(self.tokens) >= self.max_total:
            return FinishReason.LENGTH
        return None

    @property
    def slice_over(self) -> bool:
        return len(self.tokens) >= self.slice_total
