"""[preference]: training on pairs of answers, `offbeat dpo`."""

from typing import Literal

from offbeat.config.base import Section, field
from offbeat.config.train import OptimizerConfig

USUAL_BETA = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "kto": 0.1}
"""beta of each loss where none is given."""
USUAL_GAMMA = 0.5


class PreferenceConfig(Section):
    """Preference training, `offbeat dpo`: the chosen answer of each pair in [data] is to become likelier than the rejected one."""

    loss: Literal["dpo", "ipo", "simpo", "kto"] = field(
        "dpo", "DPO; IPO, which stops at a distance and suits clear preferences; SimPO, which needs no reference; or KTO, which also learns"
        " from single answers with a label.")
    beta: float = field(
        0.0, "Strength with which the policy is kept close to the reference (SimPO: steepness of the loss); 0 takes the default of the"
        " loss: 0.1, or 2 for simpo.", ge=0)
    label_smoothing: float = field(0.0, "Assumed share of pairs with swapped labels; dpo only.", ge=0, lt=0.5)
    gamma: float = field(USUAL_GAMMA, "Margin by which the chosen answer should lead; simpo only.", ge=0)
    total_steps: int = field(200, "Optimizer steps.", ge=1)
    batch_size: int = field(32, "Pairs per step; rows of any kind for kto.", ge=1)
    optimizer: OptimizerConfig = field(
        OptimizerConfig(lr=5e-7, warmup_steps=10), "AdamW and its schedule; an adapter needs about ten times the rate of a whole model.")
    evaluate_every_steps: int = field(0, "Steps between evaluations on held-out pairs; 0 evaluates only at the end.", ge=0)
