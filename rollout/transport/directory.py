"""A directory of safetensors files, opened so that all of them are of the same publication.

Either it was published (`disk.publish`) and its manifest says what the files must be, or it is any directory of Hugging
Face's, of which the headers are all that is known. The directory is opened, then every file in it by that descriptor;
if the path meanwhile leads to another directory, whatever came of it is dropped and that one is opened.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from rollout.errors import WeightsSourceError
from rollout.transport.manifest import Manifest
from rollout.transport.shards import Shard, all_entries

MANIFEST_FILE = "rollout.manifest.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_TRIES = 100


def open_directory(path: Path) -> tuple[list[Shard], Manifest]:
    """All files of a directory that is still the one at `path` when the last of them is open, and what they hold.

    Raises `WeightsSourceError`.
    """
    for _ in range(_TRIES):
        with descriptor_of(path) as directory, contextlib.ExitStack() as stack:
            failure: WeightsSourceError | None = None
            try:
                shards, manifest = _contents(path, directory, stack)
            except FileNotFoundError as error:
                failure = WeightsSourceError(f"{path / str(error.filename)}: no such file")
            except WeightsSourceError as error:
                failure = error
            if not _leads_to(path, directory):
                continue
            if failure is not None:
                raise failure
            stack.pop_all()
            return shards, manifest
    raise WeightsSourceError(f"{path}: was replaced {_TRIES} times while it was being opened")


def _contents(path: Path, directory: int, stack: contextlib.ExitStack) -> tuple[list[Shard], Manifest]:
    names = set(os.listdir(directory))
    if MANIFEST_FILE in names:
        promised = _promised(path / MANIFEST_FILE, directory)
        shards = open_shards(path, directory, _indexed(path, directory), stack)
        _compare(path, promised, shards)
        return shards, promised
    if SINGLE_FILE in names:
        shards = open_shards(path, directory, [SINGLE_FILE], stack)
    elif INDEX_FILE in names:
        shards = open_shards(path, directory, _indexed(path, directory), stack)
    else:
        raise WeightsSourceError(f"{path}: no weights; expected {MANIFEST_FILE}, {SINGLE_FILE} or {INDEX_FILE}")
    sizes = tuple(shard.nbytes for shard in shards)
    try:
        return shards, Manifest(entries=tuple(all_entries(shards)), bucket_bytes=sizes)
    except WeightsSourceError as error:
        raise WeightsSourceError(f"{path}: {error}") from None


def _promised(file: Path, directory: int) -> Manifest:
    try:
        return Manifest.from_json(_text(file, directory))
    except WeightsSourceError as error:
        raise WeightsSourceError(f"{file}: {error}") from None


def _compare(path: Path, promised: Manifest, shards: list[Shard]) -> None:
    """That the files are what the manifest says, but for the bytes of the tensors."""
    found = tuple(all_entries(shards))
    sizes = tuple(shard.nbytes for shard in shards)
    if sizes != promised.bucket_bytes:
        raise WeightsSourceError(f"{path}: files of {sizes} bytes, but {MANIFEST_FILE} says {promised.bucket_bytes}")
    if found != tuple(replace(entry, checksum=None) for entry in promised.entries):
        raise WeightsSourceError(f"{path}: the headers of the files are not what {MANIFEST_FILE} says")


def _indexed(path: Path, directory: int) -> list[str]:
    """The files that an index names, in order."""
    file = path / INDEX_FILE
    try:
        index = json.loads(_text(file, directory))
    except ValueError as error:
        raise WeightsSourceError(f"{file}: not JSON: {error}") from None
    match index:
        case {"weight_map": dict(files)} if all(isinstance(name, str) for name in files.values()):
            return sorted(set(files.values()))
    raise WeightsSourceError(f"{file}: no weight_map from names to files")


def open_shards(path: Path, directory: int, names: Iterable[str], stack: contextlib.ExitStack) -> list[Shard]:
    """Files of an open directory, which `stack` closes."""
    shards: list[Shard] = []
    for name in names:
        shards.append(Shard(path / name, directory))
        stack.callback(shards[-1].close)
    return shards


def _text(path: Path, directory: int) -> bytes:
    shard = Shard(path, directory)
    with contextlib.closing(shard):
        return shard.read(0, shard.nbytes).tobytes()


@contextlib.contextmanager
def descriptor_of(path: Path) -> Iterator[int]:
    """A directory, open. Raises `WeightsSourceError`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsSourceError(f"{path}: cannot be opened: {error.strerror}") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _leads_to(path: Path, directory: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(directory))
    except OSError:
        return False
