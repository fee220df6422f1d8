"""Aborts in every stage of a sequence, running or paused, by the engine alone; and what 64 of them in one step cost."""

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from rollout.control.commands import RepetitionWatch, Watch
from rollout.control.messages import Admitted, Finished, Freed, Moved, Parked, Recalled, Sampled
from rollout.engine.sequence import Sequence
from rollout.types import Columns, Image, Keep, NodeId, SegmentId, SegmentRun, TrajectoryId, Version
from tests.engine.scripted import PAGE_TOKENS, Scripted, count_up
from tests.weights import written

CHUNK = 16
PROMPT = tuple(range(4 * CHUNK + 5))
"""Five chunks: the first token is drawn by the fifth step."""


def image(tokens: int) -> Image:
    pages = -(-tokens // PAGE_TOKENS)
    return Image(
        runs=(SegmentRun(node=NodeId("n"), segment=SegmentId("s"), first=0, pages=pages),),
        kv_tokens=tokens,
        written=written(tokens),
    )


def known(count: int) -> Columns:
    return Columns([count_up(TrajectoryId(""), i) for i in range(count)], [0.0] * count, [Version(0)] * count)


def assert_all_pages_are_back(scripted: Scripted) -> None:
    counts = scripted.engine.stats.device
    assert counts.free + counts.tree == counts.total, counts
    assert counts.private == counts.reserved == 0, counts


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("steps", range(12))
def test_abort_before_in_and_after_every_chunk(steps: int, paused: bool) -> None:
    """Case A1: exactly the tokens so far, though no step runs after the abort; a second abort changes nothing."""
    scripted = Scripted(chunk_tokens=CHUNK)
    key = scripted.submit("a", PROMPT)
    scripted.steps(steps)
    if paused:
        scripted.engine.pause()
        scripted.steps(3)
    before = len(scripted.runner.plans)
    for _ in range(2):
        scripted.engine.abort(key)
    scripted.run()
    assert len(scripted.runner.plans) - before <= (not paused)
    assert scripted.ids("a") == list(range(max(0, steps - 4)))
    (parked,) = scripted.of(Parked)
    assert isinstance(parked, Parked)
    assert parked.reason is None
    assert parked.kv_tokens == min(CHUNK * steps, len(PROMPT) + max(0, steps - 5))
    scripted.engine.release(key)
    scripted.run()
    assert_all_pages_are_back(scripted)


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_abort_during_a_restore_gives_back_its_pages_when_nobody_writes_to_them(begun: bool, paused: bool) -> None:
    scripted = Scripted()
    scripted.restorer.held, scripted.restorer.begun = True, begun
    key = scripted.submit("a", PROMPT, output=known(9), image=image(len(PROMPT) + 8))
    scripted.step()
    if paused:
        scripted.engine.pause()
    scripted.step()
    scripted.engine.abort(key)
    scripted.step()
    assert bool(scripted.of(Parked)) != begun
    assert (scripted.engine.stats.device.reserved > 0) == begun
    scripted.restorer.held = False
    scripted.run()
    assert scripted.parked("a").kv_tokens == (len(PROMPT) + 8 if begun else 0)
    scripted.engine.release(key)
    scripted.run()
    assert_all_pages_are_back(scripted)
    assert not scripted.of(Sampled)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("tokens", [9, 10])
def test_an_abort_beside_the_last_token_gives_one_result(tokens: int, times: int) -> None:
    """Case A5: what has completed is reported as completed, and pages are freed once."""
    scripted = Scripted()
    key = scripted.submit("a", max_new_tokens=10)
    scripted.steps(tokens)
    for _ in range(times):
        scripted.engine.abort(key)
        scripted.engine.release(key)
    scripted.run()
    ends = [event for event in scripted.events if isinstance(event, Finished | Parked)]
    assert [type(event) for event in ends] == [Finished if tokens == 10 else Parked]
    assert len(scripted.ids("a")) == tokens
    assert len(scripted.of(Freed)) == (tokens < 10)
    assert_all_pages_are_back(scripted)


@pytest.mark.parametrize("watch", [Watch(slice_tokens=10), Watch(most_tokens=10)])
def test_an_abort_beside_the_last_token_of_a_slice_gives_one_result(watch: Watch) -> None:
    scripted = Scripted()
    key = scripted.submit("a", watch=watch)
    scripted.steps(10)
    scripted.engine.abort(key)
    scripted.run()
    assert [event.reason for event in scripted.of(Parked) if isinstance(event, Parked)] == [scripted.parked("a").reason]
    assert scripted.parked("a").reason is not None


# Paused -------------------------------------------------------------------------------------------


def test_a_paused_engine_runs_nothing_admits_nothing_and_goes_on_where_it_was() -> None:
    scripted = Scripted(max_running=1)
    for name in "ab":
        scripted.submit(name, max_new_tokens=10)
    scripted.steps(4)
    scripted.engine.pause()
    scripted.steps(5)
    assert scripted.engine.idle
    assert len(scripted.runner.plans) == scripted.engine.stats.steps == 4
    scripted.submit("c", max_new_tokens=3)
    scripted.steps(3)
    assert scripted.engine.idle
    assert (scripted.engine.stats.running, scripted.engine.stats.waiting) == (1, 2)
    scripted.engine.unpause()
    assert not scripted.engine.idle
    scripted.run()
    assert [scripted.ids(name) for name in "abc"] == [list(range(10)), list(range(10)), list(range(3))]


def test_commands_copies_and_expiry_go_on_while_paused() -> None:
    scripted = Scripted(host_pages=100)
    keys = {name: scripted.submit(name, (ord(name),) * 9) for name in "abcd"}
    scripted.steps(3)
    scripted.engine.pause()
    for key in keys.values():
        scripted.engine.abort(key)
    scripted.engine.release(keys["a"])
    scripted.engine.keep(keys["b"], Keep.HOST)
    scripted.engine.keep(keys["c"], Keep.DEVICE)
    scripted.copier.held = True
    scripted.steps(2)
    assert scripted.of(Freed, "a")
    assert scripted.of(Moved, "c")
    assert not scripted.of(Moved, "b")
    assert not scripted.engine.idle
    assert scripted.engine.blocked  # only a copy's completion changes anything: the engine's thread sleeps
    scripted.copier.held = False
    scripted.run()
    (moved,) = scripted.of(Moved, "b")
    assert isinstance(moved, Moved)
    assert (moved.where, moved.error) == (Keep.HOST, None)
    scripted.engine.recall(keys["b"])
    scripted.run()
    (recalled,) = scripted.of(Recalled)
    assert isinstance(recalled, Recalled)
    assert recalled.kv_tokens == 11
    tails = scripted.engine.stats.device.private
    scripted.now += 61.0
    scripted.engine.expire()
    assert scripted.engine.stats.device.private == tails - 1
    assert len(scripted.runner.plans) == 3


def test_a_restore_that_ends_while_paused_is_told_and_a_promotion_parked() -> None:
    scripted = Scripted()
    scripted.restorer.held = True
    scripted.submit("runs", PROMPT, output=known(9), image=image(len(PROMPT) + 8))
    scripted.submit("parks", PROMPT[:-4], output=known(9), image=image(len(PROMPT) + 4), watch=Watch(only_loads=True))
    scripted.step()
    scripted.engine.pause()
    scripted.restorer.held = False
    scripted.run()
    assert scripted.of(Admitted, "runs")
    assert scripted.parked("parks").kv_tokens == len(PROMPT) + 4
    assert not scripted.of(Sampled)
    scripted.engine.unpause()
    scripted.step()
    assert scripted.ids("runs") == [9]


# Cost ---------------------------------------------------------------------------------------------


def calls(act: Callable[[], None]) -> Counter[str]:
    """Calls of our own functions and of built-in ones while `act` runs, by name."""
    found: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            found[argument.__qualname__] += 1

    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
    return found


def crowd(count: int, tokens: int) -> tuple[Scripted, list[tuple[TrajectoryId, int]]]:
    """`count` sequences with `tokens` tokens of output."""
    scripted = Scripted(max_running=256, pages=20_000, audited=False)
    keys = [scripted.submit(f"{index}", (index, *range(40))) for index in range(count)]
    while len(scripted.ids("0")) < tokens:
        scripted.step()
    return scripted, keys


def aborting(count: int, tokens: int, others: int = 0) -> int:
    """Calls it takes to abort `count` sequences, each of so many tokens, the last of `others` that go on.

    Comparisons of two sequences are among them.
    """
    scripted, keys = crowd(count + others, tokens)

    def abort() -> None:
        for key in keys[others:]:
            scripted.engine.abort(key)

    found = calls(abort)
    scripted.step()
    assert len(scripted.of(Parked)) == count
    return found.total()


def test_64_aborts_in_one_step_cost_64_times_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case A8: nothing is done for each of the others, and nothing for each token."""
    monkeypatch.setattr(Sequence, "__eq__", lambda one, other: one is other)
    monkeypatch.setattr(Sequence, "__hash__", object.__hash__)
    one = aborting(1, 10)
    assert one < 150
    assert aborting(64, 10) <= 64 * one
    assert aborting(64, 10, others=128) <= 64 * one
    assert aborting(1, 400) <= one + 3


def test_watching_costs_a_token_one_comparison_and_a_look_now_and_then() -> None:
    """All that a step calls for a sequence with every watch set, beside what it calls without."""

    def stepping(watch: Watch) -> int:
        scripted = Scripted(audited=False)
        scripted.submit("a", watch=watch)
        scripted.steps(100)
        return calls(lambda: scripted.steps(160)).total()

    loop = RepetitionWatch(ngram=64, times=8, min_tokens=64)
    everything = stepping(Watch(slice_tokens=900, most_tokens=900, turns=True, repetition=loop)) - stepping(Watch())
    assert 0 < everything <= 160 / 8 * 25
