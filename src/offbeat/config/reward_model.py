"""[reward_model]: training a reward model on pairs of answers, `offbeat reward-model`."""

from offbeat.config.base import Change, Section, field
from offbeat.config.train import OptimizerConfig
from offbeat.config.training_kinds import TrainingKind

_EXAMPLES = """\
examples:
  offbeat reward-model --model Qwen/Qwen3-0.6B --data pairs.jsonl --name rewards
  offbeat train --model Qwen/Qwen3-0.6B --data rows.jsonl --reward model:runs/rewards/export
"""


class RewardModelConfig(Section):
    """Reward models, `offbeat reward-model`: the chosen answer of each pair in [data] is to have a higher reward than the rejected one."""

    on_resume = Change.TOLD
    read_by = ("reward_model",)
    training = TrainingKind(
        command="reward-model", section="reward_model", checkpoints="reward", lesson="reward_model:RewardLesson",
        summary="train a reward model on pairs of answers",
        description="Trains a reward model on chosen and rejected answers; the result, in the run's folder export, is a Hugging Face folder"
        " for sequence classification.", examples=_EXAMPLES, data="pairs of answers: a file, a folder or a hub id", pairs=True,
        python=("Train a reward model on chosen and rejected answers", """\
pairs = [{"prompt": "7+5=", "chosen": "12", "rejected": "13"}]
judge = offbeat.reward_model(model="models/small", data=pairs, name="judge", total_steps=20)
run = offbeat.train(model="models/small", data="addition", reward=f"model:{judge.model}")
"""),
        word="reward model", method="learning a reward from pairs of answers", metrics=("reward_model",), rates="reward_model")

    centring: float = field(
        0.01, "Weight of the squared sum of a pair's rewards in the loss, which keeps rewards around 0; with 0, only differences of rewards"
        " are meaningful.", ge=0)
    total_steps: int = field(200, "Optimizer steps.", ge=1, basic=True)
    batch_size: int = field(64, "Pairs per step.", ge=1, basic=True)
    optimizer: OptimizerConfig = field(OptimizerConfig(warmup_steps=10), "AdamW and its schedule.")
    evaluate_every_steps: int = field(
        0, "Steps between evaluations on held-out pairs; 0 evaluates only at the end.", ge=0, on_resume=Change.FREE)
