"""What else a worker does beside its steps, and by how much that slows them.

While at least one export, restore or copy runs the worker loses a share of its speed. What begins in the
middle of a step, whose length is settled by then, is made up for by the next one.
"""


class Load:
    """How long the steps of one worker take. Seconds of virtual time."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._moving_until = 0.0
        """Something moves from now until then."""
        self._step_end = 0.0
        self._owed_s = 0.0
        """Work that the last step had no time for."""

    def moves(self, now: float, until: float) -> None:
        """An export, restore or copy begins now."""
        begun = max(now, self._moving_until)
        self._owed_s += self._slowdown * max(0.0, min(until, self._step_end) - begun)
        self._moving_until = max(self._moving_until, until)

    def step(self, now: float, work_s: float) -> float:
        """How long a step takes that begins now, and would take `work_s` on an idle machine."""
        work_s, self._owed_s = work_s + self._owed_s, 0.0
        slowed_s = max(0.0, self._moving_until - now)
        speed = 1.0 - self._slowdown
        seconds = work_s / speed if work_s < slowed_s * speed else work_s + slowed_s * self._slowdown
        self._step_end = now + seconds
        return seconds
