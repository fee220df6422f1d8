"""What `decode` and `prefill` measure without a service: the machine's limit, and how long replacing weights takes.

A server like a peer (`benchmarks.peers.protocol`), but with our interpreter. In a process of its own it gets its memory
as a worker does, in huge pages, which torch decides once per process, and it is stopped while a side has its turn.

Options: `model`, `cores`. Does `decode_step` and `prefill` as `Limit`, and `replace`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.limit import Limit
from benchmarks.measure import timed
from benchmarks.peer import Peer
from benchmarks.peers.protocol import Prepared, serve
from rollout.config import EngineConfig
from rollout.engine.kernels import choose_kernel, make_decoder
from rollout.model.spec import read_spec
from rollout.model.weights import load_weights, stream_safetensors

UNMEASURED = 1


def alone(model: Path, cores: Sequence[int]) -> Peer:
    """The server, started."""
    return Peer("limit", [sys.executable, "-m", "benchmarks.alone"], {"model": str(model), "cores": list(cores)})


def prepare(options: dict[str, Any]) -> Prepared:
    model, threads = Path(options["model"]), len(options["cores"])
    torch.set_num_threads(threads)
    limit = Limit(read_spec(model), threads)
    described = {"products": limit.products, "threads": torch.get_num_threads()}
    return described, {
        "decode_step": lambda request: limit.decode_step(**request),
        "prefill": lambda request: limit.prefill(**request),
        "replace": lambda request: replace(model, **request),
    }


def replace(model: Path, turns: int) -> dict[str, Any]:
    """Seconds of replacing all weights of a decoder by tensors in memory, and of copying those tensors plainly."""
    spec, config = read_spec(model), EngineConfig(device="cpu")
    kernel = choose_kernel(config, spec, torch.bfloat16)
    decoder, _ = make_decoder(kernel, config, spec, torch.bfloat16)
    tensors = {name: tensor.clone() for name, tensor in stream_safetensors(model)}
    copies = {name: tensor.clone() for name, tensor in tensors.items()}

    def copy() -> None:
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)

    seconds: dict[str, list[float]] = {"replace": [], "memcpy": []}
    try:
        for _ in range(UNMEASURED + turns):
            seconds["replace"].append(timed(lambda: load_weights(decoder, tensors.items())))
            seconds["memcpy"].append(timed(copy))
    finally:
        decoder.close()
    return {
        "kernels": decoder.name,
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        **{name: each[UNMEASURED:] for name, each in seconds.items()},
    }


if __name__ == "__main__":
    serve(prepare)
