"""What the client refuses before anything reaches the service, and services that share a process."""

import asyncio
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout.client import AsyncRollout, Rollout
from rollout.client.state import from_state, to_state
from rollout.cluster.description import ServiceDescription
from rollout.config import load_config
from rollout.errors import InvalidArgumentError, InvalidPromptError, InvalidSamplingError
from rollout.text import read_tokenizer_files
from rollout.types import Delivery, GroupId, SamplingParams
from tests.control.stage import W1, Stage, member
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
    return AsyncRollout(Nothing(), description, key_prefix="", on_close=None)


class Nothing:
    """A controller with every method that can be named, and none that can be called."""

    def __getattr__(self, name: str) -> "Nothing":
        return self


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"key": "a/0"}, InvalidPromptError, "key: got 'a/0'"),
        ({"key": "a/b/17"}, InvalidPromptError, "key: got 'a/b/17'"),
        ({"key": ""}, InvalidPromptError, "key: got ''"),
        ({"key": [5]}, InvalidPromptError, "key: got 5"),
        ({"key": "a\nb"}, InvalidPromptError, "key: got"),
        ({"key": ["a", "b"]}, InvalidPromptError, "key: got 2 for 1 prompts"),
        ({"n": 0}, InvalidArgumentError, "n: got 0"),
        ({"n": 1.5}, InvalidArgumentError, "n: got 1.5"),
        ({"n": True, "key": ["a", "b"]}, InvalidPromptError, "key: got 2 for 1 prompts"),
        ({"sampling": {"temperature": 0.0}}, InvalidSamplingError, "sampling: got dict"),
        ({"sampling": [SamplingParams()]}, InvalidSamplingError, "sampling: got 1 for 2 samples"),
        ({"sampling": [SamplingParams()] * 3}, InvalidSamplingError, "sampling: got 3 for 2 samples"),
        ({"sampling": []}, InvalidSamplingError, "sampling: got 0 for 2 samples"),
        ({"sampling": [SamplingParams(), {}]}, InvalidSamplingError, "sampling: got list, allowed: SamplingParams"),
        ({"deadline_s": 0}, InvalidArgumentError, "deadline_s: got 0, allowed: seconds > 0"),
        ({"deadline_s": float("nan")}, InvalidArgumentError, "deadline_s: got nan"),
        ({"deadline_s": "1"}, InvalidArgumentError, "deadline_s: got '1'"),
        ({"max_group_tokens": 0}, InvalidArgumentError, "max_group_tokens: got 0, allowed: an integer >= 1"),
        ({"max_group_tokens": 1.5}, InvalidArgumentError, "max_group_tokens: got 1.5"),
        ({"priority": "first"}, InvalidArgumentError, "priority: got 'first', allowed: eval, train"),
    ],
)
def test_a_bad_submission_raises_where_it_was_made(
    client: AsyncRollout, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        asyncio.run(client.submit("a", **({"n": 2} | arguments)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": 0}, "groups: got 0, allowed: an integer >= 1"),
        ({"groups": 1.5}, "groups: got 1.5"),
        ({"groups": 1, "over_sample": -0.1}, "over_sample: got -0.1, allowed: a share >= 0"),
        ({"groups": 1, "over_sample": float("inf")}, "over_sample: got inf"),
    ],
)
def test_a_bad_collection_raises_where_it_was_asked_for(
    client: AsyncRollout, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((InvalidSamplingError, InvalidArgumentError), match=message):
        asyncio.run(client.collect(**arguments))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ([], "empty list"),
        ("", "empty string"),
        ([VOCAB_SIZE], f"token id {VOCAB_SIZE}, allowed: 0 … {VOCAB_SIZE - 1}"),
        ([-1], "token id -1"),
        ([1.5], "item 0: got float"),
        ([{"role": "user", "content": "a"}], "got messages with an id"),
    ],
)
def test_bad_tokens_are_not_appended(client: AsyncRollout, what: Any, message: str) -> None:
    with pytest.raises(InvalidPromptError, match=message):
        asyncio.run(client.extend("a/0", what))


def test_both_faces_of_a_client_have_the_same_calls() -> None:
    def calls(face: type) -> dict[str, list[tuple[str, Any]]]:
        return {
            name: [(each.name, each.default) for each in inspect.signature(function).parameters.values()]
            for name, function in inspect.getmembers(face, inspect.isfunction)
            if not name.startswith("_")
        }

    def properties(face: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(face, lambda member: isinstance(member, property))}

    assert calls(Rollout) == calls(AsyncRollout)
    assert properties(Rollout) == properties(AsyncRollout) | {"tokenizer"}


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda client: client.next_groups("3"), "k: got '3', allowed: an integer >= 1"),
        (lambda client: client.next_groups(0), "k: got 0"),
        (lambda client: client.next_turns(-1), "k: got -1"),
        (lambda client: client.next_groups(1, timeout_s=None), "timeout_s: got None, allowed: seconds"),
        (lambda client: client.collect(1, timeout_s=float("nan")), "timeout_s: got nan"),
        (lambda client: client.abort(keep="disk"), "keep: got 'disk', allowed: auto, device, host, pool, none"),
        (lambda client: client.abort(keep="host"), r"keep: got host, which needs host\.bytes > 0"),
        (lambda client: client.collect(1, over_sample="a"), "over_sample: got 'a', allowed: a share >= 0"),
        (lambda client: client.collect(1, accept="a"), "accept: got 'a', allowed: a function"),
        (lambda client: client.submit("a", metadata=[1]), "metadata: got list, allowed: a mapping"),
        (lambda client: client.submit("a", min_version="1"), "min_version: got '1', allowed: an integer"),
        (lambda client: client.submit("a", min_version=1, exact_version=1), "exact_version: got min_version, too"),
        (lambda client: client.update_weights({}, 1, mode="now"), "mode: got 'now', allowed: recompute, in_place"),
        (lambda client: client.update_weights({}, -1), "version: got -1, allowed: an integer >= 0"),
        (lambda client: client.release_memory("disk"), "what: got 'disk', allowed: kv, weights"),
        (lambda client: client.abort(then="wait"), "then: got 'wait', allowed: hold, requeue, finish, retry, drop"),
        (lambda client: client.resume(5), "ids: got 5, allowed: ids of trajectories or groups, or ALL"),
        (lambda client: client.discard(["a", 5]), "ids: got"),
    ],
)
def test_arguments_of_other_calls_are_checked_here_too(
    client: AsyncRollout, call: Callable[[AsyncRollout], Coroutine[Any, Any, Any]], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        asyncio.run(call(client))


@pytest.mark.parametrize("what", [None, 5, {"role": "user", "content": "a"}])
def test_only_messages_text_or_ids_extend_a_trajectory(client: AsyncRollout, what: Any) -> None:
    with pytest.raises(InvalidPromptError, match=f"extend: got {type(what).__name__}, allowed: messages, text or"):
        asyncio.run(client.extend("a/0", what))


def sampled(token: int, *, prompt: int = 1) -> dict[str, Any]:
    """A state with one trajectory."""
    stage = Stage(W1)
    stage.submit("g", prompt=[prompt])
    stage.sample(member("g"))
    state = to_state(stage.controller.saved(stage.now), next_key=7)
    state["groups"][0]["members"][0]["trajectory"]["output_ids"] = [token]
    return state


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"format": 0}, InvalidArgumentError, "state: got format 0"),
        (sampled(VOCAB_SIZE), InvalidPromptError, f"g/0: token id {VOCAB_SIZE}, allowed: 0 … {VOCAB_SIZE - 1}"),
        (sampled(1, prompt=VOCAB_SIZE), InvalidPromptError, f"g: token id {VOCAB_SIZE}"),
        (sampled(-1), InvalidArgumentError, "g/0: token id -1"),
    ],
)
def test_a_state_of_another_model_or_of_none_reaches_nobody(
    client: AsyncRollout, state: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        asyncio.run(client.load_state_dict(state))
    assert client._intake.next_key == 0


def test_a_state_that_is_taken_says_where_keys_go_on(client: AsyncRollout) -> None:
    taken: list[Any] = []

    class Takes:
        def __init__(self) -> None:
            self.restore = Remote(self._restore)

        async def _restore(self, saved: Any) -> None:
            taken.append(saved)

    taker = AsyncRollout(Takes(), description(client), key_prefix="", on_close=None)
    state = sampled(1)
    asyncio.run(taker.load_state_dict(state))
    assert taken == [from_state(state)[0]]
    assert taker._intake.next_key == 7
    asyncio.run(taker.load_state_dict(state | {"next_key": 3}))
    assert taker._intake.next_key == 7


class Controller:
    """Hands out two groups; the second answer never comes."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.settled: tuple[Sequence[str], Sequence[str]] | None = None
        self.next_groups = Remote(self._next_groups)
        self.settle = Remote(self._settle)

    async def _next_groups(self, count: int, timeout_s: float, call: str, *_: Any) -> list[Delivery]:
        self.calls.append(call)
        if len(self.calls) == 2:
            await asyncio.Event().wait()
        return [Delivery(group_id=GroupId("a"), trajectories=())]

    async def _settle(self, arrived: Sequence[str], abandoned: Sequence[str]) -> None:
        self.settled = (arrived, abandoned)


def description(client: AsyncRollout) -> ServiceDescription:
    return ServiceDescription(
        config=client.config,
        vocab_size=VOCAB_SIZE,
        max_context=32,
        generation_defaults={"top_p": None},
        tokenizer=read_tokenizer_files(client.config.model.path),
    )


class Remote:
    def __init__(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self.remote = method


@pytest.mark.parametrize("owner", [False, True])
def test_a_guest_that_leaves_says_which_groups_it_got_and_which_it_did_not(client: AsyncRollout, owner: bool) -> None:
    """The service of an owner ends, with all that it has."""
    controller = Controller()
    ended: list[bool] = []
    on_close = (lambda: ended.append(True)) if owner else None
    guest = AsyncRollout(controller, description(client), key_prefix="", on_close=on_close)

    async def leave() -> None:
        await guest.next_groups()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(guest.next_groups(), 0.01)
        await guest.close()
        await guest.close()

    asyncio.run(leave())
    got, lost = controller.calls
    assert controller.settled == (None if owner else ((got,), (lost,)))
    assert ended == [True] * owner
