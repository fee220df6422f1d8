"""Use of the CPU is that of a process and its descendants, without a subtree."""

import os
import subprocess
import sys

from benchmarks.usage import memory_peak, used_seconds

BUSY = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"


def test_descendants_count_but_for_those_left_out() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert used_seconds(child.pid, but=0) >= 0.25
        with_child, without = used_seconds(os.getpid(), but=0), used_seconds(os.getpid(), but=child.pid)
        assert with_child - without >= 0.25
        assert memory_peak(child.pid) > 1 << 20
