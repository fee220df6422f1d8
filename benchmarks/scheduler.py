"""What a step of the engine costs beside the model, at 1, 64, 256 and 1,024 running sequences.

An engine decodes full batches; no Ray, but a process of its own, set up as a worker's is: bound to `cpus` cores, and
torch asks for huge pages. The time of `Engine.step` is told apart into parts: `model` is what runs in the native
library (forward, logits, sampling), and all the rest is overhead, all of our Python in the step included; `prepare` of
that is what the decoder and the sampler do around these calls. Without native kernels (`results.kernels`) the model is
the decoder and the sampler as a whole. `runner` and `rest` are what is in no other part. Contexts of different lengths
grow by a page in different steps, so some do in every step; each figure is a median of `steps` steps, behind
`warm_steps` that do not count.

Up to `real_sequences` sequences the model is SmolLM2 on `cpus` threads, all prompts differ, and `ratios.overhead_b<n>`
is the share of the median step outside the model. With more it is a stand-in of one small layer (`standin`), prompts
are shared by groups of `samples`, and only milliseconds are told. `results.plan_1024_ms` is `Scheduler.plan` at the
largest size: the worse of two medians, of all steps and of those in which every sequence but each group's first needs a
page (`plan_1024_all_grow_ms`: there the contexts are of one length).
"""

import contextlib
import os
import random
import sys
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

from benchmarks.checkout import SMOLLM2, require_model
from benchmarks.endless import EVERYTHING, NoImages, endless
from benchmarks.measure import in_ms, medians, percentile
from benchmarks.peer import Peer
from benchmarks.peers.protocol import Prepared, serve
from benchmarks.standin import StandIn
from rollout.config import EngineConfig, HostConfig, Memory, ModelConfig, Section
from rollout.engine import runner
from rollout.engine.assembly import assemble
from rollout.engine.engine import Engine
from rollout.engine.kernels import choose_kernel
from rollout.engine.scheduler import Scheduler
from rollout.model.spec import read_spec
from rollout.native.library import Kernels
from rollout.types import Version, Weights, WeightsId

PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "plan": ((Scheduler, "plan"),),
    "batch": ((runner, "decode_forward"), (runner, "prefill_forward")),
    "commit": ((Engine, "_commit"),),
    "copies": ((Engine, "_complete_copies"), (Engine, "_launch"), (Engine, "_start_copies")),
}
"""Calls that are timed, beside those of the `model`; whoever renames one of them renames it here.

`commit` has what it takes to watch the sequences (`endless`).
"""

NATIVE: tuple[tuple[Any, str], ...] = ((Kernels, "forward"), (Kernels, "logits"), (Kernels, "sample"))
TIMEOUT_S = 3600.0
PAGE_TOKENS = 16
OWN_TOKENS = 20
"""At the end of each prompt."""


class Settings(Section):
    model: Path = SMOLLM2
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
        self._within: str | None = None

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Counts calls of `function`, for the innermost part only."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            around, self._within = self._within, part
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - begin
                self.seconds[part] += seconds
                if around is not None:
                    self.seconds[around] -= seconds
                self._within = around

        return wrapper

    @contextlib.contextmanager
    def attached(self, engine: Engine) -> Iterator[None]:
        """Times the parts of every engine with this one's decoder and sampler."""
        decoder, sampler = type(engine._runner._decoder), type(engine._runner._sampler)
        around = ((decoder, "forward"), (decoder, "logits"), (sampler, "sample"))
        computing = {"model": NATIVE, "prepare": around} if _native(engine) else {"model": around}
        with contextlib.ExitStack() as stack:
            for part, calls in {**computing, **PARTS}.items():
                for owner, name in calls:
                    patch = mock.patch.object(owner, name, self.timed(part, getattr(owner, name)))
                    stack.enter_context(patch)
            stack.enter_context(mock.patch.object(runner.Runner, "run", self._run(runner.Runner.run)))
            yield

    def _run(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            inside = self._inside()
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            inside = self._inside() - inside
            self.seconds["runner"] += time.perf_counter() - begin - inside
            return result

        return run

    def _inside(self) -> float:
        return sum(self.seconds[part] for part in ("model", "prepare", "batch"))

    def step(self, engine: Engine) -> dict[str, float]:
        """One step of the engine, in seconds: the whole and each part."""
        self.seconds.clear()
        begin = time.perf_counter()
        engine.step()
        whole = time.perf_counter() - begin
        parts = {name: self.seconds[name] for name in ("model", "prepare", *PARTS, "runner")}
        overhead = whole - parts["model"]
        return {"step": whole, "overhead": overhead, **parts, "rest": whole - sum(parts.values())}


def run(settings: Settings) -> tuple[dict[str, Any], dict[str, float]]:
    require_model("model", settings.model)
    options = {"cores": sorted(os.sched_getaffinity(0))[: settings.cpus]}
    with Peer("engine", [sys.executable, "-m", "benchmarks.scheduler"], options) as engine:
        done = engine.ask("measure", settings=settings.model_dump(mode="json"), timeout_s=TIMEOUT_S)
        return {"huge_pages": engine.described["huge_pages"], **done["results"]}, done["ratios"]


def prepare(options: dict[str, Any]) -> Prepared:
    """The process with the engine."""
    torch.set_num_threads(len(options["cores"]))

    def measure(request: dict[str, Any]) -> dict[str, Any]:
        results, ratios = _measure(Settings.model_validate(request["settings"]))
        return {"results": results, "ratios": ratios}

    return {}, {"measure": measure}


def _measure(settings: Settings) -> tuple[dict[str, Any], dict[str, float]]:
    kernel = choose_kernel(EngineConfig(device="cpu"), read_spec(settings.model), torch.bfloat16)
    results: dict[str, Any] = {"kernels": kernel.name}
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        stand_in = settings.stand_in.write(Path(directory) / "model")
        for size in settings.sizes:
            if size <= settings.real_sequences:
                steps = _steps(settings, settings.model, [settings.prompt_tokens + i % 16 for i in range(size)], 1)
                of = medians(steps)
                ratios[f"overhead_b{size}"] = of["overhead"] / of["step"]
            else:
                varied = [settings.context_tokens - 8 + i % 16 for i in range(size)]
                steps = _steps(settings, stand_in, varied, settings.samples)
            results[f"b{size}"] = in_ms(medians(steps))
            results[f"b{size}"]["step_p99_ms"] = 1e3 * percentile([step["step"] for step in steps], 99)
        largest = max(settings.sizes)
        results[f"plan_{largest}_p99_ms"] = 1e3 * percentile([step["plan"] for step in steps], 99)
        aligned = _steps(settings, stand_in, [settings.context_tokens] * largest, settings.samples)
        slowest = sorted((step["plan"] for step in aligned), reverse=True)[: settings.steps // PAGE_TOKENS]
        results[f"plan_{largest}_all_grow_ms"] = all_grow_ms = 1e3 * median(slowest)
        results[f"plan_{largest}_ms"] = max(1e3 * median(step["plan"] for step in steps), all_grow_ms)
    return results, ratios


def _steps(settings: Settings, model: Path, contexts: list[int], samples: int) -> list[dict[str, float]]:
    """The parts of decode steps that run one sequence of each context length, `samples` of them with one prompt."""
    engine = _engine(settings, model, contexts)
    draw = random.Random(len(contexts))
    for index, tokens in enumerate(contexts):
        if index % samples == 0:
            shared = draw.choices(range(256), k=max(contexts))
        own = draw.choices(range(256), k=OWN_TOKENS)
        engine.submit(endless(index, tuple(shared[: tokens - OWN_TOKENS] + own), EVERYTHING))
    while engine.stats.sampled_tokens < len(contexts):
        engine.step()
    parts = Parts()
    with parts.attached(engine):
        steps = [parts.step(engine) for _ in range(settings.warm_steps + settings.steps)]
    assert engine.stats.running == len(contexts), engine.stats
    assert not engine.stats.preemptions, engine.stats
    engine.close()
    return steps[settings.warm_steps :]


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
        reader=NoImages(),
        restore_timeout_s=1.0,
        wake=lambda: None,
        weights=Weights(WeightsId("weights"), Version(0)),
        memory=Memory(kind="memory"),
    ).engine


def _native(engine: Engine) -> bool:
    return engine._runner._decoder.name == "native"


if __name__ == "__main__":
    serve(prepare)
