"""The trainers of the examples against what they compute written out: whole sequences, one trajectory at a time."""

import copy
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollout.training.batch import Batch
from rollout.types import Trajectory
from tests.examples.trajectories import random_trajectories, tokens, trajectory
from tests.tiny_models import make_tiny_llama, make_tiny_qwen2

LIVE, MAX_LAG = 3, 1
TEMPERATURE = 0.7
CLIP, CAP, KL = 0.1, 1.5, 0.3
GAMMA, LAM, VALUE_COEFFICIENT = 0.9, 0.8, 0.25
MAKERS: dict[str, Callable[..., Path]] = {"llama": make_tiny_llama, "qwen2": make_tiny_qwen2}


@pytest.fixture(scope="module", params=list(MAKERS))
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKERS[request.param](tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


def fields(model: Path, **values: Any) -> dict[str, Any]:
    service = {"model": {"path": model, "dtype": "float32"}, "sampling": {"temperature": TEMPERATURE}}
    return (
        {"rollout": service, "autocast": False, "max_lag": MAX_LAG, "clip": CLIP, "cap": CAP}
        | {
            "learning_rate": 0.02,
            "max_grad_norm": 1e9,
        }
        | values
    )


def batches() -> dict[str, list[Trajectory]]:
    """By what is special about their prompts or outputs."""
    draw = random.Random(1)
    head, long = tokens(draw, 6), tokens(draw, 40)
    one = tokens(draw, 5)

    def made(*members: tuple[Sequence[int], Sequence[tuple[int | None, int]]]) -> list[Trajectory]:
        return [trajectory(draw, f"{row}/0", prompt, runs) for row, (prompt, runs) in enumerate(members)]

    turns = [(0, 3), (None, 4), (1, 2), (None, 1), (2, 5)]
    return {
        "one group": made((one, [(0, 7)]), (one, [(0, 2)]), (one, [(0, 1)])),
        "a single row": made((one, [(0, 7)])),
        "groups of unequal prompts": made((one, [(0, 7)]), (one, [(0, 3)]), (long, [(0, 2)]), (long, [(0, 9)])),
        "groups in turn": made((one, [(0, 7)]), (long, [(0, 3)]), (one, [(0, 2)]), (long, [(0, 9)])),
        "prompts that begin alike": made((head, [(0, 4)]), ([*head, 1, 2], [(0, 5)]), ([*head, 1, 3, 4], [(0, 2)])),
        "prompts that begin with another": made((head, [(0, 4)]), ([*head, *long], [(0, 5)])),
        "one-token prompts": made(([7], [(0, 4)]), ([7], [(0, 2)]), ([9], [(0, 6)])),
        "a one-token prompt among others": made((one, [(0, 4)]), ([7], [(0, 6)]), (one, [(0, 1)])),
        "two-token prompts": made(([7, 8], [(0, 4)]), ([7, 9], [(0, 6)])),
        "several turns": made((one, turns), (long, [(0, 4)]), (long, turns[:3])),
        "appended before anything was sampled": made((one, [(None, 3), (0, 4)]), (one, [(0, 2)])),
        "a row without samples": made((one, [(None, 3)]), (one, [(0, 2)])),
    }


def whole(model: Any, batch: Batch) -> Tensor:
    """[B, S]: a plain forward of Hugging Face's; 0 where nothing was sampled."""
    logits_BSV = model(input_ids=batch.ids_BS, attention_mask=batch.attention_BS.long()).logits
    all_BSV = torch.log_softmax(logits_BSV[:, :-1] / TEMPERATURE, dim=-1)
    next_BS = all_BSV.gather(-1, batch.ids_BS[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(next_BS, (1, 0)).masked_fill(~batch.mask_BS, 0.0)


@pytest.mark.parametrize("what", batches())
def test_shared_prefixes_change_neither_values_nor_gradients(grpo: ModuleType, any_model: Path, what: str) -> None:
    batch = Batch.of(batches()[what])
    trainer = grpo.Trainer(grpo.Settings.model_validate(fields(any_model)))
    parameters = list(trainer.model.parameters())
    weights_BS = torch.randn(batch.mask_BS.shape, generator=torch.Generator().manual_seed(0))
    found_BS, expected_BS = trainer.logprobs(trainer.model, batch), whole(trainer.model, batch)
    torch.testing.assert_close(found_BS, expected_BS, atol=2e-5, rtol=1e-5)
    assert not found_BS[~batch.mask_BS].any()
    found = torch.autograd.grad((weights_BS * found_BS).sum(), parameters)
    expected = torch.autograd.grad((weights_BS * expected_BS).sum(), parameters)
    assert_close(found, expected)


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("kl", [0.0, KL])
def test_the_update_of_grpo_is_that_of_a_loop_over_trajectories(
    grpo: ModuleType, model: Path, rows: int, minibatches: int, kl: float
) -> None:
    settings = grpo.Settings.model_validate(fields(model, rows=rows, minibatches=minibatches, kl=kl))
    trainer = grpo.Trainer(settings)
    disturb(trainer.model)
    trajectories, rewards = off_policy(trainer), [[1.0, 0.0, 0.25, 1.0], [2.0, 0.0, 0.0], [1.0]]
    ours, norms = watched(trainer)
    mine = copy.deepcopy(trainer.model)
    metrics = trainer.update(Batch.of(trajectories), rewards, live=LIVE)

    advantages = [
        (reward - sum(group) / len(group)) / (statistics.stdev(group) + 1e-6) if len(group) > 1 else 0.0
        for group in rewards
        for reward in group
    ]
    first = load(model)
    proximal = [logprobs_of(mine, one).detach() for one in trajectories]
    size = math.ceil(len(trajectories) / minibatches)
    losses, clipped = [], 0
    for start in range(0, len(trajectories), size):
        indices = range(start, min(start + size, len(trajectories)))
        total = torch.zeros(())
        for index in indices:
            one, advantage = trajectories[index], advantages[index]
            current, firsts = logprobs_of(mine, one), logprobs_of(first, one).detach()
            terms = []
            for at, (version, behaviour) in enumerate(sampled(one)):
                if version < LIVE - MAX_LAG:
                    continue
                weight = min(CAP, math.exp(proximal[index][at] - behaviour))
                ratio = (current[at] - proximal[index][at]).exp()
                bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
                clipped += int(bounded != ratio)
                away = firsts[at] - current[at]
                gain = weight * torch.minimum(ratio * advantage, bounded * advantage)
                terms.append(-gain + kl * (away.exp() - away - 1))
            if terms:
                total = total + torch.stack(terms).mean() / len(indices)
        gradients = torch.autograd.grad(total, list(mine.parameters()))
        losses.append(total.item())
        assert_close(ours[len(losses) - 1], gradients)
        with torch.no_grad():
            for parameter, gradient in zip(mine.parameters(), gradients, strict=True):
                parameter -= settings.learning_rate * gradient
    assert len(ours) == len(losses) == minibatches
    assert clipped or minibatches == 1
    stale = sum(version < LIVE - MAX_LAG for one in trajectories for version, _ in sampled(one))
    assert metrics["train/stale_tokens"] == stale > 0
    assert metrics["train/loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    assert metrics["train/grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-3)
    on_policy = [
        proximal[row][at].item() - behaviour
        for row, one in enumerate(trajectories)
        for at, (version, behaviour) in enumerate(sampled(one))
        if version == LIVE
    ]
    assert metrics["mismatch/ratio_mean"] == pytest.approx(sum(map(math.exp, on_policy)) / len(on_policy), rel=1e-4)
    assert metrics["mismatch/max_abs_log_ratio"] == pytest.approx(max(map(abs, on_policy)), abs=1e-4)


def test_of_tokens_that_are_all_stale_nothing_is_learnt(grpo: ModuleType, ppo: ModuleType, model: Path) -> None:
    draw = random.Random(0)
    batch = Batch.of([trajectory(draw, f"0/{row}", [5, 6, 7], [(0, 4)]) for row in range(2)])
    for module, kind in ((grpo.Settings, grpo.Trainer), (ppo.PPOSettings, ppo.PPOTrainer)):
        trainer = kind(module.model_validate(fields(model)))
        gradients, norms = watched(trainer)
        metrics = trainer.update(batch, [[1.0, 0.0]], live=LIVE)
        assert norms == [0.0]
        assert not any(each.any() for each in gradients[0])
        assert metrics["train/loss"] == 0.0


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_update_of_ppo_is_that_of_a_loop_over_trajectories(ppo: ModuleType, model: Path, minibatches: int) -> None:
    options = {"gamma": GAMMA, "lam": LAM, "value_coefficient": VALUE_COEFFICIENT, "value_learning_rate": 1e-2}
    settings = ppo.PPOSettings.model_validate(fields(model, rows=3, minibatches=minibatches, **options))
    trainer = ppo.PPOTrainer(settings)
    disturb(trainer.model)
    torch.nn.init.normal_(trainer.value_head.weight, std=0.2, generator=torch.Generator().manual_seed(0))
    trajectories, rewards = off_policy(trainer), [[1.0, 0.0, 0.25, 1.0], [2.0, 0.0, 0.0], [1.0]]
    ours, _ = watched(trainer)
    mine, head = copy.deepcopy(trainer.model), copy.deepcopy(trainer.value_head)
    metrics = trainer.update(Batch.of(trajectories), rewards, live=LIVE)

    proximal = [logprobs_of(mine, one).detach() for one in trajectories]
    values = [values_of(mine, head, one).detach().tolist() for one in trajectories]
    flat = [reward for group in rewards for reward in group]
    advantages = [advantages_of(reward, row) for reward, row in zip(flat, values, strict=True)]
    returns = [[a + v for a, v in zip(*pair, strict=True)] for pair in zip(advantages, values, strict=True)]
    fresh = [[version >= LIVE - MAX_LAG for version, _ in sampled(one)] for one in trajectories]
    kept = [a for row, mask in zip(advantages, fresh, strict=True) for a, keep in zip(row, mask, strict=True) if keep]
    mean, spread = sum(kept) / len(kept), statistics.pstdev(kept) + 1e-6
    size = math.ceil(len(trajectories) / minibatches)
    value_losses = []
    for start in range(0, len(trajectories), size):
        indices = range(start, min(start + size, len(trajectories)))
        policy, value = [], []
        for index in indices:
            current, expected = logprobs_of(mine, trajectories[index]), values_of(mine, head, trajectories[index])
            for at, (_, behaviour) in enumerate(sampled(trajectories[index])):
                if not fresh[index][at]:
                    continue
                weight = min(CAP, math.exp(proximal[index][at] - behaviour))
                ratio = (current[at] - proximal[index][at]).exp()
                advantage = (advantages[index][at] - mean) / spread
                policy.append(-weight * torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage))
                value.append(0.5 * (expected[at] - returns[index][at]) ** 2)
        value_losses.append(torch.stack(value).mean().item())
        total = torch.stack(policy).mean() + VALUE_COEFFICIENT * torch.stack(value).mean()
        parameters = [*mine.parameters(), *head.parameters()]
        gradients = torch.autograd.grad(total, parameters)
        assert_close(ours[len(value_losses) - 1], gradients)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                in_head = any(parameter is each for each in head.parameters())
                parameter -= (settings.value_learning_rate if in_head else settings.learning_rate) * gradient
    assert len(ours) == len(value_losses) == minibatches
    assert metrics["train/value_loss"] == pytest.approx(sum(value_losses) / len(value_losses), rel=1e-3)


def test_the_learning_rate_warms_up_and_is_that_of_the_settings(ppo: ModuleType, model: Path, tmp_path: Path) -> None:
    """After a checkpoint of other settings, too."""
    settings = ppo.PPOSettings.model_validate(
        fields(model, warmup=4, learning_rate=1e-3, value_learning_rate=1e-2, minibatches=2)
    )
    batch, rewards = Batch.of(random_trajectories(0, [4])), [[1.0, 0.0, 0.0, 0.5]]

    def rates(trainer: Any) -> list[float]:
        trainer.update(batch, rewards, live=LIVE)
        return [group["lr"] for group in trainer.optimizer.param_groups]

    trainer = ppo.PPOTrainer(settings)
    assert rates(trainer) == pytest.approx([0.5e-3, 0.5e-2])
    other = ppo.PPOTrainer(settings.model_copy(update={"learning_rate": 4e-3}))
    other.load_state_dict(trainer.state_dict())
    assert rates(other) == pytest.approx([4e-3, 1e-2])
    assert rates(other) == pytest.approx([4e-3, 1e-2])


def test_one_token_is_enough_for_ppo(ppo: ModuleType, model: Path) -> None:
    """Its advantage has no spread."""
    trainer = ppo.PPOTrainer(ppo.PPOSettings.model_validate(fields(model)))
    metrics = trainer.update(Batch.of([trajectory(random.Random(0), "0/0", [5, 6], [(LIVE, 1)])]), [[1.0]], live=LIVE)
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(bool(each.isfinite().all()) for each in trainer.model.parameters())


def test_a_reward_is_given_at_the_last_token_that_was_sampled(ppo: ModuleType) -> None:
    mask_BS = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0]]).bool()
    expected = [[0, 0, 1.5, 0, 0], [0, 0, 0, 2.5, 0], [0, 0, 0, 0, 3.5], [4.5, 0, 0, 0, 0]]
    assert ppo.at_last_token([1.5, 2.5, 3.5, 4.5], mask_BS).tolist() == expected


def test_a_trainer_goes_on_from_its_state(ppo: ModuleType, model: Path, tmp_path: Path) -> None:
    """Through a file; the value head and the optimiser's moments included."""
    settings = ppo.PPOSettings.model_validate(fields(model))
    one, other = ppo.PPOTrainer(settings), ppo.PPOTrainer(settings)
    batch, rewards = Batch.of(random_trajectories(0, [4])), [[1.0, 0.0, 0.0, 0.5]]
    one.update(batch, rewards, live=LIVE)
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True, mmap=True))
    assert other.value_head.weight.any()
    assert one.update(batch, rewards, live=LIVE) == other.update(batch, rewards, live=LIVE)
    for mine, theirs in zip(one.weights().items(), other.weights().items(), strict=True):
        assert mine[0] == theirs[0]
        assert torch.equal(mine[1], theirs[1])
    assert torch.equal(one.value_head.weight, other.value_head.weight)


def off_policy(trainer: Any) -> list[Trajectory]:
    """Groups of 4, 3 and 1, sampled with probabilities that are those of the trainer but for some noise."""
    draw = random.Random(2)
    made = []
    for one in random_trajectories(5, [4, 3, 1]):
        near = iter(logprobs_of(trainer.model, one).tolist())
        noisy = [next(near) + draw.gauss(0, 0.5) if mask else 0.0 for mask in one.loss_mask]
        made.append(replace(one, logprobs=tuple(noisy)))
    return made


def watched(trainer: Any) -> tuple[list[list[Tensor]], list[float]]:
    """The gradients and their norms at each step of the optimiser, which becomes plain descent in long steps."""
    groups = [{"params": group["params"], "lr": group["lr"]} for group in trainer.optimizer.param_groups]
    trainer.optimizer = torch.optim.SGD(groups)
    gradients: list[list[Tensor]] = []
    norms: list[float] = []
    step = trainer.step

    def watch() -> float:
        parameters = [each for group in trainer.optimizer.param_groups for each in group["params"]]
        gradients.append([each.grad.clone() for each in parameters])
        norms.append(step())
        return norms[-1]

    trainer.step = watch
    return gradients, norms


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def disturb(model: Any) -> None:
    """A little away from what is on disk."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


def sampled(one: Trajectory) -> list[tuple[int, float]]:
    """Version and log-probability of each sampled token."""
    versions = [run.version for run in one.versions for _ in range(run.tokens)]
    return [pair for pair in zip(versions, one.logprobs, strict=True) if pair[0] is not None]


def logprobs_of(model: Any, one: Trajectory) -> Tensor:
    """Of each sampled token, by a forward pass over this trajectory alone."""
    ids = torch.tensor([[*one.prompt_ids, *one.output_ids]])
    all_SV = torch.log_softmax(model(input_ids=ids).logits[0] / TEMPERATURE, dim=-1)
    return torch.stack([all_SV[at - 1, ids[0, at]] for at in places(one)])


def values_of(model: Any, head: Any, one: Trajectory) -> Tensor:
    """Expected before each sampled token."""
    ids = torch.tensor([[*one.prompt_ids, *one.output_ids]])
    hidden_SH = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
    return head(torch.stack([hidden_SH[at - 1] for at in places(one)])).squeeze(-1)


def places(one: Trajectory) -> list[int]:
    return [len(one.prompt_ids) + at for at, mask in enumerate(one.loss_mask) if mask]


def advantages_of(reward: float, values: Sequence[float]) -> list[float]:
    """Each as the discounted sum of all later errors of one step."""
    following = [*values[1:], 0.0]
    rewards = [*[0.0] * (len(values) - 1), reward]
    errors = [r + GAMMA * after - value for r, after, value in zip(rewards, following, values, strict=True)]
    return [sum((GAMMA * LAM) ** k * error for k, error in enumerate(errors[at:])) for at in range(len(errors))]


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Each within a share of the largest entry of its own."""
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-4 * float(theirs.abs().max()) + 1e-7, rtol=1e-3)
