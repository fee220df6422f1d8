"""The table of legal moves says what its module promises."""

import itertools

import pytest

from rollout.control.lifecycle import MOVES, ON_WORKER, OVER, move
from rollout.types import Phase

LIFE = [
    Phase.QUEUED,
    Phase.PREFILLING,
    Phase.DECODING,
    Phase.PREEMPTED,
    Phase.DECODING,
    Phase.SUSPENDING,
    Phase.SUSPENDED,
    Phase.SUSPENDING,
    Phase.SUSPENDED,
    Phase.QUEUED,
    Phase.RESTORING,
    Phase.DECODING,
    Phase.FINISHED,
]


def test_a_long_life_is_legal() -> None:
    phase = LIFE[0]
    for target in LIFE[1:]:
        phase = move(phase, target)
    assert phase is Phase.FINISHED


def test_every_phase_is_in_the_table_and_can_be_reached() -> None:
    assert set(MOVES) == set(Phase)
    assert set().union(*MOVES.values()) == set(Phase)


@pytest.mark.parametrize("phase", sorted(ON_WORKER))
@pytest.mark.parametrize("target", [Phase.SUSPENDING, Phase.QUEUED, Phase.FINISHED, Phase.FAILED])
def test_a_trajectory_can_leave_its_worker_from_every_phase(phase: Phase, target: Phase) -> None:
    assert move(phase, target) is target


@pytest.mark.parametrize("phase", sorted(set(Phase) - OVER))
def test_whatever_is_not_over_may_end_or_fail_and_never_stays(phase: Phase) -> None:
    assert move(phase, Phase.FINISHED) is Phase.FINISHED
    assert move(phase, Phase.FAILED) is Phase.FAILED
    assert phase not in MOVES[phase]


ILLEGAL = [
    *itertools.product(OVER, Phase),
    *itertools.product(set(Phase) - {Phase.QUEUED, Phase.PAUSED}, {Phase.RESTORING}),
    *itertools.product({Phase.QUEUED, Phase.SUSPENDED, Phase.SUSPENDING}, {Phase.DECODING, Phase.PREEMPTED}),
    *itertools.product(ON_WORKER, {Phase.SUSPENDED}),
    (Phase.QUEUED, Phase.SUSPENDING),
    (Phase.DECODING, Phase.PREFILLING),
]


@pytest.mark.parametrize(("source", "target"), sorted(ILLEGAL))
def test_an_illegal_move_asserts_naming_both(source: Phase, target: Phase) -> None:
    with pytest.raises(AssertionError, match=f"illegal move {source} → {target}"):
        move(source, target)
