"""Ranks meet through a store; the ones that do not come are named."""

import socket

import pytest
import torch

from offbeat.config.dist import DistConfig
from offbeat.dist.mesh import connect_store, host_store, join, leave
from offbeat.errors import DeadlineError


def test_a_hosted_store_answers_on_its_host_alone():
    store = host_store(5)
    connect_store("127.0.0.1", store.port, timeout_s=5).set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", store.port), timeout=2):
        pass


def test_a_store_that_nobody_hosts_is_a_missed_deadline():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(DeadlineError, match=f"127.0.0.1:{port} within 1 s"):
        connect_store("127.0.0.1", port, timeout_s=1)


def test_a_single_rank_joins_and_leaves_twice():
    for _ in range(2):
        groups = join(rank=0, world=1, store=host_store(5), config=DistConfig())
        assert groups.world == 1
        assert groups.mesh.mesh_dim_names == ("dp",)
        assert torch.distributed.get_backend(groups.cpu_group) == "gloo"
        leave()
    leave()


def test_ranks_that_do_not_join_are_named():
    with pytest.raises(DeadlineError, match=r"rank 1 of 3 .* ranks \[0, 2\] to join"):
        join(rank=1, world=3, store=host_store(5), config=DistConfig(init_timeout_s=0.3))
    leave()
