"""Pages out and in again: every byte of every valid token, and not one more."""

import numpy as np
import pytest
import torch

from tests.kv.pool import (
    DEVICES,
    DTYPES,
    HEAD_DIM,
    HEADS,
    LAYERS,
    PAGE,
    make_storage,
    page_bytes,
    tokens_in,
)

on_all_devices = pytest.mark.parametrize("device", DEVICES)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
LENGTHS = range(1, 3 * PAGE + 1)


@on_all_devices
@all_dtypes
@pytest.mark.parametrize("tokens", LENGTHS)
def test_gather_packs_exactly_the_valid_tokens(dtype: torch.dtype, device: str, tokens: int) -> None:
    storage = make_storage(9, seed=0, dtype=dtype, device=device)
    pages = [7, 2, 9][: -(-tokens // PAGE)]
    buffers = storage.gather(pages, tokens)
    assert [buffer.tobytes() for buffer in buffers] == [
        page_bytes(storage, page, tokens_in(i, tokens)) for i, page in enumerate(pages)
    ]
    assert sum(buffer.nbytes for buffer in buffers) == tokens * storage.token_bytes


@on_all_devices
@all_dtypes
@pytest.mark.parametrize("tokens", LENGTHS)
def test_what_was_gathered_is_scattered_into_other_pages_and_nowhere_else(
    dtype: torch.dtype, device: str, tokens: int
) -> None:
    source = make_storage(9, seed=0, dtype=dtype, device=device)
    target = make_storage(6, seed=1, dtype=dtype, device=device)
    before = target.pages.clone()
    count = -(-tokens // PAGE)
    sources, targets = [7, 2, 9][:count], [3, 6, 1][:count]
    target.scatter(targets, tokens, source.gather(sources, tokens))
    for i, (page, origin) in enumerate(zip(targets, sources, strict=True)):
        valid = tokens_in(i, tokens)
        assert page_bytes(target, page, valid) == page_bytes(source, origin, valid)
        before[page, :, :, :valid] = source.pages[origin, :, :, :valid]
    assert torch.equal(target.pages, before)


@all_dtypes
def test_sizes_are_those_of_the_tensor(dtype: torch.dtype) -> None:
    storage = make_storage(5, seed=0, dtype=dtype)
    assert storage.pages.shape == (6, LAYERS, 2, PAGE, HEADS, HEAD_DIM)
    assert storage.page_bytes == storage.pages[0].nbytes == PAGE * storage.token_bytes
    assert storage.pages[0].is_contiguous()


def test_whole_pages_are_gathered_without_a_copy_on_cpu() -> None:
    storage = make_storage(3, seed=0)
    whole, tail = storage.gather([2, 1], PAGE + 1)
    memory = storage.pages.numpy()
    assert np.shares_memory(whole, memory)
    assert not np.shares_memory(tail, memory)


@on_all_devices
def test_buffers_that_cannot_be_written_are_scattered_and_left_as_they_are(device: str) -> None:
    source, target = make_storage(3, seed=0, device=device), make_storage(3, seed=1, device=device)
    buffers = [np.array(buffer) for buffer in source.gather([3, 1], PAGE + 2)]
    for buffer in buffers:
        buffer.flags.writeable = False
    contents = [buffer.tobytes() for buffer in buffers]
    target.scatter([1, 2], PAGE + 2, buffers)
    target.pages.zero_()
    assert [buffer.tobytes() for buffer in buffers] == contents


@pytest.mark.parametrize(("pages", "tokens"), [([1], 0), ([1], PAGE + 1), ([1, 2], PAGE), ([], 1)])
def test_pages_and_tokens_that_do_not_fit_each_other_assert(pages: list[int], tokens: int) -> None:
    storage = make_storage(3, seed=0)
    with pytest.raises(AssertionError):
        storage.gather(pages, tokens)
    with pytest.raises(AssertionError):
        storage.scatter(pages, tokens, [])


@on_all_devices
@pytest.mark.parametrize(("pages", "count"), [([1, 2], 1), ([1], 2)])
def test_scattering_another_number_of_buffers_than_pages_is_an_error(pages: list[int], count: int, device: str) -> None:
    storage = make_storage(3, seed=0, device=device)
    buffers = [np.array(buffer) for buffer in storage.gather([3] * count, count * PAGE)]
    with pytest.raises(ValueError, match="zip"):
        storage.scatter(pages, len(pages) * PAGE, buffers)
