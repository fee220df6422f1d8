"""Several turns: what was appended is computed once, and only that; everything sampled after it equals Hugging Face."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout.config import EngineConfig, HostConfig, ModelConfig
from rollout.control.commands import Assignment, Watch
from rollout.control.messages import Admitted, Finished, Parked, Sampled, WorkerEvent
from rollout.engine.assembly import Assembled, assemble
from rollout.model.spec import read_spec
from rollout.types import AbortReason, Columns, FinishReason, Image, Keep, SamplingParams, TrajectoryId
from tests.engine.test_parity import prompts
from tests.local_service import LocalPool
from tests.tiny_models import make_tiny_llama, make_tiny_qwen2
from tests.weights import WEIGHTS

NAME = TrajectoryId("t")
TURN_TOKENS = 9
"""Sampled in each turn."""
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=1000, ignore_eos=True)
REPLAY = {"kernels": "torch", "deterministic": True, "chunk_tokens": 16}


class Conversation:
    """One trajectory on engines of its own, turn by turn; all its tokens."""

    def __init__(self, path: Path, prompt: Sequence[int], *, sampling: SamplingParams = GREEDY, **engine: Any) -> None:
        self.pool = LocalPool()
        self.prompt = list(prompt)
        self.sampling = sampling
        self.output = Columns()
        self.image: Image | None = None
        self.epoch = 0
        self.kv_tokens = 0
        self.engine_config = EngineConfig.model_validate({"kv_bytes": 4 << 20, "max_running": 4} | engine)
        self.path = path
        self.workers: list[Assembled] = []
        self.move()

    def move(self) -> None:
        """Go on on another worker."""
        self.workers.append(
            assemble(
                ModelConfig.model_validate({"path": self.path, "dtype": "float32"}),
                self.engine_config,
                HostConfig(),
                read_spec(self.path),
                reader=self.pool,
                restore_timeout_s=60.0,
                wake=lambda: None,
                weights=WEIGHTS,
            )
        )

    def turn(self, keep: Keep, tokens: int = TURN_TOKENS) -> tuple[list[WorkerEvent], int, int]:
        """Sample so many tokens and leave the KV where it is told to be; what happened, and how many positions were
        written by prefill, and altogether."""
        worker = self.workers[-1]
        engine = worker.engine
        self.epoch += 1
        key = (NAME, self.epoch)
        before = engine.stats
        engine.submit(
            Assignment(
                trajectory_id=NAME,
                epoch=self.epoch,
                prompt_ids=tuple(self.prompt),
                output=Columns(self.output.ids, self.output.logprobs, self.output.versions),
                sampling=self.sampling,
                seed=0,
                watch=Watch(slice_tokens=tokens),
                max_context=2048,
                image=self.image,
                kv_tokens=self.kv_tokens,
            )
        )
        events: list[WorkerEvent] = []
        while not any(isinstance(event, Parked | Finished) for event in events):
            events += engine.step()
            engine.audit()
        for event in events:
            if isinstance(event, Sampled):
                assert event.offset == len(self.output)
                self.output.extend(event.columns)
        self.image = None
        last = events[-1]
        if isinstance(last, Parked):
            self.kv_tokens = last.kv_tokens
            if keep is Keep.POOL:
                self.image = self.pool.store(worker, *_pages(worker, key, last))
            if keep is Keep.DEVICE:
                engine.keep(key, keep)
            else:
                engine.release(key)
            while not engine.idle:
                engine.step()
        prefilled = engine.stats.prefilled_tokens - before.prefilled_tokens
        return events, prefilled, prefilled + engine.stats.decoded_tokens - before.decoded_tokens

    @property
    def known(self) -> int:
        return len(self.prompt) + len(self.output)

    def append(self, ids: Sequence[int]) -> None:
        self.output.extend(Columns.given(ids))

    def close(self) -> None:
        for worker in self.workers:
            worker.engine.close()


def _pages(worker: Assembled, key: tuple[TrajectoryId, int], parked: Parked) -> tuple[Any, ...]:
    pages, fence = worker.engine.sources(key)
    return pages, parked.kv_tokens, fence, parked.written


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def assert_equals_hugging_face(path: Path, talk: Conversation) -> None:
    """One forward of theirs over all tokens: each sampled one is the best, with the log-probability that we said."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([[*talk.prompt, *talk.output.ids]])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    for index, (token, ours, version) in enumerate(
        zip(talk.output.ids, talk.output.logprobs, talk.output.versions, strict=True)
    ):
        theirs = logprobs[len(talk.prompt) + index - 1]
        if version is None:
            assert ours == 0.0
        else:
            assert int(theirs.argmax()) == token, index
            assert ours == pytest.approx(float(theirs[token]), abs=1e-4)


@pytest.fixture(params=[make_tiny_llama, make_tiny_qwen2], ids=["llama", "qwen2"])
def model_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    made: Path = request.param(tmp_path)
    return made


@pytest.mark.parametrize("keep", [Keep.POOL, Keep.DEVICE])
@pytest.mark.parametrize(
    "engine",
    [{}, {"chunk_tokens": 7}, {"kernels": "torch", "chunk_tokens": 16}, REPLAY],
    ids=["native", "odd chunks", "torch", "replay"],
)
def test_turns_equal_hugging_face_and_only_what_was_appended_is_computed(
    model_path: Path, engine: dict[str, Any], keep: Keep
) -> None:
    """With a page boundary before, in and at the end of what is appended; one is appended nothing."""
    (prompt,) = prompts(1, lengths=(21,))
    talk = Conversation(model_path, prompt, **engine)
    _, prefilled, _ = talk.turn(keep)
    assert prefilled == len(prompt)
    for appended in (1, 2, 16, 30, 0):
        known = talk.known
        talk.append(range(40, 40 + appended))
        events, prefilled, computed = talk.turn(keep)
        (admitted,) = [event for event in events if isinstance(event, Admitted)]
        assert admitted.cached_tokens + admitted.restored_tokens == known - 1
        assert admitted.recomputed_tokens == 0
        # The last sampled token has no KV yet. One token alone is fed by a decode step, as all after a prompt are in a
        # replay; all but one of those sampled are fed in this turn.
        assert computed == 1 + appended + TURN_TOKENS - 1
        rest = (1 + appended) % engine.get("chunk_tokens", 1024)
        assert prefilled == (0 if engine is REPLAY else 1 + appended - (rest == 1))
    assert talk.output.sampled == 6 * TURN_TOKENS
    assert_equals_hugging_face(model_path, talk)
    talk.close()


@pytest.mark.parametrize("engine", [{}, REPLAY], ids=["native", "replay"])
def test_another_worker_goes_on_from_the_pool(path: Path, engine: dict[str, Any]) -> None:
    (prompt,) = prompts(1, lengths=(33,))
    talk = Conversation(path, prompt, **engine)
    talk.turn(Keep.POOL)
    kv = talk.known - 1
    talk.append(range(50, 70))
    talk.move()
    events, prefilled, _ = talk.turn(Keep.POOL)
    (admitted,) = [event for event in events if isinstance(event, Admitted)]
    assert (admitted.restored_tokens, admitted.recomputed_tokens) == (kv, 0)
    assert prefilled == (0 if engine else 21)
    assert_equals_hugging_face(path, talk)
    talk.close()


@pytest.mark.parametrize("engine", [{}, REPLAY], ids=["native", "replay"])
def test_turns_without_their_kv_are_computed_again_and_equal_hugging_face(path: Path, engine: dict[str, Any]) -> None:
    (prompt,) = prompts(1, lengths=(33,))
    talk = Conversation(path, prompt, **engine)
    talk.turn(Keep.NONE)
    talk.append(range(50, 70))
    talk.move()
    events, prefilled, _ = talk.turn(Keep.NONE)
    (admitted,) = [event for event in events if isinstance(event, Admitted)]
    assert admitted.recomputed_tokens == 33 + TURN_TOKENS - 1
    assert prefilled == (33 if engine else 33 + TURN_TOKENS + 20)
    assert_equals_hugging_face(path, talk)
    talk.close()


def test_budgets_hold_over_turns(path: Path) -> None:
    (prompt,) = prompts(1, lengths=(10,))
    stops = tuple(range(4, 320))
    sampling = SamplingParams(
        temperature=0.0, max_new_tokens=25, min_new_tokens=20, ignore_eos=True, stop_token_ids=stops
    )
    talk = Conversation(path, prompt, sampling=sampling)
    talk.turn(Keep.DEVICE)
    talk.append(range(100, 130))
    talk.turn(Keep.DEVICE)
    assert talk.output.sampled == 18  # no stop yet: 9 + 30 + 9 tokens are more than 20, but 18 sampled are not
    assert not set(stops) & {t for t, v in zip(talk.output.ids, talk.output.versions, strict=True) if v is not None}
    events, _, _ = talk.turn(Keep.DEVICE)
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert talk.output.sampled >= 20
    assert finished.reason is (FinishReason.LENGTH if talk.output.sampled == 25 else FinishReason.STOP)
    talk.close()


def test_a_stop_ends_a_turn_whose_last_token_it_is(path: Path) -> None:
    """A greedy model says what it said before, unless something was appended."""
    (prompt,) = prompts(1, lengths=(10,))
    plain = Conversation(path, prompt)
    plain.turn(Keep.NONE)
    stop = plain.output.ids[6]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=100, ignore_eos=True, stop_token_ids=(stop,))
    talk = Conversation(path, prompt, sampling=sampling)
    assignment = Assignment(
        trajectory_id=NAME,
        epoch=1,
        prompt_ids=tuple(prompt),
        output=Columns(),
        sampling=sampling,
        seed=0,
        watch=Watch(turns=True),
        max_context=2048,
        image=None,
        kv_tokens=0,
    )
    engine = talk.workers[0].engine
    engine.submit(assignment)
    events: list[WorkerEvent] = []
    while not any(isinstance(event, Parked) for event in events):
        events += engine.step()
    said = [token for event in events if isinstance(event, Sampled) for token in event.columns.ids]
    assert said == list(plain.output.ids[: plain.output.ids.index(stop) + 1])
    parked = events[-1]
    assert isinstance(parked, Parked)
    assert (parked.reason, parked.kv_tokens) == (AbortReason.TURN, len(prompt) + len(said) - 1)
    for each in (plain, talk):
        each.close()
