"""The only worker is lost after weights that were sent once. A service of its own: others hold all CPUs."""

import os
import signal
from pathlib import Path

import pytest

import rollout
from rollout.errors import WeightsGoneError, WeightsUpdateError
from rollout.types import TrajectoryId
from tests.cluster.scene import controller, eventually, inside, make_kv_model, pids, settings
from tests.cluster.test_weights import KV, PROMPT, SAMPLING, other_client, output, roll_out, tensors
from tests.local_service import LocalService
from tests.tiny_models import make_tiny_llama


def test_a_service_that_nobody_can_give_the_live_weights_to_waits_for_an_update(
    tmp_path: Path, ray_cluster: None
) -> None:
    models = [make_kv_model(tmp_path / "0"), *(make_tiny_llama(tmp_path / str(s), seed=s, **KV) for s in (1, 2))]
    cold = LocalService(models[2], workers=1, kernels="torch", deterministic=True, chunk_tokens=32, kv_bytes=32 << 20)
    cold.submit("q", PROMPT, SAMPLING)
    truth = output(cold.run(1)[TrajectoryId("q/0")])
    cold.close()
    with rollout.start(settings(models[0], "alone", cluster={"workers": 1})) as service:
        with other_client(service, {"kind": "collective"}) as client:
            client.update_weights(tensors(models[1]), 1)
        service.submit([PROMPT], key=["p"], sampling=SAMPLING)
        before = pids(service)["worker-0"]
        os.kill(before, signal.SIGKILL)
        eventually(lambda: pids(service).get("worker-0", before) != before)
        eventually(lambda: inside(controller(service), lambda self: bool(self._core._fleet.workers)))
        assert service.next_groups(1, timeout_s=1.0) == []
        with pytest.raises(WeightsGoneError, match="nobody has the live weights, version 1"):
            service.reclaim_memory()
        with pytest.raises(WeightsUpdateError, match="got some tensors, allowed: all"):
            service.update_weights({}, 2, delta=True)
        service.update_weights(tensors(models[2]), 2)
        (trajectory,) = service.next_groups(1, timeout_s=120)[0].trajectories
        assert trajectory.error is None
        assert output(roll_out(service, "q")) == truth
