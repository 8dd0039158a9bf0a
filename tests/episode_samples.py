"""Groups of episodes: given rewards of several agents, or random trajectories and turns with states that come again."""

import numpy as np

from offbeat.data.trajectory import Group, Trajectory, TurnEnd


def random_episodes(seed, *, num_groups=3, agents=("",), most_chains=3, most_turns=4, states=True, rewards=(0.0, 1.0, 0.25, 2.5)):
    """Groups whose trajectories are mixed up, with turns of zero to three tokens, some of them not generated."""
    rng = np.random.default_rng(seed)
    return [Group(f"0:{g}", 0, tuple(_group(rng, agents, most_chains, most_turns, states, rewards))) for g in range(num_groups)]


def rewarded(*episodes):
    """A group of episodes, each the rewards of its agents by name; the first agent has two trajectories."""
    one = np.ones(1)
    return Group("batch:0", 0, tuple(
        Trajectory(one, one, one, one, reward, episode=number, agent=agent)
        for number, rewards in enumerate(episodes) for place, (agent, reward) in enumerate(rewards.items())
        for _ in range(2 if place == 0 else 1)))


def _group(rng, agents, most_chains, most_turns, states, rewards):
    found = []
    for episode in range(int(rng.integers(1, 6))):
        present = [agent for agent in agents if rng.random() < 0.8] or [agents[0]]
        for agent in present:
            outcome = float(rng.choice(rewards))
            for _ in range(int(rng.integers(1, most_chains + 1))):
                found.append(_chain(rng, episode, agent, outcome, int(rng.integers(1, most_turns + 1)), states, rewards))
    return [found[i] for i in rng.permutation(len(found))]


def _chain(rng, episode, agent, outcome, num_turns, states, rewards):
    mask, turns = [False], []
    for _ in range(num_turns):
        mask += [False] * int(rng.integers(0, 3)) + [True] * int(rng.integers(0, 4))
        state = str(rng.choice(["", "a", "b"])) if states else ""
        turns.append(TurnEnd(len(mask), float(rng.choice(rewards)) * float(rng.random() < 0.5), state, int(rng.integers(0, 3))))
    mask += [False] * int(rng.integers(0, 2))
    length = len(mask)
    mask = np.array(mask)
    return Trajectory(
        rng.integers(2, 30, length), mask, np.where(mask, -rng.random(length), 0), np.where(mask, 3, -1), outcome,
        "length" if rng.random() < 0.2 else "stop", episode=episode, agent=agent, turns=tuple(turns))
