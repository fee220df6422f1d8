"""A known checksum is that of the page's bytes, whatever wrote them: prefill, decode, a copy, a restore."""

from pathlib import Path

import pytest
import torch
import xxhash

from rollout.engine.assembly import Assembled
from rollout.kv.fence import Passed
from rollout.kv.image import describe, verify
from rollout.kv.tiers import Tier
from rollout.types import Keep, SamplingParams, Then, TrajectoryId
from tests.engine.test_parity import prompts
from tests.local_service import LocalService
from tests.tiny_models import make_tiny_llama

PAGE_BYTES = 16 * 512
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def assert_right(assembled: Assembled) -> set[Tier]:
    """Compare all that are known with the bytes; returns the tiers that have some."""
    storage = assembled.storage
    tiers = {Tier.DEVICE: storage.pages, Tier.HOST: storage.host_pages}
    known = list(storage.sums.known())
    for (tier, page), value in known:
        data = tiers[tier][page].contiguous().view(torch.uint8).numpy().tobytes()
        assert xxhash.xxh3_64_intdigest(data) == value, (tier, page)
    return {tier for (tier, _), _ in known}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_known_checksum_is_right_whatever_happened_to_the_page(path: Path, dtype: str) -> None:
    host = {"bytes": 40 * PAGE_BYTES, "write": {"kind": "write_back"}, "load_back_tokens": 0}
    service = LocalService(path, host=host, kv_bytes=24 * PAGE_BYTES, dtype=dtype, slice_tokens=9)
    for index, prompt in enumerate(prompts(8, lengths=(20, 33, 48))):
        service.submit(f"p{index}", prompt, PARAMS, n=2)
    keeps = [Keep.DEVICE, Keep.HOST, Keep.POOL]
    turn = 0
    seen: set[Tier] = set()
    while service.core.complete_groups < 8:
        service.step()
        turn += 1
        if turn % 7 == 0:
            name = TrajectoryId(f"p{turn % 8}/{turn % 2}")
            service.abort(name, keep=keeps[turn % 3], then=Then.REQUEUE)
        assert turn < 5000
        for worker in service.workers.values():
            if not worker.engine.copying:
                seen |= assert_right(worker)
    assert seen == set(Tier)
    assert service.pool.restores > 0
    service.close()


def test_an_export_of_pages_whose_checksums_are_known_is_the_one_that_hashes_them_all(path: Path) -> None:
    service = LocalService(path, workers=1)
    service.submit("p", prompts(1, lengths=(70,))[0], PARAMS)
    service.step_until(lambda: len(service.record(TrajectoryId("p/0")).columns) == 20)
    service.exports = []
    service.abort(TrajectoryId("p/0"))
    service.step()
    (order,) = service.exports
    worker = service.workers[order.worker]
    pages, _ = worker.engine.sources((order.trajectory_id, order.epoch))
    buffers = worker.storage.gather(pages, order.kv_tokens, Passed())
    known = [worker.storage.sums.get(ref) for ref in pages]
    assert [value is not None for value in known] == [True] * (order.kv_tokens // 16) + [False]
    facts = {"fingerprint": worker.fingerprint, "page_tokens": 16, "token_bytes": 512, "tokens": order.kv_tokens}
    manifest = describe(buffers, **facts, checksums=worker.storage.checksums(pages, order.kv_tokens, buffers))
    assert manifest == describe(buffers, **facts)
    verify(manifest, buffers, range(len(pages)), order.kv_tokens, worker.fingerprint)
    service.close()
