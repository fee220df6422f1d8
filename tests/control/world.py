"""Simulated workers and pools around a controller: they do what they are told, late, twice or not at all.

Nothing here knows how the controller decides. Token i of a trajectory is a function of its name and i, so what a
trajectory must hold in the end is known beforehand.
"""

import hashlib
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from rollout.control.aborts import AbortTicket
from rollout.control.controller import MOST_LOSSES, Controller
from rollout.control.messages import (
    Admitted,
    Assignment,
    Command,
    Displaced,
    Drop,
    Event,
    Expect,
    Export,
    Exported,
    ExportFailed,
    Finished,
    Freed,
    KeepThere,
    Moved,
    Parked,
    Preempted,
    Recall,
    Recalled,
    Release,
    RestoreFailed,
    Retain,
    Sampled,
    Start,
    Stop,
    WorkerDown,
    WorkerEvent,
    WorkerReport,
    WorkerUp,
)
from rollout.control.records import Record, Submission, Transfer
from rollout.types import (
    Columns,
    FinishReason,
    GroupId,
    Image,
    Keep,
    NodeId,
    Phase,
    SamplingParams,
    SegmentId,
    SegmentRun,
    SequenceKey,
    Then,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
    WorkerId,
)

PAGE = 4
CONTEXT = 99
WORKERS = {WorkerId("w1"): NodeId("n1"), WorkerId("w2"): NodeId("n1"), WorkerId("w3"): NodeId("n2")}
PATIENCE = 5000
"""Rounds in which everything must be over once the faults have stopped."""


def token(trajectory: TrajectoryId, index: int) -> int:
    return hashlib.blake2b(f"{trajectory} {index}".encode(), digest_size=1).digest()[0]


def stops(value: int) -> bool:
    return value % 32 == 0


def full_output(trajectory: TrajectoryId, budget: int) -> tuple[tuple[int, ...], FinishReason]:
    """What a trajectory holds when it was left to run to its end."""
    ids: list[int] = []
    while len(ids) < budget:
        ids.append(token(trajectory, len(ids)))
        if stops(ids[-1]):
            return tuple(ids), FinishReason.STOP
    return tuple(ids), FinishReason.LENGTH


class Task:
    """An assignment on a worker."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.known = len(assignment.output)
        self.sampled = 0
        self.kv = 0
        self.image = assignment.image
        self.admitted = False

    @property
    def key(self) -> SequenceKey:
        return (self.assignment.trajectory_id, self.assignment.epoch)


@dataclass(slots=True, kw_only=True)
class Left:
    """What a sequence left on a worker when it stopped."""

    kv: int
    prompt_tokens: int
    tier: Keep = Keep.DEVICE
    pinned: bool = True
    """To be exported or moved: nothing evicts it."""
    moving: Keep | None = None
    """Where it is on its way to."""


ToWorker = Start | Stop | Release | KeepThere | Recall


class FakeWorker:
    """One process. It may be stepped with any luck; `None` is the best: nothing goes wrong and all progress."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.inbox: deque[ToWorker] = deque()
        self.outbox: list[WorkerEvent] = []
        self.tasks: dict[SequenceKey, Task] = {}
        self.left: dict[SequenceKey, Left] = {}

    @property
    def parked(self) -> dict[SequenceKey, int]:
        """KV tokens of each image that can be exported."""
        return {key: left.kv for key, left in self.left.items() if left.pinned and left.moving is None}

    def left_by(self, t: TrajectoryId) -> set[SequenceKey]:
        """What a trajectory has here that no command in the inbox gives up."""
        given_up = {(order.trajectory_id, order.epoch) for order in self.inbox if isinstance(order, Release)}
        return {key for key in self.left if key[0] == t} - given_up

    def step(self, luck: Random | None, restorable: "set[SegmentId]") -> None:
        while self.inbox and (luck is None or luck.random() < 0.8):
            self._obey(self.inbox.popleft(), luck)
        for key, left in list(self.left.items()):
            self._pass_time(key, left, luck)
        for task in list(self.tasks.values()):
            if luck is None or luck.random() < 0.8:
                self._advance(task, luck, restorable)

    def _obey(self, command: ToWorker, luck: Random | None) -> None:
        match command:
            case Start(assignment=assignment):
                task = Task(assignment)
                assert task.key not in self.tasks
                self.tasks[task.key] = task
            case Stop(trajectory_id=t, epoch=epoch):
                if (t, epoch) in self.tasks:
                    self._park(self.tasks[t, epoch])
            case Release(trajectory_id=t, epoch=epoch):
                if (t, epoch) in self.left:
                    self._free((t, epoch))
            case KeepThere(trajectory_id=t, epoch=epoch, where=where):
                self._keep((t, epoch), where, luck)
            case Recall(trajectory_id=t, epoch=epoch):
                left = self.left.get((t, epoch), Left(kv=0, prompt_tokens=0))
                left.pinned = True
                self._tell_parked((t, epoch), left, Recalled)

    def _keep(self, key: SequenceKey, where: Keep, luck: Random | None) -> None:
        left = self.left.get(key)
        if left is None:
            gone = Moved(trajectory_id=key[0], epoch=key[1], where=Keep.DEVICE, kv_tokens=0, error="it is gone")
            self.outbox.append(gone)
            return
        assert left.pinned, "kept where it is not pinned"
        assert left.moving is None, "moved during a move"
        left.moving = where
        if left.tier is where or (luck is not None and luck.random() < 0.3):
            self._tell_moved(key, left, ok=left.tier is where)

    def _pass_time(self, key: SequenceKey, left: Left, luck: Random | None) -> None:
        """Moves end; what is kept on the device is evicted; a pinned image that nobody wants is given up."""
        if left.moving is not None:
            if luck is None or luck.random() < 0.5:
                self._tell_moved(key, left, ok=luck is None or luck.random() < 0.8)
        elif luck is not None and left.pinned and luck.random() < 0.01:
            self._free(key)
        elif luck is not None and not left.pinned and left.tier is Keep.DEVICE and luck.random() < 0.1:
            left.kv = luck.randrange(left.kv + 1)

    def _tell_moved(self, key: SequenceKey, left: Left, *, ok: bool) -> None:
        assert left.moving is not None
        left.tier = left.moving if ok else left.tier
        left.moving, left.pinned = None, False
        error = None if ok else "no room"
        self.outbox.append(
            Moved(trajectory_id=key[0], epoch=key[1], where=left.tier, kv_tokens=left.kv, error=error),
        )

    def _free(self, key: SequenceKey) -> None:
        pages = -(-self.left.pop(key).kv // PAGE)
        self.outbox.append(Freed(trajectory_id=key[0], epoch=key[1], exclusive_pages=pages, freed_pages=pages))

    def _home_of(self, task: Task) -> SequenceKey | None:
        """What the trajectory left here last, if nothing is under way with it."""
        keys = [key for key in self.left if key[0] == task.key[0]]
        last = max(keys, default=None)
        return last if last is not None and not self.left[last].pinned else None

    def _advance(self, task: Task, luck: Random | None, restorable: set[SegmentId]) -> None:
        t, epoch = task.key
        prompt = len(task.assignment.prompt_ids)
        if not task.admitted:
            home = self._home_of(task)
            here = self.left[home].kv if home is not None else 0
            image = task.image if task.image is not None and task.image.kv_tokens > here else None
            restored = image.kv_tokens - here if image is not None else 0
            lost = image is not None and not {run.segment for run in image.runs} <= restorable
            if image is not None and (lost or (luck is not None and luck.random() < 0.2)):
                run = luck.choice([None, *image.runs]) if luck is not None else None
                blamed = (run.node, run.segment) if run is not None else (None, None)
                failure = RestoreFailed(
                    trajectory_id=t, epoch=epoch, error="damaged", node=blamed[0], segment=blamed[1]
                )
                self.outbox.append(failure)
                task.image = None
                return
            on_host = home is not None and self.left.pop(home).tier is Keep.HOST
            task.admitted = True
            task.kv = here + restored
            self.outbox.append(
                Admitted(
                    trajectory_id=t,
                    epoch=epoch,
                    cached_tokens=0 if on_host else here,
                    loaded_tokens=here if on_host else 0,
                    restored_tokens=restored,
                    recomputed_tokens=max(0, task.assignment.kv_tokens - task.kv),
                )
            )
        elif luck is not None and luck.random() < 0.1:
            task.admitted = False
            task.kv = 0
            self.outbox.append(Preempted(trajectory_id=t, epoch=epoch))
        elif task.assignment.slice_tokens == 0:
            self._park(task)
        else:
            value = token(t, task.known)
            news = Columns([value], [-value / 256], [Version(epoch)])
            self.outbox.append(Sampled(trajectory_id=t, epoch=epoch, offset=task.known, columns=news))
            task.kv = prompt + task.known
            task.known += 1
            task.sampled += 1
            budget = task.assignment.sampling.max_new_tokens
            assert task.known <= budget
            if stops(value) or task.known == budget:
                reason = FinishReason.STOP if stops(value) else FinishReason.LENGTH
                del self.tasks[task.key]
                self.outbox.append(Finished(trajectory_id=t, epoch=epoch, reason=reason))
            elif task.sampled == task.assignment.slice_tokens:
                self._park(task)

    def _park(self, task: Task) -> None:
        """What it computed is pinned; so is, if it was never admitted, what it left here before."""
        del self.tasks[task.key]
        home = self._home_of(task) if not task.admitted else None
        left = Left(kv=task.kv, prompt_tokens=len(task.assignment.prompt_ids))
        if home is not None:
            left = self.left.pop(home)
            left.pinned = True
        self.left[task.key] = left
        self._tell_parked(task.key, left, Parked)

    def _tell_parked(self, key: SequenceKey, left: Left, kind: type[Parked]) -> None:
        self.outbox.append(
            kind(
                trajectory_id=key[0],
                epoch=key[1],
                kv_tokens=left.kv,
                prompt_pages=min(left.kv, left.prompt_tokens) // PAGE,
                page_keys=tuple(f"{key[0]} {i}".encode() for i in range(left.kv // PAGE)),
            )
        )


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


class World:
    """The controller, and everything that it can only see by events."""

    def __init__(self, *, slice_tokens: int | None, keep: Keep, prefer_other: bool, room: int) -> None:
        self.controller = Controller(
            workers=len(WORKERS),
            max_context=CONTEXT,
            slice_tokens=slice_tokens,
            keep=keep,
            prefer_other=prefer_other,
        )
        self.now = 0.0
        self.room = room
        self.sites = {worker: Site() for worker in WORKERS}
        self.processes = itertools.count(1)
        self.held: defaultdict[tuple[NodeId, TrajectoryId], set[SegmentId]] = defaultdict(set)
        self.turns: dict[tuple[NodeId, TrajectoryId], Turn] = {}
        """What the pools were told last."""
        self.displaced: set[SegmentId] = set()
        """What the pools gave up for something that is needed sooner."""
        self.told: set[SegmentId] = set()
        """What the controller knows of that."""
        self.displaced_images = 0
        self.segments = itertools.count(1)
        self.orders = itertools.count(1)
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
        self.to_hold: set[TrajectoryId] = set()
        """Those that drivers want to be suspended until they say otherwise."""
        self.holding: set[TrajectoryId] = set()
        """Those that have been since."""
        self.delivered: list[Trajectory] = []
        self.returned: list[Trajectory] = []
        """Handed out to nobody: to be handed out again."""
        self.calls = 0
        self.tickets: list[AbortTicket] = []
        self.budgets: dict[TrajectoryId, int] = {}
        self.ended_by_abort: set[TrajectoryId] = set()
        """Asked to end before their time; they may have completed all the same."""
        self.history: list[WorkerReport] = []

    # What the driver does -----------------------------------------------------------------------------

    def submit(self, *, n: int, budget: int) -> None:
        group = GroupId(f"job-{len(self.budgets)}")
        self.budgets |= {TrajectoryId(f"{group}/{i}"): budget for i in range(n)}
        self.now += 1
        submission = Submission(
            group_id=group,
            prompt_ids=tuple(range(PAGE + 1)),
            sampling=SamplingParams(max_new_tokens=budget),
            seeds=tuple(range(n)),
        )
        self.carry_out(self.controller.submit([submission], self.now))

    def abort(self, ids: Sequence[TrajectoryId], keep: Keep, then: Then) -> None:
        if then is Then.FINISH:
            self.ended_by_abort |= set(ids)
        self.to_hold -= set(ids)
        self.holding -= set(ids) if then is not Then.HOLD else set()
        self.to_hold |= set(ids) if then is Then.HOLD else set()
        self.now += 1
        ticket, commands = self.controller.abort(ids, keep, then, self.now)
        self.tickets.append(ticket)
        self.carry_out(commands)

    def resume(self, ids: Sequence[TrajectoryId]) -> None:
        self.to_hold -= set(ids)
        self.holding -= set(ids)
        self.now += 1
        _, commands = self.controller.resume(ids, self.now)
        self.carry_out(commands)

    def take(self, count: int) -> None:
        self._take(count, self.delivered)

    def take_in_vain(self, count: int, *, told_first: bool) -> None:
        """Nobody gets the answer; the controller hears that before it hands out, or after."""
        if told_first:
            self.controller.settle_calls(arrived=(), abandoned=[f"call {self.calls + 1}"])
        handed = self._take(count, self.returned)
        assert not (handed and told_first)
        if not told_first:
            self.controller.settle_calls(arrived=(), abandoned=[f"call {self.calls}"])

    def _take(self, count: int, into: list[Trajectory]) -> int:
        self.calls += 1
        deliveries = self.controller.take(count, f"call {self.calls}")
        handed = [trajectory for delivery in deliveries for trajectory in delivery.trajectories]
        self.returned = [trajectory for trajectory in self.returned if trajectory not in handed]
        (self.returned if into is not self.delivered else self.delivered).extend(handed)
        return len(deliveries)

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
        for command in commands:
            match command:
                case Retain(node=node, trajectory_id=t, segments=segments):
                    self.held[node, t] = set(segments) & self.stored
                case Drop(segment=segment):
                    for held in self.held.values():
                        held.discard(segment)
                case Expect(node=node, trajectory_id=t, turn=turn):
                    self.turns[node, t] = turn
                case Export(worker=worker):
                    self.turns[command.node, command.trajectory_id] = command.turn
                    number = next(self.orders)
                    self.exports.append((number, command, self.sites[worker].believed))
                    self.unanswered[number] = (command.trajectory_id, command.epoch)
                case _:
                    self._address(command)
        for record in self.records:
            if record.phase is Phase.SUSPENDED:
                assert record.trajectory_id in self.to_hold, "suspended though nobody asked for that"
                self.holding.add(record.trajectory_id)

    def _address(self, command: ToWorker) -> None:
        site = self.sites[command.worker]
        match command:
            case Start(assignment=assignment):
                key = (assignment.trajectory_id, assignment.epoch)
                assert key not in self.started
                assert site.believed is not None, "started on a worker that is down"
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
        if site.process is not None and site.process.incarnation == site.believed:
            site.process.inbox.append(command)

    def _check_start(self, t: TrajectoryId, start: Start) -> None:
        """It starts where it is at home, if anywhere; what is held starts for its KV only, and nothing else does."""
        for worker, site in self.sites.items():
            if site.process is not None and site.process.incarnation == site.believed and worker != start.worker:
                assert not site.process.left_by(t), "started elsewhere than where its KV is kept"
        if (home := self.kept.pop(t, None)) is not None:
            self.used.add(home)
        promoted = start.assignment.slice_tokens == 0
        assert promoted == (t in self.to_hold), "started though it is held" if not promoted else "not started to run"
        self.promotions += promoted

    @property
    def stored(self) -> set[SegmentId]:
        return set().union(*self.held.values())

    # What happens outside ---------------------------------------------------------------------------

    def boot(self, worker: WorkerId) -> None:
        """A process starts; the controller will hear of it."""
        site = self.sites[worker]
        site.process = FakeWorker(f"{worker} process {next(self.processes)}")
        up = WorkerUp(worker=worker, node=WORKERS[worker], incarnation=site.process.incarnation, max_running=self.room)
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
            site.believed = event.incarnation if isinstance(event, WorkerUp) else None
            self.handle(event)
            if twice:
                self.handle(event)

    def live(self, luck: Random) -> None:
        """Time passes: workers run and mostly tell, pools export and mostly answer."""
        for worker in WORKERS:
            self.step(worker, luck)
            if luck.random() < 0.7:
                self.post(worker)
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

    def step(self, worker: WorkerId, luck: Random | None) -> None:
        process = self.sites[worker].process
        if process is not None:
            process.step(luck, self.stored)

    def post(self, worker: WorkerId) -> None:
        """A worker sends what happened; it is under way from now on."""
        site = self.sites[worker]
        if site.process is not None and site.process.outbox:
            events, site.process.outbox = tuple(site.process.outbox), []
            site.mail.append(WorkerReport(worker=worker, incarnation=site.process.incarnation, events=events))

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
        commands = self.handle(WorkerReport(worker=report.worker, incarnation=report.incarnation, events=tuple(stale)))
        assert commands == []
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
        runs: list[SegmentRun] = []
        for run in order.base.runs if order.base is not None else ():
            assert run.segment in self.stored | self.displaced, "the base of an export was dropped"
            if run.node == order.node and run.segment in self.displaced:
                break
            pages = min(run.pages, usable - sum(kept.pages for kept in runs))
            if pages:
                runs.append(SegmentRun(node=run.node, segment=run.segment, first=run.first, pages=pages))
        pages = -(-order.kv_tokens // PAGE) - sum(run.pages for run in runs)
        segment = SegmentId(f"{order.node} {next(self.segments)}")
        runs.append(SegmentRun(node=order.node, segment=segment, first=0, pages=pages))
        self.held[order.node, key[0]].add(segment)
        made = Image(runs=tuple(runs), kv_tokens=order.kv_tokens)
        done = Exported(trajectory_id=key[0], epoch=key[1], image=made, sent_bytes=pages, displaced=made_room)
        self.answers.append((order_number, done))
        if order.release:
            assert process is not None
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
        """The invariants of the controller's docstring, and that no token is lost, made up or told twice."""
        records = self.records
        fleet = self.controller._fleet
        queued = [record for record in sorted(records, key=lambda record: record.order) if record.phase == "queued"]
        assert fleet._returning == [record for record in queued if record.workers]
        assert fleet._fresh == [record for record in queued if not record.workers]
        running = {t: worker for worker in WORKERS if (seen := fleet.get(worker)) for t in seen.running}
        assert running == {record.trajectory_id: record.worker for record in records if record.on_worker}
        assert all(count <= self.room for count in Counter(running.values()).values())
        over = [trajectory.trajectory_id for trajectory in self.delivered + self.returned]
        assert sorted([*over, *(record.trajectory_id for record in records)]) == sorted(self.budgets)
        assert sum(self.controller.phases.values()) == len(records)
        for record in records:
            count = len(record.columns)
            assert list(record.columns.ids) == [token(record.trajectory_id, i) for i in range(count)]
            assert count <= self.budgets[record.trajectory_id]
            assert record.phase != "queued" or any(not site.gone for site in self.sites.values()) or not self.settled
            assert (record.transfer is not None) == (record.phase is Phase.SUSPENDING)
            assert record.home is None or record.phase in (Phase.QUEUED, Phase.SUSPENDED, Phase.SUSPENDING)
        self._check_pools(records)
        self._check_holds(records)

    @property
    def settled(self) -> bool:
        """Whether the controller knows all that happened to the workers."""
        return not any(site.notices for site in self.sites.values())

    def _check_holds(self, records: list[Record]) -> None:
        """Groups with a held member are not coming, whatever is under way with its KV."""
        held = {record.group_id for record in records if record.trajectory_id in self.holding and not record.over}
        groups = {record.group_id for record in records}
        returned = {trajectory.group_id for trajectory in self.returned}
        assert self.controller.coming_groups == len(groups) - len(held) + len(returned)

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

    def finish(self) -> None:
        """No more faults: aborts end, what was submitted is delivered, once and whole, and nothing is left behind."""
        for _ in range(PATIENCE):
            if all(ticket.done for ticket in self.tickets) and self._quiet():
                break
            self._go_on()
        assert all(ticket.done for ticket in self.tickets)
        assert {record.phase for record in self.records} <= {Phase.SUSPENDED, Phase.FINISHED, Phase.FAILED}
        for _ in range(PATIENCE):
            if len(self.delivered) == len(self.budgets) and self._quiet():
                break
            self.resume([record.trajectory_id for record in self.records])
            self._go_on()
            self.take(99)
        assert sorted(trajectory.trajectory_id for trajectory in self.delivered) == sorted(self.budgets)
        assert self._quiet()
        assert not self.returned
        assert all(ticket.done and not ticket.report().unreached for ticket in self.tickets)
        assert not any(self.held.values())
        for site in self.sites.values():
            assert site.process is None or not (site.process.tasks or site.process.left)
        self._check_deliveries()

    def _go_on(self) -> None:
        for worker in WORKERS:
            self.notice(worker)
            self.step(worker, None)
            self.post(worker)
            self.relay(worker)
        self.export(0, fail=False)
        self.answer(0)
        self.check()

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

    def _check_deliveries(self) -> None:
        for trajectory in self.delivered:
            expected, reason = full_output(trajectory.trajectory_id, self.budgets[trajectory.trajectory_id])
            assert trajectory.output_ids == expected[: len(trajectory.output_ids)]
            assert trajectory.logprobs == tuple(-value / 256 for value in trajectory.output_ids)
            if trajectory.finish_reason is FinishReason.ABORT:
                assert trajectory.trajectory_id in self.ended_by_abort
            elif trajectory.finish_reason is FinishReason.ERROR:
                assert trajectory.error is not None
                if trajectory.error.startswith("no worker is left"):
                    assert all(site.gone for site in self.sites.values())
                else:
                    assert trajectory.error.startswith(f"{MOST_LOSSES} workers were lost under it")
                    assert len(trajectory.workers) >= MOST_LOSSES
                    assert self.controller.counters.workers_lost >= MOST_LOSSES
            else:
                assert (trajectory.output_ids, trajectory.finish_reason) == (expected, reason)
        counters = self.controller.counters
        assert counters.displaced_images <= self.displaced_images
        assert counters.trajectories == len(self.delivered)
        assert counters.tokens == sum(len(trajectory.output_ids) for trajectory in self.delivered)
        assert counters.suspensions == sum(trajectory.suspensions for trajectory in self.delivered)
        again = sum(max(0, len(trajectory.workers) - 1) for trajectory in self.delivered)
        assert counters.resumes + counters.restarts == again - self.promotions
        assert len(self.started) == sum(len(trajectory.workers) for trajectory in self.delivered)
