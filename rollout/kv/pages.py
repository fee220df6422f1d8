"""Page numbers of one tier, handed out and taken back. Integers only.

Page 0 is scratch and never handed out. Invariant: every page 1…total is either free or owned by
exactly one caller; giving back a page that is not owned is an error of ours and asserts.
"""

from collections.abc import Iterable


class PageAllocator:
    """A stack of free page numbers with an ownership bit per page."""

    __slots__ = ("_free", "_owned", "total")

    def __init__(self, total: int) -> None:
        assert total >= 0, total
        self.total = total
        self._free = list(range(total, 0, -1))
        self._owned = bytearray(total + 1)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None if fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owned[page] = 1
        return pages

    def give(self, pages: Iterable[int]) -> int:
        """Take pages back; returns how many. They are handed out again in the order in which they were given."""
        given = list(pages)
        for page in given:
            assert self._owned[page], f"page {page} given back but not owned"
            self._owned[page] = 0
        self._free += reversed(given)
        return len(given)

    def owned(self) -> set[int]:
        return {page for page, bit in enumerate(self._owned) if bit}
