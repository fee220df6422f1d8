"""How far log-probabilities of rollouts are from those that a trainer computes for the same tokens.

The trainer is Hugging Face's `LlamaForCausalLM` in this process, teacher-forced over prompt and output at once.
Rollouts are sampled at temperature 1 without truncation, so that what workers report is the plain log-probability;
prompts are random ids, and seeds follow from keys. Cases:

- `straight`: without suspensions.
- `pool`: stopped every `slice_tokens` tokens, all KV to the pool, and resumed on another worker where that has room.
- `none`: stopped likewise, and nothing is kept: what is not in a worker's prefix tree is computed again.
- `updated`: after a quarter of the tokens the trainer pushes perturbed weights (`update_weights`, object store, mode
  recompute); each token is compared with the trainer that has the weights of which it has the version.
- `after`: fresh ones on the perturbed weights.

`fp32`: workers and trainer in float32. `bf16`: workers in bfloat16 against two trainers: in float32, of the weights
rounded to bfloat16 (`trainer_fp32`), and in bfloat16 (`trainer_bf16`). Perturbed weights are each parameter times
1 + `perturbation` · a normal number. `other_weights` is how far tokens of `after`, of the first few
trajectories, are from the trainer of the weights before: what an update that did nothing would show.

Of each case: mean and maximum of |log-probability by the worker - by the trainer| over all sampled tokens, and counts
of what happened to its trajectories. `<dtype>_mean_abs_delta` and `…_max_abs_delta` are those of the worst case (bf16:
against the trainer in float32; `bf16_trainer_bf16_…` against the other one). `ratios.fp32_mean_vs_allowed` is that
mean over 1e-4; `ratios.other_weights_vs_<dtype>` is how much further the weights before are than those pushed.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ByteSize, Field, PositiveFloat, PositiveInt
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.utils import logging

from benchmarks.checkout import SMOLLM2, require_model
from benchmarks.measure import MeasurementError
from benchmarks.services import started
from benchmarks.workload import Vocabulary, Workload
from rollout.client import Rollout
from rollout.config import Section
from rollout.errors import DeadlineError
from rollout.model.spec import read_spec
from rollout.model.weights import stream_safetensors
from rollout.types import SamplingParams, Trajectory

ALLOWED = 1e-4
"""Of the mean in float32."""
TIMEOUT_S = 1200.0
POLL_S = 0.02
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAMES = {"fp32": "float32", "bf16": "bfloat16"}
TRAINERS = {"fp32": ("fp32",), "bf16": ("fp32", "bf16")}
"""Dtypes of the trainers, by those of the workers."""
VERSIONS = (0, 1)
"""The weights of the file, and those that are pushed."""
UPDATED, AFTER = "updated", "after"

Trajectories = Sequence[Trajectory]
RolledOut = Mapping[str, Trajectories]
"""By case."""


class Settings(Section):
    model: Path = SMOLLM2
    """`make model` puts SmolLM2-135M there."""
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
    """Of the workers."""
    workers: int = Field(default=2, ge=2)
    """Of a core each."""
    trajectories: PositiveInt = 32
    """Of each case, of a prompt each."""
    prompt_tokens: PositiveInt = 33
    """Of each."""
    new_tokens: PositiveInt = 128
    """Of each."""
    slice_tokens: PositiveInt = 16
    """After which they are stopped, each time."""
    perturbation: PositiveFloat = 0.02
    """Of the weights that are pushed."""
    pool_bytes: ByteSize = ByteSize(512 << 20)
    """KV that the pool of each service holds."""
    kv_bytes: ByteSize = ByteSize(256 << 20)
    """KV that a worker holds."""
    forced_together: PositiveInt = 8
    """Trajectories that the trainer computes at once."""


def run(settings: Settings) -> tuple[dict[str, Any], dict[str, float]]:
    require_model("model", settings.model)
    logging.disable_progress_bar()
    results: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    for dtype in settings.dtypes:
        cases = results[dtype] = _compare(settings, dtype, _roll_out(settings, dtype))
        for trainer in TRAINERS[dtype]:
            label = dtype if trainer == "fp32" else f"{dtype}_trainer_{trainer}"
            for figure in ("mean_abs_delta", "max_abs_delta"):
                results[f"{label}_{figure}"] = max(case[f"trainer_{trainer}"][figure] for case in cases.values())
        after = cases[AFTER]
        other, pushed = (after[each]["mean_abs_delta"] for each in ("other_weights", "trainer_fp32"))
        ratios[f"other_weights_vs_{dtype}"] = other / max(pushed, 1e-12)
    if "fp32" in settings.dtypes:
        ratios["fp32_mean_vs_allowed"] = results["fp32_mean_abs_delta"] / ALLOWED
    results["load_average"] = round(os.getloadavg()[0], 2)
    return results, ratios


# Rollouts


def _roll_out(settings: Settings, dtype: str) -> RolledOut:
    """Every case, with the same prompts."""
    workload = Workload(
        name="mismatch",
        batch=settings.trajectories,
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.new_tokens,
        vocabulary=Vocabulary.read(settings.model, read_spec(settings.model).vocab_size),
        seed=0,
    )
    prompts = workload.prompts(0)
    rolled_out: dict[str, Trajectories] = {}

    def submit(service: Rollout, case: str) -> None:
        sampling = SamplingParams(
            temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=settings.new_tokens, ignore_eos=True
        )
        keys = [f"{case}-{index}" for index in range(len(prompts))]
        service.submit(prompts, key=keys, sampling=sampling)

    for case in ("pool", "none"):
        with started({case: _config(settings, dtype, slices_to=case)}) as services:
            submit(services[case], case)
            rolled_out[case] = _finished(settings, services[case], case)
    with started({"straight": _config(settings, dtype, slices_to=None)}) as services:
        service = services["straight"]
        submit(service, "straight")
        rolled_out["straight"] = _finished(settings, service, "straight")
        before = service.stats().counters.tokens
        submit(service, UPDATED)
        _until_sampled(service, before + settings.trajectories * settings.new_tokens // 4)
        service.update_weights(dict(_weights(settings, dtype, version=1)), 1, mode="recompute", timeout_s=TIMEOUT_S)
        rolled_out[UPDATED] = _finished(settings, service, UPDATED)
        submit(service, AFTER)
        rolled_out[AFTER] = _finished(settings, service, AFTER)
    return {case: rolled_out[case] for case in ("straight", "pool", "none", UPDATED, AFTER)}


def _config(settings: Settings, dtype: str, *, slices_to: str | None) -> dict[str, Any]:
    slices = {"kind": "slice_budget", "tokens": settings.slice_tokens, "keep": slices_to, "then": "requeue"}
    return {
        "model": {"path": str(settings.model), "dtype": NAMES[dtype]},
        "engine": {"max_running": settings.trajectories, "kv_bytes": int(settings.kv_bytes)},
        "cluster": {"name": "bench-mismatch", "workers": settings.workers},
        "pool": {"budget_bytes": int(settings.pool_bytes)},
        "abort": {"policies": [slices] if slices_to else []},
        "resume": {"prefer": "other" if slices_to else "cheapest"},
    }


def _finished(settings: Settings, service: Rollout, case: str) -> Trajectories:
    """Raises `DeadlineError`, or `MeasurementError` if that is not what the case is about."""
    deliveries = service.next_groups(settings.trajectories, TIMEOUT_S)
    if len(deliveries) < settings.trajectories:
        raise DeadlineError(f"{case}: {len(deliveries)} of {settings.trajectories} groups within {TIMEOUT_S:g} s")
    done = [one for delivery in deliveries for one in delivery.trajectories]
    check_case(case, done, settings.new_tokens)
    return done


def check_case(case: str, done: Trajectories, new_tokens: int) -> None:
    """Raises `MeasurementError` if trajectories did not live as the case has it."""
    counted = count(done)
    versions = {run.version for one in done for run in one.versions}
    expected = {UPDATED: set(VERSIONS), AFTER: {1}}.get(case, {0})
    suspended = case in ("pool", "none")
    right = (
        all(len(one.output_ids) == new_tokens for one in done)
        and versions == expected
        and all(bool(one.suspensions) is suspended for one in done)
        and bool(counted["restored_tokens"]) is (case == "pool")
        and (case != "pool" or counted["resumed_elsewhere"] > 0)
        and (case != "none" or counted["recomputed_tokens"] > 0)
    )
    if not right:
        raise MeasurementError(
            f"{case}: {new_tokens} tokens were asked for, and trajectories had {counted}, {versions}"
        )


def count(done: Trajectories) -> dict[str, int]:
    """What happened to trajectories, all of them together."""
    resumes = [resume for one in done for resume in one.resumes]
    return {
        "tokens": sum(len(one.output_ids) for one in done),
        "suspensions": sum(one.suspensions for one in done),
        "resumed_elsewhere": sum(
            first != then for one in done for first, then in zip(one.workers, one.workers[1:], strict=False)
        ),
        "restored_tokens": sum(resume.restored_tokens for resume in resumes),
        "recomputed_tokens": sum(resume.recomputed_tokens for resume in resumes),
    }


def _until_sampled(service: Rollout, tokens: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while service.stats().counters.tokens < tokens:
        if time.monotonic() > deadline:
            raise DeadlineError(f"{tokens} tokens within {TIMEOUT_S:g} s")
        time.sleep(POLL_S)


# The trainer


def _weights(settings: Settings, dtype: str, *, version: int) -> Iterator[tuple[str, Tensor]]:
    """What workers of a dtype have as this version."""
    generator = torch.Generator().manual_seed(version)
    for name, tensor in stream_safetensors(settings.model):
        if version:
            tensor = tensor.float()
            tensor = tensor * (1 + settings.perturbation * torch.randn(tensor.shape, generator=generator))
        yield name, tensor.to(DTYPES[dtype])


def _trainer(settings: Settings, dtype: str, version: int, trainer: str) -> LlamaForCausalLM:
    """With the weights that workers of `dtype` have as this version, computing in the dtype `trainer`."""
    model = LlamaForCausalLM.from_pretrained(settings.model, dtype=DTYPES[trainer]).eval()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in _weights(settings, dtype, version=version):
            if name in parameters:  # else tied to another
                parameters.pop(name).copy_(tensor)
    assert not parameters, f"not in the file: {sorted(parameters)[:4]}"
    return model


@torch.inference_mode()
def forced_logprobs(model: Any, done: Trajectories, together: int) -> Tensor:
    """Log-probabilities [trajectories, tokens] of outputs, all of one length, as are prompts."""
    rows: list[Tensor] = []
    for first in range(0, len(done), together):
        some = done[first : first + together]
        ids = torch.tensor([[*one.prompt_ids, *one.output_ids] for one in some])
        outputs = torch.tensor([one.output_ids for one in some])
        logits = model(input_ids=ids).logits[:, -outputs.shape[1] - 1 : -1].float()
        rows.append(logits.log_softmax(-1).gather(-1, outputs.unsqueeze(-1)).squeeze(-1))
    return torch.cat(rows)


# Both


def _compare(settings: Settings, dtype: str, rolled_out: RolledOut) -> dict[str, Any]:
    results: dict[str, Any] = {case: count(done) for case, done in rolled_out.items()}
    for trainer in TRAINERS[dtype]:
        deltas: dict[str, list[Tensor]] = {case: [] for case in rolled_out}
        for version in VERSIONS:
            model = _trainer(settings, dtype, version, trainer)
            for case, done in rolled_out.items():
                mask = sampled_by(done, version)
                foreign = case == AFTER and version == 0 and trainer == "fp32"
                if foreign:
                    some = done[: settings.forced_together]
                    delta = (reported(some) - forced_logprobs(model, some, len(some))).abs()
                    results[case]["other_weights"] = _figures([delta])
                elif mask.any():
                    delta = (reported(done) - forced_logprobs(model, done, settings.forced_together)).abs()
                    deltas[case].append(delta[mask])
            del model
        for case, parts in deltas.items():
            results[case][f"trainer_{trainer}"] = _figures(parts)
    return results


def reported(done: Trajectories) -> Tensor:
    """Log-probabilities [trajectories, tokens] as workers told them."""
    return torch.tensor([one.logprobs for one in done])


def sampled_by(done: Trajectories, version: int) -> Tensor:
    """Which tokens [trajectories, tokens] these weights sampled."""
    return torch.tensor([[run.version == version for run in one.versions for _ in range(run.tokens)] for one in done])


def _figures(deltas: Sequence[Tensor]) -> dict[str, float]:
    every = torch.cat([delta.flatten() for delta in deltas])
    return {"mean_abs_delta": every.double().mean().item(), "max_abs_delta": every.max().item()}
