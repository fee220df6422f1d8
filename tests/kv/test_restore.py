"""Restores put every byte in place or fail as a whole, report once, and never write to what they read."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollout.errors import DeadlineError, KVError, PoolFullError, SegmentDamagedError, SegmentMissingError
from rollout.kv.fence import Passed
from rollout.kv.keys import Fingerprint
from rollout.kv.restore import Restored, Restorer, Segment
from rollout.types import Image, SegmentRun, SequenceKey, TrajectoryId
from tests.kv.pool import (
    DEVICES,
    DTYPES,
    FINGERPRINT,
    PAGE,
    DictReader,
    make_image,
    make_segment,
    make_storage,
    page_bytes,
    run,
    tokens_in,
)

KEY: SequenceKey = (TrajectoryId("g/0"), 2)
PATIENCE_S = 60
"""Longest wait for the copy thread; only a failing test waits that long."""
Damage = Callable[[Segment, int], Segment]


class Bench:
    """Two storages with a pool between them: what `source` exported is restored into `target`."""

    def __init__(self, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.source = make_storage(12, seed=0, dtype=dtype, device=device)
        self.target = make_storage(12, seed=1, dtype=dtype, device=device)
        self.before = self.target.pages.clone()
        self.reader = DictReader()
        self.after = contextlib.ExitStack()
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.restorer = Restorer(
            self.target, FINGERPRINT, self.reader, timeout_s=PATIENCE_S, wake=lambda: self.woken.put(None)
        )

    def export(self, name: str, pages: Sequence[int], tokens: int) -> None:
        self.reader.put(name, make_segment(self.source, pages, tokens))

    def restore(self, image: Image, first_page: int, pages: Sequence[int], key: SequenceKey = KEY) -> Restored:
        """Submit, wait until woken, and return the one report."""
        self.restorer.submit(key, image, first_page, pages, Passed())
        self.woken.get(timeout=PATIENCE_S)
        (restored,) = self.restorer.poll()
        assert self.restorer.poll() == []
        return restored

    def check(self, sources: Sequence[int], targets: Sequence[int], tokens: int) -> None:
        """`targets` hold the `tokens` tokens of `sources`; nothing else changed."""
        for i, (page, origin) in enumerate(zip(targets, sources, strict=True)):
            valid = tokens_in(i, tokens)
            assert page_bytes(self.target, page, valid) == page_bytes(self.source, origin, valid)
            self.before[page, :, :, :valid] = self.source.pages[origin, :, :, :valid]
        assert torch.equal(self.target.pages, self.before)


@pytest.fixture(params=[64, 2], ids=["one thread", "halves"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("rollout.kv.restore.HALVED_PAGES", request.param)
    bench = Bench()
    with bench.after:
        yield bench
    bench.restorer.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens", range(1, 2 * PAGE + 1))
def test_every_length_is_restored_exactly(dtype: torch.dtype, device: str, tokens: int) -> None:
    bench = Bench(dtype=dtype, device=device)
    sources, targets = [9, 4][: -(-tokens // PAGE)], [2, 11][: -(-tokens // PAGE)]
    bench.export("s", sources, tokens)
    restored = bench.restore(make_image(tokens, run("s", 0, len(sources))), 0, targets)
    assert restored == Restored(key=KEY, tokens=tokens, error=None)
    bench.check(sources, targets, tokens)
    assert bench.restorer.restored_bytes == tokens * bench.source.token_bytes
    bench.restorer.close()


SOURCES = [3, 8, 1, 12, 6, 2, 10]
"""Pages of a sequence that was exported in three segments: a shared prompt, an earlier slice, the last one."""
TOKENS = 6 * PAGE + 3
IMAGE = make_image(TOKENS, run("prompt", 1, 2), run("slice", 0, 3), run("last", 0, 2))


def export_all(bench: Bench) -> None:
    bench.export("prompt", [7, 3, 8, 9], 4 * PAGE)
    bench.export("slice", [1, 12, 6], 3 * PAGE)
    bench.export("last", [2, 10], PAGE + 3)


@pytest.mark.parametrize("first_page", range(7))
def test_an_image_of_several_runs_is_restored_from_any_page_on(bench: Bench, first_page: int) -> None:
    export_all(bench)
    targets = [5, 11, 4, 9, 7, 12, 1][first_page:]
    assert bench.restore(IMAGE, first_page, targets) == Restored(key=KEY, tokens=TOKENS, error=None)
    rest = TOKENS - first_page * PAGE
    bench.check(SOURCES[first_page:], targets, rest)
    assert bench.restorer.restored_bytes == rest * bench.source.token_bytes


@pytest.mark.parametrize(
    ("first_page", "runs"),
    [
        (0, (run("prompt", 1, 2), run("slice", 0, 3), run("last", 0, 2))),
        (1, (run("prompt", 2, 1), run("slice", 0, 3), run("last", 0, 2))),
        (2, (run("slice", 0, 3), run("last", 0, 2))),
        (4, (run("slice", 2, 1), run("last", 0, 2))),
        (6, (run("last", 1, 1),)),
    ],
)
def test_only_the_segments_that_are_needed_are_opened(
    bench: Bench, first_page: int, runs: tuple[SegmentRun, ...]
) -> None:
    export_all(bench)
    bench.restore(IMAGE, first_page, SOURCES[first_page:])
    assert bench.reader.opened == [runs]
    assert bench.reader.closed == 1


def test_what_was_read_is_never_written_to(bench: Bench) -> None:
    """Case C14: the views are of shared memory that is mapped writable."""
    export_all(bench)
    buffers = [buffer for segment in bench.reader.segments.values() for buffer in segment.buffers]
    assert not any(buffer.flags.writeable for buffer in buffers)
    contents = [buffer.tobytes() for buffer in buffers]
    assert bench.restore(IMAGE, 0, SOURCES).error is None
    bench.target.pages.zero_()
    assert [buffer.tobytes() for buffer in buffers] == contents
    assert not any(np.shares_memory(buffer, bench.target.pages.numpy()) for buffer in buffers)


def test_a_missing_segment_fails_the_restore(bench: Bench) -> None:
    export_all(bench)
    del bench.reader.segments[IMAGE.runs[1].segment]
    restored = bench.restore(IMAGE, 0, SOURCES)
    assert restored.key == KEY
    assert isinstance(restored.error, SegmentMissingError)
    assert str(restored.error) == "segments ['slice'] are not in the pool"
    assert torch.equal(bench.target.pages, bench.before)
    assert bench.restore(make_image(PAGE, run("prompt", 0, 1)), 0, [1]).error is None


@pytest.mark.parametrize(
    "error", [SegmentMissingError("gone"), SegmentDamagedError("bad"), PoolFullError("full"), DeadlineError("late")]
)
def test_what_a_reader_may_raise_becomes_the_error_of_the_report(bench: Bench, error: KVError | DeadlineError) -> None:
    bench.reader.error = error
    restored = bench.restore(IMAGE, 0, SOURCES)
    assert restored == Restored(key=KEY, tokens=TOKENS, error=error)


def test_an_error_that_no_reader_may_raise_is_raised_by_poll(bench: Bench) -> None:
    bench.reader.error = OSError("broken")
    bench.restorer.submit(KEY, IMAGE, 0, SOURCES, Passed())
    bench.woken.get(timeout=PATIENCE_S)
    with pytest.raises(OSError, match="broken"):
        bench.restorer.poll()
    assert bench.restorer.poll() == []


def flip(segment: Segment, page: int) -> Segment:
    buffers = [np.array(buffer) for buffer in segment.buffers]
    buffers[page][-1] ^= 0x80
    return replace(segment, buffers=buffers)


def truncate(segment: Segment, page: int) -> Segment:
    buffers = [*segment.buffers]
    buffers[page] = buffers[page][:-1]
    return replace(segment, buffers=buffers)


def drop_last(segment: Segment, page: int) -> Segment:
    return replace(segment, buffers=segment.buffers[:-1])


def of_another_model(segment: Segment, page: int) -> Segment:
    return replace(segment, manifest=replace(segment.manifest, fingerprint=Fingerprint("other")))


@pytest.mark.parametrize("damage", [flip, truncate, drop_last, of_another_model])
@pytest.mark.parametrize(("name", "page"), [("prompt", 1), ("slice", 1), ("last", 1)])
def test_a_damaged_segment_fails_the_restore(bench: Bench, damage: Damage, name: str, page: int) -> None:
    """Case C12. What was written before the damage was met stays within the restore's own pages."""
    export_all(bench)
    segments = {str(segment_id): segment for segment_id, segment in bench.reader.segments.items()}
    bench.reader.put(name, damage(segments[name], page))
    targets = [5, 11, 4, 9, 7, 12, 1]
    error = bench.restore(IMAGE, 0, targets).error
    assert isinstance(error, SegmentDamagedError)
    assert (error.node, error.segment) == ("node", name), "so that the pool can drop it"
    assert bench.reader.closed == 1
    others = [page for page in range(13) if page not in targets]
    assert torch.equal(bench.target.pages[others], bench.before[others])


def test_damage_outside_of_what_is_needed_does_no_harm(bench: Bench) -> None:
    export_all(bench)
    bench.reader.put("prompt", flip(bench.reader.segments[IMAGE.runs[0].segment], 0))
    assert bench.restore(IMAGE, 0, SOURCES).error is None


@pytest.mark.parametrize(
    ("image", "first_page", "pages"),
    [
        (IMAGE, 0, SOURCES[:-1]),
        (IMAGE, 2, SOURCES),
        (make_image(TOKENS, *IMAGE.runs[:2]), 0, SOURCES[:5]),
        (make_image(TOKENS - 3, *IMAGE.runs), 0, SOURCES),
        (make_image(TOKENS + PAGE, *IMAGE.runs), 0, SOURCES),
    ],
)
def test_pages_that_do_not_fit_the_image_fail_the_restore(
    bench: Bench, image: Image, first_page: int, pages: list[int]
) -> None:
    export_all(bench)
    error = bench.restore(image, first_page, pages).error
    assert isinstance(error, SegmentDamagedError)
    assert (error.node, error.segment) == (None, None), "no segment is to blame"
    assert torch.equal(bench.target.pages, bench.before)


def test_an_image_that_counts_more_or_fewer_tokens_than_its_tail_holds_is_damaged(bench: Bench) -> None:
    export_all(bench)
    for tokens in (TOKENS - 1, TOKENS + 1):
        assert "page 1 has" in str(bench.restore(make_image(tokens, *IMAGE.runs), 0, SOURCES).error)


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Gate(DictReader):
    """Opens nothing before `gate` is set."""

    def __init__(self, reader: DictReader) -> None:
        super().__init__()
        self.segments = reader.segments
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.clock: Clock | None = None
        """If there is one, what comes after its deadline fails."""

    @contextlib.contextmanager
    def open(self, runs: Sequence[SegmentRun], deadline: float) -> Iterator[Sequence[Segment]]:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        if self.clock is not None and self.clock.monotonic() > deadline:
            raise DeadlineError("late")
        with super().open(runs, deadline) as segments:
            yield segments


class Queue:
    """Restores of one page each into pages 1…, the first one under way and held up until `gate` opens."""

    def __init__(self, bench: Bench, count: int) -> None:
        export_all(bench)
        self.reader = Gate(bench.reader)
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.restorer = Restorer(
            bench.target, FINGERPRINT, self.reader, timeout_s=50.0, wake=lambda: self.woken.put(None)
        )
        bench.after.callback(self.restorer.close)
        bench.after.callback(self.reader.gate.set)
        self.keys: list[SequenceKey] = [(TrajectoryId(f"g/{i}"), 1) for i in range(count)]
        for page, key in enumerate(self.keys, 1):
            self.submit(key, page)
        assert self.reader.entered.wait(PATIENCE_S)

    def submit(self, key: SequenceKey, page: int) -> None:
        self.restorer.submit(key, make_image(PAGE, run("prompt", 0, 1)), 0, [page], Passed())

    def finish(self, count: int) -> list[Restored]:
        """Open the gate and wait for `count` reports; there are no more."""
        self.reader.gate.set()
        reported: list[Restored] = []
        while len(reported) < count:
            self.woken.get(timeout=PATIENCE_S)
            reported += self.restorer.poll()
        self.restorer.close()
        assert self.restorer.poll() == []
        return reported


def test_a_restore_that_waits_can_be_cancelled_and_is_never_reported_nor_begun(bench: Bench) -> None:
    line = Queue(bench, 3)
    assert line.restorer.cancel(line.keys[1])
    assert line.restorer.poll() == []
    assert [restored.key for restored in line.finish(2)] == [line.keys[0], line.keys[2]]
    assert len(line.reader.opened) == 2
    assert torch.equal(bench.target.pages[2], bench.before[2])


def test_a_restore_that_began_cannot_be_cancelled_and_is_reported(bench: Bench) -> None:
    line = Queue(bench, 1)
    assert not line.restorer.cancel(line.keys[0])
    assert line.finish(1) == [Restored(key=line.keys[0], tokens=PAGE, error=None)]
    assert page_bytes(bench.target, 1) == page_bytes(bench.source, 7)


def test_a_restore_that_is_complete_cannot_be_cancelled_and_is_reported(bench: Bench) -> None:
    line = Queue(bench, 1)
    line.reader.gate.set()
    line.woken.get(timeout=PATIENCE_S)
    assert not line.restorer.cancel(line.keys[0])
    assert [restored.key for restored in line.restorer.poll()] == line.keys
    line.restorer.close()


def test_a_cancelled_restore_can_be_submitted_again(bench: Bench) -> None:
    line = Queue(bench, 2)
    assert line.restorer.cancel(line.keys[1])
    line.submit(line.keys[1], 3)
    assert [restored.key for restored in line.finish(2)] == line.keys
    assert torch.equal(bench.target.pages[2], bench.before[2])
    assert page_bytes(bench.target, 3) == page_bytes(bench.source, 7)


def test_a_deadline_counts_from_the_submission_however_long_a_restore_waits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("rollout.kv.restore.time", clock)
    line = Queue(bench, 2)
    clock.now = 130.0
    line.submit((TrajectoryId("g/9"), 1), 3)
    clock.now = 1000.0
    line.finish(3)
    assert line.reader.deadlines == [150.0, 150.0, 180.0]


def test_a_restore_whose_deadline_passed_while_it_waited_fails_and_others_do_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("rollout.kv.restore.time", clock)
    line = Queue(bench, 2)
    clock.now = 160.0
    late = (TrajectoryId("g/9"), 1)
    line.submit(late, 3)
    line.reader.clock = clock
    reported = {restored.key: restored.error for restored in line.finish(3)}
    assert [isinstance(reported[key], DeadlineError) for key in line.keys] == [True, True]
    assert reported[late] is None


def test_restores_are_reported_once_each_when_they_are_complete(bench: Bench) -> None:
    export_all(bench)
    woken: queue.SimpleQueue[str] = queue.SimpleQueue()
    gate = Gate(bench.reader)
    restorer = Restorer(
        bench.target, FINGERPRINT, gate, timeout_s=PATIENCE_S, wake=lambda: woken.put(threading.current_thread().name)
    )
    keys: list[SequenceKey] = [(TrajectoryId(f"g/{i}"), 1) for i in range(3)]
    whole, broken = make_image(PAGE, run("prompt", 0, 1)), make_image(PAGE, run("nothing", 0, 1))
    for key, image, page in zip(keys, [whole, broken, whole], [1, 2, 3], strict=True):
        restorer.submit(key, image, 0, [page], Passed())
    assert gate.entered.wait(PATIENCE_S)
    assert restorer.poll() == []
    gate.gate.set()
    reported: list[Restored] = []
    for done in range(1, 4):
        assert woken.get(timeout=PATIENCE_S).startswith("restore")
        reported += restorer.poll()
        assert len(reported) >= done
    assert [(restored.key, restored.error is None) for restored in reported] == list(
        zip(keys, [True, False, True], strict=True)
    )
    assert restorer.poll() == []
    restorer.close()


def test_closing_waits_for_the_restore_at_work_and_starts_no_other(bench: Bench) -> None:
    export_all(bench)
    gate = Gate(bench.reader)
    # Woken first by a restore that is cancelled.
    restorer = Restorer(bench.target, FINGERPRINT, gate, timeout_s=PATIENCE_S, wake=gate.gate.set)
    for page in (1, 2, 3):
        restorer.submit((TrajectoryId(f"g/{page}"), 1), make_image(PAGE, run("prompt", 0, 1)), 0, [page], Passed())
    assert gate.entered.wait(PATIENCE_S)
    restorer.close()
    assert (len(gate.opened), gate.closed) == (1, 1)
    assert page_bytes(bench.target, 1) == page_bytes(bench.source, 7)
