"""Trajectories as tensors: every per-token column aligned with the token ids, for any trainer.

B trajectories, S positions of prompt and output, padded on the right. Column entries at position s are about the token
at s, which the model predicts at s - 1.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from rollout.errors import InvalidArgumentError
from rollout.types import Trajectory

NO_VERSION = -1
"""Of positions that no weights sampled: prompts, appended tokens, padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tensors of shape [B, S]."""

    ids_BS: Tensor
    """Token ids, int64; 0 in padding."""
    attention_BS: Tensor
    """Where there is a token, bool."""
    mask_BS: Tensor
    """Where a token was sampled, which is what is trained on, bool. Prompts and appended tokens are not."""
    behaviour_BS: Tensor
    """Log-probability with which the token was sampled, float32; 0 elsewhere."""
    versions_BS: Tensor
    """Of the weights that sampled the token, int64; `NO_VERSION` elsewhere."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Self:
        """One row a trajectory, in order. Raises `InvalidArgumentError` if there are none."""
        if not trajectories:
            raise InvalidArgumentError("trajectories: got none, allowed: at least one")
        shape = (len(trajectories), max(len(one.prompt_ids) + len(one.output_ids) for one in trajectories))
        batch = cls(
            ids_BS=torch.zeros(shape, dtype=torch.int64),
            attention_BS=torch.zeros(shape, dtype=torch.bool),
            mask_BS=torch.zeros(shape, dtype=torch.bool),
            behaviour_BS=torch.zeros(shape, dtype=torch.float32),
            versions_BS=torch.full(shape, NO_VERSION, dtype=torch.int64),
        )
        for row, one in enumerate(trajectories):
            start, stop = len(one.prompt_ids), len(one.prompt_ids) + len(one.output_ids)
            versions = [
                NO_VERSION if run.version is None else run.version for run in one.versions for _ in range(run.tokens)
            ]
            batch.ids_BS[row, :stop] = torch.tensor(one.prompt_ids + one.output_ids)
            batch.attention_BS[row, :stop] = True
            batch.mask_BS[row, start:stop] = torch.tensor(one.loss_mask, dtype=torch.bool)
            batch.behaviour_BS[row, start:stop] = torch.tensor(one.logprobs)
            batch.versions_BS[row, start:stop] = torch.tensor(versions, dtype=torch.int64)
        return batch

    @property
    def sampled_tokens(self) -> int:
        return int(self.mask_BS.sum())

    def to(self, device: torch.device | str) -> Self:
        """A copy on `device`, or itself if it is there."""
        return self._each(lambda column: column.to(device))

    def rows(self, start: int, stop: int) -> Self:
        """Rows [start, stop), without the padding that none of them needs."""
        longest = int(self.attention_BS[start:stop].sum(dim=1).max())
        return self._each(lambda column: column[start:stop, :longest])

    def split(self, rows: int, within: slice | None = None) -> Iterator[tuple[slice, Self]]:
        """All rows, or those `within`, in pieces of `rows` at most, each with where it is."""
        start, stop = (0, len(self)) if within is None else (within.start, within.stop)
        for first in range(start, stop, rows):
            place = slice(first, min(first + rows, stop))
            yield place, self.rows(place.start, place.stop)

    @property
    def width(self) -> int:
        """Positions: S."""
        return self.ids_BS.shape[1]

    def __len__(self) -> int:
        return len(self.ids_BS)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(**{field.name: change(getattr(self, field.name)) for field in fields(self)})
