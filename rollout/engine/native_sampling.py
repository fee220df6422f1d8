"""The sampler by kernels of our own: one pass over the logits of a row, rows spread over the threads.

Draws what `engine.sampling` draws, with the same noise, up to the last places of exp and log.
"""

import torch
from torch import Tensor

from rollout.engine.sampling import SamplingBatch, id_bits, row_keys
from rollout.native.library import LANES, Draws, Kernels


class NativeSampler:
    """Samples one token per row, on the CPU."""

    def __init__(self, vocab_size: int, kernels: Kernels) -> None:
        self._vocab_size = vocab_size
        self._kernels = kernels
        self._id_bits_V = torch.nn.functional.pad(id_bits(vocab_size, torch.device("cpu")), (0, LANES))
        self._histograms = torch.empty(0, dtype=torch.uint8)

    def sample(self, logits_RV: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        """As `Sampler.sample`; writes -inf to the logits of what a row may not draw."""
        rows = len(batch)
        assert logits_RV.shape[0] >= rows, f"{rows} rows to draw, {logits_RV.shape[0]} rows of logits"
        assert logits_RV.shape[1] == self._vocab_size, f"{logits_RV.shape[1]} logits, {self._vocab_size} tokens"
        assert logits_RV.stride(1) == 1
        bans = [[i for i in banned if i < self._vocab_size] for banned in batch.banned]
        ban_offsets = [0]
        for banned in bans:
            ban_offsets.append(ban_offsets[-1] + len(banned))
        arrays = {
            "temperatures": torch.tensor([params.temperature for params in batch.params], dtype=torch.float32),
            "top_k": torch.tensor([min(params.top_k, self._vocab_size) for params in batch.params], dtype=torch.int32),
            "top_p": torch.tensor([params.top_p for params in batch.params], dtype=torch.float64),
            "keys": torch.tensor(row_keys(batch), dtype=torch.int32),
            "ban_offsets": torch.tensor(ban_offsets, dtype=torch.int32),
            "bans": torch.tensor([i for banned in bans for i in banned], dtype=torch.int32),
            "ids": torch.empty(rows, dtype=torch.int64),
            "logprobs": torch.empty(rows, dtype=torch.float32),
        }
        if any(params.top_k or params.top_p < 1.0 for params in batch.params) and not len(self._histograms):
            self._histograms = torch.empty(self._kernels.threads * self._kernels.histogram_bytes, dtype=torch.uint8)
        self._kernels.sample(
            Draws(
                rows=rows,
                vocabulary=self._vocab_size,
                stride=logits_RV.stride(0),
                id_bits=self._id_bits_V.data_ptr(),
                **{name: array.data_ptr() for name, array in arrays.items()},
            ),
            bf16=logits_RV.dtype is torch.bfloat16,
            logits=logits_RV.data_ptr(),
            histograms=self._histograms.data_ptr(),
        )
        return arrays["ids"], arrays["logprobs"]
