"""Credit of episodes and of their turns, against slow versions that are written as loops over plain numbers."""

import math
from collections import Counter
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from episode_samples import random_episodes
from offbeat.algorithms.credit import outcome_advantages
from offbeat.algorithms.episodes import Episodes, Turns
from offbeat.algorithms.experience import make_batch
from offbeat.algorithms.turns import reward_range, turn_advantages
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data.trajectory import Group, Trajectory, TurnEnd

SCALES = ("none", "group_std", "batch_std")


def by_sequence(batch):
    """Tokens and advantages of each sequence of a batch."""
    return {
        (tuple(batch.tokens[start:end]), int(group)): batch.columns["advantages"][first:last].tolist()
        for start, end, first, last, group in zip(
            batch.offsets, batch.offsets[1:], batch.target_offsets, batch.target_offsets[1:], batch.group_ids, strict=False)}


def compare(rows, everyone, centre, scale):
    """The advantage of each row (value, episode, tokens) among `rows`; an episode counts once."""
    episodes = {}
    for value, episode, _ in rows:
        episodes.setdefault(episode, []).append(value)
    if len(episodes) == 1 or len({value for value, _, _ in rows}) == 1:
        return [0.0] * len(rows)
    mean = fmean(map(fmean, episodes.values()))
    found = []
    for value, episode, _ in rows:
        if centre == "leave_one_out":
            found.append(value - fmean(fmean(values) for other, values in episodes.items() if other != episode))
        elif centre == "length_weighted":
            tokens = sum(n for *_, n in rows)
            found.append(value - math.fsum(v * n for v, _, n in rows) / tokens if tokens else 0.0)
        else:
            found.append(value - mean)
    if scale == "group_std":
        squares = math.fsum(fmean((value - mean) ** 2 for value in values) for values in episodes.values())
        return [each / (math.sqrt(squares / (len(episodes) - 1)) + 1e-6) for each in found]
    if scale == "batch_std":
        return [each / (deviation(everyone) + 1e-6) for each in found]
    return found


def deviation(rows):
    """Of the values of all rows of a batch, in which an episode counts once."""
    episodes = {}
    for value, episode, _ in rows:
        episodes.setdefault(episode, []).append(value)
    if len(episodes) < 2:
        return 0.0
    mean = fmean(map(fmean, episodes.values()))
    return math.sqrt(math.fsum(fmean((v - mean) ** 2 for v in values) for values in episodes.values()) / (len(episodes) - 1))


def compared(rows, keys, centre, scale):
    """Rows against those of the same key; the whole batch gives its deviation."""
    found = [0.0] * len(rows)
    for key in set(keys):
        own = [i for i, each in enumerate(keys) if each == key]
        for i, advantage in zip(own, compare([rows[i] for i in own], rows, centre, scale), strict=True):
            found[i] = advantage
    return found


def slow(groups, config):
    """Advantages of the generated tokens of each trajectory, by its tokens and group."""
    parts = {}  # (group, episode, agent) -> its trajectories
    for g, group in enumerate(groups):
        for t in group.trajectories:
            parts.setdefault((g, t.episode, t.agent), []).append(t)
    rows, keys, calls = [], [], []
    for (g, episode, agent), chains in parts.items():
        reward = chains[0].reward + math.fsum(turn.reward for t in chains for turn in t.turns)
        rows.append((reward, (g, episode), sum(int(t.loss_mask.sum()) for t in chains)))
        keys.append((g, agent if config.agent_baselines else ""))
        played = sorted(((turn.order, c, k) for c, t in enumerate(chains) for k, turn in enumerate(t.turns)))
        following = None
        for rank, (_, c, k) in reversed(list(enumerate(played))):
            turn = chains[c].turns[k]
            following = turn.reward + (chains[0].reward if following is None else config.turn_gamma * following)
            start = chains[c].turns[k - 1].end if k else 0
            calls.append({
                "return": following, "chain": id(chains[c]), "turn": k, "rank": rank, "state": turn.state, "key": keys[-1],
                "episode": (g, episode), "tokens": int(chains[c].loss_mask[start:turn.end].sum()), "part": len(rows) - 1})
    wholes = compared(rows, keys, config.centre, config.scale)
    of_turns = {}
    chosen = [call for call in calls if call["state"]] if config.turn_credit == "state" else calls
    if config.turn_credit != "episode":
        extra = {"return": lambda call: 0, "turn": lambda call: call["rank"], "state": lambda call: call["state"]}[config.turn_credit]
        values = compared(
            [(c["return"], i if config.turn_credit == "state" else c["episode"], c["tokens"]) for i, c in enumerate(chosen)],
            [(c["key"], extra(c)) for c in chosen], config.centre, config.scale)
        of_turns = {(c["chain"], c["turn"]): value for c, value in zip(chosen, values, strict=True)}
    found = {}
    for number, ((g, _, _), chains) in enumerate(parts.items()):
        for t in chains:
            tokens = []
            for position in np.flatnonzero(t.loss_mask):
                turn = next(k for k, each in enumerate(t.turns) if position < each.end)
                own = of_turns.get((id(t), turn), 0.0)
                whole = wholes[number] if config.turn_credit in ("episode", "state") else 0.0
                tokens.append(whole + (config.state_weight if config.turn_credit == "state" else 1.0) * own)
            found[tuple(t.tokens.tolist()), g] = tokens
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("agent_baselines", [False, True])
@pytest.mark.parametrize(("turn_credit", "turn_gamma"), [("episode", 1.0), ("return", 0.9), ("turn", 0.5), ("state", 0.95)])
def test_advantages_agree_with_the_slow_version(turn_credit, turn_gamma, agent_baselines, seed):
    groups = random_episodes(seed, agents=("white", "black", ""))
    for centre in ("group", "leave_one_out", "length_weighted"):
        for scale in SCALES:
            config = AlgorithmConfig(
                centre=centre, scale=scale, turn_credit=turn_credit, turn_gamma=turn_gamma, state_weight=0.7,
                agent_baselines=agent_baselines, drop_zero_advantage=False)
            got, want = by_sequence(make_batch(groups, config=config, max_new_tokens=9)), slow(groups, config)
            assert set(got) == {key for key, values in want.items() if values}
            for key, values in got.items():
                np.testing.assert_allclose(values, want[key], rtol=1e-5, atol=1e-6)


def chain(turns, *, reward=0.0, episode=0, **fields):
    """One trajectory of turns (reward, state), each of a given and a generated token."""
    num = len(turns)
    return Trajectory(
        list(range(2 * num)), [False, True] * num, [0.0, -0.5] * num, [-1, 3] * num, reward, episode=episode,
        turns=tuple(TurnEnd(2 * k + 2, own, state) for k, (own, state) in enumerate(turns)), **fields)


def advantages(*chains, **settings):
    config = AlgorithmConfig(scale="none", drop_zero_advantage=False, **settings)
    batch = make_batch([Group("0:0", 0, chains)], config=config, max_new_tokens=9)
    return [batch.columns["advantages"][a:b].tolist() for a, b in zip(batch.target_offsets, batch.target_offsets[1:], strict=False)]


@pytest.mark.parametrize("agent_baselines", [False, True])
@pytest.mark.parametrize(("turn_credit", "turn_gamma"), [("return", 1.0), ("return", 0.5), ("turn", 0.5), ("state", 0.5)])
def test_a_group_is_flat_exactly_if_none_of_its_turns_has_an_advantage(turn_credit, turn_gamma, agent_baselines):
    config = AlgorithmConfig(
        turn_credit=turn_credit, turn_gamma=turn_gamma, agent_baselines=agent_baselines, scale="none", state_weight=0.37)
    verdicts = Counter()
    for seed in range(60):
        [group] = random_episodes(
            seed, num_groups=1, agents=("a", "b")[: 1 + seed % 2], most_chains=1 + seed % 2, most_turns=2, rewards=(0.0, 0.0, 0.0, 1.0))
        episodes = Episodes.of([group])
        turns = Turns.of(episodes, np.ones(len(episodes.trajectories)))
        totals = outcome_advantages(
            episodes.rewards[0], group_ids=episodes.compared(by_agent=agent_baselines), num_tokens=np.ones(len(episodes.part_groups)),
            centre="group", scale="none", episodes=episodes.part_episodes)
        found = turn_advantages(turns, episodes, rewards=episodes.rewards[0], advantages=totals, config=config)
        is_flat = reward_range(group, config) == 0
        assert is_flat == (not found.any())
        verdicts[is_flat] += 1
    assert min(verdicts[True], verdicts[False]) > 3, "this shows something of both"


def test_the_range_of_a_group_is_that_of_what_its_credit_compares():
    def chain(*rewards, episode, reward=0.0):
        size = len(rewards) + 1
        turns = tuple(TurnEnd(2 + number, each) for number, each in enumerate(rewards))
        mask = np.arange(size) > 0
        return Trajectory(np.ones(size), mask, -1.0 * mask, np.where(mask, 0, -1), reward, episode=episode, turns=turns)

    group = Group("0:0", 0, (chain(1.0, 0.0, episode=0), chain(0.0, 1.0, episode=1)))
    for options, wanted in (
            ({}, 0.0), ({"turn_credit": "return"}, 1.0), ({"turn_credit": "turn"}, 1.0), ({"turn_credit": "turn", "turn_gamma": 0.5}, 1.0),
            ({"turn_credit": "state"}, 0.0), ({"centre": "critic"}, 1.0), ({"credit": "mine.py:mine"}, 1.0)):
        assert reward_range(group, AlgorithmConfig(**options)) == wanted, options
    longer = Group("0:0", 0, (chain(1.0, episode=0), chain(0.0, 0.0, 5.0, episode=1, reward=-4.0)))
    assert reward_range(longer, AlgorithmConfig(turn_credit="turn")) == 0, "both first turns led to 1, and no other has one to compare with"
    assert reward_range(longer, AlgorithmConfig()) == 0 < reward_range(longer, AlgorithmConfig(centre="critic"))
    assert reward_range(Group("0:0", 0), AlgorithmConfig(turn_credit="turn")) == 0


def test_small_groups_by_hand():
    long, short = chain([(0.0, "a"), (1.0, "b"), (0.0, "a")], reward=1.0), chain([(0.0, "a")], reward=0.0, episode=1)
    assert advantages(long, short) == [[1.0] * 3, [-1.0]]
    # Returns 0.75, 1.5 and 1, whose mean is 13 / 12, against 0: the baseline is 13 / 24.
    assert advantages(long, short, turn_credit="return", turn_gamma=0.5) == [
        pytest.approx([5 / 24, 23 / 24, 11 / 24]), [pytest.approx(-13 / 24)]]
    assert advantages(long, short, turn_credit="return") == [pytest.approx([2 - 5 / 6, 2 - 5 / 6, 1 - 5 / 6]), [pytest.approx(-5 / 6)]]
    assert advantages(long, short, turn_credit="turn") == [[1.0, 0.0, 0.0], [-1.0]]
    # In state a: returns 2, 1 and 0, of mean 1; in state b nobody else has been.
    assert advantages(long, short, turn_credit="state", state_weight=0.5) == [[1.5, 1.0, 1.0], [-1.5]]


def test_a_discount_of_one_with_an_outcome_alone_gives_every_turn_the_advantage_of_its_episode():
    groups = random_episodes(5, rewards=(0.0,), agents=("a", "b"))
    rng = np.random.default_rng(1)
    groups = [
        replace(group, trajectories=tuple(replace(t, reward=float(rewards[t.episode])) for t in group.trajectories))
        for group, rewards in ((group, rng.random(9)) for group in groups)]
    for scale in SCALES[:2]:
        whole, turned = (
            by_sequence(make_batch(groups, config=AlgorithmConfig(scale=scale, turn_credit=credit), max_new_tokens=9))
            for credit in ("episode", "return"))
        assert set(whole) == set(turned) and len(whole) > 10
        for key, values in whole.items():
            np.testing.assert_allclose(values, turned[key], rtol=1e-5)


def test_turns_of_several_trajectories_follow_each_other_as_they_were_played():
    main = Trajectory([0, 1, 2, 3], [False, True, False, True], [0, -1, 0, -1], [-1, 3, -1, 3], 1.0, episode=0,
                      turns=(TurnEnd(2, order=0), TurnEnd(4, order=2)))
    asked = replace(main, tokens=[5, 6, 7, 8], turns=(TurnEnd(2, 4.0, order=1), TurnEnd(4, order=1)))
    other = chain([(0.0, "")], episode=1)
    got = advantages(main, asked, other, turn_credit="turn", turn_gamma=0.5, centre="leave_one_out")
    # Played: main, asked, asked, main. Returns from the end: 1, 0.5, 4.25, 2.125; the other's only turn has 0.
    assert got == [[2.125, 0.0], [0.0, 0.0], [-2.125]]
    unordered = [replace(t, turns=tuple(replace(turn, order=0) for turn in t.turns)) for t in (main, asked)]
    # Then: main, main, asked, asked. Returns from the end: 1, 4.5, 2.25, 1.125.
    assert advantages(*unordered, other, turn_credit="turn", turn_gamma=0.5, centre="leave_one_out")[0] == [1.125, 0.0]


def test_what_shaping_adds_falls_on_the_last_turn():
    first, second = chain([(1.0, ""), (0.0, "")], reward=1.0), chain([(0.0, ""), (0.0, "")], episode=1)
    got = advantages(first, second, turn_credit="turn", reward_scale=2.0, reward_bias=-0.5, turn_gamma=0.5)
    # Totals 3 and -1, so the last turns have 1 and -1, and the first ones 2 + 0.5 and -0.5.
    assert got == [[1.5, 1.0], [-1.5, -1.0]]


@pytest.mark.parametrize("turn_credit", ["episode", "return", "turn", "state"])
def test_agents_are_compared_with_themselves_if_so_configured(turn_credit):
    games = [chain([(0.0, "s")], reward=reward, episode=game, agent=agent)
             for game, whites in enumerate((1.0, 1.0, -1.0)) for agent, reward in (("white", whites), ("black", -whites))]
    apart = np.concatenate(advantages(*games, turn_credit=turn_credit, agent_baselines=True))
    factor = 2.0 if turn_credit == "state" else 1.0
    np.testing.assert_allclose(apart, factor * np.array([2, -2, 2, -2, -4, 4]) / 3, rtol=1e-6)
    together = np.concatenate(advantages(*games, turn_credit=turn_credit))
    np.testing.assert_allclose(together, factor * np.array([1, -1, 1, -1, -1, 1]), rtol=1e-6)


def test_the_same_batch_is_drawn_whatever_the_order_of_trajectories():
    groups = random_episodes(3, agents=("white", "black"))
    for turn_credit in ("turn", "state"):
        config = AlgorithmConfig(turn_credit=turn_credit)
        mixed = [replace(group, trajectories=tuple(sorted(group.trajectories, key=lambda t: t.episode))) for group in groups]
        first, second = (by_sequence(make_batch(each, config=config, max_new_tokens=9)) for each in (groups, mixed))
        assert set(first) == set(second)
        for key, values in first.items():
            np.testing.assert_allclose(values, second[key], rtol=1e-5, atol=1e-7)


def test_with_a_critic_rewards_of_later_turns_reach_earlier_trajectories():
    """The critic is given what falls on each token; an episode in two pieces has the sum of one in a single piece on each."""
    def falls(*chains):
        return advantages(*chains, centre="critic", objective="ppo")

    assert falls(chain([(0.5, ""), (1.0, "")], reward=2.0)) == [[0.5, 3.0]]
    first, last = chain([(0.5, "")], reward=2.0), chain([(1.0, "")], reward=2.0)
    last = replace(last, turns=(replace(last.turns[0], order=1),))
    assert falls(first, last) == [[3.5], [3.0]]
