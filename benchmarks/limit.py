"""How fast this machine could be: its matrix products and memory reads alone, at the rates measured here and now.

A pass is every linear map of the model, the weights of every layer distinct, so that caches hold of them what they
would in reality. The fastest of `products` is the limit. It is as many calls as there are maps; what so many calls take
with next to nothing to compute is measured, too, and subtracted, but no more than half of a pass.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import timed
from benchmarks.products import Pack, find_products
from rollout.model.spec import ModelSpec

PASSES = 5
ENOUGH_S = 0.5
"""Passes of so many seconds together are as many as needed."""
KEPT = 12
"""Passes whose packed weights are kept: those of one case."""
TINY = (32, 32)
"""Weights of a call that computes next to nothing."""
READ_BYTES = 1 << 30

READERS: Mapping[str, Callable[[Tensor], object]] = {
    "sum_float64": lambda words: words.view(torch.float64).sum(),
    "max_float32": lambda words: words.view(torch.float32).max(),
}


class Passes:
    """All linear maps of a model, ready for `rows` rows."""

    def __init__(self, weights: Mapping[tuple[int, int], list[Tensor]], pack: Pack, rows: int) -> None:
        generator = torch.Generator().manual_seed(rows)
        self._maps = [
            (pack(weight, rows), x)
            for (_, width), each in weights.items()
            for x in [torch.randn(rows, width, generator=generator).bfloat16()]
            for weight in each
        ]
        self()

    def __call__(self) -> None:
        for linear, x in self._maps:
            linear(x)

    def seconds(self) -> float:
        """Of one pass, the fastest: what slows others is not the machine's limit."""
        passes = [timed(self)]
        while len(passes) < PASSES and sum(passes) < ENOUGH_S:
            passes.append(timed(self))
        return min(passes)


class Limit:
    """The machine's rates for one model, measured anew by every call."""

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        self._spec = spec
        self._products = find_products(threads)
        self._passes = lru_cache(KEPT)(self._make_passes)
        generator = torch.Generator().manual_seed(0)

        def weights(shape: tuple[int, int], count: int) -> list[Tensor]:
            return [torch.randn(shape, generator=generator).bfloat16() for _ in range(count)]

        heads = spec.heads + 2 * spec.kv_heads
        shapes = (
            (heads * spec.head_dim, spec.hidden),
            (spec.hidden, spec.heads * spec.head_dim),
            (2 * spec.intermediate, spec.hidden),
            (spec.hidden, spec.intermediate),
        )
        self._weights = {
            "layers": {shape: weights(shape, spec.layers) for shape in shapes},
            "calls": {TINY: weights(TINY, len(shapes) * spec.layers)},
            "head": {(spec.vocab_size, spec.hidden): weights((spec.vocab_size, spec.hidden), 1)},
        }
        self._words = torch.ones(READ_BYTES // 8, dtype=torch.int64)

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        return 2 * self._spec.layers * self._spec.kv_heads * self._spec.head_dim * 2

    @property
    def products(self) -> list[str]:
        """Names of those that work here."""
        return list(self._products)

    def gemm_seconds(self, part: str, rows: int, calls: Mapping[str, float]) -> dict[str, float]:
        """Of a pass over `layers` or the `head`, by product, without what its `calls` themselves take."""
        passes = {name: self._passes(part, name, rows).seconds() for name in self._products}
        share = 1.0 if part == "layers" else 1.0 / len(self._weights["calls"][TINY])
        return {name: seconds - min(seconds / 2, share * calls[name]) for name, seconds in passes.items()}

    def call_seconds(self) -> dict[str, float]:
        """Of as many calls as a pass over the layers has, by product."""
        return {name: self._passes("calls", name, 1).seconds() for name in self._products}

    def read_bytes_per_s(self) -> dict[str, float]:
        """By reader, each over more than any cache holds."""
        return {
            name: READ_BYTES / min(timed(partial(read, self._words)) for _ in range(PASSES))
            for name, read in READERS.items()
        }

    def decode_step(self, batch: int, context_tokens: float) -> dict[str, Any]:
        """Seconds of one step: all products at that batch, and one read of the KV."""
        calls = self.call_seconds()
        layers, head = self.gemm_seconds("layers", batch, calls), self.gemm_seconds("head", batch, calls)
        gemm = {name: layers[name] + head[name] for name in self._products}
        fastest = min(gemm, key=lambda name: gemm[name])
        read = self.read_bytes_per_s()
        kv = batch * context_tokens * self.token_bytes / max(read.values())
        return {
            "gemm_s": gemm,
            "kv_s": kv,
            "read_bytes_per_s": read,
            "call_overhead_s": calls[fastest],
            "seconds": gemm[fastest] + kv,
        }

    def prefill(self, prompts: int, prompt_tokens: int, rows: int) -> dict[str, Any]:
        """Seconds for the products alone, of all tokens in pieces of `rows`, and of the head for each prompt's last."""
        calls = self.call_seconds()
        layers, head = self.gemm_seconds("layers", rows, calls), self.gemm_seconds("head", prompts, calls)
        passes = prompts * prompt_tokens / rows
        gemm = {name: layers[name] * passes + head[name] for name in self._products}
        fastest = min(gemm, key=lambda name: gemm[name])
        return {"gemm_s": gemm, "call_overhead_s": calls[fastest] * passes, "seconds": gemm[fastest]}

    def _make_passes(self, part: str, product: str, rows: int) -> Passes:
        return Passes(self._weights[part], self._products[product], rows)
