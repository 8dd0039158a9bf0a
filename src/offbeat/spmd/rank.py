"""SPMD mode: every rank that torchrun started runs the loop beside its own trainer. Imports torch, so it is opened by name.

Rank 0 leads: it starts the engines, publishes to them, evaluates, writes the run's files and talks to the user. With
`rollout.single_rank_load` it also draws all data and rolls out, and hands every rank its share of each batch. The other ranks wait for it
at named points for as long as it shows life; its work meanwhile has deadlines of its own.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from offbeat.aio import SideThread, beside, both, run_beside
from offbeat.config.root import Config
from offbeat.controller.inputs import RunInputs, choose_canary
from offbeat.controller.parts import RunParts
from offbeat.controller.reward_choice import devices_per_reward_model, num_reward_models, num_set_reward_models
from offbeat.errors import OffbeatError, PeerError
from offbeat.fleet.engine_group import EngineAddresses, EngineGroup
from offbeat.fleet.fleet import Fleet, make_dispatcher, open_fleet, open_pool
from offbeat.journal.run_journal import NoJournal
from offbeat.pulse import work
from offbeat.ranks.sharding import Sharder
from offbeat.ranks.trainers import Trainers
from offbeat.runs.assemble import make_critic, open_journal, open_policy
from offbeat.runs.engine_start import start_engines
from offbeat.runs.rank_info import RankInfo
from offbeat.runs.rollouts import EngineRollouts, NoEngines
from offbeat.runs.run_code import UserCode, open_user_code
from offbeat.runs.teacher import open_teacher
from offbeat.spmd.peers import EngineNews, Followed, FollowingPublisher, LeadingWriter, RankPeers, make_release
from offbeat.spmd.ranks import HeadsLoad, OneRankLoads, OwnRank
from offbeat.spmd.rollouts import NoRolloutSource, share_limits, share_rows
from offbeat.sync.links import MeetingPlace
from offbeat.sync.mesh import MeshShape, ProcessGroups, check_peers, connect_store, give_up, host_store, join, leave
from offbeat.sync.notice import Notice
from offbeat.sync.sync import Sync
from offbeat.telemetry.events import EventLog
from offbeat.telemetry.log import set_up_logging
from offbeat.telemetry.record import RunRecord
from offbeat.trainer.worker import Part, build_model, build_trainers
from offbeat.workers.local import LocalLauncher
from offbeat.workers.worker import Launcher, make_launcher

_BEAT_INTERVAL_S = 0.25
_HEARSAY_LOOKS = 3
"""Torchrun checks its ranks every 0.1 s, and may know of a failure before the other ranks do."""

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_rank(config: Config, rank_info: RankInfo, inputs: RunInputs, record: RunRecord) -> AsyncIterator[RunParts]:
    """Open this rank's part of a run; see `offbeat.runs.assemble.open_run`."""
    thread = SideThread("rank", around=work)
    try:
        async with beside(_listen()):
            groups = await thread.run("join", partial(_join, config, rank_info))
            if not rank_info.leads:
                set_up_logging(record.log_dir / f"rank-{rank_info.rank}.log")
                if not config.rollout.single_rank_load:  # only this rank records its rejected rollouts
                    record.events = EventLog(record.run_dir / f"events-rank-{rank_info.rank}.jsonl")
            peers = RankPeers(groups.sync, thread)
            async with beside(_beat(groups.sync, thread)), AsyncExitStack() as stack:
                yield await _open(stack, config, rank_info, inputs, record, _Joined(groups, thread, peers))
                await peers.meet("leave")
            await thread.run("leave", leave)
    except BaseException as exc:
        error = await _reason(exc)
        if not isinstance(error, asyncio.CancelledError):
            log.error("rank %d failed", rank_info.rank, exc_info=error)
            give_up(error)
            _tell_torchrun(error)
        if error is not exc:
            raise error from None
        raise
    finally:
        thread.close()


@dataclass(frozen=True)
class _Joined:
    """This rank among its peers; its `thread` computes and takes part in collectives."""

    groups: ProcessGroups
    thread: SideThread
    peers: RankPeers


async def _open(
    stack: AsyncExitStack, config: Config, rank_info: RankInfo, inputs: RunInputs, record: RunRecord, joined: _Joined,
) -> RunParts:
    groups, thread, peers = joined.groups, joined.thread, joined.peers
    teacher = await open_teacher(stack, config.for_ranks, inputs, data=config.data)
    one_loads = config.rollout.single_rank_load
    if not inputs.plays:
        own_trainers = await _build_trainers(config, inputs, joined)
        loads = OneRankLoads(groups.sync, Sharder.of(config.for_ranks, model=inputs.model, num_ranks=rank_info.world))
        trainers = Trainers(OwnRank(own_trainers, loads, thread, host=rank_info.store_host), config.for_ranks, on_span=record.on_span)
        none = NoEngines(draws=rank_info.leads)
        return RunParts(config, record, inputs, trainers, none, none, peers, none.watch)
    own, rows = config, inputs
    if not one_loads:
        own, rows = config.model_copy(update=share_limits(config.rollout, config.sft, rank_info)), share_rows(inputs, rank_info)
    # Engines start and load while the trainer does, but only the trainer may use collectives then, as they must come in the same order on
    # every rank.
    launcher, may_load = await _open_launcher(stack, config, rank_info), asyncio.Event()
    own_trainers, (serving, user_code) = await both(
        _build_trainers(config, inputs, joined, may_load=may_load),
        both(
            _start_engines(launcher, config, rank_info, inputs, record, may_load),
            _start_user_code(stack, launcher, own, rank_info, rows, record)))

    fleets: list[Fleet] = []

    async def connect() -> EngineAddresses:
        assert serving is not None, "the leader has started engines"
        fleets.append(await open_fleet(stack, *serving, config.for_engines, record, model=inputs.model))
        return fleets[0].addresses

    addresses = await peers.lead("engines", connect, EngineAddresses)
    sharder = Sharder.of(config.for_ranks, model=inputs.model, num_ranks=rank_info.world if one_loads else 1)
    loading = (OneRankLoads if one_loads else HeadsLoad)(groups.sync, sharder)
    ranks = OwnRank(own_trainers, loading, thread, host=rank_info.store_host)
    trainers = Trainers(ranks, config.for_ranks, on_span=record.on_span)
    num_heads, head = (1, 0) if one_loads else (rank_info.world, rank_info.rank)
    journal = NoJournal() if user_code is None else open_journal(stack, own, rows, record, head=head)
    parts = partial(
        RunParts, own, record, rows, trainers, peers=peers, num_heads=num_heads, head=head, critic=make_critic(ranks, config, record),
        teacher=teacher(ranks, record.on_span), journal=journal)
    following = partial(
        FollowingPublisher, trainers=trainers, peers=peers, canary=choose_canary(inputs, config), timeout_s=config.weights.stage_timeout_s)
    if user_code is None:
        return parts(following(), NoRolloutSource(inputs), watch=_watch_nothing)
    if not fleets:
        pool = await open_pool(stack, addresses, config.for_engines, record, model=inputs.model)
        source = EngineRollouts(own, record, rows, make_dispatcher(pool, config.inference).generate, user_code, journal=journal)
        followed = Followed(pool, config.inference, news=await _open_news(stack, config, rank_info))
        return parts(following(followed=followed), source, watch=followed.watch)
    (fleet,) = fleets
    policy = await open_policy(
        stack, fleet, inputs, config, writer=LeadingWriter(trainers),
        release=make_release(fleet.pool, peers, timeout_s=config.weights.stage_timeout_s), waits=not one_loads)
    source = EngineRollouts(own, record, rows, policy.generate, user_code, engines=fleet.pool.clock, journal=journal)
    if one_loads:
        return parts(policy.publisher, source, watch=policy.watch, turns=policy.turns)
    news = await _open_news(stack, config, rank_info)
    return parts(policy.publisher, source, watch=lambda: run_beside(policy.watch(), news.watch(fleet.pool)))


async def _open_news(stack: AsyncExitStack, config: Config, rank_info: RankInfo) -> EngineNews:
    client = await asyncio.to_thread(connect_store, rank_info.store_host, rank_info.store_port, timeout_s=config.dist.init_timeout_s)
    notice = Notice(client, f"attempt-{rank_info.attempt}/engines")
    stack.callback(notice.close)
    return EngineNews(notice)


async def _watch_nothing() -> None:
    """Watch nothing: rank 0 watches the engines."""


async def _build_trainers(config: Config, inputs: RunInputs, joined: _Joined, *, may_load: asyncio.Event | None = None) -> dict[str, Part]:
    may_load = may_load or asyncio.Event()

    async def build() -> None:
        if inputs.build is not None:
            inputs.tokenizer.save(inputs.model)
            await asyncio.to_thread(build_model, inputs.build)

    def load() -> dict[str, Part]:
        with joined.groups.sync.region("load_policy"):  # DDP and FSDP let ranks wait for each other in collectives
            return build_trainers(inputs.model, config.for_ranks, joined.groups, trains=inputs.trains)

    await joined.peers.lead("build_model", build, None)
    if not config.cluster.devices_are_shared:
        may_load.set()
    trainers = await joined.thread.run("load the model", load)
    may_load.set()
    return trainers


async def _open_launcher(stack: AsyncExitStack, config: Config, rank_info: RankInfo) -> Launcher:
    """Return the launcher of this rank's workers: engines if it leads, and the reward model if it rolls out."""
    taken = rank_info.local_world * config.train.devices_per_rank
    if rank_info.leads:
        return await stack.enter_async_context(make_launcher(config.for_launcher, devices_taken=taken))
    # Where the engines are, they take accelerators, too.
    num_engines = config.inference.num_engines if rank_info.is_on_first_machine and not config.inference.urls else 0
    of_sets = num_set_reward_models(config) if rank_info.is_on_first_machine else 0
    judges = of_sets + num_reward_models(config) * rank_info.local_rank
    taken += config.inference.devices_per_engine * num_engines + devices_per_reward_model(config) * judges
    return await stack.enter_async_context(LocalLauncher.from_config(config.for_launcher, devices_taken=taken))


async def _start_engines(
    launcher: Launcher, config: Config, rank_info: RankInfo, inputs: RunInputs, record: RunRecord, may_load: asyncio.Event,
) -> tuple[EngineGroup, EngineAddresses] | None:
    if not rank_info.leads:
        return None
    return await start_engines(
        launcher, config.for_engines, log_dir=record.log_dir, model=inputs.model, tokenizer=inputs.tokenizer_folder, builds=False,
        may_load=may_load)


async def _start_user_code(
    stack: AsyncExitStack, launcher: Launcher, config: Config, rank_info: RankInfo, inputs: RunInputs, record: RunRecord,
) -> UserCode | None:
    if not rank_info.leads and config.rollout.single_rank_load:
        return None
    plays = inputs if rank_info.leads else replace(inputs, sets={})  # rank 0 alone evaluates
    return await open_user_code(stack, plays, config, record, launcher=launcher)


def _join(config: Config, rank_info: RankInfo) -> ProcessGroups:
    torch.set_num_threads(config.train.threads)  # torchrun has set one thread for every process
    timeout_s = config.dist.init_timeout_s
    if rank_info.leads and not rank_info.store_is_served:
        store = host_store(timeout_s, host=rank_info.store_host, port=rank_info.store_port)
    else:
        store = connect_store(rank_info.store_host, rank_info.store_port, timeout_s=timeout_s, by_launcher=rank_info.store_is_served)
    return join(
        rank=rank_info.rank, world=rank_info.world, place=MeetingPlace(store, prefix=f"attempt-{rank_info.attempt}/"), config=config.dist,
        local_rank=rank_info.local_rank, shape=MeshShape.of(config.train, world=rank_info.world))


async def _listen() -> None:
    """Watch for failed peers while this rank waits for none, or is late itself, until cancelled; raises PeerError if one failed."""
    while True:
        try:
            check_peers()
        except PeerError:
            await asyncio.sleep(_BEAT_INTERVAL_S)  # if the rank's thread waits at a point, it raises the failure with more details
            raise
        await asyncio.sleep(_BEAT_INTERVAL_S)


async def _reason(error: BaseException) -> BaseException:
    """Return the error that ends this rank: for a cancelled rank a peer's failure, if there is one, as torchrun then ends the others."""
    if isinstance(error, asyncio.CancelledError):
        for _ in range(_HEARSAY_LOOKS):
            try:
                check_peers()
            except PeerError as exc:
                return exc
            await asyncio.sleep(_BEAT_INTERVAL_S)
    return error


async def _beat(sync: Sync, thread: SideThread) -> None:
    """Report that this rank's loop is alive while it waits for rollouts and engines, under their own deadlines.

    Nothing is reported while the rank's thread works: a live loop says nothing about a thread that hangs.
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
