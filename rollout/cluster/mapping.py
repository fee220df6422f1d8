"""This process's mapping of its node's object store, and touching the memory there before it is written to.

A first touch makes a page fault, and page tables belong to the process: what others have filled long ago is new to
this one. Linux (5.14) makes the pages there and writable all at once, without changing or allocating anything in
the store; where it cannot, throw-away objects are put. Ray uses the store from its beginning, so that is what is
touched. Memory that nobody wrote to yet is taken from the node by this: it belongs to the store from then on.
"""

import ctypes
import errno
import os
from collections.abc import Iterable

import numpy as np
import ray

MADV_POPULATE_WRITE = 23
"""Python has no name for it."""
SLICE_BYTES = 16 << 20
"""Made at once: other threads of the process cannot map memory meanwhile."""
CHUNK_BYTES = 8 << 20
"""Of an object that is thrown away."""
PROBE_BYTES = 1 << 20
"""Of one that shows where the store is: smaller ones are not put there."""


def touch_store(nbytes: int) -> int:
    """Touch `nbytes` of the store, or as much as there is memory for; returns how much."""
    if not nbytes:
        return 0
    memory = _store()
    if memory is not None:
        try:
            return populate(memory, nbytes)
        except OSError:
            pass  # an old kernel
    chunk = np.zeros(CHUNK_BYTES, dtype=np.uint8)
    refs = [ray.put(chunk) for _ in range(nbytes // CHUNK_BYTES)]
    return len(refs) * CHUNK_BYTES


def populate(memory: range, nbytes: int) -> int:
    """Make the first `nbytes` of a shared mapping present and writable; what they hold stays as it is.

    Returns how much was made: less if there is not so much, or no memory for it. Raises `OSError` if this kernel
    cannot do it.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    end = min(len(memory), nbytes) // os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PAGESIZE")
    for done in range(0, end, SLICE_BYTES):
        if madvise(memory.start + done, min(SLICE_BYTES, end - done), MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            if code == errno.EINVAL:
                raise OSError(code, os.strerror(code))
            return done
    return end


def find_mapping(maps: Iterable[str], address: int) -> range | None:
    """The shared, writable memory around `address`, from lines of /proc/self/maps; None if it is not all of that.

    A file elsewhere than in /dev/shm is on a disk, perhaps, and not populated.
    """
    for line in maps:
        bounds, flags, _, _, _, *path = line.split(maxsplit=5)
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if start <= address < end:
            in_memory = flags == "rw-s" and path and path[0].startswith("/dev/shm/")
            return range(start, end) if in_memory else None
    return None


def _store() -> range | None:
    """Where the store is mapped, which it is once an object was put."""
    view = ray.get(ray.put(np.zeros(PROBE_BYTES, dtype=np.uint8)))
    try:
        with open("/proc/self/maps") as maps:
            return find_mapping(maps, view.ctypes.data)
    except FileNotFoundError:
        return None  # not Linux
