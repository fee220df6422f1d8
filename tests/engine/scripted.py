"""An engine whose model is a script: what each trajectory says, at what time, is up to the test. No torch runs.

Every step, and every command, is followed by an audit of the page accounting. Time stands still unless a test moves it
or a forward takes some.
"""

from collections.abc import Callable, Sequence

from rollout.config import NoWrites, WritePolicy
from rollout.control.commands import Assignment, Watch
from rollout.control.messages import Parked, Sampled, WorkerEvent
from rollout.engine.engine import Engine
from rollout.engine.images import Images
from rollout.engine.interface import Draw
from rollout.engine.live import LiveWeights
from rollout.engine.rates import Rates
from rollout.engine.scheduler import Limits, Plan, Scheduler
from rollout.kv.cache import KVCache
from rollout.kv.chain import ChainValues
from rollout.kv.copier import Copied
from rollout.kv.fence import Fence, Passed
from rollout.kv.keys import Fingerprint, root_key
from rollout.kv.restore import Restored
from rollout.kv.tiers import Copy
from rollout.types import Columns, Image, SamplingParams, SequenceKey, TrajectoryId, Weights
from tests.weights import WEIGHTS

PAGE_TOKENS = 4
TOKEN_BYTES = 10
VOCAB_SIZE = 1000
EOS_ID = 999
MAX_STEPS = 10_000

Say = Callable[[TrajectoryId, int], int]
"""The token of a trajectory with an index in its output."""


def count_up(trajectory: TrajectoryId, index: int) -> int:
    return index % 900


class ScriptedRunner:
    """Says what it is told, and how long that took."""

    canary = False
    page_bytes = PAGE_TOKENS * TOKEN_BYTES

    def __init__(self, say: Say) -> None:
        self.say = say
        self.prefill_time: Callable[[Plan], float] = lambda plan: 0.0
        self.decode_time: Callable[[Plan], float] = lambda plan: 0.0
        self.prefill_s: float | None = None
        self.decode_s: float | None = None
        self.plans: list[Plan] = []

    def run(self, plan: Plan) -> list[Draw]:
        self.plans.append(plan)
        self.prefill_s = self.prefill_time(plan) if plan.prefill else None
        self.decode_s = self.decode_time(plan) if plan.decode else None
        due = [chunk.sequence for chunk in plan.prefill if chunk.end == len(chunk.sequence.tokens)]
        due += [sequence for sequence in plan.decode if sequence.computed + 1 == len(sequence.tokens)]
        return [Draw(s, self.say(s.trajectory_id, s.output_tokens), -float(s.output_tokens)) for s in due]

    def fence(self) -> Fence:
        return Passed()

    def close(self) -> None:
        pass


class HeldCopier:
    """Copies are over as soon as `held` is false, each after `seconds` for its bytes."""

    def __init__(self) -> None:
        self.held = False
        self.seconds: Callable[[int], float] = lambda nbytes: 0.0
        self._copies: list[Copy] = []

    def submit(self, copies: Sequence[Copy], after: Fence) -> None:
        self._copies += copies

    def poll(self) -> list[Copied]:
        if self.held:
            return []
        copies, self._copies = self._copies, []
        sizes = [len(copy.sources) * PAGE_TOKENS * TOKEN_BYTES for copy in copies]
        return [
            Copied(copy_id=copy.copy_id, to=copy.to, ok=True, nbytes=nbytes, seconds=self.seconds(nbytes))
            for copy, nbytes in zip(copies, sizes, strict=True)
        ]

    def close(self) -> None:
        pass


class HeldRestorer:
    """Restores are over as soon as `held` is false; those that are `begun` cannot be cancelled."""

    def __init__(self) -> None:
        self.held = False
        self.begun = True
        self.restored_bytes = 0
        self._pending: dict[SequenceKey, int] = {}

    def submit(
        self,
        key: SequenceKey,
        image: Image,
        first_page: int,
        pages: Sequence[int],
        after: Fence,
        chain: ChainValues | None = None,
    ) -> None:
        self._pending[key] = image.kv_tokens
        self.restored_bytes += (image.kv_tokens - first_page * PAGE_TOKENS) * TOKEN_BYTES

    def cancel(self, key: SequenceKey) -> bool:
        return not self.begun and self._pending.pop(key, None) is not None

    def poll(self) -> list[Restored]:
        if self.held:
            return []
        pending, self._pending = self._pending, {}
        return [Restored(key=key, tokens=tokens, error=None) for key, tokens in pending.items()]

    def close(self) -> None:
        pass


class Scripted:
    """The engine, its script and what it told."""

    def __init__(
        self,
        say: Say = count_up,
        *,
        pages: int = 1000,
        host_pages: int = 0,
        write: WritePolicy | None = None,
        max_running: int = 64,
        chunk_tokens: int = 16,
        prefill_tokens: int = 1 << 20,
        spare_pages: int = 0,
        audited: bool = True,
    ) -> None:
        self.now = 0.0
        self.runner = ScriptedRunner(say)
        self.copier = HeldCopier()
        self.restorer = HeldRestorer()
        self.events: list[WorkerEvent] = []
        self._audited = audited
        self.loads = [WEIGHTS]
        cache = KVCache(pages, PAGE_TOKENS, host_pages=host_pages, write=write or NoWrites(kind="none"))
        live = LiveWeights(WEIGHTS)
        images = Images(cache, live, tail_hold_s=60.0)
        rates = Rates(TOKEN_BYTES, None)
        limits = Limits(
            max_running=max_running,
            chunk_tokens=chunk_tokens,
            prefill_tokens=prefill_tokens,
            replays=False,
            spare_pages=spare_pages,
        )
        self.cache = cache
        self.engine = Engine(
            runner=self.runner,
            scheduler=Scheduler(cache, images, rates, live, limits),
            cache=cache,
            images=images,
            copier=self.copier,
            restorer=self.restorer,
            rates=rates,
            root=root_key(Fingerprint("scripted")),
            vocab_size=VOCAB_SIZE,
            eos_ids=(EOS_ID,),
            max_context=pages * PAGE_TOKENS,
            replays=False,
            live=live,
            clock=lambda: self.now,
        )

    def submit(
        self,
        name: str,
        prompt: Sequence[int] = (1, 2, 3),
        *,
        watch: Watch | None = None,
        output: Columns | None = None,
        image: Image | None = None,
        epoch: int = 1,
        kv_tokens: int = 0,
        **sampling: object,
    ) -> SequenceKey:
        params = SamplingParams(**({"max_new_tokens": 1000} | sampling))  # type: ignore[arg-type]
        assignment = Assignment(
            trajectory_id=TrajectoryId(name),
            epoch=epoch,
            prompt_ids=tuple(prompt),
            output=output or Columns(),
            sampling=params,
            seed=0,
            watch=watch or Watch(),
            max_context=1 << 20,
            image=image,
            kv_tokens=image.kv_tokens if image is not None else kv_tokens,
        )
        self.engine.submit(assignment)
        return (assignment.trajectory_id, epoch)

    def update(self, weights: Weights, *, max_lag: int = 0, in_place: bool = False) -> None:
        """These are live from now on; KV that the `max_lag` loads before them wrote may be gone on with."""
        self.loads.append(weights)
        reusable = frozenset(each.weights_id for each in self.loads[-max_lag - 1 :])
        self.engine.replace_weights(weights, reusable=reusable, in_place=in_place)
        self.audit()

    def step(self) -> list[WorkerEvent]:
        self.audit()
        events = self.engine.step()
        self.audit()
        self.events += events
        return events

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def run(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(MAX_STEPS):
            if self.engine.idle:
                return
            self.step()
        raise AssertionError(f"not idle after {MAX_STEPS} steps: {self.engine.stats}")

    def audit(self) -> None:
        if self._audited:
            self.engine.audit()

    def of(self, kind: type[WorkerEvent], name: str | None = None) -> list[WorkerEvent]:
        return [e for e in self.events if isinstance(e, kind) and name in (None, e.trajectory_id)]

    def parked(self, name: str) -> Parked:
        event = self.of(Parked, name)[-1]
        assert isinstance(event, Parked)
        return event

    def columns(self, name: str) -> Columns:
        """All that was sampled of a trajectory here, each token told once and in order."""
        columns, offset = Columns(), None
        for event in self.of(Sampled, name):
            assert isinstance(event, Sampled)
            assert offset in (None, event.offset)
            columns.extend(event.columns)
            offset = event.offset + len(event.columns)
        return columns

    def ids(self, name: str) -> list[int]:
        return list(self.columns(name).ids)
