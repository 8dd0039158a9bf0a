"""Puts a run together from its configuration. The one place where modes are chosen: how the loop runs, and who launches workers.

Nothing that the controller imports reaches torch: workers, and SPMD mode, are started by name.
"""

import importlib
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from offbeat.aio import both
from offbeat.cluster.arena import UNPUBLISHED, Arena, make_quarantine, open_pool, open_rewards
from offbeat.cluster.engine_group import EngineGroup
from offbeat.cluster.group import Launcher, library_environment
from offbeat.cluster.material import Material, choose_canary, read_material
from offbeat.cluster.place import Place
from offbeat.cluster.session import Session, Solo
from offbeat.cluster.train_group import TrainGroup
from offbeat.config.root import Config
from offbeat.errors import ConfigError
from offbeat.inference.pool import EnginePool
from offbeat.telemetry.record import RunRecord
from offbeat.weights.channels import DiskChannel, WriteVersion
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
        trainers, (engines, rewards) = await both(
            TrainGroup.start(
                launcher, config, model=material.model, build=material.build, log_dir=record.log_dir, on_span=record.on_span),
            both(EngineGroup.start(launcher, config, log_dir=record.log_dir), open_rewards(stack, material, config, record)))
        urls = await engines.serve(model=material.model, tokenizer=material.tokenizer_folder, version=UNPUBLISHED)
        pool = await open_pool(stack, urls, config, record)
        arena = Arena(config, record, material, engines, pool, rewards)
        publisher = make_publisher(pool, material, config, record, write=trainers.publish)
        yield Session(config, record, material, trainers, publisher, arena, Solo(), arena.watch)


@asynccontextmanager
async def open_arena(config: Config, record: RunRecord) -> AsyncIterator[Arena]:
    """Start engines that serve `model.path` as it is, and rewards; for evaluation without training.

    Raises:
        ConfigError: there is no model.
    """
    if not config.model.path:
        raise ConfigError("model.path is empty, so there is no model to evaluate; give a folder or hub id, such as runs/quickstart/export")
    material = read_material(config)
    async with AsyncExitStack() as stack:
        launcher = await stack.enter_async_context(make_launcher(config))
        engines, rewards = await both(
            EngineGroup.start(launcher, config, log_dir=record.log_dir), open_rewards(stack, material, config, record))
        urls = await engines.serve(model=material.model, tokenizer=material.tokenizer_folder, version=UNPUBLISHED)
        pool = await open_pool(stack, urls, config, record)
        for name in pool.healthy:
            pool.admit(name, UNPUBLISHED)
        yield Arena(config, record, material, engines, pool, rewards)


def make_publisher(pool: EnginePool, material: Material, config: Config, record: RunRecord, *, write: WriteVersion) -> Publisher:
    """Publishes what `write` writes to the engines of the pool."""
    channel = DiskChannel(config.weights_dir, keep=config.weights.keep, canary=choose_canary(material, config), write=write)
    return Publisher(
        lambda: pool.healthy, channel, config.weights, min_engines=config.inference.min_engines, on_serving=pool.admit,
        on_quarantine=make_quarantine(pool, record))


def make_launcher(config: Config, *, devices_taken: int = 0) -> Launcher:
    """The launcher that [cluster] names; the first accelerators of this machine may be taken by processes that it does not start."""
    module, name = _LAUNCHERS[config.cluster.launcher]
    return getattr(importlib.import_module(module), name).from_config(config, devices_taken=devices_taken)
