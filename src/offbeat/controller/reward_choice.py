"""The rewards of a run and of its sets, as the configuration names them. Needs nothing of the extra `train`."""

from collections.abc import Hashable

from offbeat.config.rollout import REWARD_MODEL, REWARDS
from offbeat.config.root import Config
from offbeat.data.tasks import find_task


def choose_rewards(config: Config) -> dict[str, float]:
    """Return the configured rewards, each with its weight: by dotted name, the folder of a model or the file of a judge.

    If none is configured, it is the one that suits the data, such as {"offbeat.rollout.rewards.math:math_reward": 1.0} for gsm8k.
    """
    rollout = config.rollout
    if rollout.rewards or rollout.reward:
        return {REWARDS.get(name, name): weight for name, weight in (rollout.rewards or {rollout.reward: 1.0}).items()}
    if config.data.task:
        return {find_task(config.data).reward: 1.0}
    return {REWARDS["math" if config.data.format == "gsm8k" else "exact_match"]: 1.0}


def reward_model_of(config: Config) -> str:
    """Return the folder or hub id of the reward model that judges; empty if functions do."""
    name = next(iter(choose_rewards(config)))
    return name.removeprefix(REWARD_MODEL) if name.startswith(REWARD_MODEL) else ""


def what_judges(config: Config) -> Hashable:
    """Return everything that `open_rewards` reads and that may differ between a run and its evaluation sets."""
    rollout, data = config.rollout, config.data
    prompts = (data.chat_template, data.system_prompt) if reward_model_of(config) else ()
    rewards = (bool(data.sets), bool(rollout.rewards), *choose_rewards(config).items())
    return rewards, rollout.reward_workers, rollout.reward_timeout_s, rollout.reward_memory_bytes, rollout.reward_env, prompts


def num_reward_models(config: Config) -> int:
    """Return the number of reward model processes that `open_user_code` starts for the run itself."""
    if config.data.sets:
        return sum(map(num_reward_models, {what_judges(own): own for own in map(config.data_set, config.data.sets)}.values()))
    return config.rollout.reward_workers if reward_model_of(config) else 0


def num_set_reward_models(config: Config) -> int:
    """Return the number of reward model processes that `open_user_code` starts for evaluation sets; each takes accelerators."""
    sets = {what_judges(own): own for own in map(config.evaluation_set, config.evaluate.sets)}
    return sum(num_reward_models(own) for judges, own in sets.items() if judges != what_judges(config))


def devices_per_reward_model(config: Config) -> int:
    """Return the number of accelerators of a reward model's process: one where ranks or engines have any, else it is on the CPU."""
    return min(1, max(config.train.devices_per_rank, config.inference.devices_per_engine))
