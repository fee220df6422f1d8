"""Names of KV pages: a hash chain over everything a page's bytes depend on.

key(page) = H(key(parent page), weights that wrote it, token ids); the root is H(fingerprint), where the fingerprint
covers architecture, dtype, page size, layout and kernels. Two pages of one name hold the same KV, in
deterministic mode bit for bit: so where history is replayed a page that decode steps wrote is named apart from a
prefilled one.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import NewType

from rollout.kv.written import Written

PageKey = NewType("PageKey", bytes)
Fingerprint = NewType("Fingerprint", str)

KEY_BYTES = 16


def root_key(fingerprint: Fingerprint) -> PageKey:
    return PageKey(hashlib.blake2b(fingerprint.encode(), digest_size=KEY_BYTES).digest())


class PageNames:
    """The keys of one sequence's whole pages, each made once, as its tokens become known."""

    __slots__ = ("_keys", "_prefilled", "_root", "_written", "page_tokens")

    def __init__(self, root: PageKey, *, page_tokens: int, written: Written, prefilled: int | None = None) -> None:
        """`written` may change behind the pages that have names. Give `prefilled` where bits depend on whether prefill
        or decode steps wrote them: the positions from there on are decoded ones."""
        self._root = root
        self.page_tokens = page_tokens
        self._written = written
        self._prefilled = prefilled
        self._keys: list[PageKey] = []

    def written_by(self, written: Written) -> "PageNames":
        """Those of the same tokens if other weights write them."""
        return PageNames(self._root, page_tokens=self.page_tokens, written=written, prefilled=self._prefilled)

    def forget(self, at: int) -> None:
        """Positions from `at` on are written by others than was thought."""
        del self._keys[at // self.page_tokens :]

    def of(self, tokens: Sequence[int], pages: int) -> tuple[PageKey, ...]:
        """Keys of the first `pages` whole pages of `tokens`, which only ever grow from call to call."""
        assert pages * self.page_tokens <= len(tokens), (pages, self.page_tokens, len(tokens))
        for page in range(len(self._keys), pages):
            start, end = page * self.page_tokens, (page + 1) * self.page_tokens
            runs = self._written.between(start, end)
            written_by = ",".join(f"{weights.weights_id}:{stop - begin}" for begin, stop, weights in runs)
            if self._prefilled is not None and end > self._prefilled:
                written_by += f";{self._prefilled}"
            ids = array("q", tokens[start:end])
            parent = self._keys[-1] if self._keys else self._root
            name = hashlib.blake2b(parent + written_by.encode() + ids.tobytes(), digest_size=KEY_BYTES)
            self._keys.append(PageKey(name.digest()))
        return tuple(self._keys[:pages])
