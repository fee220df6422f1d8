"""Draws tokens: bans, temperature, top-k, top-p, then the Gumbel-max trick on fp32 log-probabilities.

The noise is counter-based: a pure function of (trajectory seed, absolute position, token id). So a draw
depends on its own logits, parameters, seed and position, not on the batch, the row or any hidden state.
Its random bits are integer arithmetic and the same on every device; the two logarithms on top of them are
the same on one kind of device and build, and may differ in the last place between a CPU and a GPU.
A row with NaN among its logits gets a NaN log-probability, and spoils no other row.

Shape letters: R rows, V vocabulary, n candidates of one row, best first.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rollout.types import SamplingParams

CANDIDATES = (1024, 8192)
"""How many of the best tokens top-p tries before it sorts the whole vocabulary."""

SCRATCH_BYTES = 512 << 20
"""What a GPU may spend on the temporaries of one call."""
ROW_COPIES = 6
"""Temporaries of four bytes a token that a row takes."""

_UNIT = (1 - 2**-24) * 2**-31
"""Scales 31 bits to below 1, also where fp32 rounded them up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """What to draw, one entry per row of logits."""

    params: tuple[SamplingParams, ...]
    seeds: tuple[int, ...]
    """Trajectory seeds, 64 bits."""
    positions: tuple[int, ...]
    """Absolute position, prompt included, of the token to be drawn."""
    banned: tuple[tuple[int, ...], ...]
    """Ids that may not be drawn; those outside the vocabulary are ignored."""

    def __post_init__(self) -> None:
        sizes = (len(self.params), len(self.seeds), len(self.positions), len(self.banned))
        assert len(set(sizes)) == 1, f"params, seeds, positions and banned of unequal length: {sizes}"

    def __len__(self) -> int:
        return len(self.params)

    def rows(self, start: int, stop: int) -> "SamplingBatch":
        return SamplingBatch(
            params=self.params[start:stop],
            seeds=self.seeds[start:stop],
            positions=self.positions[start:stop],
            banned=self.banned[start:stop],
        )


class Sampler(Protocol):
    """Samples one token per row."""

    def sample(self, logits_RV: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        """Ids (int64) and their log-probabilities (fp32) for the first `len(batch)` rows; the rest is padding.

        The log-probability is under the distribution that was drawn from. A greedy row takes the best allowed
        token, and reports its log-probability at temperature 1 without truncation. The logits may be written to.
        """
        ...


class TorchSampler:
    """In plain torch, on any device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._id_bits_V = id_bits(vocab_size, device)

    @torch.no_grad()
    def sample(self, logits_RV: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        rows = len(batch)
        assert logits_RV.shape[0] >= rows, f"{rows} rows to draw, {logits_RV.shape[0]} rows of logits"
        assert logits_RV.shape[1] == self._vocab_size, f"{logits_RV.shape[1]} logits, {self._vocab_size} tokens"
        # On a CPU a row stays in the cache from the first operation to the last, and every row has the same bits
        # wherever it stands, since threads and vectors split each in the same way.
        step = 1 if self._device.type == "cpu" else max(1, SCRATCH_BYTES // (ROW_COPIES * 4 * self._vocab_size))
        ids_R = torch.empty(rows, dtype=torch.int64, device=self._device)
        logprobs_R = torch.empty(rows, dtype=torch.float32, device=self._device)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            ids_R[part], logprobs_R[part] = self._draw(logits_RV[:rows][part], batch.rows(start, start + step))
        return ids_R, logprobs_R

    def _draw(self, logits_RV: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        scaled_RV = logits_RV.to(torch.float32, copy=True)
        for row, banned in enumerate(batch.banned):
            if ids := [i for i in banned if i < self._vocab_size]:
                scaled_RV[row, ids] = -torch.inf
        scaled_RV.sub_(scaled_RV.amax(dim=1, keepdim=True))
        # A temperature below the smallest fp32 number would make the best token 0 / 0.
        temperatures = [max(p.temperature, 2.0**-126) if p.temperature else 1.0 for p in batch.params]
        if any(temperature != 1.0 for temperature in temperatures):
            scaled_RV.div_(torch.tensor(temperatures, device=self._device)[:, None])
        for row, params in enumerate(batch.params):
            if params.temperature and (params.top_k or params.top_p < 1.0):
                _truncate_(scaled_RV[row], params.top_k, params.top_p)
        logprobs_RV = torch.log_softmax(scaled_RV, dim=1)
        greedy = [p.temperature == 0.0 for p in batch.params]
        if all(greedy):
            ids_R = scaled_RV.argmax(dim=1)
        else:
            score_RV = self._log_exponentials(batch)
            torch.sub(logprobs_RV, score_RV, out=score_RV)
            if any(greedy):
                score_RV = torch.where(torch.tensor(greedy, device=self._device)[:, None], scaled_RV, score_RV)
            ids_R = score_RV.argmax(dim=1)
        return ids_R, logprobs_RV.gather(1, ids_R[:, None])[:, 0]

    def _log_exponentials(self, batch: SamplingBatch) -> Tensor:
        """Logarithms of standard exponential variates [R, V]; their negatives are Gumbel noise."""
        keys_R2 = torch.tensor(row_keys(batch), dtype=torch.int32, device=self._device)
        bits_RV = torch.bitwise_xor(self._id_bits_V, keys_R2[:, :1]).add_(keys_R2[:, 1:])
        # The winner has the smallest of V variates, so precision is needed near 0: there the bits count all.
        uniform_RV = _mix_(bits_RV).bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(-_UNIT)
        return uniform_RV.log1p_().neg_().log_()


def id_bits(vocab_size: int, device: torch.device) -> Tensor:
    """What each token id contributes to the noise, int32 [V]."""
    return _mix_(_mix_(torch.arange(vocab_size, dtype=torch.int32, device=device)).add_(0x1B873593))


def row_keys(batch: SamplingBatch) -> list[tuple[int, int]]:
    """Two 32-bit keys for each draw."""
    draws = zip(batch.seeds, batch.positions, strict=True)
    digests = [hashlib.blake2b(struct.pack("<QQ", *draw), digest_size=8).digest() for draw in draws]
    return [struct.unpack("<ii", digest) for digest in digests]


def _mix_(bits: Tensor) -> Tensor:
    """Scramble int32 values in place, without collisions (constants: Wellons, hash-prospector, `lowbias32`).

    The last step of the original is left out: it changes no bit below a zero upper half.
    """
    spare = torch.empty_like(bits)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        # >> copies the sign; the mask makes it a shift of unsigned bits.
        torch.bitwise_right_shift(bits, shift, out=spare).bitwise_and_((1 << (32 - shift)) - 1)
        bits.bitwise_xor_(spare).mul_(factor)
    return bits


def _truncate_(logits_V: Tensor, top_k: int, top_p: float) -> None:
    """Set to -inf what top-k, and then top-p on what that leaves, do not keep."""
    if top_k:
        _keep_(logits_V, _best(logits_V, top_k)[:top_k])
    if top_p < 1.0:
        probs_V = logits_V.double().softmax(dim=0)
        for count in (*CANDIDATES, logits_V.shape[0]):
            best_n = _best(logits_V, count)
            mass_n = probs_V[best_n].cumsum(dim=0)
            if len(best_n) < count or mass_n[-1] >= top_p:
                break
        _keep_(logits_V, best_n[: int((mass_n < top_p).sum()) + 1])


def _best(logits_V: Tensor, count: int) -> Tensor:
    """Ids by (logit descending, id ascending): the best `count` or more, or all that are not -inf."""
    least = logits_V.topk(min(count, logits_V.shape[0]), sorted=False).values.amin()
    ids_n = ((logits_V >= least) & (logits_V > -torch.inf)).nonzero()[:, 0]
    return ids_n[logits_V[ids_n].argsort(descending=True, stable=True)]


def _keep_(logits_V: Tensor, ids_n: Tensor) -> None:
    kept_n = logits_V[ids_n]
    logits_V.fill_(-torch.inf)
    logits_V[ids_n] = kept_n
