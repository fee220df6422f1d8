"""Who reads the pages of a parked sequence: they are free only when nobody does, however buffers end."""

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from rollout.cluster.exports import Exports
from rollout.errors import SegmentMissingError
from rollout.kv.fence import Passed
from rollout.kv.image import Buffer
from rollout.kv.tiers import Tier
from rollout.types import SequenceKey, TrajectoryId

ANN: SequenceKey = (TrajectoryId("ann"), 1)
BOB: SequenceKey = (TrajectoryId("bob"), 3)
PAGES = ((Tier.DEVICE, 5), (Tier.HOST, 9))
FENCE = Passed()
LATER = 100.0


def released() -> None:
    """What is done for a sequence that was released."""


def expired() -> None:
    """What is done for one that nobody released in time."""


def bob_expired() -> None:
    """Likewise, of Bob's."""


class Wakes:
    """Counts the calls that say that `collect` may have news."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def wakes() -> Wakes:
    return Wakes()


@pytest.fixture
def exports(wakes: Wakes) -> Iterator[Exports]:
    """Ann's sequence is parked until second 100."""
    exports = Exports(wakes)
    exports.open(ANN, PAGES, 20, FENCE, LATER, expired)
    yield exports
    assert exports.exporting == 0


def buffers(count: int) -> list[Buffer]:
    return [np.zeros(64, dtype=np.uint8) for _ in range(count)]


def test_pages_are_free_once_released_and_not_before(exports: Exports) -> None:
    assert exports.collect(0.0) == []
    exports.close(ANN, released)
    assert exports.collect(0.0) == [released]
    assert exports.collect(0.0) == []


def test_pages_that_nobody_releases_are_free_at_the_deadline(exports: Exports) -> None:
    exports.open(BOB, PAGES[:1], 3, FENCE, LATER + 1, bob_expired)
    assert exports.collect(LATER - 0.1) == []
    assert exports.collect(LATER) == [expired]
    assert exports.collect(LATER + 1) == [bob_expired]


@pytest.mark.parametrize("release_first", [True, False])
def test_pages_stay_while_any_buffer_of_an_export_lives(exports: Exports, wakes: Wakes, release_first: bool) -> None:
    assert exports.begin(ANN) == (PAGES, 20, FENCE)
    if release_first:
        exports.close(ANN, released)
        assert exports.collect(0.0) == []
    first, second = buffers(2)
    exports.end(ANN, [first, second])
    if not release_first:
        exports.close(ANN, released)
    del first
    woken = wakes.count
    assert exports.collect(LATER + 1) == []
    assert exports.exporting == 1
    del second
    assert wakes.count > woken
    assert exports.collect(0.0) == [released]


def test_a_view_of_a_buffer_keeps_the_pages(exports: Exports) -> None:
    exports.begin(ANN)
    (buffer,) = buffers(1)
    exports.end(ANN, [buffer])
    exports.close(ANN, released)
    view = buffer[3:]
    del buffer
    assert exports.collect(0.0) == []
    del view
    assert exports.collect(0.0) == [released]


def test_pages_stay_until_the_garbage_collector_finds_a_buffer_in_a_cycle(exports: Exports) -> None:
    exports.begin(ANN)
    cycle: list[object] = buffers(1)
    exports.end(ANN, [buffer for buffer in cycle if isinstance(buffer, np.ndarray)])
    exports.close(ANN, released)
    cycle.append(cycle)
    gc.disable()  # it comes when it is called, not by chance
    try:
        del cycle
        assert exports.collect(0.0) == []
    finally:
        gc.enable()
    gc.collect()
    assert exports.collect(0.0) == [released]


def test_a_buffer_may_end_while_the_lock_is_held(exports: Exports) -> None:
    exports.begin(ANN)
    held = buffers(1)
    exports.end(ANN, held)
    exports.close(ANN, released)
    with exports._lock:
        held.clear()
    assert exports.collect(0.0) == [released]


def test_two_exports_of_one_sequence_are_counted_apart(exports: Exports) -> None:
    for _ in range(2):
        exports.begin(ANN)
    exports.close(ANN, released)
    exports.end(ANN)
    assert exports.collect(0.0) == []
    exports.end(ANN, kept := buffers(1))
    assert exports.collect(0.0) == []
    kept.clear()
    assert exports.collect(0.0) == [released]


@pytest.mark.parametrize("how", ["released", "late", "freed", "unknown"])
def test_no_export_begins_of_what_is_not_parked_any_more(exports: Exports, how: str) -> None:
    if how == "released":
        exports.close(ANN, released)
    if how in ("late", "freed"):
        exports.collect(LATER)
    with pytest.raises(SegmentMissingError, match="not parked on this worker"):
        exports.begin(BOB if how == "unknown" else ANN)
    exports.collect(LATER)
    exports.close(ANN, released)
    exports.close(BOB, released)
    assert exports.collect(LATER) == [released, released]  # there is nothing to wait for


def test_what_is_told_after_the_deadline_is_done_after_what_was_due_then(exports: Exports) -> None:
    exports.begin(ANN)
    assert exports.collect(LATER) == []
    exports.close(ANN, released)
    exports.end(ANN)
    assert exports.collect(LATER) == [expired, released]


def test_a_sequence_that_is_opened_again_keeps_its_readers(exports: Exports) -> None:
    exports.begin(ANN)
    exports.open(ANN, PAGES, 20, FENCE, LATER + 5, bob_expired)
    exports.close(ANN, released)
    assert exports.collect(0.0) == []
    exports.end(ANN)
    assert exports.collect(0.0) == [released]


def overdue() -> None:
    """What is done for one that was to be kept, and is read for too long."""


def test_what_waits_too_long_for_an_export_is_told_so_once_and_given_up(exports: Exports) -> None:
    exports.begin(ANN)
    exports.close(ANN, released, overdue)
    assert exports.collect(LATER - 1) == []
    assert exports.collect(LATER) == [overdue]
    assert exports.collect(LATER + 1) == []
    exports.end(ANN)
    assert exports.collect(LATER + 1) == [expired]


def test_exports_on_many_threads_lose_no_count(exports: Exports) -> None:
    start = threading.Barrier(8)

    def export() -> None:
        start.wait()
        for _ in range(200):
            exports.begin(ANN)
            exports.end(ANN, buffers(3))

    threads = [threading.Thread(target=export) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert exports.collect(0.0) == []
    for thread in threads:
        thread.join()
    exports.close(ANN, released)
    assert exports.collect(0.0) == [released]
