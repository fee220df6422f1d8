"""A service on two nodes whose pools are asked for more than their stores can hold. Run by `test_two_nodes`.

Ray knows one cluster a process, so this is a program: `python -m tests.cluster.two_nodes MODEL OUT` writes
what was seen to OUT as JSON.
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
from tests.cluster.scene import collect, eventually, limited, outputs, reached

STORE_BYTES = 200 << 20
BUCKET_BYTES = 8 << 20
GROUPS = 24
WAVE = 8
"""Groups that run at once."""
PROMPTS = [[4 + (number * 31 + position * 7) % 300 for position in range(140)] for number in range(GROUPS)]
"""With 128 KiB of KV a token, 210 MiB on each node if all of it were stored."""
SAMPLING = SamplingParams(max_new_tokens=16, ignore_eos=True, seed=5)

CONFIG: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "engine": {
        "max_running": 4,
        "deterministic": True,
        "chunk_tokens": 64,
        "kv_bytes": "128MiB",
        "max_context_tokens": 160,
    },
    "cluster": {"workers": 2, "health_interval_s": 0.2, "start_timeout_s": 600},
    "pool": {"budget_bytes": "40MiB", "reserve_bytes": 2 * BUCKET_BYTES, "warm_bytes": "4MiB", "restore_timeout_s": 60},
    "resume": {"prefer": "other"},
    "weights": {"transport": {"kind": "disk"}},  # which need no room in the store
}


def spilled() -> list[str]:
    """What the nodes' raylets logged of spilling (with RAY_verbose_spill_logs=1: all of it)."""
    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    lines = [line for log in logs.glob("raylet*.out") for line in log.read_text(errors="replace").splitlines()]
    return [line for line in lines if "Spilled" in line]


def submit(service: Rollout, groups: range = range(GROUPS)) -> None:
    prompts = [PROMPTS[number] for number in groups]
    service.submit(prompts, sampling=SAMPLING, key=[f"g{number}" for number in groups])


def disturbed(service: Rollout) -> dict[TrajectoryId, Trajectory]:
    """Suspend everything when it has begun, while weights would be on their way through the same stores."""
    buckets: list[Any] = []
    for first in range(0, GROUPS, WAVE):
        buckets = [*buckets[-1:], ray.put(np.zeros(BUCKET_BYTES, dtype=np.uint8))]
        with limited(service, SAMPLING.max_new_tokens - 1):
            submit(service, range(first, first + WAVE))
            reached(service, 4)
            service.abort(keep="pool", then="hold")
        for pool in service.stats().pools:
            assert pool.stored + pool.reserved + pool.still_read <= pool.budget, pool
    service.resume()
    return collect(service, GROUPS)


def main(model: str, out: Path) -> None:
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
        seen["read_elsewhere"] = sum(pool.read_elsewhere for pool in after.pools)
        seen["still_copied"] = [pool.copied for pool in after.pools]
        seen["seen_to_spill"] = [pool.spilled for pool in after.pools]
        seen["spilled"] = spilled()
        with limited(service, SAMPLING.max_new_tokens - 1):
            submit(service, range(WAVE))
            reached(service, 4)
            service.abort(keep="pool", then="hold")
        cluster.remove_node(second, allow_graceful=False)
        service.resume()
        without = outputs(collect(service, WAVE))
        seen["equal_without_a_node"] = without == {name: truth[name] for name in without}
        seen["workers_lost"] = service.stats().counters.workers_lost
        full = [ray.put(np.zeros(BUCKET_BYTES, dtype=np.uint8)) for _ in range(STORE_BYTES // BUCKET_BYTES)]
        seen["spilled_when_full"] = len(eventually(spilled))
        seen["alarm"] = eventually(lambda: [told for told in service.stats().troubles if "spilled" in told])
        del full
    out.write_text(json.dumps(seen))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
