"""Alone, a rank gets back what it gives; how ranks exchange is in test_sync.py."""

import torch.distributed as dist

from offbeat.sync.exchange import all_gather_bytes, broadcast_bytes, reduce_scalars, scatter_bytes
from ranks import run_alone


def test_one_rank_gets_its_own():
    def act(groups, _):
        common = {"group": groups.cpu_group, "finish": lambda work: work.wait() if work else None}
        return [
            reduce_scalars({"b": 1.0, "a": 0.1}, dist.ReduceOp.SUM, **common), reduce_scalars({}, dist.ReduceOp.MAX, **common),
            all_gather_bytes(b"x", **common), all_gather_bytes(b"", **common), broadcast_bytes(b"y", source=0, **common),
            broadcast_bytes(b"", source=0, **common), scatter_bytes([b"z"], source=0, **common)]

    assert run_alone(act) == [{"a": 0.1, "b": 1.0}, {}, [b"x"], [b""], b"y", b"", b"z"]
