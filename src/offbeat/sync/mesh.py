"""The meeting of the ranks: the store through which they find each other, and the groups over which they communicate.

Rank 0 hosts a store, or torchrun does, and every rank joins with a client of it. `join` returns two groups that break independently, the
device mesh for tensors of the model and `cpu_group` (gloo) for scalars and bytes, and `sync`, the named points around both.
"""

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from offbeat.config.dist import DistConfig
from offbeat.config.train import Division, TrainConfig
from offbeat.errors import ConfigError, PortBusyError, SyncError
from offbeat.pulse import Hang, Vigil
from offbeat.sync.board import RankListener
from offbeat.sync.links import MeetingPlace, reach
from offbeat.sync.peers import Card
from offbeat.sync.platform import current_platform
from offbeat.sync.sync import Sync


@dataclass(frozen=True)
class MeshShape(Division):
    """Layout of the ranks, slowest first: the ranks of a `tp` group are adjacent.

    Attributes:
        dp: replicas of the model.
        shard: ranks that keep each parameter of a replica in shards (FSDP2).
        cp: ranks that divide each row of tokens among them.
        tp: ranks that compute each layer together.
        ep: ranks among which experts are dealt as wholes: all of a tensor group, or without one as many adjacent ranks, which have
            different rows; 1 for none. Not a dimension of the same mesh.
    """

    dp: int
    shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, config: TrainConfig, *, world: int) -> Self:
        """Return the layout of `world` ranks by [train.parallel]; for example, 8 ranks with shard = 4 are 2 replicas."""
        parallel = config.parallel
        return cls(parallel.num_replicas(world), parallel.shard, parallel.cp, parallel.tp, parallel.ep)

    @property
    def sizes(self) -> dict[str, int]:
        """Size by the name of the mesh's dimension."""
        return {"dp": self.dp, "shard": self.shard, "cp": self.cp, "tp": self.tp}

    @property
    def expert_sizes(self) -> dict[str, int]:
        """Size by the name of the expert mesh's dimension, of ranks that hold: the same, parts of the same, and different experts.

        For example, 8 ranks with shard = 4 and ep = 2 hold 2 replicas of the experts, each of them in 2 shards.
        """
        parts = math.lcm(self.shard, self.ep)
        return {"expert_dp": self.dp * self.shard // parts, "expert_shard": parts // self.ep, "ep": self.ep}

    def check(self, world: int) -> None:
        """Raise ConfigError unless the shape fits `world` ranks."""
        needed = math.prod(self.sizes.values())
        if min(self.sizes.values()) < 1 or needed != world:
            text = " * ".join(f"{name} {size}" for name, size in self.sizes.items())
            raise ConfigError(f"a mesh of {text} needs {needed} ranks, got {world}; start as many, or change the mesh")
        if self.spreads_experts and (self.cp > 1 or (self.dp * self.shard) % self.ep):
            raise ConfigError(
                f"train.parallel.ep must divide the {self.dp * self.shard} ranks with different rows, and train.parallel.cp be 1, got ep"
                f" {self.ep} and cp {self.cp}; choose a divisor, or 1")


@dataclass(frozen=True)
class Shares:
    """All ranks, as an `offbeat.telemetry.tracker.ReduceGroup` in which each share of a batch counts once, however many ranks hold it."""

    sync: Sync
    counts: bool

    def sum_scalars(self, name: str, values: Mapping[str, float]) -> dict[str, float]:
        """Sum each value over the shares; collective over all ranks."""
        return self.sync.sum_scalars(name, values if self.counts else dict.fromkeys(values, 0.0))

    def max_scalars(self, name: str, values: Mapping[str, float]) -> dict[str, float]:
        """Return each value's maximum; collective over all ranks."""
        return self.sync.max_scalars(name, values)


@dataclass(frozen=True, eq=False)
class ProcessGroups:
    """The groups that a rank belongs to, and its place in them.

    Attributes:
        mesh: all ranks on the platform's backend, in the dimensions "dp", "shard", "cp" and "tp", some of which may be of size 1.
        gradient_mesh: one dimension: this rank and its peers of the same tensor index, over which gradients are summed.
        cpu_group: gloo over all ranks, on any device.
        expert_mesh: all ranks in the dimensions of `MeshShape.expert_sizes`, where experts are dealt to ranks with different rows.
    """

    rank: int
    world: int
    shape: MeshShape
    mesh: DeviceMesh
    gradient_mesh: DeviceMesh
    cpu_group: dist.ProcessGroup
    sync: Sync
    expert_mesh: DeviceMesh | None = None

    @property
    def batch_ranks(self) -> int:
        """Number of shares that a batch is spread in: dp * shard."""
        return self.shape.dp * self.shape.shard

    @property
    def batch_index(self) -> int:
        """Index of this rank's share, the same for all ranks of its context and tensor groups; e.g. 2 for rank 5 with tp = 2."""
        return self.rank // self.shape.ranks_per_share

    @property
    def shares(self) -> Shares:
        """All ranks, for statistics of their shares; the first rank of a context and tensor group counts for it."""
        return Shares(self.sync, counts=self.rank % self.shape.ranks_per_share == 0)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Mesh over which parameters are sharded: shards along the last dimension, replicas along the first of two.

        The ranks that divide a row hold the same parameters, so they hold shards of them, too.
        """
        shards = "shard" if self.shape.cp == 1 else "shard_cp"
        return self.mesh["dp", shards] if self.shape.dp > 1 else self.mesh[shards]

    @property
    def expert_shard_mesh(self) -> DeviceMesh:
        """The same for the experts that this rank holds, where these are dealt to ranks with different rows."""
        assert self.expert_mesh is not None, "experts are dealt to ranks with different rows"
        return self.expert_mesh["expert_dp", "expert_shard"] if self.expert_mesh.size(0) > 1 else self.expert_mesh["expert_shard"]


class HostedStore(dist.TCPStore):
    """A store served by this process."""


def host_store(timeout_s: float, *, host: str = "127.0.0.1", port: int = 0) -> HostedStore:
    """Serve a store on `port` of `host` alone; 0 takes a free port, read from `.port`. Raises PortBusyError if it cannot be bound."""
    try:
        listener = socket.create_server((host, port))
    except OSError as exc:
        raise PortBusyError(f"no store can be served at {host}:{port} ({exc.strerror}); choose another port or host") from exc
    port = listener.getsockname()[1]
    # The store owns the socket from here on. Passing a bound socket leaves no moment in which another process could take the port.
    return HostedStore(
        host, port, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False, master_listen_fd=listener.detach())


def connect_store(host: str, port: int, *, timeout_s: float, server: Card | None = None, by_launcher: bool = False) -> dist.TCPStore:
    """Connect to the store at `host`:`port`; `server`, if known, is the rank that serves it, unless torchrun does (`by_launcher`).

    Raises:
        DeadlineError: no store answers there within `timeout_s` seconds; a SyncTimeout where the server is stopped.
        PeerError: the server is dead.
    """
    return reach(host, port, timeout_s=timeout_s, server=server, by_launcher=by_launcher)


_syncs: list[Sync] = []
_vigils: list[Vigil] = []
"""Syncs and vigils of this process; `leave` ends them together with torch's groups, which are per process too."""


@dataclass(frozen=True)
class _WorkReports:
    """Passes beats of a rank's work on to its listener, and a hang to all ranks. Implements `VigilListener`."""

    sync: Sync
    listener: RankListener | None

    def beat(self, text: str) -> None:
        if self.listener is not None:
            self.listener.beat(text)

    def hangs(self, hang: Hang) -> None:
        self.sync.hang(hang.text(f"rank {self.sync.rank}"))


def join(
    *, rank: int, world: int, place: MeetingPlace, config: DistConfig, local_rank: int = 0, shape: MeshShape | None = None,
    listener: RankListener | None = None,
) -> ProcessGroups:
    """Meet the other ranks at the sync point "join"; returns when all have arrived.

    Args:
        local_rank: index among the devices visible to this process; 0 where the launcher shows each rank only its own.
        shape: layout of the ranks; by default each holds a replica of the model.
        listener: hears of this rank's work, and of ranks that are stuck.

    Raises:
        ConfigError: the shape does not fit `world` ranks.
        SyncTimeout: fewer than `world` ranks came within `config.init_timeout_s`.
        PeerError: a rank died meanwhile.
    """
    shape = shape or MeshShape(world)
    shape.check(world)
    current_platform.set_device(local_rank)
    store = place.store
    sync = Sync.start(rank=rank, world=world, place=place, config=config, hosts_store=isinstance(store, HostedStore), listener=listener)
    _syncs.append(sync)
    _vigils.append(Vigil(_WorkReports(sync, listener), patience_s=config.sync_timeout_s))
    try:
        with sync.region("join", timeout_s=config.init_timeout_s):
            init_timeout = timedelta(seconds=config.init_timeout_s)
            store.set_timeout(init_timeout)
            dist.init_process_group(
                current_platform.backend, store=dist.PrefixStore(f"{place.prefix}groups", store), rank=rank, world_size=world,
                timeout=init_timeout)
            mesh, gradient_mesh = build_meshes(shape)
            expert_mesh = build_expert_mesh(shape)
            cpu_group = dist.new_group(backend="gloo", timeout=init_timeout)
            assert isinstance(cpu_group, dist.ProcessGroup), f"every rank is a member of the new group, got {cpu_group}"
            flat = [mesh["shard_cp"].get_group()] if shape.cp > 1 else []
            flat += [] if expert_mesh is None else expert_mesh.get_all_groups()
            for group in (dist.group.WORLD, *mesh.get_all_groups(), *flat, gradient_mesh.get_group(), cpu_group):
                _set_pg_timeout(timedelta(seconds=config.collective_timeout_s), group)
    except BaseException as exc:
        give_up(exc)  # but do not leave, so that `check_peers` says why and others can read it
        raise
    sync.cpu_group = cpu_group
    return ProcessGroups(
        rank=rank, world=world, shape=shape, mesh=mesh, gradient_mesh=gradient_mesh, cpu_group=cpu_group, sync=sync,
        expert_mesh=expert_mesh)


def build_meshes(shape: MeshShape) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the `mesh` and the `gradient_mesh` of a layout of all ranks; collective."""
    mesh = init_device_mesh(current_platform.device_type, tuple(shape.sizes.values()), mesh_dim_names=tuple(shape.sizes))
    if shape.cp > 1:
        mesh["shard", "cp"]._flatten("shard_cp")
    return mesh, mesh["dp", "shard", "cp"]._flatten("gradients")


def build_expert_mesh(shape: MeshShape) -> DeviceMesh | None:
    """Return the `expert_mesh` of a layout of all ranks, if it has one; collective."""
    if not shape.spreads_experts:
        return None
    sizes = shape.expert_sizes
    return init_device_mesh(current_platform.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def check_peers() -> None:
    """Raise PeerError if a peer has died or failed; works while this process joins, too. See `Sync.check`."""
    for sync in _syncs:
        sync.check()


def give_up(error: BaseException) -> None:
    """Give up because of `error`: tell all peers, and kill stopped ones, which cannot hear it. Never raises."""
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
