"""Runs the model for one plan and samples: at most one prefill forward and one decode forward.

Where history is replayed every chunk is a forward of its own, padded to one length, and the decode batch
is padded to one size, so that the bits of a row never depend on what else is running.
"""

import time
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout.attention.interface import PrefillBatch
from rollout.engine.batch import Forward, decode_forward, prefill_forward
from rollout.engine.interface import Draw
from rollout.engine.sampling import Sampler, SamplingBatch
from rollout.engine.scheduler import Chunk, Limits, Plan
from rollout.engine.sequence import Sequence
from rollout.kv.fence import Fence
from rollout.kv.storage import KVStorage
from rollout.kv.tiers import Tier
from rollout.model.decoder import Decoder


class Span(NamedTuple):
    """Positions [start, end) of one sequence, that a forward writes."""

    sequence: Sequence
    start: int
    end: int


class Runner:
    """The decoder, its KV pages and the sampler of one worker."""

    def __init__(self, decoder: Decoder, storage: KVStorage, sampler: Sampler, limits: Limits) -> None:
        self._decoder = decoder
        self._storage = storage
        self._sampler = sampler
        self._limits = limits
        self._device = storage.pages.device
        self.prefill_s: float | None = None
        """What the prefill of the last plan took, if that is known: on CUDA it is if something was sampled."""
        self.decode_s: float | None = None
        """What its decode step took, likewise: not if there was a prefill before it that may not be over."""

    @property
    def canary(self) -> bool:
        """Whether one checks every forward."""
        return self._storage.canaries is not None

    @property
    def page_bytes(self) -> int:
        return self._storage.page_bytes

    def fence(self) -> Fence:
        """Everything that was run so far."""
        return self._storage.fence()

    def close(self) -> None:
        """End the decoder's threads."""
        self._decoder.close()

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[Draw]:
        """Compute the KV of the plan's positions; draw where they reach the end of what is known."""
        draws: list[Draw] = []
        alone = self._limits.replays
        self.prefill_s = self.decode_s = None
        start = time.perf_counter()
        for chunks in ([chunk] for chunk in plan.prefill) if alone else [plan.prefill] if plan.prefill else []:
            draws += self._prefill(chunks)
        prefilled = time.perf_counter()
        over = bool(draws) or self._device.type == "cpu"
        if plan.prefill and over:
            self.prefill_s = prefilled - start
        if plan.decode:
            draws += self._decode(plan.decode)
            if over or not plan.prefill:
                self.decode_s = time.perf_counter() - prefilled
        return draws

    def _prefill(self, chunks: Seq[Chunk]) -> list[Draw]:
        rows = self._limits.chunk_tokens if self._limits.replays else None
        hidden_TE = self._forward(
            prefill_forward(chunks, rows=rows, page_tokens=self._storage.page_tokens, device=self._device),
            [Span(chunk.sequence, chunk.start, chunk.end) for chunk in chunks],
        )
        last_rows: list[int] = []
        complete: list[Sequence] = []
        row = 0
        for chunk in chunks:
            row += chunk.end - chunk.start
            if chunk.end == len(chunk.sequence.tokens):
                last_rows.append(row - 1)
                complete.append(chunk.sequence)
        if not complete:
            return []
        return self._sample(hidden_TE[last_rows], complete)

    def _decode(self, sequences: Seq[Sequence]) -> list[Draw]:
        rows = self._limits.max_running if self._limits.replays else None
        hidden_BE = self._forward(
            decode_forward(sequences, rows=rows, page_tokens=self._storage.page_tokens, device=self._device),
            [Span(sequence, sequence.computed, sequence.computed + 1) for sequence in sequences],
        )
        draws = self._sample(hidden_BE, sequences)
        return [draw for draw in draws if draw.sequence.computed + 1 == len(draw.sequence.tokens)]

    def _forward(self, forward: Forward, spans: Seq[Span]) -> Tensor:
        """Hidden states of a forward that writes `spans`; with a canary, after it has checked what that reads.

        Raises `CanaryError`.
        """
        page_tokens = self._storage.page_tokens
        for sequence, start, end in spans:
            self._storage.sums.forget(sequence.pages.table[start // page_tokens : -(-end // page_tokens)])
        canary = self._storage.canaries[Tier.DEVICE] if self._storage.canaries is not None else None
        batch = forward.attention
        if canary is not None:
            tables = batch.tables_SP if isinstance(batch, PrefillBatch) else batch.tables_BP
            known = [sequence.chain_values(0, start) for sequence, start, _ in spans]
            canary.verify([sequence.key for sequence, _, _ in spans], tables, known)
        hidden = self._decoder.forward(forward.ids_T, forward.positions_T, self._storage.pages, batch)
        if canary is not None:
            where = (
                (batch.write_pages_T, batch.write_slots_T)
                if isinstance(batch, PrefillBatch)
                else (batch.write_pages_B, batch.write_slots_B)
            )
            canary.written(
                *where, np.concatenate([sequence.chain_values(start, end) for sequence, start, end in spans])
            )
        for sequence, start, end in spans:
            if start // page_tokens < end // page_tokens:
                self._storage.completed(sequence.pages.table[start // page_tokens : end // page_tokens])
        return hidden

    def _sample(self, hidden_RE: Tensor, sequences: Seq[Sequence]) -> list[Draw]:
        """One draw for each of the first rows; rows past `sequences` are padding."""
        batch = SamplingBatch(
            params=tuple([sequence.assignment.sampling for sequence in sequences]),
            seeds=tuple([sequence.assignment.seed for sequence in sequences]),
            positions=tuple([len(sequence.tokens) for sequence in sequences]),
            banned=tuple([sequence.banned_ids for sequence in sequences]),
        )
        ids_R, logprobs_R = self._sampler.sample(self._decoder.logits(hidden_RE), batch)
        drawn = zip(sequences, ids_R.tolist(), logprobs_R.tolist(), strict=False)
        return [Draw(*each) for each in drawn]
