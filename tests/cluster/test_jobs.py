"""Jobs of a real cluster that wants a token: what is uploaded runs there, and how it ends is how the command ends."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from ray.job_submission import JobSubmissionClient

from rollout.store import read_trajectories
from tests.cluster.scene import eventually
from tests.tiny_models import make_tiny_llama

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TOKEN = "tests-of-jobs-have-a-token-of-their-own"
PORTS = ("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port")
"""Those that are the same for every cluster by default."""
JOB_S = 600.0
"""Seconds for one command, on a busy machine."""
STARTS = 4
PACKAGE_BYTES = 1_000_000

PACKAGES = """
import io
import json
import sys
import zipfile
from ray._raylet import GcsClient

client = GcsClient(address=sys.argv[1])
packages = {uri.decode(): client.internal_kv_get(uri, None) for uri in client.internal_kv_keys(b"gcs://", None)}
names = {uri: zipfile.ZipFile(io.BytesIO(package)).namelist() for uri, package in packages.items()}
tops = {uri: sorted({name.partition("/")[0] for name in found}) for uri, found in names.items()}
print(json.dumps({uri: [len(package), tops[uri]] for uri, package in packages.items()}))
"""
"""The packages that a cluster holds: their bytes, and what lies at their top."""

ORIGINS = """
import ray
import rollout
import words

ray.init(logging_level="warning")
print(words.SAID, rollout.__file__)
print(words.SAID, ray.get(ray.remote(num_cpus=0)(lambda: __import__("rollout").__file__).remote()))
"""

PATIENT = """
import signal

def end(number, frame):
    print("last words", flush=True)
    raise SystemExit(0)

signal.signal(signal.SIGTERM, end)
print("up", flush=True)
while True:
    signal.pause()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    url: str
    gcs: str

    def environment(self, **changes: str) -> dict[str, str]:
        """Of a user of the cluster, and of its own processes."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
        return environment | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN} | changes

    def run(self, *command: str, here: Path, **changes: str) -> subprocess.CompletedProcess[str]:
        environment = self.environment(RAY_API_SERVER_ADDRESS=self.url, **changes)
        return subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=JOB_S)

    def packages(self) -> dict[str, tuple[int, list[str]]]:
        """Bytes of what was uploaded, as the cluster has it, and what lies at its top."""
        listed = self.run(sys.executable, "-c", PACKAGES, self.gcs, here=ROOT)
        assert listed.returncode == 0, listed.stderr
        return {uri: (size, names) for uri, (size, names) in json.loads(listed.stdout).items()}

    def answers(self) -> bool:
        request = urllib.request.Request(f"{self.url}/api/jobs/", headers={"Authorization": f"Bearer {TOKEN}"})
        try:
            with urllib.request.urlopen(request, timeout=10):
                return True
        except (urllib.error.URLError, OSError):
            return False


def free_ports(count: int) -> list[int]:
    """Of those that nobody is given meanwhile, be it for a connection or by Ray for a worker."""
    free: list[int] = []
    for port in random.sample(range(20_000, 32_000), 200):
        with socket.socket() as each, suppress(OSError):
            each.bind(("0.0.0.0", port))
            free.append(port)
        if len(free) == count:
            return free
    raise AssertionError(f"{len(free)} of 200 ports are free")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Ray gives a busy machine half a minute to start, and gives up; then it is started again."""
    for _ in range(STARTS):
        with head_node() as found:
            if found is not None:
                yield found
                return
    pytest.fail(f"Ray did not start {STARTS} times")


@contextmanager
def head_node() -> Iterator[Cluster | None]:
    """A cluster of one node; None if it does not start, and what it said is on stderr."""
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    found = Cluster(url=f"http://127.0.0.1:{ports['dashboard-port']}", gcs=f"127.0.0.1:{ports['port']}")
    command = [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=4", "--object-store-memory=536870912"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    # Ray's sockets lie there, and their paths may not be long.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as apart, ExitStack() as stack:
        log = Path(apart) / "start.log"
        head = subprocess.Popen(
            [*command, f"--temp-dir={apart}/r"],
            env=found.environment(),
            stdin=subprocess.DEVNULL,
            stdout=stack.enter_context(open(log, "w")),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            eventually(lambda: head.poll() is not None or "Ray runtime started" in log.read_text())
            if head.poll() is None:
                eventually(lambda: head.poll() is not None or found.answers())
            if head.poll() is None:
                yield found
            else:
                sys.stderr.write(log.read_text())
                yield None
        finally:
            head.terminate()  # it ends the others
            try:
                head.wait(timeout=60)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(head.pid, signal.SIGKILL)
                head.wait()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's directory: scripts, a configuration and a model."""
    path = tmp_path_factory.mktemp("here")
    make_tiny_llama(path / "models/tiny")
    (path / "origins.py").write_text(ORIGINS)
    (path / "words.py").write_text('SAID = "rollout is"')
    (path / "patient.py").write_text(PATIENT)
    (path / "failing.py").write_text('print("so far\\nno such reward")\nraise SystemExit(3)\n')
    (path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    settings = {
        "model": {"path": "models/tiny", "dtype": "float32"},
        "cluster": {"workers": 1, "start_timeout_s": 300},
        "pool": {"budget_bytes": "64MiB"},
        "sampling": {"max_new_tokens": 8},
        "run": {"prompts": {"kind": "file", "path": "prompts.jsonl"}, "samples": 2, "out": "out/rows.parquet"},
    }
    (path / "run.yaml").write_text(json.dumps(settings))
    return path


def test_a_script_runs_on_what_was_uploaded_in_its_actors_too(cluster: Cluster, here: Path) -> None:
    before = cluster.packages()
    done = cluster.run("rollout", "submit", "origins.py", here=here)
    assert done.returncode == 0, done.stdout + done.stderr
    driver, actor = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("rollout is ")]
    assert driver == actor
    assert "working_dir_files" in driver
    [(size, names)] = [package for uri, package in cluster.packages().items() if uri not in before]
    assert size < PACKAGE_BYTES
    assert names == ["origins.py", "rollout", "words.py"]


def test_a_configuration_runs_and_its_rows_are_where_the_user_is(cluster: Cluster, here: Path) -> None:
    done = cluster.run("rollout", "submit", "run.yaml", "--", "--json", "out/report.json", here=here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(read_trajectories(here / "out/rows.parquet"))) == 4
    assert json.loads((here / "out/report.json").read_text())


def test_a_job_that_fails_says_why_and_ends_the_command_with_its_exit_code(cluster: Cluster, here: Path) -> None:
    at = ("--address", cluster.gcs)  # which Ray translates
    failed = cluster.run("rollout", "submit", "failing.py", *at, "--submission-id", "fails", here=here)
    assert failed.returncode == 3
    assert "so far\n" in failed.stdout
    assert failed.stderr.splitlines()[-1] == "rollout: error: the job fails failed: exit code 3: no such reward"


def test_ctrl_c_stops_the_job_which_has_time_for_last_words(cluster: Cluster, here: Path) -> None:
    submitted = subprocess.Popen(
        ["rollout", "submit", "--address", cluster.url, "--submission-id", "patient", "patient.py"],
        cwd=here,
        env=cluster.environment(RAY_ADDRESS="http://127.0.0.1:1"),  # the option counts
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with submitted:
        try:
            assert submitted.stdout is not None
            assert any(line == "up\n" for line in submitted.stdout), submitted.communicate()
            submitted.send_signal(signal.SIGINT)
            out, err = submitted.communicate(timeout=JOB_S)
        finally:
            submitted.kill()
    assert submitted.returncode == 130, err
    assert "last words\n" in out
    assert err.splitlines()[-1] == "rollout: interrupted"
    client = JobSubmissionClient(cluster.url, headers={"Authorization": f"Bearer {TOKEN}"})
    assert client.get_job_status("patient") == "STOPPED"


def test_a_wrong_token_is_refused_in_one_line(cluster: Cluster, here: Path) -> None:
    refused = cluster.run("rollout", "submit", "failing.py", here=here, RAY_AUTH_TOKEN="another")
    assert refused.returncode == 2
    assert f"rollout: error: the cluster at {cluster.url} does not accept the token" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_the_working_tree_is_uploaded_without_what_a_job_does_not_need(cluster: Cluster) -> None:
    before = cluster.packages()
    submitted = cluster.run("ray", "job", "submit", "--no-wait", "--working-dir", ".", "--", "true", here=ROOT)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    [(_, names)] = [package for uri, package in cluster.packages().items() if uri not in before]
    assert names == ["configs", "examples", "rollout"]


EXAMPLE = [
    "examples/grpo.py",
    *("--steps", "2", "--set", "prompts=2", "--set", "samples=2", "--set", "rows=4"),
    *("--set", "rollout.cluster.workers=1", "--set", "rollout.model.dtype=float32"),
]


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="git makes the package")
def test_the_plain_line_trains(cluster: Cluster, here: Path, tmp_path: Path) -> None:
    before = cluster.packages()
    package = tmp_path / "job.zip"
    subprocess.run(["git", "archive", "-o", package, "HEAD", "rollout", "examples", "configs"], cwd=ROOT, check=True)
    job = ["python", *EXAMPLE, "--set", f"rollout.model.path={here}/models/tiny", "--out", str(tmp_path / "out")]
    done = cluster.run("ray", "job", "submit", "--working-dir", str(package), "--", *job, here=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out").is_dir()
    [(size, names)] = [package for uri, package in cluster.packages().items() if uri not in before]
    assert size < PACKAGE_BYTES
    assert names == ["configs", "examples", "rollout"]


def test_the_example_trains_as_it_is_submitted(cluster: Cluster, here: Path, tmp_path: Path) -> None:
    script, *arguments = EXAMPLE
    job = [script, "--", *arguments, "--set", f"rollout.model.path={here}/models/tiny", "--out", str(tmp_path / "out")]
    done = cluster.run("rollout", "submit", *job, here=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out").is_dir()
