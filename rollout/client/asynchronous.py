"""The client of a service, with coroutines.

Prompts are turned into token ids here, so a bad one raises where it was passed and reaches nobody else.
"""

import asyncio
import itertools
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

from rollout.cluster import launch
from rollout.cluster.calls import call
from rollout.cluster.description import ServiceDescription
from rollout.config import Config, load_config
from rollout.control.records import Submission
from rollout.errors import InvalidPromptError, InvalidSamplingError, PromptTooLongError, ServiceClosedError
from rollout.metrics import KVCheck, ServiceStats
from rollout.text import Prompt, Tokenizer
from rollout.types import (
    AbortReport,
    Delivery,
    GroupId,
    Keep,
    ResumeReport,
    SamplingParams,
    Then,
    trajectory_seed,
)

CALL_S = 30.0
"""Deadline of a call that should answer at once, and grace of one with a timeout of its own."""

KEY = re.compile(r"(?!.*/\d+$)[^\x00-\x1f\x7f]+")
"""A key may not look like a trajectory's id, which is `key/index`."""


class _All(Enum):
    ALL = "all"


ALL: Final = _All.ALL
"""Every trajectory that was not handed out."""

Ids = str | Sequence[str] | Literal[_All.ALL]
"""One trajectory id or several; a group's id stands for all its members."""


class AsyncRollout:
    """A client of a running service."""

    def __init__(
        self, controller: Any, description: ServiceDescription, *, key_prefix: str, on_close: Callable[[], None] | None
    ) -> None:
        """`on_close` ends the service; None if somebody else owns it."""
        self._controller = controller
        self._config = description.config
        self._max_context = description.max_context
        self._vocab_size = description.vocab_size
        self._sampling = description.config.sampling.resolve(description.generation_defaults)
        self._keys = (f"auto-{key_prefix}{number}" for number in itertools.count())
        self._on_close = on_close
        self._closed = False
        self._arrived: set[str] = set()
        """Calls of `next_groups` that the controller need not remember any more."""
        self._abandoned: set[str] = set()
        """Those whose answer nobody got."""
        self.tokenizer = Tokenizer(description.tokenizer)

    @classmethod
    async def start(cls, config: Config | Mapping[str, Any] | Path | str) -> Self:
        """As `rollout.start`, without blocking the event loop."""
        return await asyncio.to_thread(cls.start_blocking, config)

    @classmethod
    async def connect(cls, name: str = "rollout", address: str | None = None) -> Self:
        """As `rollout.connect`, without blocking the event loop."""
        return await asyncio.to_thread(cls.connect_blocking, name, address)

    @classmethod
    def start_blocking(cls, config: Config | Mapping[str, Any] | Path | str) -> Self:
        service = launch.launch(config if isinstance(config, Config) else load_config(config))
        try:
            return cls(service.controller, service.description, key_prefix="", on_close=service.close)
        except BaseException:
            service.close()
            raise

    @classmethod
    def connect_blocking(cls, name: str, address: str | None) -> Self:
        controller, description = launch.connect(name, address)
        return cls(controller, description, key_prefix=f"{uuid.uuid4().hex[:8]}-", on_close=None)

    @property
    def config(self) -> Config:
        return self._config

    @property
    def sampling(self) -> SamplingParams:
        """What a submission without parameters of its own uses."""
        return self._sampling

    async def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        n: int = 1,
        sampling: SamplingParams | None = None,
        key: str | Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        chat: bool | None = None,
    ) -> list[GroupId]:
        """Queue `n` trajectories of each prompt; returns one group id a prompt, which is its key.

        A prompt is a string, a list of chat messages or a list of token ids; a list of those is several. With
        `chat` (default: run.chat) a string is one user message. Seeds follow from the run seed, or
        `sampling.seed`, and the key, so equal keys draw equal tokens.

        Raises `InvalidPromptError`, `PromptTooLongError`, `InvalidSamplingError` or `DuplicateKeyError`, and
        nothing of the call is queued. Equal submissions of one key are one, so a call that timed out can be
        repeated.
        """
        several = _several(prompts)
        if not isinstance(n, int) or n < 1:
            raise InvalidSamplingError(f"n: got {n!r}, allowed: an integer >= 1")
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise InvalidSamplingError(f"sampling: got {type(sampling).__name__}, allowed: SamplingParams")
        keys = [key] if isinstance(key, str) else list(key) if key is not None else None
        if keys is not None and len(keys) != len(several):
            raise InvalidPromptError(f"key: got {len(keys)} for {len(several)} prompts")
        submissions = [
            self._submission(prompt, name, n, sampling or self._sampling, dict(metadata or {}), chat)
            for prompt, name in zip(several, keys or itertools.islice(self._keys, len(several)), strict=True)
        ]
        await self._call(self._controller.submit, submissions)
        return [submission.group_id for submission in submissions]

    async def next_groups(self, k: int = 1, timeout_s: float = 600.0) -> list[Delivery]:
        """Up to `k` finished groups, each handed out once: as soon as there are `k`, or no more to come without
        a `resume` or `submit`, or at the timeout what there is.

        A call that fails or is cancelled loses nothing: its groups are handed out again.
        """
        timeout_s = max(0.0, timeout_s)
        call = uuid.uuid4().hex
        arrived, abandoned = tuple(self._arrived), tuple(self._abandoned)
        try:
            deliveries: list[Delivery] = await self._call(
                self._controller.next_groups, k, timeout_s, call, arrived, abandoned, timeout_s=timeout_s + CALL_S
            )
        except BaseException:
            self._abandoned.add(call)
            raise
        self._arrived.difference_update(arrived)
        self._abandoned.difference_update(abandoned)
        self._arrived.add(call)
        return deliveries

    async def abort(
        self, ids: Ids = ALL, *, keep: Keep | str = Keep.AUTO, then: Then | str = Then.HOLD, timeout_s: float = 60.0
    ) -> AbortReport:
        """Stop trajectories at their next step, put their KV where `keep` says, and report their tokens so far.

        The KV of one that is suspended already is moved there. What cannot be moved stays where it is, which
        `stats().troubles` tells; tokens are never lost.

        Raises `ValueError` for a `keep` or `then` that does not exist.
        """
        timeout_s = max(0.0, timeout_s)
        report: AbortReport = await self._call(
            self._controller.abort, _names(ids), Keep(keep), Then(then), timeout_s, timeout_s=timeout_s + CALL_S
        )
        return report

    async def resume(self, ids: Ids = ALL) -> ResumeReport:
        """Queue suspended trajectories again; they continue exactly where they stopped."""
        report: ResumeReport = await self._call(self._controller.resume, _names(ids))
        return report

    async def stats(self) -> ServiceStats:
        """Counters and snapshots of every part of the service."""
        stats: ServiceStats = await self._call(self._controller.stats)
        return stats

    async def check_kv(self) -> tuple[KVCheck, ...]:
        """Have every worker and pool recompute its accounting from its structures, while it runs."""
        checks: tuple[KVCheck, ...] = await self._call(self._controller.check_kv)
        return checks

    async def close(self) -> None:
        """Leave the service, and end it if this client started it. Closing twice is harmless.

        Every other call raises `ServiceClosedError` from then on.
        """
        self._closed = True
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            await asyncio.get_running_loop().run_in_executor(None, on_close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _submission(
        self,
        prompt: Prompt,
        key: str,
        n: int,
        sampling: SamplingParams,
        metadata: dict[str, Any],
        chat: bool | None,
    ) -> Submission:
        if not isinstance(key, str) or not KEY.fullmatch(key):
            raise InvalidPromptError(f"key: got {key!r}, allowed: printable, and not ending in / and a number")
        ids = self.tokenizer.prompt_ids(prompt, chat=self._config.run.chat if chat is None else chat)
        if len(ids) >= self._max_context:
            raise PromptTooLongError(
                f"{key}: the prompt has {len(ids)} tokens, allowed: fewer than the context of {self._max_context}"
            )
        if max(ids) >= self._vocab_size:
            raise InvalidPromptError(f"{key}: token id {max(ids)}, allowed: 0 … {self._vocab_size - 1}")
        seeds = tuple(
            trajectory_seed(request_seed=sampling.seed, run_seed=self._config.run.seed, key=key, sample_index=index)
            for index in range(n)
        )
        return Submission(group_id=GroupId(key), prompt_ids=ids, sampling=sampling, seeds=seeds, metadata=metadata)

    async def _call(self, method: Any, *args: Any, timeout_s: float = CALL_S) -> Any:
        if self._closed:
            raise ServiceClosedError("this client was closed")
        return await call(method, *args, timeout_s=timeout_s)


def _several(prompts: Any) -> list[Prompt]:
    """The prompts of a submission: a sequence of strings or of sequences is several, anything else is one."""
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, str) and bool(prompts)
    return list(prompts) if is_list and all(isinstance(prompt, Sequence) for prompt in prompts) else [prompts]


def _names(ids: Ids) -> list[str] | None:
    return None if ids is ALL else [ids] if isinstance(ids, str) else list(ids)
