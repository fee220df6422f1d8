"""A process group of its own for one broadcast, of which no wait lasts longer than it may.

The waits of torch's store and of gloo have timeouts, but not all: a store whose process is stopped is waited for
forever. So every wait is in a thread, which in that case is left behind. What torch raises for whatever went wrong with
a peer, `RuntimeError`, and being late become `WeightsSourceError`.
"""

import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from rollout.errors import WeightsSourceError

T = TypeVar("T")

_POLL_S = 0.001


class Group:
    """A process group of which rank 0 broadcasts. Holds what is under way until it is finished."""

    def __init__(
        self, store: Store, rank: int, size: int, *, host: str, timeout_s: float, device: torch.device
    ) -> None:
        self.device = device
        self._timeout_s = timeout_s
        self._works: deque[Any] = deque()
        make = partial(_backend, PrefixStore("group", store), rank, size, host, timeout_s, device)
        self._backend: Any = within(timeout_s, "connecting all", make)

    def start(self, content: Tensor) -> None:
        """Broadcast from, or receive into, all of a tensor on the group's device."""
        if content.nbytes:
            self._works.append(self._backend.broadcast(content, 0))

    def finish(self) -> None:
        """Wait for everything that was started."""
        while self._works:
            within(self._timeout_s, "waiting for the other ends", partial(self._finish, self._works.popleft()))

    def close(self) -> None:
        self._works.clear()
        self._backend = None

    def _finish(self, work: Any) -> None:
        if self.device.type == "cuda":  # where wait() only orders streams
            deadline = time.monotonic() + self._timeout_s
            while not work.is_completed():
                if time.monotonic() > deadline:
                    self._backend.abort()
                    raise RuntimeError(f"no answer in {self._timeout_s} s")
                time.sleep(_POLL_S)
        work.wait(timedelta(seconds=self._timeout_s))


def _backend(store: Any, rank: int, size: int, host: str, timeout_s: float, device: torch.device) -> Any:
    if device.type == "cuda":
        # NCCL's watchdog ends the process some time after a timeout of its own, so that comes later than ours. It also
        # ends it when a peer dies, unless TORCH_NCCL_ASYNC_ERROR_HANDLING=0 is in the environment.
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=10 * timeout_s)
        group: Any = ProcessGroupNCCL(store, rank, size, options)
        group.eager_connect_single_device(device)
        return group
    gloo: Any = ProcessGroupGloo  # whose stubs are not those of the class
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(store, rank, size, options)


def own_address(host: str) -> str:
    """Of the interface through which this machine reaches `host`."""
    family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def within(timeout_s: float, what: str, call: Callable[[], T]) -> T:
    """`call()`, in a thread of its own that is left behind if it takes longer. Its `RuntimeError`s, which torch raises
    for whatever went wrong with a peer, and its being late are `WeightsSourceError`s.

    Nothing of the call stays in the error: what it refers to would keep connections open.
    """
    answers: queue.SimpleQueue[tuple[T | None, str | Exception | None]] = queue.SimpleQueue()
    calls = [call]
    del call
    threading.Thread(target=_run, args=(calls, answers), daemon=True).start()
    try:
        result, failure = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise WeightsSourceError(f"{what}: no answer in {timeout_s} s") from None
    if isinstance(failure, Exception):
        raise failure
    if failure is not None:
        raise WeightsSourceError(f"{what}: {failure}")
    return result  # type: ignore[return-value]


def _run(calls: list[Callable[[], T]], answers: "queue.SimpleQueue[tuple[T | None, str | Exception | None]]") -> None:
    """Takes the only call, and lets go of it before it answers."""
    try:
        answer: tuple[T | None, str | Exception | None] = calls.pop()(), None
    except RuntimeError as error:
        answer = None, str(error).partition("\n")[0]
    except Exception as error:
        answer = None, error
    answers.put(answer)
