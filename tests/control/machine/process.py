"""A simulated worker process: it does what it is told, late or not quite, and tells it.

Nothing here knows how the controller decides. Token i of an attempt is a function of the attempt's seed and i, so what
a trajectory must hold in the end is known beforehand.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from random import Random

from rollout.control.commands import Assignment, KeepThere, Pause, Recall, Release, Start, Stop, Unpause
from rollout.control.messages import (
    Admitted,
    Failed,
    Finished,
    Freed,
    Moved,
    Parked,
    Preempted,
    Recalled,
    RestoreFailed,
    Sampled,
    WorkerEvent,
    WorkerFacts,
)
from rollout.control.paces import Pace, PrefillTimes
from rollout.types import (
    AbortReason,
    Columns,
    FinishReason,
    Image,
    Keep,
    KVRun,
    SegmentId,
    SequenceKey,
    TrajectoryId,
    Weights,
    WeightsId,
)

PAGE = 4
FAILURE = "InvalidPromptError: it cannot be run"
ToWorker = Start | Stop | Release | KeepThere | Recall | Pause | Unpause
KV = list[Weights]
"""What wrote each position."""


def token(seed: int, index: int) -> int:
    return hashlib.blake2b(f"{seed} {index}".encode(), digest_size=1).digest()[0]


def stops(value: int) -> bool:
    return value % 16 == 0


def runs(kv: Sequence[Weights]) -> tuple[KVRun, ...]:
    return tuple(KVRun(weights, len(list(run))) for weights, run in groupby(kv))


def positions(written: Iterable[KVRun]) -> KV:
    return [run.weights for run in written for _ in range(run.tokens)]


class Task:
    """An assignment on a worker."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.known = len(assignment.output)
        self.sampled = 0
        self.kv: KV = []
        self.image = assignment.image
        self.admitted = False
        self.prefills = True
        """No token was sampled since its KV was told of."""

    @property
    def key(self) -> SequenceKey:
        return (self.assignment.trajectory_id, self.assignment.epoch)

    @property
    def missing(self) -> int:
        """Positions without KV."""
        return len(self.assignment.prompt_ids) + self.known - len(self.kv)

    @property
    def sampled_in_all(self) -> int:
        return self.assignment.output.sampled + self.sampled

    @property
    def full(self) -> bool:
        """Whether no token may follow."""
        tokens = len(self.assignment.prompt_ids) + self.known
        return self.sampled_in_all >= self.assignment.sampling.max_new_tokens or tokens >= self.assignment.max_context

    def sees(self, luck: Random | None) -> AbortReason | None:
        """What is watched and has come about after a token."""
        watch = self.assignment.watch
        if watch.most_tokens is not None and self.sampled_in_all >= watch.most_tokens:
            return AbortReason.OVER_LONG
        if watch.repetition is not None and luck is not None and luck.random() < 0.1:
            return AbortReason.REPETITION
        if self.sampled == watch.slice_tokens:
            return AbortReason.SLICE_BUDGET
        return AbortReason.MEMORY if luck is not None and luck.random() < 0.02 else None


@dataclass(slots=True, kw_only=True)
class Left:
    """What a sequence left on a worker when it stopped."""

    kv: KV
    prompt_tokens: int
    tier: Keep = Keep.DEVICE
    pinned: bool = True
    """To be exported or moved: nothing evicts it."""
    moving: Keep | None = None
    """Where it is on its way to."""


class FakeWorker:
    """One process. It may be stepped with any luck; `None` is the best: nothing goes wrong and all progress."""

    def __init__(
        self, incarnation: str, weights: Weights, note: Callable[[int, int, Weights, Sequence[Weights]], None]
    ) -> None:
        """`note` hears what samples a token of a seed at an index, and what wrote the KV before it."""
        self.incarnation = incarnation
        self.weights = weights
        self.reusable: Set[WeightsId] = {weights.weights_id}
        self.note = note
        self.paused = False
        self.inbox: deque[ToWorker] = deque()
        self.outbox: list[WorkerEvent] = []
        self.tasks: dict[SequenceKey, Task] = {}
        self.left: dict[SequenceKey, Left] = {}

    @property
    def parked(self) -> dict[SequenceKey, int]:
        """KV tokens of each image that can be exported."""
        return {key: len(left.kv) for key, left in self.left.items() if left.pinned and left.moving is None}

    @property
    def left_for_good(self) -> set[SequenceKey]:
        """What is here that no command in the inbox gives up."""
        given_up = {(order.trajectory_id, order.epoch) for order in self.inbox if isinstance(order, Release)}
        return set(self.left) - given_up

    def replace_weights(self, weights: Weights, reusable: Set[WeightsId], *, in_place: bool) -> None:
        """After all that it was told before, and between two steps; what runs starts again from its tokens, unless it
        goes on in place with KV that may be used. What waits goes on as it does.

        In the middle of a prefill it says what it goes on with.
        """
        while self.inbox:
            self._obey(self.inbox.popleft(), None)
        self.weights, self.reusable = weights, reusable
        for task in self.tasks.values():
            if task.admitted and not (in_place and self.may_use(task.kv)):
                task.admitted, task.kv = False, []
                t, epoch = task.key
                self.outbox.append(Preempted(trajectory_id=t, epoch=epoch, outdated=True))
            elif task.kv and task.prefills:
                t, epoch = task.key
                self.outbox.append(Preempted(trajectory_id=t, epoch=epoch, outdated=True))
                self._tell_admitted(task, cached=len(task.kv))

    def may_use(self, kv: Iterable[Weights]) -> bool:
        return all(weights.weights_id in self.reusable for weights in kv)

    def step(self, luck: Random | None, restorable: "set[SegmentId]") -> None:
        while self.inbox and (luck is None or luck.random() < 0.8):
            self._obey(self.inbox.popleft(), luck)
        for key, left in list(self.left.items()):
            self._pass_time(key, left, luck)
        for task in list(self.tasks.values()) if not self.paused else ():
            if luck is None or luck.random() < 0.8:
                self._advance(task, luck, restorable)

    def facts(self, luck: Random) -> WorkerFacts:
        """Measured at random."""

        def pace() -> Pace | None:
            return luck.choice([None, Pace(fixed_s=0.0, unit_s=0.01), Pace(fixed_s=9.0, unit_s=0.5)])

        return WorkerFacts(
            free_tokens=luck.choice([0, 30, 3000]),
            host_free_tokens=luck.choice([0, 8, 300]),
            token_bytes=luck.choice([1, 64]),
            prefill=PrefillTimes(luck.choice([(), (None, 0.5), (0.01, 0.02, None, 0.1), (3.0,)])),
            step=pace(),
            restore=pace(),
            load=pace(),
            save=pace(),
        )

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
                left = self.left.get((t, epoch), Left(kv=[], prompt_tokens=0))
                left.pinned = True
                self._tell_parked((t, epoch), left, Recalled)
            case Pause() | Unpause():
                self.paused = isinstance(command, Pause)

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
            del left.kv[luck.randrange(len(left.kv) + 1) :]

    def _tell_moved(self, key: SequenceKey, left: Left, *, ok: bool) -> None:
        assert left.moving is not None
        left.tier = left.moving if ok else left.tier
        left.moving, left.pinned = None, False
        error = None if ok else "no room"
        self.outbox.append(
            Moved(trajectory_id=key[0], epoch=key[1], where=left.tier, kv_tokens=len(left.kv), error=error),
        )

    def _free(self, key: SequenceKey) -> None:
        pages = -(-len(self.left.pop(key).kv) // PAGE)
        self.outbox.append(Freed(trajectory_id=key[0], epoch=key[1], exclusive_pages=pages, freed_pages=pages))

    def _home_of(self, task: Task) -> SequenceKey | None:
        """What the trajectory left here last, if nothing is under way with it."""
        keys = [key for key in self.left if key[0] == task.key[0]]
        last = max(keys, default=None)
        return last if last is not None and not self.left[last].pinned else None

    def _advance(self, task: Task, luck: Random | None, restorable: set[SegmentId]) -> None:
        t, epoch = task.key
        if not task.admitted:
            self._admit(task, luck, restorable)
        elif luck is not None and luck.random() < 0.1:
            task.admitted, task.kv = False, []
            self.outbox.append(Preempted(trajectory_id=t, epoch=epoch))
        elif luck is not None and luck.random() < 0.02:
            del self.tasks[task.key]
            self.outbox.append(Failed(trajectory_id=t, epoch=epoch, error=FAILURE))
        elif task.assignment.watch.only_loads:
            self._park(task)
        elif task.missing > 1 and luck is not None and luck.random() < 0.3:
            task.kv += [self.weights] * luck.randint(1, task.missing - 1)  # a chunk of its prefill
        else:
            self._sample(task, luck)

    def _admit(self, task: Task, luck: Random | None, restorable: set[SegmentId]) -> None:
        t, epoch = task.key
        home = self._home_of(task)
        here = self.left[home].kv if home is not None and self.may_use(self.left[home].kv) else []
        image = self._usable(task.image, here)
        lost = image is not None and not {run.segment for run in image.runs} <= restorable
        if image is not None and (lost or (luck is not None and luck.random() < 0.2)):
            run = luck.choice([None, *image.runs]) if luck is not None else None
            blamed = (run.node, run.segment) if run is not None else (None, None)
            failure = RestoreFailed(trajectory_id=t, epoch=epoch, error="damaged", node=blamed[0], segment=blamed[1])
            self.outbox.append(failure)
            task.image = None
            return
        task.kv = positions(image.written) if image is not None else list(here)
        if here != task.kv[: len(here)]:
            here = []  # the image of more tokens has another history
        on_host = home is not None and self.left.pop(home).tier is Keep.HOST
        task.admitted = True
        again = max(0, task.assignment.kv_tokens - len(task.kv))
        cached, loaded = (0, len(here)) if on_host else (len(here), 0)
        self._tell_admitted(task, cached=cached, loaded=loaded, restored=len(task.kv) - len(here), again=again)

    def _tell_admitted(self, task: Task, *, cached: int, loaded: int = 0, restored: int = 0, again: int = 0) -> None:
        t, epoch = task.key
        task.prefills = True
        self.outbox.append(
            Admitted(
                trajectory_id=t,
                epoch=epoch,
                cached_tokens=cached,
                loaded_tokens=loaded,
                restored_tokens=restored,
                recomputed_tokens=again,
                written=runs(task.kv),
            )
        )

    def _usable(self, image: Image | None, here: KV) -> Image | None:
        """An image with more than what is here, if its KV may be gone on with."""
        if image is None or image.kv_tokens <= len(here) or not self.may_use(positions(image.written)):
            return None
        return image

    def _sample(self, task: Task, luck: Random | None) -> None:
        t, epoch = task.key
        assert not task.full, "started with nothing left to sample"
        value = token(task.assignment.seed, task.known)
        task.kv += [self.weights] * task.missing
        task.prefills = False
        self.note(task.assignment.seed, task.known, self.weights, task.kv)
        news = Columns([value], [-value / 256], [self.weights.version])
        self.outbox.append(Sampled(trajectory_id=t, epoch=epoch, offset=task.known, columns=news))
        task.known += 1
        task.sampled += 1
        if stops(value) and task.assignment.watch.turns and not task.full:
            self._park(task, AbortReason.TURN)
        elif stops(value) or task.full:
            del self.tasks[task.key]
            reason = FinishReason.STOP if stops(value) else FinishReason.LENGTH
            self.outbox.append(Finished(trajectory_id=t, epoch=epoch, reason=reason))
        elif (seen := task.sees(luck)) is not None:
            self._park(task, seen)

    def _park(self, task: Task, reason: AbortReason | None = None) -> None:
        """What it computed is pinned; so is, if it was never admitted, what it left here before."""
        del self.tasks[task.key]
        home = self._home_of(task) if not task.admitted else None
        left = Left(kv=task.kv, prompt_tokens=len(task.assignment.prompt_ids))
        if home is not None and self.may_use(self.left[home].kv):
            left = self.left.pop(home)
            left.pinned = True
        elif home is not None:
            self._free(home)
        self.left[task.key] = left
        self._tell_parked(task.key, left, Parked, reason)

    def _tell_parked(self, key: SequenceKey, left: Left, kind: type[Parked], reason: AbortReason | None = None) -> None:
        self.outbox.append(
            kind(
                trajectory_id=key[0],
                epoch=key[1],
                kv_tokens=len(left.kv),
                prompt_pages=min(len(left.kv), left.prompt_tokens) // PAGE,
                page_keys=tuple(f"{key[0]} {i}".encode() for i in range(len(left.kv) // PAGE)),
                written=runs(left.kv),
                reason=reason,
            )
        )


def left_by(worker: FakeWorker, t: TrajectoryId) -> set[SequenceKey]:
    """What a trajectory has on a worker that no command in its inbox gives up."""
    return {key for key in worker.left_for_good if key[0] == t}
