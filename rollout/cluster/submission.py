"""A job of Ray's job server: submitted, followed to its end, stopped.

Every request has a deadline. The log is a stream that may break, and is then taken up where it was; whether the job
is over is asked separately, so that neither a stream that says nothing nor one that ends early is taken for its end.
"""

import asyncio
import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp
from ray.exceptions import AuthenticationError, RayError
from ray.job_submission import JobSubmissionClient

from rollout.errors import ConfigError, DeadlineError, ServiceError

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Where no address is given, the first that is set."""

CONNECT_S = 5.0
ANSWER_S = 60.0
"""Seconds for one request, an upload included."""
POLL_S = 1.0
LOST_S = 60.0
"""Seconds without one good answer until the job server counts as lost."""
GRACE_S = 30
"""Seconds that a driver has to write what it has when its job is stopped."""
STOP_S = 2 * GRACE_S + 30.0
"""Seconds for a stopped job to be over; one that is still being set up is stopped when it begins."""
DRAIN_S = 5.0
"""Seconds for the log to end after its job."""
REASON_CHARS = 600
NO_AGENT = "No available agent"
"""What the job server says while its cluster comes up."""

_FAILURES = (OSError, RuntimeError, ValueError, KeyError, RayError)
"""What Ray's client raises if there is no server, no answer, or none of use."""


class End(StrEnum):
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job ended."""

    end: End
    exit_code: int | None
    """Of its driver, if that ran to its end; negative: by that signal."""
    reason: str
    """One line; empty if it succeeded."""


class _Client(JobSubmissionClient):  # type: ignore[misc]
    """Ray's own would wait for an answer for ever."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        return super()._do_request(method, endpoint, **{"timeout": (CONNECT_S, ANSWER_S)} | options)


class JobServer:
    """The job server at `address` (http://HOST:PORT of the dashboard, or HOST:PORT of the cluster)."""

    def __init__(self, address: str | None = None) -> None:
        """Raises `ConfigError` if none is there, or it does not accept the token."""
        named = (os.environ[name] for name in ADDRESS_VARIABLES if os.environ.get(name))
        self.address = address or next(named, DEFAULT_ADDRESS)
        try:
            with _only_address(self.address):
                self._client = _Client(self.address)
        except AuthenticationError:
            raise ConfigError(
                f"the cluster at {self.address} does not accept the token of this process: set RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH to the cluster's; on its head node, `ray get-auth-token` prints it"
            ) from None
        except _FAILURES as error:
            raise ConfigError(
                f"no Ray job server answers at {self.address}: {_one_line(str(error))}; name the dashboard of a "
                f"running cluster by --address or {ADDRESS_VARIABLES[0]}, such as {DEFAULT_ADDRESS}"
            ) from None

    def submit(self, entrypoint: str, archive: bytes, job_id: str) -> "Job":
        """Upload the zip file `archive`, unless the cluster has it, and run the shell command in its files.

        A cluster that has just been started is waited for. Raises `ServiceError` if the server refuses it or does not
        answer.
        """
        with tempfile.TemporaryDirectory() as scratch:
            package = Path(scratch) / "job.zip"  # always the same name: Ray's name for it depends on it
            package.write_bytes(archive)
            runtime_env = {"working_dir": str(package), "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(GRACE_S)}}
            since = time.monotonic()
            while True:
                try:
                    self._client.submit_job(entrypoint=entrypoint, submission_id=job_id, runtime_env=runtime_env)
                    return Job(self._client, job_id)
                except _FAILURES as error:
                    if NO_AGENT not in str(error) or time.monotonic() - since > LOST_S:
                        raise ServiceError(f"the job {job_id} was not accepted: {_one_line(str(error))}") from None
                time.sleep(POLL_S)


class Job:
    """A submitted job."""

    def __init__(self, client: Any, job_id: str) -> None:
        self.job_id = job_id
        self._client = client
        self._written = 0
        """Characters of the log."""
        self._over = False

    async def follow(
        self, write: Callable[[str], None], *, stop: Callable[[], bool], stopping: Callable[[], None]
    ) -> JobEnd:
        """Hand the job's log to `write` as it comes, until the job is over.

        Once `stop` says so, call `stopping` and stop the job. Raises `ServiceError` if the server is lost, and
        `DeadlineError` if the job does not stop.
        """
        tail = asyncio.create_task(self._tail(write))
        try:
            info = await self._ended(stop)
            if info is None:
                stopping()
                await self._ask(self._client.stop_job)
                info = await self._ended(lambda: False, deadline=time.monotonic() + STOP_S)
            self._over = True
            await asyncio.wait([tail], timeout=DRAIN_S)
        finally:
            complete = tail.done()
            tail.cancel()
            await asyncio.wait([tail])
        if not complete:
            with contextlib.suppress(*_FAILURES):
                self._write(await asyncio.to_thread(self._client.get_job_logs, self.job_id), 0, write)
        return _end(info)

    async def _tail(self, write: Callable[[str], None]) -> None:
        """Every stream begins with the first line of the log."""
        while True:
            came = 0
            with contextlib.suppress(aiohttp.ClientError, *_FAILURES):
                async for text in self._client.tail_job_logs(self.job_id):
                    came = self._write(text, came, write)
                if self._over:
                    return
            await asyncio.sleep(POLL_S)

    def _write(self, text: str, came: int, write: Callable[[str], None]) -> int:
        """Write what is new of `text`, which follows the first `came` characters of the log; returns where it ends."""
        end = came + len(text)
        if end > self._written:
            write(text[max(self._written - came, 0) :])
            self._written = end
        return end

    async def _ended(self, stop: Callable[[], bool], deadline: float = float("inf")) -> Any:
        """Ray's details of the job once it is over; None as soon as `stop` says so."""
        while True:
            info = await self._ask(self._client.get_job_info, stop)
            if info is None or info.status.is_terminal():
                return info
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the job {self.job_id} is still {info.status} {STOP_S:g} s after it was told to stop; "
                    f"`ray job stop {self.job_id}` tells it again"
                )
            if await _pause(POLL_S, stop):
                return None

    async def _ask(self, request: Callable[[str], Any], stop: Callable[[], bool] = lambda: False) -> Any:
        """Repeat a request that fails, for `LOST_S`; None as soon as `stop` says so."""
        since = time.monotonic()
        while True:
            try:
                return await asyncio.to_thread(request, self.job_id)
            except _FAILURES as error:
                if time.monotonic() - since > LOST_S:
                    raise ServiceError(
                        f"the job server has not answered for {LOST_S:g} s ({_one_line(str(error))}); the job "
                        f"{self.job_id} may still run: `ray job status {self.job_id}` tells, once the server is back"
                    ) from None
            if await _pause(POLL_S, stop):
                return None


@contextlib.contextmanager
def _only_address(address: str) -> Iterator[None]:
    """Ray lets its variables override what it is passed. A cluster's own address is tried first: Ray would insist."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    variable = ADDRESS_VARIABLES[0]
    before = os.environ.get(variable)
    os.environ[variable] = address
    try:
        yield
    finally:
        del os.environ[variable]
        if before is not None:
            os.environ[variable] = before


async def _pause(seconds: float, stop: Callable[[], bool]) -> bool:
    """Wait, and say whether `stop` did meanwhile."""
    until = time.monotonic() + seconds
    while not stop() and time.monotonic() < until:
        await asyncio.sleep(0.1)
    return stop()


def _end(info: Any) -> JobEnd:
    end = End(str(info.status.value))
    message = str(info.message or "")
    if end == End.SUCCEEDED:
        return JobEnd(end=end, exit_code=0, reason="")
    if info.driver_exit_code is not None:  # then Ray's message is a line about that, and the log
        code = info.driver_exit_code
        last = [line for line in message.splitlines()[1:] if line.strip()][-1:]
        message = ": ".join([f"exit code {code}" if code > 0 else f"signal {-code}", *last])
    return JobEnd(end=end, exit_code=info.driver_exit_code, reason=_one_line(message))


def _one_line(text: str) -> str:
    """The end of a text, where the cause is."""
    line = " ".join(text.split())
    return line if len(line) <= REASON_CHARS else f"… {line[-REASON_CHARS:]}"
