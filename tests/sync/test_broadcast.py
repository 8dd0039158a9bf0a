"""What is broadcast: the bytes of tensors in buckets, and how receiving ends where nobody offers; `test_offer.py` has both sides."""

import socket

import pytest
import torch

from offbeat.sync.broadcast import Spec, cut, receive

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
