"""Ranks meet through a store; the ones that do not come are named."""

import queue
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import get_process_group_ranks

from offbeat.config.dist import DistConfig
from offbeat.errors import ConfigError, DeadlineError, PortBusyError, StuckError, SyncTimeout
from offbeat.model.context import exchanged
from offbeat.pulse import progress, work
from offbeat.sync.links import MeetingPlace
from offbeat.sync.mesh import MeshShape, connect_store, host_store, join, leave
from ranks import run_ranks
from train_samples import arranged


def test_a_hosted_store_answers_on_its_host_alone():
    store = host_store(30)
    connect_store("127.0.0.1", store.port, timeout_s=30).set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", store.port), timeout=2):
        pass


def test_a_store_on_a_port_that_is_taken_is_refused():
    store = host_store(30)
    with pytest.raises(PortBusyError, match=f"no store can be served at 127.0.0.1:{store.port} "):
        host_store(30, port=store.port)


def test_a_store_that_nobody_hosts_is_a_missed_deadline():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(DeadlineError, match=f"127.0.0.1:{port} within 1 s"):
        connect_store("127.0.0.1", port, timeout_s=1)


def test_a_name_without_an_address_is_said_at_once_and_asked_for_until_the_deadline(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
):
    with pytest.raises(DeadlineError, match=r"the name 'rank-0\.invalid' of the store's host has no address .+, after 2 s; MASTER"):
        connect_store("rank-0.invalid", 29500, timeout_s=2)
    assert "it is asked for again for 2 s" in caplog.text
    store, asked, ask = host_store(30), [], socket.getaddrinfo

    def of_a_machine_that_starts(host: str, *rest: Any, **options: Any) -> Any:
        asked.append(host)
        return ask("rank-0.invalid" if len(asked) < 3 else host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", of_a_machine_that_starts)
    assert connect_store("localhost", store.port, timeout_s=30).port == store.port
    assert asked == ["localhost"] * 3


def test_a_single_rank_joins_and_leaves_twice():
    for _ in range(2):
        groups = join(rank=0, world=1, place=MeetingPlace(host_store(30)), config=DistConfig())
        assert groups.world == 1
        assert groups.mesh.mesh_dim_names == ("dp", "shard", "cp", "tp")
        assert (groups.batch_ranks, groups.batch_index, groups.gradient_mesh.size()) == (1, 0, 1)
        assert groups.shape == MeshShape(1)
        assert torch.distributed.get_backend(groups.cpu_group) == "gloo"
        leave()
    leave()


def test_a_single_rank_that_hangs_is_told_to_whoever_waits_for_it():
    stuck, beats = queue.SimpleQueue(), []
    groups = join(
        rank=0, world=1, place=MeetingPlace(host_store(30)), config=DistConfig(sync_timeout_s=0.5),
        listener=SimpleNamespace(give_up=stuck.put, beat=beats.append))
    try:
        with work("save"):
            progress("write_checkpoint")
            text = str(_take_while_asleep(stuck))
        assert text.startswith("rank 0 hangs in 'save' (write_checkpoint): for ")
        assert "in _take_while_asleep: return stuck.get(timeout=60)" in text
        assert set(beats) == {"'save' (write_checkpoint)"}
        with pytest.raises(StuckError, match="^rank 0 hangs in 'save'"):
            groups.sync.check()
    finally:
        leave()


def _take_while_asleep(stuck):
    return stuck.get(timeout=60)


def test_ranks_that_do_not_join_are_named():
    store = host_store(30)
    with pytest.raises(SyncTimeout) as error:
        join(rank=1, world=3, place=MeetingPlace(store), config=DistConfig(init_timeout_s=1))
    assert str(error.value) == (
        "sync point 'join' timed out after 1 s with 1 of 3 ranks there: rank 0 has not started, rank 2 has not started")
    leave()


@pytest.mark.parametrize(("shape", "world"), [(MeshShape(2), 3), (MeshShape(2, tp=2), 2), (MeshShape(0), 0), (MeshShape(-1, -2), 2)])
def test_a_world_that_does_not_match_the_mesh_is_refused(shape, world):
    with pytest.raises(ConfigError, match=rf"a mesh of dp {shape.dp} \* shard {shape.shard} .* tp {shape.tp} needs .* ranks, got {world}"):
        join(rank=0, world=world, place=MeetingPlace(host_store(30)), config=DistConfig(), shape=shape)


@pytest.mark.parametrize(("shape", "sizes"), [
    (MeshShape(4, ep=2), (2, 1, 2)), (MeshShape(2, shard=4, ep=2), (2, 2, 2)), (MeshShape(2, shard=4, ep=8), (1, 1, 8)),
    (MeshShape(3, shard=4, ep=6), (1, 2, 6)), (MeshShape(1, shard=8, ep=2), (1, 4, 2))])
def test_experts_are_as_many_replicas_as_the_model_where_their_number_of_ranks_divides_the_shards(shape, sizes):
    assert tuple(shape.expert_sizes.values()) == sizes
    shape.check(shape.dp * shape.shard)


@pytest.mark.parametrize("shape", [MeshShape(3, ep=2), MeshShape(1, cp=2, ep=2)])
def test_experts_are_dealt_to_ranks_with_rows_of_their_own_only(shape):
    with pytest.raises(ConfigError, match=r"train.parallel.ep must divide the . ranks with different rows, and train.parallel.cp be 1"):
        shape.check(shape.dp * shape.cp)


def _wait_for_tokens(groups, port):
    """Rank 1 sends its tokens to no expert; what rank 0, which waits for them, hears and when."""
    leave()
    config = DistConfig(init_timeout_s=60, collective_timeout_s=2)
    place = MeetingPlace(connect_store("127.0.0.1", port, timeout_s=60))
    there = join(rank=groups.rank, world=2, place=place, config=config, shape=MeshShape(2, ep=2))
    start, error = time.monotonic(), ""
    if there.rank == 0:
        try:
            exchanged(torch.ones(3, 4), there.expert_mesh["ep"].get_group(), sent=[1, 2], received=[1, 2])
        except RuntimeError as exc:
            error = str(exc)
    there.sync.barrier("done")
    return [error, time.monotonic() - start]


@pytest.mark.drill
def test_a_rank_that_waits_for_tokens_of_another_hears_of_its_deadline():
    store = host_store(60)
    (error, seconds), _ = run_ranks(_wait_for_tokens, world=2, argument=store.port)
    assert "imed out" in error and 1.5 < seconds < 15


def _find_peers(groups, _argument):
    return [groups.rank, groups.shape.dp]


def test_ranks_are_all_data_parallel_unless_told_otherwise():
    assert run_ranks(_find_peers, world=2) == [[0, 2], [1, 2]]


def _find_places(groups, _argument):
    """By mesh: share and number of shares, the ranks that gradients are summed over, and the sum over shares of one each."""
    places = {}
    for mesh in ("ddp", "fsdp", "shard2", "tp2", "cp2", "shard2 tp2", "cp2 tp2", "tp4"):
        there = arranged(groups, mesh)
        peers = get_process_group_ranks(there.gradient_mesh.get_group())
        num_shares = there.shares.sum_scalars("shares", {"number": 1.0})["number"]
        places[mesh] = [there.batch_index, there.batch_ranks, peers, there.shares.max_scalars("ranks", {"rank": groups.rank})["rank"]]
        assert num_shares == there.batch_ranks
    assert get_process_group_ranks(arranged(groups, "shard2 cp2").shard_mesh.get_group()) == [0, 1, 2, 3]
    replicas = arranged(groups, "cp2").shard_mesh
    assert replicas.mesh_dim_names == ("dp", "shard_cp") and replicas.mesh.tolist() == [[0, 1], [2, 3]]
    return places


def test_ranks_of_a_tensor_or_context_group_have_one_share_which_counts_once():
    everybody = [0, 1, 2, 3]
    expected = {
        "ddp": everybody, "fsdp": everybody, "shard2": everybody, "tp2": [0, 0, 1, 1], "cp2": [0, 0, 1, 1], "shard2 tp2": [0, 0, 1, 1],
        "cp2 tp2": [0] * 4, "tp4": [0] * 4}
    for rank, places in enumerate(run_ranks(_find_places, world=4)):
        assert {mesh: place[0] for mesh, place in places.items()} == {mesh: shares[rank] for mesh, shares in expected.items()}
        for mesh, (_, num_shares, peers, largest) in places.items():
            tensor = int(mesh[-1]) if "tp" in mesh else 1
            assert num_shares == max(expected[mesh]) + 1 and largest == 3
            assert peers == [other for other in everybody if other % tensor == rank % tensor]
