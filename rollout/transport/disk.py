"""Weights in a directory: written so that no reader ever sees a part of them, read so that no writer disturbs it.

`publish` makes `path` a symbolic link to a directory beside it that no one has written to since it was complete, and
then replaces the link by renaming: atomic on every POSIX file system, NFS included, where a directory that is not empty
cannot be replaced at all, or only with Linux's RENAME_EXCHANGE. That is used once, to put the link in the place of a
directory of published files. Then what was there before is removed. So a crash at any moment leaves `path` leading to
all of the old weights or all of the new; what it may leave behind is removed by the next `publish`. One process at a
time publishes to a path.
"""

import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rollout.durable import sync
from rollout.errors import WeightsError
from rollout.transport.buckets import check, checksum, pack, unpack
from rollout.transport.directory import INDEX_FILE, MANIFEST_FILE, descriptor_of, open_directory, open_shards
from rollout.transport.manifest import Entry, Manifest
from rollout.transport.shards import all_entries

_PUBLISHED = re.compile(rf"{re.escape(MANIFEST_FILE)}|{re.escape(INDEX_FILE)}|model-[0-9a-f]{{8}}-\d{{5}}\.safetensors")
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def publish(path: Path, named_tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> Manifest:
    """Replace what readers of `path` see by these tensors, as one file a bucket; needs memory for one bucket.

    The directory is also one that Hugging Face's loaders read. It belongs to `publish`: other files that are put into
    it go with the next one. What `path` leads to through a link that `publish` did not make stays.

    Raises `WeightsError` if there is something at `path` that `publish` cannot have written, `OSError` if writing
    fails. Then, and if `named_tensors` fails, `path` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_replaceable(path)
    token = secrets.token_hex(4)
    fresh = path.with_name(f".{path.name}.{token}")
    fresh.mkdir()
    try:
        manifest = _write(fresh, token, named_tensors, bucket_bytes)
        _lead(path, fresh)
    except BaseException:
        if not _same(path, fresh):  # else it was interrupted just after
            shutil.rmtree(fresh, ignore_errors=True)
        raise
    sync(path.parent)
    _sweep(path, keep=fresh)
    return manifest


def unpublish(path: Path) -> None:
    """Remove what `publish` put at `path`; whoever has opened it reads on. Nothing happens if it is not there."""
    target = path.resolve()
    path.unlink(missing_ok=True)
    shutil.rmtree(target, ignore_errors=True)


class DiskWeights:
    """A directory that was published, or any of Hugging Face's with safetensors, which has no checksums at first.

    What it opened it reads, whatever becomes of `path`. Reads one tensor at a time into memory of its own.
    """

    def __init__(self, path: Path) -> None:
        """Raises `WeightsSourceError` if a file is missing, cut off, not safetensors or not what the manifest says."""
        self._path = path
        self._shards, self._manifest = open_directory(path)

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def verify(self) -> None:
        """Read everything, and compare checksums; where there are none the manifest has them from then on."""
        entries: list[Entry] = []
        for entry in self._manifest.entries:
            content = self._shards[entry.bucket].read(entry.offset, entry.nbytes)
            entries.append(replace(entry, checksum=checksum(content)) if entry.checksum is None else entry)
            check(content, entries[-1])
        self._manifest = replace(self._manifest, entries=tuple(entries))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Raises `WeightsChecksumError` if a file was written to since it was verified."""
        for entry in self._manifest.entries:
            content = self._shards[entry.bucket].read(entry.offset, entry.nbytes)
            check(content, entry)
            yield from unpack(content, [replace(entry, offset=0)])
            del content

    def close(self) -> None:
        for shard in self._shards:
            shard.close()


def _write(fresh: Path, token: str, named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Manifest:
    """All files of a publication, on the disk."""
    files: list[str] = []
    checksums: dict[str, int | None] = {}
    for bucket in pack(named_tensors, bucket_bytes):
        files.append(f"model-{token}-{bucket.index:05}.safetensors")
        try:
            save_file(dict(unpack(bucket.buffer, bucket.entries)), fresh / files[-1], metadata={"format": "pt"})
        except SafetensorError as error:
            raise WeightsError(f"{fresh / files[-1]}: cannot be written: {error}") from None
        checksums |= {entry.name: entry.checksum for entry in bucket.entries}
        del bucket
        sync(fresh / files[-1])
    manifest = _described(fresh, files, checksums)
    index = {
        "metadata": {"total_size": manifest.nbytes},
        "weight_map": {entry.name: files[entry.bucket] for entry in manifest.entries},
    }
    for name, text in ((INDEX_FILE, json.dumps(index)), (MANIFEST_FILE, manifest.to_json())):
        (fresh / name).write_text(text, encoding="utf-8")
        sync(fresh / name)
    sync(fresh)
    return manifest


def _described(fresh: Path, files: list[str], checksums: dict[str, int | None]) -> Manifest:
    """The manifest of files that were just written, by their headers."""
    with descriptor_of(fresh) as directory, contextlib.ExitStack() as stack:
        shards = open_shards(fresh, directory, files, stack)
        entries = tuple(replace(entry, checksum=checksums[entry.name]) for entry in all_entries(shards))
        return Manifest(entries=entries, bucket_bytes=tuple(shard.nbytes for shard in shards))


def _check_replaceable(path: Path) -> None:
    if path.is_symlink() or not path.exists():
        return
    if not path.is_dir():
        raise WeightsError(f"{path}: cannot be replaced: not a directory")
    if foreign := sorted(name for name in os.listdir(path) if not _PUBLISHED.fullmatch(name)):
        raise WeightsError(f"{path}: cannot be replaced: holds {foreign[0]}, which was not published")


def _lead(path: Path, fresh: Path) -> None:
    """Make `path` a link to `fresh`, in one step."""
    _check_replaceable(path)
    link = fresh.with_name(f"{fresh.name}.link")
    os.symlink(fresh.name, link)
    try:
        if path.is_dir() and not path.is_symlink():
            _exchange(link, path)  # `link` is now the old directory, and swept
        else:
            os.rename(link, path)
    except BaseException:
        if link.is_symlink():
            link.unlink()
        raise


def _exchange(one: Path, other: Path) -> None:
    """Let two names of one file system change places."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise WeightsError(f"{other}: a directory, which this system cannot replace in one step; remove it first")
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        reason = os.strerror(ctypes.get_errno())
        raise WeightsError(f"{other}: a directory, which cannot be replaced in one step ({reason}); remove it first")


def _sweep(path: Path, *, keep: Path) -> None:
    """Remove what earlier publications to `path` left, finished or not."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}(\.link)?")
    for name in os.listdir(path.parent):
        if ours.fullmatch(name) and name != keep.name:
            old = path.with_name(name)
            if old.is_symlink():
                old.unlink(missing_ok=True)
            else:
                shutil.rmtree(old, ignore_errors=True)


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False
