"""`offbeat sft CONFIG`: supervised fine-tuning on a dataset's answers."""

import argparse

from offbeat.cli.common import add_training_command

_EXAMPLES = """\
examples:
  offbeat sft examples/sort_digits.toml --run.name sorting-sft --sft.total_steps 60 --sft.evaluate_every_steps 10
  offbeat train examples/sort_digits.toml --model.path runs/sorting-sft/export --run.warm_up false
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `sft` to the parser."""
    add_training_command(
        subparsers, "sft", "run_supervised",
        description="Supervised fine-tuning; the result is in the run's folder export.", examples=_EXAMPLES)
