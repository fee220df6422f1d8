"""`bench weights`: what is read from marks and reports, and a whole run at toy sizes."""

from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from benchmarks.tracing import Mark
from benchmarks.updates import Update, Worked, trainer_clock, worked
from benchmarks.weights import RECOMPUTE, TRANSPORTS, Random, Settings, find_ratios, run, summed_up
from rollout.client import asynchronous
from rollout.cluster import weights
from rollout.config import ObjectStore
from rollout.errors import ModelNotFoundError
from rollout.reports import UpdateReport
from rollout.types import UpdateMode, Version, WorkerId
from tests.tiny_models import make_tiny_llama

MARKS = {
    "open": (11.0, 11.5),
    "verify": (11.5, 12.0),
    "fetch": (11.6, 11.7),
    "commit": (13.0, 16.0),
    "write": (13.25, 15.0),
    "check": (14.0, 14.5),
    "check_file": (14.5, 14.75),
}


def marks() -> list[Mark]:
    earlier = [Mark(name=name, begin=begin - 10, end=end - 10) for name, (begin, end) in MARKS.items()]
    return [*earlier, *(Mark(name=name, begin=begin, end=end) for name, (begin, end) in MARKS.items())]


def test_what_a_worker_did_is_read_from_the_marks_after_the_call() -> None:
    ends = [8.0, 8.5, 9.0, 10.0, 11.0, 12.0, 13.0, 16.5, 17.0]
    one = worked(marks(), [(end - 0.4, end) for end in ends], begin=10.5)
    assert (one.prepare, one.commit) == (1.0, 3.0)
    assert one.phases == {
        "open": 0.5,
        "verify": 0.5,
        "step_wait": 0.25,
        "write": 1.75,
        "fetch": pytest.approx(0.1),
        "read": 0.0,
        "check": 0.75,
    }
    assert (one.step, one.step_preparing, one.gap) == (0.5, 1.0, 3.5)
    assert one.around_write == {"to_write": 0.25, "writing": 1.75, "to_next": 1.5}


def test_without_decode_steps_there_is_no_gap() -> None:
    one = worked(marks(), [], begin=10.5)
    assert (one.step, one.step_preparing, one.gap, one.around_write) == (None, None, None, {})


def test_of_an_update_the_slowest_worker_counts_and_of_models_the_worse_ratio() -> None:
    def result(in_place_s: float, gap_s: float) -> dict[str, Any]:
        each = {
            "in_place_s": in_place_s,
            "one_worker": {"in_place_s": 1.0},
            "decoding": {"gap_s": gap_s, "step_s": 1.0},
        }
        return {
            "memcpy_s": 0.5,
            "memcpy_together_s": 1.0,
            "one_worker": {"memcpy_s": 0.25},
            "object_store": each,
            "disk": each,
        }

    ratios = find_ratios({"a": result(1.0, 5.0), "b": result(2.0, 4.0)})
    assert ratios == {
        "object_store_vs_memcpy": 4.0,
        "object_store_vs_memcpy_together": 2.0,
        "one_worker_object_store_vs_memcpy": 4.0,
        "disk_vs_memcpy": 4.0,
        "disk_vs_memcpy_together": 2.0,
        "one_worker_disk_vs_memcpy": 4.0,
        "pause_vs_step": 5.0,
    }


def test_the_trainers_own_time_is_told_by_transport() -> None:
    phases = dict.fromkeys(("open", "verify", "step_wait", "write", "fetch", "read", "check"), 0.5)
    workers = [
        Worked(prepare=prepare, commit=1.0, phases=phases, gap=None, around_write={}, step=None, step_preparing=None)
        for prepare in (1.0, 2.0)
    ]
    report = UpdateReport(
        version=Version(1),
        previous=Version(0),
        mode=UpdateMode.RECOMPUTE,
        workers=(WorkerId("a"), WorkerId("b")),
        fenced={},
        nbytes=8,
        prepare_s=2.0,
        pause_s=1.5,
        commit_s=1.25,
    )
    update = Update(seconds=9.0, report=report, trainer={"pack": 3.0, "ship": 4.0, "send": 5.0}, workers=workers)
    stored, sent = (summed_up(transport, [update]) for transport in ("object_store", "collective_staged"))
    assert (stored["trainer_s"], sent["trainer_s"], sent["send_s"]) == (4.0, 3.0, 5.0)
    assert (stored["in_place_s"], stored["prepare_s"], stored["commit_s"]) == (3.0, 2.0, 1.0)
    assert stored["report"] == {"prepare_s": 2.0, "pause_s": 1.5, "commit_s": 1.25}


def test_packing_is_timed_and_gives_the_same_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda buffer: buffer.tobytes())
    tensors = {name: torch.full((100,), float(index)) for index, name in enumerate("abc")}
    expected = weights.put_weights(tensors.items(), 900, delta=False)
    original = weights.pack
    with trainer_clock() as seconds:
        shipment = asynchronous.Shipment(
            tensors, ObjectStore(kind="object_store", bucket_bytes=900), delta=False, timeout_s=1.0
        )
    assert shipment.parcel == expected
    assert len(expected.buckets) == 2
    assert 0 < seconds["pack"] < seconds["ship"]
    assert seconds["send"] == 0
    assert weights.pack is original


def test_the_random_model_has_about_a_gigabyte() -> None:
    random = Random()
    width = random.kv_heads * random.head_dim
    layer = 4 * width * random.hidden + 3 * random.hidden * random.intermediate
    assert 1.0e9 < 2 * random.layers * layer < 1.1e9


def test_without_the_model_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="make model"):
        run(Settings(model=tmp_path / "none"))


@pytest.mark.soak
def test_every_transport_is_measured(ray_cluster: None, tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {
            "model": make_tiny_llama(tmp_path / "llama", hidden_size=256, intermediate_size=512),
            "random": {"layers": 2, "kv_heads": 4, "hidden": 256, "intermediate": 512},
            "batch": 3,
            "before": 4,
            "after": 2,
            "kv_bytes": "32MiB",
        }
    )
    results, ratios = run(settings)
    assert set(ratios) == {
        *(f"{transport}_vs_memcpy" for transport in TRANSPORTS),
        *(f"{transport}_vs_memcpy_together" for transport in TRANSPORTS),
        *(f"one_worker_{transport}_vs_memcpy" for transport in TRANSPORTS),
        "pause_vs_step",
    }
    assert all(ratio > 0 for ratio in ratios.values())
    for model in ("smollm2", "random"):
        found = results[model]
        for transport in TRANSPORTS:
            each = found[transport]
            assert len(each["all_update_s"]) == len(each["decoding"]["all_gap_s"]) == settings.repeats
            assert each["prepare_s"] <= each["in_place_s"] <= each["update_s"]
            assert each["trainer_s"] > 0
            assert each["one_worker"]["in_place_s"] > 0
            assert each["decoding"]["step_s"] <= each["decoding"]["gap_s"]
            assert set(each["decoding"]["around_write"]) == {"to_write_s", "writing_s", "to_next_s"}
        assert found["object_store"]["phases"]["fetch_s"] > 0
        assert found["disk"]["phases"]["read_s"] > 0
        assert all(found[transport]["phases"]["check_s"] > 0 for transport in TRANSPORTS)
        assert found[RECOMPUTE]["gap_s"] > 0
        assert found["memcpy_s"] > 0
