"""A digest of weights: who has the same digest has the same names, dtypes, shapes and bytes.

Of each tensor a sum is kept, so the order they come in does not matter, and a tensor can be replaced.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from xxhash import xxh3_128


class WeightsDigest:
    """Against accidents, not against adversaries: XXH3, 128 bits."""

    def __init__(self) -> None:
        self._sums: dict[str, bytes] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, or put it in the place of the one that had its name."""
        digest = xxh3_128(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        self._sums[name] = digest.digest()

    def hexdigest(self) -> str:
        return xxh3_128(b"".join(self._sums[name] for name in sorted(self._sums))).hexdigest()


def weights_digest(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Of tensors under their names, in any order."""
    digest = WeightsDigest()
    for name, tensor in named_tensors:
        digest.put(name, tensor)
        del tensor  # before the next one is made
    return digest.hexdigest()
