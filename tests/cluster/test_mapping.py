"""Touching shared memory: what it costs to write there afterwards, what is refused, and what stays as it was."""

import ctypes
import mmap
import os
import resource
import tempfile
from collections.abc import Iterator
from typing import IO, Any

import pytest
import ray

from rollout.cluster import mapping
from rollout.cluster.mapping import SLICE_BYTES, find_mapping, populate

PAGE = mmap.PAGESIZE
MB = 1 << 20
MAPS = """\
5500-5600 r-xp 00000000 00:1b 345 /usr/bin/python
7000-7200 rw-s 00000000 00:1b 345 /dev/shm/plasmaXYZ (deleted)
7200-7300 rw-s 00000000 00:1b 345 /tmp/ray/plasmaXYZ (deleted)
7300-7400 r--s 00000000 00:1b 345 /dev/shm/another
7400-7500 rw-p 00000000 00:00 0
"""


def test_the_store_is_found_by_an_address_in_it() -> None:
    for address in (0x7000, 0x71FF):
        assert find_mapping(MAPS.splitlines(), address) == range(0x7000, 0x7200)


@pytest.mark.parametrize("address", [0x5500, 0x6000, 0x7200, 0x7300, 0x7400])
def test_what_is_no_shared_memory_is_left_alone(address: int) -> None:
    assert find_mapping(MAPS.splitlines(), address) is None


class SharedMemory:
    """A file in memory that nobody has touched, and its mapping."""

    def __init__(self, file: IO[bytes], nbytes: int) -> None:
        self.file = file
        self.file.truncate(nbytes)
        self.map = mmap.mmap(self.file.fileno(), nbytes)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.memory = range(start, start + nbytes)

    @property
    def taken(self) -> int:
        """Bytes that the file takes of the machine's memory."""
        return 512 * os.fstat(self.file.fileno()).st_blocks

    def faults(self, start: int, stop: int) -> int:
        """Page faults that writing to each page makes."""
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for at in range(start, stop, PAGE):
            self.map[at] = 1
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        yield SharedMemory(file, 3 * SLICE_BYTES)


def test_what_was_populated_is_written_to_without_a_fault_and_was_not_changed(shared: SharedMemory) -> None:
    shared.map[5] = shared.map[SLICE_BYTES + 7] = 99
    assert populate(shared.memory, 2 * SLICE_BYTES - PAGE + 1) == 2 * SLICE_BYTES - PAGE
    assert (shared.map[5], shared.map[SLICE_BYTES + 7], shared.map[6]) == (99, 99, 0)
    assert shared.taken == 2 * SLICE_BYTES - PAGE, "and no more is taken of the machine's memory"
    assert shared.faults(0, 2 * SLICE_BYTES - PAGE) < 100
    assert shared.faults(2 * SLICE_BYTES, 3 * SLICE_BYTES) > 100


def test_no_more_is_populated_than_there_is(shared: SharedMemory) -> None:
    assert populate(shared.memory, 1 << 40) == 3 * SLICE_BYTES


def test_where_no_memory_is_left_populating_ends_with_what_there_was(shared: SharedMemory) -> None:
    shared.file.truncate(SLICE_BYTES)  # to write behind it would end the process
    assert populate(shared.memory, 3 * SLICE_BYTES) == SLICE_BYTES


def test_a_kernel_that_cannot_populate_says_so(shared: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "MADV_POPULATE_WRITE", 9999)
    with pytest.raises(OSError, match="Invalid argument"):
        populate(shared.memory, SLICE_BYTES)
    assert shared.taken == 0


class Process:
    """It touches the store, in the one way or the other, and puts an object."""

    def touch(self, nbytes: int, advice: int) -> int:
        from rollout.cluster import mapping

        mapping.MADV_POPULATE_WRITE = advice
        return mapping.touch_store(nbytes)

    def shared_bytes(self) -> int:
        """Of its shared memory, what this process has touched."""
        with open("/proc/self/status") as status:
            (line,) = [line for line in status if line.startswith("RssShmem")]
        return int(line.split()[1]) << 10

    def faults_of_a_put(self, nbytes: int) -> int:
        import resource

        import numpy as np
        import ray

        array = np.ones(nbytes, dtype=np.uint8)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        ray.put(array)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.parametrize("kernel", ["this one", "an old one"])
def test_a_process_that_touched_the_store_has_it_mapped(ray_cluster: None, kernel: str) -> None:
    advice = mapping.MADV_POPULATE_WRITE if kernel == "this one" else 9999

    def ask(method: Any, *args: Any) -> int:
        answer: int = ray.get(method.remote(*args), timeout=120.0)
        return answer

    cold, warm = (ray.remote(Process).options(num_cpus=0).remote() for _ in range(2))
    try:
        assert ask(cold.touch, 0, advice) == 0
        assert ask(warm.touch, 32 * MB + 1, advice) == 32 * MB
        assert ask(cold.shared_bytes) < 2 * MB
        assert 32 * MB <= ask(warm.shared_bytes) < 34 * MB
        if kernel == "this one":  # what was put and thrown away comes back when Ray gets to it
            assert ask(cold.faults_of_a_put, 8 * MB) > 1024
            assert ask(warm.faults_of_a_put, 8 * MB) < 1024
    finally:
        for process in (cold, warm):
            ray.kill(process)
