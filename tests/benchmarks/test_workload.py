"""All sides get the same prompts in turns, and one that does not sample what it should is an error."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.workload import Generated, Prompts, Vocabulary, Workload, WrongOutputError, rates
from tests.tiny_models import SPECIAL_TOKENS, VOCAB_SIZE, make_tiny_llama

VOCABULARY = Vocabulary(size=50, ids=range(4, 50))


class Fake:
    """Repeats what `made` says, and writes down its turns."""

    def __init__(self, name: str, log: list[tuple[str, Prompts, int]], made: Callable[[int], Generated]) -> None:
        self._name, self._log, self._made = name, log, made

    def generate(self, prompts: Prompts, new_tokens: int) -> Generated:
        self._log.append((self._name, prompts, new_tokens))
        return self._made(new_tokens)


def good(new_tokens: int) -> Generated:
    return Generated(seconds=float(new_tokens), output_ids=[[7] * new_tokens] * 3, logprobs=[new_tokens] * 3)


def workload() -> Workload:
    return Workload(name="3", batch=3, prompt_tokens=5, new_tokens=4, vocabulary=VOCABULARY, seed=0)


def test_sides_take_turns_in_an_order_that_is_reversed_with_the_same_prompts() -> None:
    log: list[tuple[str, Prompts, int]] = []
    sides = {name: Fake(name, log, good) for name in ("a", "b", "c")}
    measured = workload().measure(
        sides, {"a": 2, "b": 2, "c": 1}, warm_tokens=2, beside=lambda: log.append(("beside", [], 0))
    )
    assert measured == {"a": [4.0, 4.0], "b": [4.0, 4.0], "c": [4.0]}
    assert [name for name, _, _ in log] == ["a", "b", "c", "a", "b", "c", "beside", "beside", "b", "a"]
    assert [new for _, _, new in log] == [2, 2, 2, 4, 4, 4, 0, 0, 4, 4]
    prompts = [prompts for _, prompts, _ in log]
    warm, first, second = prompts[0], prompts[3], prompts[8]
    assert prompts[:6] == [warm] * 3 + [first] * 3
    assert prompts[8:] == [second] * 2
    rows = [tuple(row) for each in (warm, first, second) for row in each]
    assert len(set(rows)) == 9, "no prompt comes twice"
    assert all(len(row) == 5 and set(row) <= set(VOCABULARY.ids) for row in rows)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Generated(seconds=1, output_ids=[[7] * 4] * 2, logprobs=[4] * 2), r"and made 2 of \[4\]"),
        (Generated(seconds=1, output_ids=[[7] * 4, [7] * 3, [7] * 4], logprobs=[4] * 3), r"and made 3 of \[3, 4\]"),
        (Generated(seconds=1, output_ids=[[7] * 4] * 3, logprobs=[4, 4, 0]), r"asked for 4 log-prob.* gave \[0, 4\]"),
        (Generated(seconds=1, output_ids=[[7, 7, 50, 7]] * 3, logprobs=[4] * 3), r"ids outside of 0 … 49: \[50"),
    ],
)
def test_a_side_that_made_something_else_is_an_error(made: Generated, message: str) -> None:
    sides = {"a": Fake("a", [], lambda new: made if new == 4 else good(new))}
    with pytest.raises(WrongOutputError, match=message):
        workload().measure(sides, {"a": 1}, warm_tokens=1, beside=lambda: None)


def test_the_vocabulary_of_a_model_leaves_out_special_ids(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "llama")
    vocabulary = Vocabulary.read(model, VOCAB_SIZE)
    assert vocabulary.size == VOCAB_SIZE
    assert list(vocabulary.ids) == list(range(len(SPECIAL_TOKENS), VOCAB_SIZE))


def test_rates_are_by_the_median_turn_of_sides_that_had_any() -> None:
    assert rates({"a": [1.0, 4.0, 2.0], "b": []}, 100) == {"a": 50.0}
