"""Drives one run on a running service: submits its prompts, writes what finishes, stops it when it must.

Every prompt becomes rows: its trajectories, or one row of sample 0 whose `error` says why it was rejected. Groups
that were handed over are written before anything else is waited for, so that no end of the run loses them.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rollout.cli.progress import Progress
from rollout.cli.prompts import PromptRow
from rollout.client import ALL, AsyncRollout
from rollout.errors import DeadlineError, InvalidPromptError, RequestError, StalledError
from rollout.metrics import ServiceStats
from rollout.types import FinishReason, GroupId, Keep, Phase, Then, Trajectory, TrajectoryId, trajectory_seed

Write = Callable[[Sequence[Trajectory]], None]

TURN_PROMPTS = 32
"""Prompts submitted between two looks at what has finished."""
TURN_GROUPS = 64
POLL_S = 0.5
"""Longest wait for finished groups; bounds how late an interrupt is seen."""
STATS_S = 1.0
"""Seconds between two looks at the counters."""
ABORT_S = 15.0
"""Seconds for running trajectories to stop when the run is ended early."""
SETTLE_S = 5.0
"""Seconds for the last suspensions' pages to be freed and counted."""
SETTLE_POLL_S = 0.05
NOTED_REJECTIONS = 5
"""Rejected prompts that get a line on stderr each."""


class Ended(StrEnum):
    """How a run ended."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to."""

    ended: Ended
    groups: int
    """Written whole."""
    trajectories: int
    """Written."""
    rejected: int
    """Prompts."""
    failures: tuple[str, ...]
    """Of each trajectory that ended with an error: its id and the error."""
    wall_s: float
    """From the first submission until the last group was written."""
    stats: ServiceStats
    stalled: StalledError | None = None
    """What was told when nothing went on."""


class Driver:
    """Runs once."""

    def __init__(
        self,
        client: AsyncRollout,
        *,
        samples: int,
        write: Write,
        progress: Progress,
        interrupted: Callable[[], bool],
    ) -> None:
        self._client = client
        self._samples = samples
        self._write = write
        self._progress = progress
        self._interrupted = interrupted
        self._pending: set[GroupId] = set()
        self._groups = 0
        self._trajectories = 0
        self._rejected = 0
        self._failures: list[str] = []
        self._stalled: StalledError | None = None

    async def run(self, rows: Sequence[PromptRow]) -> Outcome:
        """Roll `rows` out until all are over, `interrupted()`, or nothing goes on any more."""
        start = time.monotonic()
        try:
            ended = await self._collect(rows)
        except StalledError as error:
            ended, self._stalled = Ended.STALLED, error
        if ended is not Ended.COMPLETE:
            await self._abort()
        wall_s = time.monotonic() - start
        return Outcome(
            ended=ended,
            groups=self._groups,
            trajectories=self._trajectories,
            rejected=self._rejected,
            failures=tuple(self._failures),
            wall_s=wall_s,
            stats=await self._settled(),
            stalled=self._stalled,
        )

    async def _collect(self, rows: Sequence[PromptRow]) -> Ended:
        source = iter(rows)
        more = True
        looked_at = time.monotonic()
        while more or self._pending:
            turn = list(itertools.islice(source, TURN_PROMPTS))
            more = len(turn) == TURN_PROMPTS
            for row in turn:
                await self._submit(row)
            await self._take(0.0 if more else POLL_S)
            if self._interrupted():
                return Ended.INTERRUPTED
            now = time.monotonic()
            if now - looked_at >= STATS_S:
                looked_at = now
                await self._look()
        return Ended.COMPLETE

    async def _submit(self, row: PromptRow) -> None:
        try:
            if row.error is not None:
                raise InvalidPromptError(row.error)
            ids = self._client.tokenizer.prompt_ids(row.prompt, chat=self._client.config.run.chat)
            self._pending.update(await self._client.submit(ids, n=self._samples, key=row.key, metadata=row.metadata))
        except RequestError as error:
            self._reject(row, f"{type(error).__name__}: {error}")

    def _reject(self, row: PromptRow, error: str) -> None:
        seed = trajectory_seed(
            request_seed=self._client.sampling.seed,
            run_seed=self._client.config.run.seed,
            key=row.key,
            sample_index=0,
        )
        now = time.time()
        rejected = Trajectory(
            trajectory_id=TrajectoryId(f"{row.key}/0"),
            group_id=GroupId(row.key),
            sample_index=0,
            seed=seed,
            prompt_ids=(),
            output_ids=(),
            logprobs=(),
            versions=(),
            finish_reason=FinishReason.ERROR,
            error=error,
            submitted_at=now,
            finished_at=now,
            metadata=row.metadata,
        )
        self._write([rejected])
        self._rejected += 1
        if self._rejected <= NOTED_REJECTIONS:
            self._progress.note(f"rejected prompt {row.key}: {error}")
        if self._rejected == NOTED_REJECTIONS:
            self._progress.note("further rejected prompts are named in the output only")

    async def _take(self, timeout_s: float) -> None:
        """Write the groups that finish within `timeout_s`."""
        for delivery in await self._client.next_groups(TURN_GROUPS, timeout_s):
            self._keep(delivery.trajectories)
            self._pending.remove(delivery.group_id)
            self._groups += 1

    def _keep(self, trajectories: Sequence[Trajectory]) -> None:
        self._write(trajectories)
        self._trajectories += len(trajectories)
        self._failures += [f"{each.trajectory_id}: {each.error}" for each in trajectories if each.error is not None]

    async def _look(self) -> None:
        """Show the counters. What policies hold goes on once nothing else is left."""
        try:
            stats = await self._client.stats()
        except DeadlineError:
            return
        self._progress.update(stats, self._groups + self._rejected)
        if stats.phases and set(stats.phases) <= {Phase.SUSPENDED, Phase.FINISHED, Phase.FAILED, Phase.DROPPED}:
            await self._client.resume()

    async def _abort(self) -> None:
        """Stop everything; write the groups that are over now, and what is known of the others."""
        report = await self._client.abort(ALL, keep=Keep.NONE, then=Then.FINISH, timeout_s=ABORT_S)
        taken = -1
        while self._pending and taken != len(self._pending):
            taken = len(self._pending)
            await self._take(POLL_S)
        partials = [partial for partial in report.partials if partial.group_id in self._pending]
        self._keep(partials)
        if missing := len(self._pending) * self._samples - len(partials):
            self._progress.note(
                f"{len(report.unreached)} trajectories did not stop within {ABORT_S:g} s; they and those that were "
                f"over in their groups, {missing} together, are not in the output"
            )

    async def _settled(self) -> ServiceStats:
        """The counters once every suspension's pages were counted as freed, or after `SETTLE_S`."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            stats = await self._client.stats()
            if stats.counters.releases >= stats.counters.suspensions or time.monotonic() >= deadline:
                self._progress.update(stats, self._groups + self._rejected)
                return stats
            await asyncio.sleep(SETTLE_POLL_S)
