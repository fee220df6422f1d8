"""What a worker tells the controller, and when: as `cluster.host` answers the controller's polls.

One call of the controller waits at the worker. It is answered at once if there is more than tokens, and else at most
every `TELL_S`; the next call sets out when the answer has arrived.
"""

from collections.abc import Callable, Sequence

from rollout.control.messages import TELL_S, Sampled, WorkerEvent, WorkerFacts, WorkerReport, merge_sampled
from rollout.sim.clock import Clock
from rollout.types import WorkerId


class Outbox:
    """The events of one worker that were not told yet, and when they are."""

    def __init__(
        self, worker: WorkerId, clock: Clock, *, latency_s: float, arrive: Callable[[WorkerReport], None]
    ) -> None:
        """`arrive` is called when a report reaches the controller."""
        self._worker = worker
        self._clock = clock
        self._latency_s = latency_s
        self._arrive = arrive
        self._events: list[WorkerEvent] = []
        self._facts: WorkerFacts | None = None
        self._pressing = False
        """There is more than tokens."""
        self._polled = True
        """A call waits."""
        self._told = -TELL_S
        self._timer = False
        """An answer is due."""

    def put(self, events: Sequence[WorkerEvent], facts: WorkerFacts) -> None:
        """Tell what happened, with what is known after it."""
        self._events += events
        self._facts = facts
        self._pressing |= not all(isinstance(event, Sampled) for event in events)
        self._answer()

    def _poll(self) -> None:
        self._polled = True
        self._answer()

    def _answer(self) -> None:
        if not self._polled or not self._events:
            return
        due = self._told + TELL_S
        if self._pressing or due <= self._clock.now:
            self._report()
        elif not self._timer:
            self._timer = True
            self._clock.at(due, self._due)

    def _due(self) -> None:
        self._timer = False
        self._answer()

    def _report(self) -> None:
        events, self._events = self._events, []
        self._pressing = self._polled = False
        self._told = self._clock.now
        report = WorkerReport(
            worker=self._worker, incarnation=self._worker, events=merge_sampled(events), facts=self._facts
        )

        def arrived() -> None:
            self._arrive(report)
            self._clock.after(self._latency_s, self._poll)

        self._clock.after(self._latency_s, arrived)
