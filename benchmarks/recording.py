"""What a controller was told in a simulated run, so that a fresh one can be told it again."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from rollout.control.controller import Controller
from rollout.control.fleet import Worker
from rollout.control.messages import WorkerReport, WorkerUp
from rollout.sim.simulation import Simulation

TOLD = frozenset({"submit", "handle", "abort", "resume", "begin_collection", "end_collection", "take", "settle_calls"})
"""Calls that change a controller, of those that a simulation and its drivers make."""


class Recording:
    """Calls of one controller in order; made in another one, they lead to the same commands."""

    def __init__(self, simulation: Simulation) -> None:
        """To be made before the simulation runs; what it told before that, that its workers are up, is told again."""
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._controller = simulation.controller
        for worker in simulation.controller._fleet.workers:
            self._note("handle", (_up(worker), 0.0), {})
        simulation.controller = _Recorder(self._controller, self._note)  # type: ignore[assignment]

    def replay(self, controller: Controller) -> None:
        for name, args, kwargs in self._calls:
            getattr(controller, name)(*args, **kwargs)

    def agrees(self, controller: Controller) -> bool:
        """Whether it counted what the first one did, and decided alike."""
        first = self._controller
        return controller.counters == first.counters and controller.keeping.counts == first.keeping.counts

    @property
    def kinds(self) -> dict[str, int]:
        """Worker events about a trajectory, by kind: each is one update."""
        return dict(Counter(type(event).__name__ for report in self._reports() for event in report.events))

    @property
    def calls(self) -> dict[str, int]:
        """What was told, by name, events of `handle` by their kind."""
        return dict(Counter(type(args[0]).__name__ if name == "handle" else name for name, args, _ in self._calls))

    def _reports(self) -> list[WorkerReport]:
        return [args[0] for name, args, _ in self._calls if name == "handle" and isinstance(args[0], WorkerReport)]

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.append((name, args, kwargs))


class _Recorder:
    """A controller that notes what it is told."""

    def __init__(self, controller: Controller, note: Callable[[str, tuple[Any, ...], dict[str, Any]], None]) -> None:
        self._controller = controller
        self._note = note

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._controller, name)
        if name not in TOLD:
            return attribute

        def told(*args: Any, **kwargs: Any) -> Any:
            self._note(name, args, kwargs)
            return attribute(*args, **kwargs)

        return told


def _up(worker: Worker) -> WorkerUp:
    return WorkerUp(
        worker=worker.worker_id, node=worker.node, incarnation=worker.incarnation, max_running=worker.max_running
    )
