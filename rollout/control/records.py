"""What the controller knows of a trajectory and of its group. Mutated by the controller only."""

from dataclasses import dataclass, field

from rollout.control.commands import Assignment, Watch
from rollout.control.intent import Home, Intent, Transfer
from rollout.control.lengths import Lengths
from rollout.control.lifecycle import ON_WORKER, OVER, move
from rollout.control.messages import Admitted, Sampled
from rollout.control.pooled import Pooled
from rollout.control.spans import Spans
from rollout.control.submission import Submission
from rollout.types import (
    AbortReason,
    Attempt,
    Columns,
    FinishReason,
    GroupId,
    Keep,
    Phase,
    Priority,
    Resume,
    SamplingParams,
    Then,
    Trajectory,
    TrajectoryId,
    Turn,
    TurnMark,
    Wait,
    WorkerId,
    trajectory_seed,
    version_runs,
)


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """The trajectories of one call of `submit`."""

    size: int = 0
    tailed: bool = False
    """Its tail was stopped."""
    lengths: Lengths = field(default_factory=Lengths)
    """Of finished members."""
    open: "dict[TrajectoryId, Record]" = field(default_factory=dict)
    """Those that are not over."""


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """The trajectories of one prompt."""

    submission: Submission
    batch: Batch
    submitted_at: float
    members: "list[Record]" = field(default_factory=list)
    held: set[TrajectoryId] = field(default_factory=set)
    """Members that stay suspended until somebody commands otherwise."""
    lengths: Lengths = field(default_factory=Lengths)
    """Sampled tokens of finished members."""
    error: str | None = None
    """Why it failed as a whole."""
    handed: set[TrajectoryId] = field(default_factory=set)
    """Members that were handed out before the rest (`Submission.partial`)."""

    @property
    def group_id(self) -> GroupId:
        return self.submission.group_id

    @property
    def over(self) -> bool:
        return all(member.over for member in self.members)

    @property
    def budget_left(self) -> int | None:
        """Tokens that may still be sampled and are allowed to no member that is on a worker; None: any number."""
        if self.submission.max_group_tokens is None:
            return None
        running = (member for member in self.members if member.on_worker and not member.promoting)
        allowed = sum(member.allowed_tokens - member.sampled_tokens for member in running)
        return self.submission.max_group_tokens - self._spent_tokens - allowed

    @property
    def budget_spent(self) -> bool:
        most = self.submission.max_group_tokens
        return most is not None and self._spent_tokens >= most

    @property
    def _spent_tokens(self) -> int:
        return sum(member.sampled_tokens + member.attempted_tokens for member in self.members)


@dataclass(slots=True, kw_only=True, eq=False)
class Record:
    """One trajectory. `columns` is the truth; everything about KV is a cache of it."""

    trajectory_id: TrajectoryId
    group: Group
    sample_index: int
    order: int
    """Position in submission order: older ones go first."""
    seed: int
    pooled: Pooled
    phase: Phase = Phase.QUEUED
    paused_from: Phase | None = None
    """What it goes on with after a pause."""
    columns: Columns = field(default_factory=Columns)
    spans: Spans = field(default_factory=Spans)
    epoch: int = 0
    kv_tokens: int = 0
    """Positions that had KV on some worker, as far as known."""
    intent: Intent | None = None
    """Of an abort or slice that is under way."""
    moved_for: Intent | None = None
    """The last one for which KV was sent somewhere: it is tried once."""
    transfer: Transfer | None = None
    home: Home | None = None
    came_from: Home | None = None
    """Where its KV was when it was started where that is."""
    promoting: bool = False
    """It is on a worker, or about to be, for its KV only."""
    suspensions: int = 0
    abort_reason: AbortReason | None = None
    """Of the last stop; None once it went on."""
    fired: set[AbortReason] = field(default_factory=set)
    """Policies that stop a trajectory once and have."""
    ended_turn: bool = False
    """It stopped by itself, at the end of a turn."""
    extended_by: set[str] = field(default_factory=set)
    """Calls that appended tokens."""
    attempts: list[Attempt] = field(default_factory=list)
    failures: int = 0
    """Retries and replacements."""
    allowed_tokens: int = 0
    """Of its group's budget: sampled tokens after which it comes back for more, on a worker."""
    stopped_at: float = 0.0
    stopped_for: Intent | None = None
    """Of the last stop, until it goes on: what its return is measured by."""
    moved_from: WorkerId | None = None
    """A worker from which its KV was sent to the pool since it ran last: if it is still there, the pool refused it."""
    waits_since: float = 0.0
    """Since when it is queued; if its version ceased to be live later, since then."""
    refused_at: float | None = None
    """Since when it could run on another worker than the one that has its KV."""
    workers: list[WorkerId] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    lost: bool = False
    """It was on a worker that was lost, and did not start since."""
    losses: int = 0
    """Workers lost under it, one after the other, without a new token."""
    admitted_epoch: int = -1
    """The last epoch in which it was admitted."""
    starts: int = 0
    """Of this attempt."""
    began: bool = False
    """It was admitted once."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    finished_at: float | None = None

    def enter(self, phase: Phase) -> None:
        self.phase = move(self.phase, phase)
        self.paused_from = None

    def proceed(self, phase: Phase) -> None:
        """What it does on its worker, now or after the pause that it is in."""
        if self.phase is Phase.PAUSED:
            self.paused_from = phase
        elif self.phase is not phase:
            self.enter(phase)

    def pause(self) -> None:
        before = self.phase
        self.enter(Phase.PAUSED)
        self.paused_from = before

    def unpause(self) -> None:
        assert self.paused_from is not None, f"{self.trajectory_id} was not paused"
        self.enter(self.paused_from)

    @property
    def group_id(self) -> GroupId:
        return self.group.group_id

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.group.submission.prompt_ids

    @property
    def sampling(self) -> SamplingParams:
        return self.group.submission.sampling[self.sample_index]

    @property
    def priority(self) -> Priority:
        return self.group.submission.priority

    @property
    def activity(self) -> Phase:
        """Its phase, or what it would be but for a pause."""
        return self.paused_from if self.paused_from is not None else self.phase

    @property
    def tokens(self) -> int:
        """Prompt and output."""
        return len(self.prompt_ids) + len(self.columns)

    @property
    def sampled_tokens(self) -> int:
        return self.columns.sampled

    @property
    def attempted_tokens(self) -> int:
        """Sampled in earlier attempts."""
        return sum(run.tokens for each in self.attempts for run in each.versions if run.version is not None)

    @property
    def kept(self) -> Keep:
        """Where its KV is, when it is suspended."""
        if self.home is not None:
            return self.home.where
        return Keep.POOL if self.pooled.image is not None else Keep.NONE

    @property
    def whereabouts(self) -> str:
        """Where its KV is, or what it waits for, as far as a suspended trajectory is told by that."""
        return "waiting" if self.ended_turn else str(self.kept)

    @property
    def worker(self) -> WorkerId | None:
        """The worker it runs, or ran last, on."""
        return self.workers[-1] if self.workers else None

    @property
    def on_worker(self) -> bool:
        return self.phase in ON_WORKER

    @property
    def export(self) -> Transfer | None:
        """The export that is under way."""
        return self.transfer if self.transfer is not None and self.transfer.kind is Transfer.Kind.EXPORT else None

    @property
    def turn(self) -> Turn:
        """When it is expected to need its image: in the order in which the fleet would start it."""
        match self.activity:
            case Phase.RESTORING | Phase.PREEMPTED:
                wait = Wait.STARTING
            case Phase.PREFILLING | Phase.DECODING:
                wait = Wait.RUNNING
            case Phase.QUEUED:
                wait = Wait.QUEUED
            case _:
                again = self.intent is not None and self.intent.then is Then.REQUEUE
                wait = Wait.QUEUED if again else Wait.HELD
        return Turn(wait, self.order)

    @property
    def turn_mark(self) -> TurnMark:
        """As that of its snapshot."""
        return self.group.submitted_at, self.suspensions

    @property
    def resumable(self) -> bool:
        """It is not over, is not about to be, and does not wait for `extend`."""
        ends = self.intent is not None and self.intent.then in (Then.FINISH, Then.DROP)
        return not (self.over or self.ended_turn or ends)

    @property
    def held(self) -> bool:
        """It is suspended until somebody commands otherwise."""
        return self.phase is Phase.SUSPENDED and self.trajectory_id in self.group.held

    @property
    def allowance_spent(self) -> bool:
        """It has sampled what it was allowed of its group's budget."""
        return self.group.submission.max_group_tokens is not None and self.sampled_tokens >= self.allowed_tokens

    @property
    def budget_spent(self) -> bool:
        return self.sampled_tokens >= self.sampling.max_new_tokens or self.group.budget_spent

    @property
    def over(self) -> bool:
        return self.phase in OVER

    def sampled(self, event: Sampled) -> int:
        """Take new tokens in; returns how many were not told before."""
        known = len(self.columns) - event.offset
        assert known >= 0, f"{self.trajectory_id}: tokens from {event.offset} on, but only {len(self.columns)} known"
        if known:
            self.spans.told_again()
        news = event.columns.since(known)
        if news:
            self.spans.sampled(self.tokens, news.versions)
            self.columns.extend(news)
            self.losses = 0
            if self.phase is not Phase.DECODING:
                self.proceed(Phase.DECODING)
        return len(news)

    def preempted(self) -> bool:
        """Whether this was not told before."""
        if self.activity is Phase.PREEMPTED:
            return False
        self.proceed(Phase.PREEMPTED)
        return True

    def admitted(self, event: Admitted) -> dict[str, int]:
        """The worker gave it pages; returns what counts of it, which is nothing if it was told before."""
        first = self.admitted_epoch != self.epoch
        if not first and self.activity is not Phase.PREEMPTED:
            return {}
        self.admitted_epoch = self.epoch
        self.spans.admitted(event.written)
        whole = event.cached_tokens + event.loaded_tokens + event.restored_tokens >= self.tokens - 1 > 0
        self.proceed(Phase.DECODING if whole else Phase.PREFILLING)
        if self.promoting:
            return {"loaded_tokens": event.loaded_tokens}  # what it lacks is not computed
        counts = {"recomputed_tokens": event.recomputed_tokens, "loaded_tokens": event.loaded_tokens}
        again, self.began = self.began, True
        if first and again:
            counts |= {"restored_tokens": event.restored_tokens, "cached_tokens": event.cached_tokens}
            self.resumes.append(Resume(worker=self.workers[-1], **counts))
        return counts

    def begin_again(self, *, reason: AbortReason | None = None, error: str | None = None) -> None:
        """From the prompt, with other draws; what it had is kept as an attempt that ended for this."""
        self.attempts.append(
            Attempt(
                seed=self.seed,
                output_ids=tuple(self.columns.ids),
                logprobs=tuple(self.columns.logprobs),
                versions=version_runs(self.columns.versions),
                reason=reason,
                error=error,
            )
        )
        self.seed = trajectory_seed(
            request_seed=self.group.submission.seeds[self.sample_index],
            run_seed=0,
            key=self.trajectory_id,
            sample_index=len(self.attempts),
        )
        self.columns = Columns()
        self.spans = Spans()
        self.kv_tokens = 0
        self.starts = 0
        self.began = False
        self.ended_turn = False

    def assignment(self, *, watch: Watch, max_context: int) -> Assignment:
        return Assignment(
            trajectory_id=self.trajectory_id,
            epoch=self.epoch,
            prompt_ids=self.prompt_ids,
            output=self.columns.since(0),
            sampling=self.sampling,
            seed=self.seed,
            watch=watch,
            max_context=max_context,
            image=self.pooled.image,
            kv_tokens=self.kv_tokens,
        )

    def snapshot(self) -> Trajectory:
        """The trajectory as the driver sees it now."""
        return Trajectory(
            trajectory_id=self.trajectory_id,
            group_id=self.group_id,
            sample_index=self.sample_index,
            seed=self.seed,
            prompt_ids=self.prompt_ids,
            output_ids=tuple(self.columns.ids),
            logprobs=tuple(self.columns.logprobs),
            versions=version_runs(self.columns.versions),
            kv_spans=self.spans.of(len(self.prompt_ids), self.tokens),
            finish_reason=self.finish_reason,
            abort_reason=self.abort_reason,
            error=self.error,
            attempts=tuple(self.attempts),
            suspensions=self.suspensions,
            workers=tuple(self.workers),
            resumes=tuple(self.resumes),
            submitted_at=self.group.submitted_at,
            finished_at=self.finished_at,
            metadata=self.group.submission.metadata,
        )
