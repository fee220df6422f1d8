"""What was submitted to a controller and what must become of it, kept without a look at how it decides."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from rollout.config import AbortConfig, GroupsConfig
from rollout.control.lifecycle import ON_WORKER
from rollout.control.membership import MOST_LOSSES
from rollout.control.records import Record
from rollout.control.submission import Submission
from rollout.metrics import Accounts
from rollout.types import (
    AbortReason,
    Attempt,
    Delivery,
    FinishReason,
    GroupId,
    Phase,
    Then,
    Trajectory,
    TrajectoryId,
    Version,
    Weights,
)
from tests.control.machine.process import FAILURE, stops, token

BY_PHASE = {
    Phase.QUEUED: "queued",
    Phase.SUSPENDED: "suspended",
    Phase.FINISHED: "buffered",
    Phase.FAILED: "buffered",
    Phase.DROPPED: "dropped",
}


class Member(NamedTuple):
    """A trajectory as it was submitted."""

    submission: Submission
    index: int

    @property
    def budget(self) -> int:
        return self.submission.sampling[self.index].max_new_tokens


class Books:
    """Every trajectory is in exactly one state, with the tokens that it must have."""

    def __init__(self, abort: AbortConfig, groups: GroupsConfig, context: int) -> None:
        self.rules = groups
        self.context = context
        self.thens = {AbortReason(policy.kind): Then(policy.then) for policy in abort.policies}
        self.members: dict[TrajectoryId, Member] = {}
        self.given: defaultdict[tuple[TrajectoryId, int], dict[int, int]] = defaultdict(dict)
        """Tokens that were appended, by attempt (its seed) and position."""
        self.versions: defaultdict[tuple[int, int], set[Version]] = defaultdict(set)
        """That a token was sampled by, by seed and position."""
        self.histories: defaultdict[tuple[int, int], set[tuple[Version, ...]]] = defaultdict(set)
        """Likewise: that wrote the KV of each position before, and then sampled it."""
        self.live = Version(0)
        self.behind: Counter[int] = Counter()
        """Tokens that were handed out, by how far they were behind what was live."""
        self.asked: defaultdict[Then, set[TrajectoryId]] = defaultdict(set)
        """By drivers; it may have completed all the same."""
        self.discarded: set[TrajectoryId] = set()
        self.under_way: dict[str, list[Delivery]] = {}
        """Handed out, by call, and not known to have arrived."""
        self.arrived: list[Delivery] = []
        self.returned: list[Delivery] = []
        """Handed out to nobody: to be handed out again."""
        self.past: set[TrajectoryId] = set()
        """What a service has nothing more of, since an earlier one had all of it over and done with."""

    def add(self, submission: Submission) -> None:
        members = {
            TrajectoryId(f"{submission.group_id}/{i}"): Member(submission, i) for i in range(len(submission.seeds))
        }
        self.members |= members

    def sampled(self, seed: int, index: int, weights: Weights, kv: Sequence[Weights]) -> None:
        """By a worker; it may be that nobody hears of it."""
        self.versions[seed, index].add(weights.version)
        self.histories[seed, index].add((*(each.version for each in kv), weights.version))

    # Handing out --------------------------------------------------------------------------------------

    def take(self, deliveries: Sequence[Delivery], call: str) -> None:
        again = min(len(self.returned), len(deliveries))
        assert list(deliveries[:again]) == self.returned[:again], "what was lost is handed out again, whole and first"
        del self.returned[:again]
        for delivery in deliveries[again:]:
            assert delivery.version == self.live
            for run in (run for t in delivery.trajectories for run in t.versions if run.version is not None):
                self.behind[self.live - run.version] += run.tokens
        if deliveries:
            self.under_way[call] = list(deliveries)

    def abandon(self, call: str) -> None:
        self.returned += self.under_way.pop(call, [])

    def arrive(self, calls: Sequence[str]) -> None:
        for call in calls:
            self.arrived += self.under_way.pop(call, [])

    def save(self, records: Sequence[Record]) -> None:
        """The service ends; the next one has what it had, and what did not arrive, and counts anew."""
        here = {record.trajectory_id for record in records}
        lost = [*self.returned, *(delivery for deliveries in self.under_way.values() for delivery in deliveries)]
        self.returned = [each for each in lost if not {t.trajectory_id for t in each.trajectories} & here]
        self.under_way.clear()
        again = {t.trajectory_id for each in self.returned for t in (*each.trajectories, *each.dropped)}
        self.past = set(self.members) - here - again
        self.behind.clear()

    @property
    def handed(self) -> dict[str, list[Delivery]]:
        """Everything that was, by what is known of it."""
        delivered = [delivery for deliveries in self.under_way.values() for delivery in deliveries]
        return {"delivered": delivered, "acknowledged": self.arrived, "buffered": self.returned}

    @property
    def handed_ids(self) -> set[TrajectoryId]:
        """The same, by id."""
        return {t.trajectory_id for each in self.handed.values() for delivery in each for t in delivery.trajectories}

    @property
    def done(self) -> bool:
        """Whether all has arrived that was not given up."""
        arrived = {t.trajectory_id for delivery in self.arrived for t in (*delivery.trajectories, *delivery.dropped)}
        return not self.under_way and not self.returned and arrived | self.discarded >= set(self.members)

    # What must be true at any time --------------------------------------------------------------------

    def check(self, records: Sequence[Record], accounts: Accounts) -> None:
        states = self._states(records)
        assert set(states) == set(self.members)
        assert self.past.isdisjoint(record.trajectory_id for record in records)
        states = {t: state for t, state in states.items() if t not in self.past}
        dropped: Counter[AbortReason] = Counter()
        for state in states.values():
            reason = state.partition(" ")[2]
            dropped.update([AbortReason(reason)] if reason else [])
        counts = Counter(state.partition(" ")[0] for state in states.values())
        assert accounts == Accounts(
            submitted=len(self.members) - len(self.past),
            queued=counts["queued"],
            active=counts["active"],
            suspended=counts["suspended"],
            buffered=counts["buffered"],
            delivered=counts["delivered"],
            acknowledged=counts["acknowledged"],
            dropped=dropped,
        )
        assert accounts.accounted == accounts.submitted
        self._check_budgets(records)
        for record in records:
            columns = record.columns
            self._check_tokens(record.trajectory_id, record.seed, columns.ids, columns.logprobs, columns.versions)

    def _states(self, records: Sequence[Record]) -> dict[TrajectoryId, str]:
        """Each trajectory in one: what was handed out, what is here, what left its group, what was given up."""
        states: dict[TrajectoryId, str] = {}
        for state, deliveries in self.handed.items():
            for delivery in deliveries:
                for t in delivery.trajectories:
                    assert t.trajectory_id not in states, f"{t.trajectory_id} was handed out twice"
                    states[t.trajectory_id] = state
                for t in delivery.dropped:
                    assert t.trajectory_id not in states, f"{t.trajectory_id} was handed out twice"
                    states[t.trajectory_id] = f"dropped {t.abort_reason}"
        for record in records:
            if (handed := states.get(record.trajectory_id)) is not None:
                assert record.over, f"{record.trajectory_id} was handed out and goes on"
                assert record.group.submission.partial, handed
                continue
            state = BY_PHASE.get(record.phase, "active")
            states[record.trajectory_id] = f"dropped {record.abort_reason}" if state == "dropped" else state
            assert (state == "active") == (record.phase in ON_WORKER or record.phase is Phase.SUSPENDING)
        return dict.fromkeys(self.discarded, f"dropped {AbortReason.DISCARD}") | states

    def _check_budgets(self, records: Sequence[Record]) -> None:
        spent: Counter[GroupId] = Counter()
        for record in records:
            assert record.sampled_tokens <= self.members[record.trajectory_id].budget
            assert record.tokens <= self.context
            spent[record.group_id] += record.sampled_tokens + sum(map(_sampled, record.attempts))
        for group, tokens in spent.items():
            most = self._submission(group).max_group_tokens
            assert most is None or tokens <= most, f"{group}: {tokens} tokens of {most}"

    def _submission(self, group: GroupId) -> Submission:
        return self.members[TrajectoryId(f"{group}/0")].submission

    def _check_tokens(
        self,
        t: TrajectoryId,
        seed: int,
        ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[Version | None],
    ) -> None:
        given = self.given.get((t, seed), {})
        assert len(ids) == len(logprobs) == len(versions)
        assert all(position < len(ids) for position in given), "appended tokens are lost"
        for i, (value, logprob, version) in enumerate(zip(ids, logprobs, versions, strict=True)):
            if i in given:
                assert (value, logprob, version) == (given[i], 0.0, None)
                continue
            assert (value, logprob) == (token(seed, i), -value / 256)
            assert version is not None
            assert version in self.versions[seed, i]
            assert self.members[t].submission.admits(version), f"sampled with version {version}"
            if stops(value) and i + 1 < len(ids):
                assert self.members[t].submission.multi_turn, "went on after a stop"
                assert i + 1 in given, "went on after a turn though nothing was appended"

    # What must be true in the end ---------------------------------------------------------------------

    def check_deliveries(self, *, no_worker_left: bool) -> None:
        """Once all has arrived: it is whole, and it ended as it had to."""
        spent: Counter[GroupId] = Counter()
        for delivery in self.arrived:
            for trajectory in (*delivery.trajectories, *delivery.dropped):
                self._check_whole(trajectory)
                spent[delivery.group_id] += trajectory.sampled_tokens + sum(map(_sampled, trajectory.attempts))
        for delivery in self.arrived:
            for trajectory in delivery.trajectories:
                self._check_end(trajectory, delivery, spent[delivery.group_id], no_worker_left=no_worker_left)
            for trajectory in delivery.dropped:
                assert trajectory.finish_reason is FinishReason.ABORT
                assert self._told(trajectory, Then.DROP)
        complete = Counter(delivery.group_id for delivery in self.arrived if delivery.complete)
        assert all(count == 1 for count in complete.values())
        assert {delivery.group_id for delivery in self.arrived} == set(complete)

    def _check_whole(self, trajectory: Trajectory) -> None:
        t, member = trajectory.trajectory_id, self.members[trajectory.trajectory_id]
        versions = [run.version for run in trajectory.versions for _ in range(run.tokens)]
        self._check_tokens(t, trajectory.seed, trajectory.output_ids, trajectory.logprobs, versions)
        self._check_spans(trajectory, versions)
        assert trajectory.loss_mask == tuple(int(version is not None) for version in versions)
        assert (trajectory.group_id, trajectory.sample_index) == (member.submission.group_id, member.index)
        assert trajectory.prompt_ids == member.submission.prompt_ids
        for attempt in trajectory.attempts:
            columns = [run.version for run in attempt.versions for _ in range(run.tokens)]
            self._check_tokens(t, attempt.seed, attempt.output_ids, attempt.logprobs, columns)
            if attempt.error is not None:
                assert self.rules.failed_member == "replace"
            elif attempt.reason is AbortReason.DRIVER:
                assert t in self.asked[Then.RETRY]
            else:
                assert attempt.reason is not None
                assert self.thens[attempt.reason] is Then.RETRY
        assert sum(attempt.error is not None for attempt in trajectory.attempts) <= self.rules.max_retries
        seeds = [*(attempt.seed for attempt in trajectory.attempts), trajectory.seed]
        assert seeds[0] == member.submission.seeds[member.index]
        assert len(set(seeds)) == len(seeds), "other draws"

    def _check_spans(self, trajectory: Trajectory, versions: Sequence[Version | None]) -> None:
        """Each sampled token was sampled on the KV that its span says."""
        spans, prompt = trajectory.kv_spans, len(trajectory.prompt_ids)
        sampled = [prompt + i for i, version in enumerate(versions) if version is not None]
        assert [span.first for span in spans] == [*[prompt][: len(sampled)], *(span.stop for span in spans[:-1])]
        assert not spans or spans[-1].stop == prompt + len(versions)
        for span in spans:
            assert span.first in sampled or span is spans[0]
            before = [version for start, stop, version in span.kv for _ in range(start, stop)]
            assert [start for start, _, _ in span.kv] == [*[0][: len(span.kv)], *(stop for _, stop, _ in span.kv[:-1])]
            assert len(before) == span.first
            by = versions[span.first - prompt]
            if by is None:  # what was appended before anything was sampled
                assert span.stop == sampled[0]
            for position in range(span.first, span.stop):
                if (version := versions[position - prompt]) is not None:
                    history = (*before, *[by] * (position - span.first), version)
                    assert history in self.histories[trajectory.seed, position - prompt]

    def _check_end(self, trajectory: Trajectory, delivery: Delivery, spent: int, *, no_worker_left: bool) -> None:
        member = self.members[trajectory.trajectory_id]
        match trajectory.finish_reason:
            case FinishReason.STOP:
                assert stops(trajectory.output_ids[-1])
                assert trajectory.loss_mask[-1]
            case FinishReason.LENGTH:
                whole = trajectory.sampled_tokens == member.budget
                full = len(trajectory.prompt_ids) + len(trajectory.output_ids) == self.context
                gone = any(t in self.discarded for t in self.members if t.startswith(f"{delivery.group_id}/"))
                assert whole or full or gone or spent == member.submission.max_group_tokens
            case FinishReason.ABORT:
                failed = trajectory.abort_reason is AbortReason.GROUP_FAILED and delivery.error is not None
                assert failed or self._told(trajectory, Then.FINISH)
            case FinishReason.ERROR:
                self._check_error(trajectory, delivery, no_worker_left=no_worker_left)
            case None:
                raise AssertionError(f"{trajectory.trajectory_id} was handed out before its end")
        assert delivery.error is None or self.rules.failed_member != "keep"

    def _check_error(self, trajectory: Trajectory, delivery: Delivery, *, no_worker_left: bool) -> None:
        assert trajectory.error is not None
        if trajectory.error.startswith("no worker is left"):
            assert no_worker_left
            return
        if "(weights.version_timeout_s)" in trajectory.error:
            wants = self.members[trajectory.trajectory_id].submission
            assert wants.exact_version is not None or wants.min_version is not None
            return
        lost = trajectory.error.startswith(f"{MOST_LOSSES} workers were lost under it")
        assert lost or trajectory.error == FAILURE
        assert not lost or len(trajectory.workers) >= MOST_LOSSES
        assert (delivery.error is None) == (self.rules.failed_member == "keep")

    def _told(self, trajectory: Trajectory, then: Then) -> bool:
        """Whether a driver or a policy said so."""
        reason = trajectory.abort_reason
        if reason is AbortReason.DRIVER:
            return trajectory.trajectory_id in self.asked[then]
        assert reason is not None
        if reason is AbortReason.DEADLINE and reason not in self.thens:
            return then is Then.FINISH and self.members[trajectory.trajectory_id].submission.deadline_s is not None
        if reason is AbortReason.VERSION:
            wanted = self.members[trajectory.trajectory_id].submission.exact_version
            return then is Then.FINISH and wanted is not None
        return self.thens.get(reason) is then


def _sampled(attempt: Attempt) -> int:
    return sum(run.tokens for run in attempt.versions if run.version is not None)
