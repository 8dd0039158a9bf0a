"""Groups to batches: weights, advantages and shared prompts by hand; minibatches and metrics."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from episode_samples import random_episodes
from offbeat.algorithms.experience import batch_metrics, batch_stats, make_batch, sft_batch, split_minibatches, with_scores
from offbeat.algorithms.objectives import CROSS_ENTROPY, policy_loss
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data.trajectory import Group, Trajectory, TurnEnd
from offbeat.errors import DataError

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length", "prompt_mean")
ALL = AlgorithmConfig(scale="none", drop_zero_advantage=False)


def trajectory(num_generated, reward, *, prompt=(5, 6), reason="stop", version=0):
    length = len(prompt) + num_generated
    mask = np.arange(length) >= len(prompt)
    return Trajectory(
        tokens=[*prompt, *range(10, 10 + num_generated)], loss_mask=mask, rollout_logprobs=np.where(mask, -0.5, 0.0),
        versions=np.where(mask, version, -1), reward=reward, reason=reason,
    )


def group(*trajectories, prompt_id="0:0"):
    return Group(prompt_id, 0, trajectories)


# Two groups: 2 + 1 + 3 generated tokens, and 4 of a group whose rewards are equal.
MIXED = [group(trajectory(2, 1.0), trajectory(1, 0.0), trajectory(3, 0.5)), group(trajectory(4, 1.0, prompt=(7,)))]


def test_a_small_batch_by_hand():
    batch = make_batch(MIXED, config=ALL, max_new_tokens=8)
    assert batch.tokens.tolist() == [5, 6, 10, 11, 5, 6, 10, 5, 6, 10, 11, 12, 7, 10, 11, 12, 13]
    assert batch.positions.tolist() == [1, 2, 5, 8, 9, 10, 12, 13, 14, 15]
    assert batch.targets.tolist() == [10, 11, 10, 10, 11, 12, 10, 11, 12, 13]
    assert batch.columns["advantages"].tolist() == [0.5, 0.5, -0.5, *[0] * 7]
    assert batch.offsets.tolist() == [0, 4, 7, 12, 17]
    assert batch.group_ids.tolist() == [0, 0, 0, 1]
    assert batch.prefix_lens.tolist() == [2, 2, 2, 1]
    assert batch.columns["rollout_logprobs"].tolist() == [-0.5] * 10
    np.testing.assert_allclose(batch.columns["loss_weights"], 0.1)
    assert batch.losses == (policy_loss(ALL),)


@pytest.mark.parametrize(("aggregation", "weights"), [
    ("token_mean", [1 / 10] * 4),
    ("sequence_mean", [1 / 8, 1 / 4, 1 / 12, 1 / 16]),
    ("fixed_length", [1 / 32] * 4),
    ("sequence_sum", [1 / 4] * 4),
    ("prompt_mean", [1 / 12, 1 / 12, 1 / 12, 1 / 8]),
])
def test_token_weights_by_hand_and_unchanged_when_sequences_are_dropped(aggregation, weights):
    config = AlgorithmConfig(loss_aggregation=aggregation, scale="none", drop_zero_advantage=False)
    batch = make_batch(MIXED, config=config, max_new_tokens=8)
    np.testing.assert_allclose(batch.columns["loss_weights"][batch.target_offsets[1:] - 1], weights)
    kept = make_batch(MIXED, config=config.model_copy(update={"drop_zero_advantage": True}), max_new_tokens=8)
    # Left are the first group's two with an advantage: the third sits at the mean, the second group has only one.
    assert kept.group_ids.tolist() == [0, 0]
    np.testing.assert_allclose(kept.columns["loss_weights"][kept.target_offsets[1:] - 1], weights[:2])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 1.0, 0.25])), min_size=1, max_size=4), max_size=5),
       st.sampled_from(["token_mean", "sequence_mean", "fixed_length"]), st.sampled_from(["group_std", "none"]))
def test_the_batch_loss_is_that_of_plain_loops(shape, aggregation, scale):
    """With token loss 1 per token and advantage weighting, dropped sequences change nothing."""
    groups = [group(*(trajectory(n, r) for n, r in members)) for members in shape]
    config = AlgorithmConfig(loss_aggregation=aggregation, scale=scale)
    batch = make_batch(groups, config=config, max_new_tokens=6)
    total, everyone, expected = sum(n for members in shape for n, _ in members), sum(map(len, shape)), 0.0
    for members in shape:
        rewards = np.array([r for _, r in members])
        std = rewards.std(ddof=1) + 1e-6 if scale == "group_std" and len(members) > 1 else 1.0
        for n, r in members:
            per_token = {"token_mean": 1 / max(total, 1), "sequence_mean": 1 / (everyone * max(n, 1)), "fixed_length": 1 / (everyone * 6)}
            expected += n * per_token[aggregation] * (r - rewards.mean()) / std
    assert float(batch.columns["loss_weights"] @ batch.columns["advantages"]) == pytest.approx(expected, abs=1e-5)
    assert all(batch.columns["advantages"][s:e].any() for s, e in pairwise(batch.target_offsets))
    assert (batch.positions + 1 >= (batch.offsets[:-1] + batch.prefix_lens)[batch.target_sequences]).all()


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(AGGREGATIONS), st.sampled_from(["group_std", "batch_std", "none"]), st.data())
def test_a_batch_with_trajectories_that_cannot_be_used_is_the_batch_without_them(aggregation, scale, data):
    """No gradient, out of the baseline, and out of every denominator."""
    unusable = [
        trajectory(2, 0.0, reason="reward failed: timed out"), trajectory(9, 1.0, reason="too long: 11 tokens"),
        trajectory(1, float("nan")), trajectory(3, 1e308)]
    usable = [trajectory(1, 1.0), trajectory(3, 0.0), trajectory(2, 0.25)]
    config = AlgorithmConfig(loss_aggregation=aggregation, scale=scale)
    mixed = group(*data.draw(st.permutations([*usable, *unusable])))
    assert len(mixed.usable) == 3
    got = make_batch([mixed, MIXED[0]], config=config, max_new_tokens=8)
    want = make_batch([group(*mixed.usable), MIXED[0]], config=config, max_new_tokens=8)
    for name in ("tokens", "positions", "targets", "offsets", "group_ids", "prefix_lens"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    for name, values in want.columns.items():
        np.testing.assert_array_equal(got.columns[name], values)
    assert got.denominator == want.denominator


def test_the_numbers_of_the_first_two_presets_do_not_change():
    """To the last bit, as they were before there were others."""
    groups = [
        group(trajectory(2, 0.1), trajectory(1, 0.7), trajectory(3, -0.4)), group(trajectory(4, 1 / 3), trajectory(2, 1 / 3)),
        group(trajectory(1, 1e6), trajectory(2, 1.0), trajectory(3, 0.25), trajectory(2, float("nan")))]
    for preset, advantages, weight, denominator in (
        ("grpo", [-0.060522641986608505, 1.0288848876953125, -0.9683622717857361, 1.154700517654419, -0.5773496031761169,
                  -0.577350914478302], 0.0555555559694767, 18.0),
        ("dr_grpo", [-0.03333333507180214, 0.5666666626930237, -0.5333333611488342, 666666.25, -333332.75, -333333.5],
         0.01785714365541935, 56.0),
    ):
        batch = make_batch(groups, config=AlgorithmConfig(preset=preset), max_new_tokens=7)
        assert batch.columns["advantages"].tolist() == np.repeat(advantages, [2, 1, 3, 1, 2, 3]).tolist()
        assert batch.columns["loss_weights"].tolist() == [weight] * 12
        assert (batch.denominator, batch.group_ids.tolist()) == (denominator, [0, 0, 0, 2, 2, 2])
        assert set(batch.columns) == {"rollout_logprobs", "advantages", "loss_weights"}


def test_a_truncated_answer_that_is_masked_counts_in_the_baseline_and_as_a_sequence_but_has_no_tokens():
    groups = [group(trajectory(2, 1.0), trajectory(4, 0.0, reason="length")), group(trajectory(3, 1.0), trajectory(3, 0.0))]
    for aggregation, weights in (("token_mean", [1 / 8] * 8), ("sequence_mean", [1 / 8] * 2 + [1 / 12] * 6),
                                 ("prompt_mean", [1 / 4] * 2 + [1 / 12] * 6)):
        config = AlgorithmConfig(mask_truncated=True, scale="none", loss_aggregation=aggregation)
        batch = make_batch(groups, config=config, max_new_tokens=4)
        assert batch.group_ids.tolist() == [0, 1, 1]
        assert batch.columns["advantages"].tolist() == [0.5] * 5 + [-0.5] * 3
        np.testing.assert_allclose(batch.columns["loss_weights"], weights, rtol=1e-6)


def test_rewards_by_name_are_centred_and_scaled_each_by_itself():
    parts = [{"right": 1.0, "form": 10.0}, {"right": 0.0, "form": 10.0}, {"right": 1.0, "form": 30.0}, {"right": 0.0}]
    groups = [group(*(trajectory(1, each) for each in parts))]
    one, two = 0.5 / (3**-0.5 + 1e-6), (200 / 3) ** 0.5 * 2**0.5 + 1e-6
    assert two == pytest.approx(np.std([10, 10, 30], ddof=1) + 1e-6)
    want = np.array([one - (20 / 3) / two, -one - (20 / 3) / two, one + (40 / 3) / two, -one])
    batch = make_batch(groups, config=AlgorithmConfig(separate_rewards=True), max_new_tokens=4)
    np.testing.assert_allclose(batch.columns["advantages"], want, rtol=1e-5)
    batch = make_batch(groups, config=AlgorithmConfig(preset="gdpo"), max_new_tokens=4)
    np.testing.assert_allclose(batch.columns["advantages"], (want - want.mean()) / want.std(ddof=1), rtol=1e-5)
    summed = make_batch(groups, config=AlgorithmConfig(scale="none"), max_new_tokens=4)  # 11, 10, 31, 0
    np.testing.assert_allclose(summed.columns["advantages"], [-2, -3, 18, -13], rtol=1e-6)


def test_a_reward_that_is_flat_adds_nothing_beside_one_that_is_not():
    parts = [{"right": right, "form": 7.0} for right in (1.0, 0.0, 0.0)]
    groups = [group(*(trajectory(1, each) for each in parts))]
    batch = make_batch(groups, config=AlgorithmConfig(separate_rewards=True), max_new_tokens=4)
    alone = make_batch([group(*(trajectory(1, each["right"]) for each in parts))], config=AlgorithmConfig(), max_new_tokens=4)
    assert batch.columns["advantages"].tolist() == alone.columns["advantages"].tolist()


def test_imitation_takes_the_answers_above_a_reward_and_counts_all():
    groups = [group(trajectory(2, 1.0), trajectory(1, 0.0), trajectory(3, 0.5)), group(trajectory(4, 1.0), trajectory(2, 1.0))]
    batch = make_batch(groups, config=AlgorithmConfig(preset="raft", imitate_above=0.5), max_new_tokens=8)
    assert (np.diff(batch.target_offsets).tolist(), batch.columns["advantages"].tolist()) == ([2, 4, 2], [1.0] * 8)
    np.testing.assert_allclose(batch.columns["loss_weights"], 1 / 12, rtol=1e-6)
    everything = AlgorithmConfig(preset="raft", imitate_above=0.5, drop_zero_advantage=False)
    assert len(make_batch(groups, config=everything, max_new_tokens=8)) == 3


@pytest.mark.parametrize("whiten", ["none", "tokens"])
def test_the_divergence_from_the_reference_is_taken_from_the_reward_of_each_token_and_of_those_before(whiten):
    groups = [group(trajectory(3, 1.0), trajectory(1, 0.0))]
    config = AlgorithmConfig(scale="none", reward_kl=0.1, gamma=0.5, kl_loss="k3", whiten=whiten)
    before = make_batch(groups, config=config, max_new_tokens=4)
    assert before.columns["advantages"].tolist() == [0.5] * 3 + [-0.5] and not config.drop_zero_advantage
    ref = np.array([-1.5, -0.5, 0.5, -100.5], np.float32)  # log-ratios 1, 0, -1, and 100, of which 20 count
    after = with_scores(before, {"ref_logprobs": ref}, config)
    last = 0.5 + 0.1
    want = np.array([-0.1 + 0.25 * last, 0.5 * last, last, -0.5 - 2.0])
    if whiten == "tokens":
        want = (want - want.mean()) / np.sqrt(want.var() + 1e-8)
    np.testing.assert_allclose(after.columns["advantages"], want, rtol=1e-6)
    assert after.columns["ref_logprobs"].tolist() == ref.tolist()
    assert after.columns["loss_weights"].tolist() == before.columns["loss_weights"].tolist()


def test_scores_of_a_batch_of_nothing_change_nothing():
    config = AlgorithmConfig(preset="reinforce_pp")
    empty = make_batch([], config=config, max_new_tokens=4)
    assert len(with_scores(empty, {"ref_logprobs": np.zeros(0, np.float32)}, config)) == 0


def test_a_discount_counts_the_generated_tokens_that_follow():
    groups = [group(trajectory(3, 1.0), trajectory(1, 0.0))]
    batch = make_batch(groups, config=AlgorithmConfig(scale="none", gamma=0.5), max_new_tokens=4)
    assert batch.columns["advantages"].tolist() == [0.125, 0.25, 0.5, -0.5]


def test_a_reward_at_which_numbers_overflow_leaves_the_others_their_advantages():
    overflowing = group(trajectory(1, 1.0), trajectory(1, 1e308), trajectory(1, 1e308), trajectory(1, 0.0))
    batch = make_batch([overflowing], config=ALL, max_new_tokens=8)
    assert batch.columns["advantages"].tolist() == [0.5, -0.5]


def test_what_a_workflow_leaves_where_nothing_was_generated_is_not_trained_on():
    first, second = trajectory(1, 1.0), trajectory(1, 0.0)
    batch = make_batch([group(replace(first, rollout_logprobs=[np.nan, 7.0, -0.5]), second)], config=ALL, max_new_tokens=8)
    assert batch.columns["rollout_logprobs"].tolist() == [-0.5, -0.5]


def test_the_age_of_what_is_not_trained_on_does_not_count():
    wrong = trajectory(1, 1.0, version=-30, reason="wrong versions: generated token 2 is of version -30")
    metrics = batch_metrics([batch_stats([group(trajectory(1, 1.0, version=3), wrong)], version=4)])
    assert metrics["rollout/staleness_max_versions"] == 1


def test_prompts_that_differ_share_nothing():
    different = group(trajectory(1, 1.0, prompt=(1, 2)), trajectory(1, 0.0, prompt=(1, 3)))
    longer = group(trajectory(1, 1.0, prompt=(1, 2)), trajectory(1, 0.0, prompt=(1, 2, 3)))
    assert make_batch([different, longer], config=ALL, max_new_tokens=4).prefix_lens.tolist() == [0, 0, 0, 0]


def test_rejected_groups_and_empty_batches_are_batches_of_nothing():
    for groups in ([], [Group("0:1", 0, rejected="timed out")]):
        batch = make_batch(groups, config=ALL, max_new_tokens=4)
        assert (len(batch), batch.num_tokens) == (0, 0)
        assert [len(part) for part in split_minibatches(batch, 3, seed=0)] == [0]
    assert len(sft_batch([])) == 0


def test_a_trajectory_without_a_prompt_is_refused():
    with pytest.raises(DataError, match="prompt 0:9 begins with a generated token"):
        make_batch([group(trajectory(2, 1.0, prompt=()), prompt_id="0:9")], config=ALL, max_new_tokens=4)


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 5))
def test_minibatches_keep_groups_whole_and_add_up_to_the_batch(num_groups, count, seed):
    groups = [group(trajectory(1 + i, 1.0, prompt=(i, 1)), trajectory(2, 0.0, prompt=(i, 1))) for i in range(num_groups)]
    batch = make_batch(groups, config=ALL, max_new_tokens=4)
    parts = split_minibatches(batch, count, seed=seed)
    sizes = [len(np.unique(part.group_ids)) for part in parts]
    assert len(parts) == min(count, num_groups)
    assert sum(sizes) == num_groups
    assert max(sizes) - min(sizes) <= 1
    assert sum(part.columns["loss_weights"].sum() for part in parts) == pytest.approx(batch.columns["loss_weights"].sum(), rel=1e-5)
    seen = sorted((int(g), part.tokens[s:e].tolist()) for part in parts
                  for g, s, e in zip(part.group_ids, part.offsets[:-1], part.offsets[1:], strict=True))
    assert seen == sorted((int(g), batch.tokens[s:e].tolist())
                          for g, s, e in zip(batch.group_ids, batch.offsets[:-1], batch.offsets[1:], strict=True))
    again = split_minibatches(batch, count, seed=seed)
    assert [p.tokens.tolist() for p in parts] == [p.tokens.tolist() for p in again]


def test_one_minibatch_is_the_batch():
    batch = make_batch(MIXED, config=ALL, max_new_tokens=8)
    [part] = split_minibatches(batch, 1, seed=3)
    assert part.tokens.tolist() == batch.tokens.tolist()
    assert part.columns["loss_weights"].tolist() == batch.columns["loss_weights"].tolist()


def test_a_fine_tuning_batch_weighs_every_answer_token_alike():
    batch = sft_batch([(np.array([1, 2, 3]), np.array([False, True, True])), (np.array([4, 5]), np.array([False, True]))])
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(batch.columns["loss_weights"], np.ones(3) / 3)
    assert batch.targets.tolist() == [2, 3, 5] and batch.losses == (CROSS_ENTROPY,)
    assert batch.group_ids.tolist() == [0, 1]
    assert not batch.prefix_lens.any()


def test_metrics_by_hand():
    groups = [
        group(trajectory(2, 1.0, version=3), trajectory(4, 0.0, version=5, reason="length")),
        group(trajectory(1, 1.0, version=5), trajectory(1, 1.0, version=4)),
        group(trajectory(2, 0.0, version=5, reason="reward failed: ZeroDivisionError")),
        Group("0:5", 3, rejected="timed out"),
    ]
    assert batch_metrics([batch_stats(groups, version=5)]) == pytest.approx({
        "rollout/generated_tokens": 10,
        "rollout/response_mean_tokens": 2,
        "rollout/right_response_mean_tokens": 4 / 3,
        "rollout/wrong_response_mean_tokens": 4,
        "rollout/truncated_share": 0.2,
        "rollout/too_long_share": 0,
        "rollout/staleness_mean_versions": 3 / 4,
        "rollout/staleness_max_versions": 2,
        "reward/mean": 0.75,
        "reward/std": 3**0.5 / 4,
        "reward/positive_share": 0.75,
        "reward/right_share": 0.75,
        "reward/failed_share": 0.2,
        "reward/zero_advantage_group_share": 2 / 3,
    })


def test_metrics_of_parts_are_those_of_the_whole():
    groups = [*MIXED, group(trajectory(5, -2.0, version=3), trajectory(1, 0.5, reason="length", version=1))]
    parts = [batch_stats(part, version=4) for part in (groups[:1], [], groups[1:])]
    assert batch_metrics(parts) == pytest.approx(batch_metrics([batch_stats(groups, version=4)]))


def test_each_named_reward_has_metrics_of_its_own():
    def named(right, form):
        return trajectory(1, {"right": right, "form": form} if form is not None else {"right": right})

    groups = [group(named(1.0, 0.5), named(0.0, 0.5)), group(named(1.0, 0.0), named(1.0, None))]
    metrics = batch_metrics([batch_stats(groups[:1], version=0), batch_stats(groups[1:], version=0)])
    assert {name: value for name, value in metrics.items() if name.startswith("reward/right_")} == pytest.approx({
        "reward/right_mean": 0.75, "reward/right_std": 3**0.5 / 4, "reward/right_flat_group_share": 0.5, "reward/right_share": 0.75})
    assert (metrics["reward/form_mean"], metrics["reward/form_flat_group_share"]) == pytest.approx((1 / 3, 1.0))
    assert metrics["reward/form_std"] == pytest.approx(np.std([0.5, 0.5, 0.0]))
    assert metrics["reward/mean"] == pytest.approx((1.5 + 0.5 + 1.0 + 1.0) / 4)


def test_groups_of_equal_sums_are_flat_unless_named_rewards_are_separate():
    groups = [group(trajectory(1, {"right": 1.0, "form": 0.0}), trajectory(1, {"right": 0.0, "form": 1.0}))]
    for separate, share in ((False, 1), (True, 0)):
        metrics = batch_metrics([batch_stats(groups, version=0, config=AlgorithmConfig(separate_rewards=separate))])
        assert metrics["reward/zero_advantage_group_share"] == share


def test_metrics_of_nothing_leave_means_out():
    assert batch_metrics([batch_stats([], version=5)]) == {"rollout/generated_tokens": 0.0}
    silent = replace(trajectory(1, 0.0, reason="reward failed: x"), loss_mask=np.zeros(3, bool))
    assert {"reward/mean", "rollout/staleness_max_versions"}.isdisjoint(batch_metrics([batch_stats([group(silent)], version=1)]))


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "rloo", "lite_ppo", "opo", "gdpo", "gspo", "reinforce_pp", "gigpo"])
def test_an_episode_of_one_trajectory_is_the_trajectory_to_the_last_bit(preset):
    groups = [group(*(trajectory(n, r) for n, r in members)) for members in (
        [(2, 0.1), (1, 0.7), (3, -0.4)], [(4, 1 / 3), (2, 1 / 3)], [(1, 1e6), (2, 1.0), (3, 0.25), (2, float("nan"))])]
    numbered = [
        replace(each, trajectories=tuple(
            replace(t, episode=90 - i, agent="solver", turns=(TurnEnd(len(t)),)) for i, t in enumerate(each.trajectories)))
        for each in groups]
    for config in (AlgorithmConfig(preset=preset), AlgorithmConfig(preset=preset, agent_baselines=True)):
        one, other = (make_batch(each, config=config, max_new_tokens=7) for each in (groups, numbered))
        assert one.denominator == other.denominator
        for name, values in one.columns.items():
            assert values.tobytes() == other.columns[name].tobytes(), name


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_episode_weighs_as_much_as_another_however_many_trajectories_it_has(aggregation):
    groups = random_episodes(2, num_groups=4)
    config = AlgorithmConfig(loss_aggregation=aggregation, drop_zero_advantage=False)
    batch = make_batch(groups, config=config, max_new_tokens=9)
    episodes = [(g, chains) for g, each in enumerate(groups) for chains in each.episodes]
    tokens = {(g, chains[0].episode): sum(int(t.loss_mask.sum()) for t in chains) for g, chains in episodes}
    of_prompts = [sum(n for (g, _), n in tokens.items() if g == prompt) for prompt in range(4)]
    want = {}
    for g, chains in episodes:
        own = tokens[g, chains[0].episode]
        weight = {
            "token_mean": 1 / sum(tokens.values()), "sequence_mean": 1 / (len(episodes) * max(own, 1)), "sequence_sum": 1 / len(episodes),
            "fixed_length": 1 / (len(episodes) * 9), "prompt_mean": 1 / (len(groups) * max(of_prompts[g], 1))}[aggregation]
        want |= {(g, tuple(t.tokens.tolist())): weight for t in chains}
    for i, (a, b) in enumerate(pairwise(batch.offsets)):
        own = slice(*batch.target_offsets[i:i + 2])
        np.testing.assert_allclose(batch.columns["loss_weights"][own], want[batch.group_ids[i], tuple(batch.tokens[a:b])], rtol=1e-6)
    if aggregation == "sequence_mean":
        assert batch.columns["loss_weights"].sum() == pytest.approx(sum(n > 0 for n in tokens.values()) / len(episodes))


def test_baseline_and_deviation_count_an_episode_once():
    chains = [replace(trajectory(2, 1.0, prompt=prompt), episode=0) for prompt in ((5,), (6, 7), (8,))]
    split = group(*chains, replace(trajectory(1, 0.0), episode=1), replace(trajectory(1, 0.0), episode=2))
    batch = make_batch([split], config=AlgorithmConfig(), max_new_tokens=9)
    whole = make_batch([group(trajectory(2, 1.0), trajectory(1, 0.0), trajectory(1, 0.0))], config=AlgorithmConfig(), max_new_tokens=9)
    assert batch.columns["advantages"].tolist() == [whole.columns["advantages"][0]] * 6 + whole.columns["advantages"][2:].tolist()


def test_an_episode_of_which_one_trajectory_cannot_be_used_is_left_out_as_a_whole():
    left = [replace(trajectory(2, 0.0), episode=1), trajectory(1, 1.0)]
    broken = [replace(trajectory(3, 1.0), episode=4), replace(trajectory(1, 1.0, reason="too long: 9 tokens"), episode=4)]
    for aggregation in AGGREGATIONS:
        config = AlgorithmConfig(loss_aggregation=aggregation)
        got, want = (make_batch([group(*each)], config=config, max_new_tokens=9) for each in ([left[0], *broken, left[1]], left))
        assert got.denominator == want.denominator
        for name, values in want.columns.items():
            np.testing.assert_array_equal(got.columns[name], values)


def test_rewards_of_turns_are_added_to_that_of_the_episode_also_beside_names():
    def turned(reward, *rewards, **fields):
        base = trajectory(4, reward)
        return replace(base, turns=tuple(TurnEnd(4 + k, own) for k, own in enumerate(rewards)), **fields)

    chains = (turned(1.0, 0.5, 0.0, 0.25, episode=3), turned(1.0, 0.0, 0.0, 0.25, episode=3), turned(0.0, 0.0, 0.0, 0.0))
    batch = make_batch([group(*chains)], config=ALL, max_new_tokens=9)
    assert batch.columns["advantages"].tolist() == [1.0] * 8 + [-1.0] * 4
    named = (turned({"right": 1.0}, 0.0, 0.5, 0.0), turned({"right": 1.0}, 0.0, 0.0, 0.0))
    apart = make_batch([group(*named)], config=AlgorithmConfig(separate_rewards=True, scale="none"), max_new_tokens=9)
    assert apart.columns["advantages"].tolist() == [0.25] * 4 + [-0.25] * 4
    added = make_batch([group(*named)], config=AlgorithmConfig(scale="none"), max_new_tokens=9)
    assert added.columns["advantages"].tolist() == [0.25] * 4 + [-0.25] * 4


def test_metrics_count_episodes_and_tell_of_agents_where_there_are_some():
    chains = [replace(trajectory(2, 1.0, version=3), episode=1, turns=(TurnEnd(3, 0.5), TurnEnd(4))),
              replace(trajectory(3, 1.0, version=1, reason="length"), episode=1, malformed_calls=2),
              replace(trajectory(1, 0.0, version=4), episode=2), trajectory(2, 0.5, version=4)]
    metrics = batch_metrics([batch_stats([group(*chains)], version=5)])
    want = {
        "rollout/generated_tokens": 8, "rollout/response_mean_tokens": 8 / 3, "rollout/right_response_mean_tokens": 5,
        "rollout/wrong_response_mean_tokens": 1.5, "rollout/truncated_share": 1 / 3, "rollout/staleness_mean_versions": 2,
        "rollout/staleness_max_versions": 4, "rollout/turns_mean": 5 / 3, "rollout/chains_mean": 4 / 3,
        "rollout/malformed_call_share": 1 / 3, "reward/mean": 2 / 3}
    assert {name: metrics[name] for name in want} == pytest.approx(want)
    single = batch_metrics([batch_stats([group(replace(trajectory(2, 1.0), episode=1, turns=(TurnEnd(4),)))], version=5)])
    assert not [name for name in single if name.endswith(("turns_mean", "chains_mean", "malformed_call_share"))]
    game = [replace(trajectory(1, reward), episode=1, agent=agent) for agent, reward in (("white", 1.0), ("black", -1.0))]
    metrics = batch_metrics([batch_stats([group(*game)], version=5)])
    assert (metrics["reward/mean"], metrics["reward/agent_white_mean"], metrics["reward/agent_black_mean"]) == (0.0, 1.0, -1.0)


def test_a_group_in_which_each_agent_has_one_reward_has_no_advantage_if_agents_are_compared_with_themselves():
    game = group(*(replace(trajectory(1, reward), episode=number, agent=agent)
                   for number in (1, 2) for agent, reward in (("white", 1.0), ("black", -1.0))))
    for by_agent in (False, True):
        config = AlgorithmConfig(agent_baselines=by_agent)
        metrics = batch_metrics([batch_stats([game], version=0, config=config)])
        assert metrics["reward/zero_advantage_group_share"] == by_agent
        assert bool(len(make_batch([game], config=config, max_new_tokens=9))) != by_agent
