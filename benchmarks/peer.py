"""A peer as the benchmark holds it: a server of `benchmarks.peers` in its own interpreter, stopped but for its turns.

Its allocator asks for huge pages where it is torch's and ours does. A peer that is not asked anything cannot compute:
its whole process group is stopped by a signal. It is a process group of this session, so that the kernel ends it,
stopped or not, if this process dies. Every wait has a deadline.
"""

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from benchmarks.checkout import CHECKOUT
from rollout.cluster.workforce import HUGE_PAGES
from rollout.errors import DeadlineError, RolloutError

START_S = 900.0
"""Seconds to import, load and compile; a first compilation takes minutes."""
ANSWER_S = 600.0
CLOSE_S = 10.0
QUOTED = 400
"""Characters of its own words in an error."""


class PeerError(RolloutError):
    """A peer that died, could not do what was asked, or answered something else."""


class PeerUnavailableError(PeerError):
    """A peer that cannot work here, as it says itself."""


class Peer:
    """One running peer; `described` is what it says of itself. Ends with its context."""

    def __init__(
        self, name: str, command: Sequence[str], options: Mapping[str, Any], *, start_timeout_s: float = START_S
    ) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (`close` does)
        self._received = b""
        self._answers = False
        try:
            self._process = subprocess.Popen(
                [*command, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=os.environ | _environment(len(options["cores"])),
                process_group=0,
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"peer {name}: {command[0]}: cannot be run: {error.strerror}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        try:
            self.described = self._begun(start_timeout_s)
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    @property
    def group(self) -> int:
        """Its process group."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, do: str, *, timeout_s: float = ANSWER_S, **request: Any) -> dict[str, Any]:
        """What it answers.

        Raises `PeerError` if it fails or dies, `DeadlineError` at the deadline; it is of no use after either.
        """
        deadline = time.monotonic() + timeout_s
        self._answers = False
        self._signal(signal.SIGCONT)
        self._write(json.dumps({"do": do, **request}).encode() + b"\n", deadline, do)
        answer = self._read(deadline, do)
        self._signal(signal.SIGSTOP)
        if "failed" in answer:
            raise PeerError(f"peer {self.name}: {do} failed: {answer['failed']}")
        return answer

    def close(self) -> None:
        """End it and everything that it started."""
        self._signal(signal.SIGCONT)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S if self._answers else 0)
        self._signal(signal.SIGKILL)
        self._process.wait(CLOSE_S)
        self._errors.close()

    def _begun(self, timeout_s: float) -> dict[str, Any]:
        first = self._read(time.monotonic() + timeout_s, "its start")
        if "unavailable" in first:
            raise PeerUnavailableError(f"peer {self.name}: {first['unavailable']}")
        if not isinstance(first.get("ready"), dict):
            raise PeerError(f"peer {self.name}: expected ready or unavailable, got {str(first)[:QUOTED]!r}")
        ready: dict[str, Any] = first["ready"]
        return ready

    def _write(self, line: bytes, deadline: float, awaited: str) -> None:
        try:
            while line:
                self._wait(self._input, selectors.EVENT_WRITE, deadline, awaited)
                line = line[os.write(self._input, line) :]
        except BrokenPipeError:
            raise self._died() from None

    def _read(self, deadline: float, awaited: str) -> dict[str, Any]:
        """The next line."""
        while b"\n" not in self._received:
            self._wait(self._output, selectors.EVENT_READ, deadline, awaited)
            piece = os.read(self._output, 1 << 20)
            if not piece:
                raise self._died()
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            words = line.decode(errors="replace")[:QUOTED]
            raise PeerError(f"peer {self.name}: expected a JSON object in answer to {awaited}, got {words!r}")
        self._answers = True
        return answer

    def _wait(self, pipe: int, event: int, deadline: float, awaited: str) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, event)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise DeadlineError(f"peer {self.name}: no answer to {awaited} before the deadline")

    def _died(self) -> PeerError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - QUOTED))
        words = " ".join(self._errors.read().decode(errors="replace").split())
        return PeerError(f"peer {self.name}: ended with {self._process.returncode}: {words or 'without a word'}")

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.group, number)


def _environment(threads: int) -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join([str(CHECKOUT), *([path] if path else [])]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        **HUGE_PAGES,
    }
