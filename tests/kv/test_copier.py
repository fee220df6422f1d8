"""The copy thread: every copy is told of once, its bytes in place or failed, and whoever sleeps is woken for it."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from rollout.kv.copier import Copied, Copier
from rollout.kv.fence import Fence, Passed
from rollout.kv.storage import KVStorage
from rollout.kv.tiers import Copy, CopyId, Tier
from tests.kv.pool import make_storage, page_bytes
from tests.kv.slow import PATIENCE_S, SlowStorage


class Breaking(KVStorage):
    """A copy of page 4 fails."""

    def copy(self, to: Tier, sources: Sequence[int], targets: Sequence[int], after: Fence) -> None:
        if 4 in sources:
            raise OSError("page 4")
        super().copy(to, sources, targets, after)


class Bench:
    def __init__(self, kind: type[KVStorage] = KVStorage) -> None:
        self.storage = make_storage(8, host_pages=8, seed=0, kind=kind)
        self.woken: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.copier = Copier(self.storage, wake=lambda: self.woken.put(threading.current_thread().name))

    @property
    def slow(self) -> SlowStorage:
        assert isinstance(self.storage, SlowStorage)
        return self.storage

    def wait(self, copies: int = 1) -> list[Copied]:
        """Sleep until woken so often, as an idle engine does."""
        for _ in range(copies):
            self.woken.get(timeout=PATIENCE_S)
        return self.copier.poll()

    def close(self) -> None:
        if isinstance(self.storage, SlowStorage):
            self.storage.gate.set()
        self.copier.close()


@pytest.fixture
def bench_of() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(*args: Any) -> Bench:
        benches.append(Bench(*args))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


def copy(number: int, sources: Sequence[int], targets: Sequence[int], to: Tier = Tier.HOST) -> Copy:
    return Copy(copy_id=CopyId(number), to=to, sources=tuple(sources), targets=tuple(targets))


def test_copies_are_told_of_with_their_bytes_in_place(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    device = {page: page_bytes(bench.storage, page) for page in range(1, 9)}
    bench.copier.submit([copy(1, [2, 3], [7, 1])], Passed())
    bench.copier.submit([copy(2, [7], [5], Tier.DEVICE)], Passed())
    done = bench.wait(2)
    assert [(copied.copy_id, copied.to, copied.ok) for copied in done] == [(1, Tier.HOST, True), (2, Tier.DEVICE, True)]
    assert [copied.nbytes for copied in done] == [2 * bench.storage.page_bytes, bench.storage.page_bytes]
    assert all(copied.seconds >= 0 for copied in done)
    assert [page_bytes(bench.storage, page, tier=Tier.HOST) for page in (7, 1)] == [device[2], device[3]]
    assert page_bytes(bench.storage, 5) == device[2]
    assert bench.copier.poll() == []


def test_who_sleeps_is_woken_by_the_copy_thread_after_every_copy(bench_of: Callable[..., Bench]) -> None:
    """Case C10: completions are told of without a step that would ask for them."""
    bench = bench_of()
    for number in (1, 2, 3):
        bench.copier.submit([copy(number, [number], [number])], Passed())
    assert all(bench.woken.get(timeout=PATIENCE_S).startswith("copy") for _ in range(3))
    assert [copied.copy_id for copied in bench.copier.poll()] == [1, 2, 3]
    assert bench.woken.empty()


def test_nothing_is_told_of_before_it_is_over(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(SlowStorage)
    bench.copier.submit([copy(1, [1, 2], [1, 2])], Passed())
    assert bench.slow.entered.wait(PATIENCE_S)
    assert bench.copier.poll() == []
    assert bench.woken.empty()
    bench.slow.gate.set()
    assert [copied.copy_id for copied in bench.wait()] == [1]


def test_a_copy_that_fails_is_told_of_and_the_others_go_on(
    bench_of: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = bench_of(Breaking)
    bench.copier.submit([copy(1, [3], [3]), copy(2, [4, 5], [4, 5]), copy(3, [6], [6])], Passed())
    assert [(copied.copy_id, copied.ok) for copied in bench.wait(3)] == [(1, True), (2, False), (3, True)]
    assert "a copy of 2 pages to the host failed" in caplog.text
    assert page_bytes(bench.storage, 6, tier=Tier.HOST) == page_bytes(bench.storage, 6)
    bench.copier.submit([copy(4, [5], [5])], Passed())
    assert [copied.ok for copied in bench.wait()] == [True]


class Lost:
    """Of computation that failed."""

    def wait(self) -> None:
        raise RuntimeError("the device is lost")


def test_behind_a_fence_that_fails_every_copy_fails(
    bench_of: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = bench_of()
    bench.copier.submit([copy(1, [1], [1]), copy(2, [2], [2])], Lost())
    assert [copied.ok for copied in bench.wait(2)] == [False, False]
    assert "the device is lost" in caplog.text


def test_closing_waits_for_the_batch_at_work_and_starts_no_other(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(SlowStorage)
    before = page_bytes(bench.storage, 3, tier=Tier.HOST)
    for number in (1, 3):
        bench.copier.submit([copy(number, [number], [number])], Passed())
    assert bench.slow.entered.wait(PATIENCE_S)
    closing = threading.Thread(target=bench.copier.close)
    closing.start()
    end = time.monotonic() + PATIENCE_S
    while not bench.copier._thread._shutdown and time.monotonic() < end:
        time.sleep(0.001)
    bench.slow.gate.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert page_bytes(bench.storage, 1, tier=Tier.HOST) == page_bytes(bench.storage, 1)
    assert page_bytes(bench.storage, 3, tier=Tier.HOST) == before


@pytest.mark.parametrize("count", [1, 5])
def test_a_batch_may_have_any_number_of_copies(count: int, bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    bench.copier.submit([copy(number, [number + 1], [number + 1]) for number in range(count)], Passed())
    assert len(bench.wait(count)) == count


def test_of_a_batch_those_to_the_device_are_first_for_which_sequences_wait(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    bench.copier.submit([copy(1, [1], [1]), copy(2, [5], [5], Tier.DEVICE), copy(3, [2], [2])], Passed())
    assert [copied.copy_id for copied in bench.wait(3)] == [2, 1, 3]
