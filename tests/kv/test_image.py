"""Segments say what they hold, and what is not as said is refused (case C12)."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rollout.errors import SegmentDamagedError
from rollout.kv.fence import Passed
from rollout.kv.image import Buffer, checksum, describe, join, split, verify
from rollout.kv.keys import Fingerprint
from rollout.kv.restore import Segment
from rollout.kv.tiers import Tier
from tests.kv.pool import DTYPES, FINGERPRINT, PAGE, make_segment, make_storage, page_bytes, tokens_in

STORAGE = make_storage(6, seed=0)
PAGES = [5, 2, 6]
TOKENS = 2 * PAGE + 3


def segment(tokens: int = TOKENS) -> Segment:
    return make_segment(STORAGE, PAGES[: -(-tokens // PAGE)], tokens)


def check(found: Segment, pages: range = range(3), tokens: int = TOKENS, expected: Fingerprint = FINGERPRINT) -> None:
    verify(found.manifest, found.buffers, pages, tokens, expected)


def with_page(found: Segment, index: int, buffer: Buffer) -> Segment:
    buffers = [*found.buffers]
    buffers[index] = buffer
    return replace(found, buffers=buffers)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens", range(1, 3 * PAGE + 1))
def test_a_manifest_says_the_sizes_of_its_pages(tokens: int, dtype: object) -> None:
    found = segment(tokens)
    sizes = [len(page_bytes(STORAGE, page, tokens_in(i, tokens))) for i, page in enumerate(PAGES)]
    assert [found.manifest.page_nbytes(i) for i in range(len(found.buffers))] == sizes[: len(found.buffers)]
    assert found.manifest.nbytes == sum(sizes)
    check(found, range(len(found.buffers)), tokens)


def test_a_part_of_a_segment_is_verified_by_its_own_tokens() -> None:
    found = segment()
    check(found, range(1, 3), PAGE + 3)
    check(found, range(1, 2), PAGE)
    check(found, range(2, 3), 3)


def test_only_the_pages_asked_for_are_looked_at() -> None:
    damaged = with_page(segment(), 1, np.zeros(7, dtype=np.uint8))
    check(damaged, range(1), PAGE)
    check(damaged, range(2, 3), 3)
    with pytest.raises(SegmentDamagedError, match="page 1 has 7 bytes"):
        check(damaged)


@pytest.mark.parametrize("page", [0, 1, 2])
@pytest.mark.parametrize("where", [0, 0.5, 1])
def test_one_flipped_bit_is_refused(page: int, where: float) -> None:
    found = segment()
    buffer = np.array(found.buffers[page])
    buffer[int(where * (buffer.size - 1))] ^= 1
    with pytest.raises(SegmentDamagedError, match=f"page {page}: checksum"):
        check(with_page(found, page, buffer))


@pytest.mark.parametrize("page", [0, 1, 2])
@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b[:0], lambda b: np.append(b, b[:1])])
def test_a_page_of_another_size_is_refused(page: int, change: Callable[[Buffer], Buffer]) -> None:
    found = segment()
    with pytest.raises(SegmentDamagedError, match=f"page {page} has .* bytes, expected"):
        check(with_page(found, page, change(found.buffers[page])))


def test_whole_pages_in_another_order_are_refused() -> None:
    found = segment()
    first, second, tail = found.buffers
    with pytest.raises(SegmentDamagedError, match="page 0: checksum"):
        check(replace(found, buffers=[second, first, tail]))


@pytest.mark.parametrize("count", [0, 2, 4])
def test_another_number_of_pages_is_refused(count: int) -> None:
    found = segment()
    with pytest.raises(SegmentDamagedError, match=f"segment has {count} pages and 3 checksums"):
        check(replace(found, buffers=[*found.buffers, *found.buffers][:count]))


@pytest.mark.parametrize("count", [0, 2])
def test_a_manifest_that_is_too_short_is_refused(count: int) -> None:
    found = segment()
    short = replace(found.manifest, checksums=found.manifest.checksums[:count])
    with pytest.raises(SegmentDamagedError, match=f"3 pages and {count} checksums"):
        check(replace(found, manifest=short))


@pytest.mark.parametrize("pages", [range(1, 4), range(3, 4), range(-1, 1), range(2, 2), range(2, 1)])
def test_pages_that_a_segment_does_not_have_are_refused(pages: range) -> None:
    with pytest.raises(SegmentDamagedError, match="were asked for"):
        check(segment(), pages)


@pytest.mark.parametrize("tokens", [0, PAGE, 2 * PAGE, TOKENS - 1, TOKENS + 1, 4 * PAGE])
def test_another_number_of_tokens_is_refused(tokens: int) -> None:
    with pytest.raises(SegmentDamagedError, match="bytes, expected"):
        check(segment(), tokens=tokens)


def test_a_segment_of_another_model_is_refused() -> None:
    with pytest.raises(SegmentDamagedError, match="fingerprint tiny, expected other"):
        check(segment(), expected=Fingerprint("other"))


@pytest.mark.parametrize("page_tokens", [1, PAGE * 2])
def test_a_manifest_of_another_page_size_is_refused(page_tokens: int) -> None:
    found = segment()
    with pytest.raises(SegmentDamagedError, match="bytes, expected"):
        check(replace(found, manifest=replace(found.manifest, page_tokens=page_tokens)))


def test_a_manifest_of_another_token_size_is_refused() -> None:
    found = segment()
    with pytest.raises(SegmentDamagedError, match="bytes, expected"):
        check(replace(found, manifest=replace(found.manifest, token_bytes=STORAGE.token_bytes // 2)))


def test_checksums_are_xxh3_of_the_bytes() -> None:
    assert checksum(np.frombuffer(b"", dtype=np.uint8)) == 0x2D06800538D394C2
    assert checksum(np.frombuffer(b"rollout", dtype=np.uint8)) == 0x91EBFCE55076A7F6


def test_describing_buffers_of_the_wrong_size_asserts() -> None:
    found = segment()
    with pytest.raises(AssertionError):
        describe(
            found.buffers,
            fingerprint=FINGERPRINT,
            page_tokens=PAGE,
            token_bytes=STORAGE.token_bytes,
            tokens=TOKENS + 1,
        )


@pytest.mark.parametrize("tokens", [6 * PAGE, 6 * PAGE - 1])
@pytest.mark.parametrize("pages", [[1, 2, 3, 4, 5, 6], [4, 5, 6, 1, 2, 3], [6, 5, 4, 3, 2, 1], [1, 2, 4, 6, 7, 8]])
def test_joined_buffers_hold_the_same_bytes_and_are_split_into_the_same_pages(
    monkeypatch: pytest.MonkeyPatch, pages: list[int], tokens: int
) -> None:
    storage = make_storage(8, seed=1)
    monkeypatch.setattr("rollout.kv.image.JOINED_BYTES", 3 * storage.page_bytes)
    buffers = storage.gather([(Tier.DEVICE, page) for page in pages], tokens, Passed())
    facts = {"fingerprint": FINGERPRINT, "page_tokens": PAGE, "token_bytes": storage.token_bytes, "tokens": tokens}
    manifest = describe(buffers, **facts)
    joined = join(buffers, storage.runs([(Tier.DEVICE, page) for page in pages], tokens))
    assert b"".join(buffer.tobytes() for buffer in joined) == b"".join(buffer.tobytes() for buffer in buffers)
    whole = tokens // PAGE
    runs = [len(list(run)) for _, run in itertools.groupby(enumerate(pages[:whole]), lambda pair: pair[1] - pair[0])]
    assert len(joined) == sum(1 if run >= 3 else run for run in runs) + len(pages) - whole
    apart = split(manifest, joined)
    assert [buffer.tobytes() for buffer in apart] == [buffer.tobytes() for buffer in buffers]
    verify(manifest, apart, range(len(pages)), tokens, FINGERPRINT)


def test_pages_of_different_tiers_do_not_follow_each_other() -> None:
    storage = make_storage(4, host_pages=4, seed=1)
    refs = [(Tier.DEVICE, 1), (Tier.HOST, 2), (Tier.HOST, 3), (Tier.DEVICE, 4)]
    assert storage.runs(refs, 4 * PAGE) == [1, 2, 1]
    assert storage.runs(refs[:3], 3 * PAGE - 1) == [1, 1, 1]  # the last one is packed, in memory of its own


@pytest.mark.parametrize("cut", [1, 100])
def test_buffers_that_are_not_whole_pages_are_refused(cut: int) -> None:
    storage = make_storage(4, seed=1)
    buffers = storage.gather([(Tier.DEVICE, page) for page in (1, 2, 3)], 3 * PAGE, Passed())
    manifest = describe(
        buffers, fingerprint=FINGERPRINT, page_tokens=PAGE, token_bytes=storage.token_bytes, tokens=3 * PAGE
    )
    with pytest.raises(SegmentDamagedError, match="not whole pages"):
        split(manifest, [buffers[0], np.concatenate(buffers[1:])[:-cut]])
    with pytest.raises(SegmentDamagedError, match="not whole pages"):
        split(manifest, [*buffers, buffers[0]])
