"""What processes used of the machine, as the kernel tells it in /proc."""

import os
from contextlib import suppress
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
AFTER_NAME = {"ppid": 1, "utime": 11, "stime": 12}
"""Positions in /proc/PID/stat behind the name."""


def used_seconds(root: int, *, but: int) -> float:
    """CPU seconds so far of `root` and all its descendants, without `but` and all of its own."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        with suppress(OSError):  # it has just ended
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            pid = int(directory.name)
            parents[pid] = int(fields[AFTER_NAME["ppid"]])
            ticks[pid] = int(fields[AFTER_NAME["utime"]]) + int(fields[AFTER_NAME["stime"]])

    def ours(pid: int) -> bool:
        while pid not in (root, but):
            if pid not in parents:
                return False
            pid = parents[pid]
        return pid == root

    return sum(used for pid, used in ticks.items() if ours(pid)) / TICKS_PER_S


def memory_peak(pid: int) -> int:
    """The most bytes that a process had in memory at once, shared ones included."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10
