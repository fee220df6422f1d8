"""Weights broadcast by torch.distributed from a trainer, rank 0, to workers, ranks 1 and up.

Every transfer has a store and a process group of its own, which no default group of either process knows of: gloo on
CPUs, NCCL on CUDA (written for, but never run on, several GPUs). The protocol:

1. The sender opens the store and tells its address by other means. Each receiver writes the size of the group there,
   and that it joined; then all connect.
2. Messages go from the sender to all: what is to come, if it knows; each bucket with its entries; last the manifest.
   A message is three broadcasts: kind and sizes, a text, a buffer.
3. Each receiver writes into the store that all of it arrived intact, or what was wrong; the sender waits for that.

A wait for another process ends with `WeightsSourceError` after `timeout_s`, or when a connection breaks. There is no
encryption, and whoever reaches the store can join: it listens on one interface, which is that of a trusted network.
"""

import contextlib
import json
import socket
from collections.abc import Iterable, Iterator
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rollout.errors import WeightsError, WeightsSourceError
from rollout.transport.buckets import Bucket, Buffer, as_tensor, pack, unpack, verify
from rollout.transport.group import Group, own_address, within
from rollout.transport.manifest import Described, Entry, Manifest, dump_entries, load_entries
from rollout.transport.source import MemoryWeights

_CPU = torch.device("cpu")
_ARRIVED = "arrived"
_NOTHING: Buffer = np.empty(0, dtype=np.uint8)


class _Kind(IntEnum):
    DESCRIPTION = 0
    BUCKET = 1
    MANIFEST = 2


class Broadcast:
    """The sending end of one transfer; listens once constructed."""

    def __init__(self, host: str, *, timeout_s: float, device: torch.device = _CPU) -> None:
        """`host` is a name or address of this machine, on the interface that receivers reach; `device` is where buckets
        are sent from. Raises `WeightsError` if it cannot be listened on."""
        self._host = host
        self._timeout_s = timeout_s
        self._device = device
        try:
            self._store: TCPStore | None = _listen(host, timeout_s)
        except (OSError, RuntimeError) as error:
            raise WeightsError(f"{host}: cannot be listened on: {error}") from None
        self.address = f"[{host}]:{self._store.port}" if ":" in host else f"{host}:{self._store.port}"
        """For receivers."""

    def send(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        *,
        bucket_bytes: int,
        delta: bool = False,
        described: Iterable[Described] | None = None,
    ) -> Manifest:
        """Send once to all receivers, then close; returns when every one of them has all of it.

        While a bucket is sent the next is packed, so memory is needed for two. `delta`: what is not named stays as it
        is. `described` is what `buckets.describe` says of the tensors: receivers have it before any bucket. Raises
        `WeightsSourceError` if a receiver fails or is not heard of in time, or the tensors are not as described.
        """
        group: Group | None = None
        try:
            size = self._joined()
            group = Group(self._open(), 0, size, host=self._host, timeout_s=self._timeout_s, device=self._device)
            manifest = _send(group, named_tensors, bucket_bytes, delta, described)
            self._await_answers(size)
            return manifest
        except WeightsSourceError as error:
            raise WeightsSourceError(f"broadcast from {self.address}: {error}{self._complaints()}") from None
        finally:
            if group is not None:
                group.close()
            self.close()

    def close(self) -> None:
        """Stop listening; closing twice is allowed."""
        self._store = None

    def _joined(self) -> int:
        """The size of the group, once all of it is there."""
        self._await("waiting for a receiver", ["size"])
        size = int(self._open().get("size"))
        self._await(f"waiting for {size - 1} receivers", [f"joined/{rank}" for rank in range(1, size)])
        return size

    def _await_answers(self, size: int) -> None:
        answers = [f"answer/{rank}" for rank in range(1, size)]
        self._await("waiting for receivers to have it all", answers)
        if any(self._open().get(answer).decode() != _ARRIVED for answer in answers):
            raise WeightsSourceError("not all of it arrived")

    def _complaints(self) -> str:
        """What receivers said was wrong."""
        if self._store is None or not self._store.check(["size"]):
            return ""
        texts = {
            rank: self._store.get(f"answer/{rank}").decode()
            for rank in range(1, int(self._store.get("size")))
            if self._store.check([f"answer/{rank}"])
        }
        return "".join(f"; receiver {rank}: {text}" for rank, text in texts.items() if text != _ARRIVED)

    def _await(self, what: str, keys: list[str]) -> None:
        """Until receivers have written these. The store is never kept in a frame, which an error would keep."""
        within(self._timeout_s, what, partial(self._open().wait, keys))

    def _open(self) -> TCPStore:
        if self._store is None:
            raise WeightsSourceError("was sent or closed before")
        return self._store


class Receiver:
    """The receiving end of one transfer; has joined it once constructed."""

    def __init__(self, address: str, rank: int, size: int, *, timeout_s: float, device: torch.device = _CPU) -> None:
        """`rank` is one of 1 … `size` - 1, as the sender has rank 0; `device` is where buckets are received. Raises
        `WeightsSourceError` if no sender is at `address`, not all join in time, or another one joined as this rank."""
        assert 0 < rank < size, (rank, size)
        self._address = address
        self._rank = rank
        self._timeout_s = timeout_s
        self._manifest: Manifest | None = None
        self._store: TCPStore | None = None
        self._group: Group | None = None
        self.described: tuple[Described, ...] | None = None
        """What is to come, if the sender knew."""
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            self._store = within(timeout_s, "connecting", partial(_connect, host, int(port), timeout_s))
            within(timeout_s, "joining", partial(_join, self._store, rank, size))
            own = own_address(host)
            self._group = Group(self._store, rank, size, host=own, timeout_s=timeout_s, device=device)
            self.delta, self.described = _description(_receive(self._group, _Kind.DESCRIPTION))
        except (WeightsSourceError, OSError, ValueError) as error:
            self.close()
            raise WeightsSourceError(f"broadcast from {address}: {error}") from None

    @property
    def manifest(self) -> Manifest:
        """Known when `buckets` is exhausted: checksums are made while packing."""
        assert self._manifest is not None, "asked for the manifest before the last bucket"
        return self._manifest

    def buckets(self) -> Iterator[Bucket]:
        """Each bucket as it arrives, verified, in host memory; can be gone through once.

        Raises `WeightsChecksumError` for bytes that are not those sent, `WeightsSourceError` if the sender or another
        receiver fails or is not heard of in time. Before the end it is not known that all of it comes.
        """
        entries: list[Entry] = []
        sizes: list[int] = []
        try:
            while (bucket := self._bucket(entries, sizes)) is not None:
                yield bucket
                del bucket
            self._answer(_ARRIVED)
        except WeightsError as error:
            with contextlib.suppress(WeightsSourceError):  # the sender may be what failed
                self._answer(str(error))
            if isinstance(error, WeightsSourceError):
                raise WeightsSourceError(f"broadcast from {self._address}: {error}") from None
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Leave; closing twice is allowed. Before the end it makes the others fail."""
        if self._group is not None:
            self._group.close()
        self._group = self._store = None

    def _bucket(self, entries: list[Entry], sizes: list[int]) -> Bucket | None:
        """The next one, with which `entries` and `sizes` grow; None if there is none, and the manifest is here."""
        if self._group is None:
            raise WeightsSourceError("was received or closed before")
        kind, text, buffer = _receive(self._group, _Kind.BUCKET, _Kind.MANIFEST)
        if kind is _Kind.MANIFEST:
            manifest = Manifest.from_json(text)
            if (manifest.entries, manifest.bucket_bytes) != (tuple(entries), tuple(sizes)):
                raise WeightsSourceError(f"{len(entries)} tensors in {len(sizes)} buckets are not what was promised")
            self._manifest = manifest
            return None
        found = load_entries(text)
        verify(buffer, found)
        buffer.flags.writeable = False
        entries += found
        sizes.append(buffer.nbytes)
        return Bucket(index=len(sizes) - 1, buffer=buffer, entries=found)

    def _answer(self, text: str) -> None:
        if self._store is not None:
            answer = partial(self._store.set, f"answer/{self._rank}", text)
            within(self._timeout_s, "answering", answer)


class StagedWeights(MemoryWeights):
    """Everything that a receiver gets, in host memory: complete and verified once constructed."""

    def __init__(self, receiver: Receiver) -> None:
        """Receives; raises what `Receiver.buckets` raises."""
        with contextlib.closing(receiver):
            buffers = [bucket.buffer for bucket in receiver.buckets()]
        super().__init__(receiver.manifest, buffers.__getitem__)

    def verify(self) -> None:
        """Buckets were verified as they arrived."""


class ArrivingWeights:
    """What a receiver gets, read as it arrives, once: nothing of it is kept. The sender must have described it."""

    def __init__(self, receiver: Receiver) -> None:
        """Raises `WeightsSourceError` if it is not known what is to come."""
        if receiver.described is None:
            receiver.close()
            raise WeightsSourceError("the sender did not say what it sends, and nothing is staged")
        self._receiver = receiver
        self._manifest = Manifest.promised(receiver.described, delta=receiver.delta)

    @property
    def manifest(self) -> Manifest:
        """As promised; buckets and checksums are not known yet."""
        return self._manifest

    def verify(self) -> None:
        """There is nothing to read yet: buckets are verified as they arrive."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Raises what `Receiver.buckets` raises."""
        for bucket in self._receiver.buckets():
            yield from unpack(bucket.buffer, bucket.entries)

    def close(self) -> None:
        self._receiver.close()


def _send(
    group: Group,
    named_tensors: Iterable[tuple[str, Tensor]],
    bucket_bytes: int,
    delta: bool,
    described: Iterable[Described] | None,
) -> Manifest:
    entries: list[Entry] = []
    sizes: list[int] = []
    promised = None if described is None else tuple(described)
    _start(group, _Kind.DESCRIPTION, json.dumps({"delta": delta, "described": promised}), _NOTHING)
    for bucket in pack(named_tensors, bucket_bytes):
        group.finish()
        entries += bucket.entries
        sizes.append(bucket.buffer.nbytes)
        _start(group, _Kind.BUCKET, dump_entries(bucket.entries), bucket.buffer)
    manifest = Manifest(entries=tuple(entries), bucket_bytes=tuple(sizes), delta=delta)
    if promised is not None and promised != manifest.described():
        raise WeightsSourceError("the tensors are not as they were described")
    group.finish()
    _start(group, _Kind.MANIFEST, manifest.to_json(), _NOTHING)
    group.finish()
    return manifest


def _start(group: Group, kind: _Kind, text: str, buffer: Buffer) -> None:
    encoded = np.frombuffer(text.encode(), dtype=np.uint8)
    header = np.array([kind, encoded.nbytes, buffer.nbytes], dtype=np.int64)
    for content in (header.view(np.uint8), encoded, buffer):
        group.start(as_tensor(content).to(group.device))


def _receive(group: Group, *expected: _Kind) -> tuple[_Kind, bytes, Buffer]:
    header = torch.empty(3, dtype=torch.int64, device=group.device)
    group.start(header.view(torch.uint8))
    group.finish()
    kind, text_bytes, buffer_bytes = header.tolist()
    if kind not in expected:
        raise WeightsSourceError(f"a message of kind {kind}, expected one of {[*expected]}")
    text = torch.empty(text_bytes, dtype=torch.uint8, device=group.device)
    buffer = torch.empty(buffer_bytes, dtype=torch.uint8, device=group.device)
    group.start(text)
    group.start(buffer)
    group.finish()
    return _Kind(kind), text.cpu().numpy().tobytes(), buffer.cpu().numpy()


def _description(message: tuple[_Kind, bytes, Buffer]) -> tuple[bool, tuple[Described, ...] | None]:
    said: Any = json.loads(message[1])
    described = said["described"]
    if described is not None:
        described = tuple((name, tuple(shape), dtype) for name, shape, dtype in described)
    return said["delta"], described


def _listen(host: str, timeout_s: float) -> TCPStore:
    """A store on a free port of this interface only."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        return TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )


def _connect(host: str, port: int, timeout_s: float) -> TCPStore:
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _join(store: TCPStore, rank: int, size: int) -> None:
    if (told := store.compare_set("size", "", str(size))) != str(size).encode():
        raise RuntimeError(f"a group of {size}, but another receiver says {told.decode()}")
    if store.add(f"joined/{rank}", 1) != 1:
        raise RuntimeError(f"there is a receiver {rank} already")
