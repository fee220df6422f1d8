"""What a set of weights consists of: every tensor with its name, dtype, shape, place and checksum.

Names are those of Hugging Face. Weights lie in buckets, numbered from 0; what a bucket is depends on the transport: a
buffer in memory, or a file. Invariants of a `Manifest`: no name comes twice; every entry has as many bytes as its
shape and dtype say and lies inside its bucket. Whatever breaks one is refused with `WeightsSourceError`.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rollout.errors import WeightsSourceError

ITEM_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""The dtypes that weights may have."""

Described = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype of a tensor."""

_FORMAT = 1
_NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor: contiguous, in bucket `bucket` from byte `offset` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int
    checksum: int | None
    """xxh3-64 of the bytes; None where none was ever made."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise WeightsSourceError(f"{self.name}: dtype: got {self.dtype}, allowed: {', '.join(ITEM_BYTES)}")
        if min((*self.shape, self.bucket, self.offset), default=0) < 0:
            raise WeightsSourceError(f"{self.name}: shape {self.shape}, bucket {self.bucket}, offset {self.offset}")
        if self.nbytes != math.prod(self.shape) * ITEM_BYTES[self.dtype]:
            raise WeightsSourceError(f"{self.name}: {self.nbytes} bytes cannot be {self.dtype} of shape {self.shape}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole set of weights or, if `delta`, what changed of one."""

    entries: tuple[Entry, ...]
    """In the order of their buckets."""
    bucket_bytes: tuple[int, ...]
    """The size of each bucket, gaps between tensors included."""
    delta: bool = False
    """Tensors that are not named stay as they are."""

    def __post_init__(self) -> None:
        counts = Counter(entry.name for entry in self.entries)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise WeightsSourceError(f"{len(twice)} names more than once: {', '.join(twice[:_NAMES_SHOWN])}")
        for entry in self.entries:
            if entry.bucket >= len(self.bucket_bytes):
                raise WeightsSourceError(f"{entry.name}: in bucket {entry.bucket} of {len(self.bucket_bytes)}")
            if entry.offset + entry.nbytes > self.bucket_bytes[entry.bucket]:
                raise WeightsSourceError(
                    f"{entry.name}: bytes {entry.offset} to {entry.offset + entry.nbytes} of a bucket of"
                    f" {self.bucket_bytes[entry.bucket]}"
                )
        if any(one.bucket > other.bucket for one, other in zip(self.entries, self.entries[1:], strict=False)):
            raise WeightsSourceError("entries are not in the order of their buckets")

    @classmethod
    def promised(cls, described: Iterable[Described], *, delta: bool) -> "Manifest":
        """Of tensors that are only described: one after the other in one bucket, without checksums."""
        entries: list[Entry] = []
        offset = 0
        for name, shape, dtype in described:
            nbytes = math.prod(shape) * ITEM_BYTES.get(dtype, 0)
            entries.append(
                Entry(name=name, dtype=dtype, shape=tuple(shape), bucket=0, offset=offset, nbytes=nbytes, checksum=None)
            )
            offset += nbytes
        return cls(entries=tuple(entries), bucket_bytes=(offset,), delta=delta)

    @property
    def digest(self) -> str:
        """Equal for equal weights in the same buckets, as far as checksums are known."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    @property
    def nbytes(self) -> int:
        """Of all tensors, without gaps."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def checksums(self) -> dict[str, int | None]:
        """By name."""
        return {entry.name: entry.checksum for entry in self.entries}

    def described(self) -> tuple[Described, ...]:
        """What a decoder must have for these weights to fit."""
        return tuple((entry.name, entry.shape, entry.dtype) for entry in self.entries)

    def by_bucket(self) -> list[tuple[Entry, ...]]:
        """The entries of each bucket."""
        buckets: list[list[Entry]] = [[] for _ in self.bucket_bytes]
        for entry in self.entries:
            buckets[entry.bucket].append(entry)
        return [tuple(entries) for entries in buckets]

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT} | asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Manifest":
        """Raises `WeightsSourceError` for what `to_json` cannot have written."""
        match raw := _parse(text):
            case {"format": 1, "entries": [*entries], "bucket_bytes": [*sizes], "delta": bool(delta)} if all(
                isinstance(size, int) for size in sizes
            ):
                return cls(entries=tuple(map(_entry, entries)), bucket_bytes=tuple(sizes), delta=delta)
        raise WeightsSourceError(f"not a manifest of format {_FORMAT}: {raw!r:.80}")


def dump_entries(entries: Iterable[Entry]) -> str:
    """As JSON."""
    return json.dumps([asdict(entry) for entry in entries])


def load_entries(text: str | bytes) -> tuple[Entry, ...]:
    """Raises `WeightsSourceError` for what `dump_entries` cannot have written."""
    raw = _parse(text)
    if not isinstance(raw, list):
        raise WeightsSourceError(f"not a list of tensors: {raw!r:.80}")
    return tuple(map(_entry, raw))


def _parse(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsSourceError(f"not JSON: {error}") from None


def _entry(raw: Any) -> Entry:
    match raw:
        case {
            "name": str(name),
            "dtype": str(dtype),
            "shape": [*shape],
            "bucket": int(bucket),
            "offset": int(offset),
            "nbytes": int(nbytes),
            "checksum": int() | None as checksum,
        } if all(isinstance(length, int) for length in shape):
            return Entry(
                name=name,
                dtype=dtype,
                shape=tuple(shape),
                bucket=bucket,
                offset=offset,
                nbytes=nbytes,
                checksum=checksum,
            )
    raise WeightsSourceError(f"not a tensor of a manifest: {raw!r:.80}")
