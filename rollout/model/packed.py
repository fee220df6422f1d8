"""Weights as the native kernels read them: panels of 32 output columns, word by word along the inputs.

A word is two bf16 elements or one of fp32. Parts of a fused map begin at whole panels; the columns between them
have zero weights. See `rollout/native/src/linear.h`.

Shape letters: P panels, c columns of a panel, s words of an input row, w elements of a word; X inputs, Y outputs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.memory import has_memory
from rollout.model.weights import Target, Whole
from rollout.native.library import PANEL, Kernels, Linear

CHUNK_BYTES = 1 << 20
"""Of rows that are converted at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """The rows of a W, [Y, X], as panels of their own, the last of which may be partly theirs."""

    rows: int
    panels_Pscw: Tensor
    copy_YX: Tensor | None
    """Where the rows are kept as they come, too."""
    kernels: Kernels | None
    """Without them torch packs, several times slower."""

    @property
    def shape(self) -> tuple[int, int]:
        _, words, _, word = self.panels_Pscw.shape
        return self.rows, words * word

    @property
    def dtype(self) -> torch.dtype:
        return self.panels_Pscw.dtype

    def write(self, tensor: Tensor) -> None:
        assert has_memory(self.panels_Pscw), "the weights were released"
        if self.kernels is None:
            self._write_views(tensor)
        elif tensor.dtype is self.dtype and tensor.device.type == "cpu" and tensor.is_contiguous():
            self._pack(self.kernels, tensor, first=0)
        else:
            panel_bytes = PANEL * self.shape[1] * self.dtype.itemsize
            rows = PANEL * max(1, CHUNK_BYTES // panel_bytes)
            for first in range(0, self.rows, rows):
                chunk = tensor[first : first + rows].to("cpu", self.dtype).contiguous()
                self._pack(self.kernels, chunk, first=first)

    def read(self) -> Tensor:
        """Asserts that a copy, if there is one, holds the same."""
        assert has_memory(self.panels_Pscw), "the weights were released"
        read_YX = torch.empty(self.shape, dtype=self.dtype)
        if self.kernels is None:
            for rows, view in self._views():
                read_YX[rows].view(view.shape).copy_(view)
        else:
            panels, steps = self.panels_Pscw.data_ptr(), self.panels_Pscw.shape[1]
            self.kernels.unpack(panels=panels, count=self.rows, steps=steps, rows=read_YX.data_ptr())
        if self.copy_YX is not None:
            same = torch.equal(read_YX.view(torch.uint8), self.copy_YX.view(torch.uint8))
            assert same, "the panels hold other rows than their copy"
        return read_YX

    def _pack(self, kernels: Kernels, rows_YX: Tensor, *, first: int) -> None:
        """Write rows from a whole panel on."""
        copy = self.copy_YX[first:].data_ptr() if self.copy_YX is not None else None
        kernels.pack(
            rows=rows_YX.data_ptr(),
            count=len(rows_YX),
            steps=self.panels_Pscw.shape[1],
            panels=self.panels_Pscw[first // PANEL :].data_ptr(),
            copy=copy,
        )

    def _write_views(self, tensor: Tensor) -> None:
        for rows, view in self._views():
            view.copy_(tensor[rows].reshape(view.shape))
        if self.copy_YX is not None:
            self.copy_YX.copy_(tensor)

    def _views(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows, and a view of the panels with their elements in order: whole panels, and what is left."""
        columns_Pcsw = self.panels_Pscw.permute(0, 2, 1, 3)
        whole, rest = divmod(self.rows, PANEL)
        if whole:
            yield slice(0, whole * PANEL), columns_Pcsw[:whole]
        if rest:
            yield slice(whole * PANEL, self.rows), columns_Pcsw[whole, :rest]


class PackedLinear:
    """y = x W^T + b, fused from parts: the output of a part begins at a multiple of PANEL columns."""

    def __init__(
        self, x: int, parts: Mapping[str, int], *, bias: bool, dtype: torch.dtype, kernels: Kernels | None = None
    ) -> None:
        """`parts` are output columns under their names; `x` must be a whole number of words.

        `kernels` write the weights, on their team.
        """
        word = 4 // dtype.itemsize
        assert x % word == 0, f"{x} inputs are no whole number of words of {word}"
        self._parts = parts
        self._kernels = kernels
        self._panels = {}
        first = 0
        for name, columns in parts.items():
            self._panels[name] = slice(first, first + -(-columns // PANEL))
            first = self._panels[name].stop
        self._weight_Pscw = torch.empty((first, x // word, PANEL, word), dtype=dtype)
        self._bias_Pc = torch.empty((first, PANEL), dtype=dtype) if bias else None
        self.clear_padding()

    def clear_padding(self) -> None:
        """Zeros where no part has columns."""
        for name, columns in self._parts.items():
            last, rest = self._panels[name].stop - 1, columns % PANEL
            if rest:
                self._weight_Pscw[last, :, rest:] = 0
                if self._bias_Pc is not None:
                    self._bias_Pc[last, rest:] = 0

    def weight(self, part: str, *, copy_YX: Tensor | None = None) -> Target:
        """Where a part's W, [Y, X], goes."""
        return PackedRows(
            rows=self._parts[part],
            panels_Pscw=self._weight_Pscw[self._panels[part]],
            copy_YX=copy_YX,
            kernels=self._kernels,
        )

    def bias(self, part: str) -> Target:
        """Where a part's b, [Y], goes."""
        assert self._bias_Pc is not None
        return Whole(self._bias_Pc[self._panels[part]].view(-1)[: self._parts[part]])

    def memory(self) -> tuple[Tensor, ...]:
        """Everything that it holds."""
        return (self._weight_Pscw,) if self._bias_Pc is None else (self._weight_Pscw, self._bias_Pc)

    @property
    def columns(self) -> int:
        """Of the output, padding included."""
        return self._weight_Pscw.shape[0] * PANEL

    def native(self) -> Linear:
        """Its addresses; valid as long as this object has its memory."""
        bias = self._bias_Pc.data_ptr() if self._bias_Pc is not None else None
        panels, steps = self._weight_Pscw.shape[:2]
        return Linear(words=self._weight_Pscw.data_ptr(), bias=bias, steps=steps, panels=panels)
