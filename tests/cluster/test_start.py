"""Starting, finding and ending services: what cannot work is refused in one line, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

import rollout
from rollout.client import Rollout
from rollout.cluster import launch, placement
from rollout.errors import (
    ClusterTooSmallError,
    ConfigError,
    DuplicateKeyError,
    ModelNotFoundError,
    PromptTooLongError,
    RolloutError,
    ServiceClosedError,
    ServiceError,
    ServiceNotFoundError,
)
from rollout.model.weights import stream_safetensors
from tests.cluster.scene import (
    PROMPTS,
    SAMPLING,
    Outputs,
    collect,
    controller,
    eventually,
    inside,
    outputs,
    pids,
    sampled,
    settings,
    submit,
)


def alive() -> set[str]:
    """Actors that run or may run again."""
    return {name for name, actor in ray._private.state.actors().items() if actor["State"] != "DEAD"}


def placements() -> set[str]:
    return {name for name, group in placement_group_table().items() if group["state"] != "REMOVED"}


@pytest.fixture
def nothing_left(ray_cluster: None) -> Iterator[None]:
    """Afterwards there are no actors or placement groups but those of before, of which some may be ending."""
    actors, groups = alive(), placements()
    yield
    eventually(lambda: alive() <= actors and placements() <= groups)


def refused(config: Mapping[str, Any], kind: type[RolloutError]) -> str:
    """What `start` says; one line."""
    with pytest.raises(kind) as caught:
        rollout.start(config)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"workers": 5}, "5 workers of 1 CPU need 5 CPU, the Ray cluster has 4"),
        ({"workers": 2, "cpus_per_worker": 3}, "2 workers of 3 CPU need 6 CPU, the Ray cluster has 4"),
        ({"workers": 1, "gpus_per_worker": 1}, "1 workers of 1 GPU need 1 GPU, the Ray cluster has 0"),
    ],
)
def test_more_than_the_cluster_has_is_refused_at_once(
    nothing_left: None, kv_model: Path, monkeypatch: pytest.MonkeyPatch, cluster: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(placement, "placement_group", None)  # no room is asked for, let alone waited for
    assert message in refused(settings(kv_model, "large", cluster=cluster), ClusterTooSmallError)


def test_cpus_that_others_use_are_waited_for_in_bounded_time(
    nothing_left: None, kv_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "PLACEMENT_S", 1.0)
    taken = placement_group([{"CPU": 1.0}])
    assert taken.wait(180)
    try:
        message = refused(settings(kv_model, "late", cluster={"workers": 4}), ClusterTooSmallError)
    finally:
        remove_placement_group(taken)
    assert "4 workers need 4 CPU" in message
    assert "of 4 CPU are free" in message
    assert "within 1 s" in message


class FailingRay:
    """Starts after so many failures."""

    def __init__(self, failures: int, error: str = "The current node timed out during startup.") -> None:
        self.left = failures
        self.error = error

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        self.left -= 1
        if self.left >= 0:
            raise Exception(self.error)  # of this kind, in Ray


def test_ray_that_does_not_start_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "ray", slow := FailingRay(2))
    assert launch._join_ray(None, timeout_s=600)
    assert slow.left == -1


def test_ray_that_never_starts_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "ray", FailingRay(10**9))
    with pytest.raises(ServiceError, match=r"started or joined on this machine: Exception: .*timed out during startup"):
        launch._join_ray(None, timeout_s=0.05)


def test_ray_that_refuses_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "ray", other := FailingRay(2, "Version mismatch: the cluster was started with"))
    with pytest.raises(ServiceError, match="started or joined at auto: Exception: Version mismatch"):
        launch._join_ray("auto", timeout_s=600)
    assert other.left == 1


def test_a_model_that_is_not_there_is_refused_before_ray_is_asked(nothing_left: None, tmp_path: Path) -> None:
    assert "nowhere" in refused(settings(tmp_path / "nowhere", "lost"), ModelNotFoundError)


def test_what_a_worker_finds_wrong_is_raised_as_it_is(nothing_left: None, kv_model: Path) -> None:
    config = settings(kv_model, "small", engine={"kv_bytes": 1000}, cluster={"workers": 1})
    assert refused(config, ConfigError).startswith("engine.kv_bytes: got 1000, allowed: at least two pages of 131072")


def test_a_budget_that_would_make_ray_spill_is_refused_with_the_largest_that_would_not(
    nothing_left: None, kv_model: Path
) -> None:
    pool = {"budget_bytes": 350 << 20, "reserve_bytes": 10 << 20, "warm_bytes": 8 << 20}
    message = refused(settings(kv_model, "wide", cluster={"workers": 1}, pool=pool), ConfigError)
    store = int(ray.cluster_resources()["object_store_memory"])
    weights = sum(tensor.nbytes for _, tensor in stream_safetensors(kv_model))
    most = int(0.75 * store) - (10 << 20) - (8 << 20) - 2 * weights - (64 << 20)
    assert f"got {350 << 20}, allowed: at most {most} with the object store of {store} bytes" in message


def test_a_name_is_given_once(shared: Rollout, kv_model: Path) -> None:
    before = alive()
    message = refused(settings(kv_model, "shared", cluster={"workers": 1}), ConfigError)
    assert "'shared' runs in this Ray cluster already" in message
    assert alive() <= before


def test_a_service_that_is_closed_leaves_nothing_and_says_so_to_everybody(nothing_left: None, kv_model: Path) -> None:
    service = rollout.start(settings(kv_model, "brief", cluster={"workers": 1}))
    guest = rollout.connect("brief")
    (pid,) = pids(service).values()
    os.kill(pid, signal.SIGSTOP)  # so that nothing finishes
    submit(service)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(client.next_groups, 1, timeout_s=600.0) for client in (service, guest)]
        eventually(lambda: inside(controller(service), lambda self: len(self._changed._waiters)) == 2)
        service.close()
        for call in waiting:
            assert isinstance(call.exception(timeout=180.0), ServiceClosedError)
    for client in (service, guest):
        with pytest.raises(ServiceClosedError):
            client.stats()
        with pytest.raises(ServiceClosedError):
            submit(client)
        client.close()
        client.close()
    with pytest.raises(ServiceNotFoundError, match="no service named 'brief' runs"):
        rollout.connect("brief")
    eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_a_service_whose_controller_is_killed_says_that_it_is_closed(nothing_left: None, kv_model: Path) -> None:
    with rollout.start(settings(kv_model, "headless", cluster={"workers": 1})) as service:
        pid = inside(controller(service), lambda self: __import__("os").getpid())
        submit(service)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ServiceClosedError):
            service.next_groups(1, timeout_s=600.0)


NO_CLUSTER = """
import rollout
from rollout.errors import ConfigError, ServiceNotFoundError
try:
    rollout.connect("shared", "127.0.0.1:1")
except ServiceNotFoundError as error:
    assert "no Ray cluster runs at 127.0.0.1:1" in str(error), error
    try:
        rollout.start({"model": {"path": MODEL}, "cluster": {"address": "127.0.0.1:1"}})
    except ConfigError as error:
        print("refused:", error)
"""


def test_an_address_where_no_cluster_is_is_refused(kv_model: Path) -> None:
    ran = python(NO_CLUSTER.replace("MODEL", repr(str(kv_model))))
    assert ran.startswith("refused: cluster.address: no Ray cluster runs at 127.0.0.1:1: ")


def python(program: str, *args: str) -> str:
    """The last line that a program prints in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-c", program, *args],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()[-1]


def test_a_guest_that_leaves_does_not_end_the_service(service: Rollout, truth: Outputs) -> None:
    with rollout.connect("shared") as guest:
        submit(guest)
        sampled(guest, 20)
    with pytest.raises(ServiceClosedError, match="this client was closed"):
        guest.stats()
    assert outputs(collect(service)) == truth


GUEST = """
import json, sys
import rollout
from rollout.types import SamplingParams
address, prompts = sys.argv[1], json.loads(sys.argv[2])
with rollout.connect("shared", address) as guest:
    groups = guest.submit(prompts, sampling=SamplingParams(max_new_tokens=160, ignore_eos=True, seed=11))
    taken = []
    while len(taken) < len(groups):
        taken += guest.next_groups(len(groups), timeout_s=600)
    found = {delivery.group_id: delivery.trajectories[0] for delivery in taken}
    print(json.dumps([(found[group].output_ids, found[group].logprobs) for group in groups]))
"""


def test_another_process_finds_the_service_and_uses_it(service: Rollout, truth: Outputs) -> None:
    address = ray.get_runtime_context().gcs_address
    ran = python(GUEST, address, json.dumps(PROMPTS))
    got = [(tuple(ids), tuple(logprobs)) for ids, logprobs in json.loads(ran)]
    assert got == [truth["ann/0"], truth["bob/0"]]
    submit(service)
    assert outputs(collect(service)) == truth


def test_a_wrong_request_is_refused_as_itself_and_disturbs_nothing(service: Rollout, truth: Outputs) -> None:
    submit(service)
    with pytest.raises(DuplicateKeyError, match="'bob'"):
        service.submit(PROMPTS, sampling=SAMPLING, key=["cid", "bob"])
    with pytest.raises(PromptTooLongError, match=r"600 tokens, allowed: fewer than the context of 512"):
        service.submit([[5] * 600], sampling=SAMPLING)
    assert outputs(collect(service)) == truth
    assert service.next_groups(1, timeout_s=0.0) == []  # nothing of a refused call was queued


def test_with_no_work_left_a_wait_for_groups_ends_at_once(service: Rollout) -> None:
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(service.next_groups, 3, timeout_s=600.0).result(timeout=180.0) == []
