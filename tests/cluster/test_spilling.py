"""Spilling is seen where Ray does it, and said to be unknown where it cannot be seen."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rollout.cluster.spilling import SpillWatch
from rollout.types import NodeId

NODE = NodeId("4eb6")
SCRIPT = """
import json, os, sys, threading
import numpy as np
import ray
from rollout.cluster.spilling import SpillWatch, find_spill_parent

options = {"object_spilling_directory": sys.argv[2]} if len(sys.argv) > 2 else {}
ray.init(num_cpus=1, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False, **options)

def watcher():
    class Watcher:
        def __init__(self):
            self.watch = SpillWatch(ray.get_runtime_context().get_node_id(), find_spill_parent())

        def look(self):
            return self.watch.look()

    return ray.remote(num_cpus=0)(Watcher).remote()

first = watcher()
seen = [ray.get(first.look.remote(), timeout=60)]
full = [ray.put(np.ones(8 << 20, dtype=np.uint8)) for _ in range(14)]
for _ in range(600):
    if ray.get(first.look.remote(), timeout=60) not in (None, 0):
        break
    threading.Event().wait(0.1)
seen.append(ray.get(first.look.remote(), timeout=60))
later = watcher()
seen.append(ray.get(later.look.remote(), timeout=60))
with open(sys.argv[1], "w") as out:
    json.dump(seen, out)
"""


def test_what_was_spilled_before_does_not_count_and_what_is_deleted_since_does(tmp_path: Path) -> None:
    directory = tmp_path / f"ray_spilled_objects_{NODE}"
    assert SpillWatch(NODE, tmp_path).look() == 0
    directory.mkdir()
    (directory / "old").write_bytes(bytes(100))
    watch = SpillWatch(NODE, tmp_path)
    assert watch.look() == 0
    (directory / "new").write_bytes(bytes(30))
    assert watch.look() == watch.look() == 30
    (directory / "new").unlink()
    (directory / "old").unlink()
    (directory / "newer").write_bytes(bytes(5))
    assert watch.look() == 35


def test_other_nodes_of_the_machine_do_not_count(tmp_path: Path) -> None:
    watch = SpillWatch(NODE, tmp_path)
    other = tmp_path / "ray_spilled_objects_77"
    other.mkdir()
    (other / "file").write_bytes(bytes(100))
    assert watch.look() == 0


def test_what_cannot_be_seen_is_unknown() -> None:
    assert SpillWatch(NODE, None).look() is None


def test_ray_spills_where_it_is_looked_for(tmp_path: Path) -> None:
    """Where it does by default, and where it is told to."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for told in ([], [str(elsewhere)]):
        out = tmp_path / "seen.json"
        with tempfile.TemporaryDirectory(prefix="ray-") as apart:
            ran = subprocess.run(
                [sys.executable, "-c", SCRIPT, str(out), *told],
                capture_output=True,
                text=True,
                timeout=300,
                cwd=Path(__file__).parents[2],
                env=os.environ | {"RAY_TMPDIR": apart, "RAY_verbose_spill_logs": "1"},
            )
        assert ran.returncode == 0, ran.stderr[-4000:]
        before, after, of_a_later_watch = json.loads(out.read_text())
        assert (before, of_a_later_watch) == (0, 0)
        assert after >= 8 << 20
