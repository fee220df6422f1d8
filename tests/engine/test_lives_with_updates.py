"""Whatever is aborted, moved and resumed while weights are replaced: every token is as Hugging Face has it on the KV
that the result names, with a canary in every forward, few pages, and nothing left in the end."""

import random
from typing import Any

import pytest

from rollout.types import Keep, Phase, SamplingParams, Then, TrajectoryId
from tests.engine.by_hand import assert_greedy_as_it_says
from tests.engine.test_parity import prompts
from tests.engine.test_updates import SAME, Paths, paths, stale
from tests.local_service import LocalService

__all__ = ["paths"]  # the fixture

PARAMS = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True)
PAGE_BYTES = 16 * 512
POLICIES: list[dict[str, Any]] = [{"kind": "write_through"}, {"kind": "write_back"}, {"kind": "none"}]
GROUPS = 6


@pytest.mark.parametrize("reuse", [SAME, stale(1), stale(3)], ids=["same_weights", "stale(1)", "stale(3)"])
@pytest.mark.parametrize("seed", range(2))
def test_every_token_is_what_its_kv_gives(paths: Paths, seed: int, reuse: dict[str, Any]) -> None:
    draw = random.Random(f"{seed} {reuse}")
    host = {"bytes": draw.choice((4, 20)) * PAGE_BYTES, "load_back_tokens": 0, "write": draw.choice(POLICIES)}
    replay = {"kernels": "torch", "deterministic": True, "chunk_tokens": 16}
    engine: dict[str, Any] = draw.choice(({}, {"chunk_tokens": 16, "prefill_tokens": 16}, replay))
    engine |= {"kv_bytes": (draw.choice((10, 40)) + 1) * PAGE_BYTES, "canary": True}
    service = LocalService(paths[0], kv_reuse=reuse, host=host, **engine)
    loaded = [0]
    """Which of the models each version is."""
    names: list[TrajectoryId] = []
    submitted = 0
    while submitted < GROUPS or not all(service.record(name).over for name in names):
        what = draw.random()
        if what < 0.1 and submitted < GROUPS:
            lengths = (draw.choice((5, 16, 31, 48)),)
            names += service.submit(f"p{submitted}", prompts(1, lengths=lengths)[0], PARAMS, n=2)
            submitted += 1
        elif what < 0.2 and names:
            some = [name for name in draw.sample(names, min(2, len(names))) if not service.record(name).over]
            service.abort(*some, keep=draw.choice([*Keep]), then=draw.choice((Then.HOLD, Then.REQUEUE)))
        elif what < 0.35:
            service.resume(*(name for name in names if service.phase(name) is Phase.SUSPENDED and draw.random() < 0.5))
        elif what < 0.4 and len(loaded) < 8:
            loaded.append(draw.randrange(3))
            in_place = reuse is not SAME and draw.random() < 0.6
            service.update(paths[loaded[-1]], len(loaded) - 1, in_place=in_place)
        elif what < 0.45:
            for worker in service.workers.values():
                worker.engine.expire()
                worker.engine.audit()
        else:
            service.step()
    ended = service.run(GROUPS)
    by_version = {version: paths[number] for version, number in enumerate(loaded)}
    assert set(ended) == set(names)
    for trajectory in ended.values():
        assert len(trajectory.output_ids) == PARAMS.max_new_tokens
        assert_greedy_as_it_says(by_version, trajectory)
    service.free_pages()
    for worker in service.workers.values():
        worker.engine.expire()
        worker.engine.audit()
        stats = worker.engine.stats
        assert (stats.parked, stats.device.free + stats.device.tree) == (0, stats.device.total)
        assert (stats.host.private, stats.host.free + stats.host.tree) == (0, stats.host.total)
        assert set(worker.engine._cache._tree._roots) <= worker.engine._live.reusable
    service.close()
