"""`offbeat reward-model`: trains a reward model on pairs of answers."""

import argparse

from offbeat.cli.common import add_training_command

_EXAMPLES = """\
examples:
  offbeat reward-model --model Qwen/Qwen3-0.6B --data pairs.jsonl --name rewards
  offbeat train --model Qwen/Qwen3-0.6B --data rows.jsonl --reward model:runs/rewards/export
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `reward-model` to the parser."""
    add_training_command(
        subparsers, "reward-model", "run_reward_model",
        description="Trains a reward model on chosen and rejected answers; the result, in the run's folder export, is a Hugging Face folder"
        " for sequence classification.", examples=_EXAMPLES, data="pairs of answers: a file, a folder or a hub id")
