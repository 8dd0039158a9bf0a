"""`offbeat train CONFIG`: reinforcement learning according to a configuration."""

import argparse

from offbeat.cli.common import add_training_command

_EXAMPLES = """\
examples:
  offbeat train examples/sort_digits.toml
  offbeat train examples/sort_digits.toml --train.num_ranks 2 --inference.num_engines 2 --cluster.launcher ray
  torchrun --nproc-per-node 2 -m offbeat train examples/sort_digits.toml --run.mode spmd
  offbeat train run.toml --run.name second --rollout.max_head_offpolicyness 4

A run that was interrupted continues from its newest checkpoint when it is started again. Ctrl-C once finishes the step and saves.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `train` to the parser."""
    add_training_command(
        subparsers, "train", "run_training",
        description="Train a model with asynchronous reinforcement learning; algorithm.preset chooses how.", examples=_EXAMPLES)
