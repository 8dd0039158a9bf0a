"""Flattens the episodes of a batch into arrays: trajectories, the parts of agents that share a reward, and turns. Called by `experience`.

A part holds the trajectories of one agent in an episode; without agents it is the episode. Rewards and baselines are of parts, tokens of
trajectories. For example, one prompt with an episode of two trajectories and one of a single one:

    group_ids    [0, 0, 0]   of trajectories        part_groups    [0, 0]   of parts
    part_ids     [0, 0, 1]                          part_episodes  [0, 1]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import numpy as np

from offbeat.data.trajectory import Group, Trajectory, named_rewards


@dataclass(frozen=True, eq=False)
class Episodes:
    """The N usable trajectories of a batch, in U parts of episodes.

    Attributes:
        trajectories: N, the parts of an episode and the episodes of a group one after the other.
        group_ids: [N] int64, ascending, positions in the batch's groups.
        part_ids: [N] int64, ascending.
        part_groups: [U] int64, the group of each part.
        part_agents: [U] int64; parts of one agent have equal ids.
        part_episodes: [U] int64, ascending, the episode of each part.
        names: K names of rewards; that without a name is "".
        rewards: [K, U] float64, those rewards of each part, rewards of turns among them; NaN where it has none of that name.
        turn_rewards: [U] float64, the sum of the rewards of its turns.
    """

    trajectories: tuple[Trajectory, ...]
    group_ids: np.ndarray
    part_ids: np.ndarray
    part_groups: np.ndarray
    part_agents: np.ndarray
    part_episodes: np.ndarray
    names: tuple[str, ...]
    rewards: np.ndarray
    turn_rewards: np.ndarray

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Self:
        """Flatten the usable episodes of groups."""
        parts, part_groups, part_episodes = [], [], []
        episode = 0
        for position, group in enumerate(groups):
            for own in group.usable_parts:
                parts += own
                part_groups += [position] * len(own)
                part_episodes += [episode] * len(own)
                episode += 1
        named = named_rewards(parts)
        names = tuple(dict.fromkeys(name for rewards in named for name in rewards)) or ("",)
        agents = {agent: number for number, agent in enumerate(dict.fromkeys(part.agent for part in parts))}
        part_ids = np.repeat(np.arange(len(parts)), [len(part.chains) for part in parts])
        return cls(
            tuple(t for part in parts for t in part.chains), np.array(part_groups, np.int64)[part_ids], part_ids,
            np.array(part_groups, np.int64), np.array([agents[part.agent] for part in parts], np.int64), np.array(part_episodes, np.int64),
            names, np.array([[rewards.get(name, np.nan) for rewards in named] for name in names], dtype=np.float64),
            np.array([part.turn_reward for part in parts], np.float64))

    @property
    def episode_ids(self) -> np.ndarray:
        """[N] int64, ascending, the episode of each trajectory."""
        return self.part_episodes[self.part_ids]

    def compared(self, *, by_agent: bool) -> np.ndarray:
        """Return [U] int64: parts with equal ids are each other's baseline, those of a group, or of an agent in it."""
        if not by_agent or not len(self.part_agents):
            return self.part_groups
        return self.part_groups * (int(self.part_agents.max()) + 1) + self.part_agents

    def of_parts(self, values: np.ndarray) -> np.ndarray:
        """Return [U], the sums of values [N] of trajectories."""
        return np.bincount(self.part_ids, values, minlength=len(self.part_groups))

    def longest_answers(self) -> np.ndarray:
        """Return [U] int64, the generated tokens in the longest turn of each part."""
        longest = np.zeros(len(self.part_groups), np.int64)
        np.maximum.at(longest, self.part_ids, np.array(
            [np.bincount(turn_of_tokens(t), minlength=1).max() for t in self.trajectories], np.int64))
        return longest

    def cut_off(self) -> np.ndarray:
        """Return [N] bool, whether a trajectory, or the last one of its part, was cut off at its length."""
        cut = np.array([t.reason == "length" for t in self.trajectories], np.bool_)
        last: dict[int, tuple[int, int]] = {}
        for index, (t, part) in enumerate(zip(self.trajectories, self.part_ids.tolist(), strict=True)):
            last[part] = max(last.get(part, (-1, -1)), (max((turn.order for turn in t.calls), default=-1), index))
        ends = np.array([last[part][1] for part in self.part_ids.tolist()], np.int64)
        return cut | cut[ends]


@dataclass(frozen=True, eq=False)
class Turns:
    """The C turns of a batch.

    Attributes:
        parts: [C] int64, the part of each.
        rewards: [C] float64, the reward of each.
        ranks: [C] int64, its position among the turns of its part, such as [0, 1, 0].
        states: [C] int64; turns of one group in equal states have equal ids, and those without a state have -1.
        num_tokens: [C], trained tokens of each.
        of_tokens: [M] int64, the turn of each trained token.
        in_order: for each part, its turns in the order in which they were played.
    """

    parts: np.ndarray
    rewards: np.ndarray
    ranks: np.ndarray
    states: np.ndarray
    num_tokens: np.ndarray
    of_tokens: np.ndarray
    in_order: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, episodes: Episodes, num_trained: np.ndarray) -> Self:
        """List the turns of all trajectories, with `num_trained` [N] trained tokens each: 0 for one that is left out of the loss."""
        parts, orders, rewards, states, of_tokens = [], [], [], [], []
        known: dict[tuple[int, str], int] = {}
        for t, part, trained in zip(episodes.trajectories, episodes.part_ids.tolist(), num_trained.tolist(), strict=True):
            if trained:
                of_tokens.append(len(parts) + turn_of_tokens(t))
            group = int(episodes.part_groups[part])
            for turn in t.calls:
                parts.append(part)
                orders.append(turn.order)
                rewards.append(turn.reward)
                states.append(known.setdefault((group, turn.state), len(known)) if turn.state else -1)
        ranks = np.zeros(len(parts), np.int64)
        in_order = [np.zeros(0, np.int64)] * len(episodes.part_groups)
        for part, played in groupby(sorted(range(len(parts)), key=lambda turn: (parts[turn], orders[turn])), key=parts.__getitem__):
            in_order[part] = np.array(list(played), np.int64)
            ranks[in_order[part]] = np.arange(len(in_order[part]))
        tokens = np.concatenate([np.zeros(0, np.int64), *of_tokens])
        return cls(
            np.array(parts, np.int64), np.array(rewards, np.float64), ranks, np.array(states, np.int64),
            np.bincount(tokens, minlength=len(parts)), tokens, tuple(in_order))


def turn_of_tokens(trajectory: Trajectory) -> np.ndarray:
    """Return [K] int64, the turn of each of the K generated tokens, counted from 0, such as [0, 0, 1]."""
    ends = np.array([turn.end for turn in trajectory.calls], np.int64)
    return np.searchsorted(ends, np.flatnonzero(trajectory.loss_mask), side="right")


def last_tokens(trajectory: Trajectory) -> np.ndarray:
    """Return, [C] int64, the position among generated tokens of the last one up to each turn's end; 0 where there is none yet."""
    ends = np.array([turn.end for turn in trajectory.calls], np.int64)
    return np.maximum(np.searchsorted(np.flatnonzero(trajectory.loss_mask), ends, side="left") - 1, 0)
