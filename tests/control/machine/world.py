"""Simulated workers, pools and drivers around a controller: they do what they are told, late, twice or not at all.

Nothing here knows how the controller decides; the world keeps its own books of what was submitted, appended, handed
out and given up.
"""

import itertools
import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from rollout.client.state import from_state, to_state
from rollout.config import AbortConfig, GroupsConfig, ResumeConfig, Stale, StaleKV, WeightsConfig
from rollout.control.aborts import AbortTicket
from rollout.control.collection import Collection
from rollout.control.commands import Command, Drop, Expect, Export, KeepThere, Recall, Release, Retain, Retire, Start
from rollout.control.controller import Controller
from rollout.control.intent import Transfer
from rollout.control.messages import (
    Displaced,
    Event,
    Exported,
    ExportFailed,
    Freed,
    Moved,
    PoolRoom,
    Recalled,
    Tick,
    WeightsLive,
    WorkerDown,
    WorkerReport,
    WorkerUp,
)
from rollout.control.records import Record
from rollout.control.submission import Submission
from rollout.errors import NotExtendableError, PromptTooLongError, UnknownWorkerError, UnsatisfiableVersionError
from rollout.types import (
    AbortReason,
    GroupId,
    Image,
    Keep,
    KVRun,
    NodeId,
    Phase,
    Priority,
    SamplingParams,
    SegmentId,
    SegmentRun,
    SequenceKey,
    Then,
    Trajectory,
    TrajectoryId,
    Turn,
    UpdateMode,
    Version,
    Weights,
    WeightsId,
    WorkerId,
    first_tokens,
)
from tests.control.machine.books import Books
from tests.control.machine.process import PAGE, FakeWorker, ToWorker, left_by, positions, runs
from tests.weights import WEIGHTS

CONTEXT = 48
WORKERS = {WorkerId("w1"): NodeId("n1"), WorkerId("w2"): NodeId("n1"), WorkerId("w3"): NodeId("n2")}
MORE_WORKERS = {WorkerId("w4"): NodeId("n2"), WorkerId("w5"): NodeId("n1")}
"""That may be added."""
NODES = WORKERS | MORE_WORKERS
PATIENCE = 5000
"""Rounds in which everything must be over once the faults have stopped."""
FINALITY = {Then.REQUEUE: 0, Then.HOLD: 1, Then.RETRY: 2, Then.FINISH: 2, Then.DROP: 2}
MOST_EXTENSIONS = 3
"""Of one trajectory in the end, before it is told to finish."""


@dataclass(slots=True, kw_only=True)
class Site:
    """A worker as the outside sees it: the process, if it lives, and news of it that are under way."""

    process: FakeWorker | None = None
    mail: deque[WorkerReport] = field(default_factory=deque)
    notices: deque[WorkerUp | WorkerDown] = field(default_factory=deque)
    believed: str | None = None
    """The incarnation that commands are addressed to."""
    gone: bool = False
    """For good."""
    retired: bool = False

    @property
    def addressed(self) -> FakeWorker | None:
        """The process that commands reach."""
        process = self.process
        return process if process is not None and process.incarnation == self.believed else None


@dataclass(slots=True, kw_only=True)
class Update:
    """Of the weights, under way."""

    mode: UpdateMode
    weights: Weights
    loaded: bool = False
    """By all workers; the controller may not have heard of it."""
    live: bool = False

    @property
    def pauses(self) -> bool:
        return self.mode in (UpdateMode.RECOMPUTE, UpdateMode.IN_PLACE)


class World:
    """The controller, and everything that it can only see by events."""

    def __init__(
        self,
        *,
        room: int,
        abort: AbortConfig,
        resume: ResumeConfig,
        groups: GroupsConfig,
        versions: WeightsConfig,
    ) -> None:
        self.rules = {"abort": abort, "resume": resume, "groups": groups, "versions": versions}
        self.policies = {policy.kind: policy for policy in abort.policies}
        self.max_resumes = resume.max_resumes
        self.books = Books(abort, groups, CONTEXT)
        self.now = 0.0
        self.most_behind = versions.kv_reuse.max_lag if isinstance(versions.kv_reuse, StaleKV) else 0
        self.room = room
        self.begun: set[GroupId] = set()
        """Of which a member was started."""
        self.collected = False
        """A collection has come to its end."""
        self.were_gone = False
        """All workers, at some time, before more were added."""
        self.processes = itertools.count(1)
        self.segments = itertools.count(1)
        self.orders = itertools.count(1)
        self.to_hold: set[TrajectoryId] = set()
        """Those that drivers want to be suspended until they say otherwise."""
        self.retries: Counter[TrajectoryId] = Counter()
        self.calls = 0
        self.services = 0
        self.earlier: Counter[str] = Counter()
        """What the controllers of earlier services counted, and how many starts there were."""
        self._open(WEIGHTS)

    def _open(self, weights: Weights) -> None:
        """A service in which nothing has happened yet."""
        self.services += 1
        self.controller = Controller(workers=len(WORKERS), max_context=CONTEXT, weights=weights, **self.rules)  # type: ignore[arg-type]
        self.loaded = [weights]
        """By workers, in this order."""
        self.under_update: Update | None = None
        self.driver_paused = False
        self.window: int | None = None
        """Most groups that a collection may have under way."""
        self.stops_at: int | None = None
        """Complete groups with which a collection is over."""
        self.sites = {worker: Site() for worker in WORKERS}
        self.held: defaultdict[tuple[NodeId, TrajectoryId], set[SegmentId]] = defaultdict(set)
        self.turns: dict[tuple[NodeId, TrajectoryId], Turn] = {}
        """What the pools were told last."""
        self.displaced: set[SegmentId] = set()
        """What the pools gave up for something that is needed sooner."""
        self.told: set[SegmentId] = set()
        """What the controller knows of that."""
        self.displaced_images = 0
        self.exports: list[tuple[int, Export, str | None]] = []
        """Not yet tried, by number, with the incarnation they are addressed to."""
        self.answers: list[tuple[int, Exported | ExportFailed]] = []
        self.unanswered: dict[int, SequenceKey] = {}
        self.late: set[SequenceKey] = set()
        """Exports that the controller was told to have failed before they were answered: another may follow."""
        self.loose: set[TrajectoryId] = set()
        """A pool may have stored something for them that the controller does not know of."""
        self.released: set[SequenceKey] = set()
        self.released_by_pool: set[SequenceKey] = set()
        self.started: dict[SequenceKey, str] = {}
        """With the incarnation of the worker."""
        self.promotions = 0
        """Of these, for their KV only."""
        self.kept: dict[TrajectoryId, SequenceKey] = {}
        """What is, or will be, kept on a worker until it is released or its trajectory starts there."""
        self.used: set[SequenceKey] = set()
        """What was kept where its trajectory then started."""
        self.holding: set[TrajectoryId] = set()
        """Those that wait for a command."""
        self.perhaps_holding: set[TrajectoryId] = set()
        """Those that were suspended and on the move at once: nobody has seen whether they were held before."""
        self.extensions: list[tuple[TrajectoryId, tuple[int, ...], str]] = []
        self.tickets: list[AbortTicket] = []
        self.history: list[WorkerReport] = []

    # What the driver does -----------------------------------------------------------------------------

    def submit(
        self,
        *,
        n: int,
        budget: int,
        groups: int = 1,
        twice: bool = False,
        min_behind: int | None = None,
        exact_behind: int | None = None,
        **options: Any,
    ) -> None:
        """`groups` groups in one call, which may ask for a version so far behind, or ahead of, the live one."""
        live = self.controller.weights.version
        options["min_version"] = Version(live - min_behind) if min_behind is not None else None
        options["exact_version"] = Version(live - exact_behind) if exact_behind is not None else None
        submissions = []
        for _ in range(groups):
            number = len(self.books.members)
            submissions.append(
                Submission(
                    group_id=GroupId(f"job-{number}"),
                    prompt_ids=tuple(range(PAGE + 1)),
                    sampling=tuple(SamplingParams(max_new_tokens=budget + i % 2) for i in range(n)),
                    seeds=tuple(range(number, number + n)),
                    **options,
                )
            )
            if exact_behind is not None and exact_behind > 0:
                accounts = self.controller.accounts()
                with pytest.raises(UnsatisfiableVersionError):
                    self.controller.submit(submissions, self.now)
                assert self.controller.accounts() == accounts
                return
            self.books.add(submissions[-1])
        assert self.controller.new_trajectories(submissions) == n * groups
        for _ in range(1 + twice):
            self.now += 1
            self.carry_out(self.controller.submit(submissions, self.now))
            assert not self.controller.resolve([each.group_id for each in submissions])[1]

    def abort(self, ids: Sequence[TrajectoryId], keep: Keep, then: Then) -> None:
        self.books.asked[then] |= set(ids)
        self.to_hold -= set(ids)
        self.to_hold |= set(ids) if then is Then.HOLD else set()
        self.now += 1
        ticket, commands = self.controller.abort(ids, keep, then, self.now)
        self.tickets.append(ticket)
        self.carry_out(commands)

    def discard(self, ids: Sequence[TrajectoryId]) -> None:
        self.now += 1
        over = {record.trajectory_id for record in self.records if record.over}
        report, commands = self.controller.discard(ids, self.now)
        assert set(report.discarded) == set(ids) - over
        self.books.discarded |= set(report.discarded)
        self.carry_out(commands)

    def resume(self, ids: Sequence[TrajectoryId]) -> None:
        self.now += 1
        report, commands = self.controller.resume(ids, self.now)
        self.to_hold -= set(report.resumed)
        self.holding -= set(report.resumed)  # they may be stopped at once for something else
        self.carry_out(commands)

    def extend(self, t: TrajectoryId, count: int) -> None:
        """Tokens that no worker samples; refused where they do not fit or it runs."""
        (record,) = self.controller.resolve([t])[0]
        seed, before = record.seed, record.snapshot()
        ids = tuple(1000 + len(before.output_ids) + i for i in range(count))
        call = f"extension {len(self.extensions)}"
        self.now += 1
        try:
            commands = self.controller.extend(t, ids, call, self.now)
        except (NotExtendableError, PromptTooLongError):
            assert record.snapshot() == before
            return
        self.extensions.append((t, ids, call))
        self.books.given[t, seed].update({len(before.output_ids) + i: value for i, value in enumerate(ids)})
        self.to_hold.discard(t)
        self.holding.discard(t)
        self.carry_out(commands)

    def extend_again(self, number: int) -> None:
        """A call that was heard is made once more; nothing comes of it."""
        t, ids, call = self.extensions[number % len(self.extensions)]
        if not self.controller.resolve([t])[1]:
            assert self.controller.extend(t, ids, call, self.now) == []

    def take(self, count: int, *, arrives: bool = True) -> None:
        self.calls += 1
        call = f"call {self.calls}"
        self.books.take(self.controller.take(count, call), call)
        if arrives:
            self.arrive()

    def arrive(self) -> None:
        """All that was handed out is known to have arrived."""
        calls = sorted(self.books.under_way)
        self.controller.settle_calls(arrived=calls, abandoned=())
        self.books.arrive(calls)

    def take_in_vain(self, count: int, *, told_first: bool) -> None:
        """Nobody gets the answer; the controller hears that before it hands out, or after."""
        call = f"call {self.calls + 1}"
        if told_first:
            self.controller.settle_calls(arrived=(), abandoned=[call])
        self.take(count, arrives=False)
        assert not (told_first and call in self.books.under_way)
        if not told_first:
            self.controller.settle_calls(arrived=(), abandoned=[call])
            self.books.abandon(call)

    def begin_collection(self, wanted: int, over_sample: float, *, stop_when_met: bool) -> None:
        self.now += 1
        self.window = math.ceil(wanted * (1 + over_sample))
        self.stops_at = wanted if stop_when_met else None
        self.collected |= stop_when_met
        self.holding -= {r.trajectory_id for r in self.records if r.abort_reason is AbortReason.QUOTA}
        begin = Collection(
            call="collect", wanted=wanted, over_sample=over_sample, stop_when_met=stop_when_met, ends_at=math.inf
        )
        commands = self.controller.begin_collection(begin, self.now)
        self.carry_out(commands)

    def reject(self) -> None:
        self.now += 1
        if self.window is not None:
            self.window += 1
        self.carry_out(self.controller.reject("collect", self.now))

    def end_collection(self) -> None:
        self.now += 1
        self.window = self.stops_at = None
        self.collected = True
        self.carry_out(self.controller.end_collection("collect", self.now))

    def pause(self) -> None:
        self.now += 1
        self.driver_paused = True
        self.carry_out(self.controller.pause(self.now))

    def unpause(self) -> None:
        self.now += 1
        self.driver_paused = False
        self.carry_out(self.controller.unpause(self.now))

    @property
    def paused(self) -> bool:
        """By anybody."""
        return self.driver_paused or (self.under_update is not None and self.under_update.pauses)

    def drain(self, worker: WorkerId) -> None:
        self.now += 1
        in_service = {each.worker_id for each in self.controller._fleet.workers if not each.draining}
        try:
            _, commands = self.controller.drain(worker, self.now)
        except UnknownWorkerError:
            assert not (in_service - {worker}) or self.sites[worker].believed is None
            return
        assert in_service - {worker}, "no worker would be left"
        self.carry_out(commands)

    def add_worker(self) -> None:
        """One more than there were."""
        worker = next((name for name in MORE_WORKERS if name not in self.sites), None)
        if worker is not None:
            self.sites[worker] = Site()
            self.controller.expect_workers(1)
            self.boot(worker)

    def begin_again(self, *, after_s: float, ahead: int, up: Sequence[WorkerId], busy: bool) -> None:
        """The service ends, and a later one takes up what its driver saved; with the weights that were live, or others.
        It may be `busy` with another group by then."""
        state = json.loads(json.dumps(to_state(self.controller.saved(self.now), next_key=self.calls)))
        records, counters = self.records, self.controller.counters
        before = {record.trajectory_id: record.snapshot() for record in records}
        self.earlier += Counter(tokens=counters.tokens, suspensions=counters.suspensions, starts=len(self.started))
        self.books.save(records)
        version = Version(max(0, self.controller.weights.version + ahead))
        self.books.live = version
        self._open(Weights(WeightsId(f"service {self.services} {version}"), version))
        self.now += after_s
        for worker in WORKERS:
            self.boot(worker)
            if worker in up:
                self.notice(worker)
        if busy:
            self.submit(n=1, budget=5)
        saved, calls = from_state(state)
        assert calls == self.calls
        self.carry_out(self.controller.restore(saved, self.now))
        stale = self.policies.get("stale")
        if ahead and stale is not None and Then(stale.then) is not Then.REQUEUE:  # these are queued anyway
            self._check_stale(version)
        for record in self.records:
            if (was := before.get(record.trajectory_id)) is not None:
                self._check_taken_up(record.snapshot(), was)

    def _check_taken_up(self, now: Trajectory, was: Trajectory) -> None:
        """Nothing that it had is lost; it may have begun again, or ended, since it was about to."""
        if len(now.attempts) == len(was.attempts):
            kept = ("seed", "output_ids", "logprobs", "versions", "kv_spans", "attempts", "suspensions", "resumes")
            assert all(getattr(now, name) == getattr(was, name) for name in kept)
        else:
            *attempts, last = now.attempts
            assert tuple(attempts) == was.attempts
            assert (last.seed, last.output_ids, last.logprobs) == (was.seed, was.output_ids, was.logprobs)
            assert now.output_ids == ()
        if was.finish_reason is not None:
            ages = [each.finished_at - each.submitted_at for each in (now, was) if each.finished_at is not None]
            assert ages[0] == pytest.approx(ages[1])
            assert (now.finish_reason, now.abort_reason, now.error) == (was.finish_reason, was.abort_reason, was.error)

    @property
    def records(self) -> list[Record]:
        return self.controller.resolve(None)[0]

    # What the controller has done -------------------------------------------------------------------

    def handle(self, event: Event) -> list[Command]:
        self.now += 1
        commands = self.controller.handle(event, self.now)
        self.carry_out(commands)
        return commands

    def carry_out(self, commands: Sequence[Command]) -> None:
        begun = set(self.begun)
        for command in commands:
            match command:
                case Retain(node=node, trajectory_id=t, segments=segments):
                    self.held[node, t] = set(segments) & self.stored
                case Drop(segment=segment):
                    for held in self.held.values():
                        held.discard(segment)
                case Expect(node=node, trajectory_id=t, turn=turn):
                    self.turns[node, t] = turn
                case Export(worker=worker, base=base):
                    assert self.may_use(command.written), "exported though nothing may go on with it"
                    assert base is None or first_tokens(command.written, base.kv_tokens) == base.written
                    self.turns[command.node, command.trajectory_id] = command.turn
                    number = next(self.orders)
                    self.exports.append((number, command, self.sites[worker].believed))
                    self.unanswered[number] = (command.trajectory_id, command.epoch)
                case Retire(worker=worker):
                    self._retire(worker)
                case _:
                    self._address(command)
        for record in self.records:
            self._note_hold(record)
        self._check_window(begun)

    def _note_hold(self, record: Record) -> None:
        """Who waits for a command, and was asked to; who runs does not."""
        t = record.trajectory_id
        retries = sum(attempt.error is None for attempt in record.attempts)
        if retries > self.retries[t]:
            self.retries[t] = retries
            if record.phase is not Phase.SUSPENDED:  # what was held when a policy had it begin again stays held
                self.to_hold.discard(t)
        queued = record.phase is Phase.QUEUED and record.intent is None
        if (record.on_worker and not record.promoting) or queued or record.over:
            self.holding.discard(t)
            self.perhaps_holding.discard(t)
        elif record.phase is Phase.SUSPENDED:
            assert t in self.to_hold or self._may_hold(record), "suspended though nobody asked for that"
            assert t not in self.books.discarded, "suspended though it was given up"
            self.holding.add(t)
        elif record.intent is not None and record.intent.then is not Then.HOLD:
            self.holding.discard(t)
            self.perhaps_holding.discard(t)
        elif record.transfer is not None and record.transfer.kind is Transfer.Kind.RECALL:
            self.perhaps_holding.add(t)

    def _may_hold(self, record: Record) -> bool:
        if record.ended_turn:
            return record.group.submission.multi_turn
        if (record.intent.reason if record.intent is not None else record.abort_reason) is AbortReason.QUOTA:
            return self.collected
        return any(Then(policy.then) is Then.HOLD for policy in self.policies.values())

    def _retire(self, worker: WorkerId) -> None:
        """Its process ends: nothing may be left on it, or be under way from it."""
        site = self.sites[worker]
        assert not site.retired, "retired twice"
        if (process := site.addressed) is not None:
            assert not process.tasks, "retired while it ran something"
            assert not process.left_for_good, "retired while something was kept there"
            exporting = {(order.trajectory_id, order.epoch) for _, order, told in self.exports if told == site.believed}
            assert not exporting - self.late, "retired during an export"
        site.retired = site.gone = True
        site.process = site.believed = None

    def _address(self, command: ToWorker) -> None:
        site = self.sites[command.worker]
        match command:
            case Start(assignment=assignment):
                key = (assignment.trajectory_id, assignment.epoch)
                assert key not in self.started
                assert site.believed is not None, "started on a worker that is down"
                assert not self.paused, "started during a pause"
                assert self.under_update is None, "started during an update"
                self.started[key] = site.believed
                self._check_start(key[0], command)
                wanted = {run.segment for run in assignment.image.runs} if assignment.image is not None else set()
                assert wanted <= self.stored | self.displaced, "an image was dropped that is needed"
                assert not wanted & self.told, "started from an image that was displaced"
            case Release(trajectory_id=t, epoch=epoch):
                key = (t, epoch)
                assert key not in self.released, "released twice"
                assert key not in self.used, "released though it went on with it"
                assert key in self.late or key not in self.unanswered.values(), "released during its export"
                self.released.add(key)
                if self.kept.get(t) == key:
                    del self.kept[t]
            case KeepThere(trajectory_id=t, epoch=epoch):
                key = (t, epoch)
                assert key not in self.released | self.released_by_pool, "kept after its release"
                assert key in self.late or key not in self.unanswered.values(), "kept during its export"
                assert self.started[key] == site.believed, "kept on another worker than it was left on"
                self.kept[t] = key
            case Recall(trajectory_id=t, epoch=epoch):
                assert self.kept.get(t) == (t, epoch), "recalled though it was not kept"
                assert (t, epoch) not in self.released_by_pool, "recalled after its release"
                assert self.started[t, epoch] == site.believed, "recalled from another worker than it was left on"
        if site.addressed is not None:
            site.addressed.inbox.append(command)

    def _check_start(self, t: TrajectoryId, start: Start) -> None:
        """What it has on another worker is given up; what is held starts for its KV only, and nothing else does."""
        for worker, site in self.sites.items():
            if site.addressed is not None and worker != start.worker:
                assert not left_by(site.addressed, t), "started elsewhere than where its KV is kept"
        if (home := self.kept.pop(t, None)) is not None:
            self.used.add(home)
            process = self.sites[start.worker].addressed
            left = process.left.get(home) if process is not None else None
            assert left is None or self.may_use(runs(left.kv)), "started on KV that it may not go on with"
        image = start.assignment.image
        assert image is None or self.may_use(image.written), "started from an image that it may not go on with"
        assert t not in self.books.discarded, "started though it was given up"
        (record,) = self.controller.resolve([t])[0]
        promoted = start.assignment.watch.only_loads
        self.promotions += promoted
        if promoted:
            assert t in self.to_hold or self._may_hold(record), "not started to run"
            return
        assert record.group.submission.admits(self.weights.version), "started with weights that it may not run with"
        retries = sum(attempt.error is None for attempt in record.attempts)
        assert t not in self.to_hold or retries > self.retries[t], "started though it is held"
        self.begun.add(record.group_id)

    def _check_window(self, before: set[GroupId]) -> None:
        """A collection begins no more groups than it may have under way, until it is over."""
        if self.stops_at is not None and self.controller.complete_groups >= self.stops_at:
            self.window = self.stops_at = None
        records = [record for record in self.records if record.priority is Priority.TRAIN]
        begun = {record.group_id for record in records} & (self.begun - before)
        held = {r.group_id for r in records if r.trajectory_id in self.holding | self.perhaps_holding}
        under_way = {r.group_id for r in records if r.group_id in self.begun and not r.group.over} - held
        assert not begun or self.window is None or len(under_way) <= self.window

    @property
    def stored(self) -> set[SegmentId]:
        return set().union(*self.held.values())

    # What happens outside ---------------------------------------------------------------------------

    def boot(self, worker: WorkerId) -> None:
        """A process starts; the controller will hear of it."""
        site = self.sites[worker]
        site.process = FakeWorker(f"{worker} process {next(self.processes)}", self.weights, self.books.sampled)
        up = WorkerUp(worker=worker, node=NODES[worker], incarnation=site.process.incarnation, max_running=self.room)
        site.notices.append(up)

    def kill(self, worker: WorkerId, *, silent: bool, final: bool, last_words: bool) -> None:
        """A process dies, with what it had not sent unless `last_words`; if `silent`, only its successor tells."""
        site = self.sites[worker]
        if site.process is None:
            return
        if last_words:
            self.post(worker)
        down = {"worker": worker, "incarnation": site.process.incarnation, "error": "killed"}
        site.process = None
        if final or not silent:
            site.notices.append(WorkerDown(**down, final=False))  # type: ignore[arg-type]
        if final:
            site.notices.append(WorkerDown(**down, final=True))  # type: ignore[arg-type]
            site.gone = True
        else:
            self.boot(worker)

    def notice(self, worker: WorkerId, *, twice: bool = False) -> None:
        """The controller hears that a worker is up or down."""
        site = self.sites[worker]
        if site.notices:
            event = site.notices.popleft()
            site.believed = event.incarnation if isinstance(event, WorkerUp) and not site.retired else None
            self.handle(event)
            if twice:
                self.handle(event)

    def live(self, luck: Random) -> None:
        """Time passes: workers run and mostly tell, pools export and mostly answer."""
        for worker in self.sites:
            self.step(worker, luck)
            if luck.random() < 0.7:
                self.post(worker, luck)
            if luck.random() < 0.7:
                self.relay(worker, twice=luck.random() < 0.1)
            if luck.random() < 0.3:
                self.notice(worker, twice=luck.random() < 0.1)
        if luck.random() < 0.7:
            self.export(luck.randrange(99), fail=luck.random() < 0.2, displacing=luck.choice([0, 0, 1, 2]))
        if luck.random() < 0.7:
            self.answer(
                luck.randrange(99), twice=luck.random() < 0.1, timed_out=luck.random() < 0.1, lost=luck.random() < 0.5
            )
        if luck.random() < 0.2:
            self.wait(luck.randrange(6))
        if luck.random() < 0.2:
            room = PoolRoom(
                node=luck.choice([*NODES.values()]), free_bytes=luck.choice([0, 99, 9999]), budget_bytes=9999
            )
            self.handle(room)

    def wait(self, seconds: float) -> None:
        """Time passes, and the controller looks at the clock."""
        self.now += seconds
        self.handle(Tick())

    # Updates of the weights ---------------------------------------------------------------------------

    @property
    def weights(self) -> Weights:
        """That workers have."""
        return self.loaded[-1]

    def may_use(self, written: Sequence[KVRun]) -> bool:
        """Whether anything may go on with KV that was written like this, as far as the controller has heard."""
        unheard = self.under_update is not None and self.under_update.loaded and not self.under_update.live
        heard = self.loaded[:-1] if unheard else self.loaded
        return {run.weights.weights_id for run in written} <= self._reusable(heard)

    def _reusable(self, loaded: Sequence[Weights]) -> set[WeightsId]:
        """After these were."""
        return {weights.weights_id for weights in loaded[-self.most_behind - 1 :]}

    def update(self, mode: UpdateMode, ahead: int) -> None:
        """Begin to load other weights, whose version is so far ahead of the live one; one load at a time."""
        if self.under_update is None:
            version = Version(max(0, self.weights.version + ahead))
            weights = Weights(WeightsId(f"weights {len(self.loaded)} of {version}"), version)
            self.now += 1
            self.carry_out(self.controller.announce_update(version, self.now))
            self._check_stale(version)
            self.now += 1
            self.under_update = Update(mode=mode, weights=weights)
            self.carry_out(self.controller.begin_update(mode, self.now))

    def go_on_with_update(self, *, give_up: bool = False) -> bool:
        """The next step of it, unless it must wait; `give_up`: then it ends, as long as nothing was loaded. Returns
        whether it made a step."""
        update = self.under_update
        if update is None:
            return False
        if update.live or (give_up and not update.loaded):
            self.now += 1
            self.under_update = None
            self.carry_out(self.controller.end_update(self.now))
        elif update.loaded:
            self.books.live, update.live = update.weights.version, True
            self.handle(WeightsLive(weights=update.weights))
            assert self.controller.weights == update.weights
            self._check_stale(update.weights.version)
            if update.weights.version % 2:  # it may be told twice
                assert self.controller.handle(WeightsLive(weights=update.weights), self.now) == []
        elif self.controller.clear_for_update(update.mode):
            self._load(update)
        else:
            return False
        return True

    def _load(self, update: Update) -> None:
        reusable = self.controller.reusable_with(update.weights)
        self.loaded.append(update.weights)
        assert reusable == self._reusable(self.loaded)
        update.loaded = True
        for site in self.sites.values():
            if (process := site.process) is not None:
                process.replace_weights(update.weights, reusable, in_place=update.mode is UpdateMode.IN_PLACE)
                if not update.pauses and process is site.addressed:
                    run_on = [t for t in process.tasks.values() if not t.assignment.watch.only_loads]
                    assert not run_on, "something ran on in an update for which all was to stop"

    def _check_stale(self, version: Version) -> None:
        """Whoever is too stale with this version is stopped or was."""
        policy = self.policies.get("stale")
        for record in self.records if isinstance(policy, Stale) else ():
            if not record.over and self._is_stale(record, policy, version) and self._policies_stop(record, policy):
                self._check_stopped(record, Then(policy.then))

    def _is_stale(self, record: Record, policy: Stale, live: Version) -> bool:
        ages = [live - version for version in record.columns.versions if version is not None]
        old = sum(age >= policy.age for age in ages)
        behind = policy.behind is not None and max(ages, default=0) >= policy.behind
        return bool(ages) and (behind or (policy.share is not None and old > policy.share * len(ages)))

    def _policies_stop(self, record: Record, policy: Stale) -> bool:
        waits = Then(policy.then) in (Then.REQUEUE, Then.HOLD, Then.RETRY)
        return not waits or self.max_resumes is None or len(record.resumes) + len(record.attempts) < self.max_resumes

    def _check_stopped(self, record: Record, then: Then) -> None:
        """It does not run on: it is stopped for this, or for something that is as final."""
        if record.intent is not None:
            assert FINALITY[record.intent.then] >= FINALITY[then], "stale, and it only waits"
        else:
            assert not record.on_worker, "stale, and it runs on"
            assert FINALITY[then] <= FINALITY[Then.HOLD], "stale, and it waits"
            assert then is Then.REQUEUE or record.phase is Phase.SUSPENDED

    def step(self, worker: WorkerId, luck: Random | None) -> None:
        process = self.sites[worker].process
        if process is not None:
            process.step(luck, self.stored)

    def post(self, worker: WorkerId, luck: Random | None = None) -> None:
        """A worker sends what happened, and, with luck, what it measured; it is under way from now on."""
        site = self.sites[worker]
        facts = site.process.facts(luck) if luck is not None and site.process and luck.random() < 0.3 else None
        if site.process is not None and (site.process.outbox or facts is not None):
            events, site.process.outbox = tuple(site.process.outbox), []
            report = WorkerReport(worker=worker, incarnation=site.process.incarnation, events=events, facts=facts)
            site.mail.append(report)

    def relay(self, worker: WorkerId, *, twice: bool = False) -> None:
        """The next report of a worker arrives."""
        site = self.sites[worker]
        if site.mail:
            report = site.mail.popleft()
            self.handle(report)
            self.history.append(report)
            if twice:
                self.handle(report)

    def repeat(self, number: int) -> None:
        """Events of epochs that are over arrive once more; nothing comes of it."""
        self.handle(Tick())  # whatever is due by now
        report = self.history[number % len(self.history)]
        records = {record.trajectory_id: record for record in self.records}
        stale = []
        for event in report.events:
            record = records.get(event.trajectory_id)
            over = record is None or not record.on_worker or record.epoch != event.epoch
            if isinstance(event, Moved | Recalled):
                kind = Transfer.Kind.KEEP if isinstance(event, Moved) else Transfer.Kind.RECALL
                transfer = record.transfer if record is not None else None
                over = transfer is None or (transfer.kind, transfer.epoch) != (kind, event.epoch)
            if over and not isinstance(event, Freed):
                stale.append(event)
        before = {t: record.snapshot() for t, record in records.items()}
        counters = self.controller.counters
        again = WorkerReport(worker=report.worker, incarnation=report.incarnation, events=tuple(stale))
        assert self.controller.handle(again, self.now) == []
        assert {record.trajectory_id: record.snapshot() for record in self.records} == before
        assert self.controller.counters == counters

    def export(self, number: int, *, fail: bool, displacing: int = 0) -> None:
        """A pool tries an export, having displaced up to so many images, and its answer is under way."""
        if not self.exports:
            return
        order_number, order, incarnation = self.exports.pop(number % len(self.exports))
        key = (order.trajectory_id, order.epoch)
        process = self.sites[order.worker].process
        made_room = tuple(self._displace(order) for _ in range(min(displacing, len(self._later_than(order)))))
        kv = process.parked.get(key) if process is not None and process.incarnation == incarnation else None
        assert kv in (None, order.kv_tokens) or key in self.late
        if fail or kv != order.kv_tokens:
            failed = ExportFailed(trajectory_id=key[0], epoch=key[1], error="lost", displaced=made_room)
            self.answers.append((order_number, failed))
            return
        usable = order.base.kv_tokens // PAGE if order.base is not None else 0
        parts: list[SegmentRun] = []
        for run in order.base.runs if order.base is not None else ():
            assert run.segment in self.stored | self.displaced, "the base of an export was dropped"
            if run.node == order.node and run.segment in self.displaced:
                break
            pages = min(run.pages, usable - sum(kept.pages for kept in parts))
            if pages:
                parts.append(SegmentRun(node=run.node, segment=run.segment, first=run.first, pages=pages))
        pages = -(-order.kv_tokens // PAGE) - sum(run.pages for run in parts)
        segment = SegmentId(f"{order.node} {next(self.segments)}")
        parts.append(SegmentRun(node=order.node, segment=segment, first=0, pages=pages))
        self.held[order.node, key[0]].add(segment)
        assert process is not None
        assert process.left[key].kv == positions(order.written)
        made = Image(runs=tuple(parts), kv_tokens=order.kv_tokens, written=order.written)
        done = Exported(trajectory_id=key[0], epoch=key[1], image=made, sent_bytes=pages, displaced=made_room)
        self.answers.append((order_number, done))
        if order.release:
            self.released_by_pool.add(key)
            process.inbox.append(Release(worker=order.worker, trajectory_id=key[0], epoch=key[1]))

    def _later_than(self, order: Export) -> list[TrajectoryId]:
        """Who has an image in the pool of an export that is needed later, the last one first."""
        turn = self.turns[order.node, order.trajectory_id]
        later = [
            (self.turns[node, t], t)
            for (node, t), held in self.held.items()
            if node == order.node and held and self.turns[node, t] > turn
        ]
        return [t for _, t in sorted(later, reverse=True)]

    def _displace(self, order: Export) -> Displaced:
        victim = self._later_than(order)[0]
        segments = self.held.pop((order.node, victim))
        self.displaced |= segments
        return Displaced(trajectory_id=victim, segments=frozenset(segments))

    def answer(self, number: int, *, twice: bool = False, timed_out: bool = False, lost: bool = False) -> None:
        """The answer to an export arrives; `timed_out`: after the controller was told that it failed, or `lost`."""
        if not self.answers:
            return
        order_number, answer = self.answers.pop(number % len(self.answers))
        key = (answer.trajectory_id, answer.epoch)
        self.unanswered.pop(order_number, None)
        if timed_out:
            self.late.add(key)
            self.loose.add(key[0])
            if lost:
                self.loose |= {displaced.trajectory_id for displaced in answer.displaced}
            self.handle(ExportFailed(trajectory_id=key[0], epoch=key[1], error="late"))
            if not lost:
                self.answers.append((order_number, answer))
        else:
            for _ in range(1 + twice):
                self.told |= {segment for displaced in answer.displaced for segment in displaced.segments}
                self.handle(answer)
            self.displaced_images += len(answer.displaced)

    # What must be true --------------------------------------------------------------------------------

    def check(self) -> None:
        """The invariants of the controller's docstring, and what the books say."""
        records = self.records
        fleet = self.controller._fleet
        queued = [record for record in sorted(records, key=lambda record: record.order) if record.phase == "queued"]
        assert list(fleet.queued) == sorted(queued, key=lambda record: record.priority is not Priority.EVAL)
        running = {t: worker for worker in self.sites if (seen := fleet.get(worker)) for t in seen.running}
        assert running == {record.trajectory_id: record.worker for record in records if record.on_worker}
        assert all(count <= self.room for count in Counter(running.values()).values())
        assert sum(self.controller.phases.values()) == len(records)
        assert self.controller.outstanding == len({r.trajectory_id for r in records} - self.books.handed_ids)
        gone = all(site.gone for site in self.sites.values())
        self.were_gone |= gone
        hopeless = self.settled and gone
        for record in records:
            assert record.phase is not Phase.QUEUED or not hopeless, "it waits for a worker and there is none"
            assert (record.phase is Phase.PAUSED) == (record.on_worker and self.paused)
            assert (record.transfer is not None) == (record.phase is Phase.SUSPENDING)
            self._check_usable(record)
            assert record.home is None or record.phase in (Phase.QUEUED, Phase.SUSPENDED, Phase.SUSPENDING)
        for site in self.sites.values():
            if (process := site.addressed) is not None and not process.inbox:
                assert process.paused == self.paused
        self.books.check(records, self.controller.accounts())
        assert self.controller.staleness.tokens == self.books.behind
        self._check_pools(records)
        self._check_holds(records)

    def _check_usable(self, record: Record) -> None:
        """What is of no use any more is let go of as soon as the controller hears of it."""
        recalling = record.transfer is not None and record.transfer.kind is Transfer.Kind.RECALL
        assert record.home is None or recalling or self.may_use(record.home.written)
        assert record.pooled.image is None or self.may_use(record.pooled.image.written)

    @property
    def settled(self) -> bool:
        """Whether the controller knows all that happened to the workers."""
        return not any(site.notices for site in self.sites.values())

    def _check_holds(self, records: list[Record]) -> None:
        """Groups with a held member are not coming, whatever is under way with its KV."""
        held = {record.group_id for record in records if record.trajectory_id in self.holding}
        perhaps = {record.group_id for record in records if record.trajectory_id in self.perhaps_holding}
        coming = len({record.group_id for record in records}) + len(self.books.returned) - len(held)
        assert coming - len(perhaps - held) <= self.controller.coming_groups <= coming

    def _check_pools(self, records: list[Record]) -> None:
        """The pools hold what live images need, and but for exports under way nothing else."""
        under_way = {key[0] for key in self.unanswered.values()} | self.loose
        needed: defaultdict[tuple[NodeId, TrajectoryId], set[SegmentId]] = defaultdict(set)
        for record in records:
            for run in record.pooled.image.runs if record.pooled.image is not None else ():
                needed[run.node, record.trajectory_id].add(run.segment)
        for place in {*needed, *self.held}:
            assert needed[place] <= self.held[place] | (self.displaced - self.told)
            assert place[1] in under_way or self.held[place] <= needed[place]
        for record in records:
            for run in record.pooled.image.runs if record.pooled.image is not None else ():
                assert self.turns[run.node, record.trajectory_id] == record.turn

    # The end ------------------------------------------------------------------------------------------

    def finish(self, *, collecting: bool) -> None:
        """No more faults: aborts end, what was submitted is delivered, once and whole, and nothing is left behind.

        `collecting`: one group after the other is asked for.
        """
        self.unpause()
        self.end_collection()
        for _ in range(PATIENCE):
            if self.under_update is None:
                break
            if not self.go_on_with_update():
                self._go_on()
        assert self.under_update is None, self.controller.state(self.now)
        for _ in range(PATIENCE):
            if all(ticket.done for ticket in self.tickets) and self._quiet() and not self._waits_for_a_version():
                break
            self._go_on()
        assert all(ticket.done for ticket in self.tickets)
        assert {record.phase for record in self.records if not record.over} <= {Phase.SUSPENDED}, self.controller.state(
            self.now
        )
        self.resume([record.trajectory_id for record in self.records])
        for number in range(PATIENCE):
            if self.books.done and not self.records and self._quiet():
                break
            if collecting and number % 16 == 0:
                self.begin_collection(1, 0.0, stop_when_met=True)
            self._take_turns(collecting=collecting)
            self._go_on()
            self.take(99)
        assert self.books.done, self.controller.state(self.now)
        assert self._quiet()
        assert self.records == []
        assert all(ticket.done and not ticket.report().unreached for ticket in self.tickets)
        assert not any(self.held.values())
        for site in self.sites.values():
            assert site.process is None or not (site.process.tasks or site.process.left)
        self.books.check_deliveries(no_worker_left=self.were_gone)
        self._check_counters()

    def _take_turns(self, *, collecting: bool) -> None:
        """What ended a turn is extended, or finished in the end; what else is held goes on."""
        extended = Counter(t for t, _, _ in self.extensions)
        for trajectory in self.controller.turns({}, 999):
            t = trajectory.trajectory_id
            if extended[t] < MOST_EXTENSIONS and len(trajectory.prompt_ids) + len(trajectory.output_ids) + 2 < CONTEXT:
                self.extend(t, 2)
            else:
                self.abort([t], Keep.AUTO, Then.FINISH)
        held = [
            record.trajectory_id
            for record in self.records
            if record.phase is Phase.SUSPENDED
            and not (collecting and record.abort_reason is AbortReason.QUOTA)
            and not record.ended_turn
        ]
        if held:
            self.resume(held)

    def _go_on(self) -> None:
        for worker in self.sites:
            self.notice(worker)
            self.step(worker, None)
            self.post(worker)
            self.relay(worker)
        self.export(0, fail=False)
        self.answer(0)
        self.wait(0)
        self.check()

    def _waits_for_a_version(self) -> bool:
        """Something does, and will fail."""
        live = self.weights.version
        return any(r.phase is Phase.QUEUED and not r.group.submission.admits(live) for r in self.records)

    def _quiet(self) -> bool:
        sites = self.sites.values()
        processes = [site.process for site in sites if site.process is not None]
        return not (
            any(process.inbox or process.outbox or process.tasks for process in processes)
            or any(left.moving for process in processes for left in process.left.values())
            or any(site.mail or site.notices for site in sites)
            or self.exports
            or self.answers
        )

    def _check_counters(self) -> None:
        counters, accounts = self.controller.counters, self.controller.accounts()
        assert accounts.acknowledged + sum(accounts.dropped.values()) == accounts.submitted == counters.trajectories
        assert counters.displaced_images <= self.displaced_images
        again = len(self.started) - len({t for t, _ in self.started}) - self.promotions
        first = sum(self.retries.values()) + counters.retries  # starts of other attempts are no resumes
        if self.services == 1:
            assert again - first <= counters.resumes + counters.restarts <= again
        if not self.books.discarded:  # of these nobody sees the tokens
            ends = [t for delivery in self.books.arrived for t in (*delivery.trajectories, *delivery.dropped)]
            attempts = [run for t in ends for attempt in t.attempts for run in attempt.versions]
            tokens = sum(t.sampled_tokens for t in ends) + sum(
                run.tokens for run in attempts if run.version is not None
            )
            assert counters.tokens + self.earlier["tokens"] == tokens
            assert counters.suspensions + self.earlier["suspensions"] == sum(t.suspensions for t in ends)
            assert len(self.started) + self.earlier["starts"] == sum(len(t.workers) for t in ends)
