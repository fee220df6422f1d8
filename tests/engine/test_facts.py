"""What an engine tells of itself: the room it has, and the paces that its parts really have."""

import pytest

from rollout.config import WriteThrough
from rollout.control.messages import Admitted, WorkerFacts
from rollout.control.paces import Pace
from rollout.engine.rates import Rates
from rollout.kv.tiers import Tier
from rollout.types import Columns, Image, Keep, NodeId, SegmentId, SegmentRun, Version
from tests.engine.scripted import PAGE_TOKENS, TOKEN_BYTES, Scripted
from tests.weights import written

PREFILL_S = (1e-3, 2e-3)
"""Of a token: before position 64, and from there on."""
STEP = Pace(fixed_s=5e-3, unit_s=1e-4)
SAVE = Pace(fixed_s=1e-3, unit_s=1e-6)


def test_nothing_is_told_that_was_not_seen() -> None:
    scripted = Scripted(pages=100, host_pages=50)
    assert scripted.engine.facts() == WorkerFacts(
        free_tokens=100 * PAGE_TOKENS,
        host_free_tokens=50 * PAGE_TOKENS,
        token_bytes=TOKEN_BYTES,
    )


def test_room_counts_what_can_be_evicted_and_not_what_is_in_use_or_kept_on_the_host() -> None:
    scripted = Scripted(pages=100, host_pages=50)
    key = scripted.submit("a", range(8 * PAGE_TOKENS))
    scripted.steps(3)
    assert scripted.engine.facts().free_tokens == (100 - 9) * PAGE_TOKENS
    scripted.engine.abort(key)
    scripted.run()
    assert scripted.engine.facts().free_tokens == (100 - 9) * PAGE_TOKENS
    scripted.engine.keep(key, Keep.HOST)
    scripted.run()
    facts = scripted.engine.facts()
    assert facts.free_tokens == 100 * PAGE_TOKENS
    assert facts.host_free_tokens == (50 - 9) * PAGE_TOKENS


def seconds_of_prefill(start: int, end: int) -> float:
    return sum(PREFILL_S[position >= 64] for position in range(start, end))


def test_prefill_is_told_by_position_and_decode_steps_apart_from_it() -> None:
    """Prompts come while others decode: no step's pace has their prefill in it."""
    scripted = Scripted(chunk_tokens=16, max_running=64)
    scripted.runner.prefill_time = lambda plan: sum(seconds_of_prefill(c.start, c.end) for c in plan.prefill)
    scripted.runner.decode_time = lambda plan: STEP.seconds(len(plan.decode))
    for index in range(20):
        scripted.submit(f"{index}", (index, *range(100 + index)), max_new_tokens=100)
        scripted.steps(1 + index)
    facts = scripted.engine.facts()
    assert facts.step is not None
    assert facts.step.fixed_s == pytest.approx(STEP.fixed_s)
    assert facts.step.unit_s == pytest.approx(STEP.unit_s)
    assert len(facts.prefill.token_s) == 7  # positions up to 127
    assert facts.prefill.token_s[:6] == pytest.approx(
        [PREFILL_S[0]] * 6, rel=0.3
    )  # several chunks in a step are told as one
    assert facts.prefill.token_s[6] == pytest.approx(PREFILL_S[1], rel=0.3)


def test_one_chunk_at_a_time_is_told_exactly() -> None:
    scripted = Scripted(chunk_tokens=16, max_running=1)
    scripted.runner.prefill_time = lambda plan: sum(seconds_of_prefill(c.start, c.end) for c in plan.prefill)
    scripted.submit("a", range(200), max_new_tokens=1)
    scripted.run()
    assert scripted.engine.facts().prefill.token_s == pytest.approx([PREFILL_S[0]] * 6 + [PREFILL_S[1]] * 2)


def test_a_chunk_touches_only_the_positions_that_are_in_it() -> None:
    rates = Rates(TOKEN_BYTES, None)
    rates.prefilled([(4, 8), (40, 64)], 28.0)
    rates.prefilled([(0, 1)], 3.0)
    assert rates.paces.prefill.token_s == (3.0, None, 1.0, None, None, 1.0)


def test_saves_are_told_by_bytes() -> None:
    scripted = Scripted(host_pages=500, write=WriteThrough(kind="write_through"))
    scripted.copier.seconds = SAVE.seconds
    for pages in (3, 11, 30):
        scripted.submit(f"{pages}", (pages, *range(pages * PAGE_TOKENS)), max_new_tokens=2)
        scripted.run()
    save = scripted.engine.facts().save
    assert save is not None
    assert (save.fixed_s, save.unit_s) == pytest.approx((SAVE.fixed_s, SAVE.unit_s))
    assert scripted.engine.facts().load is None


@pytest.mark.parametrize("source", ["pool", "host"])
def test_restores_and_loads_take_from_admission_until_it_can_run(source: str) -> None:
    """Time passes in the queue, too, which does not count, and between the copy's end and the step, which does."""
    pace = Pace(fixed_s=0.5, unit_s=1e-3)
    scripted = Scripted(host_pages=500, max_running=1)
    for index, pages in enumerate((4, 9, 20)):
        name, prompt = f"{index}", (index, *range(pages * PAGE_TOKENS - 1))
        made = None
        if source == "host":
            key = scripted.submit(name, prompt)
            scripted.step()
            while len(scripted.ids(name)) < 1:
                scripted.step()
            scripted.engine.abort(key)
            scripted.engine.keep(key, Keep.HOST)
            scripted.run()
        else:
            made = image(len(prompt))
        scripted.copier.held = scripted.restorer.held = True
        output = Columns([0], [0.0], [Version(0)])
        scripted.submit(name, prompt, output=output, image=made, epoch=2, max_new_tokens=3)
        scripted.now += 7.0
        scripted.step()
        scripted.now += pace.seconds(len(prompt) * TOKEN_BYTES)
        scripted.copier.held = scripted.restorer.held = False
        scripted.run()
        admitted = scripted.of(Admitted, name)[-1]
        assert isinstance(admitted, Admitted)
        moved = admitted.loaded_tokens if source == "host" else admitted.restored_tokens
        assert moved == len(prompt)
    facts = scripted.engine.facts()
    measured = facts.load if source == "host" else facts.restore
    assert measured is not None
    assert (measured.fixed_s, measured.unit_s) == pytest.approx((pace.fixed_s, pace.unit_s))
    assert (facts.restore if source == "host" else facts.load) is None


def image(tokens: int) -> Image:
    run = SegmentRun(node=NodeId("n"), segment=SegmentId("s"), first=0, pages=-(-tokens // PAGE_TOKENS))
    return Image(runs=(run,), kv_tokens=tokens, written=written(tokens))


def restored(scripted: Scripted, prompt: range, seconds: float) -> Admitted:
    """A sequence whose image has the whole prompt, and for which it takes so long to be there."""
    scripted.copier.held = scripted.restorer.held = True
    output = Columns([0], [0.0], [Version(0)])
    scripted.submit("b", prompt, output=output, image=image(len(prompt)), max_new_tokens=3)
    scripted.step()
    scripted.now += seconds
    scripted.copier.held = scripted.restorer.held = False
    scripted.run()
    (admitted,) = scripted.of(Admitted, "b")
    assert isinstance(admitted, Admitted)
    return admitted


def test_of_an_image_only_what_is_read_counts() -> None:
    scripted = Scripted()
    scripted.submit("a", range(8 * PAGE_TOKENS), max_new_tokens=1)
    scripted.run()
    admitted = restored(scripted, range(12 * PAGE_TOKENS), 16 * TOKEN_BYTES * 0.5)
    assert (admitted.cached_tokens, admitted.restored_tokens) == (32, 16)
    assert scripted.engine.facts().restore == Pace(fixed_s=16 * TOKEN_BYTES * 0.5, unit_s=0.0)


def test_what_is_both_loaded_and_read_tells_nothing_of_either() -> None:
    scripted = Scripted(host_pages=500, write=WriteThrough(kind="write_through"))
    scripted.submit("a", range(8 * PAGE_TOKENS), max_new_tokens=1)
    scripted.run()
    assert scripted.cache.make_room(scripted.cache.total)
    admitted = restored(scripted, range(12 * PAGE_TOKENS), 1.0)
    assert (admitted.loaded_tokens, admitted.restored_tokens) == (32, 16)
    facts = scripted.engine.facts()
    assert (facts.restore, facts.load) == (None, None)


def test_copies_to_the_device_are_no_saves() -> None:
    rates = Rates(TOKEN_BYTES, None)
    rates.copied(Tier.DEVICE, 1000, 1.0)
    assert rates.paces.save is None
    rates.copied(Tier.HOST, 1000, 2.0)
    assert rates.paces.save == Pace(fixed_s=2.0, unit_s=0.0)
