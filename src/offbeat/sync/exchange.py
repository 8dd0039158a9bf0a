"""Exchanges of values and bytes over gloo, between ranks that are known to have arrived. Called by `Sync` after an arrival.

Every function is a collective over all ranks of `group`, and takes `finish`, which waits for an asynchronous operation. Only CPU tensors
are used. Bytes travel as uint8 tensors; nothing is ever unpickled.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Finish = Callable[[dist.Work | None], None]


def reduce_scalars(
    values: Mapping[str, float], op: dist.ReduceOp.RedOpType, *, group: dist.ProcessGroup, finish: Finish,
) -> dict[str, float]:
    """Reduce each value over the ranks, in float64; ranks must pass the same keys, and all get the same bits."""
    keys = sorted(values)
    packed = torch.tensor([values[key] for key in keys], dtype=torch.float64)
    finish(dist.all_reduce(packed, op=op, group=group, async_op=True))
    return dict(zip(keys, packed.tolist(), strict=True))


def all_gather_bytes(data: bytes, *, group: dist.ProcessGroup, finish: Finish) -> list[bytes]:
    """Gather the bytes of all ranks, ordered by rank."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    finish(dist.all_gather(sizes, torch.tensor([len(data)]), group=group, async_op=True))
    lengths = [int(size) for size in sizes]
    longest = max(lengths)
    if longest == 0:
        return [b""] * group.size()
    buffers = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    finish(dist.all_gather(buffers, _tensor(data.ljust(longest, b"\0")), group=group, async_op=True))
    return [_bytes(buffer[:length]) for buffer, length in zip(buffers, lengths, strict=True)]


def broadcast_bytes(data: bytes, *, source: int, group: dist.ProcessGroup, finish: Finish) -> bytes:
    """Return the source's bytes; the data of other ranks is ignored."""
    size = torch.tensor([len(data)])
    finish(dist.broadcast(size, source, group=group, async_op=True))
    if not int(size):
        return b""
    buffer = _tensor(data) if group.rank() == source else torch.empty(int(size), dtype=torch.uint8)
    finish(dist.broadcast(buffer, source, group=group, async_op=True))
    return data if group.rank() == source else _bytes(buffer)


def scatter_bytes(parts: Sequence[bytes], *, source: int, group: dist.ProcessGroup, finish: Finish) -> bytes:
    """Return this rank's part of the source's data; sizes may differ and be 0, and no rank receives more than its own part."""
    ranks, is_source = range(group.size()), group.rank() == source
    lengths = torch.tensor([len(part) for part in parts]) if is_source else torch.zeros(len(ranks), dtype=torch.int64)
    finish(dist.broadcast(lengths, source, group=group, async_op=True))
    sizes = [int(length) for length in lengths]
    given, got = _tensor(b"".join(parts)), torch.empty(sizes[group.rank()], dtype=torch.uint8)
    # Not isend and irecv, whose work breaks when a wait with a short timeout ends first.
    finish(dist.all_to_all_single(
        got, given, output_split_sizes=[got.numel() if rank == source else 0 for rank in ranks],
        input_split_sizes=sizes if is_source else [0 for _ in ranks], group=group, async_op=True))
    return _bytes(got)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
