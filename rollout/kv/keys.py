"""Names of KV pages: a hash chain over everything a page's bytes depend on.

key(page) = H(key(parent page), weights_id, token ids); the root is H(fingerprint), where the fingerprint
covers architecture, dtype, page size, layout and kernels. Two pages of one name hold the same KV.
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
    root: PageKey, tokens: Sequence[int], *, pages: int, page_tokens: int, weights_id: str
) -> tuple[PageKey, ...]:
    """Keys of the first `pages` whole pages of `tokens`."""
    assert pages * page_tokens <= len(tokens), (pages, page_tokens, len(tokens))
    keys: list[PageKey] = []
    parent = root
    written_by = weights_id.encode()
    for page in range(pages):
        ids = array("q", tokens[page * page_tokens : (page + 1) * page_tokens])
        parent = PageKey(hashlib.blake2b(parent + written_by + ids.tobytes(), digest_size=KEY_BYTES).digest())
        keys.append(parent)
    return tuple(keys)
