"""A job is followed to its end, whatever becomes of the stream of its log; nothing waits without a deadline."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.job_submission import JobStatus

from rollout.cluster import submission
from rollout.cluster.submission import End, Job, JobEnd, JobServer
from rollout.errors import DeadlineError, ServiceError

LOG = ["one\n", "two\n", "three\n"]


class FakeClient:
    """A job whose streams and details are given one after the other; the last of each comes again and again.

    An item of a stream or a detail that is an exception is raised; a stream that ends with `...` never closes.
    """

    def __init__(self, streams: Iterable[list[Any]], infos: Iterable[Any]) -> None:
        self._streams = _repeating(streams)
        self._infos = _repeating(infos)
        self.stops = 0
        self.on_stop: Callable[[], None] = lambda: None

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        for item in next(self._streams):
            if item is ...:
                await asyncio.Event().wait()
            yield _given(item)

    def get_job_info(self, job_id: str) -> Any:
        return _given(next(self._infos))

    def get_job_logs(self, job_id: str) -> str:
        return "".join(LOG)

    def stop_job(self, job_id: str) -> bool:
        self.stops += 1
        self._infos = _repeating([STOPPED])
        self.on_stop()
        return True


def info(status: JobStatus, message: str = "", driver_exit_code: int | None = None) -> Any:
    return SimpleNamespace(status=status, message=message, driver_exit_code=driver_exit_code)


RUNNING = info(JobStatus.RUNNING)
STOPPED = info(JobStatus.STOPPED, "stopped")
DONE = info(JobStatus.SUCCEEDED, driver_exit_code=0)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "POLL_S", 0.01)
    monkeypatch.setattr(submission, "DRAIN_S", 0.5)
    monkeypatch.setattr(submission, "LOST_S", 0.2)
    monkeypatch.setattr(submission, "STOP_S", 0.2)


def follow(client: FakeClient, stop: Callable[[], bool] = lambda: False) -> tuple[JobEnd, str]:
    written: list[str] = []
    end = asyncio.run(Job(client, "j").follow(written.append, stop=stop, stopping=lambda: written.append("stopping\n")))
    return end, "".join(written)


class ComingUp:
    """Of a cluster that takes jobs after so many refusals."""

    def __init__(self, refusals: int, words: str = "status code 500: No available agent to submit job") -> None:
        self.left = refusals
        self.words = words
        self.submitted: list[str] = []

    def submit_job(self, *, entrypoint: str, submission_id: str, runtime_env: dict[str, Any]) -> None:
        assert Path(runtime_env["working_dir"]).read_bytes() == b"zip"
        self.left -= 1
        if self.left >= 0:
            raise RuntimeError(self.words)
        self.submitted.append(submission_id)


def submit(client: ComingUp, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(submission, "_Client", lambda address: client)
    return JobServer("http://127.0.0.1:1").submit("true", b"zip", "j")


def test_a_cluster_that_comes_up_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ComingUp(3)
    assert submit(client, monkeypatch).job_id == "j"
    assert client.submitted == ["j"]


@pytest.mark.parametrize("client", [ComingUp(10**9), ComingUp(1, "status code 400: bad entrypoint")])
def test_a_cluster_that_does_not_take_a_job_is_an_error(client: ComingUp, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServiceError, match=f"the job j was not accepted: {client.words}"):
        submit(client, monkeypatch)
    assert not client.submitted


def test_the_log_is_written_once_though_its_stream_breaks() -> None:
    broken: list[list[Any]] = [[LOG[0]], ["one\ntw", ConnectionError("gone")], LOG]
    end, written = follow(FakeClient(broken, [RUNNING] * 20 + [DONE]))
    assert end == JobEnd(end=End.SUCCEEDED, exit_code=0, reason="")
    assert written == "".join(LOG)


@pytest.mark.parametrize("stream", [[LOG[0], ...], [RuntimeError("no stream here")]], ids=["hangs", "refused"])
def test_what_a_stream_did_not_bring_is_read_when_the_job_is_over(stream: list[Any]) -> None:
    end, written = follow(FakeClient([stream], [RUNNING, DONE]))
    assert end.end == End.SUCCEEDED
    assert written == "".join(LOG)


def test_a_server_that_fails_now_and_then_is_asked_again() -> None:
    lost: list[Any] = [ConnectionError("refused"), RuntimeError("status 500")]
    end, _ = follow(FakeClient([LOG], [*lost, RUNNING, *lost, DONE]))
    assert end.end == End.SUCCEEDED


def test_a_server_that_is_lost_is_an_error_and_no_hang() -> None:
    with pytest.raises(ServiceError, match=r"has not answered for 0\.2 s \(refused\); the job j may still run"):
        follow(FakeClient([[...]], [RUNNING, ConnectionError("refused")]))


def test_a_stop_stops_the_job_and_its_last_words_are_written() -> None:
    client = FakeClient([LOG], [RUNNING])
    end, written = follow(client, stop=lambda: True)
    assert (end.end, client.stops) == (End.STOPPED, 1)
    assert written.replace("stopping\n", "") == "".join(LOG)
    assert "stopping\n" in written


def test_a_job_that_does_not_stop_is_left_at_the_deadline() -> None:
    client = FakeClient([[...]], [RUNNING])
    client.on_stop = lambda: setattr(client, "_infos", _repeating([RUNNING]))
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="`ray job stop j` tells it again"):
        follow(client, stop=lambda: True)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("ended", "exit_code", "reason"),
    [
        (
            info(JobStatus.FAILED, "command failed, last logs:\nTraceback\nValueError: boom\n\n", 3),
            3,
            "exit code 3: Va",
        ),
        (info(JobStatus.FAILED, "command failed. No logs available.", 127), 127, "exit code 127"),
        (info(JobStatus.FAILED, "command failed, last logs:\nat work\n", -9), -9, "signal 9: at work"),
        (info(JobStatus.FAILED, "runtime_env setup\nfailed: " + "x" * 2000), None, "… xxx"),
    ],
)
def test_a_failure_says_why_in_one_line(ended: Any, exit_code: int | None, reason: str) -> None:
    end, _ = follow(FakeClient([LOG], [ended]))
    assert (end.end, end.exit_code) == (End.FAILED, exit_code)
    assert end.reason.startswith(reason)
    assert "\n" not in end.reason


def _given(item: Any) -> Any:
    if isinstance(item, Exception):
        raise item
    return item


def _repeating(items: Iterable[Any]) -> Iterator[Any]:
    last = None
    for last in items:
        yield last
    while True:
        yield last
