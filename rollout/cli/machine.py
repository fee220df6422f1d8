"""What a benchmark ran on: facts that a reader needs to judge its figures. No torch, no Ray."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "ray", "numpy")
FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")
"""What matrix kernels ask a processor for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This machine, now."""

    cpu: str
    cores: int
    """That this process may use."""
    flags: tuple[str, ...]
    """Which of `FLAGS` it has."""
    memory_bytes: int
    os: str
    python: str
    packages: dict[str, str]
    """Versions."""
    load: float
    """Processes that ran or wanted to, on average over the last minute."""


def this_machine() -> Machine:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return Machine(
        cpu=_first(lines, "model name") or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        flags=tuple(sorted({*FLAGS} & {*(_first(lines, "flags") or _first(lines, "Features")).split()})),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        os=platform.platform(),
        python=platform.python_version(),
        packages={name: version(name) for name in PACKAGES},
        load=round(os.getloadavg()[0], 2),
    )


def _first(lines: list[str], field: str) -> str:
    """Of a processor, as the system tells it; empty if it does not, and few systems do."""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
