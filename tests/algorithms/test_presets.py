"""Advantages and loss weights of every preset against a slow version: loops over single samples, from the formulas of the papers."""

import math
import statistics
from dataclasses import dataclass

import numpy as np
import pytest

from offbeat.algorithms.distillation import TeacherScores, with_teacher
from offbeat.algorithms.experience import make_batch, with_scores
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.presets import PRESETS
from offbeat.data.trajectory import Group, Trajectory

LIMIT = 10
"""Tokens at which answers are cut off."""

END_VALUE = -0.5
"""What the critic expects after an answer that was cut off; before a token it expects what the reference's log-probability is."""

MEAN_AND_STD = ("grpo", "dapo", "gigpo", "gspo", "luspo", "cispo", "sapo", "gmpo", "tis", "icepop", "mis", "kpop", "m2po")
MEAN = ("dr_grpo", "dppo", "prime_rl", "aipo", "deepseek_v32")
OTHERS = (
    "ppo", "vapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "lite_ppo", "scale_rl", "max_rl", "opo", "gdpo", "raft", "opd", "sdft")
AGGREGATIONS = {
    "dr_grpo": "fixed_length", "gspo": "sequence_mean", "sapo": "sequence_mean", "gmpo": "sequence_mean", "luspo": "sequence_sum",
    "scale_rl": "prompt_mean", "deepseek_v32": "sequence_mean"}


@dataclass(frozen=True)
class Sample:
    """An answer of `length` tokens, which was cut off if that is `LIMIT`, with two rewards by name; None has no reward."""

    length: int
    rewards: tuple[float, float] | None
    rollout: tuple[float, ...]
    ref: tuple[float, ...]

    @property
    def reward(self):
        return math.fsum(self.rewards)


def random_groups(seed):
    """Groups of unequal sizes, among them ones with equal rewards, single samples, empty answers and missing rewards."""
    rng = np.random.default_rng(seed)

    def sample(rewards):
        length = int(rng.integers(0, LIMIT + 1))
        logprobs = rng.uniform(-30, 0, (2, length)).astype(np.float32).tolist()
        chosen = None if rng.random() < 0.1 else tuple(rng.choice(rewards, 2).tolist())
        return Sample(length, chosen, tuple(logprobs[0]), tuple(logprobs[1]))

    kinds = ([0.0, 1.0], [0.0, 0.25, 1.0, 3.5], [0.1], [0.0, 1e6, 2.0])
    return [[sample(kinds[rng.integers(len(kinds))]) for _ in range(rng.integers(1, 7))] for _ in range(rng.integers(0, 5))]


def mean(values):
    return math.fsum(values) / len(values)


def std(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


def outcome(preset, group, sample, rewards, everyone):
    """The advantage of one sample: `rewards` are those of its group, `everyone` all of the batch."""
    own = sample.reward
    if preset == "dapo":
        penalty = {9: 0.5, 10: 1.0}
        rewards = [each.reward - penalty.get(each.length, 0.0) for each in group]
        own -= penalty.get(sample.length, 0.0)
    if preset == "reinforce_pp":
        return own
    if preset in ("opd", "sdft", "ppo", "vapo"):
        return 0.0  # replaced
    if preset == "raft":
        return 1.0 if own > 0 else 0.0
    if preset == "gdpo":
        columns = list(zip(*(each.rewards for each in group), strict=True))
        return sum(0.0 if len(set(column)) == 1 else (part - mean(column)) / (std(column) + 1e-6)
                   for part, column in zip(sample.rewards, columns, strict=True))
    if len(set(rewards)) == 1:
        return 0.0
    if preset in MEAN_AND_STD:
        return (own - mean(rewards)) / (std(rewards) + 1e-6)
    if preset in ("lite_ppo", "scale_rl"):
        return (own - mean(rewards)) / (std(everyone) + 1e-6)
    if preset == "max_rl":
        return (own - mean(rewards)) / mean(rewards)
    if preset == "rloo":
        others = [each.reward for each in group if each is not sample]
        return own - mean(others)
    if preset == "opo":
        tokens = sum(each.length for each in group)
        return own - math.fsum(each.reward * each.length for each in group) / tokens if tokens else 0.0
    assert preset in MEAN or preset == "reinforce_pp_baseline"
    return own - mean(rewards)


def slow(preset, groups):
    """Of each sample: its tokens' advantages, and the weight of one of them."""
    groups = [[each for each in group if each.rewards is not None] for group in groups]
    everyone = [each.reward for group in groups for each in group]
    trained = {id(each): 0 if preset == "dapo" and each.length == LIMIT else each.length for group in groups for each in group}
    found = {}
    for group in groups:
        for sample in group:
            found[id(sample)] = [outcome(preset, group, sample, [each.reward for each in group], everyone)] * trained[id(sample)]
    if preset == "gdpo":
        sums = [outcome(preset, group, sample, [], []) for group in groups for sample in group]
        flat = len(set(sums)) <= 1
        found = {key: [0.0 if flat else (v - mean(sums)) / (std(sums) + 1e-6) for v in values] for key, values in found.items()}
    if preset in ("opd", "sdft"):  # whose teacher says what the reference of other presets says
        for group in groups:
            for sample in group:
                found[id(sample)] = [max(-20.0, min(20.0, p - q)) for q, p in zip(sample.rollout, sample.ref, strict=True)]
    if preset == "reinforce_pp":
        for group in groups:
            for sample in group:
                log_ratios = [max(-20.0, min(20.0, q - p)) for q, p in zip(sample.rollout, sample.ref, strict=True)]
                found[id(sample)] = [sample.reward - 0.01 * math.fsum(log_ratios[t:]) for t in range(sample.length)]
    if preset.startswith("reinforce_pp"):
        tokens = [v for values in found.values() for v in values]
        flat = len(set(tokens)) <= 1
        found = {key: [0.0 if flat else (v - mean(tokens)) / math.sqrt(statistics.pvariance(tokens) + 1e-8) for v in values]
                 for key, values in found.items()}
    if preset in ("ppo", "vapo"):
        for group in groups:
            for sample in group:
                lam = max(0.0, 1 - 1 / (0.05 * max(sample.length, 1))) if preset == "vapo" else 1.0
                before = [*sample.ref, END_VALUE if sample.length == LIMIT else 0.0]
                surprises = [before[t + 1] - before[t] + (sample.reward if t + 1 == sample.length else 0.0) for t in range(sample.length)]
                found[id(sample)] = [
                    math.fsum(lam ** (later - t) * surprises[later] for later in range(t, sample.length)) for t in range(sample.length)]
    num_tokens, num_samples, num_groups = sum(trained.values()), len(trained), sum(map(bool, groups))
    weights = {}
    for group in groups:
        for sample in group:
            weights[id(sample)] = 1 / max(1, {
                "token_mean": num_tokens, "sequence_mean": num_samples * trained[id(sample)], "sequence_sum": num_samples,
                "fixed_length": num_samples * LIMIT, "prompt_mean": num_groups * sum(trained[id(each)] for each in group),
            }[AGGREGATIONS.get(preset, "token_mean")])
    return found, weights


def batch_of(preset, groups):
    """The batch, scored by the reference where the preset asks for it; a sample's first token says which one it is."""
    config = AlgorithmConfig(preset=preset)
    everyone = [sample for group in groups for sample in group]

    def played(sample):
        index = next(i for i, each in enumerate(everyone) if each is sample)
        mask = [False] + [True] * sample.length
        reward = math.nan if sample.rewards is None else {"right": sample.rewards[0], "form": sample.rewards[1]}
        return Trajectory(
            [index] + [1] * sample.length, mask, [0.0, *sample.rollout], [-1] + [0] * sample.length, reward,
            "length" if sample.length == LIMIT else "stop")

    batch = make_batch([Group(f"0:{i}", 0, tuple(map(played, group))) for i, group in enumerate(groups)], config=config,
                       max_new_tokens=LIMIT)
    kept = [everyone[i] for i in batch.tokens[batch.offsets[:-1]]]
    ref = np.array([p for sample in kept for p in sample.ref], np.float32)
    if config.needs_teacher:
        batch = with_teacher(batch, TeacherScores.of_targets(ref, np.zeros(len(batch), np.bool_)), config)
    if config.compares_reference or config.needs_critic:
        end_values = np.array([END_VALUE if sample.length == LIMIT else 0.0 for sample in kept], np.float32)
        batch = with_scores(batch, {"ref_logprobs": ref, "values": ref, "end_values": end_values}, config)
    assert ("ref_logprobs" in batch.columns) == (config.kl_loss != "none")
    return batch, kept


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_agrees_with_the_slow_version(preset, seed):
    groups = random_groups(seed)
    advantages, weights = slow(preset, groups)
    batch, kept = batch_of(preset, groups)
    for i, sample in enumerate(kept):
        own = slice(batch.target_offsets[i], batch.target_offsets[i + 1])
        np.testing.assert_allclose(batch.columns["advantages"][own], advantages.pop(id(sample)), rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(batch.columns["loss_weights"][own], weights[id(sample)], rtol=1e-5)
    for left_out in advantages.values():
        np.testing.assert_allclose(left_out, 0, atol=2e-4)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_slow_version_knows_every_preset(preset):
    assert [preset in names for names in (MEAN_AND_STD, MEAN, OTHERS)].count(True) == 1


@pytest.mark.parametrize("preset", [name for name, preset in PRESETS.items() if AlgorithmConfig(preset=name).drop_zero_advantage])
def test_groups_without_a_signal_are_left_out_unless_the_batch_is_the_baseline(preset):
    flat = [[Sample(2, (1.0, 0.0), (0.0, 0.0), (0.0, 0.0)) for _ in range(3)], [Sample(1, (0.25, 0.0), (0.0,), (0.0,))]]
    batch, _ = batch_of(preset, flat)
    assert len(batch) == (4 if preset == "raft" else 0)
