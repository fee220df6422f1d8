"""When a prefix on the host is computed again: by what this worker was seen to take."""

import math
from pathlib import Path

import pytest

from rollout.engine.rates import PROBE_EVERY, Rates
from rollout.kv.tiers import Tier
from rollout.types import SamplingParams
from tests.engine.test_parity import prompts
from tests.local_service import LocalService
from tests.tiny_models import make_tiny_llama

TOKEN_BYTES = 100


def measured(*, prefill_s: float, copy_s: float, wait_s: float) -> Rates:
    """Seconds of one token, one token, and of every load beside the copying."""
    rates = Rates(TOKEN_BYTES, None)
    for tokens in (512, 40):
        rates.prefilled([(0, tokens)], tokens * prefill_s)
        rates.copied(Tier.HOST, tokens * TOKEN_BYTES, tokens * copy_s)
        rates.loaded(tokens, wait_s + tokens * copy_s)
    return rates


def test_until_everything_was_measured_all_is_loaded_which_measures_it() -> None:
    rates = Rates(TOKEN_BYTES, None)
    assert rates.load_back_tokens == 0
    rates.prefilled([(0, 100)], 1.0)
    assert rates.load_back_tokens == 0
    rates.copied(Tier.HOST, 100 * TOKEN_BYTES, 0.001)
    assert rates.load_back_tokens == 0
    rates.loaded(100, 0.101)
    assert rates.load_back_tokens > 0


def test_the_threshold_is_where_both_take_as_long() -> None:
    prefill_s, copy_s, wait_s = 1e-3, 1e-5, 0.05
    threshold = measured(prefill_s=prefill_s, copy_s=copy_s, wait_s=wait_s).load_back_tokens
    assert threshold * prefill_s == pytest.approx(wait_s + threshold * copy_s)
    assert measured(prefill_s=prefill_s / 10, copy_s=copy_s, wait_s=wait_s).load_back_tokens > threshold
    assert measured(prefill_s=prefill_s, copy_s=copy_s, wait_s=wait_s / 10).load_back_tokens < threshold


def test_where_copying_is_slower_than_computing_nothing_is_loaded() -> None:
    assert measured(prefill_s=1e-5, copy_s=1e-4, wait_s=0.0).load_back_tokens == math.inf


def test_now_and_then_a_load_that_is_not_worth_it_is_made_and_measured_again() -> None:
    rates = measured(prefill_s=1e-5, copy_s=1e-4, wait_s=0.0)
    made = [rates.worth_loading(1000) for _ in range(4 * PROBE_EVERY)]
    assert made.count(True) == 4
    for _ in range(50):
        rates.copied(Tier.HOST, 100 * TOKEN_BYTES, 100 * 1e-7)
        rates.loaded(100, 1e-6)
    assert rates.load_back_tokens < 1000
    assert all(rates.worth_loading(1000) for _ in range(10))


def test_what_is_configured_is_not_measured() -> None:
    rates = Rates(TOKEN_BYTES, 17)
    rates.prefilled([(0, 100)], 1.0)
    rates.copied(Tier.HOST, 100 * TOKEN_BYTES, 0.001)
    rates.loaded(100, 5.0)
    assert rates.load_back_tokens == 17


@pytest.mark.parametrize(("least", "loaded"), [(64, 64), (65, 0), (None, 64)])
def test_a_prefix_on_the_host_that_is_shorter_is_computed_again(tmp_path: Path, least: int | None, loaded: int) -> None:
    """With nothing configured the first load is always made; the engine's own measurements then take over."""
    page_bytes = 16 * 512
    host = {"bytes": 64 * page_bytes, "write": {"kind": "write_through"}, "load_back_tokens": least}
    service = LocalService(make_tiny_llama(tmp_path), workers=1, host=host, kv_bytes=11 * page_bytes)
    engine = service.workers[next(iter(service.workers))].engine
    params = SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)
    first, *others = prompts(4, lengths=(65,))
    for turn, prompt in enumerate((first, *others, first)):
        service.submit(f"p{turn}", prompt, params)
        before = service.core.counters.loaded_tokens
        prefilled = engine.stats.prefilled_tokens
        service.run(1)
    assert service.core.counters.loaded_tokens - before == loaded
    assert engine.stats.prefilled_tokens - prefilled == (65 - loaded if not loaded else 0)
    assert least is None or engine.stats.load_back_tokens == least
    service.close()
