"""Advantages against closed forms and sums over all later tokens.

Shape letters: G groups, n members, B sequences, T tokens.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.errors import InvalidArgumentError
from rollout.training.advantages import STD_FLOOR, generalized_advantages, group_advantages

NAN, INF = float("nan"), float("inf")
REWARD = st.floats(-100.0, 100.0, width=32)


def test_advantages_of_a_group_in_closed_form() -> None:
    rewards = [[1.0, 0.0, 0.0, 1.0], [4.0, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(
        group_advantages(rewards, normalise=False), torch.tensor([[0.5, -0.5, -0.5, 0.5], [3.0, -1.0, -1.0, -1.0]])
    )
    std = math.sqrt(4 * 0.25 / 3)
    expected_Gn = torch.tensor([[0.5, -0.5, -0.5, 0.5]]) / (std + STD_FLOOR)
    torch.testing.assert_close(group_advantages(rewards)[:1], expected_Gn)
    torch.testing.assert_close(group_advantages(torch.tensor(rewards))[1], torch.tensor([1.5, -0.5, -0.5, -0.5]))


def test_equal_rewards_and_groups_of_one_say_nothing() -> None:
    assert not group_advantages([[0.1] * 7, [0.7] * 7]).any(), "exactly 0, whatever the mean is rounded to"
    assert not group_advantages([[3.0], [5.0]]).any()
    assert not group_advantages([[3.0], [5.0]], normalise=False).any()
    assert group_advantages(torch.zeros(0, 4)).shape == (0, 4)


@settings(deadline=None)
@given(st.lists(REWARD, min_size=2, max_size=8), st.floats(0.5, 4.0), st.floats(-50.0, 50.0))
def test_normalised_advantages_ignore_shift_and_scale(rewards: list[float], scale: float, shift: float) -> None:
    if max(rewards) - min(rewards) < 1.0:
        return
    advantages_Gn = group_advantages([rewards])
    moved_Gn = group_advantages([[scale * reward + shift for reward in rewards]])
    torch.testing.assert_close(moved_Gn, advantages_Gn, rtol=1e-3, atol=1e-3)
    assert advantages_Gn.sum().item() == pytest.approx(0.0, abs=1e-4)
    assert advantages_Gn.dtype == torch.float32


def test_wrong_rewards_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"rewards: got groups of \[1, 2\] members, allowed: groups of one"):
        group_advantages([[1.0], [1.0, 2.0]])
    with pytest.raises(InvalidArgumentError, match=r"rewards: got shape \[3\], allowed: \[G, n\]"):
        group_advantages(torch.zeros(3))
    with pytest.raises(InvalidArgumentError, match=r"rewards: got \[nan\], allowed: finite"):
        group_advantages([[1.0, NAN]])


def by_sums(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Of one sequence without gaps: for each token the sum over all later ones."""
    following = [*values, 0.0][1:]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and mask, [B, T]; garbage outside the mask."""
    B, T = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    garbage = st.sampled_from([NAN, INF, -INF, 7.0])
    mask = [[draw(st.booleans()) for _ in range(T)] for _ in range(B)]
    rewards, values = ([[draw(st.floats(-3, 3) if m else garbage) for m in row] for row in mask] for _ in range(2))
    return torch.tensor(rewards), torch.tensor(values), torch.tensor(mask)


@settings(deadline=None)
@given(batch=sequences(), gamma=st.floats(0.0, 1.0), lam=st.floats(0.0, 1.0))
def test_advantages_are_the_sums_over_later_masked_tokens(
    batch: tuple[Tensor, Tensor, Tensor], gamma: float, lam: float
) -> None:
    rewards_BT, values_BT, mask_BT = batch
    advantages_BT, returns_BT = generalized_advantages(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam)
    for b in range(mask_BT.shape[0]):
        row = mask_BT[b]
        expected = torch.tensor(by_sums(rewards_BT[b, row].tolist(), values_BT[b, row].tolist(), gamma, lam))
        torch.testing.assert_close(advantages_BT[b, row], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(returns_BT[b, row], expected + values_BT[b, row], rtol=1e-4, atol=1e-4)
    assert not advantages_BT[~mask_BT].any()
    assert not returns_BT[~mask_BT].any()


def test_limits_of_lambda() -> None:
    rewards_BT, values_BT = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.3, 0.5, 0.8]])
    mask_BT = torch.ones(1, 3)
    temporal_BT, _ = generalized_advantages(rewards_BT, values_BT, mask_BT, gamma=0.9, lam=0.0)
    torch.testing.assert_close(temporal_BT, torch.tensor([[0.9 * 0.5 - 0.3, 0.9 * 0.8 - 0.5, 1.0 - 0.8]]))
    monte_carlo_BT, returns_BT = generalized_advantages(rewards_BT, values_BT, mask_BT, gamma=0.9, lam=1.0)
    torch.testing.assert_close(returns_BT, torch.tensor([[0.81, 0.9, 1.0]]))
    torch.testing.assert_close(monte_carlo_BT, returns_BT - values_BT)


def test_appended_tokens_are_no_steps() -> None:
    rewards_BT, values_BT = torch.tensor([[0.5, NAN, INF, 1.0]]), torch.tensor([[0.2, NAN, -INF, 0.4]])
    gapped = generalized_advantages(rewards_BT, values_BT, torch.tensor([[1, 0, 0, 1]]), gamma=0.9, lam=0.8)
    dense = generalized_advantages(rewards_BT[:, ::3], values_BT[:, ::3], torch.ones(1, 2), gamma=0.9, lam=0.8)
    for gapped_BT, dense_BT in zip(gapped, dense, strict=True):
        assert torch.equal(gapped_BT[:, ::3], dense_BT)


def test_a_cut_off_sequence_goes_on_from_the_value_in_its_last_reward() -> None:
    rewards_BT, values_BT, mask_BT = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0.1, 0.2, 0.3]]), torch.ones(1, 3)
    whole_BT, _ = generalized_advantages(rewards_BT, values_BT, mask_BT, gamma=0.9, lam=0.0)
    cut_BT, _ = generalized_advantages(
        torch.tensor([[0.0, 1.0 + 0.9 * 0.3]]), values_BT[:, :2], mask_BT[:, :2], gamma=0.9, lam=0.0
    )
    torch.testing.assert_close(cut_BT, whole_BT[:, :2])


def test_advantages_are_detached() -> None:
    values_BT = torch.zeros(1, 2, requires_grad=True)
    advantages_BT, returns_BT = generalized_advantages(
        torch.ones(1, 2), values_BT, torch.ones(1, 2), gamma=1.0, lam=1.0
    )
    assert not advantages_BT.requires_grad
    assert not returns_BT.requires_grad


def test_wrong_arguments_are_refused() -> None:
    ones_BT = torch.ones(1, 2)
    with pytest.raises(InvalidArgumentError, match=r"gamma: got 1.5, allowed: 0 … 1"):
        generalized_advantages(ones_BT, ones_BT, ones_BT, gamma=1.5, lam=1.0)
    with pytest.raises(InvalidArgumentError, match=r"lam: got nan, allowed: 0 … 1"):
        generalized_advantages(ones_BT, ones_BT, ones_BT, gamma=1.0, lam=NAN)
    with pytest.raises(InvalidArgumentError, match=r"values: got shape \[2, 1\], allowed: that of the mask, \[1, 2\]"):
        generalized_advantages(ones_BT, torch.ones(2, 1), ones_BT, gamma=1.0, lam=1.0)
