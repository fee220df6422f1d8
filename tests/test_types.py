"""Values that must not lie: aligned columns, seeds, run lengths, ranges."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import InvalidSamplingError
from rollout.types import (
    Columns,
    FinishReason,
    GroupId,
    SamplingParams,
    Trajectory,
    TrajectoryId,
    Version,
    VersionRun,
    trajectory_seed,
    version_runs,
)

V0, V1 = Version(0), Version(1)


def test_columns_grow_together() -> None:
    columns = Columns([1], [-0.5], [V0])
    columns.append(2, -1.5, V1)
    columns.extend(Columns([3], [-2.5], [V1]))
    assert columns == Columns([1, 2, 3], [-0.5, -1.5, -2.5], [V0, V1, V1])
    assert len(columns) == 3


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions"), [([1], [], [V0]), ([], [-0.5], []), ([1, 2], [-0.5, -0.5], [V0]), ([], [], [V0])]
)
def test_columns_refuse_to_be_misaligned(ids: list[int], logprobs: list[float], versions: list[Version]) -> None:
    with pytest.raises(ValueError, match=f"{len(ids)} ids, {len(logprobs)} logprobs, {len(versions)} versions"):
        Columns(ids, logprobs, versions)


def test_columns_copy_what_they_are_given_and_what_they_hand_out() -> None:
    ids = [1, 2]
    columns = Columns(ids, [-0.5, -0.5], [V0, V0])
    ids.append(3)
    tail = columns.since(1)
    tail.append(4, -0.5, V1)
    assert columns == Columns([1, 2], [-0.5, -0.5], [V0, V0])
    assert tail == Columns([2, 4], [-0.5, -0.5], [V0, V1])


@pytest.mark.parametrize(("outputs", "logprobs", "tokens"), [(2, 1, 2), (2, 2, 1), (1, 2, 2), (0, 0, 1)])
def test_a_trajectory_refuses_misaligned_columns(outputs: int, logprobs: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="g/0: unequal columns"):
        Trajectory(
            trajectory_id=TrajectoryId("g/0"),
            group_id=GroupId("g"),
            sample_index=0,
            seed=0,
            prompt_ids=(1,),
            output_ids=(1,) * outputs,
            logprobs=(-0.5,) * logprobs,
            versions=(VersionRun(version=V0, tokens=tokens),),
            finish_reason=FinishReason.LENGTH,
        )


@given(st.lists(st.integers(0, 3).map(Version)))
def test_version_runs_say_the_column_in_the_fewest_runs(versions: list[Version]) -> None:
    runs = version_runs(versions)
    assert [run.version for run in runs for _ in range(run.tokens)] == versions
    assert all(left.version != right.version for left, right in pairwise(runs))
    assert all(run.tokens > 0 for run in runs)


def test_seeds_differ_by_key_sample_run_and_source() -> None:
    seeds = {
        trajectory_seed(request_seed=request, run_seed=run, key=key, sample_index=sample)
        for request in (None, 0, 1)
        for run in (0, 1)
        for key in ("0", "1", "10", "")
        for sample in range(12)
    }
    # A request's own seed replaces run seed and key: 2 request seeds + 2 runs x 4 keys, 12 samples each.
    assert len(seeds) == (2 + 2 * 4) * 12
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert any(seed >= 2**63 for seed in seeds)


def test_a_seed_is_the_same_in_every_process() -> None:
    assert trajectory_seed(request_seed=None, run_seed=0, key="0", sample_index=0) == 625333647910527364
    assert trajectory_seed(request_seed=7, run_seed=0, key="0", sample_index=3) == 16306085851252707378


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("max_new_tokens", -1),
        ("min_new_tokens", 129),
        ("stop_token_ids", (3, -1)),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_sampling_parameters_outside_their_range_are_named(name: str, value: object) -> None:
    with pytest.raises(InvalidSamplingError, match=f"^{name}: got .*allowed"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 50.0},
        {"top_k": True},
        {"max_new_tokens": 1.5},
        {"min_new_tokens": 0.5},
        {"temperature": "1"},
        {"top_p": None},
        {"stop_token_ids": [1]},
        {"stop_token_ids": (1.5,)},
        {"stop_token_ids": ("a",)},
        {"ignore_eos": "no"},
        {"seed": 1.5},
    ],
    ids=repr,
)
def test_a_sampling_parameter_of_the_wrong_kind_is_refused(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(InvalidSamplingError, match=f"{name}: got "):
        SamplingParams(**fields)
