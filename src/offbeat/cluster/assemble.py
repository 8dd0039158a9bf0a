"""Puts a run together from its configuration. Modes are chosen only here: how the loop runs, and who launches workers.

Nothing that the controller imports reaches torch: workers and SPMD mode are started by name.
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
from offbeat.cluster.ranks import WorkerRanks
from offbeat.cluster.serving import UNPUBLISHED, Serving, open_serving
from offbeat.cluster.session import Publishing, Session, Solo
from offbeat.cluster.threads import choose_threads, usable_cores
from offbeat.cluster.trainers import Trainers
from offbeat.config.root import Config
from offbeat.errors import ConfigError
from offbeat.fleet.publishers import PolicyPublisher, Release, WeightsPublisher, release_nobody
from offbeat.inference.client import EngineClient
from offbeat.rollout.episode import Generate
from offbeat.telemetry.record import RunRecord
from offbeat.types import Version
from offbeat.weights.adapters import policy_adapter
from offbeat.weights.channels import Channel, WriteVersion, draw_incarnation

# By name: importing Ray costs a second, and Ray is an optional extra; SPMD mode imports torch.
_LAUNCHERS = {"local": ("offbeat.cluster.local", "LocalLauncher"), "ray": ("offbeat.cluster.ray", "RayLauncher")}
_MODES = {"controller": ("offbeat.cluster.assemble", "open_controller"), "spmd": ("offbeat.cluster.spmd", "open_rank")}


def open_session(config: Config, place: Place, material: Material, record: RunRecord) -> AbstractAsyncContextManager[Session]:
    """Open this process's part of a training run; everything it has started is gone when the body ends, however it ends."""
    for variable, value in library_environment(config.train.threads).items():
        os.environ.setdefault(variable, value)  # a rank of SPMD mode is about to import torch
    module, name = _MODES[config.run.mode]
    return getattr(importlib.import_module(module), name)(config, place, material, record)


@asynccontextmanager
async def open_controller(config: Config, place: Place, material: Material, record: RunRecord) -> AsyncIterator[Session]:
    """Open a run in single-controller mode: train ranks and engines are workers of this process, which has no device."""
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
    """Start engines that serve `model.path` as it is, and rewards, to evaluate without training; also yields the watch over the engines.

    Raises:
        ConfigError: `model.path` is empty.
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
            """Return the version served: that of the initial weights, or of those that another run left in an engine by URL."""
            return (await engine.health(timeout_s=config.inference.probe_timeout_s)).get("version", UNPUBLISHED)

        for name in serving.pool.states:
            serving.pool.admit(name, await version_of(serving.pool.client(name)))
        yield Arena(config, record, material, serving.dispatcher.generate, rewards), partial(serving.watch, version_of)


@dataclass(frozen=True)
class Policy:
    """How a run's policy is published to the engines, sampled there, and restored on an engine that was healed."""

    publisher: Publishing
    generate: Generate
    watch: Callable[[], Coroutine[Any, Any, None]]


async def open_policy(
    stack: AsyncExitStack, serving: Serving, material: Material, config: Config, *, write: WriteVersion, release: Release = release_nobody,
    holds: Callable[[Version], bool] = lambda _version: False,
) -> Policy:
    """Publish what `write` writes, whole weights or the adapter that `model.lora` asks for, under names that are new with this start.

    Args:
        holds: whether `write` may be called again for this version, and by this process alone.
        release: releases other ranks that wait for this process to publish.
    """
    pool, lora = serving.pool, config.model.lora.rank > 0
    directory, incarnation = config.weights_dir.resolve(), draw_incarnation()
    serving.record.events.record("incarnation", name=incarnation)
    broadcasts = config.weights.channel == "collective" and not lora
    channel = Channel(
        directory, keep=config.weights.keep, canary=choose_canary(material, config), write=write, incarnation=incarnation,
        num_receivers=lambda: len(pool.healthy) if broadcasts else 0, holds=holds, on_rewrite=partial(serving.record.note, "rewritten"))
    if lora:
        adapter = policy_adapter(incarnation)
        await serving.unload_leftovers(directory)
        policy = await stack.enter_async_context(PolicyPublisher(serving.publisher, channel, adapter=adapter, release=release))
        return Policy(policy, partial(serving.dispatcher.generate, adapter=adapter), serving.watch)
    publisher = WeightsPublisher(pool, channel, config.weights, judge=serving.judge, release=release)
    return Policy(publisher, serving.dispatcher.generate, partial(serving.watch, publisher.bring))


def make_launcher(config: Config, *, devices_taken: int = 0) -> Launcher:
    """Create the launcher that [cluster] names; the first `devices_taken` accelerators belong to other processes."""
    module, name = _LAUNCHERS[config.cluster.launcher]
    return getattr(importlib.import_module(module), name).from_config(config, devices_taken=devices_taken)
