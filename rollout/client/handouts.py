"""Which calls groups were handed out to, and what became of them: told to the controller until it was heard.

The controller keeps what it hands out until it knows that it has arrived, and hands out again what did not.
"""

import contextlib
import uuid
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple


class Handout(NamedTuple):
    """A call, with what became of earlier ones."""

    call: str
    arrived: tuple[str, ...]
    abandoned: tuple[str, ...]


@dataclass(slots=True)
class Handouts:
    """Calls of one client that groups are handed out to."""

    _arrived: set[str] = field(default_factory=set)
    _abandoned: set[str] = field(default_factory=set)

    @contextlib.contextmanager
    def open(self) -> Iterator[Handout]:
        """A call that hands out groups, to be `arrived` or `abandoned` afterwards; abandoned if it raises."""
        handout = Handout(call=uuid.uuid4().hex, arrived=tuple(self._arrived), abandoned=tuple(self._abandoned))
        try:
            yield handout
        except BaseException:
            self._abandoned.add(handout.call)
            raise
        self._arrived.difference_update(handout.arrived)
        self._abandoned.difference_update(handout.abandoned)

    def arrived(self, calls: Set[str]) -> None:
        """Their groups are in the driver's hands."""
        self._arrived |= calls

    def abandoned(self, calls: Set[str]) -> None:
        """Their groups are to be handed out again."""
        self._abandoned |= calls

    def last_words(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What became of all calls, for the controller: which arrived, and which did not."""
        return tuple(self._arrived), tuple(self._abandoned)
