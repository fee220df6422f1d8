"""What a worker looks for by itself: it parks the sequence at that very token, with the reason, and loses none."""

import pytest

from rollout.control.commands import RepetitionWatch, Watch
from rollout.control.messages import Finished, Parked, Sampled
from rollout.errors import InvalidPromptError
from rollout.types import AbortReason, Columns, FinishReason, TrajectoryId, Version
from tests.engine.scripted import EOS_ID, VOCAB_SIZE, Say, Scripted

LOOP = RepetitionWatch(ngram=4, times=3, min_tokens=12)
"""The output is looked at after every 8 tokens."""


def saying(tokens: dict[int, int]) -> Say:
    """The index itself, but for some."""
    return lambda _, index: tokens.get(index, index % 900)


def sampled(count: int) -> Columns:
    return Columns(range(count), [0.0] * count, [Version(0)] * count)


def reason_of(scripted: Scripted, name: str = "a") -> tuple[AbortReason | FinishReason | None, int]:
    """Why the trajectory stopped, and its tokens sampled here."""
    (event,) = [e for e in scripted.events if isinstance(e, Parked | Finished) and e.trajectory_id == name]
    return event.reason, len(scripted.ids(name))


@pytest.mark.parametrize(
    ("watch", "expected"),
    [
        (Watch(), (FinishReason.LENGTH, 50)),
        (Watch(slice_tokens=7), (AbortReason.SLICE_BUDGET, 7)),
        (Watch(slice_tokens=1), (AbortReason.SLICE_BUDGET, 1)),
        (Watch(most_tokens=9), (AbortReason.OVER_LONG, 9)),
        (Watch(slice_tokens=9, most_tokens=9), (AbortReason.OVER_LONG, 9)),
        (Watch(slice_tokens=8, most_tokens=9), (AbortReason.SLICE_BUDGET, 8)),
        (Watch(slice_tokens=50, most_tokens=50), (FinishReason.LENGTH, 50)),
        (Watch(turns=True), (FinishReason.LENGTH, 50)),
    ],
)
def test_a_sequence_is_parked_with_the_first_reason_there_is(watch: Watch, expected: tuple[object, int]) -> None:
    scripted = Scripted()
    scripted.submit("a", watch=watch, max_new_tokens=50)
    scripted.run()
    assert reason_of(scripted) == expected
    assert scripted.ids("a") == list(range(expected[1]))


@pytest.mark.parametrize(
    ("watch", "expected"),
    [
        (Watch(), (FinishReason.STOP, 10)),
        (Watch(turns=True), (AbortReason.TURN, 10)),
        (Watch(turns=True, slice_tokens=10, most_tokens=10), (AbortReason.TURN, 10)),
        (Watch(slice_tokens=10, most_tokens=10), (FinishReason.STOP, 10)),
    ],
)
def test_a_stop_ends_a_turn_or_all_before_anything_else_is_looked_at(
    watch: Watch, expected: tuple[object, int]
) -> None:
    scripted = Scripted(saying({9: EOS_ID}))
    scripted.submit("a", watch=watch)
    scripted.run()
    assert reason_of(scripted) == expected
    assert scripted.ids("a")[-1] == EOS_ID


def test_a_stop_without_a_token_left_for_another_turn_is_the_end() -> None:
    scripted = Scripted(saying({9: EOS_ID}))
    scripted.submit("a", watch=Watch(turns=True), max_new_tokens=10)
    scripted.run()
    assert reason_of(scripted) == (FinishReason.STOP, 10)


def test_a_parked_turn_has_kv_for_all_but_its_stop() -> None:
    scripted = Scripted(saying({9: EOS_ID}))
    scripted.submit("a", (5,) * 7, watch=Watch(turns=True))
    scripted.run()
    assert scripted.parked("a").kv_tokens == 7 + 10 - 1


@pytest.mark.parametrize(("slice_tokens", "most_tokens", "expected"), [
    (None, None, (AbortReason.REPETITION, 24)),
    (24, None, (AbortReason.REPETITION, 24)),
    (24, 24, (AbortReason.OVER_LONG, 24)),
    (23, None, (AbortReason.SLICE_BUDGET, 23)),
])  # fmt: skip
def test_a_loop_is_found_at_the_next_look(
    slice_tokens: int | None, most_tokens: int | None, expected: tuple[object, int]
) -> None:
    """From token 10 on the same three: with 22 tokens it is a loop, at 24 it is looked for."""
    scripted = Scripted(lambda _, index: index if index < 10 else 100 + index % 3)
    scripted.submit("a", watch=Watch(slice_tokens=slice_tokens, most_tokens=most_tokens, repetition=LOOP))
    scripted.run()
    assert reason_of(scripted) == expected


@pytest.mark.parametrize("before", range(12, 24))
def test_where_a_loop_is_found_does_not_depend_on_where_the_slice_began(before: int) -> None:
    def say(_: TrajectoryId, index: int) -> int:
        return index if index < 10 else 100 + index % 3

    scripted = Scripted(say)
    output = Columns([say(TrajectoryId("a"), i) for i in range(before)], [0.0] * before, [Version(0)] * before)
    scripted.submit("a", watch=Watch(repetition=LOOP), output=output)
    scripted.run()
    assert reason_of(scripted) == (AbortReason.REPETITION, 24 - before)


def test_what_was_appended_is_no_loop_and_ends_one() -> None:
    scripted = Scripted(lambda _, index: 7)
    output = sampled(3)
    output.extend(Columns.given([7] * 40))
    scripted.submit("a", watch=Watch(repetition=LOOP), output=output)
    scripted.run()
    assert reason_of(scripted) == (AbortReason.REPETITION, 16)


def test_nothing_to_sample_parks_without_a_reason_as_soon_as_the_kv_is_there() -> None:
    scripted = Scripted()
    scripted.submit("a", watch=Watch(only_loads=True, most_tokens=1, turns=True), output=sampled(4))
    scripted.run()
    assert scripted.parked("a").reason is None
    assert scripted.of(Sampled) == []


def test_appended_tokens_count_for_no_budget() -> None:
    output = sampled(6)
    output.extend(Columns.given(range(30)))
    lengths = {}
    for name, watch, params in (
        ("length", Watch(), {"max_new_tokens": 10}),
        ("long", Watch(most_tokens=8), {"max_new_tokens": 10}),
        ("slice", Watch(slice_tokens=3), {"max_new_tokens": 10}),
    ):
        scripted = Scripted()
        scripted.submit("a", watch=watch, output=output, **params)
        scripted.run()
        lengths[name] = reason_of(scripted)
        first = scripted.of(Sampled)[0]
        assert isinstance(first, Sampled)
        assert first.offset == 36
    assert lengths == {
        "length": (FinishReason.LENGTH, 4),
        "long": (AbortReason.OVER_LONG, 2),
        "slice": (AbortReason.SLICE_BUDGET, 3),
    }


def test_appended_tokens_do_count_for_the_context() -> None:
    scripted = Scripted(pages=10)
    output = sampled(6)
    output.extend(Columns.given(range(29)))
    scripted.submit("a", (5, 5), output=output)
    scripted.run()
    assert reason_of(scripted) == (FinishReason.LENGTH, 3)


@pytest.mark.parametrize(("least", "banned_steps"), [(0, 0), (6, 0), (8, 2)])
def test_stops_are_banned_by_sampled_tokens(least: int, banned_steps: int) -> None:
    scripted = Scripted()
    output = sampled(6)
    output.extend(Columns.given(range(5)))
    scripted.submit("a", output=output, max_new_tokens=10, min_new_tokens=least)
    banned: list[bool] = []
    while not scripted.engine.idle:
        sequences = list(scripted.engine._scheduler.sequences())
        banned += [EOS_ID in sequence.banned_ids for sequence in sequences]
        scripted.step()
    assert banned == [True] * banned_steps + [False] * (4 - banned_steps)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
def test_an_appended_token_outside_the_vocabulary_is_refused(token: int) -> None:
    scripted = Scripted()
    with pytest.raises(InvalidPromptError, match=f"appended token ids must be in 0 … {VOCAB_SIZE - 1}"):
        scripted.submit("a", output=Columns.given([token]))
    assert scripted.engine.idle


def test_a_reason_is_told_after_the_token_it_was_seen_in() -> None:
    scripted = Scripted()
    scripted.submit("a", watch=Watch(slice_tokens=2))
    scripted.run()
    assert [type(event) for event in scripted.events if event.trajectory_id == "a"][-2:] == [Sampled, Parked]
