"""What drivers pass, checked and made into submissions: prompts into ids, keys, seeds.

A bad prompt raises where it was passed and reaches nobody else.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.cluster.description import ServiceDescription
from rollout.control.saved import Saved
from rollout.control.submission import Submission
from rollout.errors import InvalidArgumentError, InvalidPromptError, InvalidSamplingError, PromptTooLongError
from rollout.text import Prompt, Tokenizer
from rollout.types import GroupId, Priority, SamplingParams, Trajectory, Version, trajectory_seed

KEY = re.compile(r"(?!.*/\d+$)[^\x00-\x1f\x7f]+")
"""A key may not look like a trajectory's id, which is `key/index`."""


class Intake:
    """Makes submissions of one client's requests; names what has no key."""

    def __init__(self, description: ServiceDescription, tokenizer: Tokenizer, *, key_prefix: str) -> None:
        self._config = description.config
        self._max_context = description.max_context
        self._vocab_size = description.vocab_size
        self._tokenizer = tokenizer
        self._key_prefix = key_prefix
        self.next_key = 0
        """The number of the next submission without a key."""
        self.sampling = description.config.sampling.resolve(description.generation_defaults)
        """Of a submission without parameters of its own."""

    def submissions(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        n: int,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        key: str | Sequence[str] | None,
        chat: bool | None,
        priority: Priority,
        deadline_s: float | None,
        max_group_tokens: int | None,
        metadata: dict[str, Any],
        multi_turn: bool,
        caller: str,
        partial: bool,
        min_version: int | None,
        exact_version: int | None,
    ) -> list[Submission]:
        """One a prompt. Raises `RequestError` of some kind."""
        several = _several(prompts)
        if not isinstance(n, int) or n < 1:
            raise InvalidArgumentError(f"n: got {n!r}, allowed: an integer >= 1")
        if deadline_s is not None and not (isinstance(deadline_s, int | float) and deadline_s > 0):
            raise InvalidArgumentError(f"deadline_s: got {deadline_s!r}, allowed: seconds > 0")
        if max_group_tokens is not None and (not isinstance(max_group_tokens, int) or max_group_tokens < 1):
            raise InvalidArgumentError(f"max_group_tokens: got {max_group_tokens!r}, allowed: an integer >= 1")
        if not isinstance(caller, str):
            raise InvalidArgumentError(f"caller: got {caller!r:.80}, allowed: a string")
        for name, version in {"min_version": min_version, "exact_version": exact_version}.items():
            if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
                raise InvalidArgumentError(f"{name}: got {version!r:.80}, allowed: an integer")
        if min_version is not None and exact_version is not None:
            raise InvalidArgumentError("exact_version: got min_version, too; allowed: one of them")
        each = self._sampling(sampling, n)
        keys = [key] if isinstance(key, str) else list(key) if key is not None else None
        if keys is not None and len(keys) != len(several):
            raise InvalidPromptError(f"key: got {len(keys)} for {len(several)} prompts")
        return [
            Submission(
                group_id=self._checked_key(name),
                prompt_ids=self._prompt_ids(name, prompt, chat),
                sampling=each,
                seeds=self._seeds(name, each),
                priority=priority,
                deadline_s=deadline_s,
                max_group_tokens=max_group_tokens,
                metadata=metadata,
                multi_turn=bool(multi_turn),
                caller=caller,
                partial=bool(partial),
                min_version=Version(min_version) if min_version is not None else None,
                exact_version=Version(exact_version) if exact_version is not None else None,
            )
            for prompt, name in zip(several, keys or self._new_keys(len(several)), strict=True)
        ]

    def _new_keys(self, count: int) -> list[str]:
        first, self.next_key = self.next_key, self.next_key + count
        return [f"auto-{self._key_prefix}{number}" for number in range(first, self.next_key)]

    def check_saved(self, saved: Saved) -> None:
        """Raises `InvalidPromptError` for tokens that the model does not have."""
        for group in saved.groups:
            self._checked_ids(group.submission.group_id, group.submission.prompt_ids)
            for member in group.members:
                self._checked_ids(member.trajectory.trajectory_id, member.trajectory.output_ids)

    def appended_ids(
        self, what: str | Sequence[Mapping[str, Any]] | Sequence[int], *, to: Trajectory | None
    ) -> tuple[int, ...]:
        """Ids that are to follow what a trajectory has, which messages need to know. Raises `InvalidPromptError`."""
        if not isinstance(what, Sequence):
            raise InvalidPromptError(f"extend: got {type(what).__name__}, allowed: messages, text or token ids")
        if not isinstance(what, str) and len(what) and isinstance(what[0], Mapping):
            if to is None:
                raise InvalidPromptError(
                    "extend: got messages with an id, allowed: text or token ids there, messages with the trajectory"
                )
            last_id = (to.output_ids or to.prompt_ids)[-1]
            ids: Sequence[int] = self._tokenizer.next_turn_ids(what, last_id=last_id)  # type: ignore[arg-type]
        elif isinstance(what, str) and what:
            ids = self._tokenizer.encode(what, add_special_tokens=False)
        else:
            ids = self._tokenizer.prompt_ids(what, chat=False)
        return self._checked_ids("extend", tuple(ids))

    def _sampling(
        self, sampling: SamplingParams | Sequence[SamplingParams] | None, n: int
    ) -> tuple[SamplingParams, ...]:
        if sampling is None:
            return (self.sampling,) * n
        each = (sampling,) * n if isinstance(sampling, SamplingParams) else sampling
        if not isinstance(each, Sequence) or not all(isinstance(one, SamplingParams) for one in each):
            raise InvalidSamplingError(
                f"sampling: got {type(sampling).__name__}, allowed: SamplingParams, or n of them"
            )
        if len(each) != n:
            raise InvalidSamplingError(f"sampling: got {len(each)} for {n} samples")
        return tuple(each)

    def _checked_key(self, key: str) -> GroupId:
        if not isinstance(key, str) or not KEY.fullmatch(key):
            raise InvalidPromptError(f"key: got {key!r}, allowed: printable, and not ending in / and a number")
        return GroupId(key)

    def _prompt_ids(self, key: str, prompt: Prompt, chat: bool | None) -> tuple[int, ...]:
        ids = self._tokenizer.prompt_ids(prompt, chat=self._config.run.chat if chat is None else chat)
        if len(ids) >= self._max_context:
            raise PromptTooLongError(
                f"{key}: the prompt has {len(ids)} tokens, allowed: fewer than the context of {self._max_context}"
            )
        return self._checked_ids(key, ids)

    def _checked_ids(self, what: str, ids: tuple[int, ...]) -> tuple[int, ...]:
        if max(ids, default=0) >= self._vocab_size:
            raise InvalidPromptError(f"{what}: token id {max(ids)}, allowed: 0 … {self._vocab_size - 1}")
        return ids

    def _seeds(self, key: str, sampling: Sequence[SamplingParams]) -> tuple[int, ...]:
        run_seed = self._config.run.seed
        return tuple(
            trajectory_seed(request_seed=one.seed, run_seed=run_seed, key=key, sample_index=index)
            for index, one in enumerate(sampling)
        )


def _several(prompts: Any) -> list[Prompt]:
    """The prompts of a submission: a sequence of strings or of sequences is several, anything else is one."""
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, str) and bool(prompts)
    return list(prompts) if is_list and all(isinstance(prompt, Sequence) for prompt in prompts) else [prompts]
