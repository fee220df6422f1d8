"""What became of trajectories that were stopped: whether they came back, after how long, under which weights.

Measured on the running service, by what a trajectory was stopped for; of waits for `extend`, by who calls it. What was
never seen is expected to come back at once.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass

from rollout.control.intent import Intent
from rollout.control.paces import Pace, PaceMeter
from rollout.control.records import Record
from rollout.types import AbortReason, Then

WEIGHT = 0.1
"""Of a new observation."""
BELIEF_S = 60.0
"""After which what an export takes is believed to be a third of what it was: so that it is tried again."""
OVERDUE = 3.0
"""Times the usual interval, after which it is thought that there are no more updates."""


@dataclass(slots=True, kw_only=True)
class _Fate:
    likely: float = 1.0
    wait_s: float = 0.0
    seen: bool = False


class Experience:
    """Moving averages: how likely what was stopped goes on, after how long, and how often weights change."""

    def __init__(self) -> None:
        self._fates: dict[Hashable, _Fate] = {}
        self._version_s: float | None = None
        self._version_at: float | None = None
        self._exports = PaceMeter(flat=True)
        self._exported_at = 0.0
        self.export_pace: Pace | None = None
        """From the order until the pool has all of it, by bytes sent. What was not seen for long is believed less."""

    def likely(self, record: Record, intent: Intent) -> float:
        """Chance that it goes on."""
        return self._fate(record, intent).likely if intent.continues else 0.0

    def wait_s(self, record: Record, intent: Intent) -> float:
        """Expected until it goes on."""
        return self._fate(record, intent).wait_s

    def same_weights(self, wait_s: float, now: float, *, updates: int = 0) -> float:
        """Chance that after `wait_s` there were no more than so many `updates`; one that is long overdue is not
        expected."""
        if self._version_s is None or self._version_at is None or now - self._version_at > OVERDUE * self._version_s:
            return 1.0
        left_s = max(0.0, self._version_at + self._version_s - now) + updates * self._version_s
        return 1.0 if wait_s <= left_s else 0.0

    def resumed(self, record: Record, intent: Intent, waited_s: float) -> None:
        """It went on after `waited_s`."""
        fate = self._fate(record, intent)
        fate.likely += WEIGHT * (1.0 - fate.likely)
        fate.wait_s = fate.wait_s + WEIGHT * (waited_s - fate.wait_s) if fate.seen else waited_s
        fate.seen = True

    def exported(self, nbytes: int, seconds: float, now: float) -> None:
        """A pool took so much."""
        self._exports.saw(nbytes, seconds)
        self._exported_at = now
        self.age(now)

    def age(self, now: float) -> None:
        """Time has passed."""
        pace = self._exports.pace
        if pace is not None:
            belief = math.exp(min(0.0, self._exported_at - now) / BELIEF_S)
            self.export_pace = Pace(fixed_s=belief * pace.fixed_s, unit_s=belief * pace.unit_s)

    def ended(self, record: Record, intent: Intent) -> None:
        """It did not go on: it was over before."""
        fate = self._fate(record, intent)
        fate.likely -= WEIGHT * fate.likely

    def weights_changed(self, now: float) -> None:
        if self._version_at is not None:
            interval_s = now - self._version_at
            before = self._version_s
            self._version_s = interval_s if before is None else before + WEIGHT * (interval_s - before)
        self._version_at = now

    def _fate(self, record: Record, intent: Intent) -> _Fate:
        caller = record.group.submission.caller if intent.reason is AbortReason.TURN else ""
        key = (intent.reason, intent.then is Then.REQUEUE, caller)
        return self._fates.setdefault(key, _Fate())
