"""How ranks meet: the store that they find each other through, and the groups that they communicate over.

Rank 0 hosts a store, or torchrun does, and every rank joins with a client of it. `join` returns two groups that break independently, the
device mesh for tensors of the model and `cpu_group` (gloo) for scalars and bytes, and `sync`, the named points around both.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from offbeat.config.dist import DistConfig
from offbeat.errors import ConfigError, PortBusyError, StuckError, SyncError
from offbeat.pulse import Vigil
from offbeat.sync.links import reach
from offbeat.sync.peers import Card
from offbeat.sync.platform import current_platform
from offbeat.sync.sync import Sync


@dataclass(frozen=True)
class MeshShape:
    """Layout of the ranks: `dp` replicas or shards of the model, each over `tp` adjacent ranks."""

    dp: int
    tp: int = 1

    def check(self, world: int) -> None:
        """Check that the shape fits `world` ranks.

        Raises:
            ConfigError: it does not.
        """
        if min(self.dp, self.tp) < 1 or self.dp * self.tp != world:
            raise ConfigError(
                f"a mesh of {self.dp} data-parallel times {self.tp} tensor-parallel ranks needs {self.dp * self.tp} of them, got {world}; "
                "start as many, or change the mesh")


@dataclass(frozen=True, eq=False)
class ProcessGroups:
    """The groups that a rank belongs to, and its place in them.

    Attributes:
        rank: rank of this process, 0 to world - 1.
        world: number of ranks, R.
        shape: layout of the ranks.
        mesh: one dimension, "dp", on the platform's backend: this rank and its peers of the same tensor-parallel index.
        cpu_group: gloo over all ranks, whatever the device.
        sync: named points over all ranks.
    """

    rank: int
    world: int
    shape: MeshShape
    mesh: DeviceMesh
    cpu_group: dist.ProcessGroup
    sync: Sync


class HostedStore(dist.TCPStore):
    """A store served by this process."""


def host_store(timeout_s: float, *, host: str = "127.0.0.1", port: int = 0) -> HostedStore:
    """Serve a store on `port` of `host`, the only address that it listens on; 0 takes a free port, to be read from `.port`.

    Raises:
        PortBusyError: the port is taken or cannot be bound.
    """
    try:
        listener = socket.create_server((host, port))
    except OSError as exc:
        raise PortBusyError(f"no store can be served at {host}:{port} ({exc.strerror}); choose another port or host") from exc
    port = listener.getsockname()[1]
    # The store owns the socket from here on. Passing a bound socket leaves no moment in which another process could take the port.
    return HostedStore(
        host, port, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False, master_listen_fd=listener.detach())


def connect_store(host: str, port: int, *, timeout_s: float, server: Card | None = None) -> dist.TCPStore:
    """Connect to the store at `host`:`port`; `server`, if known, is the rank that serves it.

    Raises:
        DeadlineError: no store answers there within `timeout_s` seconds; a SyncTimeout where the server is stopped.
        PeerError: the server is dead.
    """
    return reach(host, port, timeout_s=timeout_s, server=server)


_syncs: list[Sync] = []
_vigils: list[Vigil] = []
"""Syncs and vigils of this process; `leave` ends them together with torch's groups, which are per process too."""


def join(
    *, rank: int, world: int, store: dist.TCPStore, config: DistConfig, local_rank: int = 0, prefix: str = "",
    shape: MeshShape | None = None, server: Card | None = None, on_stuck: Callable[[StuckError], None] = lambda _error: None,
    on_beat: Callable[[str], None] = lambda _text: None,
) -> ProcessGroups:
    """Meet the other ranks at the sync point "join"; returns when all have arrived.

    Args:
        store: rank 0's own store, or a client of it.
        local_rank: index among the devices visible to this process; 0 where the launcher shows each rank only its own.
        prefix: prefix of every key in the store; unique per meeting where a store serves several, as torchrun's does on restarts.
        shape: layout of the ranks; by default all are data-parallel.
        server: the rank that serves the store, if its process is known: it may die, or be stopped, before it has joined.
        on_stuck: called in another thread when this rank or a peer is stuck, in which case the calling thread may never be told.
        on_beat: called in another thread, four times a second while this rank does some `offbeat.pulse.work`, with a text of what it does.

    Raises:
        ConfigError: the shape does not fit `world` ranks.
        SyncTimeout: fewer than `world` ranks came within `config.init_timeout_s`.
        PeerError: one of them died meanwhile.
    """
    shape = shape or MeshShape(world)
    shape.check(world)
    current_platform.set_device(local_rank)
    sync = Sync.start(
        rank=rank, world=world, store=store, config=config, hosts_store=isinstance(store, HostedStore), prefix=prefix, server=server,
        on_stuck=on_stuck)
    _syncs.append(sync)
    _vigils.append(Vigil(
        patience_s=config.sync_timeout_s, on_hang=lambda hang: sync.hang(hang.text(f"rank {rank}")), on_beat=on_beat))
    try:
        with sync.region("join", timeout_s=config.init_timeout_s):
            init_timeout = timedelta(seconds=config.init_timeout_s)
            store.set_timeout(init_timeout)
            dist.init_process_group(
                current_platform.backend, store=dist.PrefixStore(f"{prefix}groups", store), rank=rank, world_size=world,
                timeout=init_timeout)
            mesh = init_device_mesh(current_platform.device_type, (shape.dp, shape.tp), mesh_dim_names=("dp", "tp"))
            cpu_group = dist.new_group(backend="gloo", timeout=init_timeout)
            assert isinstance(cpu_group, dist.ProcessGroup), f"every rank is a member of the new group, got {cpu_group}"
            for group in (dist.group.WORLD, *mesh.get_all_groups(), cpu_group):
                _set_pg_timeout(timedelta(seconds=config.collective_timeout_s), group)
    except BaseException as exc:
        give_up(exc)  # but do not leave, so that `check_peers` says why and others can read it
        raise
    sync.cpu_group = cpu_group
    return ProcessGroups(rank=rank, world=world, shape=shape, mesh=mesh["dp"], cpu_group=cpu_group, sync=sync)


def check_peers() -> None:
    """Raise PeerError if a peer has died or failed; works while this process joins, too. See `Sync.check`."""
    for sync in _syncs:
        sync.check()


def give_up(error: BaseException) -> None:
    """Give up because of `error`: tell all peers, and kill those that are stopped and cannot hear it. Never raises."""
    for sync in _syncs:
        if isinstance(error, SyncError):
            sync.pass_on(error)
        else:
            sync.fail(f"{type(error).__name__}: {error}")
        sync.end_stopped()


def leave() -> None:
    """Take this process out of all groups. Ranks need not leave at the same time."""
    while _vigils:
        _vigils.pop().close()
    while _syncs:
        _syncs.pop().close()
    if dist.is_initialized():
        dist.destroy_process_group()
