"""Weights are replaced between two steps of an engine: what runs, waits and restores then, by the accounts alone."""

import pytest

from rollout.config import WriteBack
from rollout.control.messages import Admitted, Parked, Preempted
from rollout.engine.sequence import Status
from rollout.errors import SegmentMissingError
from rollout.kv.keys import Fingerprint, PageNames, root_key
from rollout.kv.nodes import Node
from rollout.kv.restore import Restored
from rollout.kv.written import Written
from rollout.types import Columns, Image, Keep, KVRun, NodeId, SegmentId, SegmentRun, TrajectoryId, Version, Weights
from tests.engine.scripted import PAGE_TOKENS, Scripted, count_up
from tests.weights import WEIGHTS, loaded, written

V1, V2, V3 = loaded(1), loaded(2), loaded(3)
PROMPT = tuple(range(100, 130))
"""Seven pages and two tokens."""


def known(count: int) -> Columns:
    return Columns([count_up(TrajectoryId(""), i) for i in range(count)], [0.0] * count, [Version(0)] * count)


def image(*runs: KVRun) -> Image:
    tokens = sum(run.tokens for run in runs)
    segment = SegmentRun(node=NodeId("n"), segment=SegmentId("s"), first=0, pages=-(-tokens // PAGE_TOKENS))
    return Image(runs=(segment,), kv_tokens=tokens, written=runs)


def names_of(tokens: list[int], runs: tuple[KVRun, ...]) -> tuple[bytes, ...]:
    """Of whole pages, by somebody who knows it all beforehand."""
    by = Written.continued(runs, runs[-1].weights)
    names = PageNames(root_key(Fingerprint("scripted")), page_tokens=PAGE_TOKENS, written=by)
    return names.of(tokens, sum(run.tokens for run in runs) // PAGE_TOKENS)


def admitted(scripted: Scripted, name: str) -> list[Admitted]:
    return [event for event in scripted.of(Admitted, name) if isinstance(event, Admitted)]


def parked(scripted: Scripted, name: str, *, epoch: int = 1) -> Parked:
    """Stopped now."""
    scripted.engine.abort((TrajectoryId(name), epoch))
    scripted.run()
    return scripted.parked(name)


def suspended(scripted: Scripted, name: str, keep: Keep, *, output: int) -> Columns:
    """Stopped with so many tokens and kept; what it said."""
    key = scripted.submit(name, PROMPT)
    while len(scripted.ids(name)) < output:
        scripted.step()
    scripted.engine.abort(key)
    scripted.step()
    scripted.engine.keep(key, keep)
    scripted.run()
    return scripted.columns(name)


def assert_nothing_is_left(scripted: Scripted) -> None:
    """Of other weights, once somebody looks; and no page is lost."""
    scripted.engine.expire()
    assert set(scripted.cache._tree._roots) <= {scripted.loads[-1].weights_id}
    counts = scripted.engine.stats.device
    assert (counts.private, counts.reserved, counts.free + counts.tree) == (0, 0, counts.total)


# What runs


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("steps", range(8))
def test_what_runs_starts_again_from_its_tokens_at_any_step(steps: int, in_place: bool) -> None:
    """In each chunk of its prefill, and while it decodes; in place, too, where old KV may not be used."""
    scripted = Scripted(chunk_tokens=8)
    scripted.submit("a", PROMPT, max_new_tokens=8)
    scripted.steps(steps)
    said = len(scripted.ids("a"))
    scripted.update(V1, in_place=in_place)
    assert scripted.cache.stats().private == 0
    scripted.run()
    assert scripted.ids("a") == list(range(8))
    assert list(scripted.columns("a").versions) == [0] * said + [1] * (8 - said)
    preempted = [event for event in scripted.of(Preempted) if isinstance(event, Preempted)]
    assert [event.outdated for event in preempted] == [True] * (steps > 0)
    last = admitted(scripted, "a")[-1]
    had = len(PROMPT) + said - 1 if said else 8 * steps
    assert (last.cached_tokens, last.recomputed_tokens, last.written) == (0, had, ())
    assert_nothing_is_left(scripted)


@pytest.mark.parametrize("steps", range(8))
def test_what_runs_goes_on_in_place_at_any_step(steps: int) -> None:
    scripted = Scripted(chunk_tokens=8)
    key = scripted.submit("a", PROMPT)
    scripted.steps(steps)
    (sequence,) = scripted.engine._scheduler.sequences()
    old = sequence.computed
    scripted.update(V1, max_lag=1, in_place=True)
    scripted.steps(10)
    assert scripted.of(Preempted) == []
    assert len(admitted(scripted, "a")) == 1
    stopped = parked(scripted, "a")
    runs = tuple(run for run in (KVRun(WEIGHTS, old), KVRun(V1, stopped.kv_tokens - old)) if run.tokens)
    assert stopped.written == runs
    assert stopped.page_keys == names_of([*PROMPT, *scripted.ids("a")], runs)
    pure = old // PAGE_TOKENS if old else stopped.kv_tokens // PAGE_TOKENS
    assert scripted.cache.stats().tree == pure, "pages of several weights are nobody else's"
    scripted.engine.release(key)
    scripted.run()
    assert scripted.cache.stats().free == scripted.cache.total


def test_what_has_pages_but_no_kv_is_written_by_the_new_weights_for_others_to_find() -> None:
    """The second of two prompts got its pages, and no place in the first chunk."""
    scripted = Scripted(prefill_tokens=16)
    for name in "ab":
        scripted.submit(name, (ord(name), *PROMPT))
    scripted.step()
    assert [s.computed for s in scripted.engine._scheduler.running_sequences()] == [16, 0]
    scripted.update(V1, max_lag=1, in_place=True)
    scripted.steps(6)
    assert parked(scripted, "b").written == written(scripted.parked("b").kv_tokens, V1)
    trees = {name: sum(len(node.edge) for node in _below(root)) for name, root in scripted.cache._tree._roots.items()}
    assert {name: nbytes // 4 for name, nbytes in trees.items()} == {WEIGHTS.weights_id: 16, V1.weights_id: 32}


def _below(node: Node) -> list[Node]:
    return [each for child in node.children.values() for each in (child, *_below(child))]


def test_weights_that_were_replaced_twice_between_two_steps_wrote_nothing() -> None:
    scripted = Scripted()
    scripted.submit("a", PROMPT)
    scripted.steps(4)
    scripted.update(V1, max_lag=2, in_place=True)
    scripted.update(V2, max_lag=2, in_place=True)
    scripted.steps(3)
    assert [run.weights for run in parked(scripted, "a").written] == [WEIGHTS, V2]


@pytest.mark.parametrize(("max_lag", "goes_on"), [(1, False), (2, True)])
def test_a_third_load_goes_on_with_the_first_ones_kv_only_if_it_may(max_lag: int, goes_on: bool) -> None:
    scripted = Scripted()
    scripted.submit("a", PROMPT)
    scripted.steps(4)
    scripted.update(V1, max_lag=max_lag, in_place=True)
    scripted.steps(4)
    scripted.update(V2, max_lag=max_lag, in_place=True)
    scripted.steps(4)
    by = [run.weights for run in parked(scripted, "a").written]
    assert by == ([WEIGHTS, V1, V2] if goes_on else [V2])
    assert len(scripted.of(Preempted)) == (not goes_on)


def preempted_and_begun_again(scripted: Scripted) -> int:
    """A younger sequence lost its pages, all of which were used by the elder, and computed the first few anew."""
    scripted.submit("elder", (1, 2, 3), max_new_tokens=61)
    scripted.step()
    scripted.submit("young", tuple(range(200, 230)))
    while not scripted.of(Preempted, "young"):
        scripted.step()
    while len(admitted(scripted, "young")) < 2:
        scripted.step()
    (sequence,) = (s for s in scripted.engine._scheduler.sequences() if s.trajectory_id == "young")
    assert admitted(scripted, "young")[-1].cached_tokens == 0
    assert 0 < sequence.computed < 30
    return sequence.computed


def test_names_of_what_a_preempted_sequence_had_are_not_those_of_what_it_computes_in_place() -> None:
    scripted = Scripted(pages=16, chunk_tokens=8)
    old = preempted_and_begun_again(scripted)
    scripted.update(V1, max_lag=1, in_place=True)
    scripted.steps(8)
    stopped = parked(scripted, "young")
    runs = (KVRun(WEIGHTS, old), KVRun(V1, stopped.kv_tokens - old))
    assert stopped.written == runs
    assert stopped.page_keys == names_of([*range(200, 230), *scripted.ids("young")], runs)


# What is suspended


@pytest.mark.parametrize(("evicted", "rest"), [(0, 33), (1, 28), (3, 16), (8, 0)])
@pytest.mark.parametrize("keep", [Keep.DEVICE, Keep.HOST])
def test_what_is_left_of_an_image_of_older_weights_is_gone_on_with_and_the_rest_is_the_new_ones(
    keep: Keep, evicted: int, rest: int
) -> None:
    """33 positions in nodes of 4, 3 and 1 pages and a tail, of which so many pages are needed for something else."""
    scripted = Scripted(pages=12, host_pages=20, chunk_tokens=16)
    output = suspended(scripted, "a", keep, output=4)
    scripted.update(V1, max_lag=1)
    other = scripted.cache.open(TrajectoryId("x"), "other", b"", 0)
    free = scripted.cache.stats().free
    assert scripted.cache.grow(other, free + evicted if keep is Keep.DEVICE else 12)
    scripted.cache.close(other)
    scripted.submit("a", PROMPT, output=output, epoch=2, kv_tokens=33)
    scripted.steps(5)
    (last,) = admitted(scripted, "a")[1:]
    kept = 33 if keep is Keep.HOST else rest
    assert last.cached_tokens + last.loaded_tokens == kept
    assert last.recomputed_tokens == 33 - kept
    assert last.written == written(kept)
    stopped = parked(scripted, "a", epoch=2)
    assert stopped.written == (*written(kept), KVRun(V1, stopped.kv_tokens - kept))
    tokens = [*PROMPT, *output.ids, *scripted.ids("a")[len(output) :]]
    assert stopped.page_keys == names_of(tokens, stopped.written)


def test_with_nothing_left_of_its_image_a_sequence_uses_what_the_new_weights_left() -> None:
    scripted = Scripted(pages=24, chunk_tokens=16)
    output = suspended(scripted, "a", Keep.DEVICE, output=4)
    scripted.cache.make_room(24)
    scripted.update(V1, max_lag=1)
    scripted.submit("b", PROMPT, max_new_tokens=1)
    scripted.run()
    scripted.submit("a", PROMPT, output=output, epoch=2, kv_tokens=33, max_new_tokens=6)
    scripted.run()
    (last,) = admitted(scripted, "a")[1:]
    assert (last.cached_tokens, last.recomputed_tokens, last.written) == (28, 5, written(28, V1))
    assert scripted.cache.available == 24


@pytest.mark.parametrize("changed", [1, 4, 8, 13, 20])
@pytest.mark.parametrize("keep", [Keep.DEVICE, Keep.HOST])
def test_a_mixed_image_is_kept_with_all_its_pages_and_taken_up_whole(keep: Keep, changed: int) -> None:
    """The weights changed with so many positions computed."""
    scripted = Scripted(pages=20, host_pages=20, chunk_tokens=1)
    key = scripted.submit("a", PROMPT)
    scripted.steps(changed)
    scripted.update(V1, max_lag=1, in_place=True)
    while len(scripted.ids("a")) < 4:
        scripted.step()
    scripted.engine.abort(key)
    scripted.step()
    pure = changed // PAGE_TOKENS
    assert scripted.cache.stats().tree == pure
    scripted.engine.keep(key, keep)
    scripted.run()
    stats = scripted.engine.stats
    assert (stats.device if keep is Keep.DEVICE else stats.host).private == 9 - pure
    assert scripted.cache.available == 20
    scripted.submit("a", PROMPT, output=scripted.columns("a"), epoch=2)
    scripted.steps(6)
    (last,) = admitted(scripted, "a")[1:]
    assert (last.cached_tokens, last.loaded_tokens) == ((33, 0) if keep is Keep.DEVICE else (0, 33))
    assert (last.recomputed_tokens, last.written) == (0, (*written(changed), KVRun(V1, 33 - changed)))
    assert scripted.engine.stats.host.private == 0
    stopped = parked(scripted, "a", epoch=2)
    assert stopped.written == (*written(changed), KVRun(V1, stopped.kv_tokens - changed))
    scripted.engine.release((TrajectoryId("a"), 2))
    scripted.run()
    assert scripted.cache.stats().free == 20


def test_keeping_an_image_twice_frees_its_tail_once() -> None:
    scripted = Scripted(pages=20)
    suspended(scripted, "a", Keep.DEVICE, output=4)
    for _ in range(2):
        scripted.engine.keep((TrajectoryId("a"), 1), Keep.DEVICE)
        assert (scripted.cache.kept.spare, scripted.cache.available) == (1, 20)
    scripted.submit("b", PROMPT, max_new_tokens=40)
    scripted.run()
    assert scripted.ids("b") == list(range(40))


# What restores


@pytest.mark.parametrize("aborted", ["", "before", "after"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_what_is_being_restored_is_of_no_use_when_the_weights_are_replaced(
    begun: bool, in_place: bool, aborted: str
) -> None:
    scripted = Scripted()
    scripted.restorer.held, scripted.restorer.begun = True, begun
    key = scripted.submit("a", PROMPT, output=known(4), image=image(KVRun(WEIGHTS, 33)), max_new_tokens=8)
    scripted.step()
    (sequence,) = scripted.engine._scheduler.sequences()
    assert sequence.status is Status.RESTORING
    if aborted == "before":
        scripted.engine.abort(key)
    scripted.update(V1, in_place=in_place)
    if aborted == "after":
        scripted.engine.abort(key)
    scripted.steps(2)
    scripted.restorer.held = False
    scripted.run()
    assert all(event.written == () for event in admitted(scripted, "a"))
    if aborted:
        assert scripted.parked("a").kv_tokens == 0
        assert scripted.ids("a") == []
        scripted.engine.release(key)
        scripted.run()
    else:
        assert scripted.ids("a") == [4, 5, 6, 7]
        assert set(scripted.columns("a").versions) == {1}
        assert [event.recomputed_tokens for event in admitted(scripted, "a")] == [33]
    assert_nothing_is_left(scripted)


@pytest.mark.parametrize("runs", [(33,), (20, 13), (3, 30)])
def test_what_is_being_restored_may_be_gone_on_with_in_place(runs: tuple[int, ...]) -> None:
    scripted = Scripted()
    scripted.update(V1, max_lag=2)
    scripted.restorer.held = True
    by = tuple(KVRun(weights, tokens) for weights, tokens in zip((WEIGHTS, V1), runs, strict=False))
    scripted.submit("a", PROMPT, output=known(4), image=image(*by))
    scripted.step()
    scripted.update(V2, max_lag=2, in_place=True)
    scripted.restorer.held = False
    scripted.steps(6)
    (last,) = admitted(scripted, "a")
    assert (last.restored_tokens, last.recomputed_tokens, last.written) == (33, 0, by)
    stopped = parked(scripted, "a")
    assert stopped.written == (*by, KVRun(V2, stopped.kv_tokens - 33))
    assert scripted.cache.stats().tree == runs[0] // PAGE_TOKENS


@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_being_loaded_from_the_host_is_of_no_use_when_the_weights_are_replaced(in_place: bool) -> None:
    scripted = Scripted(pages=20, host_pages=20)
    output = suspended(scripted, "a", Keep.HOST, output=4)
    scripted.copier.held = True
    scripted.submit("a", PROMPT, output=output, epoch=2, kv_tokens=33, max_new_tokens=8)
    scripted.step()
    scripted.update(V1, in_place=in_place)
    scripted.engine.expire()
    scripted.steps(2)
    assert scripted.engine.stats.device.reserved > 0, "copies are under way"
    scripted.copier.held = False
    scripted.run()
    (last,) = admitted(scripted, "a")[1:]
    assert (last.cached_tokens, last.loaded_tokens, last.recomputed_tokens, last.written) == (0, 0, 33, ())
    assert scripted.ids("a") == list(range(8))
    assert_nothing_is_left(scripted)
    assert scripted.engine.stats.host.free == 20


@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize("keep", [Keep.DEVICE, Keep.HOST])
def test_what_waits_to_go_on_with_its_image_and_is_stopped_leaves_one_image_or_none(keep: Keep, max_lag: int) -> None:
    """The image that it came for is its own again, or if it is of no use any more forgotten."""
    scripted = Scripted(pages=20, host_pages=20)
    output = suspended(scripted, "a", keep, output=4)
    scripted.engine.pause()
    key = scripted.submit("a", PROMPT, output=output, epoch=2, kv_tokens=33)
    scripted.update(V1, max_lag=max_lag)
    scripted.engine.abort(key)
    scripted.run()
    assert scripted.parked("a").kv_tokens == 33 * max_lag
    assert scripted.engine.stats.parked == 1
    scripted.engine.release(key)
    scripted.run()
    scripted.engine.expire()
    assert scripted.engine.stats.parked == 0
    assert (scripted.engine.stats.device.free, scripted.engine.stats.host.free) == (20, 20)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_restore_that_fails_after_the_weights_were_replaced_leaves_nothing_of_its_history(in_place: bool) -> None:
    scripted = Scripted()
    scripted.restorer.held = True
    key = scripted.submit("a", PROMPT, output=known(4), image=image(KVRun(WEIGHTS, 33)))
    scripted.step()
    scripted.update(V1, max_lag=1, in_place=in_place)
    scripted.restorer.poll = lambda: [Restored(key=key, tokens=0, error=SegmentMissingError("gone"))]  # type: ignore
    scripted.step()
    scripted.restorer.poll = list  # type: ignore[method-assign]
    scripted.steps(6)
    assert [event.restored_tokens for event in admitted(scripted, "a")] == [0]
    stopped = parked(scripted, "a")
    assert stopped.written == written(stopped.kv_tokens, V1)
    tokens = [*PROMPT, *known(4).ids, *scripted.ids("a")]
    assert stopped.page_keys == names_of(tokens, stopped.written)


@pytest.mark.parametrize("held", ["copier", "restorer"])
def test_what_starts_again_keeps_its_turn(held: str) -> None:
    """Four run, of which two wait for copies that are over together; two more wait."""
    scripted = Scripted(pages=200, host_pages=100, max_running=4)
    outputs = {}
    if held == "copier":
        outputs = {name: suspended(scripted, name, Keep.HOST, output=4) for name in ("a", "c")}
    scripted.copier.held = scripted.restorer.held = True
    for name in "abcdef":
        prompt, output, pooled = tuple(range(ord(name), ord(name) + 30)), None, None
        if name in ("a", "c"):
            if held == "copier":
                prompt, output = PROMPT, outputs[name]
            else:
                output, pooled = known(4), image(KVRun(WEIGHTS, 33))
        scripted.submit(name, prompt, output=output, image=pooled, epoch=2, max_new_tokens=8)
    scripted.step()
    assert [s.status for s in scripted.engine._scheduler.running_sequences()].count(Status.RESTORING) == 2
    scripted.engine.pause()
    scripted.update(V1)
    scripted.copier.held = scripted.restorer.held = False
    while scripted.engine.copying:
        scripted.step()
    waiting = [sequence.trajectory_id for sequence in scripted.engine._scheduler.sequences()]
    assert waiting == [*"abcdef"]
    scripted.engine.unpause()
    scripted.run()
    assert all(scripted.ids(name)[-1] == 7 for name in "abcdef")
    assert_nothing_is_left(scripted)


# What is held while others are loaded


@pytest.mark.parametrize("weights", [V1, Weights(V1.weights_id, WEIGHTS.version)])
def test_old_pages_that_are_held_are_freed_when_they_are_not(weights: Weights) -> None:
    """An image that is being exported, one on the host and one on the device, and what a finished sequence left."""
    scripted = Scripted(pages=60, host_pages=60, write=WriteBack(kind="write_back"))
    suspended(scripted, "host", Keep.HOST, output=4)
    suspended(scripted, "device", Keep.DEVICE, output=4)
    key = scripted.submit("exported", PROMPT)
    scripted.steps(8)
    scripted.engine.abort(key)
    scripted.submit("over", tuple(range(300, 320)), max_new_tokens=3)
    scripted.run()
    refs, _ = scripted.engine.sources(key)
    scripted.update(weights)
    scripted.engine.expire()
    assert scripted.engine.sources(key)[0] == refs
    assert scripted.engine.stats.device.tree == scripted.parked("exported").kv_tokens // PAGE_TOKENS
    for name in ("host", "device", "exported"):
        scripted.engine.release((TrajectoryId(name), 1))
    scripted.run()
    assert_nothing_is_left(scripted)
    assert (scripted.engine.stats.device.free, scripted.engine.stats.host.free) == (60, 60)
