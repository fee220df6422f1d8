"""Weights as the native kernels read them: panels of 32 output columns, word by word along the inputs.

A word is two bf16 elements or one of fp32. Parts of a fused map begin at whole panels; the columns between them
have zero weights. See `rollout/native/src/linear.h`.

Shape letters: P panels, c columns of a panel, s words of an input row, w elements of a word; X inputs, Y outputs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rollout.model.weights import Target
from rollout.native.library import PANEL, Linear


class PackedLinear:
    """y = x W^T + b, fused from parts: the output of a part begins at a multiple of PANEL columns."""

    def __init__(self, x: int, parts: Mapping[str, int], *, bias: bool, dtype: torch.dtype) -> None:
        """`parts` are output columns under their names; `x` must be a whole number of words."""
        word = 4 // dtype.itemsize
        assert x % word == 0, f"{x} inputs are no whole number of words of {word}"
        panels = {name: -(-columns // PANEL) for name, columns in parts.items()}
        self._parts = parts
        self._x = x
        self._weight_Pscw = torch.zeros((sum(panels.values()), x // word, PANEL, word), dtype=dtype)
        self._bias_Pc = torch.zeros((sum(panels.values()), PANEL), dtype=dtype) if bias else None
        self._first = {}
        first = 0
        for name, count in panels.items():
            self._first[name] = first
            first += count

    def weight(self, part: str) -> Target:
        """Where the rows of a part's W, [Y, X], go."""
        columns_PcX = self._weight_Pscw.permute(0, 2, 1, 3)
        return Target((self._parts[part], self._x), self._pieces(part, columns_PcX))

    def bias(self, part: str) -> Target:
        """Where a part's b, [Y], goes."""
        assert self._bias_Pc is not None
        return Target((self._parts[part],), self._pieces(part, self._bias_Pc))

    @property
    def columns(self) -> int:
        """Of the output, padding included."""
        return self._weight_Pscw.shape[0] * PANEL

    def native(self) -> Linear:
        """Its addresses; valid as long as this object is."""
        bias = self._bias_Pc.data_ptr() if self._bias_Pc is not None else None
        panels, steps = self._weight_Pscw.shape[:2]
        return Linear(words=self._weight_Pscw.data_ptr(), bias=bias, steps=steps, panels=panels)

    def _pieces(self, part: str, memory: Tensor) -> tuple[tuple[slice, Tensor], ...]:
        """Whole panels, and what is left of the last one."""
        columns, first = self._parts[part], self._first[part]
        whole, rest = divmod(columns, PANEL)
        pieces = []
        if whole:
            pieces.append((slice(0, whole * PANEL), memory[first : first + whole]))
        if rest:
            pieces.append((slice(whole * PANEL, columns), memory[first + whole, :rest]))
        return tuple(pieces)
