"""Updates of a running service: whole or not at all, while trajectories run, and on workers that come back.

Truth is an engine of this process that loaded the same weights from the start, deterministic like those of the workers.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rollout
from rollout.client import AsyncRollout, Rollout
from rollout.config import WeightsConfig
from rollout.errors import (
    DeadlineError,
    InvalidArgumentError,
    UnknownWorkerError,
    WeightsError,
    WeightsUpdateError,
)
from rollout.model.weights import stream_safetensors
from rollout.types import SamplingParams, Trajectory, TrajectoryId, Version, VersionRun
from tests.cluster.scene import at_rest, audit, controller, eventually, images, inside, make_kv_model, pids, settings
from tests.local_service import LocalService
from tests.tiny_models import make_tiny_llama

SAMPLING = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
PROMPT = [4 + position * 7 % 300 for position in range(50)]
LONG = SamplingParams(temperature=0.0, max_new_tokens=300, ignore_eos=True)
KV = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
KV |= {"num_key_value_heads": 8, "head_dim": 32}

Output = tuple[tuple[int, ...], tuple[float, ...]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three with the same architecture and other weights."""
    path = tmp_path_factory.mktemp("weights")
    first = make_kv_model(path / "0")
    return [first, *(make_tiny_llama(path / str(seed), seed=seed, **KV) for seed in (1, 2))]


@pytest.fixture(scope="module")
def truth(models: list[Path]) -> list[Output]:
    """What each model answers when nothing else was ever loaded."""
    outputs: list[Output] = []
    for model in models:
        alone = LocalService(model, workers=1, kernels="torch", deterministic=True, chunk_tokens=32, kv_bytes=32 << 20)
        alone.submit("p", PROMPT, SAMPLING)
        outputs.append(output(alone.run(1)[TrajectoryId("p/0")]))
        alone.close()
    assert len({ids for ids, _ in outputs}) == len(models)
    return outputs


@pytest.fixture(scope="module")
def updated(models: list[Path], ray_cluster: None) -> Iterator[Rollout]:
    host = {"bytes": "16MiB", "write": {"kind": "write_through"}, "load_back_tokens": 0}
    with rollout.start(settings(models[0], "updated", host=host)) as service:
        yield service


@pytest.fixture
def service(updated: Rollout, models: list[Path]) -> Iterator[Rollout]:
    """With the weights of the first model, as version 0."""
    updated.update_weights(tensors(models[0]), 0)
    yield updated
    updated.unpause()  # a test may have ended before it did
    updated.abort(keep="none", then="finish")
    updated.next_groups(100, timeout_s=0)
    eventually(lambda: at_rest(updated))
    audit(updated)


def tensors(model: Path) -> dict[str, Tensor]:
    return dict(stream_safetensors(model))


def roll_out(service: Rollout, key: str, sampling: SamplingParams = SAMPLING, **options: Any) -> Trajectory:
    service.submit([PROMPT], key=[key], sampling=sampling, **options)
    (delivery,) = service.next_groups(1, timeout_s=120)
    return delivery.trajectories[0]


def output(trajectory: Trajectory) -> Output:
    return trajectory.output_ids, trajectory.logprobs


def sampled(service: Rollout, t: TrajectoryId, tokens: int) -> None:
    """Wait until the controller knows so many tokens of it."""

    def known() -> bool:
        return inside(controller(service), lambda self: len(self._core._groups.get(t).columns)) >= tokens

    eventually(known)


@pytest.mark.parametrize("how", ["tensors", "directory"])
def test_after_an_update_nothing_of_the_old_weights_is_used_anywhere(
    service: Rollout, models: list[Path], truth: list[Output], how: str
) -> None:
    """Case D1: in the tree, on the host, in the pool."""
    before = roll_out(service, "before")
    assert output(before) == truth[0]
    service.submit([PROMPT], key=["kept"], sampling=LONG)
    sampled(service, TrajectoryId("kept/0"), 100)
    service.abort("kept", keep="pool")
    report = service.update_weights(tensors(models[1]) if how == "tensors" else models[1], 7)
    assert (report.version, report.previous, report.fenced, report.rolled_back) == (7, 0, {}, False)
    assert report.workers == ("worker-0", "worker-1")
    assert report.nbytes == sum(t.nbytes for t in tensors(models[1]).values())
    after = roll_out(service, "after")
    assert output(after) == truth[1]
    assert after.versions == (VersionRun(version=Version(7), tokens=40),)
    eventually(lambda: sum(pool.stored for pool in service.stats().pools) == 0)
    service.resume("kept")
    (kept,) = service.next_groups(1, timeout_s=120)[0].trajectories
    (resume,) = kept.resumes
    assert (resume.restored_tokens, resume.loaded_tokens) == (0, 0)
    assert resume.recomputed_tokens >= 100
    assert [run.version for run in kept.versions] == [0, 7]
    (old, new) = kept.kv_spans
    assert old.kv == ((0, len(PROMPT), 0),)
    assert new.kv == ((0, new.first, 7),)
    again = service.update_weights(tensors(models[0]), 7)
    assert again.rolled_back is False
    assert output(roll_out(service, "same label, other weights")) == truth[0]
    back = service.update_weights(tensors(models[1]), 3)
    assert back.rolled_back
    assert output(roll_out(service, "rolled back")) == truth[1]


def test_what_runs_is_computed_again_with_the_new_weights_and_goes_on(
    service: Rollout, models: list[Path], truth: list[Output]
) -> None:
    service.submit([PROMPT], key=["r"], sampling=LONG)
    sampled(service, TrajectoryId("r/0"), 20)
    service.update_weights(tensors(models[1]), 1)
    (running,) = service.next_groups(1, timeout_s=120)[0].trajectories
    old, new = running.versions
    assert (old.version, new.version, old.tokens + new.tokens) == (0, 1, 300)
    assert running.output_ids[: min(40, old.tokens)] == truth[0][0][: min(40, old.tokens)]
    assert [span.kv for span in running.kv_spans] == [((0, 50, 0),), ((0, 50 + old.tokens, 1),)]
    assert running.suspensions == 0


@pytest.mark.parametrize("mode", ["suspend", "finish"])
def test_what_runs_leaves_before_the_update_if_the_mode_says_so(
    service: Rollout, models: list[Path], mode: str
) -> None:
    service.submit([PROMPT], n=6, key=["r"], sampling=LONG)
    sampled(service, TrajectoryId("r/0"), 20)
    service.update_weights(tensors(models[1]), 1, mode=mode)
    (delivery,) = service.next_groups(1, timeout_s=240)
    versions = [[run.version for run in trajectory.versions] for trajectory in delivery.trajectories]
    if mode == "finish":
        assert {tuple(each) for each in versions} <= {(0,), (1,)}
        assert [0] in versions
    else:
        assert [0, 1] in versions
        assert all(t.suspensions == len(set(v)) - 1 for t, v in zip(delivery.trajectories, versions, strict=True))


def test_a_refused_update_changes_nothing_and_says_why_for_each_worker(
    service: Rollout, models: list[Path], truth: list[Output]
) -> None:
    wrong = tensors(models[1])
    name = next(name for name in wrong if name.endswith("down_proj.weight"))
    for bad, what in (
        ({**wrong, name: wrong[name][:-1]}, "of another shape or dtype"),
        ({key: value for key, value in wrong.items() if key != name}, "missing"),
        ({**wrong, "more": torch.zeros(3)}, "unexpected"),
    ):
        with pytest.raises(WeightsUpdateError, match=rf"nothing was changed: worker-0.*{what}.*worker-1.*{what}"):
            service.update_weights(bad, 1)
    with pytest.raises(WeightsUpdateError, match="nothing was changed"):
        service.update_weights(models[1] / "nowhere", 1)
    with pytest.raises(InvalidArgumentError, match="mode: got 'now', allowed: recompute"):
        service.update_weights(wrong, 1, mode="now")
    with pytest.raises(InvalidArgumentError, match="in_place, which needs"):
        service.update_weights(wrong, 1, mode="in_place")
    with pytest.raises(WeightsError, match="source: got int"):
        service.update_weights(5, 1)  # type: ignore[arg-type]
    trajectory = roll_out(service, "p")
    assert output(trajectory) == truth[0]
    assert trajectory.versions == (VersionRun(version=Version(0), tokens=40),)


def test_a_delta_replaces_what_it_names_and_a_worker_that_comes_back_has_it_too(
    service: Rollout, models: list[Path], truth: list[Output]
) -> None:
    """Case D6: it serves nothing until it holds the live version."""
    service.update_weights(tensors(models[2]), 1)
    changed = {name: tensor for name, tensor in tensors(models[1]).items() if "layers.0" not in name}
    service.update_weights(changed, 2, delta=True)
    rest = {name: tensor for name, tensor in tensors(models[1]).items() if "layers.0" in name}
    service.update_weights(rest, 3, delta=True)
    assert output(roll_out(service, "p")) == truth[1]
    for worker in ("worker-0", "worker-1"):
        before = pids(service)[worker]
        os.kill(before, signal.SIGKILL)
        eventually(lambda worker=worker, before=before: pids(service).get(worker, before) != before)
        service.submit([PROMPT], n=8, key=[worker], sampling=SAMPLING)
        (delivery,) = service.next_groups(1, timeout_s=240)
        assert {output(t) for t in delivery.trajectories} == {truth[1]}
        assert {run.version for t in delivery.trajectories for run in t.versions} == {3}
    weights = {stats.weights for stats in service.stats().workers}
    assert weights == {service.stats().weights}


@pytest.mark.parametrize("staged", [True, False])
def test_weights_are_broadcast_and_a_worker_that_comes_back_has_them_from_another(
    service: Rollout, models: list[Path], truth: list[Output], staged: bool
) -> None:
    with other_client(service, {"kind": "collective", "staged": staged, "bucket_bytes": 100_000}) as client:
        report = client.update_weights(tensors(models[1]), 1)
        assert (report.workers, report.fenced) == (("worker-0", "worker-1"), {})
        assert output(roll_out(service, "p")) == truth[1]
        wrong = {name: tensor for name, tensor in tensors(models[2]).items() if "layers.1" not in name}
        with pytest.raises(WeightsUpdateError, match=r"nothing was changed: worker-0.*missing"):
            client.update_weights(wrong, 2)
        client.update_weights(wrong, 3, delta=True)
    if not staged:
        return
    before = pids(service)["worker-0"]
    os.kill(before, signal.SIGKILL)
    eventually(lambda: pids(service).get("worker-0", before) != before)
    eventually(lambda: {stats.weights.version for stats in service.stats().workers} == {3})
    service.submit([PROMPT], n=8, key=["q"], sampling=SAMPLING)
    (delivery,) = service.next_groups(1, timeout_s=240)
    assert {worker for t in delivery.trajectories for worker in t.workers} == {"worker-0", "worker-1"}
    assert len({output(t) for t in delivery.trajectories}) == 1
    service.update_weights({name: t for name, t in tensors(models[2]).items() if "layers.1" in name}, 4, delta=True)
    assert output(roll_out(service, "r")) == truth[2]


def test_tensors_go_by_a_directory_of_their_own_that_goes_with_the_next(
    service: Rollout, models: list[Path], truth: list[Output], tmp_path: Path
) -> None:
    with other_client(service, {"kind": "disk", "path": tmp_path}) as client:
        client.update_weights(tensors(models[1]), 1)
        assert output(roll_out(service, "p")) == truth[1]
        changed = {name: tensor for name, tensor in tensors(models[2]).items() if "layers.0" not in name}
        client.update_weights(changed, 2, delta=True)
        with pytest.raises(WeightsUpdateError, match="missing"):
            client.update_weights(changed, 3)
        assert len([path for path in tmp_path.iterdir() if path.is_symlink()]) == 2
        client.update_weights({n: t for n, t in tensors(models[2]).items() if n not in changed}, 3, delta=True)
        assert output(roll_out(service, "q")) == truth[2]
        client.update_weights(tensors(models[1]), 4)
        assert len(list(tmp_path.iterdir())) == 2, "a link, and what it leads to"
    with (
        other_client(service, {"kind": "disk"}) as client,
        pytest.raises(WeightsError, match=r"got tensors, allowed: a directory, or set weights\.transport\.path"),
    ):
        client.update_weights(tensors(models[1]), 5)


def test_a_directory_that_has_changed_is_not_taken_for_what_it_was(
    service: Rollout, models: list[Path], truth: list[Output], tmp_path: Path
) -> None:
    latest = tmp_path / "latest"
    latest.symlink_to(models[1])
    service.update_weights(latest, 1)
    latest.unlink()
    latest.symlink_to(models[2])
    before = pids(service)["worker-0"]
    os.kill(before, signal.SIGKILL)
    eventually(lambda: pids(service).get("worker-0", before) != before)
    service.submit([PROMPT], n=8, key=["p"], sampling=SAMPLING)
    (delivery,) = service.next_groups(1, timeout_s=240)
    assert {output(t) for t in delivery.trajectories} == {truth[1]}
    eventually(lambda: {stats.weights.version for stats in service.stats().workers} == {1})
    service.submit([PROMPT], n=8, key=["q"], sampling=SAMPLING)
    (delivery,) = service.next_groups(1, timeout_s=240)
    assert {worker for t in delivery.trajectories for worker in t.workers} == {"worker-0", "worker-1"}
    assert {output(t) for t in delivery.trajectories} == {truth[1]}


def test_a_broadcast_whose_sender_fails_changes_nothing(
    service: Rollout, models: list[Path], truth: list[Output]
) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield next(iter(tensors(models[1]).items()))
        raise ZeroDivisionError("the trainer fell over")

    with (
        other_client(service, {"kind": "collective", "bucket_bytes": 1000}) as client,
        pytest.raises(WeightsUpdateError, match="nothing was changed: worker-0"),
    ):
        client.update_weights(broken(), 1, timeout_s=20.0)
    assert output(roll_out(service, "p")) == truth[0]


def resident(service: Rollout) -> dict[str, int]:
    """Bytes of each worker process that are its own."""
    pages = {worker: Path(f"/proc/{pid}/statm").read_text().split() for worker, pid in pids(service).items()}
    return {
        worker: (int(size) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
        for worker, (_, size, shared, *_) in pages.items()
    }


def test_memory_is_given_back_and_taken_again_and_what_was_in_the_pool_goes_on(
    service: Rollout, models: list[Path], truth: list[Output]
) -> None:
    service.submit([PROMPT], key=["p"], sampling=SAMPLING)
    sampled(service, TrajectoryId("p/0"), 5)
    before = resident(service)
    report = service.release_memory()
    given = {worker: before[worker] - left for worker, left in resident(service).items()}
    assert set(report.nbytes) == {"worker-0", "worker-1"}
    for worker, nbytes in report.nbytes.items():
        assert nbytes > 48 << 20, "KV of 32 MiB on the device and 16 MiB on the host, and the weights"
        assert given[worker] > 0.7 * (nbytes - (48 << 20)), (given, report)
    assert report.suspended in ((), ("p/0",))
    assert service.next_groups(1, timeout_s=1.0) == [] or not report.suspended
    service.reclaim_memory("kv")
    assert service.next_groups(1, timeout_s=1.0) == [] or not report.suspended
    service.reclaim_memory("weights")
    if report.suspended:
        (trajectory,) = service.next_groups(1, timeout_s=120)[0].trajectories
        assert output(trajectory) == truth[0]
        assert [resume.recomputed_tokens for resume in trajectory.resumes] == [0]
    assert output(roll_out(service, "q")) == truth[0]
    service.release_memory("weights")
    with pytest.raises(WeightsUpdateError, match="got some tensors, allowed: all"):
        service.update_weights(dict([next(iter(tensors(models[1]).items()))]), 1, delta=True)
    service.update_weights(tensors(models[1]), 1)
    assert output(roll_out(service, "r")) == truth[1]


def test_other_workers_go_on_while_one_has_given_its_memory_back(service: Rollout, truth: list[Output]) -> None:
    report = service.release_memory(workers=["worker-1"])
    assert set(report.nbytes) == {"worker-1"}
    service.submit([PROMPT], n=6, key=["p"], sampling=SAMPLING)
    (delivery,) = service.next_groups(1, timeout_s=120)
    assert {(output(t), t.workers[-1]) for t in delivery.trajectories} == {(truth[0], "worker-0")}
    before = pids(service)["worker-1"]
    os.kill(before, signal.SIGKILL)
    eventually(lambda: pids(service).get("worker-1", before) != before)
    service.reclaim_memory()
    service.submit([PROMPT], n=8, key=["q"], sampling=SAMPLING)
    (delivery,) = service.next_groups(1, timeout_s=120)
    assert {output(t) for t in delivery.trajectories} == {truth[0]}
    assert {t.workers[-1] for t in delivery.trajectories} == {"worker-0", "worker-1"}
    with pytest.raises(UnknownWorkerError, match="workers: got worker-7, allowed: some of worker-0, worker-1"):
        service.release_memory(workers=["worker-7"])
    with pytest.raises(InvalidArgumentError, match="what: got 'disk', allowed: kv, weights"):
        service.release_memory("disk")


def test_a_flush_says_what_it_dropped_in_each_tier(service: Rollout, truth: list[Output]) -> None:
    service.submit([PROMPT], key=["p"], sampling=LONG)
    sampled(service, TrajectoryId("p/0"), 50)
    service.abort("p", keep="pool")
    roll_out(service, "q")
    eventually(lambda: TrajectoryId("p/0") in images(service))
    stored = sum(pool.stored for pool in service.stats().pools)
    report = service.flush()
    assert report.pool_bytes == stored > 0
    assert report.device_bytes > 0
    assert report.host_bytes > 0
    assert all(stats.engine.device.tree == stats.engine.host.tree == 0 for stats in service.stats().workers)
    service.resume("p")
    (trajectory,) = service.next_groups(1, timeout_s=120)[0].trajectories
    assert trajectory.resumes[0].recomputed_tokens >= 50


@contextlib.contextmanager
def other_client(service: Rollout, transport: dict[str, Any]) -> Iterator[Rollout]:
    """A guest that sends weights in another way."""
    aio = service.aio
    weights = WeightsConfig.model_validate({"transport": transport})
    description = inside(controller(service), lambda self: self._description)
    description = replace(description, config=aio.config.model_copy(update={"weights": weights}))
    with Rollout(AsyncRollout(controller(service), description, key_prefix="guest-", on_close=None)) as client:
        yield client


def test_a_paused_service_is_updated_and_goes_on_only_when_it_is_told_to(
    service: Rollout, models: list[Path], truth: list[Output]
) -> None:
    """Case D5."""
    service.submit([PROMPT], key=["p"], sampling=LONG)
    sampled(service, TrajectoryId("p/0"), 20)
    service.pause()
    updating = threading.Thread(target=service.update_weights, args=(tensors(models[1]), 1))
    updating.start()
    updating.join(timeout=60)
    assert not updating.is_alive()
    assert service.next_groups(1, timeout_s=1.0) == []
    # What was sampled before the pause may be told late.
    assert inside(controller(service), lambda self: set(self._core._groups.get("p/0").columns.versions)) == {0}
    service.unpause()
    (trajectory,) = service.next_groups(1, timeout_s=120)[0].trajectories
    assert [run.version for run in trajectory.versions] == [0, 1]


def test_updates_are_done_one_after_the_other(service: Rollout, models: list[Path], truth: list[Output]) -> None:
    weights = [tensors(model) for model in models]
    updates = [
        threading.Thread(target=service.update_weights, args=(weights[1 + version % 2], version))
        for version in range(1, 7)
    ]
    for update in updates:
        update.start()
    for update in updates:
        update.join(timeout=120)
    live = service.stats().weights.version
    assert output(roll_out(service, "p")) == truth[1 + live % 2]
    service.submit([PROMPT], key=["q"], exact_version=live)
    (delivery,) = service.next_groups(1, timeout_s=120)
    assert delivery.version == live


def test_an_update_that_a_stuck_worker_does_not_answer_times_out_and_names_it(
    service: Rollout, models: list[Path], truth: list[Output]
) -> None:
    stuck = pids(service)["worker-1"]
    os.kill(stuck, signal.SIGSTOP)
    try:
        with pytest.raises((WeightsUpdateError, DeadlineError), match="worker-1"):
            service.update_weights(tensors(models[1]), 1, timeout_s=3.0)
    finally:
        os.kill(stuck, signal.SIGCONT)
    assert output(roll_out(service, "p")) == truth[0]


def test_trajectories_wait_for_the_version_that_they_ask_for(service: Rollout, models: list[Path]) -> None:
    before = service.stats().staleness.tokens
    service.submit([PROMPT], key=["later"], sampling=SAMPLING, min_version=2)
    assert service.next_groups(1, timeout_s=1.0) == []
    service.update_weights(tensors(models[1]), 1)
    assert service.next_groups(1, timeout_s=1.0) == []
    service.update_weights(tensors(models[2]), 2)
    (trajectory,) = service.next_groups(1, timeout_s=120)[0].trajectories
    assert trajectory.versions == (VersionRun(version=Version(2), tokens=40),)
    with pytest.raises(rollout.errors.UnsatisfiableVersionError, match="exact_version: got 1, allowed: 2"):
        service.submit([PROMPT], key=["never"], exact_version=1)
    after = service.stats().staleness.tokens
    assert {lag: tokens - before.get(lag, 0) for lag, tokens in after.items() if tokens != before.get(lag)} == {0: 40}
