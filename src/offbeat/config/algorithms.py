"""[algorithm]: how rewards become advantages, and advantages a loss. A preset of `config.presets` fills in settings that are not given."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import field_validator, model_validator

from offbeat.config.base import Change, Section, field
from offbeat.config.loss_terms import FILTERS, OWN_FILTERS
from offbeat.config.objectives import is_own, names_for, objective_of
from offbeat.config.presets import PRESETS

BATCH_STATISTICS = ("batch_std", "tokens", "sequences")
"""Values of `scale` and `whiten` that need the rewards of the whole batch."""

Centre = Literal["group", "leave_one_out", "length_weighted", "critic", "none"]
Scale = Literal["none", "group_std", "batch_std", "group_mean"]
"""Baselines and divisors of rewards; `algorithms.credit.outcome_advantages` computes each."""

_OBJECTIVES = names_for("algorithm")
_OLD_NAMES = ("scale_by_std", "behave_weight", "behave_cap")


class FilterConfig(Section):
    """A rule that takes tokens or sequences out of the loss; no denominator changes. Values equal to a bound are kept."""

    metric: Literal[OWN_FILTERS] = field(  # pyright: ignore[reportInvalidTypeForm]
        ..., "What is measured between proximal and behaviour policy: the ratio, an estimate of KL, the larger of two Bernoulli KLs, the"
        " difference of probabilities; or the rule of OPSM or of M2PO.")
    level: Literal["token", "sequence"] = field("token", "Whether single tokens or whole sequences are dropped.")
    aggregate: Literal["mean", "sum", "max"] = field("mean", "How tokens become one number for a sequence; ratios do as logarithms.")
    low: float = field(-1e9, "Smallest value that is kept; the default keeps all, since log-ratios are limited to 20.")
    high: float = field(1e9, "Largest value that is kept; the default keeps all.")


class AlgorithmConfig(Section):
    """Credit, trust region, loss and regularisers. `offbeat docs algorithms` has the formulas, and when to use which preset."""

    on_resume = Change.TOLD
    read_by = ("rl",)

    preset: Literal[tuple(PRESETS)] = field(  # pyright: ignore[reportInvalidTypeForm]
        "grpo", "Named set of defaults for this section; `offbeat docs algorithms` says when to use which.", basic=True)

    centre: Centre = field(
        "group", "Baseline subtracted from a reward: the mean of its group; the mean of the group's other members; the group's mean"
        " weighted by answer length; the values of a critic, configured in [critic]; or nothing.")
    scale: Scale = field(
        "group_std", "Divisor of the centred rewards: none; the standard deviation of the group or of the batch, each plus 1e-6; or the"
        " group's mean, for rewards of at least 0.")
    whiten: Literal["none", "tokens", "sequences"] = field(
        "none", "Normalise advantages to mean 0 and standard deviation 1 over all trained tokens, or all sequences, of the batch.")
    separate_rewards: bool = field(
        False, "Centre and scale each named reward separately and sum the results; false sums the rewards first.")
    gamma: float = field(1.0, "Discount factor per generated token; 1 gives all tokens of an answer the same credit.", gt=0, le=1)
    gae_lambda: float = field(
        1.0, "With a critic: the lambda of generalised advantage estimation (arXiv:1506.02438); 1 uses observed rewards alone, smaller"
        " values rely more on the critic.",
        ge=0, le=1)
    critic_lambda: float = field(
        1.0, "With a critic: the lambda of the returns that the critic learns; 1 uses observed returns, which do not depend on the critic's"
        " errors.", ge=0, le=1)
    gae_length_alpha: float = field(
        0.0, "With a critic: set gae_lambda to 1 - 1 / (alpha n) for an answer of n tokens, at least 0 (VAPO: 0.05); 0 is off.", ge=0)
    turn_level: bool = field(
        False, "With a critic: treat each turn (the tokens generated between two observations) as one step, whose tokens share an"
        " advantage.")
    turn_credit: Literal["episode", "return", "turn", "state"] = field(
        "episode", "Credit of a turn's tokens: the reward of the whole episode; the return from the turn on, compared with all turns of the"
        " group or with those of the same index; or the episode's reward plus the turn's return compared with turns in the same state"
        " (GiGPO).")
    turn_gamma: float = field(
        1.0, "With turn_credit other than \"episode\": discount factor per turn (0.9 in AReaL's examples, 0.95 in GiGPO).", gt=0, le=1)
    state_weight: float = field(
        1.0, "With turn_credit = \"state\": factor of the comparison with turns in the same state; the paper has 1.", gt=0)
    agent_baselines: bool = field(
        False, "Where several agents play an episode, such as the two sides of a game, compare each agent's rewards only with those of the"
        " same agent; false compares all rewards of a group.")
    credit: str = field(
        "", "Function of your own that gives advantages, as 'path/to/file.py:function' (`offbeat docs algorithms`); it replaces centre and"
        " scale.",
        on_resume=Change.CODE)
    imitate_above: float = field(
        0.0, "With objective = \"cross_entropy\" or an imitation_coefficient: imitate samples whose reward is above this value; by default,"
        " every reward above 0 counts as success.")

    reward_bias: float = field(0.0, "Added to each reward first.")
    reward_scale: float = field(1.0, "Multiplies rewards after the bias.", gt=0)
    reward_clip: float = field(0.0, "Largest absolute value of a reward after bias and scale; 0 is no limit.", ge=0)
    overlong_buffer_share: float = field(
        0.0, "Share of max_new_tokens, at its end, over which overlong_penalty grows from 0 to its full size (DAPO: 4096 of 20480 tokens);"
        " 0 is off.", ge=0, le=1)
    overlong_penalty: float = field(1.0, "Penalty subtracted from the reward of an answer of max_new_tokens, in units of the reward.", ge=0)
    length_penalty: float = field(
        0.0, "Share of the group's mean reward that its longest answer loses; shorter ones lose less, in proportion to length; 0 is off.",
        ge=0, le=1)
    malformed_penalty: float = field(
        0.0, "Penalty subtracted from an episode's reward for each tool call that could not be parsed, in units of the reward.", ge=0)
    mask_truncated: bool = field(
        False, "Do not train on samples cut off at max_new_tokens, nor on any turn of an episode that ended this way; they still count in"
        " their group's baseline.")
    dynamic_sampling: bool = field(
        False, "Reject groups whose rewards (with turn_credit, the returns that it compares) are all equal, and draw other prompts in their"
        " place until the batch is full.")
    equal_rewards_tolerance: float = field(
        1e-6, "Largest difference that dynamic_sampling treats as equal; scores of judges may need more.", ge=0)
    max_draw_batches: float = field(
        10.0, "Most batches of groups that a step draws with dynamic_sampling; after that it accepts any group, so that a run whose prompts"
        " are all solved or all hopeless continues.", ge=1)

    anchor: Literal["prox", "rollout"] = field(
        "prox", "Policy in the denominator of the ratio: the trainer's at the start of the step (proximal), or the one that sampled"
        " (rollout).")
    weight: Literal["none", "ratio", "clamp", "mask"] = field(
        "mask", "Importance weight for stale tokens, the ratio of the proximal to the behaviour policy: not used; used as it is; clamped to"
        " weight_low..weight_high; or 0 outside that range.")
    weight_level: Literal["token", "sequence", "geometric"] = field(
        "token", "Level of the importance weight: per token; the product over the sequence, which underflows on long answers; or the"
        " geometric mean over the sequence.")
    weight_low: float = field(0.0, "Smallest importance weight that is trusted.", ge=0)
    weight_high: float = field(5.0, "Largest importance weight that is trusted.", gt=0)
    filters: tuple[FilterConfig, ...] = field(
        (), "Tables {metric, level, aggregate, low, high}, each a rule that removes tokens or sequences from the loss.")

    objective: str = field(
        "ppo", f"Formula of a token's loss (`offbeat docs algorithms`): {', '.join(_OBJECTIVES)}, or a function of your own as"
        " 'path/to/file.py:function'.", on_resume=Change.CODE)
    objective_reads: tuple[Literal["reference", "entropy"], ...] = field(
        (), "Further inputs of a custom objective besides ratio and advantages, each of which costs time: log-probabilities under the"
        " reference policy, or the entropy of each token's distribution.")
    clip_low: float = field(0.2, "Lower bound of the ratio to the anchor: 1 - clip_low; 1 is none.", ge=0, le=1)
    clip_high: float = field(0.2, "Upper bound of the ratio to the anchor: 1 + clip_high.", ge=0)
    dual_clip: float = field(
        0.0,
        "Bound on the loss of tokens with negative advantage, as a multiple of |advantage| (arXiv:1912.09729); 0 is off, else > 1.", ge=0)
    constants: dict[str, float | str] = field(
        {}, "Further constants of the objective, by name; those left out keep their defaults. Custom objectives receive all of them.")
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length", "prompt_mean"] = field(
        "token_mean", "How token losses are aggregated: mean over all tokens; mean over sequences of their token means, or of their token"
        " sums; token sums divided by max_new_tokens; or mean over prompts of their token means.")

    float32_head: bool = field(
        False, "Multiply by the output head in float32 where train.precision is bf16_mixed, as in ScaleRL: log-probabilities are then less"
        " coarse and closer to an engine's whose head is float32. It copies the head's weight in each pass.")

    kl_loss: Literal["none", "k2", "k3", "ratio_k3"] = field(
        "none", "Estimate of the divergence from the reference policy that is added to the loss; ratio_k3 alone has the right gradient"
        " off-policy.")
    kl_coefficient: float = field(1e-3, "Coefficient of kl_loss; with kl_target, its initial value.", gt=0)
    reward_kl: float = field(
        0.0, "Coefficient of log(policy / reference), subtracted from the reward at each generated token; 0 is off.", ge=0)
    kl_target: float = field(
        0.0, "Divergence per token from the reference, in nats, towards which kl_coefficient and reward_kl are adapted after each step"
        " (arXiv:1909.08593); 0 keeps them.", ge=0)
    kl_horizon: float = field(
        10.0, "Training steps over which an adapted factor changes by the relative error of the divergence, which is limited to 20 %; 10"
        " is the paper's rate of 0.1.", ge=1)
    entropy_coefficient: float = field(
        0.0, "Coefficient of the entropy bonus, which keeps answers varied; 0 is off. With entropy_target, its initial value.", ge=0)
    entropy_target: float = field(
        0.0, "Mean entropy in nats below which the bonus acts, and above which it is off; after each step entropy_coefficient is raised or"
        " lowered towards it (arXiv:2505.22312: 0.2); 0 keeps the coefficient.", ge=0)
    entropy_step: float = field(0.005, "Step by which entropy_target changes the coefficient after each training step.", gt=0)
    cov_control: Literal["none", "clip", "kl"] = field(
        "none", "Entropy control (arXiv:2505.22617) for tokens whose log-probability and advantage have high covariance: clip removes a few"
        " of them from the loss; kl keeps the highest close to the proximal policy.")
    cov_share: float = field(
        2e-4, "Share of the batch's trained tokens that cov_control chooses, at least one token; the paper has 2e-4 for clip, 2e-4 to 2e-3"
        " for kl.", gt=0, le=1)
    cov_low: float = field(1.0, "With cov_control = \"clip\": tokens of a covariance above this may be chosen.")
    cov_high: float = field(5.0, "With cov_control = \"clip\": tokens of a covariance below this may be chosen.")
    cov_coefficient: float = field(1.0, "With cov_control = \"kl\": factor of |log(policy / proximal)| of the chosen tokens.", gt=0)
    drift_coefficient: float = field(
        0.0, "Coefficient of the squared change of log-probabilities since sampling, added to the loss; 0 is off.", ge=0)
    imitation_coefficient: float = field(
        0.0, "Coefficient of the cross-entropy of answers above imitate_above, added to the loss (VAPO: 0.1); 0 is off.", ge=0)
    reference: Literal["initial"] = field("initial", "Policy that kl_loss and reward_kl compare with: the model that the run began with.")
    reference_refresh_steps: int = field(0, "Steps after which the reference is replaced by the current policy; 0 never replaces it.", ge=0)

    teacher: Literal["none", "model", "policy", "reference"] = field(
        "none", "Teacher of the policy, besides rewards: none; the model in [teacher]; or the current or the reference policy with the"
        " answer in its context.")
    teacher_credit: Literal["alone", "added"] = field(
        "alone", "Whether log(teacher / policy) is a token's advantage instead of the task's, or is added to it.")
    teacher_coefficient: float = field(1.0, "Factor of log(teacher / policy) in the advantage.", gt=0)

    drop_zero_advantage: bool = field(
        True, "Leave out sequences whose advantage is exactly 0; they have no gradient but keep their share of the denominators. Off by"
        " default with a critic or a teacher, and where kl_loss, reward_kl, entropy, drift, imitation or cov_control act on all tokens.")
    num_minibatches: int = field(1, "Optimizer steps per batch; more than one recomputes proximal log-probabilities first.", ge=1)

    @property
    def has_own_objective(self) -> bool:
        """Whether the objective is a function of the user's own."""
        return is_own(self.objective)

    @property
    def loss_reads_reference(self) -> bool:
        """Whether the loss reads log-probabilities under the reference policy."""
        return self.kl_loss != "none" or "reference" in self.objective_reads

    @property
    def compares_reference(self) -> bool:
        """Whether a step needs log-probabilities of its samples under the reference policy."""
        return self.loss_reads_reference or self.reward_kl > 0

    @property
    def needs_critic(self) -> bool:
        """Whether a value model is trained beside the policy, whose values are the baseline."""
        return self.centre == "critic"

    @property
    def learns_from_differences(self) -> bool:
        """Whether nothing is learnt from a group whose samples all have the same reward."""
        baseline = self.centre not in ("critic", "none") and not self.credit and not self.has_penalties
        imitates = objective_of(self.objective).imitates or self.imitation_coefficient > 0
        return baseline and not imitates and not self.needs_teacher

    @property
    def needs_reference(self) -> bool:
        """Whether there is a reference policy."""
        return self.compares_reference or self.teacher == "reference"

    @property
    def needs_teacher(self) -> bool:
        """Whether a step needs log-probabilities under a teacher."""
        return self.teacher != "none"

    @property
    def teaches_itself(self) -> bool:
        """Whether the teacher is the policy, or the reference policy, with the answer in its context."""
        return self.teacher in ("policy", "reference")

    @property
    def needs_scores(self) -> bool:
        """Whether a batch is scored by forward passes of their own before it is trained on."""
        return self.compares_reference or self.compares_targets or self.needs_critic or self.needs_teacher

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss needs the entropy of each token's distribution."""
        return self.entropy_coefficient > 0 or self.entropy_target > 0 or "entropy" in self.objective_reads

    @property
    def needs_prox_pass(self) -> bool:
        """Whether log-probabilities before the first update need a forward pass of their own; else they come with the update's own."""
        ratio = self.anchor == "prox" and (objective_of(self.objective).uses_anchor or self.kl_loss == "ratio_k3")
        filtered = any("prox_logprobs" in FILTERS[rule.metric] for rule in self.filters)
        return self.compares_targets or (self.num_minibatches > 1 and (ratio or self.weight != "none" or filtered))

    @property
    def ratio_is_one(self) -> bool:
        """Whether no clip can act, because each step has one update, whose ratio to the policy at the start of the step is 1."""
        return self.anchor == "prox" and self.num_minibatches == 1 and objective_of(self.objective).uses_anchor

    @property
    def compares_targets(self) -> bool:
        """Whether targets are chosen by comparing all of a batch with each other, before its first update."""
        return self.cov_control != "none" or any("m2_mask" in FILTERS[rule.metric] for rule in self.filters)

    @property
    def has_penalties(self) -> bool:
        """Whether the length of an answer, or calls in it that cannot be read, lower its reward."""
        overlong = self.overlong_buffer_share > 0 and self.overlong_penalty > 0
        return self.length_penalty > 0 or self.malformed_penalty > 0 or overlong

    @property
    def terms_on_all_tokens(self) -> tuple[str, ...]:
        """Settings of terms that have a gradient where the advantage is 0, as far as they are on."""
        return _terms_on_all_tokens(self.model_dump())

    @property
    def batch_statistics(self) -> tuple[str, ...]:
        """Settings that compute statistics over the rewards of the whole batch, as far as they are on."""
        return tuple(name for name in ("scale", "whiten") if getattr(self, name) in BATCH_STATISTICS)

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, name: str) -> str:
        if not is_own(name) and name not in _OBJECTIVES:
            near = get_close_matches(name, _OBJECTIVES, n=1)
            raise ValueError(
                f"there is no objective {name!r}; use one of {', '.join(_OBJECTIVES)}, or 'path/to/file.py:function'"
                + (f"; did you mean {near[0]!r}?" if near else ""))
        return name

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = _renamed(values)
        name = given.get("preset", "grpo")
        preset = PRESETS[name].settings if isinstance(name, str) and name in PRESETS else {}
        filled = {**preset, **given}
        if isinstance(constants := given.get("constants"), dict):
            filled["constants"] = preset.get("constants", {}) | constants  # a dumped configuration without constants has no such table
        if _terms_on_all_tokens(filled) or filled.get("centre") == "critic":
            filled.setdefault("drop_zero_advantage", False)
        return filled


def _terms_on_all_tokens(values: Mapping[str, Any]) -> tuple[str, ...]:
    off = {
        "kl_loss": "none", "reward_kl": 0, "entropy_coefficient": 0, "entropy_target": 0, "drift_coefficient": 0,
        "imitation_coefficient": 0, "cov_control": "none", "teacher": "none"}
    return tuple(name for name, nothing in off.items() if values.get(name, nothing) != nothing)


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings by today's names; the files of earlier runs have `scale_by_std`, `behave_weight` and `behave_cap`."""
    new = {name: value for name, value in values.items() if name not in _OLD_NAMES}
    if (by_std := values.get("scale_by_std")) is not None:
        new.setdefault("scale", ("group_std" if by_std else "none") if isinstance(by_std, bool) else by_std)
    for old, name in (("behave_weight", "weight"), ("behave_cap", "weight_high")):
        if old in values:
            new.setdefault(name, values[old])
    return new
