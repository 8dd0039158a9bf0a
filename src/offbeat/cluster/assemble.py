"""Puts a run together from its configuration: launcher, train ranks, engines, rewards, data. The one place where modes are chosen.

Nothing that the controller imports reaches torch: workers are started by name.
"""

import importlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from offbeat.aio import both
from offbeat.cluster.engine_group import EngineGroup
from offbeat.cluster.group import Launcher
from offbeat.cluster.messages import BuildRequest
from offbeat.cluster.train_group import TrainGroup
from offbeat.config.root import Config
from offbeat.data.dataset import PromptDataset, PromptStream, check_length, check_lengths, open_datasets, render, sft_sequence
from offbeat.data.model_folder import check_model_folder, read_context_length
from offbeat.data.row import Row
from offbeat.data.tasks import find_task
from offbeat.data.tokenizer import Tokenizer, character_tokenizer, load_tokenizer
from offbeat.errors import ConfigError
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.dialects import Sampling
from offbeat.inference.pool import EnginePool
from offbeat.rollout.episode import Episode, Workflow
from offbeat.rollout.executor import Accept, RolloutExecutor
from offbeat.rollout.functions import resolve
from offbeat.rollout.reward_pool import RewardPool
from offbeat.rollout.staleness import Gate
from offbeat.telemetry.record import RunRecord
from offbeat.types import Version
from offbeat.weights.channels import DiskChannel
from offbeat.weights.publish import Publisher

_UNPUBLISHED: Version = -1
"""What a new engine serves until its first publication: the initial weights, unproven, routed to by nobody."""

_LAUNCHERS = {"local": ("offbeat.cluster.local", "LocalLauncher"), "ray": ("offbeat.cluster.ray", "RayLauncher")}
_MAX_CANARY_TOKENS = 64
_MATH_REWARD = "offbeat.rollout.rewards.math:math_reward"
_EXACT_MATCH = "offbeat.rollout.rewards.exact_match:exact_match"


@dataclass(frozen=True)
class Material:
    """What a run works on, read before any process is started so that mistakes show at once.

    Attributes:
        model: folder of the initial model.
        build: how rank 0 has to make that folder's weights first; None where they are there.
        context: the model's longest sequence, in tokens.
    """

    model: str
    build: BuildRequest | None
    tokenizer_folder: str
    tokenizer: Tokenizer
    context: int
    train: PromptDataset
    heldout: PromptDataset


@dataclass(frozen=True)
class Arena:
    """Where rollouts are played: engines, rewards and data."""

    config: Config
    record: RunRecord
    material: Material
    engines: EngineGroup
    pool: EnginePool
    rewards: RewardPool

    async def watch(self) -> None:
        """Until cancelled, take dead engines out of service; raises EngineError when too few are left."""
        await self.engines.watch(make_quarantine(self.pool, self.record))

    def rollouts(self, stream: PromptStream, *, version: Version, last_version: Version) -> RolloutExecutor:
        """An executor that feeds the training steps from `version` to `last_version`."""
        config = self.config.rollout
        gate = Gate(
            batch_size=config.consumer_batch_size, max_running=config.max_concurrent_rollouts, eta=config.max_head_offpolicyness,
            version=version, last_version=last_version, on_stale=config.on_stale)
        workflow: Workflow = resolve(config.workflow, kind="workflow")
        accept: Accept = resolve(config.should_accept, kind="should_accept") if config.should_accept else lambda _group: True
        return RolloutExecutor(
            gate=gate, stream=stream, workflow=workflow, make_episode=self._episode, config=config, accept=accept,
            on_rejected=lambda settled: self.record.events.record("rejected", prompt_id=settled.prompt_id, reason=settled.rejected))

    def _episode(self, row: Row, group_size: int, sampling: Sampling) -> Episode:
        material = self.material
        prompt = tuple(render(row, material.tokenizer, self.config.data))
        check_length(
            len(prompt), self.config.data, name=repr(str(row.prompt)[:40]), context=material.context,
            max_new_tokens=sampling.max_new_tokens)
        return Episode(
            row=row, prompt=prompt, group_size=group_size, sampling=sampling, generate=self.pool.generate, score=self.rewards.score,
            tokenizer=material.tokenizer)


@dataclass(frozen=True)
class Session(Arena):
    """An arena, the train ranks, and the publisher between them."""

    trainers: TrainGroup
    publisher: Publisher


def read_material(config: Config) -> Material:
    """Read model configuration, tokenizer and data; writes nothing.

    Raises:
        ModelError: the folder holds no model or tokenizer.
        DataError: the data cannot be used, or a prompt is too long for the model.
    """
    build = None
    if config.model.path:
        model = str(check_model_folder(config.model.path))
        tokenizer_folder = config.model.tokenizer or model
        tokenizer = load_tokenizer(tokenizer_folder)
        context = read_context_length(model)
    else:
        model = tokenizer_folder = str(config.run_dir / "model")
        tokenizer = load_tokenizer(config.model.tokenizer) if config.model.tokenizer else character_tokenizer()
        context = config.model.tiny.max_positions
        build = BuildRequest(
            model, config.model.tiny.model_dump_json(), tokenizer.vocab_size, tokenizer.eos_token_id, tokenizer.pad_token_id,
            config.run.seed)
    context = min(context, config.inference.max_context or context)
    train, heldout = open_datasets(config.data, seed=config.run.seed)
    for rows in (train, heldout):
        check_lengths(rows, tokenizer, config.data, context=context, max_new_tokens=config.rollout.max_new_tokens)
    return Material(model, build, tokenizer_folder, tokenizer, context, train, heldout)


@asynccontextmanager
async def open_session(config: Config, material: Material, record: RunRecord) -> AsyncIterator[Session]:
    """Start every process of a training run; all are gone when the body ends, however it ends."""
    if material.build is not None:
        material.tokenizer.save(material.model)
    async with AsyncExitStack() as stack:
        launcher = await stack.enter_async_context(make_launcher(config))
        trainers, (engines, rewards) = await both(
            TrainGroup.start(
                launcher, config, model=material.model, build=material.build, log_dir=record.log_dir, on_span=record.on_span),
            both(EngineGroup.start(launcher, config, log_dir=record.log_dir), open_rewards(stack, material, config, record)))
        pool = await open_pool(stack, engines, material, config, record)
        channel = DiskChannel(
            config.weights_dir, keep=config.weights.keep, canary=choose_canary(material, config), write=trainers.publish)
        publisher = Publisher(
            lambda: pool.healthy, channel, config.weights, min_engines=config.inference.min_engines, on_serving=pool.admit,
            on_quarantine=make_quarantine(pool, record))
        yield Session(config, record, material, engines, pool, rewards, trainers, publisher)


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
        pool = await open_pool(stack, engines, material, config, record)
        for name in pool.healthy:
            pool.admit(name, _UNPUBLISHED)
        yield Arena(config, record, material, engines, pool, rewards)


async def open_rewards(stack: AsyncExitStack, material: Material, config: Config, record: RunRecord) -> RewardPool:
    """Start the reward processes, and try the reward on one row."""
    rollout = config.rollout
    rewards = await stack.enter_async_context(RewardPool(
        choose_reward(config), num_workers=rollout.reward_workers, timeout_s=rollout.reward_timeout_s, log_dir=record.log_dir))
    await rewards.check(material.train.row(0))
    return rewards


async def open_pool(stack: AsyncExitStack, engines: EngineGroup, material: Material, config: Config, record: RunRecord) -> EnginePool:
    """Let the engines load the model, and connect to them."""
    urls = await engines.serve(model=material.model, tokenizer=material.tokenizer_folder, version=_UNPUBLISHED)
    http = await stack.enter_async_context(EngineSession())
    return EnginePool(
        [EngineClient(name, url, http.session) for name, url in urls.items()], request_timeout_s=config.inference.request_timeout_s,
        on_failure=lambda name, reason: record.events.record("engine_failed", engine=name, reason=reason), on_busy=record.on_span)


def choose_reward(config: Config) -> str:
    """The configured reward, or the one that suits the data."""
    if config.rollout.reward:
        return config.rollout.reward
    if config.data.task:
        return find_task(config.data.task, size=config.data.task_size).reward
    return _MATH_REWARD if config.data.format == "gsm8k" else _EXACT_MATCH


def choose_canary(material: Material, config: Config) -> tuple[int, ...]:
    """Tokens whose log-probability every publish compares: a prompt with its answer, as the model will see them."""
    tokens, _ = sft_sequence(material.train.row(0), material.tokenizer, config.data)
    return tuple(int(token) for token in tokens[:_MAX_CANARY_TOKENS])


def make_launcher(config: Config) -> Launcher:
    """The launcher that [cluster] names."""
    # By name: importing Ray costs a second and is an optional extra.
    module, name = _LAUNCHERS[config.cluster.launcher]
    return getattr(importlib.import_module(module), name).from_config(config)


def make_quarantine(pool: EnginePool, record: RunRecord) -> Callable[[str, str], None]:
    """What happens when an engine may serve no more."""

    def quarantine(name: str, reason: str) -> None:
        if name not in pool.healthy:  # a dead engine fails its publication, too
            return
        pool.quarantine(name, reason)
        record.events.record("quarantine", engine=name, reason=reason)
        record.console.note(f"{name} is quarantined: {reason}")

    return quarantine
