"""Credit for the turns of episodes: what each has led to, compared with other turns of the group. Numpy in float64; called by `experience`.

A turn's return is what it has earned, plus `turn_gamma` times the return of the turn after it; the outcome of the episode falls on the last
turn of each agent. All tokens of a turn share its advantage. `algorithm.turn_credit` says what returns are compared with:

    return   those of all turns of the group, in which an episode counts once (discounted returns per call, as in AReaL)
    turn     those of turns of the same rank: first turns with first ones, second ones with second ones
    state    the advantage of the episode, plus `state_weight` times that among turns which were played in the same state (GiGPO,
             arXiv:2505.10978 eq. 3 to 8)
"""

import numpy as np

from offbeat.algorithms.credit import outcome_advantages
from offbeat.algorithms.episodes import Episodes, Turns
from offbeat.config.algorithms import AlgorithmConfig


def turn_advantages(
    turns: Turns, episodes: Episodes, *, rewards: np.ndarray, advantages: np.ndarray, config: AlgorithmConfig,
) -> np.ndarray:
    """Return [C] float64, the advantage of each turn.

    Args:
        rewards: [U] float64, the shaped reward of each part, rewards of its turns among it.
        advantages: [U] float64, the advantage of each part as a whole.
    """
    returns = turn_returns(turns, outcomes=rewards - config.reward_scale * episodes.turn_rewards, config=config)
    compared = episodes.compared(by_agent=config.agent_baselines)[turns.parts]
    of_episodes = episodes.part_episodes[turns.parts]
    if config.turn_credit == "state":
        found = advantages[turns.parts]
        some = turns.states >= 0
        groups = turns.states[some] * (int(compared.max(initial=0)) + 1) + compared[some]
        of_episodes = None  # every turn in a state counts alike
    else:
        found, some = np.zeros(len(returns)), np.ones(len(returns), np.bool_)
        by_rank = turns.ranks if config.turn_credit == "turn" else np.zeros_like(turns.ranks)
        groups = by_rank * (int(compared.max(initial=0)) + 1) + compared
    weight = config.state_weight if config.turn_credit == "state" else 1.0
    found[some] += weight * outcome_advantages(
        returns[some], group_ids=groups, num_tokens=turns.num_tokens[some], centre=config.centre, scale=config.scale, episodes=of_episodes)
    return found


def turn_returns(turns: Turns, *, outcomes: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """Return [C] float64, the discounted sum of what each turn and those after it in its part have earned.

    Args:
        outcomes: [U] float64, what falls on the last turn of each part besides.
    """
    returns = config.reward_scale * turns.rewards
    for played, outcome in zip(turns.in_order, outcomes, strict=True):
        following = outcome
        for position, turn in enumerate(played[::-1]):
            following = returns[turn] + (following if not position else config.turn_gamma * following)
            returns[turn] = following
    return returns
