"""`offbeat train`: reinforcement learning, from a configuration file or named options."""

import argparse

from offbeat.cli.common import add_training_command

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


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `train` to the parser."""
    add_training_command(
        subparsers, "train", "run_training",
        description="Train a model with asynchronous reinforcement learning; algorithm.preset chooses how.", examples=_EXAMPLES,
        data="rows with prompts and answers: a file, a folder, a hub id or a built-in task", rewards=True)
