"""Several turns through real actors: what was appended is computed once, and all else is as if nobody had stopped."""

import itertools
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rollout
from rollout.client import Rollout
from rollout.errors import InvalidPromptError, NotExtendableError, PromptTooLongError
from rollout.types import AbortReason, FinishReason, Phase, SamplingParams, Trajectory
from tests.cluster.scene import (
    PROMPTS,
    at_rest,
    audit,
    collect,
    engines,
    eventually,
    limited,
    pids,
    reached,
    settings,
)
from tests.tiny_models import EOS_ID

APPENDED = tuple(range(30, 47))
"""More than a page, so that a turn never ends where its KV does."""
STOPS = tuple(range(4, 320, 24))
SAMPLING = SamplingParams(max_new_tokens=90, stop_token_ids=STOPS, ignore_eos=True, seed=11)
"""Turns of some 25 tokens."""
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
MESSAGES = [{"role": "tool", "content": "42"}]
KEYS = (f"turns-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def talking(ray_cluster: None, kv_model: Path) -> Iterator[Rollout]:
    with rollout.start(settings(kv_model, "talking", engine={"deterministic": False})) as service:
        yield service


@pytest.fixture
def service(talking: Rollout) -> Iterator[Rollout]:
    yield talking
    talking.abort(keep="none", then="finish")
    talking.next_groups(100, timeout_s=0)
    eventually(lambda: at_rest(talking))
    audit(talking)


def prefilled(service: Rollout) -> int:
    return sum(engine.prefilled_tokens for engine in engines(service))


def taken(service: Rollout) -> Trajectory:
    """The one trajectory that is under way, once it is over."""
    (trajectory,) = collect(service, 1).values()
    return trajectory


def talk(
    service: Rollout, sampling: SamplingParams = SAMPLING, **submission: Any
) -> tuple[list[Trajectory], Trajectory]:
    """A conversation that is answered with the same ids until its budget is spent: each turn, and all of it."""
    service.submit([PROMPTS[0]], sampling=sampling, key=next(KEYS), multi_turn=True, **submission)
    turns: list[Trajectory] = []
    while new := service.next_turns():
        turns += new
        service.extend(new[0], APPENDED)
    return turns, taken(service)


def alone(service: Rollout, prompt: Sequence[int], sampling: SamplingParams) -> Trajectory:
    """What follows a prompt when nothing disturbs it."""
    service.submit([list(prompt)], sampling=sampling, key=next(KEYS))
    return taken(service)


def test_every_turn_is_what_an_undisturbed_run_of_all_before_it_samples(service: Rollout) -> None:
    before = service.stats().counters
    turns, whole = talk(service)
    after = service.stats().counters
    assert len(turns) >= 2
    assert {(turn.finish_reason, turn.abort_reason) for turn in turns} == {(None, AbortReason.TURN)}
    assert all(turn.output_ids[-1] in STOPS for turn in turns)
    lengths = [len(turn.output_ids) for turn in turns] + [len(whole.output_ids)]
    starts = [0, *(length + len(APPENDED) for length in lengths[:-1])]
    spans = list(zip(starts, lengths, strict=True))
    for turn, length in zip([*turns, whole], lengths, strict=True):
        assert turn.output_ids == whole.output_ids[:length]
        assert turn.logprobs == whole.logprobs[:length]
    for start, end in spans:
        left = SAMPLING.max_new_tokens - sum(stop - begin for begin, stop in spans if stop < start)
        truth = alone(service, whole.prompt_ids + whole.output_ids[:start], replace(SAMPLING, max_new_tokens=left))
        assert whole.output_ids[start:end] == truth.output_ids
        assert whole.logprobs[start:end] == pytest.approx(truth.logprobs, abs=1e-4)
    mask = [0] * len(whole.output_ids)
    for start, end in spans:
        mask[start:end] = [1] * (end - start)
    assert list(whole.loss_mask) == mask
    assert whole.sampled_tokens == sum(mask) <= SAMPLING.max_new_tokens
    assert all(
        whole.output_ids[end:start] == APPENDED and set(whole.logprobs[end:start]) == {0.0}
        for (_, end), (start, _) in itertools.pairwise(spans)
    )
    assert whole.finish_reason is (
        FinishReason.LENGTH if whole.sampled_tokens == SAMPLING.max_new_tokens else FinishReason.STOP
    )
    assert (whole.suspensions, len(whole.resumes)) == (len(turns), len(turns))
    assert after.recomputed_tokens == before.recomputed_tokens
    assert after.tokens - before.tokens == sum(mask)


@pytest.mark.parametrize("keep", ["device", "pool"])
def test_only_what_was_appended_is_computed_and_greedy_turns_equal_one_run(service: Rollout, keep: str) -> None:
    key = next(KEYS)
    sampling = replace(GREEDY, max_new_tokens=40, stop_token_ids=tuple(range(4, 320)))  # every token ends a turn
    service.submit([PROMPTS[1]], sampling=sampling, key=key, multi_turn=True)
    (turn,) = service.next_turns()
    service.abort(turn.trajectory_id, keep=keep)
    before = prefilled(service)
    service.extend(turn, APPENDED)
    (turn,) = service.next_turns()
    assert prefilled(service) - before == len(APPENDED) + 1  # with the last one sampled, which had no KV yet
    (resume,) = turn.resumes
    assert resume.cached_tokens + resume.restored_tokens == len(PROMPTS[1])
    assert (resume.restored_tokens > 0) == (keep == "pool")
    assert resume.recomputed_tokens == 0
    truth = alone(service, (*PROMPTS[1], *turn.output_ids[:-1]), replace(GREEDY, max_new_tokens=1))
    assert turn.output_ids[-1:] == truth.output_ids
    assert turn.loss_mask == (1, *(0 for _ in APPENDED), 1)


def test_a_turn_is_handed_out_once_and_told_from_one_of_an_earlier_group(service: Rollout) -> None:
    sampling = replace(GREEDY, stop_token_ids=tuple(range(4, 320)))
    seen = []
    for _ in range(2):  # the same key twice, with as many tokens
        service.submit([PROMPTS[0]], sampling=sampling, key="again", multi_turn=True)
        seen += service.next_turns()
        assert service.next_turns() == []
        assert service.next_groups() == []  # it waits for a command
        assert service.resume().unknown == ("again/0",)
        assert service.stats().suspended == {"waiting": 1}
        service.abort(then="finish")
        whole = taken(service)
        assert (whole.finish_reason, whole.abort_reason) == (FinishReason.STOP, None)
        assert whole.output_ids == seen[-1].output_ids
    assert [turn.trajectory_id for turn in seen] == ["again/0", "again/0"]


def test_chat_messages_follow_an_answer_as_the_template_says(service: Rollout) -> None:
    tokenizer = service.tokenizer
    sampling = replace(GREEDY, max_new_tokens=40, stop_token_ids=(*range(4, 320), EOS_ID))
    chat = [{"role": "user", "content": "6 * 7"}]
    service.submit([chat], sampling=sampling, key=next(KEYS), multi_turn=True)
    (turn,) = service.next_turns()
    with pytest.raises(InvalidPromptError, match="got messages with an id"):
        service.extend(turn.trajectory_id, MESSAGES)
    service.extend(turn, MESSAGES)
    service.next_turns()
    service.abort(then="finish")
    whole = taken(service)
    assert whole.prompt_ids == tuple(tokenizer.apply_chat_template(chat))
    appended = whole.output_ids[1:-1]
    ends = () if turn.output_ids == (EOS_ID,) else ("<|im_end|>",)
    assert tokenizer.decode(appended, skip_special_tokens=False) == "".join(
        (*ends, "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n")
    )
    assert whole.loss_mask == (1, *(0 for _ in appended), 1)


def test_text_is_appended_as_it_is(service: Rollout) -> None:
    sampling = replace(GREEDY, max_new_tokens=2, stop_token_ids=tuple(range(4, 320)))
    service.submit([PROMPTS[0]], sampling=sampling, key=next(KEYS), multi_turn=True)
    (turn,) = service.next_turns()
    service.extend(turn.trajectory_id, " and then")
    whole = taken(service)
    assert whole.finish_reason is FinishReason.STOP  # its budget leaves no token for another turn
    assert whole.output_ids[1:-1] == tuple(service.tokenizer.encode(" and then", add_special_tokens=False))


def test_what_cannot_be_extended_is_refused_and_stays_as_it_was(service: Rollout) -> None:
    key = next(KEYS)
    with limited(service, 30):
        service.submit([PROMPTS[0]], sampling=replace(GREEDY, max_new_tokens=60), key=key)
        reached(service, 10)
        with pytest.raises(NotExtendableError, match=f"{key}/0: it is decoding, allowed: suspended"):
            service.extend(f"{key}/0", APPENDED)
        (partial,) = service.abort().partials
    with pytest.raises(NotExtendableError, match="no such trajectory"):
        service.extend("nobody/0", APPENDED)
    with pytest.raises(PromptTooLongError, match="allowed: fewer than the context of 512"):
        service.extend(partial, [5] * 500)
    with pytest.raises(InvalidPromptError, match="token id 320"):
        service.extend(partial, [320])
    with pytest.raises(InvalidPromptError, match="allowed"):
        service.extend(partial, [])
    assert service.stats().phases == {Phase.SUSPENDED: 1}
    assert service.abort().partials[0].output_ids == partial.output_ids
    service.extend(partial, APPENDED)  # any that is suspended goes on with what was appended
    whole = taken(service)
    assert whole.output_ids[: len(partial.output_ids) + len(APPENDED)] == partial.output_ids + APPENDED
    assert whole.sampled_tokens == 60


def test_a_worker_lost_between_two_turns_costs_recomputation_only(service: Rollout) -> None:
    prompt = PROMPTS[1][::-1]  # which no other worker has
    service.submit([prompt], sampling=SAMPLING, key=next(KEYS), multi_turn=True)
    (turn,) = service.next_turns()
    (turn,) = service.abort(turn.trajectory_id, keep="device").partials
    home = turn.workers[-1]
    pid = pids(service)[home]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: pids(service).get(home, pid) != pid)
    service.extend(turn, APPENDED)
    service.next_turns()
    service.abort(then="finish")
    whole = taken(service)
    start = len(turn.output_ids) + len(APPENDED)
    truth = alone(
        service,
        (*prompt, *whole.output_ids[:start]),
        replace(SAMPLING, max_new_tokens=SAMPLING.max_new_tokens - len(turn.output_ids)),
    )
    assert whole.output_ids[start:] == truth.output_ids
    assert whole.resumes[-1].recomputed_tokens > 0
