"""A peer answers before its deadline, or the error says what it did instead; what it started ends with it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peer import Peer, PeerError, PeerUnavailableError
from benchmarks.sides import Theirs
from benchmarks.workload import Vocabulary, Workload, WrongOutputError
from rollout.errors import DeadlineError

DEADLINE_S = 30.0
SERVER = """
import os, subprocess, sys, time
from benchmarks.peers.protocol import serve

def prepare(options):
    print("a library says hello")
    def generate(request):
        n = request["new_tokens"]
        outputs = [prompt[:1] * n for prompt in request["prompts"]]
        return {{"seconds": 0.5, "output_ids": outputs, "logprobs": [n] * len(outputs)}}
    def act(request):
        {act}
    return {{"threads": os.environ["OMP_NUM_THREADS"]}}, {{"generate": generate, "act": act}}

serve(prepare)
"""


def peer(tmp_path: Path, script: str, timeout_s: float = DEADLINE_S) -> Peer:
    file = tmp_path / "peer.py"
    file.write_text(script)
    return Peer("fake", [sys.executable, str(file)], {"cores": [0]}, start_timeout_s=timeout_s)


def server(tmp_path: Path, act: str = "return {}") -> Peer:
    return peer(tmp_path, SERVER.format(act=act))


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def ended(pid: int) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            if state(pid) == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_peer_says_what_it_is_and_does_what_it_is_asked(tmp_path: Path) -> None:
    with server(tmp_path, "return {'twice': 2 * request['number']}") as fake:
        assert fake.described["threads"] == "1"
        assert fake.described["cores"] == [0]
        assert fake.ask("act", number=4) == {"twice": 8}
        assert fake.ask("act", number=5) == {"twice": 10}


def test_between_its_turns_a_peer_and_what_it_started_are_stopped(tmp_path: Path) -> None:
    act = "return {'pids': [os.getpid(), subprocess.Popen(['sleep', '600']).pid]}"
    with server(tmp_path, act) as fake:
        pids = fake.ask("act")["pids"]
        deadline = time.monotonic() + DEADLINE_S
        while any(state(pid) != "T" for pid in pids):
            assert time.monotonic() < deadline, [state(pid) for pid in pids]
            time.sleep(0.01)
    assert all(ended(pid) for pid in pids)


def test_a_stopped_peer_does_not_outlive_a_killed_benchmark(tmp_path: Path) -> None:
    (tmp_path / "peer.py").write_text(SERVER.format(act="return {'pid': os.getpid()}"))
    driver = (
        "import sys; from benchmarks.peer import Peer; "
        f"fake = Peer('fake', [sys.executable, {str(tmp_path / 'peer.py')!r}], {{'cores': [0]}}); "
        "print(fake.ask('act')['pid'], flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", driver]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
    assert ended(pid)


def test_a_peer_that_cannot_work_here_says_why(tmp_path: Path) -> None:
    script = "from benchmarks.peers.protocol import serve\nserve(lambda options: __import__('no_such_package'))"
    with pytest.raises(PeerUnavailableError, match="fake: ModuleNotFoundError: No module named 'no_such_package'"):
        peer(tmp_path, script)


def test_what_a_peer_fails_at_is_told_and_it_goes_on(tmp_path: Path) -> None:
    with server(tmp_path, "return {'half': 1 / request['number']}") as fake:
        with pytest.raises(PeerError, match="act failed: ZeroDivisionError: division by zero"):
            fake.ask("act", number=0)
        assert fake.ask("act", number=2) == {"half": 0.5}


@pytest.mark.parametrize("when", ["before", "in a turn"])
def test_a_peer_that_dies_is_an_error_with_its_last_words(tmp_path: Path, when: str) -> None:
    if when == "before":
        with pytest.raises(PeerError, match="fake: ended with 3: no memory"):
            peer(tmp_path, "import sys; sys.stderr.write('no memory'); sys.exit(3)")
        return
    with server(tmp_path, "os.write(2, b'no memory'); os._exit(3)") as fake:
        with pytest.raises(PeerError, match=r"fake: ended with 3: .*no memory"):
            fake.ask("act")
        with pytest.raises(PeerError, match="ended with 3"):
            fake.ask("act")


def test_a_peer_that_hangs_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match="fake: no answer to its start"):
        peer(tmp_path, "import time; time.sleep(600)", timeout_s=0.3)
    with server(tmp_path, "time.sleep(600)") as fake:
        with pytest.raises(DeadlineError, match="fake: no answer to act"):
            fake.ask("act", timeout_s=0.3)
        with pytest.raises(DeadlineError, match="fake: no answer to act"):
            fake.ask("act", timeout_s=0.3, more_than_a_pipe_holds="x" * (1 << 20))


@pytest.mark.parametrize("line", ["Loading weights: 12 %", "[1, 2]", "{'ready': {}}"])
def test_a_peer_that_answers_something_else_is_an_error_that_quotes_it(tmp_path: Path, line: str) -> None:
    expected = f"expected a JSON object in answer to its start, got {line!r}"
    with pytest.raises(PeerError, match=re.escape(expected)):
        peer(tmp_path, f"print({line!r}, flush=True); import time; time.sleep(600)")


def test_a_first_line_that_is_neither_ready_nor_unavailable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"expected ready or unavailable, got \"{'hello': 1}"):
        peer(tmp_path, "print('{\"hello\": 1}')")


def test_an_interpreter_that_cannot_be_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"cannot be run: No such file"):
        Peer("fake", [str(tmp_path / "none")], {"cores": [0]})


def test_a_peer_as_a_side_is_held_to_what_it_was_asked(tmp_path: Path) -> None:
    vocabulary = Vocabulary(size=10, ids=range(10))
    workload = Workload(name="4", batch=4, prompt_tokens=3, new_tokens=2, vocabulary=vocabulary, seed=0)
    with server(tmp_path) as fake:
        measured = workload.measure({"fake": Theirs(fake)}, {"fake": 2}, warm_tokens=1, beside=lambda: None)
        assert measured == {"fake": [0.5, 0.5]}
    (tmp_path / "peer.py").unlink()
    with (
        peer(tmp_path, SERVER.format(act="...").replace("prompt[:1] * n", "prompt[:1] * (n - 1)")) as fake,
        pytest.raises(WrongOutputError, match=r"4: fake was asked for 4 outputs of 2 tokens, and made 4 of \[1\]"),
    ):
        workload.measure({"fake": Theirs(fake)}, {"fake": 1}, warm_tokens=2, beside=lambda: None)
