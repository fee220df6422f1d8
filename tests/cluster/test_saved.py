"""A driver's checkpoint: what a service did not hand out goes on in another one, as if it had not ended (case E7)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import rollout
from rollout.client import Rollout
from rollout.errors import DuplicateKeyError, InvalidArgumentError
from rollout.types import (
    AbortReason,
    Phase,
    SamplingParams,
    Trajectory,
    TrajectoryId,
    Version,
    VersionRun,
)
from tests.cluster.scene import (
    IDS,
    KEYS,
    PROMPT_TOKENS,
    PROMPTS,
    SAMPLING,
    Outputs,
    at_rest,
    audit,
    collect,
    eventually,
    is_prefix,
    limited,
    outputs,
    reached,
    settings,
    submit,
)
from tests.tiny_models import make_tiny_llama

SHORT = replace(SAMPLING, max_new_tokens=4)
TALK = SamplingParams(max_new_tokens=60, stop_token_ids=tuple(range(4, 320, 24)), ignore_eos=True, seed=11)
APPENDED = tuple(range(30, 47))
OLD, NEW = Version(3), Version(7)
ENGINE = {"max_running": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What is left of a service that was closed."""

    truth: Outputs
    """Of the batch, when nothing disturbs it."""
    suspended: Any
    """One group of the batch was held, the other one ran."""
    partials: dict[TrajectoryId, Trajectory]
    """Of the held ones."""
    collected: Any
    """A collection of one short group was met, and left the batch."""
    unnamed: Any
    """A group without a key ran; one with a key had been handed out."""
    turned: Any
    """A turn had ended."""
    talk: Trajectory
    """The whole of it, there."""


def through_json(state: dict[str, Any]) -> Any:
    return json.loads(json.dumps(state))


@pytest.fixture(scope="module")
def past(ray_cluster: None, kv_model: Path) -> Past:
    with rollout.start(settings(kv_model, "past", engine=ENGINE, cluster={"workers": 1})) as service:
        service.update_weights(kv_model, OLD)
        submit(service)
        truth = outputs(collect(service))

        with limited(service):
            submit(service)
            reached(service, 30)
            partials = {t.trajectory_id: t for t in service.abort(KEYS[0], keep="pool").partials}
            suspended = through_json(service.state_dict())
            clear(service)

            service.submit([PROMPTS[0]], sampling=SHORT, key="short")
            submit(service)
            reached(service, SHORT.max_new_tokens)
            (delivery,) = service.collect(1, over_sample=2.0).groups
            assert delivery.group_id == "short"
            collected = through_json(service.state_dict())
            clear(service)

            service.submit([PROMPTS[0]], sampling=SHORT, key="arrived")
            assert len(collect(service, 1)) == 1
            service.submit([PROMPTS[1]], sampling=SAMPLING)
            reached(service, 5)
            unnamed = through_json(service.state_dict())
            clear(service)

        service.submit([PROMPTS[0]], sampling=TALK, key="talk", multi_turn=True)
        (turn,) = service.next_turns()
        turned = through_json(service.state_dict())
        service.extend(turn, APPENDED)
        service.next_turns()
        service.abort(then="finish")
        (talk,) = collect(service, 1).values()
        assert 0 in talk.loss_mask
    return Past(
        truth=truth,
        suspended=suspended,
        partials=partials,
        collected=collected,
        unnamed=unnamed,
        turned=turned,
        talk=talk,
    )


def clear(service: Rollout) -> None:
    service.discard([*KEYS, "auto-0"])
    eventually(lambda: not service.stats().phases)


@pytest.fixture(scope="module")
def present(past: Past, kv_model: Path) -> Iterator[Rollout]:
    with rollout.start(settings(kv_model, "present", engine=ENGINE, cluster={"workers": 1})) as service:
        yield service


@pytest.fixture
def service(present: Rollout, kv_model: Path) -> Iterator[Rollout]:
    """With the weights of the past one, under their label."""
    present.update_weights(kv_model, OLD)
    yield present
    present.abort(keep="none", then="finish")
    present.next_groups(100, timeout_s=0)
    eventually(lambda: at_rest(present, 1))
    audit(present)


def check_resume(trajectory: Trajectory, before: int) -> None:
    """It had so many tokens in the service before; what had KV there was computed once more, and nothing else."""
    first = next(iter(trajectory.resumes))
    had = PROMPT_TOKENS + before - 1
    assert first.recomputed_tokens + first.cached_tokens == had
    assert first.restored_tokens == first.loaded_tokens == 0


def test_what_was_held_and_what_ran_end_as_if_nothing_had_happened_each_once(service: Rollout, past: Past) -> None:
    had = {
        TrajectoryId(member["trajectory"]["trajectory_id"]): len(member["trajectory"]["output_ids"])
        for group in past.suspended["groups"]
        for member in group["members"]
    }
    assert set(had) == set(IDS)
    assert all(count >= 30 for count in had.values())
    before = service.stats().counters
    service.load_state_dict(past.suspended)
    with pytest.raises(DuplicateKeyError):
        service.load_state_dict(past.suspended)
    assert service.stats().phases[Phase.SUSPENDED] == 2
    report = service.abort(KEYS[0])
    assert {t.trajectory_id for t in report.partials} == set(past.partials)
    assert all(is_prefix(partial, past.truth) for partial in report.partials)
    ran = collect(service, 1)
    assert service.next_groups() == []  # the other one waits for a command
    service.resume(KEYS[0])
    trajectories = ran | collect(service, 1)
    after = service.stats().counters
    assert outputs(trajectories) == past.truth
    assert service.next_groups() == []
    for t, trajectory in trajectories.items():
        assert trajectory.versions == (VersionRun(version=OLD, tokens=SAMPLING.max_new_tokens),)
        check_resume(trajectory, had[t])
    assert after.trajectories - before.trajectories == len(IDS)
    assert after.tokens - before.tokens == sum(SAMPLING.max_new_tokens - count for count in had.values())
    assert after.recomputed_tokens > before.recomputed_tokens


def test_a_collection_goes_on_with_what_the_last_one_left(service: Rollout, past: Past) -> None:
    assert [group["submission"]["group_id"] for group in past.collected["groups"]] == [*KEYS]
    service.load_state_dict(past.collected)
    assert service.stats().phases == {Phase.SUSPENDED: len(IDS)}
    service.submit([PROMPTS[0]], sampling=SHORT, key="new")
    deliveries = service.collect(3, over_sample=1.0).groups
    assert sorted(delivery.group_id for delivery in deliveries) == sorted([*KEYS, "new"])
    trajectories = {t.trajectory_id: t for delivery in deliveries for t in delivery.trajectories}
    assert outputs({t: trajectories[t] for t in IDS}) == past.truth
    assert all(trajectories[t].abort_reason is None for t in IDS)


def test_what_arrived_is_not_saved_and_new_keys_are_new(service: Rollout, past: Past) -> None:
    assert [group["submission"]["group_id"] for group in past.unnamed["groups"]] == ["auto-0"]
    assert past.unnamed["deliveries"] == []
    service.load_state_dict(past.unnamed)
    service.submit([PROMPTS[0]], sampling=SHORT)
    trajectories = collect(service, 2)
    assert set(trajectories) == {"auto-0/0", "auto-1/0"}
    same = trajectories[TrajectoryId("auto-0/0")]
    assert outputs({TrajectoryId("bob/0"): same}) == {TrajectoryId("bob/0"): past.truth[TrajectoryId("bob/0")]}


def test_a_turn_that_had_ended_is_told_of_again_and_goes_on(service: Rollout, past: Past) -> None:
    service.load_state_dict(past.turned)
    (turn,) = service.next_turns()
    assert turn.abort_reason is AbortReason.TURN
    count = len(turn.output_ids)
    assert (turn.output_ids, turn.logprobs) == (past.talk.output_ids[:count], past.talk.logprobs[:count])
    service.extend(turn, APPENDED)
    service.next_turns()
    service.abort(then="finish")
    (whole,) = collect(service, 1).values()
    assert (whole.output_ids, whole.logprobs) == (past.talk.output_ids, past.talk.logprobs)
    assert (whole.loss_mask, whole.finish_reason) == (past.talk.loss_mask, past.talk.finish_reason)
    check_resume(whole, count)


def test_tokens_keep_the_version_that_sampled_them_and_new_ones_have_the_live_one(
    service: Rollout, past: Past, kv_model: Path, tmp_path: Path
) -> None:
    service.update_weights(other_model(tmp_path), NEW)
    service.load_state_dict(past.suspended)
    service.resume()
    trajectories = collect(service)
    service.update_weights(kv_model, OLD)
    assert set(trajectories) == set(IDS)
    for t, trajectory in trajectories.items():
        old, new = trajectory.versions
        assert (old.version, new.version) == (OLD, NEW)
        assert old.tokens + new.tokens == SAMPLING.max_new_tokens
        ids, logprobs = past.truth[t]
        assert trajectory.output_ids[: old.tokens] == ids[: old.tokens]
        assert trajectory.logprobs[: old.tokens] == logprobs[: old.tokens]
        before, after = trajectory.kv_spans
        first = PROMPT_TOKENS + old.tokens
        assert (before.kv, before.stop) == (((0, PROMPT_TOKENS, OLD),), first)
        assert (after.first, after.kv) == (first, ((0, first, NEW),))
        check_resume(trajectory, old.tokens)


def test_a_state_is_the_same_after_it_was_loaded(service: Rollout, past: Past) -> None:
    service.pause()
    service.load_state_dict(past.suspended)
    again = service.state_dict()
    service.unpause()
    for new, old in zip(again["groups"], past.suspended["groups"], strict=True):
        assert new["submission"] == old["submission"]
        for now, was in zip(new["members"], old["members"], strict=True):
            kept = ("output_ids", "logprobs", "versions", "kv_spans", "seed", "suspensions")
            assert {name: now["trajectory"][name] for name in kept} == {name: was["trajectory"][name] for name in kept}
            assert now["then"] == was["then"]


def test_what_is_no_state_changes_nothing(service: Rollout, past: Past) -> None:
    before = service.stats().phases
    with pytest.raises(InvalidArgumentError, match="state: groups: Field required"):
        service.load_state_dict({name: value for name, value in past.suspended.items() if name != "groups"})
    assert service.stats().phases == before


def other_model(path: Path) -> Path:
    """Of the same architecture."""
    kv = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
    return make_tiny_llama(path / "other", seed=1, num_key_value_heads=8, head_dim=32, **kv)
