"""What a benchmark ran on: facts that a reader needs to judge its figures. No torch, no Ray."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "ray", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This machine, now."""

    cpu: str
    cores: int
    """That this process may use."""
    memory_bytes: int
    os: str
    python: str
    packages: dict[str, str]
    """Versions."""
    load: float
    """Processes that ran or wanted to, on average over the last minute."""


def this_machine() -> Machine:
    return Machine(
        cpu=_cpu(Path("/proc/cpuinfo")),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        os=platform.platform(),
        python=platform.python_version(),
        packages={name: version(name) for name in PACKAGES},
        load=round(os.getloadavg()[0], 2),
    )


def _cpu(cpuinfo: Path) -> str:
    """The model's name, which `platform` knows on few systems only."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
