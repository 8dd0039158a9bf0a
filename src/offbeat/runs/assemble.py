"""Puts a run together from its configuration. The mode is chosen here alone.

Nothing that the controller imports reaches torch: workers and SPMD mode are started by name.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from offbeat.aio import both
from offbeat.config.root import Config
from offbeat.controller.inputs import RunInputs, choose_canary
from offbeat.controller.parts import DeviceTurns, NoTurns, Publishing, RunParts, SingleProcess
from offbeat.data import wire
from offbeat.fleet.fleet import Fleet, open_fleet
from offbeat.fleet.publishers import PolicyPublisher, Release, WeightsPublisher, release_nobody, wake_nobody
from offbeat.fleet.turns import EngineTurns
from offbeat.journal.run_journal import NoJournal, RunJournal, folder_of
from offbeat.ranks.ranks import Ranks, WorkerRanks
from offbeat.ranks.trainers import Trainers
from offbeat.rollout.episode import Generate
from offbeat.runs.engine_start import start_engines
from offbeat.runs.rank_info import RankInfo
from offbeat.runs.rollouts import EngineRollouts, NoEngines
from offbeat.runs.run_code import open_user_code
from offbeat.runs.shared_disk import apart, note_apart, without_shared_disk
from offbeat.runs.teacher import open_teacher
from offbeat.telemetry.record import RunRecord
from offbeat.weights.adapters import policy_adapter
from offbeat.weights.channels import Channel, VersionWriter, draw_incarnation
from offbeat.workers.worker import make_launcher


@asynccontextmanager
async def open_controller(config: Config, rank_info: RankInfo, inputs: RunInputs, record: RunRecord) -> AsyncIterator[RunParts]:
    """Open a run in single-controller mode: train ranks and engines are workers of this process, which has no device."""
    assert rank_info.world == 1, f"a controller is alone, got {rank_info}"
    if inputs.build is not None:
        inputs.tokenizer.save(inputs.model)
    async with AsyncExitStack() as stack:
        teacher = await open_teacher(stack, config.for_ranks, inputs, data=config.data)
        launcher = await stack.enter_async_context(make_launcher(config.for_launcher))
        if not inputs.plays:
            ranks = await WorkerRanks.start(
                launcher, config.for_ranks, model=inputs.model, build=inputs.build, log_dir=record.log_dir, trains=inputs.trains)
            note_apart(record, apart(ranks.workers))
            trainers, none = Trainers(ranks, config.for_ranks, on_span=record.on_span), NoEngines(draws=True)
            yield RunParts(config, record, inputs, trainers, none, none, SingleProcess(), none.watch)
            return
        may_load = asyncio.Event()
        ranks, ((engines, addresses), user_code) = await both(
            WorkerRanks.start(
                launcher, config.for_ranks, model=inputs.model, build=inputs.build, log_dir=record.log_dir, may_load=may_load),
            both(
                start_engines(
                    launcher, config.for_engines, log_dir=record.log_dir, model=inputs.model, tokenizer=inputs.tokenizer_folder,
                    builds=inputs.build is not None, may_load=may_load),
                open_user_code(stack, inputs, config, record, launcher=launcher)))
        names = note_apart(record, apart((*ranks.workers, *engines.workers)))
        weights = without_shared_disk(config.for_engines, apart=names, builds=inputs.build is not None)
        if weights != config.weights:
            config = config.model_copy(update={"weights": weights})
            record.note("broadcasts", "weights are broadcast to the engines (weights.channel), because they would have to travel twice")
        fleet = await open_fleet(stack, engines, addresses, config.for_engines, record, model=inputs.model)
        trainers = Trainers(ranks, config.for_ranks, on_span=record.on_span)
        policy = await open_policy(stack, fleet, inputs, config, writer=trainers)
        journal = open_journal(stack, config, inputs, record)
        source = EngineRollouts(config, record, inputs, policy.generate, user_code, engines=fleet.pool.clock, journal=journal)
        yield RunParts(
            config, record, inputs, trainers, policy.publisher, source, SingleProcess(), policy.watch,
            critic=make_critic(ranks, config, record), teacher=teacher(ranks, record.on_span), turns=policy.turns, journal=journal)


def open_journal(stack: AsyncExitStack, config: Config, inputs: RunInputs, record: RunRecord, *, head: int = 0) -> NoJournal:
    """Open the journal of a process that draws data, `journal` in the run's folder, and below it for heads other than the first."""
    if not config.checkpoint.journal:
        return NoJournal()
    loop = asyncio.get_running_loop()

    def show_text(text: str) -> None:
        with suppress(RuntimeError):  # the run has ended meanwhile
            loop.call_soon_threadsafe(partial(record.note, "journal", text))

    journal = RunJournal(
        folder_of(config.run_dir, head), identity=wire.encode_json(inputs.identity), tell=show_text,
        keeps_all=config.checkpoint.journal_keep == "all")
    stack.callback(lambda: record.events.record(
        "journal_written", num_bytes=journal.writer.num_bytes, cpu_s=round(journal.writer.cpu_s, 3)))
    return stack.enter_context(journal)


def make_critic(ranks: Ranks, config: Config, record: RunRecord) -> Trainers | None:
    """Return the ranks as trainers of the critic, if the algorithm has one."""
    return Trainers(ranks, config.for_ranks, part="critic", on_span=record.on_span) if config.algorithm.needs_critic else None


@dataclass(frozen=True)
class Policy:
    """A run's policy on the engines: its publisher, the engines' turns, the sampling of it, and the watch that heals engines."""

    publisher: Publishing
    turns: DeviceTurns
    generate: Generate
    watch: Callable[[], Coroutine[Any, Any, None]]


async def open_policy(
    stack: AsyncExitStack, fleet: Fleet, inputs: RunInputs, config: Config, *, writer: VersionWriter, release: Release = release_nobody,
    waits: bool = False,
) -> Policy:
    """Open the publishing of whole weights, or of the adapter of `model.lora`, under names that are new with this start.

    Args:
        release: releases other ranks that wait for this process to publish.
        waits: whether these ranks wait until engines serve the version, because they roll out, too.
    """
    pool, lora = fleet.pool, config.model.lora.rank > 0
    directory, incarnation = config.weights_dir.resolve(), draw_incarnation()
    fleet.record.events.record("incarnation", name=incarnation)
    channel = Channel(
        directory, config.weights, canary=choose_canary(inputs, config), incarnation=incarnation, writer=writer, notes=fleet.record,
        initial=inputs.model if _have_loaded(fleet, config) else "")
    turns, on_written = NoTurns(), wake_nobody
    if config.cluster.take_turns:
        turns = EngineTurns(pool, fleet.record, engines=fleet.engines, keep_weights=lora, timeout_s=config.weights.switch_timeout_s)
        on_written = turns.to_engines
    if lora:
        adapter = policy_adapter(incarnation)
        await fleet.unload_leftovers(directory)
        policy = await stack.enter_async_context(PolicyPublisher(
            fleet.publisher, channel, adapter=adapter, release=release, on_written=on_written))
        return Policy(policy, turns, partial(fleet.dispatcher.generate, adapter=adapter), fleet.watch)
    publisher = await stack.enter_async_context(
        WeightsPublisher(pool, channel, config.weights, judge=fleet.judge, release=release, waits=waits, on_written=on_written))
    return Policy(publisher, turns, fleet.dispatcher.generate, partial(fleet.watch, publisher.bring))


def _have_loaded(fleet: Fleet, config: Config) -> bool:
    """Whether the run's engines have read the folder from which the ranks have the initial weights, and know them for a version."""
    engines = fleet.engines.workers
    whole = not config.train.parallel.divides and not config.model.lora.rank
    return bool(engines) and config.inference.kind.inside and whole and not apart(engines)
