"""SPMD mode: every rank that torchrun started runs the loop beside its own trainer. Imports torch, so it is opened by name.

Rank 0 leads: it starts the engines, publishes to them, evaluates, writes the run's files and talks to the user. With
`rollout.single_rank_load` it also draws all data and rolls out, and hands every rank its share of each batch. The other ranks wait for it
at named points for as long as it shows life; whatever it does meanwhile has deadlines of its own.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from offbeat.aio import SideThread, beside, both, run_beside
from offbeat.cluster.arena import Arena, open_rewards
from offbeat.cluster.assemble import make_launcher, open_policy
from offbeat.cluster.engine_group import EngineGroup
from offbeat.cluster.material import Material
from offbeat.cluster.messages import EngineAddresses
from offbeat.cluster.place import Place
from offbeat.cluster.serving import UNPUBLISHED, make_dispatcher, open_pool, open_serving
from offbeat.cluster.session import Session
from offbeat.cluster.shards import Sharder
from offbeat.cluster.spmd_peers import EngineNews, Followed, RankPeers, follow, make_release
from offbeat.cluster.spmd_ranks import HeadsLoad, OneRankLoads, OwnRank
from offbeat.cluster.spmd_stage import Bystander, share_limits, share_rows
from offbeat.cluster.train_worker import build_model, build_trainer
from offbeat.cluster.trainers import Trainers
from offbeat.config.root import Config
from offbeat.dist.mesh import ProcessGroups, check_peers, connect_store, give_up, host_store, join, leave
from offbeat.dist.notice import Notice
from offbeat.dist.sync import Sync
from offbeat.errors import OffbeatError, PeerError
from offbeat.pulse import work
from offbeat.rollout.reward_pool import RewardPool
from offbeat.telemetry.events import EventLog
from offbeat.telemetry.log import set_up_logging
from offbeat.telemetry.record import RunRecord
from offbeat.trainer.trainer import Trainer

_BEAT_INTERVAL_S = 0.25
_HEARSAY_LOOKS = 3
"""Torchrun checks its ranks every 0.1 s, and may know of a failure before the other ranks do."""

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_rank(config: Config, place: Place, material: Material, record: RunRecord) -> AsyncIterator[Session]:
    """Open this rank's part of a run; see `offbeat.cluster.assemble.open_session`."""
    thread = SideThread("rank", around=work)
    try:
        async with beside(_listen()):
            groups = await thread.run("join", partial(_join, config, place))
            if not place.leads:
                set_up_logging(record.log_dir / f"rank-{place.rank}.log")
                if not config.rollout.single_rank_load:  # only this rank records what it rejects
                    record.events = EventLog(record.run_dir / f"events-rank-{place.rank}.jsonl")
            peers = RankPeers(groups.sync, thread)
            async with beside(_beat(groups.sync, thread)), AsyncExitStack() as stack:
                yield await _open(stack, config, place, material, record, groups, thread, peers)
                await peers.meet("leave")
            await thread.run("leave", leave)
    except BaseException as exc:
        error = await _reason(exc)
        if not isinstance(error, asyncio.CancelledError):
            log.error("rank %d failed", place.rank, exc_info=error)
            give_up(error)
            _tell_torchrun(error)
        if error is not exc:
            raise error from None
        raise
    finally:
        thread.close()


async def _open(
    stack: AsyncExitStack, config: Config, place: Place, material: Material, record: RunRecord, groups: ProcessGroups, thread: SideThread,
    peers: RankPeers,
) -> Session:
    one_loads = config.rollout.single_rank_load
    own, rows = (config, material) if one_loads else (share_limits(config, place), share_rows(material, place))
    # Engines start while the trainer loads, but only the trainer may use collectives then, as they must come in the same order on every
    # rank.
    trainer, (engines, rewards) = await both(
        _build_trainer(config, material, groups, thread, peers),
        both(_start_engines(stack, config, place, record), _start_rewards(stack, own, place, rows, record)))

    async def serve() -> EngineAddresses:
        assert engines is not None, "the leader has started engines"
        return await engines.serve(model=material.model, tokenizer=material.tokenizer_folder, version=UNPUBLISHED)

    addresses = await peers.lead("engines", serve, EngineAddresses)
    sharder = Sharder.of(config, model=material.model, num_ranks=place.world if one_loads else 1)
    loading = (OneRankLoads if one_loads else HeadsLoad)(groups.sync, sharder)
    trainers = Trainers(OwnRank(trainer, loading, thread, host=place.store_host), config, on_span=record.on_span)
    session = partial(
        Session, own, record, rows, trainers, peers=peers, num_heads=1 if one_loads else place.world, head=0 if one_loads else place.rank)
    if rewards is None:
        return session(follow(trainers, material, config, peers), Bystander(material), watch=_watch_nothing)
    if engines is None:
        pool = await open_pool(stack, addresses, config, record, model=material.model)
        arena = Arena(own, record, rows, make_dispatcher(pool, config.inference, record).generate, rewards)
        followed = Followed(pool, config.inference, find=(await _open_news(stack, config, place)).find)
        return session(follow(trainers, material, config, peers, followed=followed), arena, watch=followed.watch)
    serving = await open_serving(stack, engines, addresses, config, record, model=material.model)
    policy = await open_policy(
        stack, serving, material, config, write=trainers.write_weights, release=make_release(serving.pool, config, peers))
    arena = Arena(own, record, rows, policy.generate, rewards)
    if one_loads:
        return session(policy.publisher, arena, watch=policy.watch)
    news = await _open_news(stack, config, place)
    return session(policy.publisher, arena, watch=lambda: run_beside(policy.watch(), news.watch(serving.pool)))


async def _open_news(stack: AsyncExitStack, config: Config, place: Place) -> EngineNews:
    client = await asyncio.to_thread(connect_store, place.store_host, place.store_port, timeout_s=config.dist.init_timeout_s)
    notice = Notice(client, f"attempt-{place.attempt}/engines")
    stack.callback(notice.close)
    return EngineNews(notice)


async def _watch_nothing() -> None:
    """Watch nothing: rank 0 watches the engines."""


async def _build_trainer(
    config: Config, material: Material, groups: ProcessGroups, thread: SideThread, peers: RankPeers,
) -> Trainer:
    async def build() -> None:
        if material.build is not None:
            material.tokenizer.save(material.model)
            await asyncio.to_thread(build_model, material.build)

    def load() -> Trainer:
        with groups.sync.region("load_policy"):  # DDP and FSDP let ranks wait for each other in collectives
            return build_trainer(material.model, config, groups)

    await peers.lead("build_model", build, None)
    return await thread.run("load the model", load)


async def _start_engines(stack: AsyncExitStack, config: Config, place: Place, record: RunRecord) -> EngineGroup | None:
    if not place.leads:
        return None
    launcher = await stack.enter_async_context(make_launcher(config, devices_taken=place.local_world))
    return await EngineGroup.start(launcher, config, log_dir=record.log_dir)


async def _start_rewards(
    stack: AsyncExitStack, config: Config, place: Place, material: Material, record: RunRecord,
) -> RewardPool | None:
    if not place.leads and config.rollout.single_rank_load:
        return None
    return await open_rewards(stack, material, config, record)


def _join(config: Config, place: Place) -> ProcessGroups:
    torch.set_num_threads(config.train.threads)  # torchrun has set one thread for every process
    timeout_s = config.dist.init_timeout_s
    if place.leads and not place.store_is_served:
        store = host_store(timeout_s, host=place.store_host, port=place.store_port)
    else:
        store = connect_store(place.store_host, place.store_port, timeout_s=timeout_s)
    return join(
        rank=place.rank, world=place.world, store=store, config=config.dist, local_rank=place.local_rank,
        prefix=f"attempt-{place.attempt}/")


async def _listen() -> None:
    """Notice peers that failed while this rank waits for none of them, or is late itself; runs until cancelled.

    Raises:
        PeerError: a peer has failed.
    """
    while True:
        try:
            check_peers()
        except PeerError:
            await asyncio.sleep(_BEAT_INTERVAL_S)  # if the rank's thread waits at a point, it hears of it, too, and says more
            raise
        await asyncio.sleep(_BEAT_INTERVAL_S)


async def _reason(error: BaseException) -> BaseException:
    """Find why this rank ends. A cancelled rank ends because of a failed peer, if there is one: torchrun ends the others then."""
    if isinstance(error, asyncio.CancelledError):
        for _ in range(_HEARSAY_LOOKS):
            try:
                check_peers()
            except PeerError as exc:
                return exc
            await asyncio.sleep(_BEAT_INTERVAL_S)
    return error


async def _beat(sync: Sync, thread: SideThread) -> None:
    """Say that this rank's loop is alive while it waits for rollouts and engines, under their own deadlines.

    It does not while the rank's thread works: a live loop says nothing about a thread that hangs.
    """
    while True:
        if thread.idle:
            sync.beat()
        await asyncio.sleep(_BEAT_INTERVAL_S)


def _tell_torchrun(error: BaseException) -> None:
    """Write the error to the file from which torchrun takes its final table of failed ranks."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = str(error) if isinstance(error, OffbeatError) else f"{type(error).__name__}: {error}"
        details = {"message": text, "extraInfo": {"timestamp": int(time.time())}}
        with suppress(OSError):  # the error itself matters more than torchrun's table
            Path(path).write_text(json.dumps({"message": details}))
