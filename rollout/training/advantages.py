"""Advantages: of a trajectory against its group (GRPO), and of each token against a critic (GAE).

Shape letters: G groups, n members of a group, B sequences, T tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout.errors import InvalidArgumentError
from rollout.training.corrections import require_alike

STD_FLOOR = 1e-6
"""Added to a group's standard deviation."""


def group_advantages(rewards_Gn: Tensor | Sequence[Sequence[float]], *, normalise: bool = True) -> Tensor:
    """Reward less the group's mean, over the group's standard deviation if `normalise`; fp32 [G, n], detached.

    GRPO (Shao et al. 2024, section 4.1.2) with the sample standard deviation (n - 1); without `normalise` it is that of
    Dr. GRPO (Liu et al. 2025, section 3.2). A group of equal rewards, or of one, has advantages of exactly 0. Groups of
    unequal size are given one by one.

    Raises InvalidArgumentError: rewards that are not [G, n] with n >= 1, or not finite.
    """
    if not isinstance(rewards_Gn, Tensor):
        sizes = sorted({len(group) for group in rewards_Gn})
        if len(sizes) > 1:
            raise InvalidArgumentError(f"rewards: got groups of {sizes} members, allowed: groups of one size")
        rewards_Gn = torch.tensor([list(group) for group in rewards_Gn], dtype=torch.float64)
    if rewards_Gn.dim() != 2 or rewards_Gn.shape[1] == 0:
        raise InvalidArgumentError(f"rewards: got shape {list(rewards_Gn.shape)}, allowed: [G, n] with n >= 1")
    rewards_Gn = rewards_Gn.detach().double()
    if not bool(rewards_Gn.isfinite().all()):
        raise InvalidArgumentError(f"rewards: got {rewards_Gn[~rewards_Gn.isfinite()].tolist()}, allowed: finite ones")
    centred_Gn = rewards_Gn - rewards_Gn.mean(dim=1, keepdim=True)
    if normalise and rewards_Gn.shape[0] > 0 and rewards_Gn.shape[1] > 1:
        centred_Gn = centred_Gn / (rewards_Gn.std(dim=1, keepdim=True) + STD_FLOOR)
    equal_G1 = (rewards_Gn == rewards_Gn[:, :1]).all(dim=1, keepdim=True)
    return centred_Gn.masked_fill(equal_G1, 0.0).float()


def generalized_advantages(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (advantages + values), fp32 [B, T], detached; both 0 outside the mask.

    GAE (Schulman et al. 2016, eq. 16): A_t = Σ_k (gamma lam)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k}), where t + 1 is
    the next masked token: what the environment appended is no step of the policy, and its places, which may hold
    anything, are skipped. The value after the last masked token is 0; for a sequence that was cut off, add gamma times
    the value that follows to its last reward.

    Raises InvalidArgumentError: shapes that differ or are not [B, T], tensors that are not floating, gamma or lam
    outside 0 … 1.
    """
    require_alike(mask_BT, rewards=rewards_BT, values=values_BT)
    for name, share in (("gamma", gamma), ("lam", lam)):
        if not 0 <= share <= 1:
            raise InvalidArgumentError(f"{name}: got {share!r}, allowed: 0 … 1")
    mask_BT = mask_BT.bool()
    values_BT = values_BT.detach().float().masked_fill(~mask_BT, 0.0)
    rewards_BT = rewards_BT.detach().float().masked_fill(~mask_BT, 0.0)
    advantages_BT = torch.zeros_like(values_BT)
    following_B = values_BT.new_zeros(values_BT.shape[0])
    advantage_B = following_B
    for t in reversed(range(values_BT.shape[1])):
        delta_B = rewards_BT[:, t] + gamma * following_B - values_BT[:, t]
        advantage_B = torch.where(mask_BT[:, t], delta_B + gamma * lam * advantage_B, advantage_B)
        following_B = torch.where(mask_BT[:, t], values_BT[:, t], following_B)
        advantages_BT[:, t] = advantage_B
    advantages_BT = advantages_BT.masked_fill(~mask_BT, 0.0)
    return advantages_BT, advantages_BT + values_BT
