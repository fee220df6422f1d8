"""Assignments become sequences, if this engine's model can run them."""

from dataclasses import dataclass

from rollout.control.commands import Assignment
from rollout.engine.live import LiveWeights
from rollout.engine.sequence import Sequence
from rollout.errors import InvalidPromptError, PromptTooLongError
from rollout.kv.keys import PageKey


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFactory:
    """What all sequences of an engine have in common."""

    root: PageKey
    page_tokens: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_context: int
    replays: bool
    live: LiveWeights

    def make(self, assignment: Assignment) -> Sequence:
        """Raises `PromptTooLongError` or `InvalidPromptError`."""
        prompt, output = assignment.prompt_ids, assignment.output
        max_context = min(self.max_context, assignment.max_context)
        if len(prompt) + len(output) >= max_context:
            raise PromptTooLongError(
                f"{assignment.trajectory_id}: {len(prompt) + len(output)} tokens, "
                f"allowed: fewer than the context of {max_context}"
            )
        allowed = f"must be in 0 … {self.vocab_size - 1}"
        if not prompt or not all(0 <= token < self.vocab_size for token in prompt):
            raise InvalidPromptError(f"{assignment.trajectory_id}: token ids {allowed}")
        if output.sampled < len(output) and not 0 <= min(output.ids) <= max(output.ids) < self.vocab_size:
            raise InvalidPromptError(f"{assignment.trajectory_id}: appended token ids {allowed}")
        return Sequence(
            assignment,
            eos_ids=self.eos_ids,
            max_context=max_context,
            replays=self.replays,
            root=self.root,
            page_tokens=self.page_tokens,
            weights=self.live.weights,
        )
