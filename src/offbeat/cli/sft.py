"""`offbeat sft`: supervised fine-tuning on a dataset's answers."""

import argparse

from offbeat.cli.common import add_training_command

_EXAMPLES = """\
examples:
  offbeat sft --model HuggingFaceTB/SmolLM2-135M-Instruct --data rows.jsonl --name imitation
  offbeat sft task.toml --sft.total_steps 60 --sft.evaluate_every_steps 10
  offbeat train task.toml --model runs/imitation/export

where rows.jsonl has lines such as {"prompt": "2+2=", "answer": "4"}, or {"messages": [...]} with whole chats.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `sft` to the parser."""
    add_training_command(
        subparsers, "sft", "run_supervised",
        description="Supervised fine-tuning; the result is in the run's folder export.", examples=_EXAMPLES,
        data="rows with answers to imitate: a file, a folder, a hub id or a built-in task")
