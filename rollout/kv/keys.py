"""Names of KV pages: a hash chain over everything a page's bytes depend on.

key(page) = H(key(parent page), weights_id, token ids); the root is H(fingerprint), where the fingerprint
covers architecture, dtype, page size, layout and kernels. Two pages of one name hold the same KV: in
deterministic mode bit for bit, so there a page that decode steps wrote is named apart from a prefilled one.
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


def page_keys(
    root: PageKey,
    tokens: Sequence[int],
    *,
    pages: int,
    page_tokens: int,
    weights_id: str,
    prefilled: int | None = None,
) -> tuple[PageKey, ...]:
    """Keys of the first `pages` whole pages of `tokens`.

    Give `prefilled` where bits depend on whether prefill or decode steps wrote them: the positions from there
    on are decoded ones.
    """
    assert pages * page_tokens <= len(tokens), (pages, page_tokens, len(tokens))
    keys: list[PageKey] = []
    parent = root
    for page in range(pages):
        end = (page + 1) * page_tokens
        decoded = prefilled is not None and end > prefilled
        written_by = f"{weights_id}:{prefilled}" if decoded else weights_id
        ids = array("q", tokens[end - page_tokens : end])
        parent = PageKey(hashlib.blake2b(parent + written_by.encode() + ids.tobytes(), digest_size=KEY_BYTES).digest())
        keys.append(parent)
    return tuple(keys)
