"""Restores read from real pools: what they have open, what is charged for it, and how every wait of theirs ends."""

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from rollout.cluster.description import NAMESPACE, pool_name
from rollout.cluster.pool import Pool
from rollout.cluster.reader import PoolReader
from rollout.config import PoolConfig
from rollout.control.commands import Export
from rollout.control.messages import Exported
from rollout.errors import DeadlineError, PoolFullError, SegmentMissingError
from rollout.kv.keys import Fingerprint
from rollout.kv.restore import Segment
from rollout.metrics import PoolStats
from rollout.types import Image, NodeId, SegmentId, SegmentRun, TrajectoryId, Turn, Wait, WorkerId
from tests.cluster.scene import eventually, inside
from tests.weights import written

PAGE_TOKENS, TOKEN_BYTES = 4, 64 << 10
PAGE_BYTES = PAGE_TOKENS * TOKEN_BYTES
FINGERPRINT = Fingerprint("fingerprint")
HERE, THERE = NodeId("here"), NodeId("there")
ANN, BOB = TrajectoryId("ann"), TrajectoryId("bob")
LONG_S, SHORT_S = 120.0, 0.5


class Site:
    """Two pools, as if on two nodes, and a process that they store pages of; byte i fills page i."""

    def __init__(self, *, max_restarts: int = 0) -> None:
        self.service = f"reader-{uuid.uuid4().hex[:8]}"
        self.max_restarts = max_restarts
        self.pools = {node: self.start(node) for node in (HERE, THERE)}
        self.worker = exporter()
        self.reader = PoolReader(self.service, HERE)

    def start(self, node: NodeId) -> Any:
        config = PoolConfig.model_validate({"budget_bytes": 10 * PAGE_BYTES})
        options = {"name": pool_name(self.service, node), "namespace": NAMESPACE, "num_cpus": 0}
        options["max_restarts"] = self.max_restarts
        return ray.remote(Pool).options(**options).remote(node, config, PAGE_TOKENS, TOKEN_BYTES, FINGERPRINT, 0)

    def store(self, node: NodeId, who: TrajectoryId, pages: int, first: int = 0) -> Image:
        """An image of `pages` whole pages; those before `first` are not in this pool."""
        base = SegmentRun(node=NodeId("nowhere"), segment=SegmentId("nothing"), first=0, pages=first)
        order = Export(
            worker=WorkerId("worker"),
            node=node,
            trajectory_id=who,
            epoch=1,
            kv_tokens=pages * PAGE_TOKENS,
            prompt_pages=0,
            page_keys=tuple(f"{who} {page}".encode() for page in range(pages)),
            written=written(pages * PAGE_TOKENS),
            base=Image(runs=(base,), kv_tokens=first * PAGE_TOKENS, written=written(first * PAGE_TOKENS))
            if first
            else None,
            turn=Turn(Wait.QUEUED, 0),
            release=False,
        )
        event = ray.get(self.pools[node].export.remote(self.worker, "now", order), timeout=LONG_S)
        assert isinstance(event, Exported), event
        return event.image

    def stats(self, node: NodeId) -> PoolStats:
        found: PoolStats = ray.get(self.pools[node].stats.remote(), timeout=LONG_S)
        return found

    def at_rest(self, node: NodeId) -> bool:
        """Nobody reads anything."""
        stats = self.stats(node)
        assert ray.get(self.pools[node].audit.remote(), timeout=LONG_S) is None
        return (stats.still_read, stats.copied) == (0, 0)

    def let_go(self) -> None:
        for pool in self.pools.values():
            ray.get([pool.retain.remote(who, frozenset()) for who in (ANN, BOB)], timeout=LONG_S)


def exporter() -> Any:
    class Exporter:
        def export(self, incarnation: str, key: Any, parts: Sequence[tuple[int, int]]) -> Any:
            import numpy as np

            from rollout.kv.image import describe

            ((first, stop),) = parts
            pages = [np.full(PAGE_BYTES, page, dtype=np.uint8) for page in range(first, stop)]
            tokens = len(pages) * PAGE_TOKENS
            manifest = describe(
                pages, fingerprint=FINGERPRINT, page_tokens=PAGE_TOKENS, token_bytes=TOKEN_BYTES, tokens=tokens
            )
            return [manifest], pages

    return ray.remote(num_cpus=0)(Exporter).remote()


def end(site: Site) -> None:
    for actor in (*site.pools.values(), site.worker):
        ray.kill(actor)


@pytest.fixture(scope="module")
def shared_site(ray_cluster: None) -> Iterator[Site]:
    site = Site()
    yield site
    end(site)


@pytest.fixture
def site(shared_site: Site) -> Iterator[Site]:
    """Found and left empty."""
    yield shared_site
    shared_site.let_go()
    eventually(lambda: shared_site.at_rest(HERE) and shared_site.at_rest(THERE))
    assert [shared_site.stats(node).stored for node in (HERE, THERE)] == [0, 0]


@pytest.fixture
def doomed(ray_cluster: None) -> Iterator[Site]:
    site = Site()
    yield site
    end(site)


def both(site: Site) -> tuple[SegmentRun, ...]:
    """Two pages of Ann's here, then three there."""
    near, far = site.store(HERE, ANN, 2), site.store(THERE, ANN, 5, first=2)
    return (*near.runs, *far.runs[1:])


@contextlib.contextmanager
def stopped(pool: Any) -> Iterator[None]:
    """The process of a pool does nothing inside this."""
    pid = inside(pool, lambda self: __import__("os").getpid())
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def opened(
    site: Site, runs: Sequence[SegmentRun], within_s: float = LONG_S
) -> contextlib.AbstractContextManager[Sequence[Segment]]:
    return site.reader.open(runs, time.monotonic() + within_s)


def test_an_image_is_read_from_two_nodes_and_what_is_far_is_charged_here_meanwhile(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [site.stats(node) for node in (HERE, THERE)]
    runs = both(site)
    fetched: list[int] = []
    wait: Callable[..., Any] = ray.wait

    def noted(refs: list[Any], **options: Any) -> Any:
        fetched.append(len(refs))
        return wait(refs, **options)

    monkeypatch.setattr(ray, "wait", noted)
    with opened(site, runs) as segments:
        read = [int(buffer[0]) for segment in segments for buffer in segment.buffers]
        assert read == [0, 1, 2, 3, 4]
        assert site.stats(HERE).copied == 3 * PAGE_BYTES
        assert site.stats(THERE).copied == 0
        site.let_go()
        assert [site.stats(node).still_read for node in (HERE, THERE)] == [2 * PAGE_BYTES, 3 * PAGE_BYTES]
        del segments
    assert fetched == [1], "all that is far, and nothing else, is asked for before it is waited for"
    eventually(lambda: site.at_rest(HERE) and site.at_rest(THERE))
    after = [site.stats(node) for node in (HERE, THERE)]
    here, there = (
        (b.read_here - a.read_here, b.read_elsewhere - a.read_elsewhere) for a, b in zip(before, after, strict=True)
    )
    assert (here, there) == ((2 * PAGE_BYTES, 0), (0, 3 * PAGE_BYTES))


def noted_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Names of these functions of Ray, each as often as it is called from now on."""
    called: list[str] = []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            called.append(name)
            return call(*args, **options)

        return noted

    for name in names:
        monkeypatch.setattr(ray, name, noting(name, getattr(ray, name)))
    return called


def test_all_that_is_far_is_asked_for_before_any_of_it_is_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = site.store(THERE, ANN, 2), site.store(THERE, BOB, 3)
    near = site.store(HERE, ANN, 1)
    asked = noted_calls(monkeypatch, "wait", "get")
    with opened(site, (*first.runs, *near.runs, *second.runs)) as segments:
        assert [len(segment.buffers) for segment in segments] == [2, 1, 3]
        # two leases, room, then all that is far; then each object
        assert asked == ["get", "get", "get", "wait", "get", "get", "get"]


def test_a_pool_is_looked_up_once_and_again_after_it_died(doomed: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = noted_calls(monkeypatch, "get_actor")
    image = doomed.store(HERE, ANN, 2)
    for _ in range(3):
        with opened(doomed, image.runs) as segments:
            assert [int(buffer[0]) for buffer in segments[0].buffers] == [0, 1]
    eventually(lambda: doomed.at_rest(HERE))
    assert len(looked) == 1
    ray.kill(doomed.pools[HERE])
    with pytest.raises(SegmentMissingError, match="ActorDiedError"), opened(doomed, image.runs):
        pass
    with pytest.raises(SegmentMissingError, match="no pool any more"), opened(doomed, image.runs):
        pass
    assert len(looked) == 2
    doomed.pools[HERE] = doomed.start(HERE)
    looked.clear()  # Ray asks whether the name is free
    with pytest.raises(SegmentMissingError, match="are not all there"), opened(doomed, image.runs):
        pass
    with opened(doomed, doomed.store(HERE, ANN, 3).runs) as segments:
        assert [int(buffer[0]) for buffer in segments[0].buffers] == [0, 1, 2]
    assert len(looked) == 1
    eventually(lambda: doomed.at_rest(HERE))


def test_a_pool_that_ray_restarted_is_read_through_the_handle_of_before(ray_cluster: None) -> None:
    site = Site(max_restarts=1)
    try:
        old = site.store(HERE, ANN, 2)
        with opened(site, old.runs):
            pass
        pid = inside(site.pools[HERE], lambda self: __import__("os").getpid())
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SegmentMissingError), opened(site, old.runs):
            pass
        new = eventually(lambda: _stored(site, BOB, 3))
        assert new is not None
        with pytest.raises(SegmentMissingError, match="are not all there"), opened(site, old.runs):
            pass
        with opened(site, new.runs) as segments:
            assert [int(buffer[0]) for buffer in segments[0].buffers] == [0, 1, 2]
        eventually(lambda: site.at_rest(HERE))
    finally:
        end(site)


def _stored(site: Site, who: TrajectoryId, pages: int) -> Image | None:
    """The image, or None while the pool is being restarted."""
    try:
        return site.store(HERE, who, pages)
    except RayActorError:
        return None


def test_the_end_of_a_restore_waits_for_no_pool(site: Site) -> None:
    image = site.store(HERE, ANN, 2)
    context = opened(site, image.runs)
    context.__enter__()
    go_on = threading.Event()
    site.reader._closing.submit(go_on.wait, LONG_S)
    context.__exit__(None, None, None)
    site.let_go()
    assert site.stats(HERE).still_read == 2 * PAGE_BYTES, "a lease is held until it is closed"
    go_on.set()


def test_what_is_near_is_charged_nothing_and_an_empty_restore_asks_for_nothing(site: Site) -> None:
    image = site.store(HERE, ANN, 9)
    with opened(site, image.runs):
        assert site.stats(HERE).copied == 0
    with opened(site, ()) as segments:
        assert list(segments) == []


def test_a_copy_that_does_not_fit_here_fails_the_restore_and_leaves_nothing(site: Site) -> None:
    runs = both(site)
    site.store(HERE, BOB, 7)
    with (
        pytest.raises(PoolFullError, match=r"the pool of node here: a copy of \d+ bytes asked for"),
        opened(site, runs),
    ):
        pass
    assert site.stats(HERE).refused_copies > 0
    site.let_go()
    eventually(lambda: site.at_rest(HERE) and site.at_rest(THERE))
    assert site.stats(THERE).stored == 0


@pytest.mark.parametrize("node", [HERE, THERE])
def test_a_pool_that_is_gone_fails_the_restore(doomed: Site, node: NodeId) -> None:
    runs = both(doomed)
    ray.kill(doomed.pools[node])
    with pytest.raises(SegmentMissingError), opened(doomed, runs, 20.0):
        pass
    other = THERE if node == HERE else HERE
    del doomed.pools[node]
    eventually(lambda: doomed.at_rest(other))


@pytest.mark.parametrize(("node", "step"), [(HERE, "lease"), (THERE, "lease"), (HERE, "room for a copy")])
def test_a_pool_that_hangs_fails_the_restore_at_its_deadline(site: Site, node: NodeId, step: str) -> None:
    runs = both(site)
    with stopped(site.pools[node]):
        wanted = runs[1:] if step == "room for a copy" else runs
        with pytest.raises(DeadlineError, match=f"the pool of node {node} did not answer"):
            opened(site, wanted, SHORT_S).__enter__()
    eventually(lambda: site.at_rest(HERE) and site.at_rest(THERE))
    with opened(site, runs) as segments:
        assert len(segments) == 2, "it works again"


def test_an_object_that_does_not_come_fails_the_restore_at_its_deadline(site: Site) -> None:
    runs = both(site)

    def lose(self: Any, segment: str) -> None:
        import ray

        @ray.remote(num_cpus=9999)  # type: ignore[untyped-decorator]
        def never() -> None:
            return None

        manifest, _ = self._segments[segment]
        self._segments[segment] = (manifest, never.remote())

    inside(site.pools[THERE], lose, runs[1].segment)
    with pytest.raises(DeadlineError, match="not read in time"), opened(site, runs, SHORT_S):
        pass
    eventually(lambda: site.at_rest(HERE) and site.at_rest(THERE))


def test_a_reader_that_never_closes_is_credited_at_its_deadline(site: Site) -> None:
    runs = both(site)
    with opened(site, runs, LONG_S):
        forgotten = opened(site, runs, 4 * SHORT_S)
        forgotten.__enter__()  # and its process dies
        assert site.stats(HERE).copied == 6 * PAGE_BYTES
        eventually(lambda: site.stats(HERE).copied == 3 * PAGE_BYTES)
    eventually(lambda: site.at_rest(HERE) and site.at_rest(THERE))


def test_a_pool_killed_while_it_is_read_spoils_no_view_and_no_end(doomed: Site) -> None:
    runs = both(doomed)
    with opened(doomed, runs) as segments:
        ray.kill(doomed.pools[THERE])
        assert [int(buffer[-1]) for segment in segments for buffer in segment.buffers] == [0, 1, 2, 3, 4]
    del doomed.pools[THERE]
    eventually(lambda: doomed.at_rest(HERE))
