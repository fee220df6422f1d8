"""Whoever reads a path that is published to sees one whole version, whatever happens to the publisher."""

import errno
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from rollout.errors import WeightsError, WeightsSourceError
from rollout.transport import directory, disk
from rollout.transport.disk import DiskWeights, publish
from rollout.transport.shards import Shard
from tests.transport.peers import Peer, publish_half
from tests.transport.weights import assert_same, weights

BUCKET = 6000


def read(path: Path) -> dict[str, Tensor]:
    source = DiskWeights(path)
    source.verify()
    tensors = dict(source.tensors())
    source.close()
    return tensors


def version(path: Path) -> int:
    """The seed of the weights that are at a path, all of them."""
    tensors = read(path)
    seed = int(tensors["scale"].item() - 1.5)
    assert_same(tensors.items(), weights(seed))
    return seed


def republish(path: Path, seed: int) -> None:
    publish(path, weights(seed).items(), bucket_bytes=BUCKET)


def names(path: Path) -> set[str]:
    return {name for name in os.listdir(path) if name != "w"}


def _as_link(path: Path) -> None:
    republish(path, 0)


def _as_directory(path: Path) -> None:
    republish(path, 0)
    target = path.resolve()
    path.unlink()
    target.rename(path)


def _as_foreign_link(path: Path) -> None:
    republish(path.parent / "elsewhere" / "w", 0)
    path.symlink_to("elsewhere/w")


olds = pytest.mark.parametrize("make_old", [_as_link, _as_directory, _as_foreign_link])


@olds
def test_the_old_weights_are_replaced_and_nothing_is_left_over(
    make_old: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "w"
    make_old(path)
    for seed in (0, 1, 2):
        if seed:
            republish(path, seed)
        assert version(path) == seed
    assert names(tmp_path) - {"elsewhere"} == {path.readlink().name}
    assert path.resolve().parent == tmp_path
    if make_old is _as_foreign_link:
        assert version(tmp_path / "elsewhere" / "w") == 0


@pytest.mark.parametrize(
    ("make_old", "interrupt"),
    [(_as_link, OSError), (_as_directory, OSError), (_as_foreign_link, OSError), (_as_link, KeyboardInterrupt)],
)
def test_a_publisher_interrupted_at_any_step_leaves_a_whole_version(
    make_old: Callable[[Path], None],
    interrupt: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "w"
    make_old(path)
    steps: list[str] = []
    all_steps: set[str] = set()
    fail_at = -1

    def failing(step: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def stepping(*args: Any, **kwargs: Any) -> Any:
            steps.append(step)
            if len(steps) - 1 == fail_at:
                raise interrupt("interrupted")
            return call(*args, **kwargs)

        return stepping

    for module, step in [(os, "fsync"), (os, "rename"), (os, "symlink"), (disk, "_exchange"), (disk, "save_file")]:
        monkeypatch.setattr(module, step, failing(step, getattr(module, step)))
    found = 0
    while True:
        all_steps.update(steps)
        fail_at, steps[:] = fail_at + 1, []
        before = names(tmp_path)
        try:
            republish(path, 1)
        except interrupt:
            found = version(path)
            last = fail_at
            if not found:
                assert names(tmp_path) == before
                assert path.is_symlink() or make_old is _as_directory
        else:
            break
    assert steps.count("fsync") > 5
    assert {"symlink", "_exchange" if make_old is _as_directory else "rename"} <= all_steps
    # Only what comes after the switch fails with the new version there.
    assert found == 1
    assert last == len(steps) - 1
    assert version(path) == 1
    assert names(tmp_path) - {"elsewhere"} == {path.readlink().name}


def test_tensors_that_fail_leave_the_old_weights(tmp_path: Path) -> None:
    path = tmp_path / "w"
    republish(path, 0)
    before = names(tmp_path)

    def failing() -> Iterator[tuple[str, Tensor]]:
        yield from list(weights(1).items())[:9]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        publish(path, failing(), bucket_bytes=BUCKET)
    assert version(path) == 0
    assert names(tmp_path) == before


def test_a_full_disk_leaves_the_old_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    republish(tmp_path / "w", 0)

    def full(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(disk, "save_file", full)
    with pytest.raises(WeightsError, match="cannot be written: No space"):
        republish(tmp_path / "w", 1)
    assert version(tmp_path / "w") == 0


def test_a_killed_publisher_leaves_the_old_weights_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    republish(tmp_path / "w", 0)
    publisher = Peer(publish_half, tmp_path / "w")
    assert publisher.says() == "half"
    publisher.kill()
    assert len(names(tmp_path)) == 2
    assert version(tmp_path / "w") == 0
    republish(tmp_path / "w", 2)
    assert version(tmp_path / "w") == 2
    assert len(names(tmp_path)) == 1


@pytest.mark.parametrize("make_old", [_as_link, _as_directory])
def test_a_concurrent_reader_sees_one_version_at_a_time(make_old: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "w"
    make_old(path)
    over = threading.Event()
    seen = [version(path)]
    failures: list[BaseException] = []

    def look() -> None:
        try:
            while not over.is_set():
                seen.append(version(path))
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for seed in range(1, 21):
            republish(path, seed)
    finally:
        over.set()
        reader.join()
    assert not failures
    assert seen == sorted(seen)
    assert version(path) == 20


@pytest.mark.parametrize("step", range(1, 6))
def test_weights_published_while_the_old_are_opened_are_read_instead(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps: the manifest, the index, each shard."""
    republish(tmp_path / "w", 0)
    real = directory.Shard
    opened = 0

    def opening(path: Path, descriptor: int) -> Shard:
        nonlocal opened
        opened += 1
        if opened == step:
            republish(tmp_path / "w", 1)
        return real(path, descriptor)

    monkeypatch.setattr(directory, "Shard", opening)
    descriptors = os.listdir("/proc/self/fd")
    assert version(tmp_path / "w") == 1
    assert opened > step
    assert os.listdir("/proc/self/fd") == descriptors


def test_a_path_that_is_replaced_all_the_time_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    republish(tmp_path / "w", 0)
    monkeypatch.setattr(directory, "_leads_to", lambda path, descriptor: False)
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(WeightsSourceError, match="was replaced 100 times"):
        DiskWeights(tmp_path / "w")
    assert os.listdir("/proc/self/fd") == descriptors


def test_a_directory_that_was_not_published_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "w"
    _as_directory(path)
    (path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"holds config\.json"):
        republish(path, 1)
    assert version(path) == 0
    assert names(tmp_path) == set()


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "w").write_text("mine")
    with pytest.raises(WeightsError, match="not a directory"):
        republish(tmp_path / "w", 1)
    assert (tmp_path / "w").read_text() == "mine"


def test_an_empty_directory_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    republish(tmp_path / "w", 1)
    assert version(tmp_path / "w") == 1


def test_a_link_that_leads_nowhere_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "w").symlink_to("gone")
    republish(tmp_path / "w", 1)
    assert version(tmp_path / "w") == 1


def test_what_cannot_be_exchanged_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=rf"remove it first|{os.strerror(errno.ENOENT)}"):
        disk._exchange(tmp_path / "missing", tmp_path)


def test_other_paths_beside_it_are_left_alone(tmp_path: Path) -> None:
    for name in ("w", "w.0123abcd", "v"):
        republish(tmp_path / name, 3)
    (tmp_path / ".w.notes").mkdir()
    before = {*os.listdir(tmp_path)}
    republish(tmp_path / "w", 4)
    assert len(before - {*os.listdir(tmp_path)}) == 1
    assert (version(tmp_path / "w.0123abcd"), version(tmp_path / "v")) == (3, 3)


def test_publishing_needs_memory_for_one_bucket(tmp_path: Path) -> None:
    nbytes = 4 << 20
    tensors = ((f"w{index}", torch.full((nbytes // 40,), float(index))) for index in range(100))
    tracemalloc.start()
    try:
        publish(tmp_path / "w", tensors, bucket_bytes=nbytes)
        _, peak = tracemalloc.get_traced_memory()
        assert peak < 1.5 * nbytes
        tracemalloc.reset_peak()
        source = DiskWeights(tmp_path / "w")
        source.verify()
        for _, tensor in source.tensors():
            del tensor
        _, peak = tracemalloc.get_traced_memory()
        assert peak < nbytes / 2
        source.close()
    finally:
        tracemalloc.stop()
