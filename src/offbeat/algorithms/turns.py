"""Credit for the turns of episodes: the return of each, compared with other turns of the group. Numpy in float64; called by `experience`,
and by `rollout.dynamic`, which asks whether the compared values differ.

A turn's return is its reward, plus `turn_gamma` times the return of the turn after it; the outcome of the episode is added to the last turn
of each agent. All tokens of a turn share its advantage. `algorithm.turn_credit` chooses the returns that are compared:

    return   those of all turns of the group, in which an episode counts once (discounted returns per call, as in AReaL)
    turn     those of turns of the same rank, such as all first turns
    state    the advantage of the episode, plus `state_weight` times that among turns which were played in the same state (GiGPO,
             arXiv:2505.10978 eq. 3 to 8)
"""

import numpy as np

from offbeat.algorithms.credit import outcome_advantages
from offbeat.algorithms.episodes import Episodes, Turns
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data.trajectory import Group


def turn_advantages(
    turns: Turns, episodes: Episodes, *, rewards: np.ndarray, advantages: np.ndarray, config: AlgorithmConfig,
) -> np.ndarray:
    """Return [C] float64, the advantage of each turn.

    Args:
        rewards: [U] float64, the shaped reward of each part, rewards of its turns among it.
        advantages: [U] float64, the advantage of each part as a whole.
    """
    returns = turn_returns(
        turns, rewards=config.reward_scale * turns.rewards, outcomes=rewards - config.reward_scale * episodes.turn_rewards,
        gamma=config.turn_gamma)
    groups, of_episodes = _compared(turns, episodes, config)
    some = groups >= 0
    by_state = config.turn_credit == "state"
    found = advantages[turns.parts] if by_state else np.zeros(len(returns))
    found[some] += (config.state_weight if by_state else 1.0) * outcome_advantages(
        returns[some], group_ids=groups[some], num_tokens=turns.num_tokens[some], centre=config.centre, scale=config.scale,
        episodes=of_episodes[some])
    return found


def reward_range(group: Group, config: AlgorithmConfig) -> float:
    """Return the largest difference among the values that credit compares in a group, before shaping; at 0 the group teaches nothing.

    The values are the rewards of its episodes; with `turn_credit` the returns of its turns, and with "state" both. With a credit function
    of the user's own, or a critic, they are the rewards of episodes, and those of turns of the same rank.
    """
    of_episodes = group.reward_range(separate=config.separate_rewards, by_agent=config.agent_baselines)
    by_itself = bool(config.credit) or config.needs_critic
    if not group.usable or (config.turn_credit == "episode" and not by_itself):
        return of_episodes
    episodes = Episodes.of([group])
    turns = Turns.of(episodes, np.zeros(len(episodes.trajectories), np.int64))
    values = turns.rewards
    if not by_itself:
        firsts = np.searchsorted(episodes.part_ids, np.arange(len(episodes.part_groups)))
        outcomes = np.array([episodes.trajectories[first].reward for first in firsts], np.float64)
        values = turn_returns(turns, rewards=turns.rewards, outcomes=outcomes, gamma=config.turn_gamma)
    groups, counted = _compared(turns, episodes, config)
    ranges = [
        float(np.ptp(values[own])) for each in np.unique(groups[groups >= 0])
        if len(np.unique(counted[own := groups == each])) > 1]  # a single episode is compared with nothing
    if by_itself or config.turn_credit == "state":
        ranges.append(of_episodes)
    return max(ranges, default=0.0)


def _compared(turns: Turns, episodes: Episodes, config: AlgorithmConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return two ids of each turn, [C] int64: of the turns that it is compared with, -1 for none, and of those that count once together.

    The latter are the turns of an episode, but every turn in a state counts by itself.
    """
    compared = episodes.compared(by_agent=config.agent_baselines)[turns.parts]
    most = int(compared.max(initial=0)) + 1
    if config.turn_credit == "state":
        return np.where(turns.states >= 0, turns.states * most + compared, -1), np.arange(len(turns.parts))
    by_rank = np.zeros_like(turns.ranks) if config.turn_credit == "return" else turns.ranks
    return by_rank * most + compared, episodes.part_episodes[turns.parts]


def turn_returns(turns: Turns, *, rewards: np.ndarray, outcomes: np.ndarray, gamma: float) -> np.ndarray:
    """Return [C] float64, the discounted sum of the rewards of each turn and those after it in its part.

    Args:
        rewards: [C] float64, of each turn, such as [0, 1]; with the outcome 2 and gamma = 0.5 their returns are [1.5, 3].
        outcomes: [U] float64, added to the last turn of each part.
    """
    returns = rewards.copy()
    for played, outcome in zip(turns.in_order, outcomes, strict=True):
        following = outcome
        for position, turn in enumerate(played[::-1]):
            following = returns[turn] + (following if not position else gamma * following)
            returns[turn] = following
    return returns
