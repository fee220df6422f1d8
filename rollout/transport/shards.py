"""A safetensors file, held open and read piece by piece.

It is read with `pread` and never mapped: a file that is cut off while it is read is an error and not a SIGBUS, and what
was opened stays what it was when another file takes its name.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rollout.errors import WeightsSourceError
from rollout.transport.buckets import Buffer
from rollout.transport.manifest import Entry

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # of the format


class Shard:
    """The file's own descriptor; whoever opened it, closes it."""

    def __init__(self, path: Path, directory: int) -> None:
        """`path` says in errors what is opened; its last part is looked up in the open directory `directory`.

        Raises `FileNotFoundError` if it is not there, `WeightsSourceError` if it cannot be read."""
        self._path = path
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path.name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
            self.nbytes = os.fstat(self._descriptor).st_size
        except FileNotFoundError:
            raise
        except OSError as error:
            self.close()
            raise WeightsSourceError(f"{path}: cannot be opened: {error.strerror}") from None

    def read(self, offset: int, nbytes: int) -> Buffer:
        """Exactly these bytes. Raises `WeightsSourceError`."""
        if self._descriptor is None:
            raise WeightsSourceError(f"{self._path}: read from weights that were closed")
        content: Buffer = np.empty(nbytes, dtype=np.uint8)
        done = 0
        while done < nbytes:
            try:
                count = os.preadv(self._descriptor, [content[done:].data], offset + done)
            except OSError as error:
                raise WeightsSourceError(f"{self._path}: cannot be read: {error.strerror}") from None
            if not count:
                raise WeightsSourceError(f"{self._path}: ends at byte {offset + done}, expected {offset + nbytes}")
            done += count
        return content

    def entries(self, bucket: int) -> tuple[Entry, ...]:
        """Every tensor of the file, as the header says, with offsets from the file's first byte and no checksums.

        Raises `WeightsSourceError` if it is not safetensors, or has not as many bytes as its header says.
        """
        header, start = self._header()
        try:
            found = [
                self._entry(name, described, bucket, start)
                for name, described in header.items()
                if name != "__metadata__"
            ]
        except WeightsSourceError as error:
            raise WeightsSourceError(f"{self._path}: {error}") from None
        found.sort(key=lambda entry: (entry.offset, entry.nbytes))
        end = start
        for entry in found:
            if entry.offset != end:
                raise WeightsSourceError(f"{self._path}: {entry.name}: begins at byte {entry.offset}, expected {end}")
            end += entry.nbytes
        if end != self.nbytes:
            raise WeightsSourceError(f"{self._path}: {self.nbytes} bytes, but its header says {end}")
        return tuple(found)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _header(self) -> tuple[dict[str, Any], int]:
        """The header, and where it ends."""
        length = int.from_bytes(self.read(0, min(self.nbytes, _LENGTH_BYTES)).tobytes(), "little")
        start = _LENGTH_BYTES + length
        if start > self.nbytes or length > _MAX_HEADER_BYTES:
            raise WeightsSourceError(
                f"{self._path}: not a whole safetensors file: {self.nbytes} bytes, header of {length}"
            )
        try:
            header = json.loads(self.read(_LENGTH_BYTES, length).tobytes())
        except (ValueError, RecursionError) as error:
            raise WeightsSourceError(f"{self._path}: not a safetensors file: {error}") from None
        if not isinstance(header, dict):
            raise WeightsSourceError(f"{self._path}: not a safetensors file: its header is no object")
        return header, start

    def _entry(self, name: str, described: Any, bucket: int, start: int) -> Entry:
        match described:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if all(
                isinstance(length, int) for length in shape
            ):
                return Entry(
                    name=name,
                    dtype=_DTYPES.get(dtype, dtype),
                    shape=tuple(shape),
                    bucket=bucket,
                    offset=start + begin,
                    nbytes=end - begin,
                    checksum=None,
                )
        raise WeightsSourceError(f"{name}: not a tensor of a safetensors file: {described!r:.80}")


def all_entries(shards: list[Shard]) -> Iterator[Entry]:
    """Of several files, which are buckets in this order."""
    for index, shard in enumerate(shards):
        yield from shard.entries(index)
