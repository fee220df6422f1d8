"""The four fences, with real tensors and injected delays; each test shows what goes wrong where the fence is taken out.

1. A copy or an export reads after the computation that wrote (case C2).
2. Pages are reused after the copy that reads them (C1, A7).
3. A load or a restore writes after the last reader of its target pages (C3).
4. Pages are used after the copy that writes them.
"""

import contextlib
import queue
from collections.abc import Iterator

import pytest
import torch

from rollout.kv.cache import KVCache
from rollout.kv.copier import Copier
from rollout.kv.fence import Fence, Passed
from rollout.kv.restore import Restorer
from rollout.kv.storage import KVStorage
from rollout.kv.tiers import Copy, CopyId, Residency, Tier
from tests.kv.plans import (
    ANN,
    BOB,
    EVE,
    OTHERS,
    PAGE,
    THROUGH,
    TOKENS,
    filled,
    key,
    left,
    open_up_to,
    parked,
    residencies,
    stored,
)
from tests.kv.pool import FINGERPRINT, DictReader, make_image, make_segment, make_storage, page_bytes, run
from tests.kv.slow import PATIENCE_S, Late, SlowStorage

fence_or_none = pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "fence taken out"])


class Engine:
    """A cache with its storage and copy thread, as an engine has them."""

    def __init__(self, *, pages: int, host_pages: int = 8, write: bool = True) -> None:
        policy = {"write": THROUGH} if write else {}
        self.cache = KVCache(pages, PAGE, host_pages=host_pages, **policy)
        storage = make_storage(pages, host_pages=host_pages, seed=0, kind=SlowStorage)
        assert isinstance(storage, SlowStorage)
        self.storage = storage
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.copier = Copier(storage, wake=lambda: self.woken.put(None))

    def launch(self) -> list[Copy]:
        """Start what was planned; the first copy is held up half way."""
        copies = self.cache.tiered.take_copies()
        self.copier.submit(copies, self.storage.fence())
        assert self.storage.entered.wait(PATIENCE_S)
        return copies

    def land(self) -> None:
        """Let the copies go on, and tell the cache."""
        self.storage.gate.set()
        self.woken.get(timeout=PATIENCE_S)
        for done in self.copier.poll():
            assert done.ok
            self.cache.tiered.copied(done.copy_id, ok=True)

    def write(self, pages: list[int], seed: int) -> list[bytes]:
        """A forward writes these pages; returns their bytes."""
        random = torch.Generator().manual_seed(seed)
        self.storage.pages[pages] = torch.randn(self.storage.pages[pages].shape, generator=random)
        return [page_bytes(self.storage, page) for page in pages]

    def close(self) -> None:
        self.storage.gate.set()
        self.copier.close()


@pytest.fixture
def closing() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def engine_with(closing: contextlib.ExitStack, *, pages: int, host_pages: int = 8, write: bool = True) -> Engine:
    engine = Engine(pages=pages, host_pages=host_pages, write=write)
    closing.callback(engine.close)
    return engine


# 1. Read after the computation that wrote


@fence_or_none
@pytest.mark.parametrize("how", ["copy", "copier", "export"])
def test_what_a_forward_is_still_writing_is_copied_when_it_is_written(how: str, fenced: bool) -> None:
    storage = make_storage(4, host_pages=4, seed=0)
    before, new = page_bytes(storage, 2), torch.randn(storage.pages[2].shape)

    def compute() -> None:
        storage.pages[2] = new

    forward = Late(compute)
    after: Fence = forward if fenced else Passed()
    if how == "export":
        (buffer,) = storage.gather([(Tier.DEVICE, 2)], PAGE, after)
        copied = buffer.tobytes()
    else:
        if how == "copy":
            storage.copy(Tier.HOST, [2], [3], after)
        else:
            copy_by_thread(storage, Tier.HOST, [2], [3], after)
        copied = page_bytes(storage, 3, tier=Tier.HOST)
    forward.finish()
    assert page_bytes(storage, 2) != before
    assert copied == (page_bytes(storage, 2) if fenced else before)


def copy_by_thread(storage: KVStorage, to: Tier, sources: list[int], targets: list[int], after: Fence) -> None:
    woken: queue.SimpleQueue[None] = queue.SimpleQueue()
    copier = Copier(storage, wake=lambda: woken.put(None))
    copier.submit([Copy(copy_id=CopyId(1), to=to, sources=tuple(sources), targets=tuple(targets))], after)
    woken.get(timeout=PATIENCE_S)
    copier.close()


# 2. Reuse after the copy that reads


@fence_or_none
def test_no_page_of_a_copy_is_handed_out_before_it_is_over(fenced: bool, closing: contextlib.ExitStack) -> None:
    """A slow copy; abort, then allocate at once. The fence is the lock of what is copied."""
    engine = engine_with(closing, pages=6)
    cache = engine.cache
    image = parked(cache, ANN, 16)
    pages = [page for _, page in cache.kept.sources(image)]
    written = engine.write(pages, seed=1)
    (copy,) = engine.launch()
    node = image.node
    assert cache.kept.drop(image) is None, "aborted, and freed later"
    cache.kept.unpin(image, expires_at=0.0)
    if not fenced:
        cache._tree.unlock(node, Tier.DEVICE)
        node.arriving = None  # or the tree would not let go of it
    other = open_up_to(cache, BOB, OTHERS, 0)
    assert cache.grow(other, 2)
    assert cache.grow(other, 6) != fenced
    assert not set(other.table) & set(pages) or not fenced
    engine.write(other.table, seed=2)
    if not fenced:
        engine.storage.gate.set()
        engine.woken.get(timeout=PATIENCE_S)
        assert [page_bytes(engine.storage, page, tier=Tier.HOST) for page in copy.targets] != written
        return
    engine.land()
    assert [page_bytes(engine.storage, page, tier=Tier.HOST) for page in copy.targets] == written
    assert cache.grow(other, 6), "afterwards they are"
    cache.audit([other])


@fence_or_none
def test_no_page_of_an_export_is_handed_out_before_it_is_over(fenced: bool, closing: contextlib.ExitStack) -> None:
    """An export of whole pages is a view. The fence is the pin of the image."""
    engine = engine_with(closing, pages=4, write=False)
    cache = engine.cache
    image = parked(cache, ANN, 16)
    refs = cache.kept.sources(image)
    written = engine.write([page for _, page in refs], seed=1)
    buffers = engine.storage.gather(refs, 16, engine.storage.fence())
    if not fenced:
        cache.kept.unpin(image, expires_at=0.0)
    other = open_up_to(cache, BOB, OTHERS, 0)
    assert cache.grow(other, 4) != fenced
    engine.write(other.table, seed=2)
    exported = [buffer.tobytes() for buffer in buffers]
    assert (exported == written) == fenced


# 3. Write after the last reader of the target


@fence_or_none
@pytest.mark.parametrize("how", ["load", "copier", "restore", "restorer"])
def test_pages_that_a_slow_step_still_reads_are_written_when_it_has_read_them(how: str, fenced: bool) -> None:
    storage = make_storage(4, host_pages=4, seed=0)
    other = make_storage(4, seed=1)
    before, read = page_bytes(storage, 2), []
    step = Late(lambda: read.append(page_bytes(storage, 2)))
    after: Fence = step if fenced else Passed()
    match how:
        case "load":
            storage.copy(Tier.DEVICE, [3], [2], after)
        case "copier":
            copy_by_thread(storage, Tier.DEVICE, [3], [2], after)
        case "restore":
            storage.scatter([2], PAGE, other.gather([(Tier.DEVICE, 3)], PAGE, Passed()), after)
        case "restorer":
            restore_by_thread(storage, other, after)
    step.finish()
    written = page_bytes(other, 3) if how.startswith("restore") else page_bytes(storage, 3, tier=Tier.HOST)
    assert page_bytes(storage, 2) == written
    assert read == ([before] if fenced else [written])


def restore_by_thread(storage: KVStorage, source: KVStorage, after: Fence) -> None:
    """Page 3 of `source` into page 2."""
    woken: queue.SimpleQueue[None] = queue.SimpleQueue()
    reader = DictReader()
    reader.put("s", make_segment(source, [3], PAGE))
    restorer = Restorer(storage, FINGERPRINT, reader, timeout_s=PATIENCE_S, wake=lambda: woken.put(None))
    restorer.submit((ANN, 0), make_image(PAGE, run("s", 0, 1)), 0, [2], after)
    woken.get(timeout=PATIENCE_S)
    (restored,) = restorer.poll()
    assert restored.error is None
    restorer.close()


# 4. Use after the copy that writes


@fence_or_none
def test_pages_are_used_when_their_load_is_over(fenced: bool, closing: contextlib.ExitStack) -> None:
    """The fence is that nothing is indexed before the copy is told of; without it, it is told of too early."""
    engine = engine_with(closing, pages=6)
    cache = engine.cache
    sequence = filled(cache, ANN, 16)
    written = engine.write(sequence.table, seed=1)
    engine.launch()
    engine.land()
    cache.close(sequence)
    assert cache.make_room(6)
    engine.write([1, 2, 3, 4, 5, 6], seed=2)
    engine.storage.gate.clear()
    engine.storage.entered.clear()
    holding = open_up_to(cache, BOB, TOKENS, 0)
    assert cache.load(holding, key(TOKENS, 16), 4, room=4)
    (copy,) = engine.launch()
    if not fenced:
        cache.tiered.copied(copy.copy_id, ok=True)
    found = stored(cache, pages=4)
    assert (found.device, found.arriving) == ((0, True) if fenced else (4, False))
    early = open_up_to(cache, EVE, TOKENS, 4)
    assert len(early.table) == found.device
    if not fenced:
        assert [page_bytes(engine.storage, page) for page in early.table] != written
        return
    with pytest.raises(AssertionError, match="during a load"):
        cache.commit(holding, key(TOKENS, 16))
    engine.land()
    assert stored(cache, pages=4).device == 4
    assert [page_bytes(engine.storage, page) for page in holding.table] == written
    cache.commit(holding, key(TOKENS, 16))


# Not a fence, but of the same kind


def test_a_node_that_is_split_during_its_copy_has_the_same_bytes_in_both_tiers(closing: contextlib.ExitStack) -> None:
    """Case C4: a sibling insert splits it."""
    engine = engine_with(closing, pages=8)
    cache = engine.cache
    sequence = filled(cache, ANN, 16)
    written = engine.write(sequence.table, seed=1)
    engine.launch()
    left(cache, BOB, 8, TOKENS[:4] + OTHERS)
    engine.land()
    assert residencies(cache) == [(Residency.BOTH, 1), (Residency.BOTH, 3)]
    on_host = [page for node in sequence.node.path() for page in node.host.pages]
    assert [page_bytes(engine.storage, page, tier=Tier.HOST) for page in on_host] == written
    cache.audit([sequence])
