"""`kv_spans` says of every sampled token, position by position, which version wrote the KV that it was sampled on.

Checked against a worker that remembers this for each token, in all short lives and in some whole ones.
"""

from collections.abc import Sequence
from itertools import groupby, product

import pytest

from rollout.control.messages import Admitted, Preempted, Sampled
from rollout.control.spans import Spans
from rollout.types import AbortReason, Columns, Keep, KVRun, KVSpan, Phase, Then, Trajectory, UpdateMode, Version
from tests.control.stage import PROMPT, W1, W2, Stage, member
from tests.weights import WEIGHTS, loaded, written

A = member("a")
STALE = {"kv_reuse": {"kind": "stale", "max_lag": 2}}


class Worker:
    """Runs one trajectory of three prompt tokens, and remembers everything."""

    def __init__(self, *, together: bool) -> None:
        """With `together` tokens are told as late as possible, otherwise each at once."""
        self.spans = Spans()
        self.together = together
        self.live = Version(0)
        self.kv: list[Version] = []
        self.tokens: list[Version | None] = []
        self.histories: dict[int, list[Version]] = {}
        """Of each sampled token, by position."""
        self.untold: list[Version] = []
        self.admit(0)

    @property
    def length(self) -> int:
        return 3 + len(self.tokens)

    def admit(self, kept: int) -> None:
        """With the KV of so many positions of those that it had."""
        self.tell()
        del self.kv[kept:]
        self.spans.admitted([KVRun(loaded(version), len(list(run))) for version, run in groupby(self.kv)])

    def sample(self) -> None:
        self.kv += [self.live] * (self.length - len(self.kv))
        self.histories[self.length] = list(self.kv)
        self.tokens.append(self.live)
        self.untold.append(self.live)
        if not self.together:
            self.tell()

    def append(self) -> None:
        """Two tokens, while it is suspended; it is admitted again with all that it has."""
        self.tell()
        self.tokens += [None, None]
        self.admit(len(self.kv))

    def tell(self) -> None:
        if self.untold:
            self.spans.sampled(self.length - len(self.untold), self.untold)
            self.untold = []

    def do(self, step: str) -> None:
        match step:
            case "sample":
                self.sample()
            case "replace":
                self.live = Version(self.live + 1)
            case "roll back":
                self.live = Version(max(0, self.live - 1))
            case "append":
                self.append()
            case "restore":
                self.admit(len(self.kv))
            case "restore half":
                self.admit(len(self.kv) // 2)
            case _:
                self.admit(0)


def check(spans: Sequence[KVSpan], tokens: Sequence[Version | None], histories: dict[int, list[Version]]) -> None:
    """Prompts are of three tokens. A life in which nothing was sampled has no spans."""
    first = 3 if histories else 3 + len(tokens)
    covered = [position for span in spans for position in range(span.first, span.stop)]
    assert covered == list(range(first, 3 + len(tokens)))
    for span in spans:
        assert all(start < stop for start, stop, _ in span.kv)
        assert [position for start, stop, _ in span.kv for position in range(start, stop)] == list(range(span.first))
        assert all(one[2] != other[2] for one, other in zip(span.kv, span.kv[1:], strict=False)), "runs are whole"
        before = [version for start, stop, version in span.kv for _ in range(start, stop)]
        by = tokens[span.first - 3]
        if by is None:  # appended before anything was sampled
            assert (span.first, span.stop) == (3, min(histories))
            assert before == histories[span.stop][:3]
            continue
        for position in range(span.first, span.stop):
            if (history := histories.get(position)) is not None:
                assert [*before, *[by] * (position - span.first)] == history


STEPS = ["sample", "replace", "roll back", "append", "restore", "restore half", "recompute"]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("first", STEPS)
def test_every_short_life_is_told_position_by_position(first: str, together: bool) -> None:
    for rest in product(STEPS, repeat=4):
        worker = Worker(together=together)
        for step in (first, *rest, "sample", "sample"):
            worker.do(step)
        worker.tell()
        check(worker.spans.of(3, worker.length), worker.tokens, worker.histories)


@pytest.mark.parametrize("together", [True, False])
def test_longer_lives_without_rollbacks_and_halves(together: bool) -> None:
    for life in product(["sample", "replace", "append", "recompute"], repeat=6):
        worker = Worker(together=together)
        for step in (*life, "sample"):
            worker.do(step)
        worker.tell()
        check(worker.spans.of(3, worker.length), worker.tokens, worker.histories)


def test_there_are_no_more_spans_than_histories() -> None:
    worker = Worker(together=False)
    for step in ["sample", "sample", "restore", "sample", "recompute", "sample", "append", "sample", "restore half"]:
        worker.do(step)
    worker.do("sample")
    assert len(worker.spans.of(3, worker.length)) == 1


def test_what_was_never_sampled_has_no_spans() -> None:
    assert Spans().of(3, 3) == ()
    worker = Worker(together=False)
    worker.do("append")
    assert worker.spans.of(3, worker.length) == ()


def test_tokens_that_were_appended_last_belong_to_the_last_span() -> None:
    worker = Worker(together=False)
    worker.do("sample")
    worker.do("append")
    (span,) = worker.spans.of(3, worker.length)
    assert (span.first, span.stop) == (3, 6)


# Of results ---------------------------------------------------------------------------------------


def decoding(**options: object) -> Stage:
    """A stage on which `A` decodes on w1 and has sampled three tokens."""
    stage = Stage(W1, **options)  # type: ignore[arg-type]
    stage.submit("a")
    stage.admit(A)
    stage.sample(A, 3)
    return stage


P = len(PROMPT)
V0, V1, V2 = (Version(number) for number in range(3))


def spans_of(result: Trajectory) -> list[tuple[int, int, tuple[tuple[int, int, int], ...]]]:
    assert [p for span in result.kv_spans for p in range(span.first, span.stop)] == list(
        range(P, P + len(result.output_ids))
    )
    return [(span.first, span.stop, span.kv) for span in result.kv_spans]


def end(stage: Stage) -> Trajectory:
    stage.finish(A)
    return stage.take_one()


def test_in_place_the_last_token_is_fed_to_the_new_weights() -> None:
    stage = decoding(weights=STALE)
    stage.begin_update(UpdateMode.IN_PLACE)
    stage.live(1)
    stage.end_update()
    stage.sample(A, 2, version=1)
    assert spans_of(end(stage)) == [
        (P, P + 3, ((0, P, V0),)),
        (P + 3, P + 5, ((0, P + 2, V0), (P + 2, P + 3, V1))),
    ]


def test_what_was_computed_of_a_prefill_is_the_old_ones_if_the_worker_says_so_in_place() -> None:
    """As a preemption, for other weights, and an admission with what it has: nothing is counted for it."""
    stage = Stage(W1, weights=STALE)
    stage.submit("a")
    stage.admit(A)
    stage.live(1)
    before = stage.controller.counters
    stage.preempt(A, outdated=True)
    stage.tell(A, Admitted, cached_tokens=2, restored_tokens=0, recomputed_tokens=0, written=written(2))
    assert stage.controller.counters == before
    stage.sample(A, version=1)
    result = end(stage)
    assert (spans_of(result), result.resumes) == ([(P, P + 1, ((0, 2, V0), (2, P, V1)))], ())


def test_recomputed_all_kv_is_the_new_ones() -> None:
    stage = decoding()
    stage.begin_update(UpdateMode.RECOMPUTE)
    stage.preempt(A, outdated=True)
    stage.live(1)
    stage.end_update()
    stage.admit(A, runs=())
    stage.sample(A, 2, version=1)
    assert spans_of(end(stage)) == [(P, P + 3, ((0, P, V0),)), (P + 3, P + 5, ((0, P + 3, V1),))]


@pytest.mark.parametrize("keep", [Keep.DEVICE, Keep.HOST, Keep.POOL])
def test_suspended_and_resumed_with_old_kv_the_result_says_so(keep: Keep) -> None:
    """Case D2."""
    stage = decoding(weights=STALE)
    stage.hold(A, keep=keep)
    stage.live(1)
    stage.live(2)
    stage.resume(A)
    stage.admit(A, cached=P + 2, runs=written(P + 2))
    stage.sample(A, 2, version=2)
    assert spans_of(end(stage)) == [
        (P, P + 3, ((0, P, V0),)),
        (P + 3, P + 5, ((0, P + 2, V0), (P + 2, P + 3, V2))),
    ]


@pytest.mark.parametrize("keep", [Keep.DEVICE, Keep.HOST, Keep.POOL])
def test_suspended_and_resumed_without_reuse_all_is_computed_again(keep: Keep) -> None:
    """Case D2, by default."""
    stage = decoding()
    stage.hold(A, keep=keep)
    stage.live(1)
    stage.resume(A)
    stage.admit(A)
    stage.sample(A, 2, version=1)
    result = end(stage)
    assert spans_of(result) == [(P, P + 3, ((0, P, V0),)), (P + 3, P + 5, ((0, P + 3, V1),))]
    assert [(each.recomputed_tokens, each.restored_tokens) for each in result.resumes] == [(P + 2, 0)]


def test_what_is_told_of_an_epoch_that_is_over_or_twice_changes_no_span() -> None:
    stage = decoding(weights=STALE)
    stage.admit(A, cached=2, runs=written(2, loaded(7)))
    stage.down(W1)
    stage.up(W1, "b")
    stage.live(1)
    stage.admit(A)  # by the process that is gone
    stage.up(W2)
    assert stage.phase(A) in (Phase.PREFILLING, Phase.RESTORING)
    assert [(span.first, span.stop) for span in stage.record(A).snapshot().kv_spans] == [(P, P + 3)]


@pytest.mark.parametrize("more", [0, 2])
def test_a_report_of_a_preemption_and_what_came_after_changes_no_span_when_it_is_told_again(more: int) -> None:
    """It may have more tokens the second time."""
    stage = decoding(weights=STALE)
    record = stage.record(A)

    def report(tokens: int) -> None:
        told = {"trajectory_id": A, "epoch": record.epoch}
        again = Admitted(**told, cached_tokens=0, restored_tokens=0, recomputed_tokens=P + 2, written=())
        news = Columns([103 + i for i in range(tokens)], [-0.5] * tokens, [V0] * tokens)
        stage.report(W1, Preempted(**told), again, Sampled(**told, offset=3, columns=news))

    report(1)
    report(1 + more)
    stage.live(1)
    stage.sample(A, version=1)
    at = P + 4 + more
    assert spans_of(end(stage)) == [(P, at, ((0, P, V0),)), (at, at + 1, ((0, at - 1, V0), (at - 1, at, V1)))]


def test_appended_tokens_are_written_by_what_samples_next() -> None:
    stage = Stage(W1, weights=STALE)
    stage.submit("a", multi_turn=True)
    stage.admit(A)
    stage.sample(A, 2)
    stage.park(A, AbortReason.TURN)
    stage.answer_all()
    stage.live(1)
    stage.extend(A, [7, 8])
    assert spans_of(stage.record(A).snapshot()) == [(P, P + 4, ((0, P, V0),))]
    stage.admit(A, restored=P + 1, runs=written(P + 1))
    stage.sample(A, version=1)
    assert spans_of(end(stage)) == [
        (P, P + 4, ((0, P, V0),)),
        (P + 4, P + 5, ((0, P + 1, V0), (P + 1, P + 4, V1))),
    ]


def test_a_stay_on_a_worker_for_kv_only_leaves_no_span() -> None:
    stage = decoding(weights=STALE)
    stage.hold(A)
    stage.live(1)
    stage.abort(A, keep=Keep.HOST)
    stage.admit(A, restored=P + 2, runs=written(P + 2))
    stage.park(A, runs=written(P + 2))
    stage.unanswered = stage.unanswered[-1:]
    stage.answer_all()
    stage.live(2)
    stage.resume(A)
    stage.admit(A, loaded=P + 2, runs=written(P + 2))
    stage.sample(A, version=2)
    assert spans_of(end(stage))[1:] == [(P + 3, P + 4, ((0, P + 2, V0), (P + 2, P + 3, V2)))]


def test_an_attempt_from_the_prompt_has_spans_of_its_own() -> None:
    stage = decoding()
    stage.abort(A, then=Then.RETRY)
    stage.live(1)
    stage.answer_all()
    stage.admit(A)
    stage.sample(A, 1, version=1)
    assert spans_of(end(stage)) == [(P, P + 1, ((0, P, V1),))]


def test_weights_with_the_same_label_are_the_same_version_to_a_result() -> None:
    stage = decoding(weights=STALE)
    other = WEIGHTS._replace(weights_id=loaded(9).weights_id)
    stage.live(other)
    stage.sample(A, 2)
    assert spans_of(end(stage)) == [(P, P + 5, ((0, P, V0),))]
