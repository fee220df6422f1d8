"""Buckets hold tensors bit for bit, wherever they come from, and one bucket is all that packing holds."""

import pickle
import tracemalloc
import weakref
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from rollout.errors import WeightsChecksumError, WeightsSourceError
from rollout.transport.buckets import Bucket, Delta, describe, pack, unpack, verify
from tests.transport.weights import assert_same, content, packed, weights

SIZES = [1, 64, 1000, 4096, 1 << 20]


@pytest.mark.parametrize("bucket_bytes", SIZES)
def test_what_was_packed_is_unpacked(bucket_bytes: int) -> None:
    tensors = weights()
    buckets, manifest = packed(tensors, bucket_bytes)
    assert_same((pair for bucket in buckets for pair in unpack(bucket.buffer, bucket.entries)), tensors)
    assert [bucket.index for bucket in buckets] == [*range(len(buckets))]
    assert [name for name, _, _ in manifest.described()] == [*tensors]
    assert manifest.described() == describe(tensors.items())
    assert manifest.nbytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("bucket_bytes", SIZES)
def test_a_bucket_is_no_bigger_than_asked_unless_a_tensor_is(bucket_bytes: int) -> None:
    for bucket in pack(weights().items(), bucket_bytes):
        holding = [entry for entry in bucket.entries if entry.nbytes]
        assert bucket.buffer.nbytes <= bucket_bytes or len(holding) == 1
        assert all(entry.offset % 64 == 0 for entry in bucket.entries)


def test_checksums_are_xxh3_of_the_bytes_and_gaps_are_zero() -> None:
    tensors = weights()
    [bucket] = pack(tensors.items(), 1 << 20)
    covered = np.zeros(bucket.buffer.nbytes, dtype=bool)
    for entry in bucket.entries:
        raw = tensors[entry.name].flatten().view(torch.uint8).numpy().tobytes()
        stop = entry.offset + entry.nbytes
        assert bucket.buffer[entry.offset : stop].tobytes() == raw
        assert entry.checksum == xxhash.xxh3_64(raw).intdigest()
        assert not covered[entry.offset : stop].any()
        covered[entry.offset : stop] = True
    assert not bucket.buffer[~covered].any()


def test_strided_transposed_and_trained_tensors_are_copied_as_they_look() -> None:
    whole = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    sources = {
        "transposed": whole.T,
        "columns": whole[:, 1:7:2],
        "expanded": whole[:1].expand(4, 8),
        "parameter": torch.nn.Parameter(whole.clone()),
        "computed": torch.nn.Parameter(whole.clone()) * 2,
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    expected = {name: torch.tensor(tensor.detach().tolist()) for name, tensor in sources.items()}
    [bucket] = pack(sources.items(), 1 << 20)
    assert_same(unpack(bucket.buffer, bucket.entries), expected)


class Sharded:
    """Stands in for a DTensor: only its whole has bytes."""

    def __init__(self, tensor: Tensor, gathered: list[Tensor]) -> None:
        self._tensor, self._gathered = tensor, gathered
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def full_tensor(self) -> Tensor:
        self._gathered.append(self._tensor)
        return self._tensor.clone()


def test_a_sharded_tensor_is_gathered_when_its_turn_comes() -> None:
    tensors = weights()
    gathered: list[Tensor] = []
    shards = {name: Sharded(tensor, gathered) for name, tensor in tensors.items()}
    assert describe(shards.items()) == describe(tensors.items())  # type: ignore[arg-type]
    assert not gathered
    packing = pack(shards.items(), 2000)  # type: ignore[arg-type]
    first = next(packing)
    assert len(gathered) == len(first.entries) + 1
    buckets = [first, *packing]
    assert len(gathered) == len(tensors)
    assert_same((pair for bucket in buckets for pair in unpack(bucket.buffer, bucket.entries)), tensors)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_are_copied() -> None:
    tensors = weights()
    [bucket] = pack(((name, tensor.cuda()) for name, tensor in tensors.items()), 1 << 20)
    assert_same(unpack(bucket.buffer, bucket.entries), tensors)


def test_a_bucket_goes_through_pickle_out_of_band_and_is_not_copied() -> None:
    tensors = weights()
    [bucket] = pack(tensors.items(), 1 << 20)
    outside: list[pickle.PickleBuffer] = []
    inside = pickle.dumps(bucket, protocol=5, buffer_callback=outside.append)
    [view] = outside
    assert view.raw().nbytes == bucket.buffer.nbytes
    assert len(inside) < 200 * len(tensors)
    shared = bytes(view.raw())
    arrived: Bucket = pickle.loads(inside, buffers=[shared])
    assert arrived.entries == bucket.entries
    assert np.shares_memory(arrived.buffer, np.frombuffer(shared, dtype=np.uint8))
    verify(arrived.buffer, arrived.entries)
    assert_same(unpack(arrived.buffer, arrived.entries), tensors)
    for one in (bucket, arrived):
        assert not one.buffer.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            one.buffer[0] = 1


def test_unpacked_tensors_are_views_that_keep_the_buffer_alive() -> None:
    [bucket] = pack(weights().items(), 1 << 20)
    buffer = bucket.buffer
    start = buffer.__array_interface__["data"][0]
    tensors = dict(unpack(buffer, bucket.entries))
    places = {name: tensor.data_ptr() - start for name, tensor in tensors.items() if tensor.nbytes}
    assert places == {entry.name: entry.offset for entry in bucket.entries if entry.nbytes}
    alive = weakref.ref(buffer.base)
    expected = content(tensors["model.layers.0.mlp.up_proj.weight"])
    del buffer, bucket
    assert alive() is not None
    assert content(tensors["model.layers.0.mlp.up_proj.weight"]) == expected
    del tensors
    assert alive() is None


def test_a_flipped_bit_is_found_and_named() -> None:
    [bucket] = pack(weights().items(), 1 << 20)
    verify(bucket.buffer, bucket.entries)
    for entry in bucket.entries:
        for place in {entry.offset, entry.offset + entry.nbytes - 1} if entry.nbytes else ():
            damaged = bucket.buffer.copy()
            damaged[place] ^= 0x10
            with pytest.raises(WeightsChecksumError, match=entry.name) as raised:
                verify(damaged, bucket.entries)
            assert raised.value.tensor == entry.name
            assert raised.value.expected == entry.checksum != raised.value.got
            again = pickle.loads(pickle.dumps(raised.value))
            assert (str(again), again.tensor, again.got) == (str(raised.value), entry.name, raised.value.got)


def test_a_tensor_beyond_its_buffer_is_refused() -> None:
    [bucket] = pack(weights().items(), 1 << 20)
    last = next(entry for entry in reversed(bucket.entries) if entry.nbytes)
    for look in (verify, lambda buffer, entries: list(unpack(buffer, entries))):
        with pytest.raises(WeightsSourceError, match=f"{last.name}: bytes"):
            look(bucket.buffer[: last.offset + last.nbytes - 1], bucket.entries)
        with pytest.raises(WeightsSourceError, match=f"{last.name}: bytes"):
            look(bucket.buffer, [replace(last, offset=last.offset + 64)])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(WeightsSourceError, match="w: dtype: got"):
        list(pack([("w", torch.zeros(2, dtype=dtype))], 64))


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(WeightsSourceError, match="w: more than once"):
        list(pack([("w", torch.zeros(2)), ("w", torch.zeros(2))], 4))


def test_no_tensors_are_no_buckets() -> None:
    assert list(pack([], 64)) == []


def test_packing_holds_one_bucket_and_one_tensor() -> None:
    bucket_bytes = 4 << 20
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def source() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for index in range(100):
            tensor = torch.full((bucket_bytes // 40,), float(index))
            alive.add(tensor)
            most = max(most, len(alive))
            yield f"w{index}", tensor
            del tensor

    tracemalloc.start()
    try:
        buckets = 0
        for bucket in pack(source(), bucket_bytes):
            buckets += 1
            del bucket
        _, peak = tracemalloc.get_traced_memory()
        assert buckets >= 10
        assert peak < 1.2 * bucket_bytes
        tracemalloc.reset_peak()
        for bucket in pack(source(), bucket_bytes):  # noqa: B007 (holds one while the next is packed)
            pass
        _, peak = tracemalloc.get_traced_memory()
        assert peak < 2.2 * bucket_bytes
    finally:
        tracemalloc.stop()
    assert most <= 2


def test_a_delta_is_what_changed_and_knows_the_checksums_of_all() -> None:
    old = weights()
    first = Delta(old.items(), {})
    assert_same(first, old)
    assert first.checksums == packed(old, 1 << 20)[1].checksums

    new = {name: tensor.clone() for name, tensor in old.items()}
    new["model.layers.1.mlp.up_proj.weight"][3, 5] += 1
    new["scale"] *= 2
    changed = {name: new[name] for name in ("model.layers.1.mlp.up_proj.weight", "scale")}
    second = Delta(
        ((name, tensor.mT.contiguous().mT if tensor.ndim == 2 else tensor) for name, tensor in new.items()),
        first.checksums,
    )
    assert_same(second, changed)
    assert second.checksums == packed(new, 1 << 20)[1].checksums

    assert dict(Delta(new.items(), second.checksums)) == {}
    part = Delta([("scale", old["scale"])], second.checksums)
    assert_same(part, {"scale": old["scale"]})
    assert part.checksums == second.checksums | {"scale": first.checksums["scale"]}


def test_a_delta_sees_what_floats_do_not_tell_apart() -> None:
    old = {"w": torch.tensor([0.0, float("nan")])}
    first = Delta(old.items(), {})
    assert [name for name, _ in first] == ["w"]
    assert list(Delta({"w": old["w"].clone()}.items(), first.checksums)) == []
    assert [name for name, _ in Delta({"w": torch.tensor([-0.0, float("nan")])}.items(), first.checksums)] == ["w"]
