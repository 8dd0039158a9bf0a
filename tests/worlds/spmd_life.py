"""One life of a simulated run in SPMD mode: every rank runs the loop, in threads of one process that take turns. Imports torch.

Real are the loop of each rank, `offbeat.spmd`, and `offbeat.sync` with its threads, points, judges and verdicts. Given are the store, the
collectives behind them, the states of processes, the trainers, and what `life` gives to a controller. When a rank ends, the others on its
machine are asked to end as torchrun does, and killed half a minute later. Where each rank has a machine of its own, nobody ends the others
but themselves; a scheduler would an hour later, which counts as a failure.
"""

import random
import time
from functools import partial
from typing import Any

from offbeat import aio, phase, pulse
from offbeat.aio import ASKED_TO_STOP
from offbeat.config.root import Config
from offbeat.journal import writer
from offbeat.process.child import ChildSpec
from offbeat.runs import run
from offbeat.runs.rank_info import RankInfo
from offbeat.spmd import peers as spmd_peers
from offbeat.spmd import rank as spmd_rank
from offbeat.sync import arrivals, board, exchange, judge, links, mesh, sync, watcher
from worlds.drawn import Fault
from worlds.life import Life
from worlds.stand_in_child import StandInChild
from worlds.stand_in_engine import StandInSession
from worlds.stand_in_store import (
    Memory,
    StandInDeaths,
    StandInDist,
    StandInHostedStore,
    StandInStore,
    end_if_stopped,
    observe,
    own_card,
)
from worlds.stand_in_trainer import Model, SpmdTrainer
from worlds.virtual_threads import (
    QUEUE,
    THREADING,
    PerRank,
    RankLoop,
    VirtualEvent,
    VirtualQueue,
    VirtualThread,
    VirtualThreads,
    own_rank,
    threads,
)
from worlds.virtual_time import install_clocks

_TERMINATED_AFTER_S = 0.1
_KILLED_AFTER_S = 30.0
_SCHEDULER_KILLS_AFTER_S = 3600.0


class SpmdLife(Life):
    """One life in SPMD mode.

    Attributes:
        models: of the ranks, which train alike.
        failing: ranks whose next piece of work raises an error.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.failing: set[int] = set()
        self.models = [Model() for _ in range(self._world_size)]
        self.model = self.models[0]

    @property
    def _world_size(self) -> int:
        return self.world.settings["train.num_ranks"]

    @property
    def head(self) -> int:
        return max(own_rank(), 0)

    def _install(self, rng: random.Random) -> VirtualThreads:
        virtual = VirtualThreads(rng, lambda text: self.note(endless=text))
        virtual.adopt()
        self.memory = StandInDeaths.memory = Memory(self._world_size)
        virtual.loops = {rank: RankLoop(rng) for rank in range(self._world_size)}
        install_clocks(virtual, lambda: virtual.loops[own_rank()], rng)
        _install_threads(self.memory)
        apart = self.world.apart
        run.read_rank_info = lambda _run, _train: RankInfo(
            own_rank(), self._world_size, 0 if apart else own_rank(), 1 if apart else self._world_size, "sim", 1, attempt=self.number)
        sync.own_card = partial(own_card, apart=apart)
        spmd_rank.build_trainers = lambda _model, _config, groups, **_named: {"": SpmdTrainer(self, groups)}
        return virtual

    # -- engines belong to rank 0, and the others ask them over the network ---------------------------------------------------------------

    async def start_child(self, spec: ChildSpec, *, timeout_s: float) -> StandInChild:
        """See `Outside`."""
        child = await super().start_child(spec, timeout_s=timeout_s)
        if own_rank():
            self.children[f"{spec.name} of rank {own_rank()}"] = child
        return child

    def open_session(self) -> StandInSession:
        """See `Outside`."""
        return StandInSession(self.network, threads().loops[0])

    # -- faults --------------------------------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        match fault.kind:
            case "rank_dies":
                self.note(fault=fault.kind, who=fault.who)
                self._end_rank(fault.who)
            case "rank_hangs":
                self.note(fault=fault.kind, who=fault.who)
                self.loop.stop(fault.who, fault.for_s)
            case "rank_fails":
                self.note(fault=fault.kind, who=fault.who)
                self.failing.add(fault.who)
            case _:
                super()._strike(fault)

    def _end_rank(self, rank: int) -> None:
        if not self.memory.ending(rank):
            self.loop.dead[rank] = "was killed by SIGKILL"
            self._end_others()

    def _end_others(self) -> None:
        """Do as torchrun does when a rank has ended: it ends those of the same machine."""
        now_s = self.loop.now_s
        if self.world.apart:
            self.loop.call_at(now_s + _SCHEDULER_KILLS_AFTER_S, self._kill)
            return
        self.loop.call_at(now_s + _TERMINATED_AFTER_S, self._terminate)
        self.loop.call_at(now_s + _KILLED_AFTER_S, self._kill)

    def _terminate(self) -> None:
        for rank, ask_to_end in self._ask_to_end.items():
            if not self.memory.ending(rank) and not self.loop.is_stopped(rank):
                self.loop.loops[rank].call_soon(ask_to_end, ASKED_TO_STOP)

    def _kill(self) -> None:
        for rank in range(self._world_size):
            if not self.memory.ending(rank):
                self.loop.dead[rank] = "was killed by SIGKILL"
                self.note(rank_end=rank, how="", kills=True)

    # -- the run -------------------------------------------------------------------------------------------------------------------------

    def run(self, config: Config) -> None:
        """Run all ranks to their ends, and note how the first ended."""
        self.watch()
        self.note(begins=self.number)
        rows: dict[int, dict[str, Any]] = {}

        def live(rank: int) -> None:
            rows[rank] = self.ending(config)
            self.note(rank_end=rank, how=rows[rank].get("ended", ""))
            self.memory.ended[rank] = "exited with code 0" if "done" in rows[rank] else "exited with code 1"
            if "done" not in rows[rank]:
                self._end_others()

        for rank in range(self._world_size):
            VirtualThread(target=live, args=(rank,), name=f"rank {rank}", rank=rank).start()
        threads().wait(lambda: all(self.memory.ending(rank) for rank in range(self._world_size)))
        self._keep_engines_by_url()
        for rank in range(1, self._world_size):
            if "raised" in rows.get(rank, {}):
                self.note(**rows[rank])
            elif rank in rows:
                self.note(rank=rank, how=rows[rank].get("ended", "it is done"))
        first = rows.get(0, {"ended": "rank 0 was killed"})
        if "done" in first and any(model.fingerprints != self.model.fingerprints for model in self.models):
            self.note(raised=f"ranks have other weights than each other: {[model.fingerprints for model in self.models]}")
        self.note(**first)


def _install_threads(memory: Memory) -> None:
    """Replace what waits, and what knows of processes, in the modules of ranks."""
    time.sleep = threads().sleep
    aio.threading, aio.SimpleQueue = THREADING, VirtualQueue
    for module in (arrivals, watcher, judge, board, links, sync, writer):
        module.threading = THREADING
    for module in (arrivals, judge, board, links, sync, writer):
        module.queue = QUEUE
    # Their default values were bound when the classes were made.
    real_wait = sync.Wait
    sync.Wait = lambda *args: real_wait(*args, since_s=threads().now_s, messages=VirtualQueue())
    real_announcement, real_broken = board.Announcement, sync.Broken
    sync.Broken = lambda *args: real_broken(*args, verdict=VirtualQueue())
    sync.Announcement = board.Announcement = lambda verdict: real_announcement(verdict, done=VirtualEvent())
    pulse._works, pulse._strikes, phase._marks, mesh._syncs, mesh._vigils = (PerRank() for _ in range(5))
    mesh.Vigil = _NoVigil
    mesh.dist = sync.dist = exchange.dist = StandInDist(memory)
    mesh.build_meshes, mesh._set_pg_timeout = (lambda _shape: (_NoMesh(), _NoMesh())), lambda *_args: None
    links.reach = mesh.reach = lambda *_args, **_named: StandInStore(memory)
    mesh.HostedStore, spmd_rank.host_store = StandInHostedStore, lambda *_args, **_named: StandInHostedStore(memory)
    links.observe = judge.observe = observe
    sync.end_if_stopped, judge.Deaths = end_if_stopped, StandInDeaths
    # Looks are rarer than real ones, as each is a turn of all threads.
    judge._LOOK_AFTER_S = judge._MEET_S = spmd_rank._BEAT_INTERVAL_S = spmd_peers._LOOK_S = 1.0


class _NoVigil:
    """Work that hangs is not simulated."""

    def __init__(self, *_args: Any, **_named: Any) -> None:
        pass

    def close(self) -> None:
        pass


class _NoMesh:
    def get_all_groups(self) -> list[None]:
        return []

    def get_group(self) -> None:
        return None
