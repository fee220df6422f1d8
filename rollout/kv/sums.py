"""Checksums of whole pages that are known already: made when a page was completed, or verified when it arrived.

A page that leaves the worker then need not be read once more for that. A checksum is of what the page's bytes
were at that time, so one that is wrong makes a reader refuse the page, and never use it.
"""

from collections.abc import Iterable, Iterator

from rollout.kv.tiers import PageRef, Tier


class PageSums:
    """By page of either tier. Written by the engine's thread and the copy threads, each for pages that it writes."""

    def __init__(self, *, device_pages: int, host_pages: int) -> None:
        self._known: dict[Tier, list[int | None]] = {
            Tier.DEVICE: [None] * (device_pages + 1),
            Tier.HOST: [None] * (host_pages + 1),
        }

    def get(self, ref: PageRef) -> int | None:
        tier, page = ref
        return self._known[tier][page]

    def put(self, ref: PageRef, checksum: int | None) -> None:
        """None where the checksum of what the page holds now is not known."""
        tier, page = ref
        self._known[tier][page] = checksum

    def known(self) -> Iterator[tuple[PageRef, int]]:
        """Every page of which one is known, with it."""
        for tier, checksums in self._known.items():
            yield from (((tier, page), value) for page, value in enumerate(checksums) if value is not None)

    def forget(self, pages: Iterable[int]) -> None:
        """Device pages are about to be written."""
        known = self._known[Tier.DEVICE]
        for page in pages:
            known[page] = None

    def forget_all(self) -> None:
        for checksums in self._known.values():
            checksums[:] = [None] * len(checksums)

    def copied(self, to: Tier, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Whole pages were copied from the other tier."""
        known, there = self._known[to.other], self._known[to]
        for source, target in zip(sources, targets, strict=True):
            there[target] = known[source]
