"""What each place costs, against sums done by hand, and which one wins in cases made for it."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.control.costs import Case, costs_s
from rollout.control.paces import PrefillTimes
from rollout.types import Keep
from tests.control.stage import facts, pace

EXAMPLE = Case(
    kv_tokens=1000,
    pooled_tokens=400,
    shared_tokens=0,
    likely=0.5,
    same_weights=0.8,
    wait_s=10.0,
    turnover_tokens_s=50.0,
    kept_tokens=200,
    lost_share=0.0,
    worker=facts(
        free=1000,
        prefill_s=0.001,
        save=pace(0.01, 1e-8),
        load=pace(0.02, 2e-8),
        restore=pace(0.05, 5e-8),
    ),
    pool_free_bytes=450_000,
    pool_budget_bytes=10_000_000,
    export=pace(0.1, 1e-7),
    place_share=1.0,
)
"""A worker with room for one, which does nothing else while it moves KV."""


def but(**changes: object) -> Case:
    return dataclasses.replace(EXAMPLE, **changes)  # type: ignore[arg-type]


def but_worker(**changes: object) -> Case:
    return but(worker=dataclasses.replace(EXAMPLE.worker, **changes))  # type: ignore[arg-type]


def best(case: Case) -> Keep:
    costs = costs_s(case)
    return min(costs, key=lambda keep: costs[keep])


def test_the_sums_done_by_hand() -> None:
    """1 MB, 1 s to compute. It is of use with 0.4, in vain with 0.1. Of 800 free tokens that nobody left there 500 are
    taken, and the last 400 are not certain: it survives on the device with 0.75. A quarter of what the pool lacks
    displaces others."""
    device = 0.4 * 0.25 * 1.0 + 0.1
    host = (0.01 + 0.01) + 0.4 * (0.02 + 0.02) + 0.1
    pool = (0.1 + 0.06) + 0.4 * ((0.05 + 0.05) + 0.25 * 1.0) + 0.1
    none = 0.4 * 1.0 + 0.1
    expected = {Keep.DEVICE: device, Keep.HOST: host, Keep.POOL: pool, Keep.NONE: none}
    assert costs_s(EXAMPLE) == pytest.approx(expected)


def test_moves_cost_what_the_worker_loses_by_them_and_waits_cost_one_place_in_the_batch() -> None:
    """It decodes at three quarters of its speed meanwhile, and one of eight places waits."""
    case = dataclasses.replace(but_worker(moving_share=0.25), place_share=0.125)
    device = 0.4 * 0.25 * 1.0 + 0.1
    host = 0.25 * 0.02 + 0.4 * 0.375 * 0.04 + 0.1
    pool = 0.25 * 0.16 + 0.4 * (0.375 * 0.1 + 0.25 * 1.0) + 0.1
    expected = {Keep.DEVICE: device, Keep.HOST: host, Keep.POOL: pool, Keep.NONE: 0.5}
    assert costs_s(case) == pytest.approx(expected)


def test_a_move_costs_no_more_than_all_of_the_worker() -> None:
    slow = dataclasses.replace(but_worker(moving_share=0.9), place_share=0.5)
    assert costs_s(slow)[Keep.HOST] == pytest.approx(0.9 * 0.02 + 0.4 * 1.0 * 0.04 + 0.1)


def test_what_prefix_trees_will_have_need_not_be_computed() -> None:
    assert costs_s(but(shared_tokens=600))[Keep.NONE] == pytest.approx(0.4 * 0.4 + 0.1 * 0.4)


def test_what_the_pool_has_already_costs_no_export() -> None:
    everything = costs_s(but(pooled_tokens=1000))[Keep.POOL]
    assert everything == pytest.approx(0.4 * 0.1 + 0.1), "nothing is sent, and nothing is displaced"


# Each place wins ----------------------------------------------------------------------------------


def test_the_device_wins_where_pages_are_free_and_the_wait_is_short() -> None:
    assert best(but(wait_s=0.1)) is Keep.DEVICE


def test_the_host_wins_where_the_device_is_short_and_the_pool_slow() -> None:
    assert best(but(turnover_tokens_s=500.0)) is Keep.HOST


def test_the_pool_wins_where_the_worker_has_no_room() -> None:
    full = dataclasses.replace(EXAMPLE.worker, free_tokens=0, host_free_tokens=0)
    assert best(but(likely=1.0, same_weights=1.0, worker=full, pool_free_bytes=1e9)) is Keep.POOL


def test_nothing_wins_where_computing_is_cheaper_than_any_copy() -> None:
    """Short context: 20 tokens take 20 ms, the shortest copy 30 ms there and back."""
    assert best(but(kv_tokens=20, pooled_tokens=0, likely=1.0, same_weights=1.0, turnover_tokens_s=500)) is Keep.NONE


@pytest.mark.parametrize("change", [{"likely": 0.0}, {"likely": 0.02}, {"same_weights": 0.0}, {"same_weights": 0.02}])
def test_nothing_is_copied_for_who_hardly_returns_or_returns_to_other_weights(change: dict[str, float]) -> None:
    assert best(but(**change, turnover_tokens_s=500.0)) is Keep.NONE


@pytest.mark.parametrize("change", [{"likely": 0.0}, {"same_weights": 0.0}])
def test_what_is_certain_to_be_of_no_use_is_not_even_kept_on_the_device(change: dict[str, float]) -> None:
    """It costs as much as not keeping it, and would bind the trajectory to its worker."""
    assert best(but(**change, turnover_tokens_s=0.0, wait_s=0.0)) is Keep.NONE


# Room ---------------------------------------------------------------------------------------------


def test_a_host_without_room_costs_infinity() -> None:
    assert costs_s(but_worker(host_free_tokens=1000))[Keep.HOST] < math.inf
    assert costs_s(but_worker(host_free_tokens=999))[Keep.HOST] == math.inf


def test_an_image_that_is_larger_than_the_pool_costs_infinity() -> None:
    assert costs_s(but(pool_budget_bytes=1_000_000))[Keep.POOL] < math.inf
    assert costs_s(but(pool_budget_bytes=999_999))[Keep.POOL] == math.inf


def test_a_full_pool_may_displace_and_that_costs_at_most_one_recomputation() -> None:
    empty, full = (costs_s(but(pool_free_bytes=free))[Keep.POOL] for free in (1e9, 0))
    assert full - empty == pytest.approx(0.4 * 1.0)


@pytest.mark.parametrize(
    ("wait_s", "survives"),
    [(0.0, 1.0), (8.0, 1.0), (10.0, 0.75), (12.0, 0.5), (15.999, 0.0)],
)
def test_pages_survive_for_certain_until_half_of_what_is_free_was_taken_and_not_once_all_was(
    wait_s: float, survives: float
) -> None:
    """800 are free, 50 are taken a second."""
    cost = costs_s(but(wait_s=wait_s, likely=1.0, same_weights=1.0))[Keep.DEVICE]
    assert cost == pytest.approx(1.0 - survives, abs=1e-3)
    assert costs_s(but(wait_s=16.0))[Keep.DEVICE] == math.inf


def test_what_was_gone_lately_though_it_should_not_have_been_is_less_certain_to_stay() -> None:
    seen = costs_s(but(lost_share=0.2, likely=1.0, same_weights=1.0))[Keep.DEVICE]
    assert seen == pytest.approx(1.0 - 0.8 * 0.75)
    assert costs_s(but(lost_share=1.0))[Keep.DEVICE] == math.inf


def test_with_no_page_free_or_none_that_others_did_not_leave_kv_in_the_device_is_no_place() -> None:
    assert costs_s(but_worker(free_tokens=0))[Keep.DEVICE] == math.inf
    assert costs_s(but(kept_tokens=1000))[Keep.DEVICE] == math.inf
    assert best(but(worker=dataclasses.replace(EXAMPLE.worker, free_tokens=0, host_free_tokens=0), likely=0.1)) is (
        Keep.NONE
    )


# What is not known --------------------------------------------------------------------------------


def test_a_copy_that_was_never_measured_costs_nothing_so_that_it_is_tried() -> None:
    unknown = but_worker(save=None, load=None)
    assert costs_s(unknown)[Keep.HOST] == pytest.approx(0.1)
    assert best(but(worker=unknown.worker, turnover_tokens_s=500.0)) is Keep.HOST


def test_where_nothing_was_measured_it_stays_where_it_is() -> None:
    case = but(worker=facts(prefill_s=None), export=None)
    assert costs_s(case) == dict.fromkeys(costs_s(case), 0.0)
    assert best(case) is Keep.DEVICE


@given(
    token_s=st.lists(st.none() | st.floats(0.0, 1.0), max_size=6),
    start=st.integers(0, 200),
    count=st.integers(0, 200),
)
@settings(deadline=None)
def test_prefill_costs_the_sum_over_its_positions(token_s: list[float | None], start: int, count: int) -> None:
    def of_position(position: int) -> float:
        bucket = max(0, int(math.log2(max(1, position))))
        known = {i: seconds for i, seconds in enumerate(token_s) if seconds is not None}
        shorter = [i for i in known if i <= bucket]
        longer = [i for i in known if i > bucket]
        if shorter:
            return known[max(shorter)]
        return known[min(longer)] if longer else 0.0

    expected = sum(of_position(position) for position in range(start, start + count))
    assert PrefillTimes(tuple(token_s)).seconds(start, start + count) == pytest.approx(expected, abs=1e-9)


@given(
    kv=st.integers(1, 5000),
    pooled=st.integers(0, 5000),
    likely=st.floats(0, 1),
    same=st.floats(0, 1),
    wait_s=st.floats(0, 100),
    turnover=st.floats(0, 1000),
    free=st.integers(0, 10_000),
    pool_free=st.integers(0, 10_000_000),
)
@settings(deadline=None)
def test_no_cost_is_negative_and_saving_never_looks_worse_than_losing_everything_on_top(
    kv: int,
    pooled: int,
    likely: float,
    same: float,
    wait_s: float,
    turnover: float,
    free: int,
    pool_free: int,
) -> None:
    case = but(
        kv_tokens=kv,
        pooled_tokens=min(kv, pooled),
        likely=likely,
        same_weights=same,
        wait_s=wait_s,
        turnover_tokens_s=turnover,
        pool_free_bytes=pool_free,
        worker=dataclasses.replace(EXAMPLE.worker, free_tokens=free),
    )
    costs = costs_s(case)
    assert list(costs) == [Keep.DEVICE, Keep.HOST, Keep.POOL, Keep.NONE]
    assert min(costs.values()) >= 0.0
    assert costs[Keep.NONE] < math.inf, "there is always a way"
    copies_s = 0.01 + 0.02 + 0.1 + 0.05 + kv * 1000 * (1e-8 + 2e-8 + 1e-7 + 5e-8)
    finite = [cost for cost in costs.values() if cost < math.inf]
    assert max(finite) <= costs[Keep.NONE] + copies_s + kv * 0.001
