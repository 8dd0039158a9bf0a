"""[algorithm]: the objective. A preset fills in the fields that are not given."""

from typing import Any, Literal

from pydantic import model_validator

from offbeat.config.base import Section, field

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"scale_by_std": True, "loss_aggregation": "token_mean"},
    "dr_grpo": {"scale_by_std": False, "loss_aggregation": "fixed_length"},
}


class AlgorithmConfig(Section):
    """Decoupled PPO-clip with group-relative advantages."""

    preset: Literal["grpo", "dr_grpo"] = field(
        "grpo", "Named set of defaults for this section: GRPO (arXiv:2402.03300) or Dr. GRPO (arXiv:2503.20783).")
    scale_by_std: bool = field(True, "Divide group-centred rewards by the group's standard deviation.")
    loss_aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = field(
        "token_mean", "How token losses become one number: mean over all tokens; mean over sequences of their "
        "token means; or sum over max_new_tokens per sequence.")
    clip_low: float = field(0.2, "Lower clip of the ratio to the proximal policy: 1 - clip_low.", ge=0, lt=1)
    clip_high: float = field(0.2, "Upper clip of the ratio to the proximal policy: 1 + clip_high.", ge=0)
    dual_clip: float = field(
        0.0,
        "Bound on the loss of tokens with negative advantage, as a multiple of |advantage| (arXiv:1912.09729); 0 is "
        "off, else > 1.", ge=0)
    behave_weight: Literal["none", "mask", "clamp"] = field(
        "mask", "Use of the ratio of proximal to behaviour policy: ignore it, drop tokens above behave_cap, or clamp it to behave_cap.")
    behave_cap: float = field(5.0, "Largest ratio of proximal to behaviour policy that is trusted.", gt=0)
    drop_zero_advantage: bool = field(
        True, "Leave out sequences whose advantage is exactly 0; they have no gradient but keep their share of the denominators.")
    num_minibatches: int = field(1, "Optimizer steps per batch; more than one recomputes proximal log-probabilities first.", ge=1)

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        preset = values.get("preset", "grpo") if isinstance(values, dict) else None
        if isinstance(preset, str):
            return PRESETS.get(preset, {}) | values
        return values
