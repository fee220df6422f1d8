"""What a machine takes for everything that takes time, and how much KV it has room for.

Times are those of one worker that does nothing else; what exports, restores and copies cost its decoding is
`slowdown`. Nothing here decides anything.
"""

from dataclasses import dataclass

from rollout.control.paces import Pace, PrefillTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """Seconds, bytes, tokens and pages."""

    prefill_s: tuple[float, ...]
    """Seconds to prefill one token, by its position; see `PrefillTimes`."""
    step: Pace
    """Seconds of a decode step, by sequences in the batch."""
    kv_token_s: float = 0.0
    """Seconds of a decode step for each position of KV that it reads."""
    export: Pace
    """Seconds from the pool's call of the worker until the pool has the object, by bytes."""
    restore: Pace
    """Seconds to read an image from the pool into device pages, by bytes."""
    save: Pace
    """Seconds of one copy from the device to host memory, by bytes."""
    load: Pace
    """Seconds of one copy from host memory to the device, by bytes."""
    latency_s: float
    """Seconds of a call between any two of controller, workers and pool, one way."""
    slowdown: float = 0.0
    """Share of its speed that a worker loses while it exports, restores or copies; 0 to 1."""
    export_lanes: int = 2
    """Exports that one worker makes at the same time, each as fast as if it were alone."""
    token_bytes: int
    """Bytes of KV of one token."""
    page_tokens: int
    """Tokens of a KV page."""
    device_pages: int
    """Pages of the device, of one worker."""
    host_pages: int = 0
    """Pages of host memory, of one worker."""
    pool_bytes: int
    """Budget of the pool."""
    max_context: int
    """Most tokens of a trajectory, prompt included."""

    def __post_init__(self) -> None:
        assert self.prefill_s, "prefill_s: no rate"
        assert 0.0 <= self.slowdown <= 1.0, f"slowdown: got {self.slowdown}, allowed: 0 … 1"
        assert self.export_lanes >= 1, f"export_lanes: got {self.export_lanes}, allowed: 1 or more"

    @property
    def page_bytes(self) -> int:
        return self.page_tokens * self.token_bytes

    def prefill_seconds(self, start: int, end: int) -> float:
        """Of positions [start, end) of one sequence."""
        return PrefillTimes(self.prefill_s).seconds(start, end)

    def decode_seconds(self, sequences: int, kv_tokens: int) -> float:
        """Of one step of `sequences` sequences that together have KV of `kv_tokens` positions."""
        return self.step.seconds(sequences) + self.kv_token_s * kv_tokens if sequences else 0.0


def rising_prefill(first_s: float, slope_s: float, max_context: int) -> tuple[float, ...]:
    """`MachineRates.prefill_s` of a machine that takes `first_s + slope_s * position` seconds for a token."""
    buckets = max(1, (max_context - 1).bit_length())
    return tuple(first_s + slope_s * ((1 << i) + (2 << i) - 1) / 2 for i in range(buckets))
