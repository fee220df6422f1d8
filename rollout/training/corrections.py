"""Off-policy corrections: what the gap between the policy that sampled and the one that is trained does to a loss.

Three policies may meet in a loss. *Behaviour* sampled the tokens (what results carry), *proximal* is where this
update starts, *current* is what the optimiser moves. Log-probabilities are of the sampled tokens and natural; they
are worked on in fp32. The mask is true, or not 0, for sampled tokens; all other places may hold anything, NaN and
infinities too, and reach neither a result nor a gradient. A NaN under the mask does reach the result.

Where log-probabilities differ by more than `MAX_LOG_RATIO` their ratio is that of this difference, so that nothing
overflows; a target of probability 0 has ratio 0.

Shape letters: B sequences, T tokens, N masked tokens of all sequences.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

import torch
from torch import Tensor

from rollout.errors import InvalidArgumentError

MAX_LOG_RATIO = 20.0
"""Ratios end at e^20, about 4.9e8, of which sums and squares do not overflow in fp32 either."""


class Level(StrEnum):
    """Over what a ratio is taken."""

    TOKEN = "token"
    """Each token has its own."""
    SEQUENCE = "sequence"
    """The product over the masked tokens of the sequence: unbiased, and of large variance."""
    GEOMETRIC = "geometric"
    """Its length-normalised form, the geometric mean (GSPO, Zheng et al. 2025, eq. 7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoupled:
    """The two ratios of the decoupled objective: E[weights · clipped_objective(ratio, advantages)]."""

    ratio_BT: Tensor
    """current / proximal of each token, with the gradient of current; 1 outside the mask."""
    weights_BT: Tensor
    """proximal / behaviour, detached; 0 outside the mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How far a target policy is from the one that sampled, over masked tokens. Of no tokens: as if they agreed."""

    tokens: int
    ratio_mean: float
    """Of target / behaviour; 1 is expected whatever the target, if its support is within behaviour's."""
    abs_log_ratio_mean: float
    max_abs_log_ratio: float
    """Infinite where the target gives a sampled token no probability."""
    kl: float
    """KL(behaviour ‖ target) in nats a token: the mean of r - 1 - log r, never negative (k3 of Schulman, *Approximating
    KL divergence*, 2020)."""
    ess: float
    """Effective sample size as a share of the tokens: (Σr)² / (N Σr²), in (0, 1] (Kong 1992); 0 if no r is above 0."""


def importance_weights(
    target_BT: Tensor,
    behaviour_BT: Tensor,
    mask_BT: Tensor,
    *,
    level: Level = Level.TOKEN,
    cap: float | None = None,
    band: tuple[float, float] | None = None,
) -> Tensor:
    """target / behaviour at `level`, fp32 [B, T], detached; 0 outside the mask.

    `cap` truncates: min(ratio, cap) (truncated importance sampling, TIS: Ionides 2008; Yao et al. 2025 for rollouts).
    `band` = (low, high) masks: 0 where the ratio is outside, bounds included in it (IcePop, Ling Team 2025, with
    tokens; masked importance sampling with sequences). With both, the band judges the ratio before it is truncated.
    A mask at one level and weights at another multiply: `importance_weights(..., level=GEOMETRIC, band=b) > 0`.

    Raises InvalidArgumentError: shapes that differ or are not [B, T], log-probabilities that are not floating, a cap
    that is not > 0, a band that is not 0 <= low <= high.
    """
    require_alike(mask_BT, target=target_BT, behaviour=behaviour_BT)
    if cap is not None and not cap > 0:
        raise InvalidArgumentError(f"cap: got {cap!r}, allowed: > 0, or None")
    if band is not None and not 0 <= band[0] <= band[1]:
        raise InvalidArgumentError(f"band: got {band!r}, allowed: (low, high) with 0 <= low <= high, or None")
    mask_BT = mask_BT.bool()
    with torch.no_grad():
        log_ratio_BT = _at_level(_log_ratio(target_BT, behaviour_BT, mask_BT), mask_BT, level)
        weights_BT = log_ratio_BT.clamp(max=MAX_LOG_RATIO).exp()
        outside_BT = ~mask_BT
        if band is not None:
            outside_BT |= (weights_BT < band[0]) | (weights_BT > band[1])
        if cap is not None:
            weights_BT = weights_BT.clamp(max=cap)
        return weights_BT.masked_fill(outside_BT, 0.0)


def stale_mask(versions_BT: Tensor, *, live: int, max_lag: int, whole_sequences: bool = False) -> Tensor:
    """True, [B, T], for tokens that may be trained on: sampled, and by a version at most `max_lag` behind `live`.

    `versions_BT` holds -1 for a token that was not sampled, which is never trained on. A version newer than the live
    one, after a rollback, is not stale. With `whole_sequences` one stale token takes its whole sequence with it.

    Raises InvalidArgumentError: versions that are not whole numbers [B, T], a negative `max_lag`.
    """
    if versions_BT.dim() != 2 or versions_BT.is_floating_point() or versions_BT.dtype == torch.bool:
        raise InvalidArgumentError(
            f"versions: got {versions_BT.dtype} {list(versions_BT.shape)}, allowed: whole numbers [B, T]"
        )
    if max_lag < 0:
        raise InvalidArgumentError(f"max_lag: got {max_lag!r}, allowed: >= 0 versions")
    sampled_BT = versions_BT >= 0
    fresh_BT = versions_BT >= live - max_lag
    if whole_sequences:
        fresh_BT = (fresh_BT | ~sampled_BT).all(dim=1, keepdim=True)
    return sampled_BT & fresh_BT


def decoupled(
    current_BT: Tensor,
    proximal_BT: Tensor,
    behaviour_BT: Tensor,
    mask_BT: Tensor,
    *,
    level: Level = Level.TOKEN,
    cap: float | None = None,
    band: tuple[float, float] | None = None,
) -> Decoupled:
    """The inputs of decoupled PPO (Hilton et al. 2022, section 3; AReaL, Fu et al. 2025, eq. 5).

    The update is clipped around proximal, and weights correct for behaviour. `level`, `cap` and `band` are of these
    weights (`importance_weights`); the ratio is of each token. Only current gets a gradient, and none where its ratio
    would exceed e^`MAX_LOG_RATIO`. If proximal is behaviour this is plain PPO. Raises like `importance_weights`.
    """
    require_alike(mask_BT, current=current_BT, proximal=proximal_BT, behaviour=behaviour_BT)
    weights_BT = importance_weights(proximal_BT, behaviour_BT, mask_BT, level=level, cap=cap, band=band)
    log_ratio_BT = _log_ratio(current_BT, proximal_BT.detach(), mask_BT.bool())
    return Decoupled(ratio_BT=log_ratio_BT.clamp(max=MAX_LOG_RATIO).exp(), weights_BT=weights_BT)


def clipped_objective(
    ratio_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) of each token, to be maximised, [B, T]; 0 outside the mask.

    PPO (Schulman et al. 2017, eq. 7); bounds that differ are DAPO's (Yu et al. 2025, eq. 10). Gradients go to the
    ratio alone. Weights and the mean over tokens are the caller's.

    Raises InvalidArgumentError: shapes that differ, tensors that are not floating, clip_low outside 0 … 1, clip_high
    negative.
    """
    require_alike(mask_BT, ratio=ratio_BT, advantages=advantages_BT)
    if not 0 <= clip_low <= 1:
        raise InvalidArgumentError(f"clip_low: got {clip_low!r}, allowed: 0 … 1")
    if not clip_high >= 0:
        raise InvalidArgumentError(f"clip_high: got {clip_high!r}, allowed: >= 0")
    outside_BT = ~mask_BT.bool()
    ratio_BT = ratio_BT.masked_fill(outside_BT, 1.0)
    advantages_BT = advantages_BT.detach().masked_fill(outside_BT, 0.0)
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)


def mismatch(target_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor) -> Mismatch:
    """What a driver reports of how on-policy its tokens are. Computed in fp64 on the CPU.

    Raises InvalidArgumentError: shapes that differ or are not [B, T], log-probabilities that are not floating.
    """
    require_alike(mask_BT, target=target_BT, behaviour=behaviour_BT)
    mask_BT = mask_BT.bool()
    log_ratio_N = target_BT.detach()[mask_BT].cpu().double() - behaviour_BT.detach()[mask_BT].cpu().double()
    tokens = log_ratio_N.numel()
    if tokens == 0:
        return Mismatch(tokens=0, ratio_mean=1.0, abs_log_ratio_mean=0.0, max_abs_log_ratio=0.0, kl=0.0, ess=1.0)
    excess_N = torch.expm1(log_ratio_N.clamp(max=MAX_LOG_RATIO))  # r - 1, without cancellation near 1
    ratio_N = excess_N + 1.0
    squares = ratio_N.square().sum().item()
    return Mismatch(
        tokens=tokens,
        ratio_mean=ratio_N.mean().item(),
        abs_log_ratio_mean=log_ratio_N.abs().mean().item(),
        max_abs_log_ratio=log_ratio_N.abs().max().item(),
        kl=(excess_N - log_ratio_N.clamp(max=MAX_LOG_RATIO)).mean().item(),
        ess=ratio_N.sum().item() ** 2 / (tokens * squares) if squares > 0 or math.isnan(squares) else 0.0,
    )


def require_alike(mask_BT: Tensor, **tensors_BT: Tensor) -> None:
    """Raise InvalidArgumentError unless all are [B, T] of one shape and those given by name are floating."""
    if mask_BT.dim() != 2:
        raise InvalidArgumentError(f"mask: got shape {list(mask_BT.shape)}, allowed: [B, T]")
    for name, tensor_BT in tensors_BT.items():
        if tensor_BT.shape != mask_BT.shape:
            raise InvalidArgumentError(
                f"{name}: got shape {list(tensor_BT.shape)}, allowed: that of the mask, {list(mask_BT.shape)}"
            )
        if not tensor_BT.is_floating_point():
            raise InvalidArgumentError(f"{name}: got {tensor_BT.dtype}, allowed: a floating dtype")


def _log_ratio(target_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """fp32; 0 outside the mask. Filled before the subtraction: 0 · NaN in a backward pass would be NaN."""
    outside_BT = ~mask_BT
    return target_BT.float().masked_fill(outside_BT, 0.0) - behaviour_BT.float().masked_fill(outside_BT, 0.0)


def _at_level(log_ratio_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    """[B, T]; `log_ratio_BT` is 0 outside the mask."""
    match level:
        case Level.TOKEN:
            return log_ratio_BT
        case Level.SEQUENCE:
            return log_ratio_BT.sum(dim=1, keepdim=True).expand_as(log_ratio_BT)
        case Level.GEOMETRIC:
            tokens_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
            return (log_ratio_BT.sum(dim=1, keepdim=True) / tokens_B1).expand_as(log_ratio_BT)
        case _:
            assert_never(level)
