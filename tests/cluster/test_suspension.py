"""Trajectories through real actors: suspended to the pool, resumed on the other worker, equal to undisturbed ones."""

from dataclasses import replace

from rollout.client import Rollout
from rollout.types import TrajectoryId
from tests.cluster.scene import (
    IDS,
    KEYS,
    PAGE_TOKENS,
    PROMPT_TOKENS,
    PROMPTS,
    SAMPLES,
    SAMPLING,
    TOKEN_BYTES,
    Outputs,
    all_in_shared_memory,
    at_rest,
    collect,
    engines,
    eventually,
    images,
    limited,
    outputs,
    pool,
    reached,
    submit,
)


def test_a_suspended_batch_continues_on_other_workers_without_prefilling_a_token(
    service: Rollout, truth: Outputs
) -> None:
    before, prefilled = service.stats().counters, sum(engine.prefilled_tokens for engine in engines(service))
    with limited(service, 40) as limit:
        submit(service)
        for tokens in (40, 80, 120):
            limit(tokens)
            service.resume()
            reached(service, tokens - 20)
            report = service.abort(keep="pool", then="hold")
            assert set(report.found) == set(IDS)
            eventually(lambda: all_in_shared_memory(service))
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


def test_four_siblings_stopped_together_store_their_prompt_once(service: Rollout) -> None:
    before = pool(service)
    with limited(service):
        service.submit(PROMPTS[:1], n=4, sampling=SAMPLING, key="group")
        reached(service, 30)
        service.abort(keep="pool", then="hold")
    kept = [image.kv_tokens for image in images(service).values()]
    after = pool(service)
    shared_tokens = PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS
    own_tokens = sum(tokens - shared_tokens for tokens in kept)
    assert len(kept) == 4
    assert {worker.engine.sampled_tokens > 0 for worker in service.stats().workers} == {True}
    assert after.sent - before.sent == after.stored == (shared_tokens + own_tokens) * TOKEN_BYTES
    assert after.shared - before.shared == 3 * shared_tokens * TOKEN_BYTES
    assert after.segments == 1 + len(kept)


def test_a_prompt_that_another_trajectory_generated_is_restored_as_prefill_wrote_it(
    service: Rollout, truth: Outputs
) -> None:
    source = TrajectoryId("ann/0")
    prompt = [*PROMPTS[0], *truth[source][0][:88]]
    service.submit([prompt], sampling=SAMPLING, key="later")
    alone = outputs(collect(service, 1))
    with limited(service):
        service.submit(PROMPTS, n=SAMPLES, sampling=replace(SAMPLING, max_new_tokens=400), key=KEYS)
        reached(service, 120)
        service.abort(keep="pool", then="hold")
        assert images(service)[source].kv_tokens > len(prompt)
        service.submit([prompt], sampling=SAMPLING, key="later")
        reached(service, 40)
        assert service.abort(["later"], keep="pool", then="requeue").found == ("later/0",)
    assert outputs(collect(service, 1)) == alone
