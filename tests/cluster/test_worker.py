"""What a worker returns for an export of several parts, and what is left of one that fails half way."""

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.cluster.worker import Worker
from rollout.config import load_config
from rollout.errors import SegmentMissingError
from rollout.kv.image import Buffer
from rollout.types import SequenceKey, TrajectoryId, WorkerId
from tests.weights import WEIGHTS

ANN: SequenceKey = (TrajectoryId("ann"), 1)


class FakeHost:
    """Sends a buffer for each page before `stop`, and nothing after."""

    def __init__(self, stop: int) -> None:
        self.stop = stop
        self.sent: list[weakref.ref[Buffer]] = []
        self.paused: list[bool] = []

    def pause(self) -> None:
        self.paused.append(True)

    def unpause(self) -> None:
        self.paused.append(False)

    def export(self, key: SequenceKey, first: int, stop: int) -> tuple[Any, list[Buffer]]:
        if stop > self.stop:
            raise SegmentMissingError(f"{key[0]} is not parked any more")
        buffers = [np.full(8, page, dtype=np.uint8) for page in range(first, stop)]
        self.sent += map(weakref.ref, buffers)
        return f"manifest {first}", buffers


def worker_with(host: FakeHost, path: Path) -> tuple[Worker, str]:
    worker = Worker(WorkerId("worker"), load_config({"model": {"path": path}}), WEIGHTS)
    worker._host = host  # type: ignore[assignment]
    return worker, worker._incarnation


def test_the_manifests_come_first_and_each_part_is_a_return_of_its_own(tmp_path: Path) -> None:
    worker, incarnation = worker_with(FakeHost(9), tmp_path)
    manifests, *objects = worker.export(incarnation, ANN, [(0, 2), (2, 5)])
    assert manifests == ["manifest 0", "manifest 2"]
    assert [[int(buffer[0]) for buffer in buffers] for buffers in objects] == [[0, 1], [2, 3, 4]]


def test_an_export_that_fails_at_its_second_part_keeps_no_buffer_of_the_first(tmp_path: Path) -> None:
    host = FakeHost(4)
    worker, incarnation = worker_with(host, tmp_path)
    with pytest.raises(SegmentMissingError, match="not parked any more"):
        worker.export(incarnation, ANN, [(0, 2), (2, 5)])
    gc.collect()
    assert len(host.sent) == 2
    assert not any(buffer() is not None for buffer in host.sent)


def test_nothing_is_exported_for_another_incarnation(tmp_path: Path) -> None:
    host = FakeHost(9)
    worker, _ = worker_with(host, tmp_path)
    with pytest.raises(SegmentMissingError, match="was restarted since"):
        worker.export("another", ANN, [(0, 2)])
    assert host.sent == []


def test_a_pause_is_of_one_incarnation(tmp_path: Path) -> None:
    host = FakeHost(9)
    worker, incarnation = worker_with(host, tmp_path)
    worker.pause("another")
    worker.unpause("another")
    assert host.paused == []
    worker.pause(incarnation)
    worker.unpause(incarnation)
    assert host.paused == [True, False]
