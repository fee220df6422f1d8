"""What a step of the engine costs beside the model, at 1, 64, 256 and 1,024 running sequences.

An engine decodes full batches; no Ray. The time of `Engine.step` is told apart into parts: `model` is what the runner
calls to compute (the decoder's forward, its logits, the sampler), and all the rest is overhead. `runner` and `rest` are
what is in no other part. Contexts of different lengths grow by a page in different steps, so some do in every step;
each figure is a median of `steps` steps, behind `warm_steps` that do not count.

Up to `real_sequences` sequences the model is SmolLM2 on `cpus` threads, all prompts differ, and
`ratios.overhead_b<n>` is the share of the median step outside the model. With more it is a stand-in of one small layer
(`standin`), prompts are shared by groups of `samples`, and only milliseconds are told. `results.plan_1024_ms` is
`Scheduler.plan` at the largest size: the worse of two medians, of all steps and of those in which every sequence but
each group's first needs a page (`plan_1024_all_grow_ms`: there the contexts are of one length).
"""

import contextlib
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from pydantic import Field, PositiveInt

from benchmarks.measure import in_ms, percentile
from benchmarks.moves import CHECKOUT
from benchmarks.standin import StandIn
from rollout.config import EngineConfig, HostConfig, ModelConfig, Section
from rollout.control.messages import Assignment
from rollout.engine import runner
from rollout.engine.assembly import assemble
from rollout.engine.engine import Engine
from rollout.engine.scheduler import Scheduler
from rollout.errors import ModelNotFoundError
from rollout.model.spec import read_spec
from rollout.types import Columns, SamplingParams, TrajectoryId, Version

PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "plan": ((Scheduler, "plan"),),
    "batch": ((runner, "decode_forward"), (runner, "prefill_forward")),
    "commit": ((Engine, "_commit"),),
    "copies": ((Engine, "_complete_copies"), (Engine, "_launch"), (Engine, "_start_copies")),
}
"""Calls that are timed, beside those of the `model`; whoever renames one of them renames it here."""


PAGE_TOKENS = 16
OWN_TOKENS = 20
"""At the end of each prompt."""


class Settings(Section):
    model: Path = CHECKOUT / "models" / "smollm2-135m"
    """What decodes small batches; `make model` puts SmolLM2-135M there."""
    cpus: PositiveInt = 2
    """Threads of the model."""
    sizes: tuple[PositiveInt, ...] = (1, 64, 256, 1024)
    """Running sequences."""
    real_sequences: int = 64
    """Largest size at which the model is real."""
    prompt_tokens: PositiveInt = 33
    """Context of each sequence of the real model when decoding begins."""
    context_tokens: PositiveInt = 300
    """About that of the stand-in's; from 8 tokens less to 7 more."""
    samples: PositiveInt = 16
    """Sequences of the stand-in that share their prompt but for its last `OWN_TOKENS` tokens."""
    steps: int = Field(default=64, ge=PAGE_TOKENS)
    """Decode steps that are timed."""
    warm_steps: PositiveInt = 8
    """Decode steps before."""
    stand_in: StandIn = StandIn(layers=1, kv_heads=1, head_dim=64, page_tokens=PAGE_TOKENS)
    """Model of the larger sizes."""


class Parts:
    """Seconds of each part of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._within = False

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Counts calls of `function` that do not come from a part themselves."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._within:
                return function(*args, **kwargs)
            self._within = True
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - begin
                self._within = False

        return wrapper

    @contextlib.contextmanager
    def attached(self, engine: Engine) -> Iterator[None]:
        """Times the parts of every engine with this one's decoder and sampler."""
        decoder, sampler = type(engine._runner._decoder), type(engine._runner._sampler)
        model = ((decoder, "forward"), (decoder, "logits"), (sampler, "sample"))
        with contextlib.ExitStack() as stack:
            for part, calls in {"model": model, **PARTS}.items():
                for owner, name in calls:
                    patch = mock.patch.object(owner, name, self.timed(part, getattr(owner, name)))
                    stack.enter_context(patch)
            stack.enter_context(mock.patch.object(runner.Runner, "run", self._run(runner.Runner.run)))
            yield

    def _run(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            inside = self.seconds["model"] + self.seconds["batch"]
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            inside = self.seconds["model"] + self.seconds["batch"] - inside
            self.seconds["runner"] += time.perf_counter() - begin - inside
            return result

        return run

    def step(self, engine: Engine) -> dict[str, float]:
        """One step of the engine, in seconds: the whole and each part."""
        self.seconds.clear()
        begin = time.perf_counter()
        engine.step()
        whole = time.perf_counter() - begin
        parts = {name: self.seconds[name] for name in ("model", *PARTS, "runner")}
        overhead = whole - parts["model"]
        return {"step": whole, "overhead": overhead, **parts, "rest": whole - sum(parts.values())}


def run(settings: Settings) -> tuple[dict[str, Any], dict[str, float]]:
    if not settings.model.is_dir():
        raise ModelNotFoundError(f"model: {settings.model}: no such directory; `make model` puts SmolLM2-135M there")
    results: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.cpus)
    with tempfile.TemporaryDirectory() as directory:
        stand_in = settings.stand_in.write(Path(directory) / "model")
        for size in settings.sizes:
            if size <= settings.real_sequences:
                steps = _steps(settings, settings.model, [settings.prompt_tokens + i % 16 for i in range(size)], 1)
                of = {name: median(step[name] for step in steps) for name in ("overhead", "step")}
                ratios[f"overhead_b{size}"] = of["overhead"] / of["step"]
            else:
                varied = [settings.context_tokens - 8 + i % 16 for i in range(size)]
                steps = _steps(settings, stand_in, varied, settings.samples)
            results[f"b{size}"] = in_ms({name: median(step[name] for step in steps) for name in steps[0]})
            results[f"b{size}"]["step_p99_ms"] = 1e3 * percentile([step["step"] for step in steps], 99)
        largest = max(settings.sizes)
        results[f"plan_{largest}_p99_ms"] = 1e3 * percentile([step["plan"] for step in steps], 99)
        aligned = _steps(settings, stand_in, [settings.context_tokens] * largest, settings.samples)
        slowest = sorted((step["plan"] for step in aligned), reverse=True)[: settings.steps // PAGE_TOKENS]
        results[f"plan_{largest}_all_grow_ms"] = all_grow_ms = 1e3 * median(slowest)
        results[f"plan_{largest}_ms"] = max(1e3 * median(step["plan"] for step in steps), all_grow_ms)
    torch.set_num_threads(threads)
    return results, ratios


def _steps(settings: Settings, model: Path, contexts: list[int], samples: int) -> list[dict[str, float]]:
    """The parts of decode steps that run one sequence of each context length, `samples` of them with one prompt."""
    engine = _engine(settings, model, contexts)
    draw = random.Random(len(contexts))
    for index, tokens in enumerate(contexts):
        if index % samples == 0:
            shared = draw.choices(range(256), k=max(contexts))
        own = draw.choices(range(256), k=OWN_TOKENS)
        engine.submit(_assignment(index, tuple(shared[: tokens - OWN_TOKENS] + own)))
    while engine.stats.sampled_tokens < len(contexts):
        engine.step()
    parts = Parts()
    with parts.attached(engine):
        steps = [parts.step(engine) for _ in range(settings.warm_steps + settings.steps)]
    assert engine.stats.running == len(contexts), engine.stats
    assert not engine.stats.preemptions, engine.stats
    engine.close()
    return steps[settings.warm_steps :]


def _assignment(index: int, prompt: tuple[int, ...]) -> Assignment:
    """One that does not end."""
    return Assignment(
        trajectory_id=TrajectoryId(f"{index}/0"),
        epoch=1,
        prompt_ids=prompt,
        output=Columns(),
        sampling=SamplingParams(max_new_tokens=1 << 12, ignore_eos=True),
        seed=index,
        slice_tokens=None,
        max_context=1 << 12,
        image=None,
        kv_tokens=0,
    )


def _engine(settings: Settings, model: Path, contexts: list[int]) -> Engine:
    spec = read_spec(model)
    token_bytes = 2 * spec.layers * spec.kv_heads * spec.head_dim * 2
    most = max(contexts) + settings.steps + settings.warm_steps + 32
    config = EngineConfig.model_validate(
        {
            "device": "cpu",
            "kv_bytes": 2 * len(contexts) * most * token_bytes,
            "max_running": len(contexts),
            "max_context_tokens": most,
            "prefill_tokens": sum(contexts),
            "page_tokens": PAGE_TOKENS,
        }
    )
    return assemble(
        ModelConfig(path=model),
        config,
        HostConfig(),
        spec,
        reader=_NoImages(),
        restore_timeout_s=1.0,
        wake=lambda: None,
        weights_id="weights",
        version=Version(0),
    ).engine


class _NoImages:
    """Of an engine that restores nothing."""

    def open(self, runs: Any, deadline: float) -> Any:
        raise AssertionError("nothing is restored here")
