"""Other processes, at the other end of a transfer: each stops halfway until it is killed.

They are forked from a server that has imported torch, so that one costs milliseconds.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import Tensor

from rollout.transport.collective import Broadcast, Receiver
from rollout.transport.disk import publish
from tests.transport.weights import weights

BUCKET = 3000
FIRST = 4
"""Tensors after which the first bucket is on its way, and no other."""

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.transport.peers"])


class Peer:
    """A process that runs `role`, which is a function of this module, and what it says."""

    def __init__(self, role: Callable[..., None], *args: Any) -> None:
        self._connection, other = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(target=role, args=(other, *args), daemon=True)
        self._process.start()
        other.close()

    def says(self) -> Any:
        return self._connection.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._connection.close()

    def stop(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)


def send_half(connection: Connection) -> None:
    sending = Broadcast("127.0.0.1", timeout_s=60)
    connection.send(sending.address)
    sending.send(_half(connection), bucket_bytes=BUCKET)


def receive_half(connection: Connection, address: str) -> None:
    receiving = Receiver(address, 1, 2, timeout_s=60)
    buckets = receiving.buckets()
    next(buckets)
    _stay(connection)


def publish_half(connection: Connection, path: Path) -> None:
    publish(path, _half(connection), bucket_bytes=BUCKET)


def _half(connection: Connection) -> Iterator[tuple[str, Tensor]]:
    yield from list(weights().items())[:FIRST]
    _stay(connection)


def _stay(connection: Connection) -> None:
    connection.send("half")
    connection.recv()
