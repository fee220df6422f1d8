"""Waves of trajectories while workers and pools are killed, stopped and robbed of segments at random.

After every wave each trajectory equals its undisturbed run bit for bit, and nothing is left in pools or pages.
"""

import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError

import rollout
from rollout.client import Rollout
from rollout.types import TrajectoryId
from tests.cluster.scene import (
    SAMPLING,
    Outputs,
    at_rest,
    audit,
    collect,
    eventually,
    images,
    inside,
    make_kv_model,
    outputs,
    pids,
    pools,
    settings,
)

logger = logging.getLogger(__name__)

KINDS = 10
SAMPLES = 2
SHARE = 0.6
"""Of the whole duration; the property tests take the rest."""
WAVE_S = 600.0
"""No wave takes longer, or something hangs."""
PROMPTS = [
    [4 + (position * (7 + 4 * (kind % 4)) + kind) % 300 for position in range(24 + 9 * kind)] for kind in range(KINDS)
]
TOKENS = [40 + 29 * kind % 160 for kind in range(KINDS)]
"""Prompts of 24 … 105 tokens and as many different lengths of output."""


class Storm:
    """One service in trouble; all choices come from one seed, but for what processes make of it."""

    def __init__(self, service: Rollout, seed: int) -> None:
        self._service = service
        self._random = random.Random(seed)
        self.met: Counter[str] = Counter()

    def wave(self, number: int, truth: Outputs) -> None:
        """Submit some groups, disturb them until all are over, and compare."""
        kinds = self._random.sample(range(KINDS), k=self._random.randint(3, KINDS))
        for kind in kinds:
            submit(self._service, kind, f"{number}-{kind}")
        taken: dict[TrajectoryId, Any] = {}
        deadline = time.monotonic() + WAVE_S
        while len(taken) < len(kinds) * SAMPLES:
            assert time.monotonic() < deadline, (len(taken), self._service.stats())
            self._disturb()
            if self._random.random() < 0.5:
                self._service.resume()
            groups = self._service.next_groups(KINDS, timeout_s=self._random.choice([0.0, 0.05, 0.3]))
            taken |= {t.trajectory_id: t for group in groups for t in group.trajectories}
        for name, trajectory in taken.items():
            assert trajectory.error is None, trajectory.error
            source = name.partition("-")[2]
            assert (trajectory.output_ids, trajectory.logprobs) == truth[TrajectoryId(source)], (
                name,
                trajectory.resumes,
            )
        eventually(lambda: at_rest(self._service), within_s=WAVE_S)
        audit(self._service)

    def _disturb(self) -> None:
        name, act = self._random.choices(
            [
                ("nothing", lambda: None),
                ("abort", self._abort),
                ("resume", self._resume),
                ("kill worker", self._kill_worker),
                ("stop worker", self._stop_worker),
                ("drop segment", self._drop),
                ("damage segment", self._damage),
                ("kill pool", self._kill_pool),
            ],
            weights=[4, 6, 3, 2, 1, 2, 2, 0.3],
        )[0]
        if act() is not False:
            self.met[name] += 1

    def _some(self) -> list[str]:
        """Some of the trajectories and groups that may still be there."""
        live = inside(
            self._service.aio._controller, lambda self: [r.trajectory_id for r in self._core._groups.records()]
        )
        return self._random.sample(live, k=self._random.randint(0, len(live)))

    def _abort(self) -> None:
        self._service.abort(
            self._some(),
            keep=self._random.choice(["auto", "pool", "none"]),
            then=self._random.choice(["hold", "requeue"]),
            timeout_s=self._random.choice([0.0, 0.1, 5.0]),
        )

    def _resume(self) -> None:
        self._service.resume(self._some())

    def _kill_worker(self) -> bool:
        """Kill a worker that has got somewhere since it was killed last, unless something runs that lost two workers
        without a token in between: four would be the end of it."""
        stats = self._random.choice(self._service.stats().workers or [None])
        if stats is None or stats.engine.sampled_tokens < 30:
            return False
        losses = inside(self._service.aio._controller, lambda self: [r.losses for r in self._core._groups.records()])
        return max(losses, default=0) < 2 and send(stats.pid, signal.SIGKILL)

    def _stop_worker(self) -> bool:
        found = list(pids(self._service).values())
        if not found:
            return False
        pid = self._random.choice(found)
        stopped = send(pid, signal.SIGSTOP)
        threading.Event().wait(self._random.uniform(0.05, 0.5))
        send(pid, signal.SIGCONT)
        return stopped

    def _segment(self) -> str | None:
        stored = [run.segment for image in images(self._service).values() for run in image.runs]
        return self._random.choice(stored) if stored else None

    def _drop(self) -> bool:
        segment = self._segment()
        if segment is None:
            return False
        self._in_pool(lambda self: (self._ledger.drop(segment), self._let_go()))
        return True

    def _damage(self) -> bool:
        segment, bit = self._segment(), self._random.randrange(8)

        def flip(self: Any) -> None:
            import ray

            if segment in self._segments:
                manifest, ref = self._segments[segment]
                data = [page.copy() for page in ray.get(ref)]
                data[-1][-1] ^= 1 << bit
                self._segments[segment] = (manifest, ray.put(data))

        if segment is None:
            return False
        self._in_pool(flip)
        return True

    def _kill_pool(self) -> bool:
        pid = self._in_pool(lambda self: __import__("os").getpid())
        if pid is None:
            return False
        return send(pid, signal.SIGKILL)

    def _in_pool(self, run: Any) -> Any:
        """What `run` returns in the pool; None if it is being restarted."""
        try:
            return inside(pools(self._service)[0], run)
        except RayActorError:
            return None


def send(pid: int, number: signal.Signals) -> bool:
    """Whether the process was still there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def submit(service: Rollout, kind: int, key: str) -> None:
    service.submit([PROMPTS[kind]], n=SAMPLES, sampling=replace(SAMPLING, max_new_tokens=TOKENS[kind]), key=key)


@pytest.mark.soak
def test_a_storm_of_faults_changes_no_token(
    ray_cluster: None, tmp_path: Path, soak_seed: int, soak_duration_s: float
) -> None:
    model = make_kv_model(tmp_path / "kv")
    end = time.monotonic() + SHARE * soak_duration_s
    calm = settings(model, "calm")
    with rollout.start(calm) as service:
        for kind in range(KINDS):
            submit(service, kind, str(kind))
        truth = outputs(collect(service, KINDS))
    stormy = settings(
        model,
        "stormy",
        cluster={"max_restarts": 100_000},
        pool={"budget_bytes": "12MiB", "restore_timeout_s": 5, "export_timeout_s": 10},
        abort={"policies": [{"kind": "slice_budget", "tokens": 25}]},
    )
    with rollout.start(stormy) as service:
        storm, waves = Storm(service, soak_seed), 0
        while not waves or time.monotonic() < end:
            storm.wave(waves, truth)
            waves += 1
        logger.info("%d waves, %s, %s", waves, dict(storm.met), service.stats().counters)
