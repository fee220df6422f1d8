"""What the client refuses before anything reaches the service, and services that share a process."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout.client import AsyncRollout
from rollout.cluster.description import ServiceDescription
from rollout.config import load_config
from rollout.errors import InvalidPromptError, InvalidSamplingError
from rollout.text import read_tokenizer_files
from tests.tiny_models import VOCAB_SIZE, make_tiny_llama


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncRollout:
    """A client of nothing: whatever gets past it fails."""
    path = make_tiny_llama(tmp_path_factory.mktemp("model"))
    description = ServiceDescription(
        config=load_config({"model": {"path": path}}),
        vocab_size=VOCAB_SIZE,
        max_context=32,
        generation_defaults={"top_p": None},
        tokenizer=read_tokenizer_files(path),
    )
    return AsyncRollout(None, description, key_prefix="", on_close=None)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"key": "a/0"}, InvalidPromptError, "key: got 'a/0'"),
        ({"key": "a/b/17"}, InvalidPromptError, "key: got 'a/b/17'"),
        ({"key": ""}, InvalidPromptError, "key: got ''"),
        ({"key": [5]}, InvalidPromptError, "key: got 5"),
        ({"key": "a\nb"}, InvalidPromptError, "key: got"),
        ({"key": ["a", "b"]}, InvalidPromptError, "key: got 2 for 1 prompts"),
        ({"n": 0}, InvalidSamplingError, "n: got 0"),
        ({"n": 1.5}, InvalidSamplingError, "n: got 1.5"),
        ({"sampling": {"temperature": 0.0}}, InvalidSamplingError, "sampling: got dict"),
    ],
)
def test_a_bad_submission_raises_where_it_was_made(
    client: AsyncRollout, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        asyncio.run(client.submit("a", **arguments))


TWO_SERVICES = """
import sys
import rollout

def config(name):
    pool = {"budget_bytes": "32MiB", "warm_bytes": 0}
    model = {"path": sys.argv[1], "dtype": "float32"}
    sampling = {"max_new_tokens": 3, "ignore_eos": True}
    return {"model": model, "cluster": {"name": name}, "pool": pool, "sampling": sampling}

first = rollout.start(config("first"))
second = rollout.start(config("second"))
first.close()
with second:
    second.submit("a", key="a")
    (delivery,) = second.next_groups(1, timeout_s=600.0)
    print("tokens", len(delivery.trajectories[0].output_ids))
"""


def test_a_service_that_is_closed_leaves_another_of_the_same_process_alone(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "model")
    program = [sys.executable, "-c", TWO_SERVICES, str(model)]
    env = os.environ | {"RAY_ADDRESS": "local", "RAY_OVERRIDE_RESOURCES": '{"CPU": 4}'}  # whatever the machine has
    done = subprocess.run(program, capture_output=True, text=True, timeout=900, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "tokens 3"
