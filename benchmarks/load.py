"""Decoding at full batch with and without moves of KV beside it."""

import itertools
import statistics
import time
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from benchmarks.checkout import SMOLLM2, require_model
from benchmarks.measure import percentile
from benchmarks.moves import TIMEOUT_S, Scene
from benchmarks.tracing import Mark
from rollout.config import Section
from rollout.errors import DeadlineError
from rollout.model.spec import read_spec

POLL_S = 0.05
WARM_STEPS = 10


class Load(Section):
    model: Path = SMOLLM2
    """What decodes; `make model` puts SmolLM2-135M there."""
    cpus: PositiveInt = 1
    """Cores, and threads, of the worker."""
    batch: PositiveInt = 32
    """Sequences in the decode batch."""
    steps: PositiveInt = 300
    """Decode steps with moves, and as many without."""
    every: PositiveInt = 20
    """Steps of a block; in every second block one export and one restore fall."""
    tokens: PositiveInt = 200
    """Prompt of each trajectory that is moved."""
    movers: PositiveInt = 4
    """Trajectories that take turns in the batch."""
    prompt_tokens: PositiveInt = 33
    """Of the others."""
    unmeasured_tokens: PositiveInt = 1000
    """What a trajectory may decode between the blocks; the pool has room for it."""

    def check(self) -> None:
        """Raises `ModelNotFoundError` if the model is not there."""
        require_model("load.model", self.model)


def measure_load(load: Load, ratios: dict[str, float]) -> dict[str, Any]:
    with Scene(_config(load)) as scene:
        return _Run(scene, load).measure(ratios)


def _config(load: Load) -> dict[str, Any]:
    spec = read_spec(load.model)
    token_bytes = 2 * spec.layers * spec.kv_heads * spec.head_dim * 2
    longest = load.tokens + 2 * load.steps + load.unmeasured_tokens
    return {
        "model": {"path": str(load.model)},
        "engine": {"max_running": load.batch + 1},
        "cluster": {"name": "bench-kv-load", "cpus_per_worker": load.cpus},
        "pool": {"budget_bytes": (load.movers + 1) * longest * token_bytes},
    }


class _Run:
    def __init__(self, scene: Scene, load: Load) -> None:
        self._scene = scene
        self._load = load
        self._steps: list[Mark] = []
        self._moved_bytes = 0
        self._moves = 0
        movers = []
        for seed in range(load.movers):
            movers.append(scene.begin(load.tokens, seed=seed))
            if seed:
                scene.client.abort([movers[-1]], keep="pool", then="hold")
        for seed in range(load.batch - 1):
            scene.begin(load.prompt_tokens, seed=load.movers + seed)
        self._inside = movers[0]
        self._outside = itertools.cycle([*movers[1:], movers[0]])

    def measure(self, ratios: dict[str, float]) -> dict[str, Any]:
        load = self._load
        self._block(WARM_STEPS, moving=False)
        self._swap()
        self._block(WARM_STEPS, moving=False)
        self._moves = self._moved_bytes = 0
        blocks: dict[bool, list[list[float]]] = {False: [], True: []}
        for index in range(-(-load.steps // load.every)):
            for moving in (False, True) if index % 2 == 0 else (True, False):
                blocks[moving].append(self._block(load.every, moving=moving))
        still, moved = (list(itertools.chain(*blocks[moving])) for moving in (False, True))
        pairs = [sum(with_moves) / sum(without) for without, with_moves in zip(*blocks.values(), strict=True)]
        ratios["decode_slowdown"] = sum(moved) / sum(still)
        return {
            "moves": self._moves,
            "bytes_per_move": self._moved_bytes // max(1, self._moves),
            "still": _summary(still),
            "moving": _summary(moved),
            "median_of_pairs": statistics.median(pairs),
            "pairs": [round(pair, 4) for pair in pairs],
        }

    def _block(self, length: int, *, moving: bool) -> list[float]:
        """Seconds from one step's end to the next one's, `length` times."""
        self._steps = []
        self._scene.marks()
        deadline = time.monotonic() + TIMEOUT_S
        while len(self._steps) <= length:
            time.sleep(POLL_S)
            self._look()
            if moving and len(self._steps) >= length // 2:
                self._swap()
                moving = False
            if time.monotonic() > deadline:
                raise DeadlineError(f"{len(self._steps)} of {length} steps within {TIMEOUT_S:g} s")
        ends = [step.end for step in self._steps[: length + 1]]
        return [after - before for before, after in itertools.pairwise(ends)]

    def _look(self) -> None:
        """Take in the steps that were made; those that sampled nothing do not count."""
        marks = self._scene.marks()
        sampled = sorted(mark.begin for mark in marks if mark.name == "sampled")
        steps = sorted((mark for mark in marks if mark.name == "step"), key=lambda mark: mark.begin)
        self._steps += [step for step in steps if any(step.begin <= begin <= step.end for begin in sampled)]

    def _swap(self) -> None:
        """Export the mover that is in the batch and restore the next one."""
        before = self._scene.client.stats().counters.exported_bytes
        leaving, self._inside = self._inside, next(self._outside)
        self._scene.forget(leaving)
        self._scene.client.resume([self._inside])
        self._scene.client.abort([leaving], keep="pool", then="hold")
        self._moves += 1
        self._moved_bytes += self._scene.client.stats().counters.exported_bytes - before


def _summary(seconds: list[float]) -> dict[str, float]:
    return {
        "steps": len(seconds),
        "total_s": round(sum(seconds), 3),
        "step_ms": round(1e3 * statistics.median(seconds), 2),
        "step_p99_ms": round(1e3 * percentile(seconds, 99), 2),
    }
