"""Draws: the distribution, the truncated sets, ties, log-probabilities, and what a draw may depend on.

Shape letters: R rows, V vocabulary.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.engine.native_sampling import NativeSampler
from rollout.engine.sampling import Sampler, SamplingBatch, TorchSampler
from rollout.native.library import Kernels
from rollout.types import SamplingParams

CPU = torch.device("cpu")
PLAIN = SamplingParams()
Make = Callable[[int], Sampler]
chosen: ContextVar[Make] = ContextVar("chosen")


def torch_sampler(vocab_size: int) -> Sampler:
    return TorchSampler(vocab_size, CPU)


@pytest.fixture(scope="module", autouse=True, params=["torch", "native"])
def sampler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test of this file runs with each of them; only the native one needs a compiler."""
    if request.param == "torch":
        with _choose(torch_sampler):
            yield
        return
    kernels = Kernels(2)
    with _choose(lambda vocab_size: NativeSampler(vocab_size, kernels)):
        yield
    kernels.close()


@contextmanager
def _choose(make: Make) -> Iterator[None]:
    token = chosen.set(make)
    yield
    chosen.reset(token)


def draw(
    logits_RV: Tensor,
    params: SamplingParams | Sequence[SamplingParams] = PLAIN,
    *,
    seeds: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    banned: tuple[int, ...] = (),
    make: Make | None = None,
) -> tuple[Tensor, Tensor]:
    """One draw for each row; where nothing is said, row i draws position i of seed 1, with the chosen sampler."""
    rows = len(seeds or positions or logits_RV)
    batch = SamplingBatch(
        params=(params,) * rows if isinstance(params, SamplingParams) else tuple(params),
        seeds=tuple(seeds or [1] * rows),
        positions=tuple(positions or range(rows)),
        banned=(banned,) * rows,
    )
    return (make or chosen.get())(logits_RV.shape[1]).sample(logits_RV.clone(), batch)


def repeated(logits: Sequence[float] | Tensor, rows: int) -> Tensor:
    return torch.as_tensor(logits, dtype=torch.float32).expand(rows, -1)


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def chi_square(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    """Pearson's statistic in standard deviations from its mean; a few for a true distribution."""
    total = sum(counts)
    statistic = sum((c - total * p) ** 2 / (total * p) for c, p in zip(counts, probabilities, strict=True))
    freedom = len(counts) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def kept_by(logits: Sequence[float], top_k: int, top_p: float) -> dict[int, float]:
    """Plain-Python oracle: the ids that may be drawn and their probabilities."""
    best = max(logits)
    order = sorted((i for i in range(len(logits)) if logits[i] > -math.inf), key=lambda i: (-logits[i], i))
    order = order[: top_k or None]
    weights = [math.exp(logits[i] - best) for i in order]
    total = sum(weights)
    mass, count = 0.0, 0
    while count < len(order) and (count == 0 or mass < top_p * total):
        mass += weights[count]
        count += 1
    return {i: weights[n] / mass for n, i in enumerate(order[:count])}


# The distribution


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax_and_a_wrong_temperature_would_show(temperature: float) -> None:
    vocab, rows = 30, 6000
    logits_V = torch.linspace(-2.5, 2.5, vocab).mul(temperature)[
        torch.randperm(vocab, generator=torch.Generator().manual_seed(3))
    ]
    ids, _ = draw(repeated(logits_V, rows), SamplingParams(temperature=temperature))
    counts = torch.bincount(ids, minlength=vocab).tolist()
    assert chi_square(counts, (logits_V / temperature).softmax(0).tolist()) < 5
    for wrong in (0.85, 1.15):
        assert chi_square(counts, (logits_V / (temperature * wrong)).softmax(0).tolist()) > 5


@pytest.mark.parametrize("step", [(0, 1), (1, 0), (1, 1)], ids=["positions", "seeds", "both"])
def test_neighbouring_draws_are_independent(step: tuple[int, int]) -> None:
    vocab, rows = 6, 3600
    logits = repeated([0.0] * vocab, rows)
    first, _ = draw(logits, seeds=range(100, 100 + rows), positions=range(rows))
    second, _ = draw(logits, seeds=range(100 + step[0], 100 + step[0] + rows), positions=range(step[1], step[1] + rows))
    pairs = torch.bincount(first * vocab + second, minlength=vocab * vocab).tolist()
    assert chi_square(pairs, [1 / vocab**2] * vocab**2) < 5


def test_a_large_flat_vocabulary_is_drawn_from_evenly() -> None:
    vocab, rows, buckets = 6400, 2000, 64
    ids, _ = draw(repeated([0.0] * vocab, rows))
    for bucket_of in (ids // (vocab // buckets), ids % buckets):
        assert chi_square(torch.bincount(bucket_of, minlength=buckets).tolist(), [1 / buckets] * buckets) < 5
    assert len(set(ids.tolist())) > 0.75 * rows


def test_the_noise_is_the_one_that_images_were_made_with() -> None:
    """Trajectories resume under this noise; changing it would break those that were suspended before."""
    ids, _ = draw(repeated([0.0] * 1000, 6), seeds=[2**64 - 1] * 6, positions=[0, 1, 2, 3, 1000, 10**6])
    assert ids.tolist() == [893, 668, 818, 715, 505, 391]


# What a draw may depend on


def mixed_rows(vocab: int) -> tuple[Tensor, list[SamplingParams]]:
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=5),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(top_k=50, top_p=0.9),
        SamplingParams(),
    ]
    return random_logits(len(params), vocab), params


@pytest.mark.parametrize("vocab", [64, 1003, 40_007])
def test_a_row_depends_on_neither_its_place_nor_other_rows(vocab: int) -> None:
    logits, params = mixed_rows(vocab)
    seeds, positions = [5, 6, 7, 8, 9, 10, 11], [40, 3, 9, 12, 0, 77, 5]
    ids, logprobs = draw(logits, params, seeds=seeds, positions=positions)
    for order in ([6, 5, 4, 3, 2, 1, 0], [2, 0, 1], [3], [4, 4, 5]):
        other_ids, other_logprobs = draw(
            logits[order],
            [params[i] for i in order],
            seeds=[seeds[i] for i in order],
            positions=[positions[i] for i in order],
        )
        assert torch.equal(other_ids, ids[order])
        assert torch.equal(other_logprobs, logprobs[order])


def test_rows_past_the_batch_are_padding_and_the_logits_are_left_alone() -> None:
    logits = random_logits(5, 100)
    before = logits.clone()
    ids, logprobs = draw(logits, seeds=[1, 2, 3], positions=[4, 4, 4], banned=(0, 1))
    assert ids.shape == logprobs.shape == (3,)
    assert (ids.dtype, logprobs.dtype) == (torch.int64, torch.float32)
    assert torch.equal(logits, before)


def test_seed_and_position_both_change_the_draw() -> None:
    ids, _ = draw(repeated([0.0] * 10_000, 4), seeds=[1, 2, 1, 2], positions=[1, 1, 2, 2])
    assert len(set(ids.tolist())) == 4


# Truncation


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0, -math.inf]), min_size=1, max_size=12).filter(
        lambda values: max(values) > -math.inf
    ),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.003, 0.13, 0.47, 0.83, 0.997, 1.0]),
)
def test_draws_stay_in_the_truncated_set_with_its_probabilities(logits: list[float], top_k: int, top_p: float) -> None:
    kept = kept_by(logits, top_k, top_p)
    ids, logprobs = draw(repeated(logits, 12), SamplingParams(top_k=top_k, top_p=top_p))
    for token, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True):
        assert token in kept
        assert logprob == pytest.approx(math.log(kept[token]), abs=1e-5)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(top_k=3), {1, 3, 2}),
        (SamplingParams(top_k=4), {1, 3, 2, 4}),
        (SamplingParams(top_p=0.5), {1, 3}),
        (SamplingParams(top_p=0.7), {1, 3, 2}),
        (SamplingParams(top_k=4, top_p=0.65), {1, 3}),
        (SamplingParams(top_k=1), {1}),
        (SamplingParams(top_p=1e-9), {1}),
        (SamplingParams(temperature=0.25, top_p=0.93), {1, 3}),
        (SamplingParams(), {0, 1, 2, 3, 4, 5}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_ties_at_the_boundary_keep_the_lower_ids(params: SamplingParams, expected: set[int]) -> None:
    """Probabilities 0.06, 0.29, 0.14, 0.29, 0.14, 0.08 …: ids 1 and 3 tie, and so do 2 and 4."""
    logits = [-0.8, 0.8, 0.1, 0.8, 0.1, -0.5]
    ids, _ = draw(repeated(logits, 400), params)
    assert set(ids.tolist()) == expected


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 33])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (40, 1.0), (0, 0.9), (16, 0.97)])
def test_vocabularies_about_the_width_of_a_vector(vocab: int, top_k: int, top_p: float) -> None:
    """Logits rise with the id, so that the best ones lie in the last, partial vector."""
    logits = torch.linspace(-2, 2, vocab).tolist()
    kept = kept_by(logits, top_k, top_p)
    ids, logprobs = draw(repeated(logits, 300), SamplingParams(top_k=top_k, top_p=top_p))
    assert set(ids.tolist()) <= kept.keys()
    assert vocab - 1 in ids.tolist()
    expected = [math.log(kept[token]) for token in ids.tolist()]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-5)


def test_top_p_that_needs_most_of_a_large_vocabulary() -> None:
    vocab = 20_000
    ids, logprobs = draw(repeated([0.0] * vocab, 50), SamplingParams(top_p=0.50001))
    assert int(ids.max()) <= 10_000
    torch.testing.assert_close(logprobs, torch.full((50,), -math.log(10_001)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("vocab", [500, 5000, 20_000])
def test_top_p_over_many_distinct_logits(vocab: int) -> None:
    """Narrow, wider and full searches for the nucleus."""
    logits = random_logits(1, vocab)[0]
    for top_p in (0.3, 0.9, 0.9999):
        kept = kept_by(logits.tolist(), 0, top_p)
        ids, logprobs = draw(repeated(logits, 3), SamplingParams(top_p=top_p))
        for token, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True):
            assert logprob == pytest.approx(math.log(kept[token]), abs=1e-4)


# Greedy and banned


def test_greedy_takes_the_lowest_of_the_best_ids_whatever_the_seed() -> None:
    logits = repeated([0.0, 2.0, -1.0, 2.0, 2.0], 20)
    ids, logprobs = draw(logits, SamplingParams(temperature=0.0, top_k=1, top_p=0.1))
    assert set(ids.tolist()) == {1}
    torch.testing.assert_close(logprobs, logits.log_softmax(1)[:, 1])


def test_greedy_tells_apart_logits_whose_log_probabilities_round_to_one_value() -> None:
    logits = torch.full((1, 4000), 1.0)
    logits[0, 3000] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert draw(logits, SamplingParams(temperature=0.0))[0].tolist() == [3000]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_ids_are_never_drawn_and_have_no_mass(temperature: float) -> None:
    logits = repeated([9.0, 0.5, 8.0, 0.0], 50)
    ids, logprobs = draw(logits, SamplingParams(temperature=temperature), banned=(0, 2, 99))
    assert set(ids.tolist()) == ({1} if temperature == 0.0 else {1, 3})
    allowed = torch.tensor([-math.inf, 0.5, -math.inf, 0.0]).log_softmax(0)
    torch.testing.assert_close(logprobs, allowed[ids])


# Numbers


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.3, 5.0])
def test_log_probabilities_match_fp64(temperature: float) -> None:
    logits = random_logits(20, 3001)
    ids, logprobs = draw(logits, SamplingParams(temperature=temperature))
    expected = (logits.double() / temperature).log_softmax(1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-45),
        SamplingParams(temperature=1e-300),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.9),
        SamplingParams(temperature=0.01, top_k=3, top_p=0.5),
    ],
    ids=str,
)
def test_extreme_logits(params: SamplingParams) -> None:
    rows = [
        [1e4, -1e4, 0.0, -math.inf],
        [-math.inf, -math.inf, -1e4, -math.inf],
        [-3e38, -math.inf, 3e38, -3e38],
        [-math.inf, 1e-30, -1e4, -math.inf],
    ]
    ids, logprobs = draw(torch.tensor(rows), params)
    assert ids.tolist() == [0, 2, 2, 1]
    assert logprobs.tolist() == [0.0] * 4


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.9)], ids=str)
@pytest.mark.parametrize("place", [0, 7, 49])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("broken", ["nan", "-nan", "inf"])
def test_a_row_with_nan_gets_nan_and_spoils_no_other(
    params: SamplingParams, broken: str, dtype: torch.dtype, place: int
) -> None:
    logits = random_logits(3, 50).to(dtype)
    expected = draw(logits, params)
    logits[1, place] = float(broken)
    if broken == "-nan":
        bits = logits.view(torch.int32 if dtype == torch.float32 else torch.int16)
        bits[1, place] |= torch.iinfo(bits.dtype).min
        assert bits[1, place] < 0
    ids, logprobs = draw(logits, params)
    assert logprobs[1].isnan()
    assert 0 <= int(ids[1]) < 50
    for row in (0, 2):
        assert (ids[row], logprobs[row]) == (expected[0][row], expected[1][row])


def test_a_vocabulary_of_one() -> None:
    ids, logprobs = draw(torch.zeros(3, 1), SamplingParams(top_p=0.5))
    assert Counter(ids.tolist()) == {0: 3}
    assert logprobs.tolist() == [0.0] * 3


MANY = [
    PLAIN,
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.6),
    SamplingParams(top_k=40),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=1.4, top_k=1000, top_p=0.8),
]


@pytest.mark.parametrize("sampler", ["native"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 33, 3001])
@pytest.mark.parametrize("params", MANY)
def test_both_samplers_draw_the_same(params: SamplingParams, vocab: int, dtype: torch.dtype) -> None:
    logits_RV = random_logits(200, vocab).to(dtype)
    theirs_R, their_logprobs_R = draw(logits_RV, params, banned=(5, 3000), make=torch_sampler)
    ours_R, our_logprobs_R = draw(logits_RV, params, banned=(5, 3000))
    assert torch.equal(ours_R, theirs_R)
    torch.testing.assert_close(our_logprobs_R, their_logprobs_R, atol=1e-5, rtol=0)


@pytest.mark.parametrize("params", MANY)
def test_logits_in_bf16_are_drawn_from_as_their_values_are(params: SamplingParams) -> None:
    narrow_RV = random_logits(50, 3001).bfloat16()
    narrow, wide = draw(narrow_RV, params), draw(narrow_RV.float(), params)
    assert torch.equal(narrow[0], wide[0])
    assert torch.equal(narrow[1], wide[1])
