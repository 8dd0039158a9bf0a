"""What is broadcast: the bytes of tensors in buckets, and how receiving ends where nobody offers; `test_weight_broadcast` has both."""

import socket
from threading import Event, Thread

import pytest
import torch
import torch.distributed as dist

from offbeat.sync.broadcast import BroadcastGroup, Spec, cut, receive

CPU = torch.device("cpu")


def test_tensors_of_all_types_and_shapes_are_cut_into_buckets_and_put_together_again() -> None:
    state = [
        torch.randn(7, 3), torch.randn(()), torch.randn(5).bfloat16(), torch.tensor([True, False, True]), torch.arange(3),
        torch.zeros(0, 4), torch.randn(25)]
    sent = [torch.cat(parts) for parts in cut(state, bucket_bytes=50)]
    assert [len(bucket) for bucket in sent[:-1]] == [50] * (len(sent) - 1) and 0 < len(sent[-1]) <= 50
    received = [torch.empty_like(tensor) for tensor in state]
    for parts, bucket in zip(cut(received, bucket_bytes=50), sent, strict=True):
        for part, data in zip(parts, bucket.split([len(part) for part in parts]), strict=True):
            part.copy_(data)
    assert all(torch.equal(*pair) for pair in zip(state, received, strict=True))


def test_a_type_that_torch_does_not_have_is_refused() -> None:
    assert Spec.of("a", torch.ones(2, 3).bfloat16()) == Spec("a", "bfloat16", (2, 3)) and Spec("a", "bool", ()).torch_dtype == torch.bool
    with pytest.raises(ValueError, match="'nn', which is not a torch type"):
        _ = Spec("weight", "nn", (2,)).torch_dtype


def test_receiving_from_an_address_where_nobody_is_ends_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        receive(f"127.0.0.1:{port}", device=CPU)


def test_members_that_do_not_connect_within_the_first_collective_are_left_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL's do: the call of its first collective returns when all members have connected, and has no time-out."""
    let_go = Event()

    class Lazy:
        def __init__(self, *_: object) -> None: ...

        def broadcast(self, *_: object) -> None:
            let_go.wait()
            raise RuntimeError("let go")

        def abort(self) -> None:
            let_go.set()

    monkeypatch.setattr(dist, "ProcessGroupGloo", Lazy)
    with pytest.raises(RuntimeError, match=r"did not connect within 0\.2 s"):
        with BroadcastGroup("gloo", dist.HashStore(), rank=0, world=2, timeout_s=0.2) as group:
            group.broadcast([torch.ones(3)], device=torch.device("cpu"))
    assert let_go.is_set()


def test_members_that_connect_receive_what_rank_0_sends() -> None:
    store, received = dist.HashStore(), torch.zeros(3)

    def take() -> None:
        with BroadcastGroup("gloo", store, rank=1, world=2, timeout_s=20) as group:
            group.broadcast([received], device=torch.device("cpu"))

    other = Thread(target=take)
    other.start()
    with BroadcastGroup("gloo", store, rank=0, world=2, timeout_s=20) as group:
        group.broadcast([torch.arange(3.0)], device=torch.device("cpu"))
        other.join()
    assert received.tolist() == [0, 1, 2]
