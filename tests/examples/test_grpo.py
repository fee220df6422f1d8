"""`examples/grpo.py` from end to end: what a run trains on, writes and goes on from."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import yaml
from transformers import AutoModelForCausalLM

from rollout.client import Rollout
from rollout.errors import ConfigError
from rollout.model.spec import read_spec
from rollout.types import SamplingParams, Trajectory
from tests.examples.scene import (
    PROMPTS,
    SAMPLES,
    Killed,
    assert_sound,
    checkpoint,
    fields,
    metrics,
    sampled_by,
    service_config,
    stale_spans,
    stored,
    train,
    under_way,
)

STEPS = 4
NAMES = {
    "rollout/response_len/mean",
    "rollout/truncated_ratio",
    "rollout/reward/mean",
    "partial/partial_ratio",
    "async/staleness_mean",
    "perf/tokens_per_s",
    "perf/rollout_time",
    "perf/train_time",
    "perf/update_weights_time",
    "perf/step_time",
    "train/loss",
    "train/grad_norm",
    "mismatch/ratio_mean",
    "mismatch/max_abs_log_ratio",
}
SAME = (
    "async/",
    "partial/max",
    "rollout/reward/",
    "rollout/response_len/",
    "rollout/tokens",
    "rollout/trajectories",
    "rollout/truncated_ratio",
)


@pytest.fixture(scope="module")
def whole(
    service: Rollout, grpo: ModuleType, session: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Where a run of all steps was, and a copy of what was there when it had written the checkpoint of step 2."""
    out = tmp_path_factory.mktemp("whole")
    return out / "run", run_with_copy(service, grpo, session, out, partial=False)


@pytest.fixture(scope="module")
def partial(
    service: Rollout, grpo: ModuleType, session: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The same `--partial`, of prompts where something is half done then: when a step has enough depends on time."""
    for terms in range(2, 8):
        out = tmp_path_factory.mktemp("partial")
        options = {"min_terms": terms, "max_terms": terms}
        copy = run_with_copy(service, grpo, session, out, partial=True, options=options)
        if any(each["output_ids"] and not each["finish_reason"] for each in under_way(checkpoint(copy)).values()):
            return out / "run", copy
    pytest.fail("six runs left nothing half done")


def run_with_copy(service: Rollout, grpo: ModuleType, session: ModuleType, out: Path, **values: Any) -> Path:
    save = session.save

    def save_and_copy(state: Any, path: Path) -> None:
        save(state, path)
        if state["step"] == 2:
            shutil.copytree(path.parent, out / "copy")

    settings = settings_of(grpo, service, out / "run", **values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "save", save_and_copy)
        curves = train(patch, service, grpo, settings, run=grpo.Run)
    assert curves.read_bytes().startswith(b"\x89PNG")
    assert curves == out / "run" / "curves.png"
    return out / "copy"


def settings_of(grpo: ModuleType, service: Rollout, out: Path, **values: Any) -> Any:
    return grpo.Settings.model_validate(fields(service.config, out, steps=STEPS, checkpoint_every=2, **values))


def test_without_partial_a_step_trains_on_its_own_prompts_and_weights_only(whole: tuple[Path, Path]) -> None:
    """E6: nothing of an earlier step is in it."""
    out, _ = whole
    assert_sound(out, steps=STEPS)
    for row in stored(out):
        assert set(sampled_by(row.trajectory)) == {row.version}
        assert int(row.trajectory.group_id) // PROMPTS == row.version
        assert not stale_spans(row.trajectory)
        assert not sum(each.recomputed_tokens for each in row.trajectory.resumes)
    assert checkpoint(out)["run"]["under_way"] == 0
    for line in metrics(out):
        assert line["async/staleness_max"] == 0
        assert line["partial/max_partial_span"] == 0
        assert line["train/stale_tokens"] == 0
    assert any(row.trajectory.suspensions for row in stored(out))


@pytest.mark.parametrize("kind", ["whole", "partial"])
def test_metrics_have_the_names_of_the_field(kind: str, request: pytest.FixtureRequest) -> None:
    out, _ = request.getfixturevalue(kind)
    for line in metrics(out):
        assert line.keys() >= NAMES
        assert all(value is not None and math.isfinite(value) for value in line.values())
        assert line["rollout/trajectories"] == PROMPTS * SAMPLES
        assert line["train/grad_norm"] > 0
    assert any("rollout/useful_reload_ratio" in line for line in metrics(out))


@pytest.mark.parametrize("kind", ["whole", "partial"])
def test_the_trainer_gives_tokens_of_the_live_weights_the_probability_they_were_sampled_with(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """In fp32, although they were suspended into the pool after every slice."""
    out, _ = request.getfixturevalue(kind)
    assert sum(line["rollout/suspensions"] for line in metrics(out)) > STEPS
    assert sum(line["rollout/restored_tokens"] for line in metrics(out)) > 0
    for line in metrics(out):
        assert line["mismatch/ratio_mean"] == pytest.approx(1, abs=1e-4)
        assert line["mismatch/max_abs_log_ratio"] < 1e-3


def test_what_a_step_left_goes_on_in_the_next_with_its_kv_computed_again(partial: tuple[Path, Path]) -> None:
    """D2."""
    out, _ = partial
    assert_sound(out, steps=STEPS)
    several = [row.trajectory for row in stored(out) if len(set(sampled_by(row.trajectory))) > 1]
    assert several
    for one in several:
        assert sampled_by(one) == sorted(sampled_by(one))
        assert sum(each.recomputed_tokens > 0 for each in one.resumes) >= len(one.versions) - 1
    assert not any(stale_spans(row.trajectory) for row in stored(out))
    assert any(line["partial/max_partial_span"] > 0 for line in metrics(out))
    assert any(line["async/staleness_mean"] > 0 for line in metrics(out))


def test_with_stale_kv_what_a_step_left_goes_on_with_its_kv(
    reusing: Rollout, grpo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """D2, the other half: only when asked, and the result says so."""
    several: list[Trajectory] = []
    for terms in range(2, 8):
        out = tmp_path / str(terms)
        options = {"min_terms": terms, "max_terms": terms}
        train(monkeypatch, reusing, grpo, settings_of(grpo, reusing, out, partial=True, options=options), run=grpo.Run)
        assert_sound(out, steps=STEPS)
        several = [row.trajectory for row in stored(out) if len(set(sampled_by(row.trajectory))) > 1]
        if several:
            break
    assert several
    for one in several:
        assert stale_spans(one)
        assert any(each.restored_tokens + each.cached_tokens for each in one.resumes)
    assert not any(each.recomputed_tokens for one in several for each in one.resumes)


def test_a_resumed_run_is_the_uninterrupted_one(
    whole: tuple[Path, Path], service: Rollout, grpo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, copy = whole
    train(monkeypatch, service, grpo, settings_of(grpo, service, copy), run=grpo.Run, resume=True)
    assert_sound(copy, steps=STEPS)
    for mine, theirs in zip(metrics(copy), metrics(out), strict=True):
        for name in theirs:
            if name.startswith(SAME):
                assert mine[name] == theirs[name], name
        assert mine["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-4)
        assert mine["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-3)
    tokens = [{row.trajectory.trajectory_id: row.trajectory.output_ids for row in stored(each)} for each in (out, copy)]
    assert tokens[0] == tokens[1]


def test_partial_trajectories_come_back_with_their_tokens(
    partial: tuple[Path, Path], service: Rollout, grpo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, copy = partial
    state = checkpoint(copy)
    assert state["step"] == 2
    options = json.loads((copy / "settings.json").read_text())["options"]
    settings = settings_of(grpo, service, copy, partial=True, options=options)
    train(monkeypatch, service, grpo, settings, run=grpo.Run, resume=True)
    assert_sound(copy, steps=STEPS)
    left = {name: each for name, each in under_way(state).items() if each["output_ids"]}
    seen = {row.trajectory.trajectory_id: row.trajectory for row in stored(copy)}
    assert left.keys() & seen.keys()
    for name in left.keys() & seen.keys():
        was, one = left[name], seen[name]
        count = len(was["output_ids"])
        assert list(one.output_ids[:count]) == list(was["output_ids"])
        assert list(one.logprobs[:count]) == list(was["logprobs"])
        versions = [run["version"] for run in was["versions"] for _ in range(run["tokens"])]
        assert sampled_by(one)[:count] == versions


@pytest.mark.parametrize("point", ["collect", "update", "append", "log", "save"])
def test_a_run_that_was_stopped_anywhere_in_a_step_goes_on(
    point: str,
    partial: tuple[Path, Path],
    service: Rollout,
    grpo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """E7. Steps 0 and 1 are in the checkpoint, 2 is not, and 3 ends in its middle."""

    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    class Ending(grpo.Run):
        def step(self, step: int) -> dict[str, float]:
            if step < 3:
                return super().step(step)
            match point:
                case "collect":
                    monkeypatch.setattr(self, "reward", kill)
                case "update":
                    monkeypatch.setattr(self.service, "update_weights", kill)
                case "append":
                    monkeypatch.setattr(self.store, "append", kill)
                case "log":
                    super().step(step)
                    kill()
                case "save":
                    monkeypatch.setattr(torch, "save", torn)
            return super().step(step)

    def torn(_: object, path: Path) -> None:
        path.write_bytes(b"PK")
        raise Killed

    settings = settings_of(grpo, service, tmp_path, partial=True)
    with pytest.raises(Killed):
        train(monkeypatch, service, grpo, settings, run=Ending)
    monkeypatch.undo()
    assert checkpoint(tmp_path)["step"] == 2
    train(monkeypatch, service, grpo, settings, run=grpo.Run, resume=True)
    assert_sound(tmp_path, steps=STEPS)


ENDING = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import grpo, session

class Ending(grpo.Run):
    def step(self, step):
        if step == 1:
            self.store.append = self.end
        return super().step(step)

    def end(self, *rows, **how):
        os.kill(os.getpid(), int(sys.argv[3]))
        return type(self.store).append(self.store, *rows, **how)

sys.exit(session.main(grpo.Settings, Path(sys.argv[2]), trainer=grpo.Trainer, run=Ending, words=sys.argv[4:]))
"""


@pytest.mark.parametrize(("number", "code", "done"), [(signal.SIGKILL, -9, 1), (signal.SIGTERM, 130, 2)])
def test_a_process_that_a_signal_ended_can_be_followed_by_one_that_resumes(
    number: int,
    code: int,
    done: int,
    service: Rollout,
    model: Path,
    grpo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """In the middle of a step, from the command line. SIGTERM, and likewise Ctrl-C, waits for the step to end."""
    config = service_config(model, "ending", workers=1)
    config["model"]["path"] = str(model)
    written = fields(config, str(tmp_path / "out"), steps=1, checkpoint_every=1 if number == signal.SIGKILL else 9)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(written))
    (tmp_path / "ending.py").write_text(ENDING)
    words = [Path(grpo.__file__).parent, tmp_path / "run.yaml", str(int(number)), "--partial", "--steps", "3"]
    ended = subprocess.run(
        [sys.executable, tmp_path / "ending.py", *words],
        env=os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == code, ended.stderr[-2000:]
    out = tmp_path / "out"
    state = checkpoint(out)
    assert state["step"] == done
    assert any(each["output_ids"] for each in under_way(state).values())
    if number == signal.SIGTERM:
        left = AutoModelForCausalLM.from_pretrained(out / "model")
        assert all(
            torch.equal(value, state["run"]["trainer"]["model"][name]) for name, value in left.state_dict().items()
        )
        assert read_spec(out / "model").vocab_size == left.config.vocab_size
    settings = settings_of(grpo, service, out, partial=True).model_copy(update={"steps": 3})
    train(monkeypatch, service, grpo, settings, run=grpo.Run, resume=True)
    assert_sound(out, steps=3)


def test_there_is_nothing_to_go_on_from(grpo: ModuleType, session: ModuleType, model: Path, tmp_path: Path) -> None:
    settings = grpo.Settings.model_validate(fields(service_config(model, "none", workers=1), tmp_path))
    with pytest.raises(ConfigError, match=r"checkpoint\.pt: there is no checkpoint"):
        session.train(settings, trainer=grpo.Trainer, run=grpo.Run, resume=True)


def test_a_run_from_the_beginning_forgets_the_checkpoint_of_another(
    service: Rollout, grpo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If it ends before its first own one, nothing goes on from there."""
    (tmp_path / "checkpoint.pt").write_bytes(b"of another run")

    class Ending(grpo.Run):
        def collect(self) -> Any:
            raise Killed

    settings = settings_of(grpo, service, tmp_path)
    with pytest.raises(Killed):
        train(monkeypatch, service, grpo, settings, run=Ending)
    with pytest.raises(ConfigError, match="no checkpoint"):
        train(monkeypatch, service, grpo, settings, run=grpo.Run, resume=True)


def test_a_run_is_not_overwritten_unaware(
    grpo: ModuleType, session: ModuleType, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = service_config(model, "none", workers=1)
    config["model"]["path"] = str(model)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(fields(config, str(tmp_path))))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    assert session.main(grpo.Settings, tmp_path / "run.yaml", trainer=grpo.Trainer, run=grpo.Run, words=[]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n'


def test_a_checkpoint_of_another_task_is_refused(
    whole: tuple[Path, Path], service: Rollout, grpo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = whole
    other = settings_of(grpo, service, out, options={"min_terms": 3}).model_copy(update={"steps": STEPS + 1})
    before = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"other prompts: min_terms: None, and now 3$"):
        train(monkeypatch, service, grpo, other, run=grpo.Run, resume=True)
    assert (out / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}, {"min_new_tokens": 1}],
    ids=lambda each: next(iter(each)),
)
def test_sampling_that_the_trainer_cannot_compute_with_is_refused(
    grpo: ModuleType, model: Path, tmp_path: Path, sampling: dict[str, Any]
) -> None:
    settings = grpo.Settings.model_validate(fields(service_config(model, "none", workers=1), tmp_path))
    service = SimpleNamespace(sampling=SamplingParams(**sampling))
    with pytest.raises(ConfigError, match=rf"rollout\.sampling: got .*{next(iter(sampling))}"):
        grpo.Run(settings, service, grpo.Trainer(settings))
