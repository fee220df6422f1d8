"""Seconds to replace the weights of a running service, by transport, against one plain copy of them.

Two models in bfloat16 on native kernels: SmolLM2-135M, and random weights of about 1 GB (`random`; Llama architecture,
256 words). The trainer is this process and has them in memory, in one mapping of contiguous tensors. `workers` of one
core each, in one service; transports take turns, in reversed order every second time, and a first turn does not count.
`disk` is published once before and comes from the page cache. All of an update is as always: checksums are made by the
trainer and verified by every worker before anything is replaced (`collective_unstaged`: as it arrives).

Nothing runs: `update_s` is the driver's call, and `report` is what that says of itself (`prepare_s`, `pause_s`,
`commit_s`: of the controller, of all workers). Of the trainer: `trainer_s` is what it does itself, once for all workers
(object_store: packing with checksums, `pack_s`, and putting; collective: packing; disk: publishing, fsync included,
which is no part of `update_s`); `send_s` is a whole broadcast. Of the slowest worker, on its own clock (`updates`):
`in_place_s`, which is its prepare (announced weights opened, fetched or received, and verified) and its commit (read
again, copied and packed). What that includes of others' work: receiving a broadcast lasts as long as the trainer packs
and sends. `phases` are parts of it: `open`, `verify`, `step_wait`, `write` one after the other; `fetch`, `read` and
`check` within these.

`memcpy_s` is one thread of one worker copying as many buffers of the same sizes as there are tensors, all touched
before, while nothing else runs; `memcpy_together_s` is all workers doing so at once, the slowest. `one_worker` is the
same of a service with one worker, with a `memcpy_s` of its own.

`decoding`: a batch of `batch` on every worker, which steps `before` times before the update and `after` times after it.
`gap_s` is the longest time from the end of one step to the end of the next one, from the driver's call on, by the
worker's own clock: what every trajectory of the worker waits for a token. `step_s` is the same by median before the
call, `step_preparing_s` while weights were prepared. `around_write` is the gap in which weights were written, in parts:
until then, writing, and to the end of the next step. Of the worker with the longest gap. `mode` is in_place there, so
that the gap is the update; `recompute` of the object store is the default mode, where KV of the batch (one prompt
that all share, and what each sampled) is computed again before all go on.

Everything is a median over `repeats`. `ratios.<transport>_vs_memcpy` is `in_place_s` over `memcpy_s`, of the model
where that is more, and `…_together` over `memcpy_together_s`; `one_worker_…` is of the service with one worker;
`pause_vs_step` is `gap_s` over `step_s` with the object store.
"""

import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, PositiveInt

from benchmarks.checkout import SMOLLM2, require_model
from benchmarks.measure import Repeats, interleaved, medians, timed
from benchmarks.services import ray_for
from benchmarks.standin import StandIn
from benchmarks.updates import Load, Source, Update, Updates, Worked
from benchmarks.workload import Vocabulary, Workload
from rollout.cluster.shipment import FILE_BYTES
from rollout.config import Collective, Disk, ObjectStore, Section, load_config
from rollout.model.spec import read_spec
from rollout.model.weights import stream_safetensors
from rollout.transport.disk import publish

UNMEASURED = 1
Transport = Literal["object_store", "disk", "collective_staged", "collective_unstaged"]
TRANSPORTS: tuple[Transport, ...] = ("object_store", "disk", "collective_staged", "collective_unstaged")
RECOMPUTE = "recompute"
DECODING = {transport: (transport, "in_place") for transport in TRANSPORTS} | {RECOMPUTE: ("object_store", RECOMPUTE)}
"""Transport and mode of each kind of update that falls among decode steps."""


class Random(StandIn):
    layers: PositiveInt = 18
    kv_heads: PositiveInt = 24
    page_tokens: PositiveInt = 16
    hidden: PositiveInt = 1536
    intermediate: PositiveInt = 4096


class Settings(Section):
    model: Path = SMOLLM2
    """`make model` puts SmolLM2-135M there."""
    random: Random = Random()
    """The other model."""
    models: tuple[Literal["smollm2", "random"], ...] = ("smollm2", "random")
    """Which to measure."""
    transports: tuple[Transport, ...] = TRANSPORTS
    """Which to measure."""
    workers: PositiveInt = 2
    """Of a core each."""
    repeats: Repeats = 5
    """Updates of each kind that count."""
    bucket_bytes: ByteSize = ByteSize(32 << 20)
    """Of what is put or sent at a time."""
    batch: PositiveInt = 8
    """Trajectories that decode on each worker."""
    prompt_tokens: PositiveInt = 16
    """Of each."""
    before: PositiveInt = 12
    """Steps before an update that falls among them."""
    after: PositiveInt = 4
    """Steps after it."""
    kv_bytes: ByteSize = ByteSize(384 << 20)
    """KV that a worker holds."""


def run(settings: Settings) -> tuple[dict[str, Any], dict[str, float]]:
    if "smollm2" in settings.models:
        require_model("model", settings.model)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in settings.models:
            scratch = Path(directory) / name
            model = settings.model if name == "smollm2" else settings.random.write(scratch / "model")
            results[name] = _Measured(settings, model, scratch).results()
    ratios = find_ratios(results)
    results["load_average"] = round(os.getloadavg()[0], 2)
    return results, ratios


class _Measured:
    """One model."""

    def __init__(self, settings: Settings, model: Path, scratch: Path) -> None:
        self._settings = settings
        self._model = model
        self._tensors = {name: tensor.clone() for name, tensor in stream_safetensors(model)}
        self._sizes = [tensor.nbytes for tensor in self._tensors.values()]
        self._published = scratch / "published"
        self._workload = Workload(
            name="weights",
            batch=settings.workers,
            prompt_tokens=settings.prompt_tokens,
            new_tokens=1,
            vocabulary=Vocabulary.read(model, read_spec(model).vocab_size),
            seed=0,
        )

    def results(self) -> dict[str, Any]:
        settings = self._settings
        publish_s = 0.0
        if "disk" in settings.transports:
            publish_s = timed(lambda: publish(self._published, self._tensors.items(), bucket_bytes=FILE_BYTES))
        alone = self._run(1, decoding=False) if settings.workers > 1 else None
        together = self._run(settings.workers, decoding=True)
        results: dict[str, Any] = {
            "nbytes": sum(self._sizes),
            "tensors": len(self._sizes),
            **{name: together[name] for name in ("memcpy_s", "memcpy_together_s")},
        }
        if alone is not None:
            results["one_worker"] = {"memcpy_s": alone["memcpy_s"]}
        for transport in settings.transports:
            each = results[transport] = together[transport]
            if transport == "disk":
                each["trainer_s"] = publish_s
            if alone is not None:
                each["one_worker"] = alone[transport]
        if RECOMPUTE in together:
            results[RECOMPUTE] = together[RECOMPUTE]
        return results

    def _run(self, workers: int, *, decoding: bool) -> dict[str, Any]:
        settings = self._settings
        idle: dict[str, list[Update]] = {str(transport): [] for transport in settings.transports}
        loaded: dict[str, list[Update]] = {
            name: [] for name, (transport, _) in DECODING.items() if decoding and transport in settings.transports
        }
        with self._service(workers) as service:

            def copy(at_once: int) -> float:
                service.hold_buffers(self._sizes)
                seconds = service.copy(at_once)
                service.hold_buffers([])
                return seconds

            def replace(transport: str) -> float:
                idle[transport].append(service.update(transport, self._source(transport), RECOMPUTE))
                return idle[transport][-1].seconds

            def replace_decoding(name: str) -> float:
                transport, mode = DECODING[name]
                turn = len(loaded[name])
                prompts = self._workload.prompts(f"{name} {turn}")
                load = Load(prompts=prompts, batch=settings.batch, before=settings.before, after=settings.after)
                loaded[name].append(service.update(transport, self._source(transport), mode, load))
                return loaded[name][-1].seconds

            sides: dict[str, Callable[[], float]] = {
                "memcpy": lambda: copy(1),
                "memcpy_together": lambda: copy(workers),
                **{transport: partial(replace, transport) for transport in idle},
                **{f"decoding {name}": partial(replace_decoding, name) for name in loaded},
            }
            seconds = interleaved(sides, settings.repeats, unmeasured=UNMEASURED)
        results: dict[str, Any] = {
            f"{name}_s": statistics.median(seconds[name]) for name in ("memcpy", "memcpy_together")
        }
        results |= {transport: summed_up(transport, each[UNMEASURED:]) for transport, each in idle.items()}
        for name, each in loaded.items():
            summary = _decoding(each[UNMEASURED:])
            if name == RECOMPUTE:
                results[name] = summary
            else:
                results[name]["decoding"] = summary
        return results

    @contextlib.contextmanager
    def _service(self, workers: int) -> Iterator[Updates]:
        settings = self._settings
        config = {
            "model": {"path": str(self._model), "dtype": "bfloat16"},
            "engine": {"max_running": settings.batch, "kv_bytes": int(settings.kv_bytes), "kernels": "native"},
            "cluster": {"name": "bench-weights", "workers": workers},
            "pool": {"budget_bytes": "64MiB"},
            "weights": {"kv_reuse": {"kind": "stale"}},
        }
        size = settings.bucket_bytes
        transports: dict[str, ObjectStore | Disk | Collective] = {
            "object_store": ObjectStore(kind="object_store", bucket_bytes=size),
            "disk": Disk(kind="disk"),
            "collective_staged": Collective(kind="collective", bucket_bytes=size),
            "collective_unstaged": Collective(kind="collective", bucket_bytes=size, staged=False),
        }
        with ExitStack() as stack:
            stack.enter_context(ray_for([load_config(config)]))
            yield stack.enter_context(Updates(config, transports, sum(self._sizes)))

    def _source(self, transport: str) -> Source:
        return self._published if transport == "disk" else self._tensors


def summed_up(transport: str, updates: Sequence[Update]) -> dict[str, Any]:
    """Of updates while nothing ran."""
    slowest = [max(update.workers, key=_in_place) for update in updates]
    trainer = medians(update.trainer for update in updates)
    own = trainer["ship"] if transport == "object_store" else trainer["pack"]
    return {
        "update_s": statistics.median(update.seconds for update in updates),
        "report": _reported(updates),
        "trainer_s": own,
        "pack_s": trainer["pack"],
        "send_s": trainer["send"],
        "in_place_s": statistics.median(map(_in_place, slowest)),
        "prepare_s": statistics.median(worked.prepare for worked in slowest),
        "commit_s": statistics.median(worked.commit for worked in slowest),
        "phases": _in_seconds(medians(worked.phases for worked in slowest)),
        "all_update_s": [round(update.seconds, 4) for update in updates],
        "all_in_place_s": [round(_in_place(worked), 4) for worked in slowest],
    }


def _decoding(updates: Sequence[Update]) -> dict[str, Any]:
    """Of updates that fell among decode steps."""
    rows: list[dict[str, float]] = []
    around: list[Mapping[str, float]] = []
    for update in updates:
        worked = max(update.workers, key=lambda worked: worked.gap or 0.0)
        assert worked.gap is not None, worked
        assert worked.step is not None, worked
        around.append(worked.around_write)
        preparing = worked.step_preparing if worked.step_preparing is not None else worked.step
        rows.append(
            {"gap": worked.gap, "step": worked.step, "step_preparing": preparing, "in_place": _in_place(worked)}
        )
    return {
        "update_s": statistics.median(update.seconds for update in updates),
        "report": _reported(updates),
        **_in_seconds(medians(rows)),
        "around_write": _in_seconds(medians(around)),
        "all_gap_s": [round(row["gap"], 4) for row in rows],
    }


def _reported(updates: Iterable[Update]) -> dict[str, float]:
    reports = [update.report for update in updates]
    return medians(
        [{name: getattr(report, name) for name in ("prepare_s", "pause_s", "commit_s")} for report in reports]
    )


def _in_place(worked: Worked) -> float:
    return worked.prepare + worked.commit


def _in_seconds(durations: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}_s": round(value, 5) for name, value in durations.items()}


def find_ratios(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    ratios: dict[str, float] = {}
    for result in results.values():
        found: dict[str, float] = {}
        for transport in TRANSPORTS:
            if transport in result:
                found[f"{transport}_vs_memcpy"] = result[transport]["in_place_s"] / result["memcpy_s"]
                together = result[transport]["in_place_s"] / result["memcpy_together_s"]
                found[f"{transport}_vs_memcpy_together"] = together
                if "one_worker" in result:
                    one = result[transport]["one_worker"]["in_place_s"] / result["one_worker"]["memcpy_s"]
                    found[f"one_worker_{transport}_vs_memcpy"] = one
        if "object_store" in result:
            decoding = result["object_store"]["decoding"]
            found["pause_vs_step"] = decoding["gap_s"] / decoding["step_s"]
        ratios = {name: max(value, ratios.get(name, 0.0)) for name, value in found.items()}
    return ratios
