"""The table of algorithms: each preset is a row of settings of [algorithm], with its source and when to use it. Data only.

A row holds the settings that differ from the defaults of `config.algorithms.AlgorithmConfig`, those of `grpo`. A preset follows its
source: the policy in its ratio is the one that sampled (`_PUBLISHED`), and staleness and an engine's mismatch are corrected as there.
`Preset.differs` names exceptions. Adding a preset touches this table alone, docs/algorithms.md, which explains the formulas, and
tests/losses/test_published.py, which states in which way its gradient differs from REINFORCE's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Preset:
    """One named algorithm.

    Attributes:
        source: arXiv number of the paper that defines it, such as "2402.03300", or the project whose form it is, such as "TRL".
        use: one sentence that says when to choose it.
        settings: settings of [algorithm] that differ from the defaults.
        differs: its differences from the source; "" if there are none.
    """

    source: str
    use: str
    settings: Mapping[str, Any]
    differs: str = ""


_UNSCALED = {"scale": "none"}
_PUBLISHED = {"anchor": "rollout", "weight": "none"}  # one ratio, of the current policy to the one that sampled
_MASKED = "Tokens are weighted by w and dropped above 5; {}."

PRESETS: Mapping[str, Preset] = MappingProxyType({
    "grpo": Preset(
        "2402.03300", "The default, which is robust with any rewards. These are GRPO's advantages in the token-mean form without a KL"
        " term, which is what the field now means by the name; the paper's own form is loss_aggregation = \"sequence_mean\" with kl_loss"
        " = \"k3\".", {},
        _MASKED.format("in the paper the ratio is to the policy that sampled, answers have equal weight, and there is a KL term")),
    "dr_grpo": Preset(
        "2503.20783", "When answers must not grow or shrink because of how the loss is normalised: it divides neither by the deviation"
        " nor by an answer's length.", {**_PUBLISHED, **_UNSCALED, "loss_aggregation": "fixed_length"}),
    "rloo": Preset(
        "2402.14740", "When an unbiased baseline matters more than a scale that is equal for all prompts, as with few samples per prompt.",
        {**_UNSCALED, "centre": "leave_one_out"}, _MASKED.format("the paper's samples are always fresh")),
    "reinforce_pp": Preset(
        "2501.03262", "When each prompt has few samples or only one: the whole batch is the baseline, and a KL penalty in the reward"
        " keeps the policy near the reference.", {**_PUBLISHED, **_UNSCALED, "centre": "none", "whiten": "tokens", "reward_kl": 0.01}),
    "reinforce_pp_baseline": Preset(
        "2501.03262", "When prompts differ in difficulty but a group's deviation is too noisy a scale: centred by group, scaled by batch.",
        {**_PUBLISHED, **_UNSCALED, "whiten": "tokens", "kl_loss": "k2", "kl_coefficient": 0.01}),
    "dapo": Preset(
        "2503.14476", "For long reasoning with verifiable rewards: it clips less upwards, so that entropy lasts, is lenient with answers"
        " that are cut off, and replaces prompts whose rewards are all equal.",
        {**_PUBLISHED, "clip_high": 0.28, "overlong_buffer_share": 0.2, "mask_truncated": True, "dynamic_sampling": True}),
    "ppo": Preset(
        "1707.06347", "With one sample per prompt, long episodes or intermediate rewards: a critic estimates the value of every token; it"
        " costs a second model of the policy's size.", {**_PUBLISHED, **_UNSCALED, "centre": "critic"},
        "gae_lambda is 1, which suits one reward at the end of an answer; the paper has 0.95."),
    "vapo": Preset(
        "2504.05118", "As ppo, for long reasoning with verifiable rewards; set critic.warmup_steps, so that values are meaningful before"
        " the policy follows them.",
        {**_PUBLISHED, **_UNSCALED, "centre": "critic", "clip_high": 0.28, "gae_length_alpha": 0.05, "imitation_coefficient": 0.1},
        "The critic is trained beforehand only with critic.warmup_steps."),
    "lite_ppo": Preset(
        "2508.08221", "When many groups have nearly equal rewards, so that dividing by a group's own deviation would amplify small"
        " differences.",
        {**_PUBLISHED, "scale": "batch_std"}),
    "max_rl": Preset(
        "2602.02710", "When hard prompts should count most: rewards must be at least 0, and a prompt is weighted by about 1 / its pass"
        " rate.",
        {**_PUBLISHED, "scale": "group_mean"}, "The paper's samples are fresh; PPO's clip for stale ones is ours."),
    "opo": Preset(
        "2505.23585", "For strictly on-policy runs (rollout.max_head_offpolicyness = 0): the minimum-variance baseline if a gradient"
        " grows with its answer's length.", {**_UNSCALED, "centre": "length_weighted"},
        _MASKED.format("the paper's samples are always fresh")),
    "gdpo": Preset(
        "2601.05242", "With several named rewards (such as correct and format), none of which should dominate the others.",
        {**_PUBLISHED, "separate_rewards": True, "whiten": "sequences"}),
    "gigpo": Preset(
        "2505.10978", "For agents whose episodes pass through the same states again, such as shops, games and websites: a turn's return"
        " is also compared with other turns in the same state; workflows have to name states.",
        {**_PUBLISHED, "turn_credit": "state", "turn_gamma": 0.95}, "The paper adds a KL loss, which is off."),
    "gspo": Preset(
        "2507.18071", "For mixtures of experts and long answers, where ratios of single tokens are noisy: there is one ratio per sequence.",
        {**_PUBLISHED, "objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "loss_aggregation": "sequence_mean"}),
    "luspo": Preset(
        "2602.05261", "As gspo, where its answers become shorter than they should: long answers are weighted by their length.",
        {**_PUBLISHED, "objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "loss_aggregation": "sequence_sum"}),
    "cispo": Preset(
        "2506.13585", "When PPO clips away rare but decisive tokens: the weight is clipped, and every token keeps its gradient.",
        {**_PUBLISHED, "objective": "cispo", "clip_low": 1.0, "clip_high": 4.0}, "The paper does not say its upper bound; 5 is ScaleRL's."),
    "scale_rl": Preset(
        "2510.13786", "For long, large and asynchronous runs: CISPO with its ratio taken to the policy that sampled, and the same weight"
        " for each prompt.",
        {**_PUBLISHED, "scale": "batch_std", "objective": "cispo", "clip_low": 1.0, "clip_high": 4.0, "loss_aggregation": "prompt_mean",
         "float32_head": True},
        "Prompts of equal rewards stay in the mean over prompts; that solved prompts are not drawn again is curriculum.leave_at = 0.9."),
    "sapo": Preset(
        "2511.20347", "When PPO's clip switches tokens off too abruptly: a smooth gate, tighter for negative advantages.",
        {**_PUBLISHED, "objective": "sapo", "loss_aggregation": "sequence_mean"}),
    "gmpo": Preset(
        "2507.20673", "When a few extreme ratios make the loss jump: the geometric mean over an answer is robust to them.",
        {**_PUBLISHED, "objective": "gmpo", "clip_low": 0.4, "clip_high": 0.4, "loss_aggregation": "sequence_mean"}),
    "tis": Preset(
        "slime", "When engine and trainer differ slightly, as with quantised engines: truncated importance weights keep all tokens.",
        {"weight": "clamp", "weight_high": 2.0}),
    "icepop": Preset(
        "2510.18855", "When engine and trainer differ much on some tokens, as with mixtures of experts: those tokens are dropped.",
        {"weight_low": 0.5}),
    "mis": Preset(
        "TRL", "When answers are short and a mismatch at one token spoils the whole answer: whole answers are dropped.",
        {"weight_level": "sequence", "weight_low": 0.5, "weight_high": 2.0}, "TRL has no lower bound, and 3 as upper one."),
    "kpop": Preset(
        "2606.15079", "As icepop, where likely and unlikely tokens should be judged by how much they change the distribution.",
        {"weight": "none", "filters": ({"metric": "binary_kl", "high": 2.0},)}),
    "dppo": Preset(
        "2602.04879", "When ratios of rare tokens trigger the clip although probabilities hardly move: the trust region is on"
        " probabilities.",
        {**_PUBLISHED, **_UNSCALED, "objective": "dppo"}),
    "prime_rl": Preset(
        "prime-rl", "For asynchronous runs as in prime-rl: dppo with a small penalty on the distance from the policy that sampled.",
        {**_PUBLISHED, **_UNSCALED, "objective": "dppo", "drift_coefficient": 1e-3}),
    "aipo": Preset(
        "2505.24034", "For strongly asynchronous runs: truncated importance weights relative to the policy that sampled.",
        {**_PUBLISHED, **_UNSCALED, "objective": "cispo", "clip_low": 1.0, "clip_high": 3.0},
        "The paper uses bounds from 2 to 10; here it is 4."),
    "m2po": Preset(
        "2510.01161", "For samples that are many versions old: it drops only as many harmful tokens as are needed to bring the second"
        " moment down.",
        {**_PUBLISHED, "objective": "importance_sampling", "filters": ({"metric": "m2", "high": 0.04},)}),
    "deepseek_v32": Preset(
        "2512.02556", "When the policy must stay near the reference: it has an unbiased KL term, and drops stale answers with a negative"
        " advantage.",
        {**_PUBLISHED, **_UNSCALED, "filters": ({"metric": "opsm", "level": "sequence", "high": 0.5},), "kl_loss": "ratio_k3",
         "loss_aggregation": "sequence_mean"},
        "The paper does not say its threshold; 0.5 is TRL's example. An engine's experts are kept with model.route_replay."),
    "opd": Preset(
        "2306.13649", "To distil a larger model into a smaller one on the smaller one's own answers: every token has a signal; set"
        " teacher.path or teacher.url.", {
            **_PUBLISHED, **_UNSCALED, "centre": "none", "objective": "importance_sampling",
            "filters": ({"metric": "tv", "low": -0.2},), "teacher": "model"},
        "The paper compares whole distributions (teacher.top_k is near that), and has no filter; each sampled token as here is Tinker's."),
    "sdft": Preset(
        "2601.19897", "To learn from the answers of a dataset without forgetting much else: the policy, shown the answer, teaches itself"
        " on its own samples.", {
            **_PUBLISHED, **_UNSCALED, "centre": "none", "objective": "importance_sampling",
            "filters": ({"metric": "tv", "low": -0.2},), "teacher": "reference"},
        "The paper compares whole distributions, and its teacher is a moving average of the policy; the filter is ours."),
    "raft": Preset(
        "2304.06767", "As a simple and stable baseline: it imitates the answers whose reward is above `imitate_above`, and ignores the"
        " others.",
        {"weight": "none", **_UNSCALED, "centre": "none", "objective": "cross_entropy"},
        "The paper takes the best answer of each prompt, and not all above a bound."),
})
"""All presets by name."""
