"""Advantages over a critic's values against a slow version: step by step, from the definition of the estimates."""

import math
from dataclasses import replace

import numpy as np
import pytest

from offbeat.algorithms.critic import critic_batch, with_end_targets
from offbeat.algorithms.experience import make_batch, with_scores
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data.trajectory import Group, Trajectory, TurnEnd

P, G, SEEN = "prompt", "generated", "observed"


def trajectory(spans, reward, *, reason="stop"):
    """A trajectory of (kind, length) spans; rollout log-probabilities are 0 at generated tokens."""
    mask = [kind == G for kind, length in spans for _ in range(length)]
    return Trajectory(
        list(range(1, len(mask) + 1)), mask, [0.0] * len(mask), [0 if own else -1 for own in mask], reward, reason)


def groups_of(seed):
    """Answers of one to three turns with observations between them, some of them cut off."""
    rng = np.random.default_rng(seed)

    def one():
        spans = [(P, int(rng.integers(1, 4)))]
        for turn in range(rng.integers(1, 4)):
            spans += [(SEEN, int(rng.integers(1, 4)))] * bool(turn) + [(G, int(rng.integers(1, 5)))]
        if rng.random() < 0.3:
            spans.append((SEEN, 2))
        return trajectory(spans, float(rng.integers(0, 3)), reason="length" if rng.random() < 0.4 else "stop")

    return [Group(f"0:{i}", 0, tuple(one() for _ in range(rng.integers(1, 4)))) for i in range(3)]


def turns(mask):
    """Lists of the positions of generated tokens, by turn."""
    found = []
    for position, own in enumerate(mask):
        if own and mask[position - 1] and position - 1 in found[-1]:
            found[-1].append(position)
        elif own:
            found.append([position])
    return found


def slow(one, values, end_value, penalties, config, lam):
    """Advantage and return of each generated token, by position, from sums over later steps.

    values and penalties are by position.
    """
    steps = turns(one.loss_mask.tolist()) if config.turn_level else [[p] for p in np.flatnonzero(one.loss_mask)]
    rewards = [0.0 if config.turn_level else sum(penalties[p] for p in step) for step in steps]
    rewards[-1] += one.reward
    before = [values[step[0]] for step in steps] + [end_value]
    surprises = [r + config.gamma * before[k + 1] - before[k] for k, r in enumerate(rewards)]
    found = {}
    for k, step in enumerate(steps):
        advantage = math.fsum((config.gamma * lam) ** (later - k) * surprises[later] for later in range(k, len(steps)))
        for position in step:
            found[position] = (advantage, advantage + before[k])
    return found, len(steps)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("settings", [
    {}, {"gae_lambda": 0.9, "critic_lambda": 0.5, "gamma": 0.8}, {"gae_lambda": 0.0}, {"gae_length_alpha": 0.3}, {"turn_level": True},
    {"turn_level": True, "gae_lambda": 0.7, "gamma": 0.9, "reward_kl": 0.1}, {"reward_kl": 0.2, "gae_lambda": 0.95}])
def test_advantages_and_returns_agree_with_the_slow_version(settings, seed):
    groups, rng = groups_of(seed), np.random.default_rng(seed)
    config = AlgorithmConfig(preset="ppo", **settings)
    batch = make_batch(groups, config=config, max_new_tokens=20)
    everyone = [one for group in groups for one in group.trajectories]
    assert len(batch) == len(everyone)
    scored, added = with_end_targets(batch)
    cut_off = [one.reason == "length" for one in everyone]
    assert added.sum() == sum(cut_off) and not scored.columns["loss_weights"][added].any()
    predictions = rng.standard_normal(scored.num_targets).astype(np.float32)
    end_values = np.zeros(len(batch), np.float32)
    end_values[cut_off] = predictions[added]
    assert (scored.positions[added] == batch.offsets[1:][cut_off] - 1).all()
    ref = rng.uniform(-3, 0, batch.num_targets).astype(np.float32)
    values = predictions[~added]
    done = with_scores(batch, {"values": values, "end_values": end_values, "ref_logprobs": ref}, config)
    for i, one in enumerate(everyone):
        own = slice(batch.target_offsets[i], batch.target_offsets[i + 1])
        places = np.flatnonzero(one.loss_mask)
        by_place = dict(zip(places, values[own], strict=True))
        penalties = dict(zip(places, config.reward_kl * ref[own].astype(np.float64), strict=True))  # rollout log-probabilities are 0
        _, count = slow(one, by_place, end_values[i], penalties, config, 1.0)
        lam = max(0.0, 1 - 1 / (config.gae_length_alpha * count)) if config.gae_length_alpha else config.gae_lambda
        advantages, _ = slow(one, by_place, end_values[i], penalties, config, lam)
        targets, _ = slow(one, by_place, end_values[i], penalties, config, config.critic_lambda)
        extra = [penalties[p] if config.turn_level else 0.0 for p in places]
        np.testing.assert_allclose(
            done.columns["advantages"][own], [advantages[p][0] + more for p, more in zip(places, extra, strict=True)], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(done.columns["returns"][own], [targets[p][1] for p in places], rtol=1e-4, atol=1e-5)
    assert done.columns["values"].tolist() == values.tolist()


def test_a_critic_that_knows_the_reward_leaves_no_advantage_and_one_that_knows_nothing_gives_the_reward():
    batch = make_batch([Group("0:0", 0, (trajectory([(P, 2), (G, 3)], 2.0),))], config=(config := AlgorithmConfig(preset="ppo")),
                       max_new_tokens=9)
    none = np.zeros(1, np.float32)
    for value, advantage in ((2.0, 0.0), (0.0, 2.0)):
        done = with_scores(batch, {"values": np.full(3, value, np.float32), "end_values": none}, config)
        assert done.columns["advantages"].tolist() == [advantage] * 3 and done.columns["returns"].tolist() == [2.0] * 3


def test_the_critic_learns_the_mean_over_all_tokens_whatever_the_policy_averages_over():
    config = AlgorithmConfig(preset="ppo", loss_aggregation="sequence_mean")
    groups = [Group("0:0", 0, (trajectory([(P, 2), (G, 3)], 2.0), trajectory([(P, 2), (G, 1)], 0.0)))]
    batch = make_batch(groups, config=config, max_new_tokens=9)
    done = with_scores(batch, {"values": np.zeros(4, np.float32), "end_values": np.zeros(2, np.float32)}, config)
    learnt = critic_batch(done, value_clip=0.2)
    assert learnt.columns["loss_weights"].tolist() == [0.25] * 4 and learnt.denominator == 4
    assert (learnt.losses[0].name, learnt.losses[0].constants) == ("value", {"clip": 0.2})
    assert sorted(learnt.columns) == ["loss_weights", "returns", "values"]
    empty = make_batch([], config=config, max_new_tokens=9)
    nothing = with_scores(empty, {"values": np.zeros(0, np.float32), "end_values": np.zeros(0, np.float32)}, config)
    assert len(critic_batch(nothing, value_clip=0.0)) == 0


def test_right_answers_are_marked_for_imitation():
    config = AlgorithmConfig(preset="vapo", imitate_above=0.5)
    groups = [Group("0:0", 0, (trajectory([(P, 2), (G, 3)], 1.0), trajectory([(P, 2), (G, 2)], 0.5)))]
    batch = make_batch(groups, config=config, max_new_tokens=9)
    assert batch.columns["imitate_mask"].tolist() == [1.0] * 3 + [0.0] * 2


def test_rewards_of_turns_fall_on_their_last_tokens_and_the_outcome_on_the_last_of_all():
    one = trajectory([(P, 2), (G, 2), (SEEN, 1), (G, 3), (SEEN, 2)], 4.0)
    turned = replace(one, episode=0, turns=(TurnEnd(1, 0.25), TurnEnd(5, 1.0), TurnEnd(6, 2.0), TurnEnd(10, 8.0)))
    other = replace(trajectory([(P, 1), (G, 1)], 4.0), episode=0)
    for settings in ({}, {"turn_level": True}):
        config = AlgorithmConfig(preset="ppo", reward_scale=2.0, **settings)
        batch = make_batch([Group("0:0", 0, (turned, other))], config=config, max_new_tokens=9)
        assert batch.columns["advantages"].tolist() == [0.5, 2.0, 4.0, 0.0, 24.0, 8.0]
        values = np.array([1.0, 0.5, 0.25, -1.0, 2.0, 3.0], np.float32)
        done = with_scores(batch, {"values": values, "end_values": np.zeros(2, np.float32)}, config)
        of_tokens = [30.5, 30.0, 28.0, 24.0, 24.0, 8.0]
        returns = [30.5, 30.5, 28.0, 28.0, 28.0, 8.0] if settings else of_tokens
        baselines = [1.0, 1.0, 0.25, 0.25, 0.25, 3.0] if settings else values
        assert done.columns["returns"].tolist() == returns
        assert done.columns["advantages"].tolist() == [r - v for r, v in zip(returns, baselines, strict=True)]


def test_rewards_are_not_whitened_before_the_critic_has_seen_them():
    groups = [Group("0:0", 0, (trajectory([(P, 2), (G, 3)], 2.0), trajectory([(P, 2), (G, 1)], 0.0)))]
    scores = {"values": np.array([1, 0.5, 0.25, 0.75], np.float32), "end_values": np.zeros(2, np.float32)}
    plain, white = (
        with_scores(make_batch(groups, config=config, max_new_tokens=9), scores, config)
        for config in (AlgorithmConfig(preset="ppo"), AlgorithmConfig(preset="ppo", whiten="tokens")))
    assert white.columns["returns"].tolist() == plain.columns["returns"].tolist() == [2.0, 2.0, 2.0, 0.0]
    own = plain.columns["advantages"].astype(np.float64)
    np.testing.assert_allclose(white.columns["advantages"], (own - own.mean()) / np.sqrt(own.var() + 1e-8), rtol=1e-6)
