"""What stands in a checkpoint: plain values whatever was submitted, the same again, or an error that says where."""

import copy
import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.client.state import FORMAT, from_state, to_state
from rollout.control.saved import Saved
from rollout.errors import InvalidArgumentError
from rollout.types import AbortReason, Priority, SamplingParams, Then
from tests.control.stage import W1, Stage, member, submission

PLAIN = (dict, list, str, int, float, bool, type(None))
HIGHEST = 2**64 - 1


def lived() -> Saved:
    """Of a controller with some of everything."""
    stage = Stage(W1, room=9)
    options = {"multi_turn": True, "caller": "tool", "deadline_s": 1.5, "max_group_tokens": 40, "min_version": 0}
    stage.submit_all(
        replace(submission("a", 2, **options), seeds=(HIGHEST, 2**63), metadata={"answer": 42}),
        submission("p", 2, partial=True, priority=Priority.EVAL),
        submission("handed"),
    )
    for t in (member("a"), member("a", 1), member("p"), member("handed")):
        stage.admit(t)
        stage.sample(t, 3)
    stage.abort(member("a", 1), then=Then.RETRY)
    stage.park(member("a", 1))
    stage.live(1)
    stage.sample(member("a"), 2, version=1)
    stage.park(member("a"), AbortReason.TURN)
    stage.answer_all()
    stage.finish(member("p"))
    stage.fail(member("handed"), "it cannot go on")
    assert len(stage.take()) == 2
    return stage.controller.saved(stage.now)


def with_metadata(metadata: Mapping[Any, Any]) -> Saved:
    stage = Stage(W1)
    stage.submit_all(replace(submission("g"), metadata=dict(metadata)))
    return stage.controller.saved(stage.now)


def through_json(state: dict[str, Any]) -> Any:
    return json.loads(json.dumps(state))


def through_torch(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def is_plain(value: object) -> bool:
    """Of exactly these types, not of ones made from them."""
    assert type(value) in PLAIN, value
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return all(is_plain(part) for part in parts)


@pytest.mark.parametrize("through", [through_json, through_torch])
def test_what_was_saved_comes_back_from_a_checkpoint_as_it_was(through: Callable[[dict[str, Any]], Any]) -> None:
    saved = lived()
    state = to_state(saved, next_key=17)
    assert is_plain(state)
    assert from_state(through(state)) == (saved, 17)
    assert from_state(state) == (saved, 17)
    (group, *_) = from_state(through(state))[0].groups
    assert group.submission.metadata == {"answer": 42}
    assert group.submission.seeds == (HIGHEST, 2**63)
    assert group.members[1].trajectory.attempts[0].seed == 2**63


def test_nothing_comes_back_too() -> None:
    saved = Stage(W1).controller.saved(0.0)
    assert from_state(through_json(to_state(saved, next_key=0))) == (saved, 0)


def test_log_probabilities_come_back_bit_for_bit_whatever_they_are() -> None:
    saved = lived()
    group = saved.groups[0]
    odd = (float(np.float32(-0.1)), -5e-324, float("-inf"), float("nan"), -0.0)
    trajectory = replace(group.members[0].trajectory, logprobs=odd)
    members = (replace(group.members[0], trajectory=trajectory), *group.members[1:])
    changed = replace(saved, groups=(replace(group, members=members), *saved.groups[1:]))
    back = from_state(through_json(to_state(changed, next_key=0)))[0].groups[0].members[0].trajectory.logprobs
    assert [one.hex() for one in back] == [one.hex() for one in odd]


def test_no_deadline_is_not_the_one_of_the_policy() -> None:
    stage = Stage(W1)
    stage.submit("g", deadline_s=math.inf)
    state = to_state(stage.controller.saved(0.0), next_key=0)
    assert from_state(through_json(state))[0].groups[0].submission.deadline_s == math.inf


@pytest.mark.parametrize(
    ("metadata", "becomes"),
    [
        ({1: "a", None: 2, False: 3}, {"1": "a", "None": 2, "false": 3}),
        ({"tuple": (1, (2, 3))}, {"tuple": [1, [2, 3]]}),
        ({"bytes": b"\xff\x00"}, {"bytes": "_wA="}),
        ({"numpy": [np.float64(1.5), np.float32(1.5), np.int64(3)]}, {"numpy": [1.5, 1.5, 3]}),
        ({"array": np.arange(3)}, {"array": "[0 1 2]"}),
        ({"tensor": torch.tensor([1, 2])}, {"tensor": "tensor([1, 2])"}),
        ({"path": Path("a/b"), "at": datetime(2020, 1, 1)}, {"path": "a/b", "at": "2020-01-01T00:00:00"}),
        (
            {"params": SamplingParams(seed=3), "then": Then.HOLD},
            {"params": asdict(SamplingParams(seed=3)) | {"stop_token_ids": []}, "then": "hold"},
        ),
        ({"complex": 1j}, {"complex": "1j"}),
        ({"deep": [{"of": {2: Stage}}]}, {"deep": [{"of": {"2": str(Stage)}}]}),
        ({"huge": 2**70, "text": "\ud800 é\n"}, {"huge": 2**70, "text": "\ud800 é\n"}),
    ],
)
def test_of_metadata_all_is_plain(metadata: dict[Any, Any], becomes: dict[str, Any]) -> None:
    state = to_state(with_metadata(metadata), next_key=0)
    assert is_plain(state)
    for through in (through_json, through_torch):
        (group,) = from_state(through(state))[0].groups
        assert group.submission.metadata == becomes


@pytest.mark.parametrize(
    ("state", "got"),
    [
        ({}, "format None"),
        ({"format": 2}, "format 2"),
        ({"format": "1"}, "format '1'"),
        ([], "format 'list'"),
        (None, "format 'NoneType'"),
    ],
)
def test_what_is_no_state_of_this_format_is_refused(state: Any, got: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"state: got {got}, allowed: {FORMAT}, as state_dict makes it"):
        from_state(state)


def damage(*place: str | int, to: Any = None, by: Callable[[Any], Any] | None = None) -> Callable[[Any], None]:
    """Another value in this place."""

    def change(state: Any) -> None:
        *way, last = place
        for step in way:
            state = state[step]
        state[last] = by(state[last]) if by is not None else to

    return change


def remove(*place: str | int) -> Callable[[Any], None]:
    def change(state: Any) -> None:
        *way, last = place
        for step in way:
            state = state[step]
        del state[last]

    return change


FIRST = ("groups", 0, "members", 0, "trajectory")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (remove("groups"), "groups: Field required"),
        (remove("next_key"), "next_key: got None, allowed: an integer"),
        (damage("next_key", to=True), "next_key: got True"),
        (damage("next_key", to="3"), "next_key: got '3'"),
        (damage("version", to=None), "version: Input should be a valid integer"),
        (damage("groups", to="all"), "groups: Input should be a valid tuple"),
        (damage("groups", 0, to=7), "groups.0: "),
        (remove("groups", 0, "members"), "groups.0.members: Field required"),
        (remove("groups", 0, "members", 1), "groups.0: .*a: got members"),
        (damage("groups", 0, "members", by=lambda all_: all_[::-1]), "groups.0: .*a: got members"),
        (damage("groups", 0, "batch", to=1), "a: batch 1 of 1"),
        (damage("groups", 0, "batch", to=-1), "a: batch -1 of 1"),
        (damage("groups", by=lambda groups: [*groups, groups[0]]), "two groups of one key"),
        (damage("groups", 0, "handed", to=["a/0"]), r"groups.0: .*a: handed \('a/0',\)"),
        (damage("groups", 0, "handed", to=["b/0"]), r"groups.0: .*a: handed \('b/0',\)"),
        (damage("groups", 0, "members", 0, "then", to="fly"), "groups.0.members.0.then: Input should be 'hold'"),
        (damage("groups", 0, "members", 0, "then", to=None), "groups.0.members.0: .*a/0: then None"),
        (damage("groups", 0, "members", 0, "dropped", to=True), "groups.0.members.0: .*dropped True"),
        (damage("groups", 0, "submission", "seeds", by=lambda seeds: seeds[1:]), "groups.0.submission: "),
        (damage("groups", 0, "submission", "prompt_ids", to=[]), "groups.0: .*a: a prompt of no tokens"),
        (damage("groups", 0, "submission", "prompt_ids", 0, to=-1), "groups.0: .*a: a prompt of no tokens"),
        (
            damage("groups", 0, "submission", "sampling", 0, "temperature", to=-1.0),
            "groups: submission.sampling: temperature: got -1.0",
        ),
        (damage(*FIRST, "output_ids", 1, to=None), "groups.0.members.0.trajectory.output_ids.1: Input should be a"),
        (damage(*FIRST, "output_ids", 1, to=1.5), "groups.0.members.0.trajectory.output_ids.1: Input should be a"),
        (damage(*FIRST, "output_ids", 1, to=-1), "groups.0.members.0: .*a/0: token id -1"),
        (damage(*FIRST, "output_ids", by=lambda ids: ids[1:]), "groups.0.members.0.trajectory: .*a/0: unequal columns"),
        (damage(*FIRST, "logprobs", by=lambda all_: all_[1:]), "groups.0.members.0.trajectory: .*a/0: unequal columns"),
        (damage(*FIRST, "versions", to=[]), "groups.0.members.0.trajectory: .*a/0: unequal columns"),
        (
            damage(*FIRST, "versions", to=[{"version": 0, "tokens": 6}, {"version": 1, "tokens": -1}]),
            "groups.0.members.0: .*a/0: a run of versions",
        ),
        (
            damage("deliveries", 0, "trajectories", 0, "logprobs", to=[]),
            "deliveries.0.trajectories.0: .*handed/0: unequal columns",
        ),
        (damage("batches", 0, "size", to="many"), "batches.0.size: Input should be a valid integer"),
        (lambda state: state.update({5: 5}), "5: Keys should be strings"),
    ],
)
def test_what_is_damaged_is_refused_and_the_place_is_named(change: Callable[[Any], Any], says: str) -> None:
    state = copy.deepcopy(to_state(lived(), next_key=3))
    change(state)
    with pytest.raises(InvalidArgumentError, match=f"^state: .*{says}"):
        from_state(state)


@pytest.mark.parametrize(
    ("keys", "counted", "next_key"),
    [
        (["auto-0", "auto-7", "other"], 3, 8),
        (["auto-0"], 3, 3),
        (["auto-1f2e3d4c-5", "auto-", "auto-x", "my-auto-9", "auto-1f2e3d4c-"], 0, 6),
    ],
)
def test_names_that_another_client_made_are_not_made_again(keys: list[str], counted: int, next_key: int) -> None:
    """The one that saved had counted less far."""
    stage = Stage(W1)
    for key in keys:
        stage.submit(key)
    state = to_state(stage.controller.saved(0.0), next_key=counted)
    assert from_state(through_json(state))[1] == next_key
