"""Pages out, in and between the tiers: every byte of every valid token, and not one more."""

from typing import Any

import numpy as np
import pytest
import torch

from rollout.kv.fence import Passed
from rollout.kv.storage import KVStorage
from rollout.kv.tiers import Tier
from tests.kv.pool import (
    DEVICES,
    DTYPES,
    HEAD_DIM,
    HEADS,
    LAYERS,
    PAGE,
    make_storage,
    on_device,
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
    buffers = storage.gather(on_device(pages), tokens, Passed())
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
    target.scatter(targets, tokens, source.gather(on_device(sources), tokens, Passed()), Passed())
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
    whole, tail = storage.gather(on_device([2, 1]), PAGE + 1, Passed())
    memory = storage.pages.numpy()
    assert np.shares_memory(whole, memory)
    assert not np.shares_memory(tail, memory)


@on_all_devices
def test_buffers_that_cannot_be_written_are_scattered_and_left_as_they_are(device: str) -> None:
    source, target = make_storage(3, seed=0, device=device), make_storage(3, seed=1, device=device)
    buffers = [np.array(buffer) for buffer in source.gather(on_device([3, 1]), PAGE + 2, Passed())]
    for buffer in buffers:
        buffer.flags.writeable = False
    contents = [buffer.tobytes() for buffer in buffers]
    target.scatter([1, 2], PAGE + 2, buffers, Passed())
    target.pages.zero_()
    assert [buffer.tobytes() for buffer in buffers] == contents


@pytest.mark.parametrize(("pages", "tokens"), [([1], 0), ([1], PAGE + 1), ([1, 2], PAGE), ([], 1)])
def test_pages_and_tokens_that_do_not_fit_each_other_assert(pages: list[int], tokens: int) -> None:
    storage = make_storage(3, seed=0)
    with pytest.raises(AssertionError):
        storage.gather(on_device(pages), tokens, Passed())
    with pytest.raises(AssertionError):
        storage.scatter(pages, tokens, [], Passed())


@on_all_devices
@pytest.mark.parametrize(("pages", "count"), [([1, 2], 1), ([1], 2)])
def test_scattering_another_number_of_buffers_than_pages_is_an_error(pages: list[int], count: int, device: str) -> None:
    storage = make_storage(3, seed=0, device=device)
    buffers = [np.array(buffer) for buffer in storage.gather(on_device([3] * count), count * PAGE, Passed())]
    with pytest.raises(ValueError, match="zip"):
        storage.scatter(pages, len(pages) * PAGE, buffers, Passed())


@on_all_devices
@all_dtypes
@pytest.mark.parametrize("to", Tier)
@pytest.mark.parametrize(
    ("sources", "targets"),
    [([2], [5]), ([1, 2, 3], [3, 4, 5]), ([3, 2, 1], [1, 2, 3]), ([4, 5, 1, 2], [1, 2, 3, 5]), ([], [])],
)
def test_whole_pages_are_copied_between_the_tiers_and_nothing_else_changes(
    sources: list[int], targets: list[int], to: Tier, dtype: torch.dtype, device: str
) -> None:
    storage = make_storage(5, host_pages=5, seed=0, dtype=dtype, device=device)
    source, target = tensors(storage)[to.other], tensors(storage)[to]
    before, expected = source.clone(), target.clone()
    expected[targets] = source[sources].to(target.device)
    storage.copy(to, sources, targets, Passed())
    assert torch.equal(target, expected)
    assert torch.equal(source, before)


def tensors(storage: KVStorage) -> dict[Tier, torch.Tensor]:
    return {Tier.DEVICE: storage.pages, Tier.HOST: storage.host_pages}


@on_all_devices
@pytest.mark.parametrize("tokens", LENGTHS)
def test_what_is_in_both_tiers_is_gathered_in_order(tokens: int, device: str) -> None:
    storage = make_storage(4, host_pages=4, seed=0, device=device)
    refs = [(Tier.HOST, 3), (Tier.DEVICE, 3), (Tier.HOST, 1)][: -(-tokens // PAGE)]
    assert [buffer.tobytes() for buffer in storage.gather(refs, tokens, Passed())] == [
        page_bytes(storage, page, tokens_in(i, tokens), tier) for i, (tier, page) in enumerate(refs)
    ]


@pytest.mark.parametrize("to", Tier)
def test_shadows_move_with_the_bytes(to: Tier) -> None:
    storage = make_storage(4, host_pages=4, seed=0, kind=WithCanary)
    assert storage.canaries is not None
    storage.canaries[to.other].put([2], PAGE, bytes(range(16 * PAGE)))
    storage.copy(to, [2], [4], Passed())
    assert storage.shadow([(to, 4)], PAGE - 1) == bytes(range(16 * (PAGE - 1)))


class WithCanary(KVStorage):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(canary=True, **sizes)
