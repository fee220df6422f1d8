"""A manifest says what weights consist of, and refuses what cannot be."""

import json
from dataclasses import replace
from typing import Any

import pytest

from rollout.errors import WeightsSourceError
from rollout.transport.manifest import Entry, Manifest, dump_entries, load_entries

FIRST = Entry(name="a.weight", dtype="bfloat16", shape=(3, 4), bucket=0, offset=0, nbytes=24, checksum=2**64 - 1)
SECOND = Entry(name="b.bias", dtype="float32", shape=(), bucket=1, offset=64, nbytes=4, checksum=None)
MANIFEST = Manifest(entries=(FIRST, SECOND), bucket_bytes=(24, 68))


@pytest.mark.parametrize("delta", [False, True])
def test_a_manifest_comes_back_from_json(delta: bool) -> None:
    manifest = replace(MANIFEST, delta=delta)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert Manifest.from_json(manifest.to_json().encode()) == manifest
    assert load_entries(dump_entries(manifest.entries)) == manifest.entries


def test_a_manifest_describes_its_tensors() -> None:
    assert MANIFEST.described() == (("a.weight", (3, 4), "bfloat16"), ("b.bias", (), "float32"))
    assert MANIFEST.nbytes == 28
    assert MANIFEST.checksums == {"a.weight": 2**64 - 1, "b.bias": None}
    assert MANIFEST.by_bucket() == [(FIRST,), (SECOND,)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "dtype: got int8, allowed: bfloat16"),
        ({"nbytes": 23}, "23 bytes cannot be bfloat16"),
        ({"shape": (-3, -4)}, "shape"),
        ({"offset": -1}, "offset -1"),
        ({"bucket": -1}, "bucket -1"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsSourceError, match=f"a.weight: .*{message}"):
        replace(FIRST, **changes)


@pytest.mark.parametrize(
    ("entries", "bucket_bytes", "message"),
    [
        ((FIRST, replace(SECOND, name="a.weight")), (24, 68), "1 names more than once: a.weight"),
        ((FIRST, SECOND), (24,), "b.bias: in bucket 1 of 1"),
        ((FIRST, SECOND), (24, 67), "b.bias: bytes 64 to 68 of a bucket of 67"),
        ((SECOND, FIRST), (24, 68), "not in the order"),
    ],
)
def test_tensors_that_do_not_go_together_are_refused(
    entries: tuple[Entry, ...], bucket_bytes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(WeightsSourceError, match=message):
        Manifest(entries=entries, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "nonsense",
        b"\xff\xfe\x00",
        "[" * 100_000,
        MANIFEST.to_json()[:-1],
        MANIFEST.to_json().replace('"format": 1', '"format": 2'),
        MANIFEST.to_json().replace('"float32"', "7"),
        MANIFEST.to_json().replace("[3, 4]", '["3", 4]'),
        MANIFEST.to_json().replace('"checksum": null', '"checksum": "x"'),
        MANIFEST.to_json().replace("[24, 68]", "[24, null]"),
        json.dumps({"format": 1, "entries": ["a.weight"], "bucket_bytes": [], "delta": False}),
    ],
)
def test_what_is_not_a_manifest_is_refused(text: str | bytes) -> None:
    with pytest.raises(WeightsSourceError):
        Manifest.from_json(text)


@pytest.mark.parametrize("text", ["{}", "nonsense", "[1]"])
def test_what_is_not_a_list_of_tensors_is_refused(text: str) -> None:
    with pytest.raises(WeightsSourceError):
        load_entries(text)
