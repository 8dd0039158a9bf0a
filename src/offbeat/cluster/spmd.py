"""SPMD mode: every rank that torchrun started runs the loop beside its own train engine. Torch lives here; opened by name.

Rank 0 leads: it starts the engines, publishes to them, evaluates, writes the run's files and talks to the user. With
`rollout.single_rank_load` it also draws all data and rolls out, and hands every rank its share of each batch. The other ranks wait for it
at named points, for as long as it shows life; what it does meanwhile has deadlines of its own.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from offbeat.aio import both
from offbeat.cluster.arena import UNPUBLISHED, Arena, open_pool, open_rewards
from offbeat.cluster.assemble import make_launcher, make_publisher
from offbeat.cluster.engine_group import EngineGroup
from offbeat.cluster.material import Material, choose_canary
from offbeat.cluster.place import Place
from offbeat.cluster.rank_thread import RankThread
from offbeat.cluster.session import Session
from offbeat.cluster.shards import Sharder
from offbeat.cluster.spmd_stage import Bystander, share_limits, share_rows
from offbeat.cluster.spmd_trainers import HeadsLoad, OneRankLoads, RankTrainers
from offbeat.config.model import TinyConfig
from offbeat.config.root import Config
from offbeat.data import wire
from offbeat.dist.mesh import ProcessGroups, connect_store, host_store, join, leave
from offbeat.dist.sync import Sync
from offbeat.errors import SyncError
from offbeat.inference.pool import EnginePool
from offbeat.model.tiny import build_tiny
from offbeat.rollout.reward_pool import RewardPool
from offbeat.telemetry.log import set_up_logging
from offbeat.telemetry.record import RunRecord
from offbeat.trainer.engine import TrainEngine
from offbeat.types import Version
from offbeat.weights.publish import PublishReport

T = TypeVar("T")
_BEAT_INTERVAL_S = 0.25
log = logging.getLogger(__name__)


class RankPeers:
    """The ranks, as the loop's peers: named waits over the gloo group."""

    def __init__(self, sync: Sync, thread: RankThread) -> None:
        self._sync = sync
        self._thread = thread

    async def lead(self, name: str, work: Callable[[], Awaitable[T]], kind: Any, *, timeout_s: float | None = None) -> T:
        """See `Peers.lead`; a leader that fails tells the others when its run ends.

        `timeout_s` is for work of which a part runs in the leader's thread, where it shows no life.
        """
        result = await work() if self._sync.rank == 0 else None
        data = wire.encode(result) if self._sync.rank == 0 else None
        return wire.decode(kind, await self._thread.call(self._sync.broadcast, name, data, timeout_s=timeout_s))

    async def gather(self, name: str, value: T) -> list[T]:
        """See `Peers.gather`."""
        return await self._thread.call(self._sync.gather, name, value)

    async def meet(self, name: str) -> None:
        """See `Peers.meet`."""
        await self._thread.call(self._sync.barrier, name)


@dataclass(frozen=True)
class RankPublisher:
    """Publishing on every rank: all give their weights, rank 0 brings them to the engines, and all learn how that went.

    Attributes:
        work: this rank's part; on rank 0 it gives the report.
        timeout_s: seconds that the others wait for rank 0 to write the weights, on top of what it shows life in.
        on_report: hears how it went.
    """

    work: Callable[[Version], Awaitable[PublishReport | None]]
    peers: RankPeers
    timeout_s: float
    on_report: Callable[[PublishReport], None] = lambda _report: None

    async def publish(self, version: Version) -> PublishReport:
        """See `Publishing.publish`.

        Raises:
            PublishError: on rank 0, too few engines serve the version; the others hear that rank 0 failed.
        """
        own = await self.work(version)

        async def report() -> PublishReport | None:
            return own

        result = await self.peers.lead("published", report, PublishReport, timeout_s=self.timeout_s)
        assert result is not None, "rank 0 publishes"
        self.on_report(result)
        return result


@asynccontextmanager
async def open_rank(config: Config, place: Place, material: Material, record: RunRecord) -> AsyncIterator[Session]:
    """This rank's part of a run; see `offbeat.cluster.assemble.open_session`."""
    thread = RankThread()
    groups = await thread.call(_join, config, place)
    if not place.leads:
        set_up_logging(record.log_dir / f"rank-{place.rank}.log")
    peers = RankPeers(groups.sync, thread)
    beating = asyncio.create_task(_beat(groups.sync, thread), name="beat")
    try:
        async with AsyncExitStack() as stack:
            yield await _open(stack, config, place, material, record, groups, thread, peers)
            await peers.meet("leave")
        await thread.call(leave)
    except BaseException as exc:
        log.exception("rank %d failed", place.rank)
        groups.sync.fail(str(exc) if isinstance(exc, SyncError) else f"{type(exc).__name__}: {exc}")
        raise
    finally:
        beating.cancel()
        thread.close()


async def _open(
    stack: AsyncExitStack, config: Config, place: Place, material: Material, record: RunRecord, groups: ProcessGroups, thread: RankThread,
    peers: RankPeers,
) -> Session:
    one_loads = config.rollout.single_rank_load
    own, rows = (config, material) if one_loads else (share_limits(config, place), share_rows(material, place))
    # Engines start beside the trainer, but only the trainer may use collectives then: they come in the same order on every rank.
    engine, (engines, rewards) = await both(
        _build_engine(config, material, groups, thread, peers),
        both(_start_engines(stack, config, place, record), _start_rewards(stack, own, place, rows, record)))

    async def serve() -> dict[str, str]:
        assert engines is not None, "the leader has started engines"
        return await engines.serve(model=material.model, tokenizer=material.tokenizer_folder, version=UNPUBLISHED)

    urls = await peers.lead("engines", serve, dict[str, str])
    sharder = Sharder.of(config, model=material.model, num_ranks=place.world if one_loads else 1)
    loading = (OneRankLoads if one_loads else HeadsLoad)(groups.sync, sharder)
    trainers = RankTrainers(engine, loading, config, thread)
    session = partial(
        Session, own, record, rows, trainers, peers=peers, num_heads=1 if one_loads else place.world, head=0 if one_loads else place.rank)
    listen = partial(_listen, groups.sync)
    if rewards is None:
        return session(_follow(trainers, material, config, peers), Bystander(config), watch=listen)
    pool = await open_pool(stack, urls, config, record)
    arena = Arena(own, record, rows, engines or EngineGroup([], config), pool, rewards)
    if engines is None:
        return session(_follow(trainers, material, config, peers, pool=pool), arena, watch=listen)

    async def watch() -> None:
        await both(arena.watch(), listen())

    publish = make_publisher(pool, material, config, record, write=trainers.publish).publish
    publisher = RankPublisher(publish, peers, config.weights.stage_timeout_s)
    return session(publisher, arena, watch=watch)


def _follow(
    trainers: RankTrainers, material: Material, config: Config, peers: RankPeers, *, pool: EnginePool | None = None,
) -> RankPublisher:
    """The publisher of a rank that does not lead: it gives its weights, and then lets its pool serve what rank 0 proved."""
    canary = choose_canary(material, config)

    async def give_weights(version: Version) -> None:
        await trainers.publish(version, Path(), canary=canary)

    def admit(report: PublishReport) -> None:
        assert pool is not None, "called only where there is a pool"
        for name in list(pool.healthy):
            if reason := report.quarantined.get(name):
                pool.quarantine(name, reason)
            else:
                pool.admit(name, report.version)

    publisher = partial(RankPublisher, give_weights, peers, config.weights.stage_timeout_s)
    return publisher(admit) if pool is not None else publisher()


async def _build_engine(
    config: Config, material: Material, groups: ProcessGroups, thread: RankThread, peers: RankPeers,
) -> TrainEngine:
    async def build_model() -> None:
        if (build := material.build) is not None:
            material.tokenizer.save(material.model)
            await asyncio.to_thread(
                build_tiny, Path(build.folder), tiny=TinyConfig.model_validate_json(build.tiny), vocab_size=build.vocab_size,
                eos_token_id=build.eos_token_id, pad_token_id=build.pad_token_id, seed=build.seed)

    await peers.lead("build_model", build_model, None)
    return await thread.call(
        TrainEngine.build, material.model, config=config.train, algorithm=config.algorithm, optimizer=config.train.optimizer,
        total_steps=config.run.total_steps, groups=groups, temperature=config.rollout.temperature or 1.0)


async def _start_engines(stack: AsyncExitStack, config: Config, place: Place, record: RunRecord) -> EngineGroup | None:
    if not place.leads:
        return None
    launcher = await stack.enter_async_context(make_launcher(config))
    return await EngineGroup.start(launcher, config, log_dir=record.log_dir)


async def _start_rewards(
    stack: AsyncExitStack, config: Config, place: Place, material: Material, record: RunRecord,
) -> RewardPool | None:
    if not place.leads and config.rollout.single_rank_load:
        return None
    return await open_rewards(stack, material, config, record)


def _join(config: Config, place: Place) -> ProcessGroups:
    timeout_s = config.dist.init_timeout_s
    if place.leads and not place.store_is_served:
        store = host_store(timeout_s, host=place.store_host, port=place.store_port)
    else:
        store = connect_store(place.store_host, place.store_port, timeout_s=timeout_s)
    return join(
        rank=place.rank, world=place.world, store=store, config=config.dist, local_rank=place.local_rank,
        prefix=f"attempt-{place.attempt}/")


async def _listen(sync: Sync) -> None:
    """Until cancelled, hear of peers that failed while this rank waits for none of them.

    Raises:
        PeerError: one has.
    """
    while True:
        sync.check()
        await asyncio.sleep(_BEAT_INTERVAL_S)


async def _beat(sync: Sync, thread: RankThread) -> None:
    """Say that this rank's loop is alive while it waits for rollouts and engines, under their own deadlines.

    Not while the rank's thread works: a loop that lives says nothing of a thread that hangs.
    """
    while True:
        if thread.idle:
            sync.beat()
        await asyncio.sleep(_BEAT_INTERVAL_S)
