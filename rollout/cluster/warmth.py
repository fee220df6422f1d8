"""Whether an export's shared memory was touched before by the process that writes it.

A first touch costs several times what a later one does, and page tables belong to the process. Ray hands
out freed memory again first, so what a process has touched is about the most that ever lived of it at once.
"""

from collections import Counter


class Warmth:
    """Bytes by incarnation of a worker."""

    def __init__(self) -> None:
        self._living: Counter[str] = Counter()
        self._touched: Counter[str] = Counter()

    def touched(self, incarnation: str, nbytes: int) -> None:
        """The process has touched so many bytes at once."""
        self._touched[incarnation] = max(self._touched[incarnation], nbytes)

    def born(self, incarnation: str, nbytes: int) -> bool:
        """The process writes an object; returns whether it had touched as much before."""
        self._living[incarnation] += nbytes
        warm = self._living[incarnation] <= self._touched[incarnation]
        self.touched(incarnation, self._living[incarnation])
        return warm

    def died(self, incarnation: str, nbytes: int) -> None:
        """An object that the process wrote is gone."""
        self._living[incarnation] -= nbytes
