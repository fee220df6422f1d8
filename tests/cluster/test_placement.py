"""What workers say of themselves decides whether their KV may be shared; no cluster needed."""

import logging
from dataclasses import replace

import pytest

from rollout.cluster.description import WorkerDescription
from rollout.cluster.placement import check_alike, check_room
from rollout.errors import ConfigError
from rollout.kv.keys import Fingerprint
from rollout.types import NodeId, WorkerId
from tests.weights import WEIGHTS

FIRST = WorkerDescription(
    worker=WorkerId("worker-0"),
    node=NodeId("node"),
    incarnation="1",
    fingerprint=Fingerprint("native"),
    page_tokens=16,
    token_bytes=512,
    max_context=2048,
    max_running=8,
    weights=WEIGHTS,
    weights_bytes=1000,
    digest="digest",
)
LIKE = replace(FIRST, worker=WorkerId("worker-1"))
UNLIKE = replace(FIRST, worker=WorkerId("worker-2"), fingerprint=Fingerprint("torch"))


def test_workers_with_unlike_kernels_are_refused_in_deterministic_mode() -> None:
    check_alike([FIRST, LIKE], deterministic=True)
    with pytest.raises(ConfigError, match="between worker-0, worker-1 and worker-2; deterministic mode"):
        check_alike([FIRST, LIKE, UNLIKE], deterministic=True)


def test_elsewhere_a_warning_names_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_alike([FIRST, LIKE], deterministic=False)
        assert not caplog.records
        check_alike([FIRST, UNLIKE], deterministic=False)
    assert "between worker-0 and worker-2; it is computed again there" in caplog.text


def test_a_worker_with_less_room_than_the_service_promised_is_refused() -> None:
    small = replace(LIKE, max_context=2047)
    check_room([FIRST, LIKE], max_context=2048)
    with pytest.raises(ConfigError, match="worker-1 has room for 2047 tokens of a sequence, the service allows 2048"):
        check_room([FIRST, small], max_context=2048)
