"""Groups are the same whenever they are drawn, and what a service delivers is held against what it was asked for."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.decisions import summed
from benchmarks.forced import Drawing, Order
from benchmarks.servegen import Lengths
from benchmarks.workload import WrongOutputError
from rollout.errors import DeadlineError
from rollout.types import AbortReason, Keep

DRAWING = Drawing(name="x", ids=range(50), prompt_tokens=(2, 5), samples=3, output_tokens=(4, 6))


class FakeService:
    """Delivers what it was asked for, in order; each output is `off` tokens too long."""

    def __init__(self, off: int = 0) -> None:
        self._off = off
        self.waiting: list[Any] = []
        self.over_sample: float | None = None

    def submit(self, prompts: list[list[int]], *, n: int, sampling: list[Any], key: list[str]) -> None:
        assert len(prompts) == len(key) == 1
        assert n == len(sampling)
        assert all(each.ignore_eos for each in sampling)
        outputs = [SimpleNamespace(output_ids=[0] * (each.max_new_tokens + self._off)) for each in sampling]
        self.waiting.append(SimpleNamespace(group_id=key[0], trajectories=outputs))

    def next_groups(self, count: int, timeout_s: float) -> list[Any]:
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken

    def collect(self, count: int, *, over_sample: float, timeout_s: float) -> Any:
        self.over_sample = over_sample
        return SimpleNamespace(groups=tuple(self.next_groups(count, timeout_s)))


def order(service: FakeService) -> Order:
    return Order(service, 5.0)  # type: ignore[arg-type]


def test_a_turn_is_drawn_the_same_again_and_shares_no_prompt_with_another() -> None:
    groups = DRAWING.groups("1", 4)
    assert groups == DRAWING.groups("1", 4)
    assert groups[:2] == DRAWING.groups("1", 2)
    assert [group.key for group in groups] == ["1-0", "1-1", "1-2", "1-3"]
    assert all(2 <= len(group.prompt) <= 5 for group in groups)
    assert all(len(group.lengths) == 3 and set(group.lengths) <= {4, 5, 6} for group in groups)
    assert groups[0].prompt != DRAWING.groups("2", 1)[0].prompt


def test_lengths_may_be_those_of_a_histogram() -> None:
    lengths = Lengths({10: 0.5, 40: 0.5}, 20)
    drawn = Drawing(name="x", ids=range(9), prompt_tokens=(2, 2), samples=5, output_tokens=lengths).groups("1", 3)
    assert {length for group in drawn for length in group.lengths} == {5, 20}
    assert set(lengths.draw(random.Random(0), 20)) == {5, 20}


def test_an_order_is_complete_when_all_of_it_has_its_length() -> None:
    service = FakeService()
    ordered = order(service)
    ordered.submit(DRAWING.groups("1", 3))
    ordered.collect(2, over_sample=0.5)
    assert (ordered.missing, service.over_sample) == (1, 0.5)
    ordered.wait(1)
    assert ordered.missing == 0


def test_what_is_missing_wrong_or_not_asked_for_is_an_error() -> None:
    late = order(FakeService())
    late.submit(DRAWING.groups("1", 1))
    with pytest.raises(DeadlineError, match="1 of 2 groups within 5 s"):
        late.wait(2)
    wrong = order(FakeService(off=1))
    wrong.submit(DRAWING.groups("1", 1))
    with pytest.raises(WrongOutputError, match=r"1-0: asked for outputs of \["):
        wrong.wait(1)
    twice = FakeService()
    first = order(twice)
    first.submit(DRAWING.groups("1", 1))
    twice.waiting *= 2
    first.wait(1)
    with pytest.raises(WrongOutputError, match="asked for outputs of None"):
        first.wait(1)


def test_decisions_of_several_runs_are_summed() -> None:
    one = {AbortReason.QUOTA: {Keep.HOST: 2}}
    other = {AbortReason.QUOTA: {Keep.HOST: 1, Keep.POOL: 4}, AbortReason.SLICE_BUDGET: {Keep.DEVICE: 3}}
    assert summed(one, other) == {"quota": {"host": 3, "pool": 4}, "slice_budget": {"device": 3}}
    assert summed() == {}
