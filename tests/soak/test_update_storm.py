"""A hundred updates of the weights while trajectories run, are suspended and resume, and workers fail in the middle.

Truth is Hugging Face: with `recompute` everything that a version sampled was sampled on KV that this version wrote, so
the log-probability of each token is that of its version's model over all that was before it. Half-loaded weights, or KV
of others, would show there; the canary, which knows the weights_id of every slot, looks for the latter by itself, and
alone where stale KV is used.
"""

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import rollout
from rollout.client import Rollout
from rollout.errors import WeightsUpdateError
from rollout.model.weights import stream_safetensors
from rollout.reports import UpdateReport
from rollout.types import KVSpan, SamplingParams, Trajectory, TrajectoryId
from tests.cluster.scene import at_rest, audit, eventually, inside, pids, settings, workers
from tests.tiny_models import make_tiny_llama

logger = logging.getLogger(__name__)

UPDATES = 100
MODELS = 3
"""Version v has the weights of model v % MODELS."""
RUNNING = 12
"""Trajectories that are outstanding at any time."""
FAULTS = {20: "refused", 40: "killed in prepare", 60: "killed in commit", 80: "fails in commit"}
"""What goes wrong in which update."""
CLOSE = 2e-3
"""Of log-probabilities: fp32, in other orders."""
END_S = 900.0


class Storm:
    """One service and the driver's view of it."""

    def __init__(self, service: Rollout, models: list[Path], modes: list[str], seed: int) -> None:
        self._service = service
        self._models = models
        self._modes = modes
        self._random = random.Random(seed)
        self._submitted = 0
        self.taken: dict[TrajectoryId, Trajectory] = {}
        self.met: Counter[str] = Counter()

    def update(self, version: int) -> None:
        """As a trainer would; now and then something fails."""
        fault = FAULTS.get(version)
        weights = dict(stream_safetensors(self._models[version % MODELS]))
        before = self._service.stats().weights
        worker = f"worker-{version % 2}"
        if fault == "refused":
            name = next(iter(weights))
            with pytest.raises(WeightsUpdateError, match="nothing was changed"):
                self._service.update_weights(weights | {name: weights[name][:-1]}, version)
            assert self._service.stats().weights == before
        if fault in DAMAGE:
            eventually(lambda: worker in pids(self._service))
            inside(workers(self._service)[worker], DAMAGE[fault])
        report = self._service.update_weights(weights, version, mode=self._random.choice(self._modes))
        self._check(report, version, worker, fault)
        self.met[fault or "updates"] += 1

    def _check(self, report: UpdateReport, version: int, worker: str, fault: str | None) -> None:
        assert report.version == self._service.stats().weights.version == version
        assert set(report.workers) | set(report.fenced) <= {"worker-0", "worker-1"}
        if fault is not None and "commit" in fault:
            assert set(report.fenced) == {worker}, report
        if fault is None:
            assert not report.fenced, report

    def disturb(self) -> None:
        act = self._random.choice([self._abort, self._resume, self._refill, self._refill, self._take])
        act()
        self.met[act.__name__] += 1

    def _refill(self) -> None:
        while self._submitted - len(self.taken) < RUNNING:
            length = self._random.choice([10, 33, 64])
            prompt = [4 + self._random.randrange(300) for _ in range(length)]
            sampling = SamplingParams(max_new_tokens=self._random.choice([20, 90, 200]), ignore_eos=True)
            n = self._random.choice([1, 2])
            self._service.submit([prompt], n=n, sampling=sampling, key=f"{self._submitted}")
            self._submitted += n

    def _abort(self) -> None:
        keep = self._random.choice(["auto", "device", "host", "pool", "none"])
        then = self._random.choice(["hold", "requeue"])
        self._service.abort(self._some(), keep=keep, then=then, timeout_s=self._random.choice([0.0, 5.0]))

    def _resume(self) -> None:
        self._service.resume(self._some())

    def _take(self) -> None:
        for delivery in self._service.next_groups(4, timeout_s=0.1):
            self.taken |= {t.trajectory_id: t for t in delivery.trajectories}

    def _some(self) -> list[str]:
        live = inside(
            self._service.aio._controller, lambda self: [r.trajectory_id for r in self._core._groups.records()]
        )
        return self._random.sample(live, k=self._random.randint(0, len(live)))

    def finish(self) -> None:
        """Everything that was submitted is handed out."""
        deadline = time.monotonic() + END_S
        while len(self.taken) < self._submitted:
            assert time.monotonic() < deadline, (len(self.taken), self._submitted, self._service.stats())
            self._service.resume()
            self._take()


def _dies_in_prepare(self: Any) -> None:

    self._host.prepare_weights = lambda *_, **__: os._exit(1)


def _dies_in_commit(self: Any) -> None:

    from rollout.cluster import host

    write = host.write_weights

    def half(decoder: Any, tensors: Any) -> None:
        write(decoder, [next(iter(tensors))])
        os._exit(1)

    host.write_weights = half


def _fails_in_commit(self: Any) -> None:
    from rollout.cluster import host

    write = host.write_weights

    def half(decoder: Any, tensors: Any) -> None:
        write(decoder, [next(iter(tensors))])
        raise OSError("the memory is gone")

    host.write_weights = half


DAMAGE = {
    "killed in prepare": _dies_in_prepare,
    "killed in commit": _dies_in_commit,
    "fails in commit": _fails_in_commit,
}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("reuse", "modes"),
    [
        ({"kind": "same_weights"}, ["recompute", "suspend"]),
        ({"kind": "stale", "max_lag": 2}, ["in_place", "suspend", "recompute"]),
    ],
)
def test_a_hundred_updates_mix_nothing_and_lose_nothing(
    ray_cluster: None, tmp_path: Path, soak_seed: int, reuse: dict[str, Any], modes: list[str]
) -> None:
    models = [make_tiny_llama(tmp_path / str(seed), seed=seed) for seed in range(MODELS)]
    sections: Mapping[str, Mapping[str, Any]] = {
        "engine": {"canary": True, "deterministic": False, "kernels": "auto", "kv_bytes": "2MiB", "max_running": 6},
        "host": {"bytes": "1MiB", "write": {"kind": "write_through"}},
        "weights": {"kv_reuse": reuse},
    }
    with rollout.start(settings(models[0], "updates", **sections)) as service:
        storm = Storm(service, models, modes, soak_seed)
        for version in range(1, UPDATES + 1):
            for _ in range(4):
                storm.disturb()
            storm.update(version)
        storm.finish()
        logger.info("%s; %s", storm.met, service.stats().counters)
        eventually(lambda: at_rest(service))
        audit(service)
        assert service.stats().accounts.delivered == len(storm.taken) or service.stats().accounts.acknowledged
    check(models, storm.taken.values(), exact=reuse["kind"] == "same_weights")


def check(models: list[Path], trajectories: Any, *, exact: bool) -> None:
    """Every token has the log-probability of its version's model, if all KV is of that."""
    truths = [LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval() for model in models]
    versions: Counter[int] = Counter()
    for trajectory in trajectories:
        assert trajectory.error is None, trajectory.error
        at = len(trajectory.prompt_ids)
        ids = torch.tensor([[*trajectory.prompt_ids, *trajectory.output_ids]])
        assert trajectory.kv_spans[0].first == at
        for one, other in zip(trajectory.kv_spans, trajectory.kv_spans[1:], strict=False):
            assert one.stop == other.first
        assert trajectory.kv_spans[-1].stop == ids.shape[1]
        lags = {v - w for span, v in by_span(trajectory) for _, _, w in span.kv}
        assert lags <= ({0} if exact else {0, 1, 2}), (trajectory.kv_spans, trajectory.versions)
        index = 0
        for run in trajectory.versions:
            with torch.no_grad():
                logits = truths[run.version % MODELS](ids).logits[0].float()
            expected = torch.log_softmax(logits, dim=-1)
            for _ in range(run.tokens):
                token = trajectory.output_ids[index]
                assert not exact or abs(float(expected[at - 1, token]) - trajectory.logprobs[index]) < CLOSE, (
                    trajectory.trajectory_id,
                    index,
                    trajectory.versions,
                    trajectory.resumes,
                )
                at, index = at + 1, index + 1
            versions[run.version] += run.tokens
    assert len(versions) > UPDATES / 4, versions


def by_span(trajectory: Trajectory) -> list[tuple[KVSpan, int]]:
    """Each span with the version that sampled its tokens."""
    versions = [run.version for run in trajectory.versions for _ in range(run.tokens)]
    first = len(trajectory.prompt_ids)
    return [(span, versions[span.first - first]) for span in trajectory.kv_spans]
