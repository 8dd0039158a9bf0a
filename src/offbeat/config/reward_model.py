"""[reward_model]: training a reward model on pairs of answers, `offbeat reward-model`."""

from offbeat.config.base import Change, Section, field
from offbeat.config.train import OptimizerConfig


class RewardModelConfig(Section):
    """Reward models, `offbeat reward-model`: the chosen answer of each pair in [data] is to have a higher reward than the rejected one."""

    on_resume = Change.TOLD
    read_by = ("reward_model",)

    centring: float = field(
        0.01, "Weight of the squared sum of a pair's rewards in the loss, which keeps rewards around 0; with 0, only differences of rewards"
        " are meaningful.", ge=0)
    total_steps: int = field(200, "Optimizer steps.", ge=1, basic=True)
    batch_size: int = field(64, "Pairs per step.", ge=1, basic=True)
    optimizer: OptimizerConfig = field(OptimizerConfig(warmup_steps=10), "AdamW and its schedule.")
    evaluate_every_steps: int = field(
        0, "Steps between evaluations on held-out pairs; 0 evaluates only at the end.", ge=0, on_resume=Change.FREE)
