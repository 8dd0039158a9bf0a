"""[run]: the name of the run, how long it lasts, and where its files go."""

from typing import Literal

from offbeat.config.base import Change, Section, field
from offbeat.config.training_kinds import TrainingKind

_EXAMPLES = """\
a task of your own, without a file:
  offbeat train --model HuggingFaceTB/SmolLM2-135M-Instruct --data rows.jsonl --reward rewards.py:score

where rows.jsonl has lines such as {"prompt": "2+2=", "answer": "4"}, and rewards.py holds a function that returns 1 for what is right:
  def score(completion, row): return float(row.answer in completion)

examples:
  offbeat train task.toml
  offbeat train task.toml --name second --rollout.max_head_offpolicyness 4
  offbeat train task.toml --train.num_ranks 2 --inference.num_engines 2 --cluster.launcher ray
  torchrun --nproc-per-node 2 -m offbeat train task.toml --run.mode spmd

A run that was interrupted continues from its newest checkpoint when it is started again. Ctrl-C once finishes the step and saves.
"""


class RunConfig(Section):
    """The run as a whole."""

    on_resume = Change.FREE
    training = TrainingKind(
        command="train", section="run", checkpoints="step", lesson="", summary="train with reinforcement learning",
        description="Train a model with asynchronous reinforcement learning; algorithm.preset chooses how.", examples=_EXAMPLES,
        data="rows with prompts and answers: a file, a folder, a hub id or a built-in task", method="reinforcement learning",
        named_by="algorithm.preset", metrics=("reward", "policy"), rates="rl")

    name: str = field("run", "Folder name of the run below `dir`.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", basic=True)
    dir: str = field("runs", "Folder that holds all runs.")
    mode: Literal["controller", "spmd"] = field(
        "controller", "What runs the training loop: one controller process, which starts the ranks and uses no device itself, or every rank"
        " started by torchrun.")
    seed: int = field(0, "Seed of weights, data order and sampling.", ge=0, le=2**32 - 1, on_resume=Change.REFUSED)
    total_steps: int = field(
        100, "Optimizer steps to train; the learning-rate schedule spans them.", ge=1, on_resume=Change.TOLD, read_by=("rl",), basic=True)
    warm_up: bool = field(
        False, "Begin with supervised fine-tuning, configured in [sft]; a model with random weights earns no reward to learn from.")
    private: bool = field(
        True, "Make everything that the command writes readable by this user only; false leaves permissions to the umask, for example where"
        " engines of another user read published weights.")
    resume: bool = field(
        True, "Resume from the newest checkpoint of this run, if there is one; false refuses to overwrite an existing run.")
