"""A service without Ray or a model: each trajectory's tokens follow from its seed, and faults are asked for."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollout.config import Config
from rollout.errors import PromptTooLongError, StalledError
from rollout.metrics import RolloutCounters, ServiceStats
from rollout.reports import AbortReport
from rollout.text import Tokenizer, read_tokenizer_files
from rollout.types import (
    Delivery,
    FinishReason,
    GroupId,
    Keep,
    Phase,
    SamplingParams,
    Then,
    Trajectory,
    TrajectoryId,
    Version,
    VersionRun,
    WorkerId,
    trajectory_seed,
)
from tests.weights import WEIGHTS

MAX_CONTEXT = 64
TOKENS = 8


class FakeService:
    """Stands for `Rollout`, and for the client that is its `aio`."""

    def __init__(
        self,
        config: Config,
        *,
        finishes: Callable[[GroupId], bool] = lambda group: True,
        on_poll: Callable[[], None] = lambda: None,
        stops: Callable[[GroupId], bool] = lambda group: True,
        change: Callable[[Trajectory], Trajectory] = lambda trajectory: trajectory,
    ) -> None:
        """Only groups that `finishes` accepts end by themselves; of those that `stops` does not, an abort reaches
        the first trajectory only. `change` is made to each trajectory."""
        self.config = config
        self.sampling: SamplingParams = config.sampling.resolve()
        self.tokenizer = Tokenizer(read_tokenizer_files(Path(config.model.path)))
        self.closed = False
        self._finishes = finishes
        self._on_poll = on_poll
        self._stops = stops
        self._change = change
        self._live: dict[GroupId, list[Trajectory]] = {}
        self._complete: list[Delivery] = []
        self._suspensions = 0
        self._went_on = time.monotonic()

    @property
    def aio(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed = True

    async def submit(self, prompts: tuple[int, ...], *, n: int, key: str, metadata: Mapping[str, Any]) -> list[GroupId]:
        if len(prompts) >= MAX_CONTEXT:
            raise PromptTooLongError(f"{key}: the prompt has {len(prompts)} tokens")
        group = GroupId(key)
        self._live[group] = [self._trajectory(group, index, prompts, dict(metadata)) for index in range(n)]
        if self._finishes(group):
            self._end(group, FinishReason.LENGTH)
        return [group]

    async def next_groups(self, k: int, timeout_s: float) -> list[Delivery]:
        self._on_poll()
        taken, self._complete = self._complete[:k], self._complete[k:]
        if taken or not self._live:
            self._went_on = time.monotonic()
        elif time.monotonic() - self._went_on >= self.config.driver.stall_timeout_s:
            raise StalledError("nothing went on for long enough", state='{"phases": {}}')
        return taken

    async def abort(self, ids: object, *, keep: Keep, then: Then, timeout_s: float) -> AbortReport:
        assert (keep, then) == (Keep.NONE, Then.FINISH)
        for group in list(self._live):
            if self._stops(group):
                self._end(group, FinishReason.ABORT)
        left = [one for group in self._live.values() for one in group]
        partials = tuple(replace(one, finish_reason=FinishReason.ABORT) for one in left if one.sample_index == 0)
        unreached = tuple(one.trajectory_id for one in left if one.sample_index)
        return AbortReport(partials=partials, unreached=unreached)

    async def stats(self) -> ServiceStats:
        running = sum(len(group) for group in self._live.values())
        tokens = sum(len(one.output_ids) for group in self._live.values() for one in group)
        counters = RolloutCounters(tokens=tokens, suspensions=self._suspensions, releases=self._suspensions)
        return ServiceStats(weights=WEIGHTS, phases={Phase.DECODING: running}, counters=counters)

    def _trajectory(
        self, group: GroupId, index: int, prompt_ids: tuple[int, ...], metadata: dict[str, Any]
    ) -> Trajectory:
        seed = trajectory_seed(request_seed=None, run_seed=self.config.run.seed, key=group, sample_index=index)
        suspended = bool(self.config.abort.policies)
        self._suspensions += suspended
        return self._change(
            Trajectory(
                trajectory_id=TrajectoryId(f"{group}/{index}"),
                group_id=group,
                sample_index=index,
                seed=seed,
                prompt_ids=prompt_ids,
                output_ids=tuple((seed >> position) % 300 for position in range(TOKENS)),
                logprobs=tuple(-0.5 - position for position in range(TOKENS)),
                versions=(VersionRun(version=Version(0), tokens=TOKENS),),
                finish_reason=None,
                suspensions=int(suspended),
                workers=(WorkerId("worker-0"), WorkerId("worker-1"))[: 1 + suspended],
                metadata=metadata,
            )
        )

    def _end(self, group: GroupId, reason: FinishReason) -> None:
        ended = tuple(
            replace(one, finish_reason=FinishReason.ERROR if one.error else reason) for one in self._live.pop(group)
        )
        self._complete.append(Delivery(group_id=group, trajectories=ended))
