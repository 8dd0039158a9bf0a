"""The user's code of a run: its workflow and its rewards, and those of its data sets and evaluation sets, with their processes. Torch-free.

Opened wherever rollouts are played; see `runs.rollouts`.
"""

from collections.abc import Awaitable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from offbeat.agents.opening import open_workflow
from offbeat.aio import both
from offbeat.config.root import Config
from offbeat.controller.inputs import RunInputs
from offbeat.controller.reward_choice import choose_rewards, devices_per_reward_model, reward_model_of, what_judges
from offbeat.data.mixture import first_rows
from offbeat.data.row import Row
from offbeat.data.trajectory import Trajectory
from offbeat.engine.reward_options import RewardModelOptions
from offbeat.rollout.episode import Episode, Workflow
from offbeat.rollout.metric import check_metrics
from offbeat.rollout.model_reward import ModelReward, worker_specs
from offbeat.rollout.reward_pool import RewardPool, Rewards, check_call
from offbeat.telemetry.record import RunRecord
from offbeat.workers.worker import Launcher


@dataclass(frozen=True)
class MixedRewards:
    """The rewards of several data sets, by name; each row is judged by its own set's."""

    of_sets: Mapping[str, Rewards]

    async def score(self, completions: Sequence[str], row: Row) -> list[float]:
        check_call(completions, row)
        return await self.of_sets[row.of_set].score(completions, row)


@dataclass(frozen=True)
class UserCode:
    """Workflow and rewards of a run, with their processes, and the user code of its evaluation sets, by name."""

    rewards: Rewards | MixedRewards
    workflow: Workflow
    sets: Mapping[str, "UserCode"] = field(default_factory=dict)


async def open_user_code(stack: AsyncExitStack, inputs: RunInputs, config: Config, record: RunRecord, *, launcher: Launcher) -> UserCode:
    """Start rewards and workflow of the run and of its evaluation sets; see `open_rewards` and `open_workflow`.

    A reward or workflow that a set shares with the run, or with a set before it, is started once. The sets' metrics are tried here, too.
    """
    def workflow_of(own: Config, of_set: RunInputs, folder: Path) -> Awaitable[Workflow]:
        return open_workflow(stack, own, tokenizer=of_set.tokenizer, log_dir=folder, notes=record)

    if config.data.sets:
        code = await _open_mixed(stack, inputs, config, record, launcher=launcher)
    else:
        code = UserCode(*await both(
            open_rewards(stack, inputs.train.row(0), config, record, launcher=launcher), workflow_of(config, inputs, record.log_dir)))
    evaluated = [config, *map(config.evaluation_set, inputs.sets)]
    await check_metrics([(each.evaluate, each.rollout) for each in evaluated], log_dir=record.log_dir)
    rewards, workflows = {what_judges(config): code.rewards}, {_what_plays(config): code.workflow}
    sets: dict[str, UserCode] = {}
    for name, of_set in inputs.sets.items():
        own = config.evaluation_set(name)
        judges, plays = what_judges(own), _what_plays(own)
        if judges not in rewards:
            rewards[judges] = await open_rewards(stack, of_set.train.row(0), own, record, launcher=launcher, of_set=name)
        if plays not in workflows:
            workflows[plays] = await workflow_of(own, of_set, _log_dir(record, name))
        sets[name] = UserCode(rewards[judges], workflows[plays])
    return replace(code, sets=sets)


async def _open_mixed(stack: AsyncExitStack, inputs: RunInputs, config: Config, record: RunRecord, *, launcher: Launcher) -> UserCode:
    """Start rewards and workflow of each data set; one that a set shares with a set before it is started once."""
    rewards: dict[Hashable, Rewards] = {}
    workflows: dict[Hashable, Workflow] = {}
    judges: dict[str, Rewards] = {}
    plays: dict[str, Workflow] = {}
    for name, row in first_rows(inputs.train).items():
        own, folder = config.data_set(name), f"data-{name}"
        judging, playing = what_judges(own), _what_plays(own)
        if judging not in rewards:
            rewards[judging] = await open_rewards(stack, row, own, record, launcher=launcher, of_set=folder)
        if playing not in workflows:
            tokenizer = inputs.tokenizer.giving(own.data.chat_template_kwargs)
            workflows[playing] = await open_workflow(stack, own, tokenizer=tokenizer, log_dir=_log_dir(record, folder), notes=record)
        judges[name], plays[name] = rewards[judging], workflows[playing]

    async def play_of_set(episode: Episode) -> Sequence[Trajectory]:
        return await plays[episode.row.of_set](episode)

    return UserCode(MixedRewards(judges), play_of_set)


def _what_plays(config: Config) -> Hashable:
    """Return the settings of `open_workflow` that may differ between a run and its evaluation sets."""
    data = config.data
    return bool(data.sets), config.rollout.workflow, config.agent, data.system_prompt, tuple(data.chat_template_kwargs.items())


def _log_dir(record: RunRecord, of_set: str) -> Path:
    """Return the folder of logs of an evaluation set's processes; "" is the run itself."""
    folder = record.log_dir / of_set
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def open_rewards(
    stack: AsyncExitStack, row: Row, config: Config, record: RunRecord, *, launcher: Launcher, of_set: str = "",
) -> Rewards:
    """Start the reward processes, by the launcher if they compute with a model, and score the answer of `row`, so that a broken reward is
    found before any episode. `of_set` names the evaluation set that they judge; "" is the run.
    """
    rollout, log_dir = config.rollout, _log_dir(record, of_set)
    rewards: Rewards
    if model := reward_model_of(config):
        options = RewardModelOptions(model, config.model.number_format, config.data.system_prompt, config.train.max_tokens_per_microbatch)
        rewards = await stack.enter_async_context(ModelReward(
            launcher, options, worker_specs(
                rollout.reward_workers, log_dir=log_dir, threads=config.inference.threads or 1,
                num_devices=devices_per_reward_model(config), of_set=of_set),
            timeout_s=rollout.reward_timeout_s, start_timeout_s=config.cluster.start_timeout_s))
    else:
        weights = choose_rewards(config)
        rewards = await stack.enter_async_context(RewardPool(
            weights if rollout.rewards else next(iter(weights)), num_workers=rollout.reward_workers, timeout_s=rollout.reward_timeout_s,
            log_dir=log_dir, memory_bytes=rollout.reward_memory_bytes, allowed=rollout.reward_env,
            start_timeout_s=config.cluster.start_timeout_s))
    await rewards.check(row)
    return rewards
