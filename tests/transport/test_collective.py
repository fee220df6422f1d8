"""A broadcast arrives whole on every worker, or both ends say so in time; nobody waits for ever."""

import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

from rollout.errors import WeightsChecksumError, WeightsError, WeightsSourceError
from rollout.transport import collective
from rollout.transport.buckets import Bucket, Buffer, Delta, describe, unpack
from rollout.transport.collective import Broadcast, Receiver, StagedWeights
from tests.transport.peers import BUCKET, FIRST, Peer, receive_half, send_half
from tests.transport.weights import assert_same, packed, weights

HOST = "127.0.0.1"
AMPLE_S = 60.0
SHORT_S = 2.0


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def staged(address: str, rank: int, size: int, timeout_s: float = AMPLE_S) -> StagedWeights:
    return StagedWeights(Receiver(address, rank, size, timeout_s=timeout_s))


def staging(threads: ThreadPoolExecutor, sending: Broadcast, workers: int) -> list[Future[StagedWeights]]:
    return [threads.submit(staged, sending.address, rank, workers + 1) for rank in range(1, workers + 1)]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [1, BUCKET, 1 << 20])
def test_every_worker_has_what_was_sent(threads: ThreadPoolExecutor, workers: int, bucket_bytes: int) -> None:
    sending = Broadcast(HOST, timeout_s=AMPLE_S)
    receiving = staging(threads, sending, workers)
    manifest = sending.send(weights().items(), bucket_bytes=bucket_bytes)
    assert manifest == packed(weights(), bucket_bytes)[1]
    for future in receiving:
        source = future.result()
        assert source.manifest == manifest
        source.verify()
        for _ in range(2):
            assert_same(source.tensors(), weights())
        source.close()


def test_the_interface_may_be_given_by_name(threads: ThreadPoolExecutor) -> None:
    sending = Broadcast("localhost", timeout_s=AMPLE_S)
    [receiving] = staging(threads, sending, 1)
    sending.send(weights().items(), bucket_bytes=BUCKET)
    assert_same(receiving.result().tensors(), weights())


def test_buckets_come_one_by_one_and_are_not_kept(threads: ThreadPoolExecutor) -> None:
    sending = Broadcast(HOST, timeout_s=AMPLE_S)
    sent = threads.submit(sending.send, weights().items(), bucket_bytes=BUCKET, described=describe(weights().items()))
    receiving = Receiver(sending.address, 1, 2, timeout_s=AMPLE_S)
    assert receiving.described == describe(weights().items())
    assert not receiving.delta
    arrived: list[weakref.ref[Buffer]] = []
    tensors: dict[str, Tensor] = {}
    for bucket in receiving.buckets():
        assert bucket.index == len(arrived)
        assert not any(buffer() is not None for buffer in arrived)
        with pytest.raises(ValueError, match="read-only"):
            bucket.buffer[:] = 0
        tensors |= {name: tensor.clone() for name, tensor in unpack(bucket.buffer, bucket.entries)}
        arrived.append(weakref.ref(bucket.buffer))
        del bucket
    assert_same(tensors.items(), weights())
    assert receiving.manifest == sent.result()


def test_what_changed_can_be_sent_alone(threads: ThreadPoolExecutor) -> None:
    _, before = packed(weights(), BUCKET)
    changed = weights() | {"scale": torch.tensor(7.0)}
    sending = Broadcast(HOST, timeout_s=AMPLE_S)
    [receiving] = staging(threads, sending, 1)
    checksums = {name: value for name, value in before.checksums.items() if value is not None}
    manifest = sending.send(Delta(changed.items(), checksums), bucket_bytes=BUCKET, delta=True)
    source = receiving.result()
    assert source.manifest == manifest
    assert manifest.delta
    assert_same(source.tensors(), {"scale": torch.tensor(7.0)})


def test_both_ends_may_have_a_default_group_of_their_own(threads: ThreadPoolExecutor) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        sending = Broadcast(HOST, timeout_s=AMPLE_S)
        receiving = staging(threads, sending, 2)
        sending.send(weights().items(), bucket_bytes=BUCKET)
        for future in receiving:
            assert_same(future.result().tensors(), weights())
        alone = torch.ones(3)
        torch.distributed.all_reduce(alone)
        assert alone.tolist() == [1, 1, 1]
    finally:
        torch.distributed.destroy_process_group()


def test_two_broadcasts_at_a_time_do_not_meet(threads: ThreadPoolExecutor) -> None:
    sendings = [Broadcast(HOST, timeout_s=AMPLE_S) for _ in range(2)]
    receiving = [staging(threads, sending, 1)[0] for sending in sendings]
    sent = [
        threads.submit(sending.send, weights(seed).items(), bucket_bytes=BUCKET)
        for seed, sending in enumerate(sendings)
    ]
    for seed, (sender, receiver) in enumerate(zip(sent, receiving, strict=True)):
        sender.result()
        assert_same(receiver.result().tensors(), weights(seed))


def test_two_buckets_are_in_memory_while_sending(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    most = 0
    real = collective.pack

    def watched(*args: Any) -> Iterator[Bucket]:
        nonlocal most
        for bucket in real(*args):
            alive.append(weakref.ref(bucket.buffer))
            most = max(most, sum(buffer() is not None for buffer in alive))
            yield bucket
            del bucket

    monkeypatch.setattr(collective, "pack", watched)
    sending = Broadcast(HOST, timeout_s=AMPLE_S)
    [receiving] = staging(threads, sending, 1)
    sending.send(weights(layers=10).items(), bucket_bytes=BUCKET)
    receiving.result()
    assert len(alive) > 5
    assert most == 2


def test_a_flipped_bit_is_found_and_the_sender_is_told(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = collective.pack

    def damaged(*args: Any) -> Iterator[Bucket]:
        for bucket in real(*args):
            if bucket.index == 1:
                bucket.buffer.flags.writeable = True
                bucket.buffer[bucket.entries[0].offset] ^= 1
            yield bucket

    monkeypatch.setattr(collective, "pack", damaged)
    name = packed(weights(), BUCKET)[0][1].entries[0].name
    sending = Broadcast(HOST, timeout_s=AMPLE_S)
    [receiving] = staging(threads, sending, 1)
    with pytest.raises(WeightsSourceError, match=f"receiver 1: {name}: checksum"):
        sending.send(weights().items(), bucket_bytes=BUCKET)
    with pytest.raises(WeightsChecksumError, match=name):
        receiving.result()


def test_tensors_that_are_not_as_described_do_not_arrive(threads: ThreadPoolExecutor) -> None:
    sending = Broadcast(HOST, timeout_s=AMPLE_S)
    [receiving] = staging(threads, sending, 1)
    described = describe(list(weights().items())[1:])
    with pytest.raises(WeightsSourceError, match="not as they were described"):
        sending.send(weights().items(), bucket_bytes=BUCKET, described=described)
    with pytest.raises(WeightsSourceError):
        receiving.result()


def test_a_trainer_that_fails_ends_the_transfer(threads: ThreadPoolExecutor) -> None:
    def failing() -> Iterator[tuple[str, Tensor]]:
        yield from list(weights().items())[:4]
        raise ZeroDivisionError

    sending = Broadcast(HOST, timeout_s=AMPLE_S)
    receiving = staging(threads, sending, 2)
    with pytest.raises(ZeroDivisionError):
        sending.send(failing(), bucket_bytes=BUCKET)
    for future in receiving:
        with pytest.raises(WeightsSourceError, match="waiting for the other ends"):
            future.result()


def test_a_receiver_that_leaves_ends_the_transfer(threads: ThreadPoolExecutor) -> None:
    def leave(address: str) -> None:
        receiving = Receiver(address, 1, 2, timeout_s=AMPLE_S)
        next(receiving.buckets())
        receiving.close()

    sending = Broadcast(HOST, timeout_s=SHORT_S)
    leaving = threads.submit(leave, sending.address)
    with pytest.raises(WeightsSourceError, match=f"broadcast from {sending.address}"):
        sending.send(weights().items(), bucket_bytes=BUCKET)
    leaving.result()


def test_a_sender_killed_in_the_middle_is_noticed() -> None:
    sender = Peer(send_half)
    receiving = Receiver(sender.says(), 1, 2, timeout_s=AMPLE_S)
    buckets = receiving.buckets()
    next(buckets)
    assert sender.says() == "half"
    sender.kill()
    with pytest.raises(WeightsSourceError, match="broadcast from"):
        list(buckets)


def test_a_sender_stopped_in_the_middle_is_waited_for_only_so_long() -> None:
    sender = Peer(send_half)
    receiving = Receiver(sender.says(), 1, 2, timeout_s=SHORT_S)
    buckets = receiving.buckets()
    next(buckets)
    assert sender.says() == "half"
    sender.stop()
    with pytest.raises(WeightsSourceError, match="broadcast from"):
        list(buckets)
    sender.kill()


def losing(receiver: Peer, lose: Callable[[Peer], None]) -> Iterator[tuple[str, Tensor]]:
    """Tensors, after the first of which the receiver is lost."""
    yield from list(weights().items())[:FIRST]
    assert receiver.says() == "half"
    lose(receiver)
    yield from list(weights().items())[FIRST:]
    yield "large", torch.zeros(8 << 20)


def test_a_receiver_killed_in_the_middle_is_noticed() -> None:
    sending = Broadcast(HOST, timeout_s=AMPLE_S)
    receiver = Peer(receive_half, sending.address)
    with pytest.raises(WeightsSourceError, match=f"broadcast from {sending.address}: waiting for the other ends"):
        sending.send(losing(receiver, Peer.kill), bucket_bytes=BUCKET)


def test_a_receiver_stopped_in_the_middle_is_waited_for_only_so_long() -> None:
    sending = Broadcast(HOST, timeout_s=SHORT_S)
    receiver = Peer(receive_half, sending.address)
    with pytest.raises(WeightsSourceError, match=f"broadcast from {sending.address}: waiting for the other ends"):
        sending.send(losing(receiver, Peer.stop), bucket_bytes=BUCKET)
    receiver.kill()


def test_nobody_joins() -> None:
    sending = Broadcast(HOST, timeout_s=0.2)
    with pytest.raises(WeightsSourceError, match="waiting for a receiver"):
        sending.send(weights().items(), bucket_bytes=BUCKET)
    with pytest.raises(WeightsSourceError, match="was sent or closed before"):
        sending.send(weights().items(), bucket_bytes=BUCKET)


def test_not_all_join(threads: ThreadPoolExecutor) -> None:
    sending = Broadcast(HOST, timeout_s=0.5)
    receiving = threads.submit(staged, sending.address, 1, 3, 0.5)
    with pytest.raises(WeightsSourceError, match="waiting for 2 receivers"):
        sending.send(weights().items(), bucket_bytes=BUCKET)
    with pytest.raises(WeightsSourceError):
        receiving.result()


def test_ranks_and_sizes_that_do_not_fit_are_refused() -> None:
    sending = Broadcast(HOST, timeout_s=AMPLE_S)
    with pytest.raises(WeightsSourceError):
        Receiver(sending.address, 1, 2, timeout_s=0.2)
    with pytest.raises(WeightsSourceError, match="there is a receiver 1 already"):
        Receiver(sending.address, 1, 2, timeout_s=AMPLE_S)
    with pytest.raises(WeightsSourceError, match="a group of 3, but another receiver says 2"):
        Receiver(sending.address, 2, 3, timeout_s=AMPLE_S)
    sending.close()
    sending.close()


def _silent() -> tuple[socket.socket, str]:
    listener = socket.create_server((HOST, 0))
    return listener, f"{HOST}:{listener.getsockname()[1]}"


def _closed() -> tuple[socket.socket, str]:
    listener, address = _silent()
    listener.close()
    return listener, address


@pytest.mark.parametrize("peer", [_silent, _closed])
def test_an_address_where_no_sender_answers_is_an_error(peer: Callable[[], tuple[socket.socket, str]]) -> None:
    listener, address = peer()
    with listener, pytest.raises(WeightsSourceError, match=f"broadcast from {address}: connecting"):
        Receiver(address, 1, 2, timeout_s=0.3)


def test_an_address_that_is_none_is_an_error() -> None:
    with pytest.raises(WeightsSourceError, match="nowhere"):
        Receiver("nowhere", 1, 2, timeout_s=0.3)


def test_a_host_that_is_another_cannot_be_listened_on() -> None:
    with pytest.raises(WeightsError, match=r"192\.0\.2\.1: cannot be listened on"):
        Broadcast("192.0.2.1", timeout_s=1)


def test_it_listens_on_the_interface_that_was_named_only() -> None:
    sending = Broadcast("127.0.0.2", timeout_s=1)
    host, _, port = sending.address.partition(":")
    assert host == "127.0.0.2"
    socket.create_connection((host, int(port))).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, int(port)))
    sending.close()


def test_an_error_that_is_kept_keeps_no_connection_open(threads: ThreadPoolExecutor) -> None:
    def fail(sending: Broadcast) -> WeightsSourceError:
        with pytest.raises(WeightsSourceError) as raised:
            sending.send([("w", torch.zeros(2, dtype=torch.int8))], bucket_bytes=BUCKET)
        return raised.value

    sending = Broadcast(HOST, timeout_s=AMPLE_S)
    failing = threads.submit(fail, sending)
    [receiving] = staging(threads, sending, 1)
    kept = failing.result()
    assert "w: dtype: got int8" in str(kept)
    with pytest.raises(WeightsSourceError):
        receiving.result()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, int(sending.address.rpartition(":")[2])))
    assert threading.active_count() < 50
