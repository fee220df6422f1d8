"""A directory of weights is read whole and checked, or refused with the name of the file that is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from rollout.errors import WeightsChecksumError, WeightsSourceError
from rollout.transport.directory import INDEX_FILE, MANIFEST_FILE
from rollout.transport.disk import DiskWeights, publish
from rollout.transport.manifest import Manifest
from tests.tiny_models import make_tiny_llama
from tests.transport.weights import assert_same, packed, weights

BUCKET = 3000


@pytest.fixture
def published(tmp_path: Path) -> Path:
    publish(tmp_path / "w", weights().items(), bucket_bytes=BUCKET)
    return tmp_path / "w"


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def test_what_was_published_is_read(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "deep" / "w", weights().items(), bucket_bytes=BUCKET)
    source = DiskWeights(tmp_path / "deep" / "w")
    assert source.manifest == manifest
    assert manifest.checksums == packed(weights(), BUCKET)[1].checksums
    assert len(manifest.bucket_bytes) > 2
    source.verify()
    for _ in range(2):
        assert_same(source.tensors(), weights())
    source.close()


def test_safetensors_itself_reads_what_was_published(published: Path) -> None:
    tensors = {}
    for shard in shards(published):
        tensors |= load_file(shard)
    assert_same(tensors.items(), weights())
    index = json.loads((published / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights().values())
    for name, file in index["weight_map"].items():
        assert name in load_file(published / file)


@pytest.mark.parametrize("max_shard_size", ["5GB", "50KB"])
def test_a_directory_of_hugging_face_is_read_without_checksums(max_shard_size: str, tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "llama", max_shard_size=max_shard_size)
    expected = {}
    for shard in shards(path):
        expected |= load_file(shard)
    source = DiskWeights(path)
    assert set(source.manifest.checksums.values()) == {None}
    source.verify()
    assert_same(source.tensors(), expected)
    described = {name: (shape, dtype) for name, shape, dtype in source.manifest.described()}
    assert described == {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in expected.items()
    }
    numbers = {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in expected.items()}
    assert source.manifest.checksums == {name: xxhash.xxh3_64_intdigest(found) for name, found in numbers.items()}
    source.close()


def test_a_file_that_is_written_to_between_verifying_and_reading_is_refused(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "llama")
    source = DiskWeights(path)
    source.verify()
    (file,) = shards(path)
    with file.open("r+b") as writing:
        writing.seek(-1, 2)
        last = writing.read(1)
        writing.seek(-1, 2)
        writing.write(bytes([last[0] ^ 1]))
    with pytest.raises(WeightsChecksumError):
        list(source.tensors())
    source.close()


def test_hugging_face_loads_what_was_published(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    llama = make_tiny_llama(tmp_path / "llama")
    tensors = load_file(llama / "model.safetensors")
    publish(tmp_path / "w", tensors.items(), bucket_bytes=100_000)
    shutil.copy(llama / "config.json", tmp_path / "w")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "w").state_dict()
    assert len(shards(tmp_path / "w")) > 1
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)


def test_what_is_open_is_read_whatever_becomes_of_the_path(published: Path) -> None:
    source = DiskWeights(published)
    publish(published, weights(seed=1).items(), bucket_bytes=BUCKET)
    source.verify()
    assert_same(source.tensors(), weights())
    newer = DiskWeights(published)
    shutil.rmtree(published.resolve())
    published.unlink()
    newer.verify()
    assert_same(newer.tensors(), weights(seed=1))
    for one in (source, newer):
        one.close()


def test_every_flipped_bit_of_a_tensor_is_found(published: Path) -> None:
    source = DiskWeights(published)
    files = shards(published)
    for entry in source.manifest.entries:
        if entry.nbytes:
            file = files[entry.bucket]
            good = file.read_bytes()
            bad = bytearray(good)
            bad[entry.offset + entry.nbytes // 2] ^= 4
            file.write_bytes(bad)
            with pytest.raises(WeightsChecksumError, match=entry.name) as raised:
                source.verify()
            assert raised.value.tensor == entry.name
            file.write_bytes(good)
    source.verify()
    source.close()


def test_a_file_cut_off_at_any_place_is_refused(published: Path) -> None:
    file = shards(published)[1]
    good = file.read_bytes()
    for length in [0, 1, 7, 8, 9, 100, len(good) // 2, len(good) - 1]:
        file.write_bytes(good[:length])
        with pytest.raises(WeightsSourceError, match=file.name):
            DiskWeights(published)
    file.write_bytes(good + b"x")
    with pytest.raises(WeightsSourceError, match=file.name):
        DiskWeights(published)


def test_a_file_cut_off_while_it_is_open_is_an_error(published: Path) -> None:
    source = DiskWeights(published)
    file = shards(published)[-1]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightsSourceError, match=f"{file.name}: ends at byte"):
        source.verify()
    with pytest.raises(WeightsSourceError, match=file.name):
        list(source.tensors())
    source.close()


@pytest.mark.parametrize("which", [MANIFEST_FILE, INDEX_FILE, "model-"])
@pytest.mark.parametrize("damage", ["garbage", "empty", "directory"])
def test_a_file_that_is_something_else_is_refused(which: str, damage: str, published: Path) -> None:
    file = next(file for file in sorted(published.iterdir()) if file.name.startswith(which))
    if damage == "directory":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(b"\x93NUMPY" * 50 if damage == "garbage" else b"")
    with pytest.raises(WeightsSourceError, match=file.name):
        DiskWeights(published)


@pytest.mark.parametrize("which", [INDEX_FILE, "model-"])
def test_a_missing_file_is_named(which: str, published: Path) -> None:
    file = next(file for file in sorted(published.iterdir()) if file.name.startswith(which))
    file.unlink()
    with pytest.raises(WeightsSourceError, match=f"{file.name}: no such file"):
        DiskWeights(published)


def _swapped(path: Path) -> None:
    first, second = shards(path)[:2]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def _renamed_tensor(path: Path) -> None:
    file = shards(path)[0]
    file.write_bytes(file.read_bytes().replace(b"embed_tokens", b"embed_tokenz"))


def _another_dtype(path: Path) -> None:
    file = shards(path)[0]
    file.write_bytes(file.read_bytes().replace(b'"BF16"', b'"F16" ', 1))


@pytest.mark.parametrize("change", [_swapped, _renamed_tensor, _another_dtype])
def test_files_that_are_not_what_the_manifest_says_are_refused(change: Callable[[Path], None], published: Path) -> None:
    change(published)
    with pytest.raises(WeightsSourceError, match=MANIFEST_FILE):
        DiskWeights(published)


def test_an_index_that_names_no_files_is_refused(published: Path) -> None:
    (published / INDEX_FILE).write_text('{"weight_map": ["a"]}')
    with pytest.raises(WeightsSourceError, match=f"{INDEX_FILE}: no weight_map"):
        DiskWeights(published)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text("w")])
def test_what_is_no_directory_of_weights_is_refused(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "w")
    with pytest.raises(WeightsSourceError, match=str(tmp_path / "w")):
        DiskWeights(tmp_path / "w")


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "{",
        '{"w": 1}',
        '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
        '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}}',
        '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "x": {"dtype": "F32", "shape": [1], '
        '"data_offsets": [2, 6]}}',
        '{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
    ],
)
def test_a_header_that_cannot_be_is_refused(header: str, tmp_path: Path) -> None:
    raw = header.encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
    with pytest.raises(WeightsSourceError, match=r"model\.safetensors"):
        DiskWeights(tmp_path)


def test_a_dtype_that_weights_do_not_have_is_named(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(3, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsSourceError, match=r"model\.safetensors: w: dtype: got I8"):
        DiskWeights(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for file in ("a.safetensors", "b.safetensors"):
        save_file({"w": torch.zeros(3)}, tmp_path / file)
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}')
    with pytest.raises(WeightsSourceError, match="more than once: w"):
        DiskWeights(tmp_path)


def test_the_manifest_on_disk_is_the_one_returned(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "w", weights().items(), bucket_bytes=BUCKET)
    assert Manifest.from_json((tmp_path / "w" / MANIFEST_FILE).read_bytes()) == manifest
