"""How fast KV leaves a worker for the pool and comes back, against a plain copy of the same bytes.

Warm: one trajectory of each size is suspended on one worker and resumed on the other, back and forth, with nothing
else to do; `moves` says from where to where is timed. Each export sends all its bytes, since the pool is told to
forget them first; checksums are made and verified as always. The first passes warm the shared memory of both
workers up and do not count. Before each move the driver copies as many bytes between two warm buffers. The model
is a stand-in (`standin`): what moves is pages of SmolLM2's size, and weights play no part in it. `best` is the least
of what a median is of: it says more on a machine that had other work (`load_average`, at the end).
`phases` are parts of the measured time, on the processes' common clock; `isolated` times the same work alone: gather,
checksum and scatter in the driver, and Ray returning the same buffers from an actor and getting them. What is left is
the calls between driver, controller, pool and worker, and the engine.

Cold: the first moves of a process that has touched no shared memory (pool.warm_bytes=0); and those after the worker
was killed and started again, with warm_bytes as set. Each is measured once per restart.

Load: SmolLM2 decodes a full batch; in the middle of every second block of steps one trajectory of a little more than
`tokens` tokens is exported out of the batch and another restored into it. `decode_slowdown` is the time of all steps
in blocks with moves, divided by that of as many without.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import ray
import torch
from pydantic import ByteSize, PositiveInt

from benchmarks.load import Load, measure_load
from benchmarks.measure import MemoryCopy, Repeats, in_ms, medians, timed
from benchmarks.moves import SETTLE_S, Move, Scene
from benchmarks.standin import StandIn
from rollout.config import Section
from rollout.kv.image import describe, verify
from rollout.kv.keys import Fingerprint
from rollout.kv.storage import KVStorage
from rollout.kv.tiers import Tier

MB = 1_000_000
PASSES_UNMEASURED = 4
"""Out of and into each worker twice: the pool does not put every object at the same place."""


class Settings(Section):
    parts: tuple[Literal["warm", "cold", "load"], ...] = ("warm", "cold", "load")
    """What to measure."""
    repeats: Repeats = 9
    """Exports and restores of each size that count."""
    sizes_mb: tuple[PositiveInt, ...] = (46, 256)
    """Of the KV that is moved, in 10⁶ bytes."""
    restarts: PositiveInt = 1
    """Times that each cold figure is measured."""
    warm_bytes: ByteSize = ByteSize(64 << 20)
    """pool.warm_bytes where it is not 0."""
    model: StandIn = StandIn()
    """Whose KV is moved."""
    load: Load = Load()
    """The third part."""

    def nbytes(self, size_mb: int) -> int:
        """KV of whole tokens, about `size_mb`."""
        return round(size_mb * MB / self.model.token_bytes) * self.model.token_bytes


def run(settings: Settings) -> tuple[dict[str, Any], dict[str, float]]:
    results: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    if "load" in settings.parts:
        settings.load.check()
    with tempfile.TemporaryDirectory() as directory:
        model = settings.model.write(Path(directory) / "model")
        if "warm" in settings.parts:
            results["warm"] = _warm(settings, model, ratios)
        if "cold" in settings.parts:
            results["cold"] = _cold(settings, model)
    if "load" in settings.parts:
        results["load"] = measure_load(settings.load, ratios)
    results["load_average"] = round(os.getloadavg()[0], 2)
    return results, ratios


def _config(settings: Settings, model: Path, *, workers: int, warm_bytes: int) -> dict[str, Any]:
    most = settings.nbytes(max(settings.sizes_mb))
    return {
        "model": {"path": str(model)},
        "engine": {
            "kv_bytes": int(1.5 * most) + 64 * MB,
            "page_tokens": settings.model.page_tokens,
            "chunk_tokens": 512,
            "max_running": 4,
        },
        "cluster": {"name": "bench-kv-copy", "workers": workers},
        "pool": {"budget_bytes": 2 * sum(map(settings.nbytes, settings.sizes_mb)) + 64 * MB, "warm_bytes": warm_bytes},
        "resume": {"prefer": "other"},
    }


def _warm(settings: Settings, model: Path, ratios: dict[str, float]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with Scene(_config(settings, model, workers=2, warm_bytes=settings.warm_bytes)) as scene:
        for size in settings.sizes_mb:
            nbytes = settings.nbytes(size)
            trajectory = scene.begin(nbytes // settings.model.token_bytes, seed=size)
            result = results[f"{size}mb"] = _back_and_forth(scene, trajectory, nbytes, settings.repeats)
            result["isolated"] = _isolated(settings, nbytes)
            for kind in ("export", "restore"):
                ratios[f"{kind}_vs_memcpy_{size}mb"] = result.pop(f"{kind}_ratio")
            scene.restart(trajectory)
            result["after_restart"] = {
                "restore_ms": 1e3 * scene.restore(trajectory).seconds,
                "export_ms": 1e3 * _export_all(scene, trajectory).seconds,
            }
            scene.client.abort([trajectory], keep="none", then="finish")
    return results


def _back_and_forth(scene: Scene, trajectory: str, nbytes: int, repeats: int) -> dict[str, Any]:
    copy = MemoryCopy(nbytes + 64 * MB)
    moves: dict[str, list[Move]] = {"export": [], "restore": []}
    copies: dict[str, list[float]] = {"export": [], "restore": []}
    for turn in range(PASSES_UNMEASURED + repeats):
        scene.forget(trajectory)
        for kind, move in (("export", scene.export), ("restore", scene.restore)):
            copied = copy(nbytes)
            done = move(trajectory)
            assert done.nbytes >= nbytes, (kind, done.nbytes, nbytes)
            if turn >= PASSES_UNMEASURED:
                moves[kind].append(done)
                copies[kind].append(copied * done.nbytes / nbytes)
    result: dict[str, Any] = {
        "nbytes": statistics.median(move.nbytes for move in moves["export"]),
        "memcpy_ms": 1e3 * statistics.median(copies["export"] + copies["restore"]),
        "memcpy_best_ms": 1e3 * min(copies["export"] + copies["restore"]),
    }
    for kind, each in moves.items():
        seconds = statistics.median(move.seconds for move in each)
        result[f"{kind}_ms"] = 1e3 * seconds
        result[f"{kind}_best_ms"] = 1e3 * min(move.seconds for move in each)
        result[f"{kind}_gb_per_s"] = result["nbytes"] / seconds / 1e9
        result[f"{kind}_phases"] = in_ms(medians(move.phases for move in each))
        result[f"{kind}_aside"] = in_ms(medians(move.aside for move in each)) if each[0].aside else {}
        result[f"{kind}_all_ms"] = [round(1e3 * move.seconds, 2) for move in each]
        result[f"{kind}_memcpy_all_ms"] = [round(1e3 * seconds, 2) for seconds in copies[kind]]
        result[f"{kind}_ratio"] = result["memcpy_ms"] / result[f"{kind}_ms"]
    return result


def _export_all(scene: Scene, trajectory: str) -> Move:
    scene.forget(trajectory)
    return scene.export(trajectory)


def _cold(settings: Settings, model: Path) -> dict[str, Any]:
    """Medians over processes that have touched no shared memory, in milliseconds."""
    results: dict[str, Any] = {}
    with Scene(_config(settings, model, workers=1, warm_bytes=0)) as scene:
        for size in settings.sizes_mb:
            trajectory = scene.begin(settings.nbytes(size) // settings.model.token_bytes, seed=size)
            scene.export(trajectory)
            exports, restores = [], []
            for _ in range(settings.restarts):
                scene.restart(trajectory)
                restores.append(scene.restore(trajectory).seconds)
                exports.append(_export_all(scene, trajectory).seconds)
            results[f"{size}mb"] = in_ms({"export": statistics.median(exports), "restore": statistics.median(restores)})
            scene.client.abort([trajectory], keep="none", then="finish")
    return results


class Returner:
    """An actor that returns pages as a worker does, and does nothing else."""

    def __init__(self, model: StandIn, pages: int) -> None:
        self._pages = [(Tier.DEVICE, page) for page in range(1, pages + 1)]
        self._storage = _storage(model, pages)

    def pages(self, tokens: int) -> tuple[None, list[Any]]:
        return None, self._storage.gather(self._pages, tokens, self._storage.fence())

    def nothing(self) -> tuple[None, None]:
        return None, None


def _isolated(settings: Settings, nbytes: int) -> dict[str, Any]:
    """Each part of a move alone, in milliseconds, in turns."""
    model = settings.model
    tokens = nbytes // model.token_bytes
    count = -(-tokens // model.page_tokens)
    pages = range(1, count + 1)
    sources = [(Tier.DEVICE, page) for page in pages]
    storage = _storage(model, count)
    fence = storage.fence()
    fingerprint = Fingerprint("isolated")
    sizes = {"page_tokens": model.page_tokens, "token_bytes": model.token_bytes, "tokens": tokens}
    buffers = storage.gather(sources, tokens, fence)
    manifest = describe(buffers, fingerprint=fingerprint, **sizes)
    returner = ray.remote(Returner).options(num_cpus=0).remote(model, count)

    def returned(method: Any, *args: Any) -> tuple[float, Any]:
        """Seconds until the first of what it returns is there, as the pool waits for a manifest, and the second."""
        start = time.monotonic()
        first, second = method.options(num_returns=2).remote(*args)
        ray.get(first)
        return time.monotonic() - start, second

    def turn() -> dict[str, float]:
        time.sleep(SETTLE_S)
        called, _ = returned(returner.nothing)
        both, data = returned(returner.pages, tokens)
        row = {
            "gather": timed(lambda: storage.gather(sources, tokens, fence)),
            "checksum": timed(lambda: describe(buffers, fingerprint=fingerprint, **sizes)),
            "call": called,
            "ray_return": both - called,
            "ray_get": timed(lambda: ray.get(data)),
        }
        views = ray.get(data)
        row["verify"] = timed(lambda: verify(manifest, views, range(count), tokens, fingerprint))
        row["scatter"] = timed(lambda: storage.scatter(pages, tokens, views, fence))
        return row

    rows = [turn() for _ in range(PASSES_UNMEASURED + settings.repeats)]
    ray.kill(returner)
    return in_ms(medians(rows[PASSES_UNMEASURED:]))


def _storage(model: StandIn, pages: int) -> KVStorage:
    storage = KVStorage(
        pages=pages,
        layers=model.layers,
        page_tokens=model.page_tokens,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    storage.pages.fill_(1)
    return storage
