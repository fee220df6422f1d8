"""Tensors packed into few large buffers, and read back as views of them.

A bucket is one uint8 array: pickle 5 carries it out-of-band, so it reaches shared memory with one copy and is read
there with none. Tensors begin at multiples of 64 bytes. Each is copied once, straight from where it is (any device, any
strides) to its place, and its checksum is made from what was written there.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from rollout.errors import WeightsChecksumError, WeightsSourceError
from rollout.transport.manifest import ITEM_BYTES, Described, Entry

Buffer = NDArray[np.uint8]
"""One-dimensional and contiguous."""

ALIGNMENT = 64
"""Bytes."""

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    index: int
    buffer: Buffer
    """Not writable."""
    entries: tuple[Entry, ...]


def pack(named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Tensors in their order, in buckets of at most `bucket_bytes`; a larger tensor has a bucket of its own.

    Keeps no bucket that it handed out, and no tensor but the one being read. A tensor with a `full_tensor` is gathered
    when its turn comes: where that is a collective, the other ranks go through the same tensors and call `gathered`.
    Raises `WeightsSourceError` for a dtype that is not supported or a name that came before.
    """
    assert bucket_bytes > 0, bucket_bytes
    names: set[str] = set()
    index = 0
    filling: _Filling | None = None
    for name, tensor in _pairs(named_tensors):
        if name in names:
            raise WeightsSourceError(f"{name}: more than once")
        names.add(name)
        whole = gathered(tensor)
        del tensor
        if filling is not None and not filling.has_room(whole.nbytes):
            yield filling.taken()
            index, filling = index + 1, None
        if filling is None:
            filling = _Filling(index, max(bucket_bytes, whole.nbytes))
        filling.add(name, whole)
        del whole
    if filling is not None:
        yield filling.taken()


def _pairs(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same, or `WeightsSourceError` at what is not a name with a tensor."""
    for each in named_tensors:
        named = isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str)
        if not (named and (isinstance(each[1], Tensor) or hasattr(each[1], "full_tensor"))):
            what = f"{each[0]}: {type(each[1]).__name__}" if named else type(each).__name__
            raise WeightsSourceError(f"got {what:.80}, allowed: a name with a tensor")
        if isinstance(each[1], Tensor) and (each[1].is_meta or each[1].layout is not torch.strided):
            kind = "meta" if each[1].is_meta else str(each[1].layout)
            raise WeightsSourceError(f"{each[0]}: got a {kind} tensor, allowed: a dense one")
        yield each


def describe(named_tensors: Iterable[tuple[str, Tensor]]) -> tuple[Described, ...]:
    """What tensors are, without reading or gathering any."""
    return tuple((name, tuple(tensor.shape), _name(tensor.dtype)) for name, tensor in named_tensors)


def unpack(buffer: Buffer, entries: Iterable[Entry]) -> Iterator[tuple[str, Tensor]]:
    """Views of the tensors of a buffer, which they keep alive; they are only ever copied from, as the memory may be
    shared. Raises `WeightsSourceError` for an entry that reaches beyond the buffer."""
    for entry in entries:
        yield entry.name, _view(_bytes(buffer, entry), DTYPES[entry.dtype], entry.shape)


def verify(buffer: Buffer, entries: Iterable[Entry]) -> None:
    """Raises `WeightsChecksumError` that names the first tensor whose bytes are not those that were packed, and
    `WeightsSourceError` for one that reaches beyond the buffer."""
    for entry in entries:
        check(_bytes(buffer, entry), entry)


def check(content: Buffer, entry: Entry) -> None:
    """The checksum of one tensor's bytes, if it has one. Raises `WeightsChecksumError`."""
    if entry.checksum is not None and (got := checksum(content)) != entry.checksum:
        raise WeightsChecksumError(
            f"{entry.name}: checksum {got:#x}, expected {entry.checksum:#x}",
            tensor=entry.name,
            got=got,
            expected=entry.checksum,
        )


def checksum(content: Buffer) -> int:
    return xxhash.xxh3_64_intdigest(content.data)


def as_tensor(buffer: Buffer) -> Tensor:
    """The same memory, which must not be written if it is not writable: torch has no read-only tensors."""
    return torch.from_numpy(np.asarray(_Memory(buffer)))


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, such as a DTensor; any other as it is."""
    gather = getattr(tensor, "full_tensor", None)
    return (tensor if gather is None else gather()).detach()


class Delta:
    """Of named tensors, those whose bytes are not what they were: iterate over it once, into any transport.

    `checksums` is what the next `Delta` is compared with: complete once this one is exhausted. Tensors that are not
    named count as unchanged.
    """

    def __init__(self, named_tensors: Iterable[tuple[str, Tensor]], previous: Mapping[str, int]) -> None:
        self._named_tensors = named_tensors
        self._previous = previous
        self.checksums = dict(previous)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._named_tensors:
            whole = gathered(tensor).cpu().contiguous()
            del tensor
            self.checksums[name] = checksum(whole.reshape(-1).view(torch.uint8).numpy())
            if self.checksums[name] != self._previous.get(name):
                yield name, whole
            del whole


class _Filling:
    """A bucket that is being filled."""

    def __init__(self, index: int, capacity: int) -> None:
        memory = np.empty(capacity + ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        self.index = index
        self.entries: list[Entry] = []
        self._buffer: Buffer = memory[start : start + capacity]
        self._used = 0

    def has_room(self, nbytes: int) -> bool:
        return _aligned(self._used) + nbytes <= self._buffer.nbytes

    def add(self, name: str, tensor: Tensor) -> None:
        start = _aligned(self._used)
        stop = start + tensor.nbytes
        content = self._buffer[start:stop]
        entry = Entry(
            name=name,
            dtype=_name(tensor.dtype),
            shape=tuple(tensor.shape),
            bucket=self.index,
            offset=start,
            nbytes=tensor.nbytes,
            checksum=None,
        )
        self._buffer[self._used : start] = 0
        _view(content, tensor.dtype, entry.shape).copy_(tensor)
        self.entries.append(replace(entry, checksum=checksum(content)))
        self._used = stop

    def taken(self) -> Bucket:
        """What was filled; this object is then of no more use."""
        buffer = self._buffer[: self._used]
        del self._buffer
        buffer.flags.writeable = False
        return Bucket(index=self.index, buffer=buffer, entries=tuple(self.entries))


class _Memory:
    """The memory of an array as if it were writable: torch warns of one that is not, and takes it all the same."""

    def __init__(self, array: Buffer) -> None:
        self._array = array  # kept alive
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def _view(content: Buffer, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return as_tensor(content).view(dtype).view(shape)


def _bytes(buffer: Buffer, entry: Entry) -> Buffer:
    stop = entry.offset + entry.nbytes
    if stop > buffer.nbytes:
        raise WeightsSourceError(f"{entry.name}: bytes {entry.offset} to {stop} of a buffer of {buffer.nbytes}")
    return buffer[entry.offset : stop]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
