"""A service on two nodes whose pools are asked for more than their stores could hold. Run by `test_two_nodes`.

Ray knows one cluster a process, so this is a program: `python -m tests.cluster.two_nodes MODEL` prints what
was seen as one line of JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster

import rollout
from rollout.client import Rollout
from rollout.types import SamplingParams, Trajectory, TrajectoryId
from tests.cluster.scene import collect, eventually, outputs

STORE_BYTES = 160 << 20
BUCKET_BYTES = 8 << 20
GROUPS = 24
PROMPTS = [[4 + (number * 31 + position * 7) % 300 for position in range(60)] for number in range(GROUPS)]
SAMPLING = SamplingParams(max_new_tokens=24, ignore_eos=True, seed=5)

CONFIG: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "engine": {
        "max_running": 4,
        "deterministic": True,
        "chunk_tokens": 32,
        "kv_bytes": "96MiB",
        "max_context_tokens": 96,
    },
    "cluster": {"workers": 2, "health_interval_s": 0.2, "start_timeout_s": 60},
    "pool": {"budget_bytes": "22MiB", "reserve_bytes": 2 * BUCKET_BYTES, "warm_bytes": "4MiB"},
    "resume": {"prefer": "other"},
}


def spilled() -> list[str]:
    """What the nodes' raylets logged of spilling (with RAY_verbose_spill_logs=1: all of it)."""
    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    lines = [line for log in logs.glob("raylet*.out") for line in log.read_text(errors="replace").splitlines()]
    return [line for line in lines if "Spilled" in line]


def submit(service: Rollout) -> None:
    service.submit(PROMPTS, sampling=SAMPLING, key=[f"g{number}" for number in range(GROUPS)])


def disturbed(service: Rollout) -> dict[TrajectoryId, Trajectory]:
    """Run everything, suspending it all the time, while weights would be on their way through the same stores."""
    total = service.stats().counters.tokens + GROUPS * SAMPLING.max_new_tokens
    submit(service)
    buckets: list[Any] = []
    while (start := service.stats().counters.tokens) < total:
        buckets = [*buckets[-1:], ray.put(np.zeros(BUCKET_BYTES, dtype=np.uint8))]
        service.abort(keep="pool", then="hold")
        for pool in service.stats().pools:
            assert pool.stored + pool.reserved + pool.still_read <= pool.budget, pool
        service.resume()
        enough = min(start + 80, total)
        eventually(lambda enough=enough: service.stats().counters.tokens >= enough)
    return collect(service, GROUPS)


def main(model: str) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE_BYTES})
    second = cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    seen: dict[str, Any] = {}
    ray.init(address=cluster.address, namespace="rollout", log_to_driver=False, logging_level="error")
    config = CONFIG | {"model": {"path": model, "dtype": "float32"}}
    with rollout.start(config) as service:
        submit(service)
        truth = outputs(collect(service, GROUPS))
        before = service.stats()
        seen["nodes"] = len({worker.node for worker in before.workers})
        seen["equal"] = outputs(disturbed(service)) == truth
        after = service.stats()
        for name in ("suspensions", "resumed_elsewhere", "restored_tokens", "exported_bytes", "restore_failures"):
            seen[name] = getattr(after.counters, name) - getattr(before.counters, name)
        seen["refused"] = [pool.refused for pool in after.pools]
        seen["spilled"] = spilled()
        submit(service)
        eventually(lambda: service.stats().counters.tokens >= after.counters.tokens + 200)
        service.abort(keep="pool", then="hold")
        cluster.remove_node(second, allow_graceful=False)
        service.resume()
        seen["equal_without_a_node"] = outputs(collect(service, GROUPS)) == truth
        seen["workers_lost"] = service.stats().counters.workers_lost
    full = [ray.put(np.zeros(BUCKET_BYTES, dtype=np.uint8)) for _ in range(STORE_BYTES // BUCKET_BYTES)]
    seen["spilled_when_full"] = len(eventually(spilled))
    del full
    sys.stdout.write(json.dumps(seen))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
