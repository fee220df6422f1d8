"""Weights whose buckets something else holds: one at a time, refused if they are not as promised."""

import weakref
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from rollout.errors import WeightsChecksumError, WeightsSourceError
from rollout.transport.buckets import Buffer
from rollout.transport.disk import DiskWeights, publish
from rollout.transport.source import MemoryWeights, WeightsSource
from tests.transport.weights import assert_same, packed, weights


def test_weights_in_memory_are_those_that_were_packed() -> None:
    buckets, manifest = packed(weights(), 2000)
    source = MemoryWeights(manifest, lambda index: buckets[index].buffer)
    source.verify()
    for _ in range(2):
        assert_same(source.tensors(), weights())
    assert source.manifest is manifest


def test_a_bucket_is_let_go_before_the_next_is_fetched() -> None:
    buckets, manifest = packed(weights(layers=6), 2000)
    assert len(buckets) > 5
    fetched: list[weakref.ref[Buffer]] = []

    def fetch(index: int) -> Buffer:
        assert not any(buffer() is not None for buffer in fetched)
        arrived = buckets[index].buffer.copy()
        fetched.append(weakref.ref(arrived))
        return arrived

    source = MemoryWeights(manifest, fetch)
    source.verify()
    for _, tensor in source.tensors():
        del tensor
    assert len(fetched) == 2 * len(buckets)
    assert fetched[-1]() is None


def test_a_flipped_bit_in_a_bucket_is_found() -> None:
    buckets, manifest = packed(weights(), 2000)
    damaged = [bucket.buffer.copy() for bucket in buckets]
    entry = manifest.entries[-3]
    damaged[entry.bucket][entry.offset] ^= 1
    source = MemoryWeights(manifest, damaged.__getitem__)
    with pytest.raises(WeightsChecksumError, match=entry.name):
        source.verify()


@pytest.mark.parametrize("wrong", [np.zeros(0, dtype=np.uint8), np.zeros(1 << 20, dtype=np.uint8)])
def test_a_bucket_of_another_size_is_refused(wrong: Buffer) -> None:
    _, manifest = packed(weights(), 2000)
    source = MemoryWeights(manifest, lambda _: wrong)
    with pytest.raises(WeightsSourceError, match=f"bucket 0 has {wrong.nbytes} bytes, expected"):
        source.verify()
    with pytest.raises(WeightsSourceError, match="bucket 0"):
        next(source.tensors())


def test_what_was_closed_is_not_read(tmp_path: Path) -> None:
    buckets, manifest = packed(weights(), 2000)
    publish(tmp_path / "w", weights().items(), bucket_bytes=2000)
    sources: Iterable[WeightsSource] = (
        MemoryWeights(manifest, lambda index: buckets[index].buffer),
        DiskWeights(tmp_path / "w"),
    )
    for source in sources:
        source.close()
        source.close()
        with pytest.raises(WeightsSourceError, match="closed"):
            source.verify()
        with pytest.raises(WeightsSourceError, match="closed"):
            next(iter(source.tensors()))
