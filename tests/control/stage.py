"""A controller, its time, and workers whose news are told in one short call each; answers by themselves if asked to.

Time passes only by `wait`. Every call checks that all that was submitted is accounted for (case E1), and returns the
commands that it led to, but those of `turns`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.config import AbortConfig, GroupsConfig, ResumeConfig, WeightsConfig
from rollout.control.aborts import AbortTicket
from rollout.control.collection import Collection
from rollout.control.commands import Command, Expect, Export, KeepThere, Recall, Start, Stop
from rollout.control.controller import Controller
from rollout.control.messages import (
    Admitted,
    Event,
    Exported,
    ExportFailed,
    Failed,
    Finished,
    Moved,
    Parked,
    PoolRoom,
    Preempted,
    Recalled,
    Sampled,
    Tick,
    WeightsLive,
    WorkerDown,
    WorkerEvent,
    WorkerFacts,
    WorkerReport,
    WorkerUp,
)
from rollout.control.paces import Pace, PrefillTimes
from rollout.control.records import Record
from rollout.control.submission import Submission
from rollout.types import (
    AbortReason,
    Columns,
    Delivery,
    FinishReason,
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
    Then,
    Trajectory,
    TrajectoryId,
    UpdateMode,
    Version,
    Weights,
    WorkerId,
)
from tests.weights import WEIGHTS, loaded, written

W1, W2, W3 = WorkerId("w1"), WorkerId("w2"), WorkerId("w3")
NODES = {W1: NodeId("n1"), W2: NodeId("n2"), W3: NodeId("n2")}
PROMPT = (1, 2, 3, 4)
CONTEXT = 4096


def member(group: str, index: int = 0) -> TrajectoryId:
    return TrajectoryId(f"{group}/{index}")


def submission(
    group: str, n: int = 1, *, budget: int = 100, prompt: Sequence[int] = PROMPT, **fields: Any
) -> Submission:
    return Submission(
        group_id=GroupId(group),
        prompt_ids=tuple(prompt),
        sampling=(SamplingParams(max_new_tokens=budget),) * n,
        seeds=tuple(range(n)),
        **fields,
    )


def facts(
    *,
    free: int = 10_000,
    host_free: int = 10_000,
    token_bytes: int = 1000,
    prefill_s: float | None = 0.001,
    step: Pace | None = None,
    restore: Pace | None = None,
    load: Pace | None = None,
    save: Pace | None = None,
    moving_share: float | None = None,
) -> WorkerFacts:
    """A token of prefill takes a millisecond at any length, if nothing else is said; of moves nothing is known."""
    return WorkerFacts(
        free_tokens=free,
        host_free_tokens=host_free,
        token_bytes=token_bytes,
        prefill=PrefillTimes((prefill_s,) * 16),
        step=step,
        restore=restore,
        load=load,
        save=save,
        moving_share=moving_share,
    )


def pace(fixed_s: float, unit_s: float = 0.0) -> Pace:
    return Pace(fixed_s=fixed_s, unit_s=unit_s)


class Stage:
    def __init__(
        self,
        *workers: WorkerId,
        size: int | None = None,
        room: int = 4,
        policies: Sequence[Mapping[str, Any]] = (),
        keep: str = "pool",
        context: int = CONTEXT,
        resume: Mapping[str, Any] | None = None,
        groups: Mapping[str, Any] | None = None,
        weights: Mapping[str, Any] | None = None,
    ) -> None:
        """`policies`, `resume`, `groups` and `weights` as in a configuration."""
        self.controller = Controller(
            workers=size or len(workers),
            max_context=context,
            weights=WEIGHTS,
            abort=AbortConfig.model_validate({"keep": keep, "policies": tuple(policies)}),
            resume=ResumeConfig.model_validate(resume or {}),
            groups=GroupsConfig.model_validate(groups or {}),
            versions=WeightsConfig.model_validate(weights or {}),
        )
        self.now = 0.0
        self.commands: list[Command] = []
        """All of them."""
        self.unanswered: list[Command] = []
        self.tokens = 0
        """Told, each once."""
        self._calls = 0
        for worker in workers:
            self.up(worker, room=room)

    # Time and events ----------------------------------------------------------------------------------

    def wait(self, seconds: float) -> list[Command]:
        """And look at deadlines then."""
        self.now += seconds
        return self.handle(Tick())

    def handle(self, event: Event) -> list[Command]:
        return self.take_note(self.controller.handle(event, self.now))

    def take_note(self, commands: Sequence[Command]) -> list[Command]:
        accounts = self.controller.accounts()
        assert accounts.accounted == accounts.submitted, accounts
        told: list[Command] = [command for command in commands if not isinstance(command, Expect)]
        self.commands += told
        for each in told:
            only_moves = isinstance(each, Start) and each.assignment.watch.only_loads
            if only_moves or isinstance(each, Stop | Export | KeepThere | Recall):
                self.unanswered.append(each)
        return told

    def up(self, worker: WorkerId, incarnation: str = "a", *, room: int = 4) -> list[Command]:
        return self.handle(WorkerUp(worker=worker, node=NODES[worker], incarnation=incarnation, max_running=room))

    def down(self, worker: WorkerId, incarnation: str = "a", *, final: bool = False) -> list[Command]:
        return self.handle(WorkerDown(worker=worker, incarnation=incarnation, error="killed", final=final))

    def report(self, worker: WorkerId, *events: WorkerEvent, facts: WorkerFacts | None = None) -> list[Command]:
        return self.handle(WorkerReport(worker=worker, incarnation="a", events=events, facts=facts))

    def room(self, worker: WorkerId, *, free: int, budget: int) -> list[Command]:
        """Of the pool of its node, in bytes."""
        return self.handle(PoolRoom(node=NODES[worker], free_bytes=free, budget_bytes=budget))

    def live(self, weights: int | Weights) -> list[Command]:
        """These, or the only load of this version."""
        return self.handle(WeightsLive(weights=weights if isinstance(weights, Weights) else loaded(weights)))

    # Updates ------------------------------------------------------------------------------------------

    def announce(self, version: int) -> list[Command]:
        return self.take_note(self.controller.announce_update(Version(version), self.now))

    def begin_update(self, mode: UpdateMode) -> list[Command]:
        return self.take_note(self.controller.begin_update(mode, self.now))

    def end_update(self) -> list[Command]:
        return self.take_note(self.controller.end_update(self.now))

    def pause(self) -> list[Command]:
        return self.take_note(self.controller.pause(self.now))

    def unpause(self) -> list[Command]:
        return self.take_note(self.controller.unpause(self.now))

    # Of one trajectory, by the worker that runs it, or ran it last --------------------------------------

    def tell(self, t: TrajectoryId, kind: type[WorkerEvent], **fields: Any) -> list[Command]:
        record = self.record(t)
        assert record.worker is not None, f"{t} never ran"
        return self.report(record.worker, kind(trajectory_id=t, epoch=record.epoch, **fields))

    def admit(
        self,
        t: TrajectoryId,
        *,
        cached: int = 0,
        loaded: int = 0,
        restored: int = 0,
        runs: tuple[KVRun, ...] | None = None,
    ) -> list[Command]:
        """With KV from these places, which the live weights wrote if `runs` do not say otherwise; what else it had once
        is computed again."""
        again = max(0, self.record(t).kv_tokens - cached - loaded - restored)
        return self.tell(
            t,
            Admitted,
            cached_tokens=cached,
            loaded_tokens=loaded,
            restored_tokens=restored,
            recomputed_tokens=again,
            written=written(cached + loaded + restored, self.controller.weights) if runs is None else runs,
        )

    def sample(self, t: TrajectoryId, count: int = 1, *, version: int = 0) -> list[Command]:
        """By this version, whatever is live."""
        offset = len(self.record(t).columns)
        ids = range(100 + offset, 100 + offset + count)
        self.tokens += count
        columns = Columns(ids, [-0.5] * count, [Version(version)] * count)
        return self.tell(t, Sampled, offset=offset, columns=columns)

    def finish(self, t: TrajectoryId, tokens: int = 0, reason: FinishReason = FinishReason.STOP) -> list[Command]:
        """After so many more tokens."""
        before = self.sample(t, tokens) if tokens else []
        return before + self.tell(t, Finished, reason=reason)

    def fail(self, t: TrajectoryId, error: str = "it cannot go on") -> list[Command]:
        return self.tell(t, Failed, error=error)

    def preempt(self, t: TrajectoryId, *, outdated: bool = False) -> list[Command]:
        return self.tell(t, Preempted, outdated=outdated)

    def park(
        self,
        t: TrajectoryId,
        reason: AbortReason | None = None,
        *,
        kv: int | None = None,
        runs: tuple[KVRun, ...] | None = None,
    ) -> list[Command]:
        """With the KV of all but its last token, written by the live weights, if nothing else is said."""
        left = self._left(t, kv)
        if runs is not None:
            left |= {"kv_tokens": sum(run.tokens for run in runs), "written": runs}
        return self.tell(t, Parked, **left, reason=reason)

    def _left(self, t: TrajectoryId, kv: int | None = None) -> dict[str, Any]:
        record = self.find(t)
        tokens = max(0, record.tokens - 1) if kv is None and record is not None else kv or 0
        by = self.controller.weights
        return {"kv_tokens": tokens, "prompt_pages": 1, "page_keys": (), "written": written(tokens, by)}

    def answer_all(self, *, sent: int = 0, seconds: float = 0.0, pool_is_full: bool = False) -> None:
        """Workers and pools do what they were told, until nothing is left to do."""
        while self.unanswered:
            command = self.unanswered.pop(0)
            match command:
                case Start():
                    t, epoch = command.assignment.trajectory_id, command.assignment.epoch
                    if self.find(t) is not None and self.record(t).on_worker and self.record(t).epoch == epoch:
                        self.admit(t, restored=self.record(t).kv_tokens)
                        self.park(t)
                case Stop(trajectory_id=t, epoch=epoch):
                    if self.find(t) is not None and self.record(t).on_worker and self.record(t).epoch == epoch:
                        self.park(t)
                case Export() if pool_is_full:
                    self.handle(ExportFailed(trajectory_id=command.trajectory_id, epoch=command.epoch, error="full"))
                case Export():
                    self.handle(self.exported(command, sent=sent, seconds=seconds))
                case KeepThere(worker=worker, trajectory_id=t, epoch=epoch, where=where):
                    kv = self._left(t)["kv_tokens"]
                    news = Moved(trajectory_id=t, epoch=epoch, where=where, kv_tokens=kv, error=None)
                    self.report(worker, news)
                case Recall(worker=worker, trajectory_id=t, epoch=epoch):
                    self.report(worker, Recalled(trajectory_id=t, epoch=epoch, **self._left(t)))

    def exported(self, order: Export, *, sent: int = 0, seconds: float = 0.0) -> Exported:
        segment = SegmentId(f"{order.trajectory_id} {order.epoch}")
        run = SegmentRun(node=order.node, segment=segment, first=0, pages=1)
        image = Image(runs=(run,), kv_tokens=order.kv_tokens, written=order.written)
        return Exported(
            trajectory_id=order.trajectory_id, epoch=order.epoch, image=image, sent_bytes=sent, seconds=seconds
        )

    # Drivers ------------------------------------------------------------------------------------------

    def submit(self, group: str, n: int = 1, **fields: Any) -> list[Command]:
        return self.submit_all(submission(group, n, **fields))

    def submit_all(self, *submissions: Submission) -> list[Command]:
        return self.take_note(self.controller.submit(submissions, self.now))

    def evaluate(self, group: str, n: int = 1) -> list[Command]:
        return self.submit(group, n, priority=Priority.EVAL)

    def abort(self, *ids: str, keep: Keep = Keep.AUTO, then: Then = Then.HOLD) -> AbortTicket:
        ticket, commands = self.controller.abort(ids, keep, then, self.now)
        self.take_note(commands)
        return ticket

    def hold(self, *ids: str, keep: Keep = Keep.AUTO) -> None:
        """Until they are suspended."""
        self.abort(*ids, keep=keep)
        self.answer_all()

    def resume(self, *ids: str) -> list[Command]:
        return self.take_note(self.controller.resume(ids, self.now)[1])

    def extend(self, t: TrajectoryId, ids: Sequence[int], call: str = "") -> list[Command]:
        return self.take_note(self.controller.extend(t, ids, call or f"{t} {len(self.commands)}", self.now))

    def discard(self, *ids: str) -> list[Command]:
        return self.take_note(self.controller.discard(ids, self.now)[1])

    def collect(self, groups: int, over_sample: float = 0.0, *, stop_when_met: bool = True) -> list[Command]:
        begin = Collection(
            call="collect", wanted=groups, over_sample=over_sample, stop_when_met=stop_when_met, ends_at=math.inf
        )
        commands = self.controller.begin_collection(begin, self.now)
        return self.take_note(commands)

    def end_collection(self) -> list[Command]:
        return self.take_note(self.controller.end_collection("collect", self.now))

    def reject(self) -> list[Command]:
        return self.take_note(self.controller.reject("collect", self.now))

    def drain(self, worker: WorkerId) -> list[Command]:
        return self.take_note(self.controller.drain(worker, self.now)[1])

    def take(self, count: int = 99) -> list[Delivery]:
        self._calls += 1
        taken = self.controller.take(count, f"call {self._calls}")
        self.take_note([])
        return taken

    def arrived(self) -> None:
        """All that was taken."""
        self.controller.settle_calls(arrived=[f"call {i + 1}" for i in range(self._calls)], abandoned=())
        self.take_note([])

    def take_one(self) -> Trajectory:
        (delivery,) = self.take()
        (trajectory,) = delivery.trajectories
        return trajectory

    # How things stand ---------------------------------------------------------------------------------

    def find(self, t: TrajectoryId) -> Record | None:
        found, _ = self.controller.resolve([t])
        return found[0] if found else None

    def record(self, t: TrajectoryId) -> Record:
        record = self.find(t)
        assert record is not None, f"{t} is unknown"
        return record

    def phase(self, t: TrajectoryId) -> Phase:
        return self.record(t).phase

    def phases(self, *groups: str) -> list[Phase]:
        return [record.phase for record in self.controller.resolve(groups or None)[0]]

    @property
    def running(self) -> set[TrajectoryId]:
        return {record.trajectory_id for record in self.controller.resolve(None)[0] if record.on_worker}


def started(commands: Sequence[Command]) -> list[tuple[WorkerId, TrajectoryId]]:
    return [(each.worker, each.assignment.trajectory_id) for each in commands if isinstance(each, Start)]


def stopped(commands: Sequence[Command]) -> list[TrajectoryId]:
    return [each.trajectory_id for each in commands if isinstance(each, Stop)]


def start_of(commands: Sequence[Command], t: TrajectoryId) -> Start:
    """The last one."""
    return [each for each in commands if isinstance(each, Start) and each.assignment.trajectory_id == t][-1]
