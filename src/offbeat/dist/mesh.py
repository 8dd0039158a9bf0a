"""Ranks meet: the store they find each other through, and the groups they talk over.

Rank 0 hosts a store, tells its port to whoever starts the ranks, and every rank joins with a client of it. `join` promises two groups
that break independently: the device mesh, for tensors of the model, and `cpu_group`, gloo, for scalars and named waits.
"""

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from offbeat.config.dist import DistConfig
from offbeat.dist.platform import current_platform
from offbeat.errors import DeadlineError


@dataclass(frozen=True, eq=False)
class ProcessGroups:
    """What a rank knows about its peers.

    Attributes:
        rank: this process, 0 to world - 1.
        world: number of ranks, R.
        mesh: one dimension, "dp", over all ranks, on the platform's backend.
        cpu_group: gloo over all ranks, whatever the device.
    """

    rank: int
    world: int
    mesh: DeviceMesh
    cpu_group: dist.ProcessGroup


def host_store(timeout_s: float, *, host: str = "127.0.0.1") -> dist.TCPStore:
    """Serve a store on a free port of `host`, which alone it listens on; read the port from `.port`."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    # The store owns the socket from here on; handing over a bound socket leaves no moment in which another process takes the port.
    return dist.TCPStore(
        host, port, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False, master_listen_fd=listener.detach())


def connect_store(host: str, port: int, *, timeout_s: float) -> dist.TCPStore:
    """A client of the store at `host`:`port`.

    Raises:
        DeadlineError: nobody serves a store there within `timeout_s` seconds.
    """
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except dist.DistError as exc:
        raise DeadlineError(
            f"no store answered at {host}:{port} within {timeout_s:g} s; rank 0 hosts it, so look at rank 0's log first") from exc


def join(*, rank: int, world: int, store: dist.Store, config: DistConfig, local_rank: int = 0) -> ProcessGroups:
    """Meet the other ranks; returns when all are there.

    Args:
        store: rank 0's, or a client of it; it serves one meeting.
        local_rank: index among the devices that this process sees; 0 where the launcher shows each rank its own.

    Raises:
        DeadlineError: fewer than `world` ranks came within `config.init_timeout_s`.
    """
    current_platform.set_device(local_rank)
    store.set_timeout(timedelta(seconds=config.init_timeout_s))
    collective_timeout = timedelta(seconds=config.collective_timeout_s)
    store.set(f"offbeat/joined/{rank}", "")
    try:
        store.wait([f"offbeat/joined/{peer}" for peer in range(world)])
    except dist.DistError as exc:
        missing = [peer for peer in range(world) if not store.check([f"offbeat/joined/{peer}"])]
        raise DeadlineError(
            f"rank {rank} of {world} waited {config.init_timeout_s:g} s (dist.init_timeout_s) for ranks {missing} to join") from exc
    dist.init_process_group(current_platform.backend, store=store, rank=rank, world_size=world, timeout=collective_timeout)
    mesh = init_device_mesh(current_platform.device_type, (world,), mesh_dim_names=("dp",))
    cpu_group = dist.new_group(backend="gloo", timeout=collective_timeout)
    assert isinstance(cpu_group, dist.ProcessGroup), f"every rank is a member of the new group, got {cpu_group}"
    return ProcessGroups(rank=rank, world=world, mesh=mesh, cpu_group=cpu_group)


def leave() -> None:
    """Take this process out of all groups. Ranks need not leave together."""
    if dist.is_initialized():
        dist.destroy_process_group()
