"""Puts a run together from its configuration. The one place where modes are chosen: how the loop runs, and who launches workers.

Nothing that the controller imports reaches torch: workers, and SPMD mode, are started by name.
"""

import importlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from offbeat.aio import both
from offbeat.cluster.arena import Arena, open_rewards
from offbeat.cluster.engine_group import EngineGroup
from offbeat.cluster.group import Launcher, library_environment
from offbeat.cluster.material import Material, choose_canary, read_material
from offbeat.cluster.place import Place
from offbeat.cluster.publishers import LoraPublisher, Release, WholePublisher, policy_tenant, release_nobody
from offbeat.cluster.ranks import WorkerRanks
from offbeat.cluster.serving import UNPUBLISHED, Serving, open_serving
from offbeat.cluster.session import Publishing, Session, Solo
from offbeat.cluster.threads import choose_threads, usable_cores
from offbeat.cluster.trainers import Trainers
from offbeat.config.root import Config
from offbeat.errors import ConfigError
from offbeat.inference.client import EngineClient
from offbeat.rollout.episode import Generate
from offbeat.telemetry.record import RunRecord
from offbeat.types import Version
from offbeat.weights.channels import CollectiveChannel, DiskChannel, WriteVersion, draw_incarnation
from offbeat.weights.publish import Publisher

# By name: importing Ray costs a second and is an optional extra; SPMD mode imports torch.
_LAUNCHERS = {"local": ("offbeat.cluster.local", "LocalLauncher"), "ray": ("offbeat.cluster.ray", "RayLauncher")}
_MODES = {"controller": ("offbeat.cluster.assemble", "open_controller"), "spmd": ("offbeat.cluster.spmd", "open_rank")}


def open_session(config: Config, place: Place, material: Material, record: RunRecord) -> AbstractAsyncContextManager[Session]:
    """Start this process's part of a training run; all that it started is gone when the body ends, however it ends."""
    for variable, value in library_environment(config.train.threads).items():
        os.environ.setdefault(variable, value)  # a rank of SPMD mode is about to import torch
    module, name = _MODES[config.run.mode]
    return getattr(importlib.import_module(module), name)(config, place, material, record)


@asynccontextmanager
async def open_controller(config: Config, place: Place, material: Material, record: RunRecord) -> AsyncIterator[Session]:
    """Single-controller mode: train ranks and engines are workers of this process, which has no device."""
    assert place.world == 1, f"a controller is alone, got {place}"
    if material.build is not None:
        material.tokenizer.save(material.model)
    async with AsyncExitStack() as stack:
        launcher = await stack.enter_async_context(make_launcher(config))
        ranks, (engines, rewards) = await both(
            WorkerRanks.start(launcher, config, model=material.model, build=material.build, log_dir=record.log_dir),
            both(EngineGroup.start(launcher, config, log_dir=record.log_dir), open_rewards(stack, material, config, record)))
        addresses = await engines.serve(model=material.model, tokenizer=material.tokenizer_folder, version=UNPUBLISHED)
        serving = await open_serving(stack, engines, addresses, config, record, model=material.model)
        trainers = Trainers(ranks, config, on_span=record.on_span)
        policy = await open_policy(stack, serving, material, config, write=trainers.write_weights, holds=trainers.holds)
        arena = Arena(config, record, material, policy.generate, rewards)
        yield Session(config, record, material, trainers, policy.publisher, arena, Solo(), policy.watch)


@asynccontextmanager
async def open_arena(config: Config, record: RunRecord) -> AsyncIterator[tuple[Arena, Callable[[], Coroutine[Any, Any, None]]]]:
    """Start engines that serve `model.path` as it is, and rewards, for evaluation without training; and what watches the engines.

    Raises:
        ConfigError: there is no model.
    """
    if not config.model.path:
        raise ConfigError("model.path is empty, so there is no model to evaluate; give a folder or hub id, such as runs/quickstart/export")
    config = choose_threads(config, cores=usable_cores(), trains=False)
    material = read_material(config, trains=False)
    async with AsyncExitStack() as stack:
        launcher = await stack.enter_async_context(make_launcher(config))
        engines, rewards = await both(
            EngineGroup.start(launcher, config, log_dir=record.log_dir), open_rewards(stack, material, config, record))
        addresses = await engines.serve(model=material.model, tokenizer=material.tokenizer_folder, version=UNPUBLISHED)
        serving = await open_serving(stack, engines, addresses, config, record, model=material.model)

        async def version_of(engine: EngineClient) -> Version:
            """What it serves: the weights that it was started with, or those that another run left in an engine by URL."""
            return (await engine.health(timeout_s=config.inference.probe_timeout_s)).get("version", UNPUBLISHED)

        for name in serving.pool.states:
            serving.pool.admit(name, await version_of(serving.pool.client(name)))
        yield Arena(config, record, material, serving.pool.generate, rewards), partial(serving.watch, version_of)


@dataclass(frozen=True)
class Policy:
    """How a run's policy reaches the engines, is sampled there, and comes back to one that was healed."""

    publisher: Publishing
    generate: Generate
    watch: Callable[[], Coroutine[Any, Any, None]]


async def open_policy(
    stack: AsyncExitStack, serving: Serving, material: Material, config: Config, *, write: WriteVersion, release: Release = release_nobody,
    holds: Callable[[Version], bool] = lambda _version: False,
) -> Policy:
    """Publishes what `write` writes: whole weights, or the adapter that `model.lora` asks for; under names that are new with this start.

    Args:
        holds: whether `write` may be called again for this version, and by this process alone.
        release: lets other ranks go on that wait for this process to publish.
    """
    pool, fleet = serving.pool, serving.fleet
    directory, incarnation = config.weights_dir.resolve(), draw_incarnation()
    serving.record.events.record("incarnation", name=incarnation)
    channel = DiskChannel(
        directory, keep=config.weights.keep, canary=choose_canary(material, config), write=write, incarnation=incarnation,
        holds=holds, on_rewrite=partial(serving.record.note, "rewritten"))
    if config.model.lora.rank:
        tenant = policy_tenant(incarnation)
        await serving.unload_leftovers(directory)
        adapters = await stack.enter_async_context(LoraPublisher(fleet, channel, tenant=tenant, release=release))
        return Policy(adapters, partial(fleet.generate, tenant), serving.watch)
    publisher = Publisher(
        lambda: pool.healthy,
        CollectiveChannel(channel, num_receivers=lambda: len(pool.healthy)) if config.weights.channel == "collective" else channel,
        config.weights, judge=serving.judge, min_engines=config.inference.min_engines, on_serving=pool.admit, on_quarantine=pool.quarantine,
        recover=lambda version: pool.wait_healthy(version=version))
    return Policy(WholePublisher(publisher, release), pool.generate, partial(serving.watch, publisher.bring))


def make_launcher(config: Config, *, devices_taken: int = 0) -> Launcher:
    """The launcher that [cluster] names; the first accelerators of this machine may be taken by processes that it does not start."""
    module, name = _LAUNCHERS[config.cluster.launcher]
    return getattr(importlib.import_module(module), name).from_config(config, devices_taken=devices_taken)
