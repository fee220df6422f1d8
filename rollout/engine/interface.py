"""What an engine drives: the model, the copies between tiers, the restores from a pool.

A worker has `runner.Runner`, `kv.copier.Copier` and `kv.restore.Restorer`; the simulator has its own, on a virtual
clock.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from rollout.engine.scheduler import Plan
from rollout.engine.sequence import Sequence
from rollout.kv.chain import ChainValues
from rollout.kv.copier import Copied
from rollout.kv.fence import Fence
from rollout.kv.restore import Restored
from rollout.kv.tiers import Copy
from rollout.types import Image, SequenceKey


class Draw(NamedTuple):
    """A token sampled after everything that `sequence` knows."""

    sequence: Sequence
    token: int
    logprob: float
    """NaN if the model's logits are not numbers."""


class ModelRunner(Protocol):
    """Computes plans, on pages that it owns."""

    @property
    def prefill_s(self) -> float | None:
        """What the prefill of the last plan took, if that is known."""
        ...

    @property
    def decode_s(self) -> float | None:
        """What the decode step of the last plan took, without its prefill, if that is known."""
        ...

    @property
    def canary(self) -> bool:
        """Whether restored pages are to be checked against the tokens they are of."""
        ...

    @property
    def page_bytes(self) -> int: ...

    def run(self, plan: Plan) -> list[Draw]:
        """Compute the KV of the plan's positions; draw where they reach the end of what is known."""
        ...

    def fence(self) -> Fence:
        """Everything that was run so far."""
        ...

    def close(self) -> None: ...


class PageCopier(Protocol):
    """Copies between the tiers of one worker, in the order in which they are submitted."""

    def submit(self, copies: Seq[Copy], after: Fence) -> None:
        """Execute what a step planned, after the computation before `after`."""
        ...

    def poll(self) -> list[Copied]:
        """Copies completed since the last call."""
        ...

    def close(self) -> None: ...


class ImageRestorer(Protocol):
    """Reads images from a pool into reserved pages."""

    @property
    def restored_bytes(self) -> int:
        """Since the start."""
        ...

    def submit(
        self,
        key: SequenceKey,
        image: Image,
        first_page: int,
        pages: Seq[int],
        after: Fence,
        chain: ChainValues | None = None,
    ) -> None:
        """Read pages `first_page`… of `image` into `pages`."""
        ...

    def cancel(self, key: SequenceKey) -> bool:
        """Whether the restore had not begun, and never will; otherwise it goes on to its completion."""
        ...

    def poll(self) -> list[Restored]:
        """Restores completed since the last call."""
        ...

    def close(self) -> None: ...
