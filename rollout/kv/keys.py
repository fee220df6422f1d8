"""Names of KV pages: a hash chain over everything a page's bytes depend on.

key(page) = H(key(parent page), weights_id, token ids); the root is H(fingerprint), where the fingerprint
covers architecture, dtype, page size, layout and kernels. Two pages of one name hold the same KV, in
deterministic mode bit for bit: so where history is replayed a page that decode steps wrote is named apart from a
prefilled one.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import NewType

PageKey = NewType("PageKey", bytes)
Fingerprint = NewType("Fingerprint", str)

KEY_BYTES = 16


def root_key(fingerprint: Fingerprint) -> PageKey:
    return PageKey(hashlib.blake2b(fingerprint.encode(), digest_size=KEY_BYTES).digest())


class PageNames:
    """The keys of one sequence's whole pages, each made once, as its tokens become known."""

    __slots__ = ("_keys", "_prefilled", "_root", "_weights_id", "page_tokens")

    def __init__(self, root: PageKey, *, page_tokens: int, weights_id: str, prefilled: int | None = None) -> None:
        """Give `prefilled` where bits depend on whether prefill or decode steps wrote them: the positions from
        there on are decoded ones."""
        self._root = root
        self.page_tokens = page_tokens
        self._weights_id = weights_id
        self._prefilled = prefilled
        self._keys: list[PageKey] = []

    def of(self, tokens: Sequence[int], pages: int) -> tuple[PageKey, ...]:
        """Keys of the first `pages` whole pages of `tokens`, which only ever grow from call to call."""
        assert pages * self.page_tokens <= len(tokens), (pages, self.page_tokens, len(tokens))
        for page in range(len(self._keys), pages):
            end = (page + 1) * self.page_tokens
            decoded = self._prefilled is not None and end > self._prefilled
            written_by = f"{self._weights_id}:{self._prefilled}" if decoded else self._weights_id
            ids = array("q", tokens[end - self.page_tokens : end])
            parent = self._keys[-1] if self._keys else self._root
            name = hashlib.blake2b(parent + written_by.encode() + ids.tobytes(), digest_size=KEY_BYTES)
            self._keys.append(PageKey(name.digest()))
        return tuple(self._keys[:pages])
