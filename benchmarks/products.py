"""Ways to compute a linear map on this machine's cores, by name; who compares with the limit takes the fastest.

Each makes, of a weight [out, in] in bfloat16 and a number of rows, what maps so many rows.
"""

import logging
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.errors import NativeKernelsError
from rollout.model.packed import PackedLinear
from rollout.native.library import Kernels, Model

Linear = Callable[[Tensor], object]
Pack = Callable[[Tensor, int], Linear]

logger = logging.getLogger(__name__)


def find_products(threads: int) -> Mapping[str, Pack]:
    """Those that work here: oneDNN with packed weights and with plain ones, and our own kernels with theirs."""
    found: dict[str, Pack] = {"onednn_packed": _onednn, "onednn_plain": _plain}
    try:
        kernels = Kernels(threads)
    except NativeKernelsError as error:
        logger.warning("the limit is without our own kernels: %s", error)
        return found
    return found | {"native": lambda weight, rows: _native(kernels, weight, rows)}


def _onednn(weight: Tensor, rows: int) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _plain(weight: Tensor, rows: int) -> Linear:
    return lambda x: F.linear(x, weight)


def _native(kernels: Kernels, weight: Tensor, rows: int) -> Linear:
    """As the head of a model that has nothing else."""
    columns, width = weight.shape
    packed = PackedLinear(width, {"weight": columns}, bias=False, dtype=weight.dtype)
    packed.weight("weight").write(weight)
    model = Model(hidden=width, head=packed.native())
    out = torch.empty((rows, packed.columns), dtype=weight.dtype)

    def linear(x: Tensor, keep: PackedLinear = packed) -> Tensor:  # `model` knows its address only
        assert x.is_contiguous(), x.stride()
        assert x.shape == (rows, width), (x.shape, rows, width)
        kernels.logits(model, bf16=True, hidden=x.data_ptr(), rows=rows, out=out.data_ptr())
        return out[:, :columns]

    return linear
