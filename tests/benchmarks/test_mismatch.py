"""`bench mismatch`: what is compared with what, and a whole run of a tiny model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.measure import MeasurementError
from benchmarks.mismatch import ALLOWED, Settings, check_case, count, forced_logprobs, reported, run, sampled_by
from rollout.errors import ModelNotFoundError
from rollout.types import FinishReason, GroupId, Resume, Trajectory, TrajectoryId, Version, VersionRun, WorkerId
from tests.tiny_models import make_tiny_llama


def trajectory(index: int, *, versions: tuple[int, ...] = (0, 0, 0), workers: str = "a", **fields: Any) -> Trajectory:
    return Trajectory(
        trajectory_id=TrajectoryId(f"{index}/0"),
        group_id=GroupId(str(index)),
        sample_index=0,
        seed=0,
        prompt_ids=(1, 2 + index),
        output_ids=(3, 1, index)[: len(versions)],
        logprobs=(-1.0, -2.0, -3.0)[: len(versions)],
        versions=tuple(VersionRun(version=Version(version), tokens=1) for version in versions),
        finish_reason=FinishReason.LENGTH,
        workers=tuple(WorkerId(worker) for worker in workers),
        **fields,
    )


def resumed(*, restored: int = 0, recomputed: int = 0) -> tuple[Resume, ...]:
    one = Resume(worker=WorkerId("b"), cached_tokens=0, restored_tokens=restored, recomputed_tokens=recomputed)
    return (one,)


def test_each_output_token_is_compared_with_what_comes_before_it() -> None:
    """The model's logits at a position depend on the token there only."""
    table = torch.randn((5, 5), generator=torch.Generator().manual_seed(0))
    asked: list[int] = []

    def model(input_ids: torch.Tensor) -> Any:
        asked.append(len(input_ids))
        return SimpleNamespace(logits=table[input_ids])

    done = [trajectory(0), trajectory(1), trajectory(2)]
    logprobs = table.log_softmax(-1)
    expected = [[logprobs[2 + index, 3].item(), logprobs[3, 1].item(), logprobs[1, index].item()] for index in range(3)]
    forced = forced_logprobs(model, done, 2)
    assert torch.allclose(forced, torch.tensor(expected))
    assert asked == [2, 1]
    assert reported(done).tolist() == [[-1.0, -2.0, -3.0]] * 3


def test_each_token_belongs_to_the_weights_that_sampled_it() -> None:
    done = [trajectory(0, versions=(0, 1, 1)), trajectory(1, versions=(0, 0, 1))]
    assert sampled_by(done, 1).tolist() == [[False, True, True], [False, False, True]]
    assert torch.equal(sampled_by(done, 0), ~sampled_by(done, 1))


def test_a_case_is_what_its_trajectories_lived_through() -> None:
    pool = [trajectory(0, workers="ab", suspensions=1, resumes=resumed(restored=2))]
    none = [trajectory(0, workers="aa", suspensions=1, resumes=resumed(recomputed=2))]
    assert count([*pool, *none]) == {
        "tokens": 6,
        "suspensions": 2,
        "resumed_elsewhere": 1,
        "restored_tokens": 2,
        "recomputed_tokens": 2,
    }
    check_case("straight", [trajectory(0)], 3)
    check_case("pool", pool, 3)
    check_case("none", none, 3)
    check_case("updated", [trajectory(0, versions=(0, 1, 1))], 3)
    check_case("after", [trajectory(0, versions=(1, 1, 1))], 3)


@pytest.mark.parametrize(
    ("case", "one"),
    [
        ("straight", trajectory(0, versions=(0, 0))),
        ("straight", trajectory(0, workers="aa", suspensions=1, resumes=resumed())),
        ("straight", trajectory(0, versions=(0, 1, 1))),
        ("pool", trajectory(0)),
        ("pool", trajectory(0, workers="aa", suspensions=1, resumes=resumed(restored=2))),
        ("pool", trajectory(0, workers="ab", suspensions=1, resumes=resumed(recomputed=2))),
        ("none", trajectory(0, workers="ab", suspensions=1, resumes=resumed())),
        ("none", trajectory(0, workers="ab", suspensions=1, resumes=resumed(restored=1, recomputed=1))),
        ("updated", trajectory(0)),
        ("after", trajectory(0, versions=(0, 1, 1))),
    ],
)
def test_one_that_lived_otherwise_is_refused(case: str, one: Trajectory) -> None:
    with pytest.raises(MeasurementError, match=case):
        check_case(case, [one], 3)


def test_without_the_model_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="make model"):
        run(Settings(model=tmp_path / "none"))


@pytest.mark.soak
def test_every_case_is_close_to_the_trainer_and_far_from_other_weights(ray_cluster: None, tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {
            "model": make_tiny_llama(tmp_path / "llama"),
            "trajectories": 6,
            "prompt_tokens": 20,
            "new_tokens": 800,
            "slice_tokens": 200,
            "pool_bytes": "16MiB",
            "kv_bytes": "16MiB",
            "forced_together": 4,
        }
    )
    results, ratios = run(settings)
    assert set(ratios) == {"fp32_mean_vs_allowed", "other_weights_vs_fp32", "other_weights_vs_bf16"}
    assert results["fp32_mean_abs_delta"] <= ALLOWED
    assert results["fp32_mean_abs_delta"] < results["bf16_mean_abs_delta"]
    assert ratios["other_weights_vs_fp32"] > 10
    for dtype, trainers in (("fp32", ["fp32"]), ("bf16", ["fp32", "bf16"])):
        assert set(results[dtype]) == {"straight", "pool", "none", "updated", "after"}
        for case in results[dtype].values():
            assert case["tokens"] == 6 * 800
            for trainer in trainers:
                figures = case[f"trainer_{trainer}"]
                assert 0 < figures["mean_abs_delta"] <= figures["max_abs_delta"]
        assert results[dtype]["pool"]["suspensions"] == 6 * 3
