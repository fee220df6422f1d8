"""Importance weights, staleness and the clipped objective, against closed forms and plain loops.

Shape letters: B sequences, T tokens, S outcomes.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.errors import InvalidArgumentError
from rollout.training.corrections import (
    MAX_LOG_RATIO,
    Level,
    clipped_objective,
    decoupled,
    importance_weights,
    mismatch,
    stale_mask,
)

NAN, INF = float("nan"), float("inf")
LOGPROB = st.floats(-12.0, 0.0, width=32)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Two policies and a mask, [B, T]; garbage outside the mask."""
    B, T = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    garbage = st.sampled_from([NAN, INF, -INF, 0.0, -3.0])
    mask = [[draw(st.booleans()) for _ in range(T)] for _ in range(B)]
    target, behaviour = ([[draw(LOGPROB if m else garbage) for m in row] for row in mask] for _ in range(2))
    return torch.tensor(target), torch.tensor(behaviour), torch.tensor(mask)


def by_hand(
    target_BT: Tensor,
    behaviour_BT: Tensor,
    mask_BT: Tensor,
    level: Level,
    cap: float | None,
) -> Tensor:
    out_BT = torch.zeros(target_BT.shape, dtype=torch.float64)
    for b in range(target_BT.shape[0]):
        places = [t for t in range(target_BT.shape[1]) if mask_BT[b, t]]
        logs = [float(target_BT[b, t]) - float(behaviour_BT[b, t]) for t in places]
        if level is Level.SEQUENCE:
            logs = [sum(logs)] * len(places)
        elif level is Level.GEOMETRIC:
            logs = [sum(logs) / max(len(places), 1)] * len(places)
        for t, log in zip(places, logs, strict=True):
            ratio = math.exp(min(log, MAX_LOG_RATIO))
            out_BT[b, t] = ratio if cap is None else min(ratio, cap)
    return out_BT


@settings(deadline=None)
@given(batch=batches(), level=st.sampled_from(Level), cap=st.none() | st.floats(0.1, 10.0))
def test_weights_are_those_of_a_plain_loop(
    batch: tuple[Tensor, Tensor, Tensor], level: Level, cap: float | None
) -> None:
    weights_BT = importance_weights(*batch, level=level, cap=cap)
    torch.testing.assert_close(weights_BT.double(), by_hand(*batch, level, cap), rtol=2e-5, atol=1e-30)


def test_cap_truncates_and_band_masks() -> None:
    ratios_BT = torch.tensor([[0.25, 0.5, 1.0, 2.0, 4.0]])
    target_BT, behaviour_BT, mask_BT = ratios_BT.log(), torch.zeros(1, 5), torch.ones(1, 5)

    def weights(**how: Any) -> list[float]:
        return [round(w, 5) for w in importance_weights(target_BT, behaviour_BT, mask_BT, **how)[0].tolist()]

    assert weights(cap=2.0) == [0.25, 0.5, 1.0, 2.0, 2.0]
    assert weights(band=(0.4, 3.0)) == [0.0, 0.5, 1.0, 2.0, 0.0]
    assert weights(band=(0.4, 3.0), cap=1.5) == [0.0, 0.5, 1.0, 1.5, 0.0], "the band judges what the cap would hide"
    assert weights(band=(1.0, 1.0)) == [0.0, 0.0, 1.0, 0.0, 0.0], "the bounds are inside"


@pytest.mark.parametrize(("level", "ratio"), [(Level.SEQUENCE, 6.0), (Level.GEOMETRIC, math.sqrt(6.0))])
def test_ratio_of_a_sequence_is_of_its_masked_tokens(level: Level, ratio: float) -> None:
    target_BT = torch.tensor([[math.log(2.0), 5.0, math.log(3.0), NAN], [0.0, 0.0, 0.0, 0.0]])
    mask_BT = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]])
    weights_BT = importance_weights(target_BT, torch.zeros(2, 4), mask_BT, level=level)
    torch.testing.assert_close(weights_BT, torch.tensor([[ratio, 0.0, ratio, 0.0], [0.0] * 4]))
    assert not importance_weights(target_BT, torch.zeros(2, 4), mask_BT, level=level, band=(0.0, ratio - 0.1)).any()


@pytest.mark.parametrize("level", list(Level))
def test_weights_neither_overflow_nor_carry_a_gradient(level: Level) -> None:
    target_BT = torch.tensor([[0.0, 0.0]], requires_grad=True)
    weights_BT = importance_weights(target_BT, torch.tensor([[-1e4, -1e4]]), torch.ones(1, 2), level=level)
    torch.testing.assert_close(weights_BT, torch.full((1, 2), math.exp(MAX_LOG_RATIO)))
    assert not weights_BT.requires_grad
    impossible_BT = importance_weights(torch.tensor([[-INF]]), torch.zeros(1, 1), torch.ones(1, 1), level=level)
    assert impossible_BT.item() == 0.0


def test_nan_of_a_sampled_token_is_not_hidden_by_a_band() -> None:
    weights_BT = importance_weights(
        torch.tensor([[NAN]]), torch.zeros(1, 1), torch.ones(1, 1), band=(0.5, 2.0), cap=2.0
    )
    assert weights_BT.isnan().all()


def test_half_precision_is_worked_on_in_fp32() -> None:
    target_BT = torch.full((1, 1), -9.0, dtype=torch.bfloat16)
    weights_BT = importance_weights(target_BT, torch.full((1, 1), -9.03), torch.ones(1, 1))
    assert weights_BT.item() == pytest.approx(math.exp(0.03), rel=1e-5)


def test_weights_are_unbiased() -> None:
    """E_behaviour[w f] = E_target[f], summed over all sequences of two tokens from three outcomes."""
    generator = torch.Generator().manual_seed(7)
    behaviour_SS, target_SS = (torch.randn(3, 3, generator=generator).log_softmax(-1) for _ in range(2))
    first_behaviour_S, first_target_S = (torch.randn(3, generator=generator).log_softmax(-1) for _ in range(2))
    pairs = [(a, b) for a in range(3) for b in range(3)]
    behaviour_BT = torch.stack([torch.stack([first_behaviour_S[a], behaviour_SS[a, b]]) for a, b in pairs])
    target_BT = torch.stack([torch.stack([first_target_S[a], target_SS[a, b]]) for a, b in pairs])
    f_B = torch.randn(9, generator=generator)

    weights_B = importance_weights(target_BT, behaviour_BT, torch.ones(9, 2), level=Level.SEQUENCE)[:, 0]
    torch.testing.assert_close(
        (behaviour_BT.sum(1).exp() * weights_B * f_B).sum(), (target_BT.sum(1).exp() * f_B).sum(), rtol=1e-5, atol=1e-6
    )
    capped_B = importance_weights(target_BT, behaviour_BT, torch.ones(9, 2), level=Level.SEQUENCE, cap=0.9)[:, 0]
    assert (behaviour_BT.sum(1).exp() * capped_B).sum() < 1.0, "a cap is a bias, downwards"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_BT": torch.zeros(2, 4)}, r"target: got shape \[2, 4\], allowed: that of the mask, \[2, 3\]"),
        ({"behaviour_BT": torch.zeros(2, 3, dtype=torch.int64)}, "behaviour: got torch.int64, allowed: a floating"),
        ({"mask_BT": torch.ones(6)}, r"mask: got shape \[6\], allowed: \[B, T\]"),
        ({"cap": 0.0}, "cap: got 0.0, allowed: > 0"),
        ({"cap": NAN}, "cap: got nan"),
        ({"band": (2.0, 0.5)}, r"band: got \(2.0, 0.5\), allowed: \(low, high\) with 0 <= low <= high"),
        ({"band": (-1.0, 0.5)}, "band: got"),
    ],
)
def test_wrong_arguments_of_weights_are_refused(change: dict[str, Any], message: str) -> None:
    right = {"target_BT": torch.zeros(2, 3), "behaviour_BT": torch.zeros(2, 3), "mask_BT": torch.ones(2, 3)}
    with pytest.raises(InvalidArgumentError, match=message):
        importance_weights(**(right | change))


VERSIONS_BT = torch.tensor([[5, 4, -1, 3], [5, 5, -1, 6], [2, -1, -1, -1], [-1, -1, -1, -1]])


@pytest.mark.parametrize(
    ("max_lag", "whole", "rows"),
    [
        (0, False, ["1000", "1101", "0000", "0000"]),
        (1, False, ["1100", "1101", "0000", "0000"]),
        (2, False, ["1101", "1101", "0000", "0000"]),
        (3, False, ["1101", "1101", "1000", "0000"]),
        (1, True, ["0000", "1101", "0000", "0000"]),
        (2, True, ["1101", "1101", "0000", "0000"]),
    ],
)
def test_stale_tokens_are_masked(max_lag: int, whole: bool, rows: list[str]) -> None:
    mask_BT = stale_mask(VERSIONS_BT, live=5, max_lag=max_lag, whole_sequences=whole)
    assert mask_BT.dtype == torch.bool
    assert mask_BT.tolist() == [[c == "1" for c in row] for row in rows]


def test_what_was_not_sampled_is_never_trained_on_however_young_the_service() -> None:
    assert stale_mask(torch.tensor([[-1, 0]]), live=0, max_lag=10).tolist() == [[False, True]]


def test_wrong_arguments_of_stale_mask_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="max_lag: got -1, allowed: >= 0"):
        stale_mask(VERSIONS_BT, live=5, max_lag=-1)
    with pytest.raises(InvalidArgumentError, match=r"versions: got torch.float32 \[4, 4\], allowed: whole numbers"):
        stale_mask(VERSIONS_BT.float(), live=5, max_lag=1)


def test_decoupled_ratios_and_who_gets_a_gradient() -> None:
    current_BT, proximal_BT, behaviour_BT = (
        torch.tensor([[-1.0, -2.0, NAN]], requires_grad=True),
        torch.tensor([[-1.2, -1.5, INF]], requires_grad=True),
        torch.tensor([[-1.0, -3.0, -INF]], requires_grad=True),
    )
    mask_BT = torch.tensor([[True, True, False]])
    inputs = decoupled(current_BT, proximal_BT, behaviour_BT, mask_BT, cap=2.0)
    torch.testing.assert_close(inputs.ratio_BT, torch.tensor([[math.exp(0.2), math.exp(-0.5), 1.0]]))
    torch.testing.assert_close(inputs.weights_BT, torch.tensor([[math.exp(-0.2), 2.0, 0.0]]))
    assert not inputs.weights_BT.requires_grad

    advantages_BT = torch.tensor([[1.5, -2.0, NAN]])
    objective_BT = clipped_objective(inputs.ratio_BT, advantages_BT, mask_BT, clip_low=0.5, clip_high=0.5)
    (objective_BT * inputs.weights_BT).sum().backward()
    assert current_BT.grad is not None
    expected_BT = torch.tensor([[math.exp(-0.2) * 1.5 * math.exp(0.2), 2.0 * -2.0 * math.exp(-0.5), 0.0]])
    torch.testing.assert_close(current_BT.grad, expected_BT)  # d exp(c - p) = exp(c - p) dc
    assert proximal_BT.grad is None
    assert behaviour_BT.grad is None


def test_decoupled_is_ppo_if_nothing_came_between() -> None:
    current_BT, behaviour_BT = torch.tensor([[-1.0, -0.5]]), torch.tensor([[-1.1, -0.9]])
    inputs = decoupled(current_BT, behaviour_BT, behaviour_BT, torch.ones(1, 2))
    assert inputs.weights_BT.tolist() == [[1.0, 1.0]]
    torch.testing.assert_close(inputs.ratio_BT, (current_BT - behaviour_BT).exp())


def test_a_ratio_that_would_overflow_has_no_gradient() -> None:
    current_BT = torch.zeros(1, 1, requires_grad=True)
    ratio_BT = decoupled(current_BT, torch.full((1, 1), -200.0), torch.full((1, 1), -200.0), torch.ones(1, 1)).ratio_BT
    assert ratio_BT.item() == pytest.approx(math.exp(MAX_LOG_RATIO))
    ratio_BT.sum().backward()
    assert current_BT.grad is not None
    assert current_BT.grad.item() == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.1, 2.0, 2.2, 2.0),
        (1.5, 2.0, 2.6, 0.0),  # clipped above at 1.3
        (0.5, 2.0, 1.0, 2.0),  # a good token that became less likely may come back
        (0.5, -2.0, -1.6, 0.0),  # clipped below at 0.8
        (1.5, -2.0, -3.0, -2.0),  # a bad token that became more likely is pushed down, however far
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_objective_and_its_gradient(ratio: float, advantage: float, objective: float, slope: float) -> None:
    ratio_BT = torch.tensor([[ratio]], requires_grad=True)
    out_BT = clipped_objective(ratio_BT, torch.tensor([[advantage]]), torch.ones(1, 1), clip_low=0.2, clip_high=0.3)
    out_BT.sum().backward()
    assert ratio_BT.grad is not None
    assert out_BT.item() == pytest.approx(objective)
    assert ratio_BT.grad.item() == pytest.approx(slope)


@settings(deadline=None)
@given(batch=batches())
def test_garbage_outside_the_mask_changes_neither_results_nor_gradients(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    *dirty, mask_BT = batch
    clean = [tensor_BT.masked_fill(~mask_BT, 0.0) for tensor_BT in dirty]

    def outcome(current_BT: Tensor, other_BT: Tensor) -> tuple[Tensor, ...]:
        current_BT = current_BT.clone().requires_grad_()
        inputs = decoupled(current_BT, other_BT, other_BT, mask_BT, level=Level.GEOMETRIC)
        objective_BT = clipped_objective(inputs.ratio_BT, other_BT, mask_BT)
        (objective_BT * inputs.weights_BT).sum().backward()
        assert current_BT.grad is not None
        return inputs.ratio_BT, inputs.weights_BT, objective_BT, current_BT.grad

    for got_BT, expected_BT in zip(outcome(*dirty), outcome(*clean), strict=True):
        assert torch.equal(got_BT, expected_BT)
        assert got_BT.isfinite().all()
    assert mismatch(*dirty, mask_BT) == mismatch(*clean, mask_BT)


@pytest.mark.parametrize("how", [{"clip_low": -0.1}, {"clip_low": 1.1}, {"clip_high": -0.1}, {"clip_high": NAN}])
def test_wrong_clips_are_refused(how: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"clip_(low|high): got .*, allowed: "):
        clipped_objective(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), **how)


def test_mismatch_in_closed_form() -> None:
    target_BT = torch.tensor([[math.log(0.5), math.log(0.1), NAN]])
    behaviour_BT = torch.tensor([[math.log(0.25), math.log(0.2), NAN]])
    met = mismatch(target_BT, behaviour_BT, torch.tensor([[1, 1, 0]]))
    assert met.tokens == 2
    assert met.ratio_mean == pytest.approx((2.0 + 0.5) / 2)
    assert met.abs_log_ratio_mean == pytest.approx(math.log(2.0))
    assert met.max_abs_log_ratio == pytest.approx(math.log(2.0))
    assert met.kl == pytest.approx(((2.0 - 1 - math.log(2.0)) + (0.5 - 1 + math.log(2.0))) / 2)
    assert met.ess == pytest.approx(2.5**2 / (2 * (4.0 + 0.25)))


def test_expected_mismatch_is_the_divergence_of_the_distributions() -> None:
    behaviour_S, target_S = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    drawn = torch.tensor([0, 0, 1, 2])  # each outcome as often as behaviour draws it
    met = mismatch(target_S.log()[drawn][None], behaviour_S.log()[drawn][None], torch.ones(1, 4))
    assert met.kl == pytest.approx(float((behaviour_S * (behaviour_S / target_S).log()).sum()))
    assert met.ratio_mean == pytest.approx(1.0)


def test_mismatch_of_equal_policies_of_no_tokens_and_of_no_overlap() -> None:
    logprobs_BT = torch.tensor([[-1.0, -2.0]])
    for met, tokens in (
        (mismatch(logprobs_BT, logprobs_BT, torch.ones(1, 2)), 2),
        (mismatch(logprobs_BT, -logprobs_BT, torch.zeros(1, 2)), 0),
    ):
        assert met.tokens == tokens
        assert (met.ratio_mean, met.abs_log_ratio_mean, met.max_abs_log_ratio, met.kl, met.ess) == (1, 0, 0, 0, 1)
    apart = mismatch(torch.full((1, 2), -INF), logprobs_BT, torch.ones(1, 2))
    assert (apart.ratio_mean, apart.max_abs_log_ratio, apart.kl, apart.ess) == (0.0, INF, INF, 0.0)
