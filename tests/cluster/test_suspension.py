"""Trajectories through real actors: suspended to the pool, resumed on the other worker, equal to undisturbed ones."""

from rollout.client import Rollout
from tests.cluster.scene import (
    IDS,
    PROMPT_TOKENS,
    Outputs,
    all_in_shared_memory,
    at_rest,
    collect,
    engines,
    eventually,
    outputs,
    sampled,
    submit,
)


def test_a_suspended_batch_continues_on_other_workers_without_prefilling_a_token(
    service: Rollout, truth: Outputs
) -> None:
    before, prefilled = service.stats().counters, sum(engine.prefilled_tokens for engine in engines(service))
    submit(service)
    for _ in range(3):
        sampled(service, 100)
        report = service.abort(keep="pool", then="hold")
        assert set(report.found) == set(IDS)
        assert all_in_shared_memory(service)
        service.resume()
    trajectories = collect(service)
    after = service.stats().counters
    assert outputs(trajectories) == truth
    assert after.suspensions - before.suspensions == after.resumes - before.resumes == 3 * len(IDS)
    assert after.resumed_elsewhere - before.resumed_elsewhere == 3 * len(IDS)
    assert after.recomputed_tokens == before.recomputed_tokens
    assert after.restored_tokens > before.restored_tokens
    assert sum(engine.prefilled_tokens for engine in engines(service)) - prefilled <= PROMPT_TOKENS * len(IDS)
    assert after.exclusive_pages - before.exclusive_pages == after.freed_pages - before.freed_pages > 0
    eventually(lambda: at_rest(service))
